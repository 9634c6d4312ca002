"""Tests of `neobert encode`: the output, additions to an output, refused settings, and shards."""

import datetime
import decimal
import json
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pandas
import pyarrow
import pyarrow.parquet
from helpers.encode_runs import (
    bits,
    embed,
    make_corpus,  # noqa: F401
    make_encoder,  # noqa: F401
    make_model_folder,  # noqa: F401
    make_reference,  # noqa: F401
    read_parquet,
    texts_of_many_lengths,
    truncation_of,
)
from helpers.jsonl import write_jsonl
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from neobert import NeoBERTModel
from neobert.common import loading
from neobert.common.errors import UserError
from neobert.common.folders import locked
from neobert.common.identity import model_digest
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.encoding import command
from neobert.encoding.command import Shard, main
from neobert.encoding.folder import Folder
from neobert.encoding.options import OPTIONS


# ------------------------------------------------------------------------------------------------
# output


def test_output_directory_is_read_as_one_table(corpus, model_folder, reference, encoder, tmp_path):
    """Parquet readers read the directory as one table, whose embeddings are in the input order."""
    import datasets

    out = tmp_path / "out"
    texts = texts_of_many_lengths(70)
    summary = embed(corpus, out, model_folder, encoder, rows=16)
    assert sorted(bits(out)) == ["_metadata.json", *(f"corpus-{i:05d}.parquet" for i in range(5))]

    table, embeddings = read_parquet(out)
    expected = reference.encode(texts)
    np.testing.assert_allclose(embeddings, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)

    assert table.column_names == ["id", "embedding"]
    assert table["id"].to_pylist() == [f"row-{i}" for i in range(70)]

    assert pandas.read_parquet(out)["id"].tolist() == table["id"].to_pylist()
    rows = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["id"][:] == table["id"].to_pylist() and np.array_equal(
        rows["embedding"], embeddings
    )

    assert summary.missing == [] and summary.texts == summary.embeddings == 70
    assert (
        asdict(summary.truncation) == truncation_of(model_folder, texts)
        and summary.truncation.texts > 5
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_embedding_bits_do_not_depend_on_part_shard_or_batch(model_folder, tmp_path, dtype):
    """The embedding of a text does not depend on the part, shard, order or batch of the text."""
    rows = [{"id": str(i), "text": text} for i, text in enumerate(texts_of_many_lengths(60))]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "b.jsonl", rows[::-1])

    # {id: bytes of the embedding} of each run.
    outputs = []
    for name, options in (
        ("a", {"rows": 7}),
        ("b", {"rows": 60, "batch_tokens": 100}),
        ("a", {"rows": 9, "shard": "1/2"}),
    ):
        out = tmp_path / f"out-{len(outputs)}"
        embed(tmp_path / f"{name}.jsonl", out, model_folder, dtype=dtype, **options)
        table, embeddings = read_parquet(out)
        outputs.append(
            {
                key: embedding.tobytes()
                for key, embedding in zip(table["id"].to_pylist(), embeddings)
            }
        )

    assert outputs[0] == outputs[1] and len(outputs[0]) == 60
    assert outputs[2].items() <= outputs[0].items() and 20 < len(outputs[2]) < 40


