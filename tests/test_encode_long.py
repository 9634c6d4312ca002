"""Pins `neobert encode --long-texts windows`: the vectors are those of a hand-made loop over the
windows, alone and `--late`; a document is read once, without padding, in bounded memory; an
interrupted run continues bit for bit; and what is written tells the place of each window."""

import json
import random

import numpy as np
import pytest
import torch


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
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoTokenizer, BertConfig, BertModel

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common.errors import UserError
from neobert.embeddings import encode
from neobert.embeddings.long_texts import WindowSettings, tokenize_windows
from neobert.embeddings.options import EncodeArguments
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.embeddings.spans import passes


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


def late_by_hand(model, tokenizer, text, found, prompt="", room=62, counts_prompt=True):
    """Vectors of the windows of one text: each pass on its own, a loop over its windows."""
    own = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    before = tokenizer(prompt)["input_ids"][:-1]
    room, vectors = room - len(before) + 1, []
    for one in passes(found, len(own), room, room // 8):
        ids = [*before, *own[one.first : one.stop], tokenizer.sep_token_id]
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        for span in one.spans:
            first = span.first - one.first + len(before)
            stop = span.stop - one.first + len(before)
            if span.first == 0:
                first = 0 if counts_prompt or not prompt else len(before)
            if span.stop == len(own):
                stop = len(ids)
            vectors.append(hidden[first:stop].sum(0) / (stop - first))
    return torch.stack(vectors).numpy()


def found_spans(tokenizer, text):
    from neobert.embeddings.spans import spans

    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    return spans(text, offsets, 12, 4)


@pytest.mark.parametrize("prompt", ["", "find the cat: "])
def test_late_windows_are_those_of_a_loop_over_the_passes(corpus, model_folder, tmp_path, prompt):
    embed(corpus, tmp_path / "out.parquet", model_folder, prompt=prompt, late=True, **WINDOWS)
    table, vectors = read_parquet(tmp_path / "out.parquet")
    model = NeoBERTModel.from_pretrained(model_folder).eval()
    tokenizer, expected = AutoTokenizer.from_pretrained(model_folder), []
    for text in documents():
        found = found_spans(tokenizer, text)
        expected.append(late_by_hand(model, tokenizer, text, found, prompt))
    close(vectors, np.concatenate(expected))
    embed(corpus, tmp_path / "alone.parquet", model_folder, prompt=prompt, **WINDOWS)
    alone, other = read_parquet(tmp_path / "alone.parquet")
    assert alone.drop(["embedding"]).equals(table.drop(["embedding"])), "the same windows"
    assert np.abs(other - vectors).max() > 0.01, "vacuous: both ways are one"


@pytest.mark.parametrize("counts_prompt", [True, False])
def test_late_windows_of_a_model_that_does_not_pack(tmp_path, tokenizer_dir, counts_prompt):
    torch.manual_seed(0)
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 64, "max_position_embeddings": 64}
    BertModel(BertConfig(**config)).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.save_pretrained(tmp_path)
    pooling = Pooling(32, "mean", include_prompt=counts_prompt)
    model = SentenceTransformer(
        modules=[Transformer(str(tmp_path), max_seq_length=64), pooling, Normalize()], device="cpu"
    )
    encoder, texts = PackedEncoder(model, tokens_per_batch=200, device="cpu"), documents()
    assert not encoder.packs
    settings = WindowSettings.of(encoder, "the cat ", 12, 4, late=True)
    windows = tokenize_windows(encoder, texts, "the cat ", settings)
    vectors, expected = encoder.embed(windows.tokens, ranges=windows.ranges), []
    plain = BertModel.from_pretrained(tmp_path).eval()
    for text in texts:
        found = found_spans(tokenizer, text)
        expected.append(late_by_hand(plain, tokenizer, text, found, "the cat ", 62, counts_prompt))
    expected = np.concatenate(expected)
    close(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True))


def test_a_later_sentence_knows_the_first(model_folder):
    """Late: the same third sentence after another name has another vector. Alone it has not."""
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    texts = [
        f"{name} sat on a mat. Dogs ran over hills. It found water." for name in ("Cat", "Dog")
    ]
    for late in (True, False):
        settings = WindowSettings.of(encoder, "", 6, 0, late)
        windows = tokenize_windows(encoder, texts, "", settings)
        vectors = encoder.embed(windows.tokens, ranges=windows.ranges)
        assert windows.rows.tolist() == [0, 0, 0, 1, 1, 1]
        assert (np.abs(vectors[2] - vectors[5]).max() > 1e-4) == late


