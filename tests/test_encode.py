"""Pins `neobert encode` and the packed encoder: vectors equal SentenceTransformer.encode, the input's order, windows of bounded size, resuming
without repeating work, ranks and workers of which any may die, nothing removed that encode did not write, and one sentence for bad input before
anything is written."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

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

import neobert.__main__ as cli
from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common import loading
from neobert.common.errors import UserError
from neobert.common.loading import position_limit
from neobert.embeddings import encode_parts, encode_workers
from neobert.embeddings.encode import EncodeArguments, encode, main
from neobert.embeddings.encode_parts import Plan, WindowReader, make_plan, merge_parts
from neobert.embeddings.encode_workers import Rank
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


def embed(source, output, model, encoder=None, **settings):
    settings = {"dtype": "float32", **settings}  # the same on every CPU
    arguments = EncodeArguments(source=str(source), output=str(output), model=str(model), **settings)
    return encode(arguments, progress_bar=False, encoder=encoder)


def read_parquet(path):
    table = pyarrow.parquet.read_table(path)
    return table, np.array(table["embedding"].to_pylist(), dtype=np.float32)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_packed_vectors_equal_sentence_transformers(model_folder, pooling):
    texts = [*texts_of_many_lengths(40), "", "  padded with blanks  ", "word " * 200]
    encoder = PackedEncoder(str(model_folder), pooling=pooling, tokens_per_batch=150, dtype="float32", device="cpu")
    assert encoder.packs, "a NeoBERT with mean or first-token pooling must run packed, or this test compares nothing"
    transformer = Transformer(str(model_folder), max_seq_length=64)
    expected = SentenceTransformer(modules=[transformer, Pooling(64, pooling)], device="cpu").encode(texts, prompt="query: ")
    np.testing.assert_allclose(encoder.encode(texts, "query: "), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_modules_after_the_pooling_are_applied(reference):
    model = SentenceTransformer(modules=[*reference.children(), Normalize()], device="cpu")
    vectors = PackedEncoder(model, dtype="float32", device="cpu").encode(texts_of_many_lengths(5))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5, err_msg="the Normalize module was left out")


def test_other_encoders_run_through_their_own_modules(tmp_path, tokenizer_dir):
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, max_position_embeddings=128)
    BertModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path)
    encoder = PackedEncoder(str(tmp_path), tokens_per_batch=200, dtype="float32", device="cpu")
    texts = texts_of_many_lengths(30)
    assert not encoder.packs, "only NeoBERT takes packed input on every attention implementation"
    expected = encoder.sentence_transformer.encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-5)


def test_batches_hold_the_token_budget_and_every_text_once(reference):
    encoder = PackedEncoder(reference, tokens_per_batch=100, dtype="float32", device="cpu")
    lengths = np.array([3, 99, 250, 40, 40, 40, 1, 100])
    batches = list(encoder.batches(lengths))
    assert sorted(np.concatenate(batches)) == list(range(8)), "every text belongs to exactly one batch"
    assert all(lengths[batch].sum() <= 100 or len(batch) == 1 for batch in batches), "a batch went over its token budget"
    assert len(batches) == 5, f"greedy packing of {lengths} by length needs 5 batches, not {len(batches)}"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_windows_are_bounded_in_rows_and_characters(tmp_path):
    texts = ["x" * n for n in (10, 10, 10, 500, 10, 90, 1)]
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    plan = make_plan(path, "text", [], 3, 100)
    reader = WindowReader(path, ["text"], plan.windows)
    sizes = [[len(row["text"]) for _, row in reader.read(number)] for number in range(len(plan.windows))]
    assert sizes == [[10, 10, 10], [500], [10, 90], [1]], "a window holds at most 3 rows and 100 characters, or one longer text"
    assert [window.characters for window in plan.windows] == [30, 500, 100, 1] and plan.rows == 7


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "folder"])
def test_a_window_is_read_from_any_place_in_any_order(tmp_path, name):
    rows = [{"id": i, "text": f"text {i}"} for i in range(500)]
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        for number, start in enumerate(range(0, 500, 130)):
            write_rows(path / f"{number}.jsonl", rows[start : start + 130])
    elif name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=77)
    else:
        write_rows(path, rows)
    plan = make_plan(path, "text", ["id"], 7, 1000)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", path) == plan, "a plan that is saved and loaded is another"
    reader = WindowReader(path, ["text", "id"], plan.windows)
    numbers = [0, 1, 5, 3, 71, 70, 40, 41, 2]
    found = {number: [row for _, row in reader.read(number)] for number in numbers}
    assert found == {number: rows[7 * number : 7 * number + 7] for number in numbers}


def test_reading_does_not_run_ahead_of_the_window(tmp_path, monkeypatch):
    path, drawn = write_rows(tmp_path / "a.jsonl", [{"text": "abc"}] * 100), []
    plan = make_plan(path, "text", [], 4, 1000)

    def counted(*given, read=encode_parts.read_rows, **named):
        for row in read(*given, **named):
            drawn.append(1)
            yield row

    monkeypatch.setattr(encode_parts, "read_rows", counted)
    WindowReader(path, ["text"], plan.windows).read(0)
    assert len(drawn) == 4, "reading ran ahead of the window: memory would grow with the corpus"


def test_memory_does_not_grow_with_the_corpus(model_folder, tmp_path, monkeypatch):
    """What Python and numpy hold after each of 60 windows; the noise of the C allocator is not in it."""
    path, held, write = tmp_path / "corpus.jsonl", [], encode_workers.write_part
    path.write_text("".join(json.dumps({"id": i, "text": f"{i} {'word ' * 200}"}) + "\n" for i in range(1200)))

    def write_and_measure(*part):
        write(*part)
        held.append(tracemalloc.get_traced_memory()[0] / 2**10)

    monkeypatch.setattr(encode_workers, "write_part", write_and_measure)
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    tracemalloc.start()
    embed(path, tmp_path / "out.parquet", model_folder, shard_rows=20, encoder=encoder)
    tracemalloc.stop()
    growth = max(held[50:]) - max(held[5:15])
    assert len(held) == 60 and growth < 150, f"900 texts of 1 KiB each, long written, cost {growth:.0f} KiB"


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_one_output_file_in_the_order_of_the_input(corpus, model_folder, reference, tmp_path, suffix):
    output = tmp_path / f"vectors.{suffix}"
    embed(corpus, output, model_folder, shard_rows=16, tokens_per_batch=128)
    expected = reference.encode(texts_of_many_lengths(70))
    if suffix == "parquet":
        table, vectors = read_parquet(output)
        assert table["id"].to_pylist() == [f"row-{i}" for i in range(70)], "rows are not in the order of the input"
    else:
        vectors = load_file(output)["embeddings"]
    np.testing.assert_allclose(vectors, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["corpus.jsonl", output.name]), "parts were left behind"


def test_an_interrupted_run_continues_with_the_missing_parts(corpus, model_folder, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    embed(corpus, whole, model_folder, shard_rows=16)
    written = []
    write = encode_workers.write_part

    def write_two(path, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *rest)

    monkeypatch.setattr(encode_workers, "write_part", write_two)
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, folder, model_folder, shard_rows=16)
    assert len(list(folder.glob("part-*"))) == 2, "the finished parts of an interrupted run must stay"
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / f".part-000002.parquet.{socket.gethostname()}-{ended.pid}-abcdefgh").write_bytes(b"what kill -9 leaves")
    monkeypatch.setattr(encode_workers, "write_part", lambda path, *rest: (written.append(path.name), write(path, *rest)))
    summary = embed(corpus, folder, model_folder, shard_rows=16)
    assert len(set(written)) == len(written) == summary["parts"] == 5, f"parts were encoded twice or not at all: {written}"
    assert not list(folder.glob(".*")), "left-overs of the killed run"
    for part in whole.glob("part-*"):
        assert np.array_equal(read_parquet(part)[1], read_parquet(folder / part.name)[1]), f"{part.name} differs after resuming"
    with pytest.raises(UserError, match="normalize"):
        embed(corpus, folder, model_folder, shard_rows=16, normalize=True)


def test_other_weights_in_the_same_folder_do_not_continue_a_run(corpus, model_folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    embed(corpus, tmp_path / "out", copy, shard_rows=16)
    model = NeoBERTModel.from_pretrained(copy)
    torch.nn.init.normal_(model.layer_norm.weight)
    model.save_pretrained(copy)
    with pytest.raises(UserError, match=r"was begun with other settings \(weights differ\)"):
        embed(corpus, tmp_path / "out", copy, shard_rows=16)


def test_a_loaded_encoder_is_used_as_it_is(corpus, model_folder, reference, tmp_path, monkeypatch):
    encoder = PackedEncoder(reference, dtype="float32", device="cpu")
    monkeypatch.setattr(encode_workers.PackedEncoder, "from_arguments", None)  # nothing is loaded
    embed(corpus, tmp_path / "out.safetensors", model_folder, encoder=encoder)
    expected = reference.encode(texts_of_many_lengths(70))
    np.testing.assert_allclose(load_file(tmp_path / "out.safetensors")["embeddings"], expected, atol=1e-5 * np.abs(expected).max())


def test_no_text_is_longer_than_the_positions_of_the_model(tmp_path, tokenizer_dir):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(**small, max_position_embeddings=40)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path)
    encoder = PackedEncoder(str(tmp_path), max_length=1024, dtype="float32", device="cpu")
    assert position_limit(RobertaModel(RobertaConfig(**small, max_position_embeddings=42))) == 40, "RoBERTa's positions start at 2"
    assert encoder.max_length == 40, "a recipe's 1,024 tokens must not run past the positions of a baseline"
    assert encoder.encode(["word " * 300]).shape == (1, 32)


def test_parquet_input_kept_columns_normalized_half_precision_and_prompt(corpus, model_folder, reference, tmp_path):
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
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float16(), 64), "vectors are a fixed-size list of float16"
    assert table["n"].to_pylist() == list(range(70)) and table["text"].to_pylist() == [row["text"] for row in rows]
    expected = reference.encode([row["text"] for row in rows], prompt="find: ", normalize_embeddings=True)
    np.testing.assert_allclose(vectors, expected, atol=2e-3)


def test_a_kept_column_has_one_type_in_all_parts(model_folder, tmp_path):
    """Numbers in the first part, nothing in the second, fractions far behind: each part alone would get another type."""
    ids = [1, 2, None, None, *range(3000), 0.5]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": value, "text": "a"}) + "\n" for value in ids))
    assert make_plan(path, "text", ["id"], 100, 1000).schema == pyarrow.schema([("id", pyarrow.float64())])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:7]))
    embed(path, tmp_path / "parts", model_folder, shard_rows=2)
    parts = sorted((tmp_path / "parts").glob("part-*"))
    assert [read_parquet(part)[0].schema.field("id").type for part in parts] == [pyarrow.int64()] * 4
    embed(path, tmp_path / "out.parquet", model_folder, shard_rows=2)
    assert read_parquet(tmp_path / "out.parquet")[0]["id"].to_pylist() == ids[:7]


def test_columns_of_a_parquet_file_keep_their_types(model_folder, tmp_path):
    columns = {
        "text": pyarrow.array(["a", "b", "c"], pyarrow.large_string()),
        "id": pyarrow.array([1, None, 3], pyarrow.uint8()),
        "when": pyarrow.array([1, 2, 3], pyarrow.timestamp("ns")),
        "kind": pyarrow.array(["x", "y", "x"]).dictionary_encode(),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "corpus.parquet")
    embed(tmp_path / "corpus.parquet", tmp_path / "out.parquet", model_folder, shard_rows=2, keep=["id,when,kind,text"])
    table = read_parquet(tmp_path / "out.parquet")[0]
    for name, values in columns.items():
        assert table.schema.field(name).type == values.type and table[name].to_pylist() == values.to_pylist(), f"{name} has changed"


@pytest.mark.parametrize("query", ["", "query: "])
def test_prompts_without_text_have_a_name(model_folder, query):
    """A model that puts nothing before a document is asked for its document prompt all the same."""
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    encoder.sentence_transformer.prompts = {"query": query, "document": ""}
    assert (encoder.prompt("query"), encoder.prompt("document"), encoder.prompt()) == (query, "", "")


@pytest.mark.slow
def test_two_processes_write_what_one_writes(corpus, model_folder, tmp_path):
    arguments = [str(corpus), "--model", str(model_folder), "--shard-rows", "16", "--dtype", "float32"]
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
    merge_parts([tmp_path / f"{i}.safetensors" for i in range(3)], tmp_path / "all.safetensors", {"neobert": "encode"})
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
        embed(path, tmp_path / "out", model_folder)
    assert not (tmp_path / "out").exists(), "nothing may be written for a broken input"


def test_bad_arguments_are_one_sentence(tmp_path, corpus, model_folder, capsys):
    (tmp_path / "not.parquet").write_bytes(b"PAR0nothing")
    cases = [
        (["nothing.jsonl", "out"], [], "there is no file"),
        ([str(tmp_path / "not.parquet"), "out"], [], "is not a parquet file"),
        ([str(corpus), "out.csv"], [], "OUTPUT must end in"),
        ([str(corpus), "out"], ["--max-length", "1"], "max_length must be at least 3, but 1 was given"),
        ([str(corpus), "out"], ["--prompt-name", "nothing"], "no prompt called 'nothing'; it has: .*document"),
        ([str(corpus), "out"], ["--text-column", "body"], "has no 'body'"),
        ([str(corpus), "corpus.jsonl/vectors.parquet"], [], "OUTPUT must be a folder or a new name, but .*corpus.jsonl is a file"),
        ([str(corpus), "out"], ["--device", "nonsense"], "the device 'nonsense' cannot be used here"),
        ([str(corpus), "out"], ["--device", "cuda:99"], "the device 'cuda:99' cannot be used here"),
        ([str(corpus), "out"], ["--pooling", "max"], "pooling must be one of"),
        ([str(corpus), "out"], ["--format", "csv"], "format must be one of"),
        ([str(corpus), "out.safetensors"], ["--keep", "id"], "safetensors holds no other columns"),
        ([str(corpus)], [], "give OUTPUT"),
        ([str(corpus), "out"], ["--modle", "x"], "unknown argument '--modle'; did you mean --model"),
    ]
    for files, more, message in cases:
        files = [files[0], *(str(tmp_path / name) for name in files[1:])]
        with pytest.raises(UserError, match=message):
            main([*files, "--model", str(model_folder), *more])
        assert not list(tmp_path.glob("out*")), f"{message}: something was written"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no model in"):
        main([str(corpus), str(tmp_path / "out"), "--model", str(tmp_path / "empty")])


@pytest.mark.parametrize("argv", [[], ["corpus.jsonl", "out", "--modle", "x"]])
def test_no_arguments_and_typos_exit_with_2(argv, capsys):
    assert cli.main(["encode", *argv]) == 2
    message = capsys.readouterr().err
    assert "give SOURCE, OUTPUT and --model" in message.replace(", --model", " and --model") or "did you mean --model?" in message


# ------------------------------------------------------------------------------------------------------- any process may die


def program(tmp_path, slow=0.0):
    """A script that runs `neobert encode` with its arguments and takes `slow` seconds more for each part."""
    path = tmp_path / "run.py"
    path.write_text(
        "import sys, time, torch, neobert.__main__ as cli\n"
        "from neobert.embeddings import encode_workers\n"
        "write = encode_workers.write_part\n"
        "def slowly(*part):\n"
        f"    time.sleep({slow}); write(*part)\n"
        "encode_workers.write_part = slowly\n"
        "if __name__ == '__main__':\n"
        "    torch.set_num_threads(1); sys.exit(cli.main(['encode', *sys.argv[1:]]))\n"
    )
    return [sys.executable, str(path)]


def start(command, rank=None, world=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if rank is not None:
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, process, seconds=90):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "nothing happened"
        if process.poll() not in (None, 0):
            raise AssertionError(process.stdout.read()[-3000:])
        time.sleep(0.02)


def parts_of(folder):
    return sorted(path.name for path in folder.glob("part-*")) if folder.is_dir() else []


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(corpus, model_folder, tmp_path):
    """kill -9 leaves the parent no time to end its workers."""
    arguments = [str(corpus), str(tmp_path / "out"), "--model", str(model_folder), "--shard-rows", "1", "--processes", "2"]
    process = start([*program(tmp_path, slow=1.0), *arguments])
    wait_for(lambda: parts_of(tmp_path / "out"), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2, "vacuous: there are no workers"
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text() for pid in workers):
        assert time.monotonic() < limit, "a worker outlives its parent"
        time.sleep(0.1)


def assert_same_parts(folder, alone):
    assert parts_of(folder) == parts_of(alone) and len(parts_of(folder)) == 14
    for name in parts_of(folder):
        one, shared = (pyarrow.parquet.read_table(path / name) for path in (alone, folder))
        assert one.equals(shared), f"{name} of the ranks is not, bit for bit, that of one process"


@pytest.mark.slow
def test_a_rank_is_killed_and_the_first_makes_its_parts(corpus, model_folder, tmp_path):
    embed(corpus, tmp_path / "alone", model_folder, shard_rows=5)
    arguments = [str(corpus), str(tmp_path / "out"), "--model", str(model_folder), "--shard-rows", "5", "--dtype", "float32"]
    ranks = [start([*program(tmp_path, slow=0.3), *arguments, "--patience", "1"], rank, 2) for rank in range(2)]
    wait_for(lambda: "part-000008.parquet" in parts_of(tmp_path / "out"), ranks[1])
    ranks[1].kill()
    ranks[1].wait()
    assert len(parts_of(tmp_path / "out")) < 14, "vacuous: the killed rank had finished"
    output, _ = ranks[0].communicate(timeout=120)
    assert ranks[0].returncode == 0 and "parts of other ranks did not come; making them here" in output, output[-3000:]
    assert_same_parts(tmp_path / "out", tmp_path / "alone")
    finished = json.loads((tmp_path / "out" / "encode.json").read_text())
    assert finished["finished"]["rows"] == 70 and finished["environment"]["ranks"] == 2


def test_ranks_that_die_and_are_started_again(corpus, model_folder, tmp_path, monkeypatch):
    embed(corpus, tmp_path / "alone", model_folder, shard_rows=5)
    write, written = encode_workers.write_part, []

    def run(rank, dies_after=None, output="out"):
        def die(path, *rest):
            if len(written) == dies_after:
                raise KeyboardInterrupt
            written.append(path.name)
            write(path, *rest)

        written.clear()
        monkeypatch.setattr(encode_workers, "write_part", die)
        for name, value in (("RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        try:
            return embed(corpus, tmp_path / output, model_folder, shard_rows=5)
        except KeyboardInterrupt:
            return None

    assert run(0, dies_after=1) is None  # after the plan
    assert run(2, dies_after=2) is None and len(parts_of(tmp_path / "out")) == 3
    own = run(1)["encoded_rows"]
    assert 0 < own < 35, "a rank does its own share"
    assert run(2)["encoded_rows"] + own < 70 and len(written) < 5, "the rank that was started again made parts a second time"
    run(0)
    assert_same_parts(tmp_path / "out", tmp_path / "alone")
    with pytest.raises(UserError, match="--overwrite is not possible with several ranks"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=5, overwrite=True)
    # The same as one file: the last to come is the first rank.
    assert run(0, dies_after=0, output="one.parquet") is None
    run(1, output="one.parquet"), run(2, output="one.parquet"), run(0, output="one.parquet")
    assert np.array_equal(
        read_parquet(tmp_path / "one.parquet")[1],
        np.concatenate([read_parquet(tmp_path / "alone" / n)[1] for n in parts_of(tmp_path / "alone")]),
    )
    assert run(1, output="one.parquet")["finished"], "a rank that is started after the end has nothing to do"


def test_every_window_has_one_rank_and_ranks_are_even():
    sizes = np.random.default_rng(0).integers(1, 1000, 400)
    for world in (1, 3, 8, 500):
        shares = [Rank(rank, world).share(sizes) for rank in range(world)]
        assert sorted(sum(shares, [])) == list(range(400)), f"{world} ranks: a window has no rank, or two"
        assert all(share == list(range(share[0], share[-1] + 1)) for share in shares if share), "a share is not of neighbours"
        if world <= 8:
            loads = [sizes[share].sum() for share in shares]
            assert max(loads) - min(loads) <= 2 * 1000, f"{world} ranks: {loads}"


def test_ranks_of_torchrun_and_slurm(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")  # in a batch script without srun
    assert Rank.from_environment() == Rank(0, 1, 0)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert Rank.from_environment() == Rank(5, 8, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Rank.from_environment() == Rank(2, 4, 0), "torchrun's numbers come first"
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UserError, match="RANK=4 and WORLD_SIZE=4 must be the number of a process and of all processes"):
        Rank.from_environment()


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
@pytest.mark.parametrize("format", ["parquet", "safetensors"])
def test_a_damaged_part_is_made_anew(corpus, model_folder, tmp_path, format, damage):
    """A machine that loses its power, or a disk, may cut a file that had its name already."""
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16, format=format)
    path = tmp_path / "out" / f"part-000001.{format}"
    content = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(content[:-7] if damage == "cut" else b"")
    assert embed(corpus, tmp_path / "out", model_folder, shard_rows=16, format=format)["encoded_rows"] == 16
    again = (read_parquet if format == "parquet" else load_file)(path)
    path.write_bytes(content)
    before = (read_parquet if format == "parquet" else load_file)(path)
    assert again[0].equals(before[0]) if format == "parquet" else np.array_equal(again["embeddings"], before["embeddings"])


def test_a_strangers_file_with_the_name_of_a_part(corpus, model_folder, tmp_path):
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    path = tmp_path / "out" / "part-000001.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"mine": [1]}), path)
    content = path.read_bytes()
    with pytest.raises(UserError, match="part-000001.parquet is not a part of this run; move it"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    with pytest.raises(UserError, match="part-000001.parquet was not written by neobert encode"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16, overwrite=True)
    assert path.read_bytes() == content


RATES = {
    # GFLOP/s a core: AMX with FP16; AMX; AVX-512 with FP16 as fast as float32; no 16 bits; 16 bits that are slow alike.
    "float16": {"float32": 100, "float16": 711, "bfloat16": 800},
    "bfloat16": {"float32": 140, "float16": 140, "bfloat16": 990},
    "float32": {"float32": 140, "float16": 270, "bfloat16": 150},
    "float32 ": {"float32": 150, "float16": 13, "bfloat16": 13},
}


@pytest.mark.parametrize("name", RATES)
def test_the_fastest_dtype_of_a_cpu(name, monkeypatch, capsys):
    loading._fastest_on_cpu.cache_clear()
    monkeypatch.setattr(loading, "matrix_rates", lambda: {dtype: 1e9 * rate for dtype, rate in RATES[name].items()})
    assert loading.choose_dtype("auto", "cpu") == getattr(torch, name.strip())
    message = capsys.readouterr().err
    assert f"dtype {name.strip()}, by the matrix products" in message and f"float32 {RATES[name]['float32']}" in message
    assert loading.choose_dtype("float32", "cpu") == torch.float32 and not capsys.readouterr().err
    loading._fastest_on_cpu.cache_clear()


def test_the_rates_are_measured_in_a_moment():
    start, threads = time.process_time(), torch.get_num_threads()
    rates = loading.matrix_rates()
    assert time.process_time() - start < 2, "it must not hold up a command, on the slowest of CPUs"
    assert torch.get_num_threads() == threads and rates.keys() == {"float32", "float16", "bfloat16"} and min(rates.values()) > 1e6


def test_a_run_keeps_the_dtype_that_it_began_with(corpus, model_folder, tmp_path, monkeypatch):
    """A measurement that turns out otherwise, on another machine, must not give one output two precisions."""
    monkeypatch.setattr(loading, "_fastest_on_cpu", lambda: "bfloat16")
    embed(corpus, tmp_path / "out", model_folder, dtype="auto", shard_rows=16)
    path = tmp_path / "out" / "part-000002.parquet"
    before = pyarrow.parquet.read_table(path)
    path.unlink()
    monkeypatch.setattr(loading, "_fastest_on_cpu", lambda: "float32")
    embed(corpus, tmp_path / "out", model_folder, dtype="auto", shard_rows=16)
    assert pyarrow.parquet.read_table(path).equals(before)
    assert json.loads((tmp_path / "out" / "encode.json").read_text())["environment"]["dtype"] == "bfloat16"


def test_a_vector_that_is_not_finite_is_named(corpus, tmp_path, tokenizer_dir):
    """float16 ends at 65,504, and the residual stream of a trained encoder may be larger."""
    config = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64}
    model = NeoBERTModel(NeoBERTConfig(**config))
    with torch.no_grad():
        model.encoder.weight[2000:].fill_(3e5)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    assert embed(corpus, tmp_path / "float32.parquet", tmp_path / "model", dtype="float32")["rows"] == 70
    with pytest.raises(UserError, match=r"corpus.jsonl, line \d+: the vector is not finite in float16; give --dtype float32, or bfloat16"):
        embed(corpus, tmp_path / "float16.parquet", tmp_path / "model", dtype="float16")
    assert not (tmp_path / "float16.parquet").exists()


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
        main([str(corpus), str(tmp_path / output), "--model", str(model_folder), "--overwrite"])
    assert files_of(tmp_path) == before


def test_overwrite_of_a_folder_with_a_foreign_file(tmp_path, corpus, model_folder):
    arguments = [str(corpus), str(tmp_path / "out"), "--model", str(model_folder), "--shard-rows", "40"]
    assert main(arguments) == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = files_of(tmp_path)
    with pytest.raises(UserError, match="did not write, or that were changed since: notes.txt"):
        main([*arguments, "--overwrite"])
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.safetensors"])
def test_overwrite_of_its_own_output(tmp_path, corpus, model_folder, name, monkeypatch):
    """The old output is complete until the new one is, also when the new run is interrupted and continued."""
    output = tmp_path / name
    arguments = [str(corpus), str(output), "--model", str(model_folder), "--shard-rows", "40"]
    assert main(arguments) == 0
    old = files_of(output) if output.is_dir() else output.read_bytes()
    write = encode_workers.write_part

    def fail_at_the_second(path, *rest):
        if "000001" in path.name:
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(encode_workers, "write_part", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--normalize", "--overwrite"])
    kept = tmp_path / "out.before-overwrite" if name == "out" else output
    assert (files_of(kept) if kept.is_dir() else kept.read_bytes()) == old, "the old output went before the new one was complete"
    monkeypatch.setattr(encode_workers, "write_part", write)
    assert main([*arguments, "--normalize", "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", name], "something stayed beside the output"
    assert (files_of(output) if output.is_dir() else output.read_bytes()) != old


def test_what_a_user_has_beside_the_output_stays(corpus, model_folder, tmp_path):
    """A folder with the name that a replaced output would have, and a hidden file whose name begins as a left-over's does."""
    embed(corpus, tmp_path / "old", model_folder)
    (tmp_path / "old").rename(tmp_path / "out.replaced")  # an output that the user keeps under this name
    (tmp_path / ".out.parquet.2024").write_text("mine")
    before = files_of(tmp_path / "out.replaced")
    embed(corpus, tmp_path / "out", model_folder)
    embed(corpus, tmp_path / "out.parquet", model_folder)
    assert files_of(tmp_path / "out.replaced") == before and (tmp_path / ".out.parquet.2024").read_text() == "mine"
    embed(corpus, tmp_path / "out", model_folder, normalize=True, overwrite=True)
    assert files_of(tmp_path / "out.replaced") == before


