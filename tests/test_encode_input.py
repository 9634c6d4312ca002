"""Pins what `neobert encode` reads: windows of bounded size from any place of a file, kept columns
with their types, and one sentence for bad input before anything is written."""

import json
import shutil

import numpy as np
import pytest
from jsonl import write_jsonl


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from encode_runs import embed, make_corpus, make_model_folder, make_reference, read_parquet  # noqa: F401

import neobert.__main__ as cli
from neobert.common.errors import UserError
from neobert.embeddings import encode_parts
from neobert.embeddings.encode import main
from neobert.embeddings.encode_parts import Plan, WindowReader, make_plan
from neobert.embeddings.packed_encoder import PackedEncoder


def test_windows_are_bounded_in_rows_and_characters(tmp_path):
    texts = ["x" * n for n in (10, 10, 10, 500, 10, 90, 1)]
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    plan = make_plan(path, "text", [], 3, 100)
    reader = WindowReader(path, ["text"], plan.windows)
    sizes = [
        [len(row["text"]) for _, row in reader.read(number)] for number in range(len(plan.windows))
    ]
    assert sizes == [[10, 10, 10], [500], [10, 90], [1]], (
        "a window holds at most 3 rows and 100 characters, or one longer text"
    )
    assert [window.characters for window in plan.windows] == [30, 500, 100, 1] and plan.rows == 7


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "folder"])
def test_a_window_is_read_from_any_place_in_any_order(tmp_path, name):
    rows = [{"id": i, "text": f"text {i}"} for i in range(500)]
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        for number, start in enumerate(range(0, 500, 130)):
            write_jsonl(path / f"{number}.jsonl", rows[start : start + 130])
    elif name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=77)
    else:
        write_jsonl(path, rows)
    plan = make_plan(path, "text", ["id"], 7, 1000)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", path) == plan, (
        "a plan that is saved and loaded is another"
    )
    reader = WindowReader(path, ["text", "id"], plan.windows)
    numbers = [0, 1, 5, 3, 71, 70, 40, 41, 2]
    found = {number: [row for _, row in reader.read(number)] for number in numbers}
    assert found == {number: rows[7 * number : 7 * number + 7] for number in numbers}


def test_reading_does_not_run_ahead_of_the_window(tmp_path, monkeypatch):
    path, drawn = write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}] * 100), []
    plan = make_plan(path, "text", [], 4, 1000)

    def counted(*given, read=encode_parts.read_rows, **named):
        for row in read(*given, **named):
            drawn.append(1)
            yield row

    monkeypatch.setattr(encode_parts, "read_rows", counted)
    WindowReader(path, ["text"], plan.windows).read(0)
    assert len(drawn) == 4, "reading ran ahead of the window: memory would grow with the corpus"


def test_parquet_input_kept_columns_normalized_half_precision_and_prompt(
    corpus, model_folder, reference, tmp_path
):
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    source = tmp_path / "corpus.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    arguments = [
        "--model",
        str(model_folder),
        "--keep",
        "n,text",
        "--normalize",
        "--output-dtype",
        "float16",
        "--prompt",
        "find: ",
        "--dtype",
        "float32",
    ]
    assert main([str(source), str(tmp_path / "out.parquet"), *arguments]) == 0
    table, vectors = read_parquet(tmp_path / "out.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float16(), 64), (
        "vectors are a fixed-size list of float16"
    )
    assert table["n"].to_pylist() == list(range(70)) and table["text"].to_pylist() == [
        row["text"] for row in rows
    ]
    expected = reference.encode(
        [row["text"] for row in rows], prompt="find: ", normalize_embeddings=True
    )
    np.testing.assert_allclose(vectors, expected, atol=2e-3)


def test_kept_columns_of_other_files_are_text(model_folder, tmp_path):
    """JSON has no types of columns: each part alone would get another one."""
    values = ["a-1", None, 1180591620717411303424, 0.5, {"page": 1}, True, "\u00e9"]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": value, "text": "a"}) + "\n" for value in values))
    embed(path, tmp_path / "out.parquet", model_folder, shard_rows=2)
    table = read_parquet(tmp_path / "out.parquet")[0]
    assert table.schema.field("id").type == pyarrow.string()
    assert table["id"].to_pylist() == [
        "a-1",
        None,
        "1180591620717411303424",
        "0.5",
        '{"page": 1}',
        "true",
        "\u00e9",
    ]


def test_parquet_files_whose_columns_differ_in_type(model_folder, tmp_path):
    for name, kind in (("a", pyarrow.int64()), ("b", pyarrow.float64())):
        table = pyarrow.table({"text": ["x"], "id": pyarrow.array([1], kind)})
        (tmp_path / "corpus").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, tmp_path / "corpus" / f"{name}.parquet")
    with pytest.raises(
        UserError, match="b.parquet: 'id' is double, but int64 in the files before it"
    ):
        embed(tmp_path / "corpus", tmp_path / "out", model_folder)