def test_a_text_of_one_window_has_the_vector_that_it_has_without(tmp_path, model_folder):
    path = tmp_path / "short.txt"
    path.write_text("\n".join(text for text in documents(40) if len(text.split()) in range(1, 40)))
    vectors = []
    for name, options in (
        ("cut", {}),
        ("alone", {"long_texts": "windows", "window": 62}),
        ("late", {"long_texts": "windows", "window": 62, "late": True}),
    ):
        embed(path, tmp_path / f"{name}.parquet", model_folder, **options)
        vectors.append(read_parquet(tmp_path / f"{name}.parquet")[1])
    assert np.array_equal(vectors[0], vectors[1]) and np.array_equal(vectors[0], vectors[2])
    assert len(vectors[0]) > 5


def test_a_document_is_read_once_and_without_padding(model_folder, monkeypatch):
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu", tokens_per_batch=300)
    texts = [text for text in documents(40) if len(text.split()) < 40]
    settings, forward, seen = (
        WindowSettings.of(encoder, "", 12, 4, late=True),
        NeoBERTModel.forward,
        [],
    )
    windows = tokenize_windows(encoder, texts, "", settings)
    model = type(encoder.sentence_transformer[0].auto_model)
    monkeypatch.setattr(
        model,
        "forward",
        lambda self, **given: seen.append(given["input_ids"].shape) or forward(self, **given),
    )
    encoder.embed(windows.tokens, ranges=windows.ranges)
    # A batch in float32 is filled up to a multiple of 16 tokens.
    assert all(length % 16 == 0 for _, length in seen)
    beyond = sum(length for _, length in seen) - sum(map(len, encoder.tokenize(texts)))
    assert 0 <= beyond < 16 * len(seen)
    assert {rows for rows, _ in seen} == {1} and 1 < len(seen) < len(texts)
    assert len(windows.rows) > 1.5 * len(texts)


@pytest.mark.parametrize("late", [True, False])
def test_no_batch_is_longer_than_the_context(tmp_path, tokenizer_dir, monkeypatch, late):
    """A text of 20,000 tokens, a model of 4,096 positions."""
    torch.manual_seed(1)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = NeoBERTConfig(**small, intermediate_size=16, max_position_embeddings=4096)
    NeoBERTModel(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    (tmp_path / "long.txt").write_text("The cat sat on a mat. " * 2900 + "\nA dog.\n")
    seen, forward = [], NeoBERTModel.forward
    monkeypatch.setattr(
        NeoBERTModel,
        "forward",
        lambda self, **given: seen.append(given["input_ids"].shape[1]) or forward(self, **given),
    )
    summary = embed(
        tmp_path / "long.txt",
        tmp_path / "out.parquet",
        tmp_path / "model",
        long_texts="windows",
        late=late,
        tokens_per_batch=1000,
    )
    assert summary["cut"] == {"texts": 0, "tokens": 0, "longest": 20302} and summary["rows"] == 2
    assert max(seen) == 4096 if late else max(seen) <= 1000
    assert 20300 < sum(seen) < 1.4 * 20300
    places = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert (
        places["start"][0] == 0 and max(places["end"]) == len("The cat sat on a mat. " * 2900) - 1
    )


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


@pytest.mark.parametrize("late", [True, False])
def test_an_interrupted_run_continues_bit_for_bit(
    corpus, model_folder, tmp_path, monkeypatch, late
):
    settings = {**WINDOWS, "late": late, "shard_rows": 4}
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
    for name, change in (("window", 13), ("overlap", 3), ("late", not late)):
        with pytest.raises(UserError, match=rf"other settings \({name} "):
            embed(corpus, tmp_path / "parts", model_folder, **{**settings, name: change})


@pytest.mark.slow
def test_processes_write_what_one_writes(corpus, model_folder, tmp_path):
    settings = {**WINDOWS, "late": True, "shard_rows": 4}
    embed(corpus, tmp_path / "one.parquet", model_folder, **settings)
    embed(corpus, tmp_path / "two.parquet", model_folder, processes=2, **settings)
    one, two = read_parquet(tmp_path / "one.parquet"), read_parquet(tmp_path / "two.parquet")
    assert one[0].drop(["embedding"]).equals(two[0].drop(["embedding"]))
    np.testing.assert_allclose(one[1], two[1], atol=1e-5)


def test_ranks_share_the_parts(corpus, model_folder, tmp_path, monkeypatch):
    settings = {**WINDOWS, "late": True, "shard_rows": 3}
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
        ({"late": True}, "late is for windows"),
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
        ({"late": True, "pooling": "cls"}, "mean over the tokens .* pooling is 'cls'"),
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