def test_parts_of_another_program_in_the_output(corpus, model_folder, tmp_path):
    """Spark's files begin as ours do."""
    embed(corpus, tmp_path / "out", model_folder)
    path = tmp_path / "out" / "part-00000-6ba7b810.snappy.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"mine": [1]}), path)
    before = files_of(tmp_path)
    with pytest.raises(UserError, match="was not written by neobert encode, so .*out is not replaced"):
        embed(corpus, tmp_path / "out", model_folder, overwrite=True)
    assert files_of(tmp_path) == before


def test_files_in_the_folder_of_parts_stay(corpus, model_folder, tmp_path, capsys, monkeypatch):
    """The parts of a single file are removed at its end, and nothing else."""
    write = encode_workers.write_part
    monkeypatch.setattr(
        encode_workers, "write_part", lambda path, *rest: ((path.parent / "notes.txt").write_text("mine"), write(path, *rest))
    )
    embed(corpus, tmp_path / "out.parquet", model_folder)
    assert (tmp_path / "out.parquet.parts" / "notes.txt").read_text() == "mine" and (tmp_path / "out.parquet").is_file()
    assert "out.parquet is complete; " in capsys.readouterr().err


def test_outputs_that_cannot_be(corpus, model_folder, tmp_path):
    (tmp_path / "folder.parquet").mkdir()
    before = files_of(tmp_path)
    for output, message in (
        (tmp_path / "folder.parquet", "is a folder, but .parquet names a file"),
        (model_folder / "vectors.safetensors", "is inside the input"),
        (model_folder, "is the input .* itself"),
    ):
        with pytest.raises(UserError, match=message):
            embed(corpus, output, model_folder)
    assert files_of(tmp_path) == before


