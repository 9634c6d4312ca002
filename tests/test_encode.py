"""Pins `neobert encode` and the packed encoder: vectors equal SentenceTransformer.encode, the input's order, windows of bounded size, resuming
without repeating work, and one sentence for bad input before anything is written."""

import json
import random
import shutil
import tracemalloc

import numpy as np
import pytest
import torch


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoTokenizer, BertConfig, BertModel, RobertaConfig, RobertaModel

import neobert.embeddings.encode as encode_module
from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.errors import UserError
from neobert.common.loading import position_limit
from neobert.common.rows import check_corpus
from neobert.embeddings.encode import EncodeArguments, encode, main, merge_parts, windows
from neobert.embeddings.packed_encoder import PackedEncoder


WORDS = "the cat sat on a mat while seven brown dogs ran over green hills to find water and rest".split()


def texts_of_many_lengths(count):
    generator = random.Random(0)
    return [" ".join(generator.choices(WORDS, k=generator.choice((1, 2, 5, 9, 30, 90)))) for _ in range(count)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer_dir):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("encoder")
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64}
    NeoBERTModel(NeoBERTConfig(**config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model_folder):
    transformer = Transformer(str(model_folder), max_seq_length=64)
    return SentenceTransformer(modules=[transformer, Pooling(64, "mean")], device="cpu")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": f"row-{i}", "text": text, "n": i} for i, text in enumerate(texts_of_many_lengths(70))]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def read_parquet(path):
    table = pyarrow.parquet.read_table(path)
    return table, np.array(table["embedding"].to_pylist(), dtype=np.float32)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_packed_vectors_equal_sentence_transformers(model_folder, pooling):
    texts = [*texts_of_many_lengths(40), "", "  padded with blanks  ", "word " * 200]
    encoder = PackedEncoder(str(model_folder), pooling=pooling, tokens_per_batch=150, device="cpu")
    assert encoder.packs, "a NeoBERT with mean or first-token pooling must run packed, or this test compares nothing"
    transformer = Transformer(str(model_folder), max_seq_length=64)
    expected = SentenceTransformer(modules=[transformer, Pooling(64, pooling)], device="cpu").encode(texts, prompt="query: ")
    np.testing.assert_allclose(encoder.encode(texts, "query: "), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_modules_after_the_pooling_are_applied(reference):
    model = SentenceTransformer(modules=[*reference.children(), Normalize()], device="cpu")
    vectors = PackedEncoder(model, device="cpu").encode(texts_of_many_lengths(5))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5, err_msg="the Normalize module was left out")


def test_other_encoders_run_through_their_own_modules(tmp_path, tokenizer_dir):
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=128)
    BertModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path)
    encoder = PackedEncoder(str(tmp_path), tokens_per_batch=200, device="cpu")
    texts = texts_of_many_lengths(30)
    assert not encoder.packs, "only NeoBERT takes packed input on every attention implementation"
    expected = encoder.sentence_transformer.encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-5)


def test_batches_hold_the_token_budget_and_every_text_once(reference):
    encoder = PackedEncoder(reference, tokens_per_batch=100, device="cpu")
    lengths = np.array([3, 99, 250, 40, 40, 40, 1, 100])
    batches = list(encoder.batches(lengths))
    assert sorted(np.concatenate(batches)) == list(range(8)), "every text belongs to exactly one batch"
    assert all(lengths[batch].sum() <= 100 or len(batch) == 1 for batch in batches), "a batch went over its token budget"
    assert len(batches) == 5, f"greedy packing of {lengths} by length needs 5 batches, not {len(batches)}"


def test_windows_are_bounded_in_rows_and_characters():
    rows = [{"text": "x" * n} for n in (10, 10, 10, 500, 10, 90, 1)]
    sizes = [[len(row["text"]) for row in window] for window in windows(iter(rows), "text", 3, 100)]
    assert sizes == [[10, 10, 10], [500], [10, 90], [1]], "a window holds at most 3 rows and 100 characters, or one longer text"


