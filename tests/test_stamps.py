"""Pins what a vector file says of its making, and `neobert encode --append`: vectors of another
model, prompt or pooling are refused, and whenever a run is killed the output is as it was or
complete."""

import json
import os
import shutil

import numpy as np
import pytest
import torch


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from encode_runs import (
    embed,
    interrupt_once,
    make_corpus,  # noqa: F401
    make_model_folder,  # noqa: F401
    make_reference,  # noqa: F401
    read_parquet,
    texts_of_many_lengths,
)
from jsonl import write_jsonl
from safetensors import safe_open
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from neobert import NeoBERTModel, __version__
from neobert.common.errors import UserError
from neobert.common.identity import model_digest
from neobert.common.runs import locked
from neobert.embeddings.encode import main
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.embeddings.stamps import STAMP, Stamp


WINDOWS = {"long_texts": "windows", "window": 12, "overlap": 2}


@pytest.fixture(name="more")
def make_more(tmp_path):
    """A second corpus, of 30 texts."""
    texts = texts_of_many_lengths(100)[70:]
    rows = [{"id": f"more-{i}", "text": text} for i, text in enumerate(texts)]
    return write_jsonl(tmp_path / "more.jsonl", rows)


@pytest.fixture(name="loaded", scope="module")
def make_loaded(model_folder):
    return PackedEncoder(str(model_folder), dtype="float32", device="cpu")


def stamp_of(path):
    if path.suffix == ".parquet":
        metadata = pyarrow.parquet.read_metadata(path).metadata
        return json.loads(metadata[STAMP.encode()])
    with safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()[STAMP])


# ------------------------------------------------------------------------------------------------
# what an output says


def test_every_output_says_what_made_it(corpus, model_folder, tmp_path):
    expected = {
        "model": model_folder.name,
        "revision": None,
        "digest": model_digest(str(model_folder)),
        "pooling": "cls",
        "normalized": True,
        "prompt": "find: ",
        "max_length": 20,
        "long_texts": "cut",
        "dtype": "bfloat16",
        "output_dtype": "float16",
        "width": 64,
        "version": __version__,
    }
    settings = {"pooling": "cls", "normalize": True, "prompt": "find: ", "max_length": 20}
    settings |= {"dtype": "bfloat16", "output_dtype": "float16"}
    for name in ("out.parquet", "out.safetensors", "out"):
        embed(corpus, tmp_path / name, model_folder, **settings)
    assert stamp_of(tmp_path / "out.parquet") == expected
    assert stamp_of(tmp_path / "out.safetensors") == expected
    assert stamp_of(tmp_path / "out" / "part-000000.parquet") == expected
    assert json.loads((tmp_path / "out" / "encode.json").read_text())["vectors"] == expected


def test_the_model_tells_its_own_pooling_prompt_and_length(corpus, model_folder, tmp_path):
    modules = [Transformer(str(model_folder), max_seq_length=30), Pooling(64, "cls"), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "find: "})
    model.save_pretrained(str(tmp_path / "model"))
    embed(corpus, tmp_path / "out.parquet", tmp_path / "model", prompt_name="query", **WINDOWS)
    found = stamp_of(tmp_path / "out.parquet")
    assert (found["pooling"], found["prompt"], found["max_length"]) == ("cls", "find: ", 30)
    assert found["normalized"] and found["model"] == "model"
    assert found["long_texts"] == {"window": 12, "overlap": 2}


def test_a_stamp_that_cannot_be_read_is_none():
    for text in ("", "{}", "[1]", "no", '{"model": 1}'):
        assert Stamp.read({STAMP: text}) is None
    assert Stamp.read({}) is None


# ------------------------------------------------------------------------------------------------
# --append