def test_the_same_command_again(corpus, model_folder, tmp_path, capsys):
    arguments = [str(corpus), str(tmp_path / "out.parquet"), "--model", str(model_folder)]
    assert main(arguments) == main(arguments) == 0, "a finished file is left alone by the command that wrote it"
    assert "finished already with these settings" in capsys.readouterr().out
    with pytest.raises(UserError, match="out.parquet exists already; choose another name, or give --overwrite"):
        main([*arguments, "--normalize"])


def test_tables_made_of_an_output_are_not_its_own(corpus, model_folder, tmp_path):
    """They keep the mark in the metadata, but not the rows and columns."""
    embed(corpus, tmp_path / "out.parquet", model_folder)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    pyarrow.parquet.write_table(table.append_column("label", pyarrow.array([1] * len(table))), tmp_path / "labelled.parquet")
    pyarrow.parquet.write_table(table.slice(0, 7), tmp_path / "short.parquet")
    before = files_of(tmp_path)
    for name in ("labelled.parquet", "short.parquet"):
        with pytest.raises(UserError, match="exists already"):
            embed(corpus, tmp_path / name, model_folder)
        with pytest.raises(UserError, match="was not written by neobert encode, so it is not replaced"):
            embed(corpus, tmp_path / name, model_folder, overwrite=True)
    assert files_of(tmp_path) == before


def test_an_interrupted_overwrite_continues(corpus, model_folder, tmp_path, monkeypatch):
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    write, written = encode_workers.write_part, []

    def stop_at_the_third(path, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *rest)

    monkeypatch.setattr(encode_workers, "write_part", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16, overwrite=True, normalize=True)
    monkeypatch.setattr(encode_workers, "write_part", lambda path, *rest: (written.append(path.name), write(path, *rest)))
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16, overwrite=True, normalize=True)
    assert len(written) == len(set(written)) == 5, f"parts were made twice: {written}"
    assert not (tmp_path / "out.before-overwrite").exists(), "what was replaced stays behind"
