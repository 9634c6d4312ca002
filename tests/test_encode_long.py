"""Pins `neobert encode --long-texts windows`: the vectors are those of the windows as texts, no batch
is longer than asked for, an interrupted run continues bit for bit, and what is written tells the
place of each window."""

import json
import random

import numpy as np
import pytest


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from encode_runs import (
    WORDS,
    embed,
    interrupt_once,
    make_model_folder,  # noqa: F401
    make_reference,  # noqa: F401
    read_parquet,
)
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from neobert import NeoBERTModel
from neobert.common.errors import UserError
from neobert.embeddings import encode
from neobert.embeddings.long_texts import WindowSettings, tokenize_windows
from neobert.embeddings.options import EncodeArguments
from neobert.embeddings.packed_encoder import PackedEncoder


WINDOWS = {"long_texts": "windows", "window": 12, "overlap": 4}


def documents(count=14):
    """Of 0 to 260 tokens: the model reads 64."""
    generator, found = random.Random(0), ["", "a cat", "Dogs ran. It sat!"]
    for number in range(3, count):
        sentences = [
            " ".join(generator.choices(WORDS, k=generator.randrange(2, 17))).capitalize()
            for _ in range(generator.choice((1, 3, 6, 30)) + number % 2)
        ]
        found.append(". ".join(sentences) + ".")
    return found