def test_windows_never_hold_more_than_one_in_memory():
    drawn = []

    def endless():
        while True:
            drawn.append(1)
            yield {"text": "abc"}

    next(windows(endless(), "text", 4, 1000))
    assert len(drawn) == 5, "reading ran ahead of the window: memory would grow with the corpus"


def test_memory_does_not_grow_with_the_corpus(model_folder, tmp_path, monkeypatch):
    """What Python and numpy hold after each of 60 windows; the noise of the C allocator is not in it."""
    path, held, write = tmp_path / "corpus.jsonl", [], encode_module.write_part
    path.write_text("".join(json.dumps({"id": i, "text": f"{i} {'word ' * 200}"}) + "\n" for i in range(1200)))

    def write_and_measure(*part):
        write(*part)
        held.append(tracemalloc.get_traced_memory()[0] / 2**10)

    monkeypatch.setattr(encode_module, "write_part", write_and_measure)
    encoder = PackedEncoder(str(model_folder), device="cpu")
    tracemalloc.start()
    encode(path, tmp_path / "out.parquet", EncodeArguments(model=str(model_folder), shard_rows=20), progress_bar=False, encoder=encoder)
    tracemalloc.stop()
    growth = max(held[50:]) - max(held[5:15])
    assert len(held) == 60 and growth < 150, f"900 texts of 1 KiB each, long written, cost {growth:.0f} KiB"


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_one_output_file_in_the_order_of_the_input(corpus, model_folder, reference, tmp_path, suffix):
    output = tmp_path / f"vectors.{suffix}"
    encode(corpus, output, EncodeArguments(model=str(model_folder), shard_rows=16, tokens_per_batch=128), progress_bar=False)
    expected = reference.encode(texts_of_many_lengths(70))
    if suffix == "parquet":
        table, vectors = read_parquet(output)
        assert table["id"].to_pylist() == [f"row-{i}" for i in range(70)], "rows are not in the order of the input"
    else:
        vectors = load_file(output)["embeddings"]
    np.testing.assert_allclose(vectors, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["corpus.jsonl", output.name]), "parts were left behind"


def test_an_interrupted_run_continues_with_the_missing_parts(corpus, model_folder, tmp_path, monkeypatch):
    arguments = EncodeArguments(model=str(model_folder), shard_rows=16)
    whole = tmp_path / "whole"
    encode(corpus, whole, arguments, progress_bar=False)
    written = []
    write = encode_module.write_part

    def write_two(path, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *rest)

    monkeypatch.setattr(encode_module, "write_part", write_two)
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        encode(corpus, folder, arguments, progress_bar=False)
    assert len(list(folder.glob("part-*"))) == 2, "the finished parts of an interrupted run must stay"
    (folder / ".part-000002.parquet.77").write_bytes(b"what kill -9 leaves")
    monkeypatch.setattr(encode_module, "write_part", lambda path, *rest: (written.append(path.name), write(path, *rest)))
    summary = encode(corpus, folder, arguments, progress_bar=False)
    assert len(set(written)) == len(written) == summary["parts"] == 5, f"parts were encoded twice or not at all: {written}"
    assert not list(folder.glob(".*")), "left-overs of the killed run"
    for part in whole.glob("part-*"):
        assert np.array_equal(read_parquet(part)[1], read_parquet(folder / part.name)[1]), f"{part.name} differs after resuming"
    with pytest.raises(UserError, match="normalize"):
        encode(corpus, folder, EncodeArguments(model=str(model_folder), shard_rows=16, normalize=True), progress_bar=False)