def content(path):
    """(ids or rows, vectors) of an output, of a folder by its manifest."""
    if path.is_dir():
        names = json.loads((path / "encode.json").read_text())["files"]
        parts = [content(path / name) for name in sorted(names) if name.startswith("part-")]
        return sum((ids for ids, _ in parts), []), np.concatenate([v for _, v in parts])
    if path.suffix == ".safetensors":
        found = load_file(path)
        rows = found.get("row", np.arange(len(found["embeddings"])))
        return rows.tolist(), found["embeddings"]
    table, vectors = read_parquet(path)
    return table["id"].to_pylist(), vectors


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["cut", "windows"])
@pytest.mark.parametrize("name", ["out.parquet", "out.safetensors", "out", "out-safetensors"])
def test_texts_are_added(corpus, more, model_folder, loaded, tmp_path, name, windows):
    """The output is as if both corpora were encoded one after the other."""
    format = {"format": "safetensors"} if name == "out-safetensors" else {}
    settings = {**windows, "shard_rows": 16, "encoder": loaded}
    embed(corpus, tmp_path / name, model_folder, **settings, **format)
    before = content(tmp_path / name)
    embed(more, tmp_path / f"alone-{name}", model_folder, **settings, **format)
    alone = content(tmp_path / f"alone-{name}")
    summary = embed(more, tmp_path / name, model_folder, append=True, **settings)
    assert (summary["rows"], summary["before"], summary["encoded_rows"]) == (30, 70, 30)
    ids, vectors = content(tmp_path / name)
    assert np.array_equal(vectors, np.concatenate([before[1], alone[1]]))
    if "safetensors" not in name:
        assert ids == before[0] + alone[0]
    elif windows and name == "out.safetensors":
        assert ids == before[0] + [70 + row for row in alone[0]]
    if windows and name == "out.parquet":
        rows = pyarrow.parquet.read_table(tmp_path / name)["row"].to_pylist()
        assert sorted(set(rows)) == list(range(100)), "rows of added texts go on counting"
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == sorted(["corpus.jsonl", "more.jsonl", name, f"alone-{name}"])
    assert name != "out" or not list((tmp_path / name).glob(".*"))


def test_the_totals_of_both(corpus, more, model_folder, loaded, tmp_path, capsys):
    for name in ("out.parquet", "out"):
        embed(corpus, tmp_path / name, model_folder, encoder=loaded)
        cut = embed(more, tmp_path / f"alone-{name}", model_folder, encoder=loaded)["cut"]
        argv = [str(more), str(tmp_path / name), "--append", "--model", str(model_folder)]
        assert main([*argv, "--dtype", "float32"]) == 0
        told = capsys.readouterr().out
        assert main([*argv, "--dtype", "float32"]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}: these texts are in it already\n"
        assert "30 texts added to 70; this run 30 texts of" in told
        assert f"{cut['texts']} texts cut by {cut['tokens']:,} tokens" in told
    metadata = pyarrow.parquet.read_metadata(tmp_path / "out.parquet").metadata
    finished = json.loads((tmp_path / "out" / "encode.json").read_text())["finished"]
    assert metadata[b"neobert_texts"] == b"100" and finished["rows"] == finished["vectors"] == 100
    assert json.loads(metadata[b"neobert_cut"]) == list(finished["cut"].values())
    assert finished["cut"]["texts"] > cut["texts"] > 0


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_the_same_texts_come_in_once(corpus, more, model_folder, loaded, tmp_path, name):
    settings = {"encoder": loaded, "shard_rows": 16}
    embed(corpus, tmp_path / name, model_folder, **settings)
    third = write_jsonl(tmp_path / "third.jsonl", [{"id": "last", "text": "a cat"}])
    for source in (more, third):
        embed(source, tmp_path / name, model_folder, append=True, **settings)
    before = content(tmp_path / name)
    for source in (more, third):
        again = embed(source, tmp_path / name, model_folder, append=True, **settings)
        assert again["finished"]
    assert len(before[0]) == 101 and content(tmp_path / name)[0] == before[0]
    # The command that made the output knows it again, and mends it.
    if name == "out":
        (tmp_path / name / "part-000001.parquet").unlink()
    summary = embed(corpus, tmp_path / name, model_folder, **settings)
    assert summary["encoded_rows"] == (16 if name == "out" else 0)
    ids, vectors = content(tmp_path / name)
    assert ids == before[0] and np.array_equal(vectors, before[1])


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": "q: "}, "of prompt '', but 'q: ' was given"),
        ({"pooling": "cls"}, "of pooling 'mean', but 'cls' was given"),
        ({"normalize": True}, "of normalized False, but True was given"),
        ({"max_length": 9}, "of max length 64, but 9 was given"),
        ({"dtype": "bfloat16"}, "of dtype 'float32', but 'bfloat16' was given"),
        ({"output_dtype": "float16"}, "of output dtype 'float32', but 'float16' was given"),
        (WINDOWS, r"of long texts 'cut', but \{'window': 12"),
        ({"keep": ["id", "text"]}, r"columns id \(string\) .* gives id \(string\), text"),
    ],
)
def test_other_vectors_are_refused(corpus, more, model_folder, tmp_path, name, change, message):
    embed(corpus, tmp_path / name, model_folder)
    before = files_of(tmp_path)
    with pytest.raises(UserError, match=message):
        embed(more, tmp_path / name, model_folder, append=True, **change)
    assert files_of(tmp_path) == before