def test_columns_of_a_parquet_file_keep_their_types(model_folder, tmp_path):
    columns = {
        "text": pyarrow.array(["a", "b", "c"], pyarrow.large_string()),
        "id": pyarrow.array([1, None, 3], pyarrow.uint8()),
        "when": pyarrow.array([1, 2, 3], pyarrow.timestamp("ns")),
        "kind": pyarrow.array(["x", "y", "x"]).dictionary_encode(),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "corpus.parquet")
    embed(
        tmp_path / "corpus.parquet",
        tmp_path / "out.parquet",
        model_folder,
        shard_rows=2,
        keep=["id,when,kind,text"],
    )
    table = read_parquet(tmp_path / "out.parquet")[0]
    for name, values in columns.items():
        assert (
            table.schema.field(name).type == values.type
            and table[name].to_pylist() == values.to_pylist()
        ), f"{name} has changed"


@pytest.mark.parametrize("query", ["", "query: "])
def test_prompts_without_text_have_a_name(model_folder, query):
    """A model that puts nothing before a document is asked for its document prompt all the same."""
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    encoder.sentence_transformer.prompts = {"query": query, "document": ""}
    assert (encoder.prompt("query"), encoder.prompt("document"), encoder.prompt()) == (
        query,
        "",
        "",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ('{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ('{"text": "a"}\n\n["a"]\n', "line 3 must be an object"),
        ('{"text": "a"}\n{"body": "b"}\n', "line 2 has no 'text'; it has: 'body'"),
        ('{"text": "a"}\n{"text": null}\n', "line 2: 'text' must be text, but is null"),
        (
            '{"text": "\\ud83d\\ude00"}\n{"text": "b\\ud83d"}\n',
            "line 2: 'text' has half a surrogate pair, '.ud83d'",
        ),
        ('{"text": "a"}\n{"text": "b", "id": 1}\n', "line 2 has 'id', unlike the first row"),
        (
            '{"text": "a", "id": "x"}\n{"text": "b", "id": "\\ud83d"}\n',
            "line 2: 'id' has half a surrogate pair",
        ),
    ],
)
def test_a_broken_row_is_named_before_any_work(tmp_path, model_folder, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        embed(path, tmp_path / "out", model_folder)
    assert not (tmp_path / "out").exists(), "nothing may be written for a broken input"


def test_bad_arguments_are_one_sentence(tmp_path, corpus, model_folder, capsys):
    (tmp_path / "not.parquet").write_bytes(b"PAR0nothing")
    cases = [
        (["nothing.jsonl", "out"], [], "there is no file"),
        ([str(tmp_path / "not.parquet"), "out"], [], "is not a parquet file"),
        ([str(corpus), "out.csv"], [], "OUTPUT must end in"),
        (
            [str(corpus), "out"],
            ["--max-length", "1"],
            "max_length must be at least 3, but 1 was given",
        ),
        (
            [str(corpus), "out"],
            ["--prompt-name", "nothing"],
            "no prompt called 'nothing'; it has: .*document",
        ),
        ([str(corpus), "out"], ["--text-column", "body"], "has no column 'body'"),
        (
            [str(corpus), "corpus.jsonl/vectors.parquet"],
            [],
            "the output .* is inside the input .*corpus.jsonl",
        ),
        (
            [str(corpus), "out"],
            ["--device", "nonsense"],
            "the device 'nonsense' cannot be used here",
        ),
        ([str(corpus), "out"], ["--device", "cuda:99"], "the device 'cuda:99' cannot be used here"),
        ([str(corpus), "out"], ["--pooling", "max"], "pooling must be one of"),
        ([str(corpus), "out"], ["--format", "csv"], "format must be one of"),
        ([str(corpus), "out.safetensors"], ["--keep", "id"], "safetensors holds no other columns"),
        ([str(corpus)], [], "give OUTPUT"),
        (
            [str(corpus), "out"],
            ["--modle", "x"],
            "unknown argument '--modle'; did you mean --model",
        ),
    ]
    for files, more, message in cases:
        files = [files[0], *(str(tmp_path / name) for name in files[1:])]
        with pytest.raises(UserError, match=message):
            main([*files, "--model", str(model_folder), *more])
        assert not list(tmp_path.glob("out*")), f"{message}: something was written"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no model in"):
        main([str(corpus), str(tmp_path / "out"), "--model", str(tmp_path / "empty")])
    weights = shutil.copytree(model_folder, tmp_path / "torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match="the model .*torn cannot be loaded"):
        main(
            [
                str(corpus),
                str(tmp_path / "out"),
                "--model",
                str(tmp_path / "torn"),
                "--dtype",
                "float32",
            ]
        )


@pytest.mark.parametrize("argv", [[], ["corpus.jsonl", "out", "--modle", "x"]])
def test_no_arguments_and_typos_exit_with_2(argv, capsys):
    assert cli.main(["encode", *argv]) == 2
    message = capsys.readouterr().err
    assert (
        "give SOURCE, OUTPUT and --model" in message.replace(", --model", " and --model")
        or "did you mean --model?" in message
    )