def test_other_weights_in_the_same_folder_do_not_continue_a_run(corpus, model_folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    arguments = EncodeArguments(model=str(copy), shard_rows=16)
    encode(corpus, tmp_path / "out", arguments, progress_bar=False)
    model = NeoBERTModel.from_pretrained(copy)
    torch.nn.init.normal_(model.layer_norm.weight)
    model.save_pretrained(copy)
    with pytest.raises(UserError, match=r"was begun with other settings \(weights differ\)"):
        encode(corpus, tmp_path / "out", arguments, progress_bar=False)


def test_a_loaded_encoder_is_used_as_it_is(corpus, model_folder, reference, tmp_path, monkeypatch):
    encoder = PackedEncoder(reference, device="cpu")
    monkeypatch.setattr(encode_module.PackedEncoder, "from_arguments", None)  # nothing is loaded
    encode(corpus, tmp_path / "out.safetensors", EncodeArguments(model=str(model_folder)), progress_bar=False, encoder=encoder)
    expected = reference.encode(texts_of_many_lengths(70))
    np.testing.assert_allclose(load_file(tmp_path / "out.safetensors")["embeddings"], expected, atol=1e-5 * np.abs(expected).max())


def test_no_text_is_longer_than_the_positions_of_the_model(tmp_path, tokenizer_dir):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**small, max_position_embeddings=40)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path)
    encoder = PackedEncoder(str(tmp_path), max_length=1024, device="cpu")
    assert position_limit(RobertaModel(RobertaConfig(**small, max_position_embeddings=42))) == 40, "RoBERTa's positions start at 2"
    assert encoder.max_length == 40, "a recipe's 1,024 tokens must not run past the positions of a baseline"
    assert encoder.encode(["word " * 300]).shape == (1, 32)


def test_parquet_input_kept_columns_normalized_half_precision_and_prompt(corpus, model_folder, reference, tmp_path):
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    source = tmp_path / "corpus.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    arguments = ["--model", str(model_folder), "--keep", "n,text", "--normalize", "true", "--output_dtype", "float16", "--prompt", "find: "]
    assert main([str(source), str(tmp_path / "out.parquet"), *arguments]) == 0
    table, vectors = read_parquet(tmp_path / "out.parquet")
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float16(), 64), "vectors are a fixed-size list of float16"
    assert table["n"].to_pylist() == list(range(70)) and table["text"].to_pylist() == [row["text"] for row in rows]
    expected = reference.encode([row["text"] for row in rows], prompt="find: ", normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, atol=2e-3)


def test_a_kept_column_has_one_type_in_all_parts(model_folder, tmp_path):
    """Numbers in the first part, nothing in the second, fractions far behind: each part alone would get another type."""
    ids = [1, 2, None, None, *range(3000), 0.5]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": value, "text": "a"}) + "\n" for value in ids))
    _, types = check_corpus(path, ["id", "text"], ["text"], ["id"])
    assert types == {"id": pyarrow.float64()}
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7]))
    encode(path, tmp_path / "parts", EncodeArguments(model=str(model_folder), shard_rows=2), progress_bar=False)
    parts = sorted((tmp_path / "parts").glob("part-*"))
    assert [read_parquet(part)[0].schema.field("id").type for part in parts] == [pyarrow.int64()] * 4
    encode(path, tmp_path / "out.parquet", EncodeArguments(model=str(model_folder), shard_rows=2), progress_bar=False)
    assert read_parquet(tmp_path / "out.parquet")[0]["id"].to_pylist() == ids[:7]


def test_columns_of_a_parquet_file_keep_their_types(model_folder, tmp_path):
    columns = {
        "text": pyarrow.array(["a", "b", "c"], pyarrow.large_string()),
        "id": pyarrow.array([1, None, 3], pyarrow.uint8()),
        "when": pyarrow.array([1, 2, 3], pyarrow.timestamp("ns")),
        "kind": pyarrow.array(["x", "y", "x"]).dictionary_encode(),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "corpus.parquet")
    arguments = EncodeArguments(model=str(model_folder), shard_rows=2, keep="id,when,kind,text")
    encode(tmp_path / "corpus.parquet", tmp_path / "out.parquet", arguments, progress_bar=False)
    table = read_parquet(tmp_path / "out.parquet")[0]
    for name, values in columns.items():
        assert table.schema.field(name).type == values.type and table[name].to_pylist() == values.to_pylist(), f"{name} has changed"