def files_of(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def test_vectors_of_another_model_are_refused(corpus, more, model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "other")
    embed(corpus, tmp_path / "out.parquet", model_folder)
    # the same by its weights
    embed(more, tmp_path / "out.parquet", tmp_path / "other", append=True)
    model = NeoBERTModel.from_pretrained(tmp_path / "other")
    torch.nn.init.normal_(model.layer_norm.weight)
    model.save_pretrained(tmp_path / "other")
    first, second = (
        f"{f.name} .{model_digest(str(f))}." for f in (model_folder, tmp_path / "other")
    )
    with pytest.raises(UserError, match=f"vectors of model '{first}', but '{second}' was given"):
        embed(corpus, tmp_path / "out.parquet", tmp_path / "other", append=True)


def test_auto_takes_the_dtype_that_is_there(corpus, more, model_folder, tmp_path):
    embed(corpus, tmp_path / "out.parquet", model_folder, dtype="bfloat16")
    embed(more, tmp_path / "out.parquet", model_folder, dtype="auto", append=True)
    assert stamp_of(tmp_path / "out.parquet")["dtype"] == "bfloat16"


def test_what_cannot_be_added_to(corpus, more, model_folder, loaded, tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "mine.parquet")
    (tmp_path / "mine").mkdir()
    embed(corpus, tmp_path / "old.parquet", model_folder, encoder=loaded)
    table = pyarrow.parquet.read_table(tmp_path / "old.parquet")
    metadata = {k: v for k, v in table.schema.metadata.items() if k != STAMP.encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "old.parquet")
    embed(corpus, tmp_path / "less", model_folder, encoder=loaded, shard_rows=16)
    (tmp_path / "less" / "part-000001.parquet").unlink()
    interrupt_once(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, tmp_path / "begun", model_folder, encoder=loaded, shard_rows=16)
    for name, message in (
        ("none.parquet", "there is no .*none.parquet to append to"),
        ("none", "there is no .*none to append to"),
        ("mine.parquet", "was not written by neobert encode"),
        ("mine", "was not written by neobert encode"),
        ("old.parquet", "does not say what made its vectors"),
        ("less", "lacks files, or they were changed: part-000001.parquet"),
        ("begun", "is not finished; give the command that began it again"),
    ):
        with pytest.raises(UserError, match=message):
            embed(more, tmp_path / name, model_folder, append=True)
    with pytest.raises(UserError, match="give either append or overwrite, not both"):
        embed(more, tmp_path / "out", model_folder, append=True, overwrite=True)


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_two_at_once_are_refused(corpus, more, model_folder, loaded, tmp_path, name):
    embed(corpus, tmp_path / name, model_folder, encoder=loaded)
    work = tmp_path / ("out.parquet.parts" if name == "out.parquet" else "out")
    with locked(work), pytest.raises(UserError, match="is in use by another run"):
        embed(more, tmp_path / name, model_folder, append=True, encoder=loaded)
    assert len(content(tmp_path / name)[0]) == 70


def test_ranks_add_together(corpus, more, model_folder, loaded, tmp_path, monkeypatch):
    settings = {"shard_rows": 8, **WINDOWS}
    for name in ("out", "alone"):
        embed(corpus, tmp_path / name, model_folder, encoder=loaded, **settings)
    settings["append"] = True
    embed(more, tmp_path / "alone", model_folder, encoder=loaded, **settings)
    interrupt_once(monkeypatch, 0)
    for rank in (0, 1, 0, 1):  # the first rank plans, and comes back; the second is late once
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        try:
            found = embed(more, tmp_path / "out", model_folder, encoder=loaded, **settings)
        except KeyboardInterrupt:
            assert rank == 0
    assert found["finished"]
    assert np.array_equal(content(tmp_path / "out")[1], content(tmp_path / "alone")[1])
    for part in (tmp_path / "alone").glob("part-*"):
        other = pyarrow.parquet.read_table(tmp_path / "out" / part.name)
        assert pyarrow.parquet.read_table(part).equals(other)


# ------------------------------------------------------------------------------------------------
# interrupted


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_an_interrupted_append_continues(
    corpus, more, model_folder, loaded, tmp_path, name, monkeypatch
):
    settings = {"encoder": loaded, "shard_rows": 10}
    embed(corpus, tmp_path / name, model_folder, **settings)
    before, written = content(tmp_path / name), interrupt_once(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        embed(more, tmp_path / name, model_folder, append=True, **settings)
    assert content(tmp_path / name)[0] == before[0]
    other = write_jsonl(tmp_path / "other.jsonl", [{"id": "x", "text": "a cat"}])
    with pytest.raises(UserError, match="holds a run with other settings"):
        embed(other, tmp_path / name, model_folder, append=True, **settings)
    summary = embed(more, tmp_path / name, model_folder, append=True, **settings)
    assert summary["encoded_rows"] == 10 and len(written) == 3
    assert content(tmp_path / name)[0] == before[0] + [f"more-{i}" for i in range(30)]


def test_an_output_that_changed_since_the_append_began(
    corpus, more, model_folder, loaded, tmp_path, monkeypatch
):
    settings = {"encoder": loaded, "shard_rows": 10}
    embed(corpus, tmp_path / "out.parquet", model_folder, **settings)
    interrupt_once(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        embed(more, tmp_path / "out.parquet", model_folder, append=True, **settings)
    (tmp_path / "out.parquet").unlink()
    third = write_jsonl(tmp_path / "third.jsonl", [{"id": "x", "text": "a cat"}])
    embed(third, tmp_path / "new.parquet", model_folder, **settings)
    os.rename(tmp_path / "new.parquet", tmp_path / "out.parquet")
    with pytest.raises(UserError, match="changed since texts were begun to be added to it; remove"):
        embed(more, tmp_path / "out.parquet", model_folder, append=True, **settings)


def killed_after(steps, source, output, model, settings):
    """`embed` in a process of its own that ends, as by kill -9, before its step number `steps` that
    changes a name on the disk. Returns its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        torch.set_num_threads(1)
        left = [steps]

        def counted(function):
            def step(*given, **named):
                if not left[0]:
                    os._exit(9)
                left[0] -= 1
                return function(*given, **named)

            return step

        for name in ("replace", "rename", "link", "unlink", "rmdir", "mkdir"):
            setattr(os, name, counted(getattr(os, name)))
        embed(source, output, model, append=True, **settings)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


@pytest.mark.parametrize("name", ["out.parquet", "out.safetensors", "out", "copied"])
def test_killed_at_any_moment(corpus, more, model_folder, loaded, tmp_path, name, monkeypatch):
    """Before each step the output is as it was, or complete; the same command completes it."""
    torch.set_num_threads(1)
    if name == "copied":  # a file system without hard links
        monkeypatch.setattr(os, "link", lambda *given: (_ for _ in ()).throw(OSError))
    settings = {"encoder": loaded, "shard_rows": 15}
    embed(corpus, tmp_path / "base" / name, model_folder, **settings)
    before, steps, code = content(tmp_path / "base" / name), 0, 9
    embed(more, tmp_path / "alone.parquet", model_folder, **settings)
    whole = np.concatenate([before[1], content(tmp_path / "alone.parquet")[1]])
    seen = []
    while code == 9:
        place = tmp_path / f"{steps}"
        shutil.copytree(tmp_path / "base", place)
        code = killed_after(steps, more, place / name, model_folder, settings)
        found = content(place / name)[1]
        seen.append(len(found))
        assert np.array_equal(found, before[1]) or np.array_equal(found, whole), steps
        if steps % 3 == 0:
            embed(more, place / name, model_folder, append=True, **settings)
            assert np.array_equal(content(place / name)[1], whole), steps
            left = {path.name for path in place.rglob(".*")}
            assert not left and {path.name for path in place.iterdir()} == {name}, (steps, left)
        shutil.rmtree(place)
        steps += 1
    assert code == 0 and steps > 8 and {*seen} == {70, 100}, (code, steps, seen)