@pytest.fixture(name="corpus")
def make_documents(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": f"row-{i}", "text": text, "n": i} for i, text in enumerate(documents())]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


# ------------------------------------------------------------------------------------------------
# vectors


@pytest.mark.parametrize("prompt", ["", "find the cat: "])
def test_windows_are_what_sentence_transformers_makes_of_the_parts(
    corpus, model_folder, reference, tmp_path, prompt
):
    embed(corpus, tmp_path / "out.parquet", model_folder, prompt=prompt, keep=["id"], **WINDOWS)
    table, vectors = read_parquet(tmp_path / "out.parquet")
    assert table.column_names == ["id", "row", "start", "end", "embedding"]
    places, texts = table.select(["id", "row", "start", "end"]).to_pylist(), documents()
    assert all(place["id"] == f"row-{place['row']}" for place in places)
    parts = [texts[place["row"]][place["start"] : place["end"]] for place in places]
    assert [place["row"] for place in places] == sorted(place["row"] for place in places)
    assert {place["row"] for place in places} == {*range(len(texts))} and len(places) > 60
    close(vectors, reference.encode(parts, prompt=prompt))


def test_a_window_that_begins_inside_of_a_word_keeps_the_tokens_of_the_text(model_folder):
    """A word of more pieces than a window: tokenised alone, its second half would be other pieces."""
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    word = "zxqvkjw" * 3
    windows = tokenize_windows(encoder, [word], "", WindowSettings.of(encoder, "", 4, 0))
    whole = encoder.tokenize([word])[0][1:-1]
    assert np.concatenate([ids[1:-1] for ids in windows.tokens]).tolist() == whole.tolist()
    second = word[windows.starts[1] : windows.ends[1]]
    vectors = encoder.embed(windows.tokens)
    assert np.abs(vectors[1] - encoder.encode([second])[0]).max() > 1e-3, "docs/embeddings.md"
    close(vectors[0], encoder.encode([word[: windows.ends[0]]])[0])


def test_a_text_of_one_window_has_the_vector_that_it_has_without(tmp_path, model_folder):
    path = tmp_path / "short.txt"
    path.write_text("\n".join(text for text in documents(40) if len(text.split()) in range(1, 40)))
    vectors = []
    for name, options in (("cut", {}), ("windows", {"long_texts": "windows", "window": 62})):
        embed(path, tmp_path / f"{name}.parquet", model_folder, **options)
        vectors.append(read_parquet(tmp_path / f"{name}.parquet")[1])
    assert np.array_equal(*vectors) and len(vectors[0]) > 5


def test_no_batch_is_longer_than_asked_for(tmp_path, model_folder, monkeypatch):
    """A text of 20,000 tokens."""
    (tmp_path / "long.txt").write_text("The cat sat on a mat. " * 2900 + "\nA dog.\n")
    seen, forward = [], NeoBERTModel.forward
    monkeypatch.setattr(
        NeoBERTModel,
        "forward",
        lambda self, **given: seen.append(given["input_ids"].shape) or forward(self, **given),
    )
    options = {"long_texts": "windows", "tokens_per_batch": 1000}
    summary = embed(tmp_path / "long.txt", tmp_path / "out.parquet", model_folder, **options)
    assert summary["cut"] == {"texts": 0, "tokens": 0, "longest": 20302} and summary["rows"] == 2
    assert {rows for rows, _ in seen} == {1}, "packed"
    assert 900 < max(length for _, length in seen) <= 1000
    assert 20300 < sum(length for _, length in seen) < 1.4 * 20300
    places = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert (
        places["start"][0] == 0 and max(places["end"]) == len("The cat sat on a mat. " * 2900) - 1
    )


def test_texts_that_are_tokenized_in_several_batches(model_folder):
    """A batch holds a million characters: rows count on, the last text of each has its windows, and
    neighbours share an eighth of a window by default."""
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    texts = ["cat " * 150_000, "dog " * 150_000, "A horse.", "bird " * 150_000]
    settings = WindowSettings.of(encoder, "", 40)
    assert settings.overlap == 5
    windows = tokenize_windows(encoder, texts, "", settings)
    counts = np.bincount(windows.rows)
    assert counts.tolist() == [4286, 4286, 1, 4286]
    last = windows.ends[np.cumsum(counts) - 1]
    assert last.tolist() == [len(text.rstrip()) for text in texts]


# ------------------------------------------------------------------------------------------------
# what is written


def test_safetensors_has_the_places_too(corpus, model_folder, tmp_path):
    for name in ("out.parquet", "out.safetensors"):
        embed(corpus, tmp_path / name, model_folder, shard_rows=5, **WINDOWS)
    table, vectors = read_parquet(tmp_path / "out.parquet")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {"embeddings", "row", "start", "end"}
    assert np.array_equal(found["embeddings"], vectors)
    for name in ("row", "start", "end"):
        assert found[name].dtype == np.int64 and found[name].tolist() == table[name].to_pylist()


def test_kept_columns_are_those_of_each_windows_text(corpus, model_folder, tmp_path):
    embed(corpus, tmp_path / "out.parquet", model_folder, keep=["n", "text"], **WINDOWS)
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert all(row["n"] == str(row["row"]) for row in rows)
    assert all(row["text"] == documents()[row["row"]] for row in rows)


def test_an_interrupted_run_continues_bit_for_bit(corpus, model_folder, tmp_path, monkeypatch):
    settings = {**WINDOWS, "shard_rows": 4}
    summary = embed(corpus, tmp_path / "whole", model_folder, **settings)
    written = interrupt_once(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, tmp_path / "parts", model_folder, **settings)
    again = embed(corpus, tmp_path / "parts", model_folder, **settings)
    assert len(written) == len(set(written)) == 4 and again["encoded_rows"] == 6
    assert (again["vectors"], again["cut"]) == (summary["vectors"], summary["cut"])
    for part in (tmp_path / "whole").glob("part-*"):
        other = pyarrow.parquet.read_table(tmp_path / "parts" / part.name)
        assert pyarrow.parquet.read_table(part).equals(other)
    for name, change in (("window", 13), ("overlap", 3)):
        with pytest.raises(UserError, match=rf"other settings \({name} "):
            embed(corpus, tmp_path / "parts", model_folder, **{**settings, name: change})


@pytest.mark.slow
def test_processes_write_what_one_writes(corpus, model_folder, tmp_path):
    settings = {**WINDOWS, "shard_rows": 4}
    embed(corpus, tmp_path / "one.parquet", model_folder, **settings)
    embed(corpus, tmp_path / "two.parquet", model_folder, processes=2, **settings)
    one, two = read_parquet(tmp_path / "one.parquet"), read_parquet(tmp_path / "two.parquet")
    assert one[0].drop(["embedding"]).equals(two[0].drop(["embedding"]))
    np.testing.assert_allclose(one[1], two[1], atol=1e-5)


def test_ranks_share_the_parts(corpus, model_folder, tmp_path, monkeypatch):
    settings = {**WINDOWS, "shard_rows": 3}
    embed(corpus, tmp_path / "alone.parquet", model_folder, **settings)
    interrupt_once(monkeypatch, 0)
    for rank in (0, 1, 0):  # the first rank plans, and comes back at the end
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        try:
            embed(corpus, tmp_path / "out.parquet", model_folder, **settings)
        except KeyboardInterrupt:
            assert rank == 0
    alone, shared = (tmp_path / f"{name}.parquet" for name in ("alone", "out"))
    assert pyarrow.parquet.read_table(alone).equals(pyarrow.parquet.read_table(shared))


def test_the_last_line_and_the_manifest(corpus, model_folder, tmp_path, capsys):
    argv = [str(corpus), str(tmp_path / "out"), "--model", str(model_folder)]
    argv += ["--dtype", "float32", "--long-texts", "windows", "--window", "12"]
    assert encode.main(argv) == 0
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    longest = max(len(tokenizer(text, verbose=False)["input_ids"]) for text in documents())
    manifest = json.loads((tmp_path / "out" / "encode.json").read_text())
    finished = manifest["finished"]
    assert finished["rows"] == 14 and finished["vectors"] > 60
    assert finished["cut"] == {"texts": 0, "tokens": 0, "longest": longest}
    told = capsys.readouterr().out
    assert f"out: 14 texts in {finished['vectors']} windows; this run 14 texts of" in told
    assert told.endswith(f"none cut, the longest has {longest} tokens\n")


# ------------------------------------------------------------------------------------------------
# what cannot be


def test_options_that_do_not_go_together():
    given = {"source": "a", "output": "b", "model": "c"}
    for options, message in (
        ({"window": 5}, "window is for windows; give long_texts windows too"),
        ({"overlap": 0}, "overlap is for windows"),
        ({"long_texts": "all"}, "long_texts must be one of cut, windows"),
    ):
        with pytest.raises(UserError, match=message):
            EncodeArguments(**given, **options)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"window": 63}, "at most the 62 tokens that the model's 64 leave beside the prompt"),
        ({"window": 8, "overlap": 8}, "overlap must be below window, 8, but 8 was given"),
        ({"prompt": "cat " * 70}, "at most the 0 tokens that the model's 64 leave"),
        ({"keep": ["start"]}, "leave start out of --keep"),
    ],
)
def test_windows_that_cannot_be(corpus, model_folder, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        embed(corpus, tmp_path / "out.parquet", model_folder, long_texts="windows", **settings)
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_without_places(reference, monkeypatch):
    encoder = PackedEncoder(reference, dtype="float32", device="cpu")
    monkeypatch.setattr(type(reference.tokenizer), "is_fast", False)
    with pytest.raises(UserError, match="a tokenizer that tells the place of each token"):
        WindowSettings.of(encoder, "")