@pytest.mark.parametrize("query", ["", "query: "])
def test_prompts_without_text_have_a_name(model_folder, query):
    """A model that puts nothing before a document is asked for its document prompt all the same."""
    encoder = PackedEncoder(str(model_folder), device="cpu")
    encoder.sentence_transformer.prompts = {"query": query, "document": ""}
    assert (encoder.prompt("query"), encoder.prompt("document"), encoder.prompt()) == (query, "", "")


@pytest.mark.slow
def test_two_processes_write_what_one_writes(corpus, model_folder, tmp_path):
    arguments = [str(corpus), "--model", str(model_folder), "--shard_rows", "16"]
    assert main([arguments[0], str(tmp_path / "one.parquet"), *arguments[1:]]) == 0
    assert main([arguments[0], str(tmp_path / "two.parquet"), *arguments[1:], "--processes", "2"]) == 0
    one, two = read_parquet(tmp_path / "one.parquet"), read_parquet(tmp_path / "two.parquet")
    assert one[0]["id"].equals(two[0]["id"])
    np.testing.assert_allclose(one[1], two[1], atol=1e-5)


def test_merged_safetensors_is_what_the_library_reads(tmp_path):
    from safetensors.numpy import save_file

    arrays = [np.random.default_rng(i).normal(size=(3 + i, 5)).astype(np.float16) for i in range(3)]
    for i, array in enumerate(arrays):
        save_file({"embeddings": array}, tmp_path / f"{i}.safetensors")
    merge_parts([tmp_path / f"{i}.safetensors" for i in range(3)], tmp_path / "all.safetensors")
    merged = load_file(tmp_path / "all.safetensors")["embeddings"]
    assert merged.dtype == np.float16 and np.array_equal(merged, np.concatenate(arrays))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ('{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ('{"text": "a"}\n\n["a"]\n', "line 3 must be an object"),
        ('{"text": "a"}\n{"body": "b"}\n', "line 2 has no 'text'; it has: 'body'"),
        ('{"text": "a"}\n{"text": null}\n', "line 2: 'text' must be text, but is null"),
        ('{"text": "\\ud83d\\ude00"}\n{"text": "b\\ud83d"}\n', "line 2: 'text' has half a surrogate pair, '.ud83d'"),
        ('{"text": "a"}\n{"text": "b", "id": 1}\n', "line 2 has 'id', unlike the first row"),
        ('{"text": "a", "id": 1}\n\n{"text": "b", "id": "x"}\n', "line 3: 'id' is 'x' after values of type int64"),
        ('{"text": "a", "id": "x"}\n{"text": "b", "id": "\\ud83d"}\n', "line 2: 'id' has half a surrogate pair"),
        ('{"text": "a", "id": 1180591620717411303424}\n', "line 1: 'id' is 1180591620717411303424; .*integers: 64 bits"),
        ('{"text": "a", "id": {}}\n', "parquet cannot hold 'id'"),
        ('{"text": "a", "id": 1}\n' * 1500 + '{"text": "b", "id": "x"}\n', "line 1,501: 'id' is 'x' after values of type int64"),
    ],
)
def test_a_broken_row_is_named_before_any_work(tmp_path, model_folder, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        encode(path, tmp_path / "out", EncodeArguments(model=str(model_folder)), progress_bar=False)
    assert not (tmp_path / "out").exists(), "nothing may be written for a broken input"


def test_bad_arguments_are_one_sentence(tmp_path, corpus, model_folder, capsys):
    (tmp_path / "not.parquet").write_bytes(b"PAR0nothing")
    with pytest.raises(UserError, match="is not a parquet file"):
        check_corpus(tmp_path / "not.parquet", ["text"])
    cases = [
        (["nothing.jsonl", "out"], [], "there is no file"),
        ([str(corpus), "out.csv"], [], "OUT must end in"),
        ([str(corpus), "out"], ["--max_length", "1"], "max_length must be at least 3"),
        ([str(corpus), "out"], ["--prompt_name", "nothing"], "no prompt called 'nothing'; it has: .*document"),
        ([str(corpus), "out"], ["--text_column", "body"], "has no 'body'"),
        ([str(corpus), "corpus.jsonl/vectors.parquet"], [], "OUT must be a folder or a new name, but .*corpus.jsonl is a file"),
        ([str(corpus), "out"], ["--device", "nonsense"], "the device 'nonsense' cannot be used here"),
        ([str(corpus), "out"], ["--device", "cuda:99"], "the device 'cuda:99' cannot be used here"),
        ([str(corpus), "out"], ["--pooling", "max"], "pooling must be one of"),
        ([str(corpus), "out"], ["--format", "csv"], "format must be one of"),
        ([str(corpus), "out.safetensors"], ["--keep", "id"], "safetensors holds no other columns"),
        ([str(corpus)], [], "give the input and the output first"),
    ]
    for files, more, message in cases:
        files = [files[0], *(str(tmp_path / name) for name in files[1:])]
        with pytest.raises(UserError, match=message):
            main([*files, "--model", str(model_folder), *more])
        assert not list(tmp_path.glob("out*")), f"{message}: something was written"
    with pytest.raises(UserError, match="there is no model in"):
        main([str(corpus), str(tmp_path / "out"), "--model", str(tmp_path)])


# ---------------------------------------------------------------------------------------------------------------- --overwrite


def files_of(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("output", ["corpus.jsonl", ".", "link", "to_corpus.jsonl", "mine", "mine.parquet", "mine.safetensors"])
def test_overwrite_removes_nothing_that_encode_did_not_write(tmp_path, corpus, model_folder, output):
    (tmp_path / "link").symlink_to(".")
    (tmp_path / "to_corpus.jsonl").symlink_to("corpus.jsonl")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "mine.parquet")
    save_file({"a": np.zeros(1)}, tmp_path / "mine.safetensors")
    before = files_of(tmp_path)
    with pytest.raises(UserError, match="the input|was not written by neobert encode"):
        main([str(corpus), str(tmp_path / output), "--model", str(model_folder), "--overwrite", "true"])
    assert files_of(tmp_path) == before


def test_overwrite_of_a_folder_with_a_foreign_file(tmp_path, corpus, model_folder):
    arguments = [str(corpus), str(tmp_path / "out"), "--model", str(model_folder), "--shard_rows", "40"]
    assert main(arguments) == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = files_of(tmp_path)
    with pytest.raises(UserError, match="did not write, or that were changed since: notes.txt"):
        main([*arguments, "--overwrite", "true"])
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.safetensors"])
def test_overwrite_of_its_own_output(tmp_path, corpus, model_folder, name, monkeypatch):
    """The old output is complete until the new one is, also when the new run is interrupted and continued."""
    output = tmp_path / name
    arguments = [str(corpus), str(output), "--model", str(model_folder), "--shard_rows", "40"]
    assert main(arguments) == 0
    old = files_of(output) if output.is_dir() else output.read_bytes()
    write = encode_module.write_part

    def fail_at_the_second(path, *rest):
        if "000001" in path.name:
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(encode_module, "write_part", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--normalize", "true", "--overwrite", "true"])
    kept = tmp_path / "out.replaced" if name == "out" else output
    assert (files_of(kept) if kept.is_dir() else kept.read_bytes()) == old, "the old output went before the new one was complete"
    monkeypatch.setattr(encode_module, "write_part", write)
    assert main([*arguments, "--normalize", "true", "--overwrite", "true"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", name], "something stayed beside the output"
    assert (files_of(output) if output.is_dir() else output.read_bytes()) != old