def test_copied_columns_and_normalized_float16_embeddings(model_folder, reference, tmp_path):
    """Check copied columns of several types, and normalized float16 embeddings with a prompt."""
    texts = texts_of_many_lengths(20)
    columns = {
        "text": pyarrow.array(texts, pyarrow.large_string()),
        "id": pyarrow.array([None, *range(19)], pyarrow.uint8()),
        "when": pyarrow.array(range(20), pyarrow.timestamp("ns")),
        "tags": pyarrow.array([["x"], None] * 10),
        "kind": pyarrow.array(["x", "y"] * 10).dictionary_encode(),
    }
    source = tmp_path / "corpus.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), source, row_group_size=6)

    options = ["--keep", "id,when,tags,kind,text", "--normalize", "--output-dtype", "float16"]
    options += ["--model", str(model_folder), "--prompt", "find: ", "--dtype", "float32"]
    assert main([str(source), str(tmp_path / "out.parquet"), "--rows", "8", *options]) == 0

    table, embeddings = read_parquet(tmp_path / "out.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float16(), 64)

    for name, values in columns.items():
        assert table.schema.field(name).type == values.type
        assert table[name].to_pylist() == values.to_pylist()

    expected = reference.encode(texts, prompt="find: ", normalize_embeddings=True)
    np.testing.assert_allclose(embeddings, expected, atol=2e-3)


@pytest.mark.parametrize("output_dtype", ["float32", "int8", "binary"])
@pytest.mark.parametrize("dims", [None, 20])
def test_truncated_and_quantized_embeddings(
    corpus, model_folder, reference, tmp_path, output_dtype, dims
):
    """Truncated and quantized embeddings equal those of sentence-transformers.

    Truncated embeddings are normalized again. The ranges of int8 are those of the first embeddings,
    and all parts have the same ranges.
    """
    model = SentenceTransformer(modules=[*reference.children(), Normalize()], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    options = {"output_dtype": output_dtype, "truncate_dim": dims, "rows": 16}
    embed(corpus, tmp_path / "out", tmp_path / "model", **options)

    metadata = json.loads((tmp_path / "out" / "_metadata.json").read_text())
    table, embeddings = read_parquet(tmp_path / "out")
    expected = model.encode(texts_of_many_lengths(70), truncate_dim=dims, normalize_embeddings=True)

    dimension = dims or 64
    assert metadata["dimension"] == dimension and metadata["output_dtype"] == output_dtype
    value_type = pyarrow.float32() if output_dtype == "float32" else pyarrow.int8()
    size = -(-dimension // 8) if output_dtype == "binary" else dimension
    assert table.schema.field("embedding").type == pyarrow.list_(value_type, size)

    if output_dtype == "float32":
        np.testing.assert_allclose(embeddings, expected, atol=1e-5)
    elif output_dtype == "binary":
        binary_codes = np.unpackbits((embeddings + 128).astype(np.uint8), axis=1)[:, :dimension]
        # Values close to 0 may be rounded to either bit.
        has_clear_sign = np.abs(expected) > 1e-5
        assert (
            np.array_equal(binary_codes[has_clear_sign], (expected > 0)[has_clear_sign])
            and has_clear_sign.mean() > 0.99
        )
    else:
        low, high = np.array(metadata["ranges"])
        np.testing.assert_allclose((low, high), (expected.min(0), expected.max(0)), atol=1e-5)
        # A code stands for the middle of its step.
        step = (high - low) / 255
        assert np.abs(low + (embeddings + 128.5) * step - expected).max() < 0.51 * step.max() + 1e-5


def test_int8_ranges_come_from_the_first_texts(model_folder, encoder, tmp_path):
    """The ranges are those of the first 1,000 texts of the input, in every shard.

    Texts that are added later do not change them.
    """
    source = tmp_path / "corpus"
    texts = texts_of_many_lengths(1100)
    write_jsonl(source / "b.jsonl", [{"text": text} for text in texts[:900]])
    write_jsonl(source / "c.jsonl", [{"text": text} for text in texts[900:]])

    metadata = []
    for shard in ("0/2", "1/2"):
        out = tmp_path / shard.replace("/", "-")
        embed(source, out, model_folder, encoder, output_dtype="int8", shard=shard)
        metadata.append((out / "_metadata.json").read_bytes())
    assert metadata[0] == metadata[1]

    first_embeddings = encoder.encode(texts[:1000])
    ranges = json.loads(metadata[0])["ranges"]
    np.testing.assert_array_equal(
        np.float32(ranges), (first_embeddings.min(0), first_embeddings.max(0))
    )

    write_jsonl(source / "a.jsonl", [{"text": "new"}])
    embed(source, tmp_path / "0-2", model_folder, encoder, output_dtype="int8")
    assert (tmp_path / "0-2" / "_metadata.json").read_bytes() == metadata[0]


def test_a_json_column_of_several_types_is_copied_as_text(model_folder, encoder, tmp_path):
    values = ["a-1", None, 1180591620717411303424, 0.5, {"page": 1}, True, "\u00e9"]
    source = write_jsonl(tmp_path / "a.jsonl", [{"id": id, "text": "a"} for id in values])
    embed(source, tmp_path / "out", model_folder, encoder, rows=2)
    ids = read_parquet(tmp_path / "out")[0]["id"]
    assert ids.type == pyarrow.string()
    others = ["1180591620717411303424", "0.5", '{"page": 1}', "true"]
    assert ids.to_pylist() == ["a-1", None, *others, "\u00e9"]


def test_lone_surrogates_of_copied_columns_are_replaced(model_folder, encoder, tmp_path):
    """A copied string contains U+FFFD instead of a lone surrogate, as the text does."""
    (tmp_path / "a.jsonl").write_text('{"id": "cut \\ud83d", "text": "cut \\ud83d"}\n')
    embed(tmp_path / "a.jsonl", tmp_path / "out", model_folder, encoder, keep=["id,text"])
    table, _ = read_parquet(tmp_path / "out")
    assert table["id"].to_pylist() == table["text"].to_pylist() == ["cut \ufffd"]


def test_parquet_values_as_text(model_folder, encoder, tmp_path):
    """Dates, decimals and bytes that are copied as text have no quotes; lists are JSON."""
    day = datetime.date(2024, 1, 2)
    columns = {
        "day": (day, "2024-01-02"),
        "time": (datetime.datetime(2024, 1, 2, 5), "2024-01-02 05:00:00"),
        "price": (decimal.Decimal("1.20"), "1.20"),
        "bytes": ("é".encode(), "é"),
        "list": ([day], '["2024-01-02"]'),
        "flag": (True, "true"),
        "number": (1.5, "1.5"),
    }
    values = {"text": ["a"], **{name: [value] for name, (value, _) in columns.items()}}
    pyarrow.parquet.write_table(pyarrow.table(values), tmp_path / "a.parquet")
    keep = [f"{name}:text" for name in columns]
    embed(tmp_path / "a.parquet", tmp_path / "out", model_folder, encoder, keep=keep)
    (row,) = read_parquet(tmp_path / "out")[0].drop_columns("embedding").to_pylist()
    assert row == {name: text for name, (_, text) in columns.items()}


def test_bytes_that_are_no_text_are_refused(model_folder, encoder, tmp_path):
    """Bytes that are not UTF-8 cannot be copied as text. The error does not suggest :text."""
    table = pyarrow.table({"text": ["a"], "id": [b"\xff"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"'id' must have the type string .*Omit id from --keep"):
        embed(tmp_path / "a.parquet", tmp_path / "out", model_folder, encoder, keep=["id:text"])


def test_string_views_are_copied(model_folder, encoder, tmp_path):
    """Columns of views, which other libraries write, are copied as strings and bytes."""
    # Earlier versions of pyarrow cannot write this type to a parquet file.
    pytest.importorskip("pyarrow", minversion="22")
    columns = {
        "id": pyarrow.array(["x", None], pyarrow.string_view()),
        "bytes": pyarrow.array([b"\xff", None], pyarrow.binary_view()),
        "list": pyarrow.array([["x", None], []], pyarrow.list_(pyarrow.string_view())),
        "large_list": pyarrow.array([["x"], None], pyarrow.large_list(pyarrow.string_view())),
        "struct": pyarrow.array(
            [{"a": ["x"], "b": 1}, None],
            pyarrow.struct([("a", pyarrow.list_(pyarrow.string_view())), ("b", pyarrow.int8())]),
        ),
    }
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a", "b"], **columns}), tmp_path / "a.parquet"
    )
    embed(tmp_path / "a.parquet", tmp_path / "out", model_folder, encoder, keep=list(columns))
    table, _ = read_parquet(tmp_path / "out")
    assert {name: table[name].to_pylist() for name in columns} == {
        name: values.to_pylist() for name, values in columns.items()
    }


# (values of a column, type of the output, values of the output).
COLUMNS = [
    ([7, None, -2, 2**60], pyarrow.int64(), [7, None, -2, 2**60]),
    ([0.5, 3, None, 1.0], pyarrow.float64(), [0.5, 3.0, None, 1.0]),
    ([True, None, False, True], pyarrow.bool_(), [True, None, False, True]),
    # float64 cannot represent 2^53 + 1.
    ([0.5, 2**53 + 1, None, 1], pyarrow.string(), ["0.5", str(2**53 + 1), None, "1"]),
    ([None] * 4, pyarrow.string(), [None] * 4),
]
CELLS = [
    ("7 -2 0 12", pyarrow.int64(), [7, -2, 0, 12]),
    # An integer would lose the zeros and the sign.
    ("007 1 2 3", pyarrow.string(), ["007", "1", "2", "3"]),
    ("+7 1 2 3", pyarrow.string(), ["+7", "1", "2", "3"]),
    ("0.5 1 2 3", pyarrow.string(), ["0.5", "1", "2", "3"]),
]


@pytest.mark.parametrize(("values", "kind", "expected"), COLUMNS)
def test_types_of_json_columns(model_folder, encoder, tmp_path, values, kind, expected):
    """All parts have the type of the column, also a part whose values have another type."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"id": value, "text": "a"} for value in values])
    embed(source, tmp_path / "out", model_folder, encoder, rows=1)
    ids = read_parquet(tmp_path / "out")[0]["id"]
    assert ids.type == kind
    assert ids.to_pylist() == expected


@pytest.mark.parametrize(("values", "kind", "expected"), CELLS)
def test_types_of_csv_columns(model_folder, encoder, tmp_path, values, kind, expected):
    """A CSV column has integers if all cells are plain integers, and is text otherwise."""
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{id},5\n" for id in values.split()))
    embed(tmp_path / "a.csv", tmp_path / "out", model_folder, encoder, keep=["id,text"])
    table = read_parquet(tmp_path / "out")[0]
    assert table["id"].type == kind
    assert table["id"].to_pylist() == expected
    assert table["text"].to_pylist() == ["5"] * 4


def test_the_output_merges_with_its_source(model_folder, encoder, tmp_path):
    """The ids of the output have the type that pandas infers for those of the input."""
    source = pandas.DataFrame({"id": [30, 10, 20], "text": ["a", "b", "c"], "n": [1, 2, 3]})
    source.to_csv(tmp_path / "a.csv", index=False)
    embed(tmp_path / "a.csv", tmp_path / "out", model_folder, encoder)
    merged = source.merge(pandas.read_parquet(tmp_path / "out"), on="id", validate="one_to_one")
    assert merged["n"].tolist() == [1, 2, 3]
    np.testing.assert_allclose(
        np.stack(merged["embedding"]), encoder.encode(["a", "b", "c"]), atol=1e-6
    )


def test_later_file_with_other_column_type_is_refused(model_folder, encoder, tmp_path):
    """A file that is added later cannot change the type of a column. The error names a remedy."""
    write_jsonl(tmp_path / "corpus" / "a.jsonl", [{"id": 1, "text": "a"}])
    embed(tmp_path / "corpus", tmp_path / "out", model_folder, encoder)
    write_jsonl(tmp_path / "corpus" / "b.jsonl", [{"id": "x", "text": "a"}])
    with pytest.raises(
        UserError, match=r"'id' must have the type int64 .got \"x\".. Use --keep id:t"
    ):
        embed(tmp_path / "corpus", tmp_path / "out", model_folder, encoder)
    # A column that is copied as text may contain any values.
    embed(tmp_path / "corpus", tmp_path / "text", model_folder, encoder, keep=["id:text"])
    assert read_parquet(tmp_path / "text")[0]["id"].to_pylist() == ["1", "x"]


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        (pyarrow.array([1]), pyarrow.array([1.5]), "1.5"),
        (pyarrow.array([[1]]), pyarrow.array([[1.5]]), r"\[1.5\]"),
        (pyarrow.array([1.0], pyarrow.float32()), pyarrow.array([0.1]), "0.1"),
    ],
)
def test_a_parquet_value_that_would_be_changed_is_refused(
    model_folder, encoder, tmp_path, first, second, value
):
    """Values of a later parquet file with another type are never rounded."""
    (tmp_path / "corpus").mkdir()
    for name, column in (("a", first), ("b", second)):
        table = pyarrow.table({"text": ["a"], "n": column})
        pyarrow.parquet.write_table(table, tmp_path / "corpus" / f"{name}.parquet")
    with pytest.raises(UserError, match=f"'n' must have the type .*got {value}.. Use --keep n:t"):
        embed(tmp_path / "corpus", tmp_path / "out", model_folder, encoder, keep=["n"])


def test_exact_parquet_values_of_other_types_are_copied(model_folder, encoder, tmp_path):
    """Other types with the same values, and NaN, are no reason to refuse a file."""
    (tmp_path / "corpus").mkdir()
    nan = float("nan")
    columns = {
        "a": [pyarrow.array([nan, 0.5]), pyarrow.array([[nan], None])],
        "b": [pyarrow.array([nan, 2.0], pyarrow.float32()), pyarrow.array([[nan, 1.0], []])],
        "c": [pyarrow.array([3, None], pyarrow.int16()), pyarrow.array([None, [2.0]])],
    }
    for name, (numbers, lists) in columns.items():
        table = pyarrow.table({"text": ["a", "b"], "n": numbers, "m": lists})
        pyarrow.parquet.write_table(table, tmp_path / "corpus" / f"{name}.parquet")
    embed(tmp_path / "corpus", tmp_path / "out", model_folder, encoder, keep=["n,m"])
    table, _ = read_parquet(tmp_path / "out")
    assert repr(table["n"].to_pylist()) == "[nan, 0.5, nan, 2.0, 3.0, None]"
    assert repr(table["m"].to_pylist()) == "[[nan], None, [nan, 1.0], [], None, [2.0]]"


def test_manifest_contains_model_and_settings(corpus, model_folder, tmp_path):
    """The manifest and the metadata of the parts contain the model and the settings."""
    options = {"pooling": "cls", "normalize": True, "prompt": "find: ", "max_length": 20}
    options |= {"dtype": "bfloat16", "output_dtype": "float16", "rows": 40}
    embed(corpus, tmp_path / "out", model_folder, **options)

    manifest = json.loads((tmp_path / "out" / "_metadata.json").read_text())
    expected = {
        "model": model_folder.name,
        "revision": None,
        "digest": model_digest(str(model_folder)),
        "pooling": "cls",
        "normalized": True,
        "prompt": "find: ",
        "max_length": 20,
        "long_texts": "truncate",
        "dtype": "bfloat16",
        "output_dtype": "float16",
        "dimension": 64,
    }

    assert manifest.items() >= expected.items()
    part = pyarrow.parquet.read_metadata(tmp_path / "out" / "corpus-00001.parquet")
    assert json.loads(part.metadata[b"neobert_vectors"]) == manifest


def test_single_file_output_contains_all_parts(corpus, model_folder, encoder, tmp_path, capsys):
    """A single output file contains the rows of all parts, and is never changed by a second run."""
    out = tmp_path / "out.parquet"
    argv = ["--model", str(model_folder), "--dtype", "float32"]
    assert main([str(corpus), str(out), *argv, "--rows", "16"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "out.parquet"}

    embed(corpus, tmp_path / "parts", model_folder, encoder)
    assert pyarrow.parquet.read_table(out).equals(pyarrow.parquet.read_table(tmp_path / "parts"))

    # The output ends with the truncation statistics.
    counts = truncation_of(model_folder, texts_of_many_lengths(70))
    last = f"{counts['texts']} texts truncated by {counts['tokens']:,} tokens, the longest has "
    last += f"{counts['longest']} tokens; all parts are complete\n"
    assert "out.parquet: 70 texts; this run 70 texts of" in (output := capsys.readouterr().out)
    assert output.endswith(last)

    content = out.read_bytes()
    assert main([str(corpus), str(out), *argv, "--rows", "16"]) == 0
    output = capsys.readouterr().out
    assert "70 texts; nothing new to encode" in output and output.endswith(last)

    with pytest.raises(UserError, match='`pooling` must be null as in .*out.parquet, got "cls".'):
        main([str(corpus), str(out), *argv, "--rows", "16", "--pooling", "cls"])
    corpus.write_text(corpus.read_text() + '{"id": "new", "text": "new"}\n')
    with pytest.raises(UserError, match="got an earlier output of corpus.jsonl"):
        main([str(corpus), str(out), *argv, "--rows", "16"])
    with pytest.raises(UserError, match="must be a directory for several shards"):
        main([str(corpus), str(out), *argv, "--shard", "0/2"])
    assert out.read_bytes() == content


def test_two_processes_cannot_write_the_same_file(corpus, model_folder, encoder, tmp_path):
    """A second process is refused while the first one encodes, and reads what that has finished."""
    out = tmp_path / "out.parquet"
    work = tmp_path / "out.parquet.work"
    with locked(work), pytest.raises(UserError, match=f"{work} is in use by another run. Wait"):
        embed(corpus, out, model_folder, encoder)

    # The first process finishes the output between the check of the second one and its lock.
    class FinishedMeanwhile(Folder):
        def read_manifest(self):
            monkeypatch.undo()
            embed(corpus, out, model_folder, encoder)
            return super().read_manifest()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(command, "Folder", FinishedMeanwhile)
        summary = embed(corpus, out, model_folder)
    assert summary.texts == 70 and summary.encoded_texts == 0
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl", "out.parquet"}


def test_error_before_the_first_part_leaves_no_directory(corpus, model_folder, encoder, tmp_path):
    """An invalid option leaves neither a lock file nor a directory of parts."""
    with pytest.raises(UserError, match="`truncate_dim` must be at most 64"):
        embed(corpus, tmp_path / "out.parquet", model_folder, encoder, truncate_dim=65)
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl"}


@pytest.mark.parametrize("name", ["_texts.jsonl", ".texts.jsonl"])
def test_names_of_hidden_files_are_refused(model_folder, encoder, tmp_path, name):
    """A directory of embeddings has no parts that its readers would skip."""
    source = write_jsonl(tmp_path / name, [{"text": "a"}])
    message = re.escape(f"must not start with _ or . if the output is a directory, got {name}.")
    with pytest.raises(UserError, match=message):
        embed(source, tmp_path / "out", model_folder, encoder)
    embed(source, tmp_path / "out.parquet", model_folder, encoder)
    assert len(read_parquet(tmp_path / "out.parquet")[0]) == 1


# ------------------------------------------------------------------------------------------------
# additions and refused settings


def test_new_files_add_parts_and_keep_existing_ones(model_folder, encoder, tmp_path, capsys):
    """A new input file adds parts; the existing parts stay. A file that has changed is refused."""
    source = tmp_path / "corpus"
    out = tmp_path / "out"
    for name, count in (("b/one.jsonl.gz", 3), ("a.jsonl", 5)):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        frame = pandas.DataFrame({"id": [f"{name} {i}" for i in range(count)], "text": "a cat"})
        frame.to_json(source / name, orient="records", lines=True)
        embed(source, out, model_folder, encoder, rows=2)

    before = bits(out)
    assert sorted(before)[1:] == [
        f"{n}-0000{i}.parquet" for n, k in (("a", 3), ("b-one", 2)) for i in range(k)
    ]  # noqa: E501

    # Spark writes empty files of these forms. The model is loaded again, which changes nothing.
    (source / "c.jsonl").write_text("")
    (source / "_SUCCESS.txt").write_text("")
    summary = embed(source, out, model_folder, rows=2)
    assert (summary.texts, summary.encoded_texts, summary.missing) == (8, 0, [])
    assert bits(out).items() > before.items() and read_parquet(out)[0].num_rows == 8

    with open(source / "a.jsonl", "a") as file:
        file.write('{"id": "x", "text": "x"}\n')
    size = (source / "a.jsonl").stat().st_size
    message = f"a.jsonl has {size} bytes, but a.jsonl had 170 when"
    with pytest.raises(UserError, match=message):
        embed(source, out, model_folder, encoder, rows=2)


def test_complete_output_does_not_load_the_model(corpus, model_folder, tmp_path, monkeypatch):
    """A complete output needs no encoder, also if the directory of the model has been moved."""
    embed(corpus, tmp_path / "out", model_folder)
    moved_model = shutil.copytree(model_folder, tmp_path / "the same model elsewhere")
    monkeypatch.setattr(PackedEncoder, "__init__", None)
    assert embed(corpus, tmp_path / "out", moved_model).missing == []


# Settings that change the output, with values that differ from those of the first run.
CHANGES = {
    "text_column": "id",
    "keep": ["n"],
    "prompt_name": "query",
    "prompt": "q: ",
    "pooling": "cls",
    "max_length": 16,
    "long_texts": "windows",
    "normalize": True,
    "dtype": "bfloat16",
    "output_dtype": "float16",
    "truncate_dim": 32,
    "rows": 5,
}


def test_changed_settings_are_refused_with_both_values(corpus, model_folder, encoder, tmp_path):
    """A run with other settings is refused; the error names the setting and both values."""
    embed(corpus, tmp_path / "out", model_folder, encoder)
    before = bits(tmp_path)

    values = {name: field.default for name, field in OPTIONS["encode"].fields.items()}
    values["dtype"] = "float32"
    for name, value in CHANGES.items():
        expected = f"`{name}` must be {json.dumps(values[name])} as in .*out, got "
        with pytest.raises(UserError, match=expected + re.escape(f"{json.dumps(value)}. Use")):
            embed(corpus, tmp_path / "out", model_folder, encoder, **{name: value})

    # These options do not affect the embeddings.
    allowed = {"device": "cpu", "batch_tokens": 9, "shard": "0/3", "trust_remote_code": True}
    assert embed(corpus, tmp_path / "out", model_folder, encoder, **allowed).missing == []
    assert bits(tmp_path) == before

    model = NeoBERTModel.from_pretrained(shutil.copytree(model_folder, tmp_path / "model"))
    torch.nn.init.normal_(model.layer_norm.weight)
    model.save_pretrained(tmp_path / "model")
    digests = [model_digest(str(folder)) for folder in (model_folder, tmp_path / "model")]
    with pytest.raises(
        UserError, match=f'`model` must be "{digests[0]}" as in .*, got "{digests[1]}"'
    ):
        embed(corpus, tmp_path / "out", tmp_path / "model")


def test_resumed_run_keeps_its_dtype(corpus, model_folder, tmp_path, monkeypatch):
    """A resumed run keeps its dtype, although `auto` may select another one on another machine."""
    monkeypatch.setattr(loading, "_fastest_on_cpu", lambda: "bfloat16")
    embed(corpus, tmp_path / "out", model_folder, dtype="auto", rows=16)
    before = bits(tmp_path / "out")
    (tmp_path / "out" / "corpus-00002.parquet").unlink()
    monkeypatch.setattr(loading, "_fastest_on_cpu", lambda: "float32")
    embed(corpus, tmp_path / "out", model_folder, dtype="auto", rows=16)
    assert bits(tmp_path / "out") == before


def test_default_prompt_of_the_model(corpus, model_folder, reference, tmp_path):
    """The default prompt is used and stored, and an output with another prompt is refused."""
    prompts = {"document": "find: ", "query": "ask: "}
    model = SentenceTransformer(
        modules=[*reference], prompts=prompts, default_prompt_name="document", device="cpu"
    )
    encoder = PackedEncoder(model, dtype="float32", device="cpu")
    texts = texts_of_many_lengths(70)
    for name, options, prompt in (
        ("out", {}, "find: "),
        ("named", {"prompt_name": "query"}, "ask: "),
        ("none", {"prompt": ""}, ""),
    ):
        embed(corpus, tmp_path / name, model_folder, encoder, rows=16, **options)
        expected = reference.encode(texts, prompt=prompt)
        np.testing.assert_allclose(read_parquet(tmp_path / name)[1], expected, atol=1e-5)
        manifest = json.loads((tmp_path / name / "_metadata.json").read_text())
        assert manifest["prompt"] == prompt

    (tmp_path / "out" / "corpus-00002.parquet").unlink()
    model.default_prompt_name = None
    with pytest.raises(UserError, match="the prompt must be 'find: ' as in .*out, got ''. Choose"):
        embed(corpus, tmp_path / "out", model_folder, encoder, rows=16)


def test_empty_prompt_is_an_option_and_empty_column_is_refused():
    """An empty prompt differs from no prompt, and an empty column name is an error."""
    line = ["a.jsonl", "out", "--model", "m"]
    assert OPTIONS["encode"].read([*line, "--prompt", ""]).model.prompt == ""
    assert OPTIONS["encode"].read(line).model.prompt is None
    with pytest.raises(UserError, match="`--text-column` is empty"):
        OPTIONS["encode"].read([*line, "--text-column", ""])


@pytest.mark.parametrize(
    ("pattern", "output"),
    [
        ("data/**/*.parquet", "data/emb"),
        ("data/*/*2*.parquet", "data/emb"),
        ("data/*.parquet", "data/emb.parquet"),
        ("data/**/*.parquet", "data/emb.parquet"),
    ],
)
def test_a_glob_that_matches_the_output_is_refused(
    model_folder, encoder, tmp_path, monkeypatch, pattern, output
):
    """A glob that would read the output in the next run is refused; another output is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("a-1", "deep/a-2"):
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), f"data/{name}.parquet")
    with pytest.raises(UserError, match="must not contain files that the glob data/.* matches"):
        embed(pattern, output, model_folder, encoder)
    assert not (tmp_path / output).exists()
    embed(pattern, "emb", model_folder, encoder)
    # The parts do not match this glob.
    embed("data/*.parquet", "data/emb", model_folder, encoder)


def test_a_folder_with_brackets_in_its_name_is_not_a_glob(
    model_folder, encoder, tmp_path, monkeypatch
):
    """An output inside of such a folder would be read by the next run, and is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data[1]").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), "data[1]/a.parquet")
    with pytest.raises(UserError, match="must not contain each other"):
        embed("data[1]", "data[1]/emb", model_folder, encoder)
    embed("data[1]", "emb", model_folder, encoder)


@pytest.mark.parametrize("name", ["mine", "mine.parquet", "torn"])
def test_unrelated_files_and_damaged_parts_are_refused(
    corpus, model_folder, encoder, tmp_path, name
):
    """Files of other programs and damaged parts are refused and not changed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "mine.parquet")
    embed(corpus, tmp_path / "torn", model_folder, encoder)
    part = tmp_path / "torn" / "corpus-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])

    before = bits(tmp_path)
    with pytest.raises(UserError, match="must be (new or )?an output of neobert encode, got"):
        embed(corpus, tmp_path / name, model_folder, encoder)
    assert bits(tmp_path) == before


BAD = [
    (["corpus.jsonl", "out.safetensors"], "`output` must be a directory or end in .parquet"),
    (
        ["corpus.jsonl", "corpus.jsonl/vectors"],
        "must not contain each other. Choose another output",
    ),
    (["corpus.jsonl", "model/vectors"], "must not contain each other. Choose another output"),
    (
        ["corpus.jsonl", "out", "--max-length", "100000"],
        "`max_length` must be at most 64, the value of the model, got 100,000.",
    ),
    (
        ["corpus.jsonl", "out", "--truncate-dim", "65"],
        "`truncate_dim` must be at most 64, the value of",
    ),
    (["empty.txt", "out"], "empty.txt must contain at least one text, got no rows."),
    (["/dev/stdin", "out"], "must be a file, a folder, a glob or a URL, got the stream /dev/stdin"),
    (["-", "out"], "got the stream -. Write its content to a file first"),
    (["corpus.jsonl", "out.npy"], "`output` must be a directory or end in .parquet, got out.npy."),
    (
        ["corpus.jsonl", "out", "--text-column", "b"],
        "has no column 'b', only id, text, n. Name the",
    ),
    (
        ["corpus.jsonl", "out", "--shard", "8/8"],
        "`shard` must be i/n with i from 0 to n-1, got '?8/8",
    ),
    (
        ["corpus.jsonl", "out", "--keep", "embedding"],
        "`keep` must not contain the output's own columns .*, got embedding.",
    ),
    (
        ["corpus.jsonl", "out", "--keep", "embedding:text"],
        "`keep` must not contain the output's own columns .*, got embedding.",
    ),
    (
        ["corpus.jsonl", "out", "--keep", "nn:text"],
        "corpus.jsonl has no column 'nn', only id, text, n. Correct --keep.",
    ),
    (["twice", "out"], "different names without their suffixes, got a.b.jsonl, a.b.jsonl.gz."),
    (["bad.jsonl", "out"], "bad.jsonl, row 2: 'text' must be text, got null"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_invalid_input_is_reported(corpus, model_folder, tmp_path, monkeypatch, arguments, message):
    """Invalid input ends with one error message, and no part is written."""
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "empty.txt").write_text("")
    write_jsonl(tmp_path / "bad.jsonl", [{"text": "a"}, {"text": None}])
    for name in ("a.b.jsonl", "a.b.jsonl.gz"):
        (tmp_path / "twice").mkdir(exist_ok=True)
        (tmp_path / "twice" / name).write_text("")

    monkeypatch.chdir(tmp_path)
    model = [] if "--model" in arguments else ["--model", "model"]
    with pytest.raises(UserError, match=message):
        main([*arguments, "--dtype", "float32", *model])
    assert not list(tmp_path.glob("out/*.parquet"))


def test_a_misspelled_column_can_be_corrected(corpus, model_folder, encoder, tmp_path):
    """A wrong value of --keep is reported before the output records the options."""
    with pytest.raises(UserError, match="has no column 'idd', only id, text, n. Correct --keep."):
        embed(corpus, tmp_path / "out", model_folder, encoder, keep=["idd"])
    embed(corpus, tmp_path / "out", model_folder, encoder, keep=["id"])


def test_no_column_is_copied(model_folder, encoder, tmp_path):
    """With `--keep ""`, rows may lack the column `id`."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": "an eagle", "id": 1}, {"text": "a violin"}])
    options = OPTIONS["encode"].read(
        [str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--model", "model", "--keep", ""]
    )
    assert options.corpus.keep == [""]
    embed(tmp_path / "a.jsonl", tmp_path / "out", model_folder, encoder, keep=[""])
    assert read_parquet(tmp_path / "out")[0].column_names == ["embedding"]


def test_error_names_row_of_non_finite_embedding(tmp_path, model_folder):
    """The error names the input row whose embedding is not finite.

    The largest value of float16 is 65,504. The residual stream of a trained encoder may be larger.
    """
    model = NeoBERTModel.from_pretrained(shutil.copytree(model_folder, tmp_path / "model"))
    with torch.no_grad():
        model.encoder.weight[2000:].fill_(3e5)
    model.save_pretrained(tmp_path / "model")

    (tmp_path / "a.txt").write_text("a cat\n\nthe dog\n")
    embed(tmp_path / "a.txt", tmp_path / "float32", tmp_path / "model")

    with pytest.raises(
        UserError, match="a.txt, row 1: .* got infinite or NaN values in float16. Use"
    ):
        embed(tmp_path / "a.txt", tmp_path / "float16", tmp_path / "model", dtype="float16")
    assert not list((tmp_path / "float16").glob("*.parquet"))


def test_values_that_float16_cannot_store_are_refused(tmp_path, model_folder):
    """A finite embedding whose values would become infinite in float16 is not written."""
    model = NeoBERTModel.from_pretrained(shutil.copytree(model_folder, tmp_path / "model"))
    with torch.no_grad():
        model.layer_norm.weight.mul_(1e6)
    model.save_pretrained(tmp_path / "model")

    (tmp_path / "a.txt").write_text("a cat\nthe dog\n")
    arguments = (tmp_path / "a.txt", tmp_path / "float16", tmp_path / "model")
    with pytest.raises(UserError, match="a.txt, row 1: .* must be at most 65,504 in float16"):
        embed(*arguments, output_dtype="float16")
    assert not list((tmp_path / "float16").glob("*.parquet"))
    arguments = (tmp_path / "a.txt", tmp_path / "unit", tmp_path / "model")
    embed(*arguments, output_dtype="float16", normalize=True)


# ------------------------------------------------------------------------------------------------
# shards


@pytest.mark.parametrize("files", [1, 3, 100])
def test_shards_are_disjoint_and_balanced(files):
    """Each part belongs to exactly one shard, and shards have about the same number of parts."""

    parts = [(file, part) for file in range(files) for part in range(300 // files)]
    for count in (1, 3, 8):
        parts_per_shard = [
            [part for part in parts if Shard(number, count).owns(*part, files)]
            for number in range(count)
        ]
        assert sorted(sum(parts_per_shard, [])) == parts
        assert max(map(len, parts_per_shard)) - min(map(len, parts_per_shard)) <= max(
            3, 300 / files
        )
        files_per_shard = [
            len({file for file, _ in parts_of_shard}) for parts_of_shard in parts_per_shard
        ]
        assert sum(files_per_shard) == files * (1 if files >= 8 * count else count), (
            "files are distributed whole only if there are at least eight per shard"
        )


def test_default_shard_comes_from_launcher_rank(monkeypatch):
    """The default shard is the rank of torchrun, or else that of srun; `--shard` overrides both."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    # A batch script without srun has no number of tasks.
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert Shard.from_text() == Shard(0, 1, 0) and Shard.from_text("3/64") == Shard(3, 64, 0)

    for name, value in (("PROCID", 5), ("STEP_NUM_TASKS", 8), ("LOCALID", 1)):
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert Shard.from_text() == Shard(5, 8, 1) and Shard.from_text("3/64") == Shard(3, 64, 0)

    for name, value in (("RANK", 2), ("WORLD_SIZE", 4), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    assert Shard.from_text() == Shard(2, 4, 0), "the variables of torchrun have priority"
