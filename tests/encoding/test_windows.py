"""Tests of `neobert encode --long-texts windows`: embeddings, batches, positions, and errors."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from helpers.encode_runs import (
    WORDS,
    embed,
    make_model_folder,  # noqa: F401
    make_options,
    make_reference,  # noqa: F401
    read_parquet,
)
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer

from neobert.common.errors import UserError
from neobert.embeddings import windows as windows_module
from neobert.embeddings.cpu_forward import CpuForward
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.embeddings.windows import WindowSettings, text_groups, text_windows
from neobert.encoding import command as encode
from neobert.encoding import parts
from neobert.encoding.corpus_encoder import CorpusEncoder
from neobert.encoding.manifest import Truncation
from neobert.encoding.options import OPTIONS


WINDOWS = {"long_texts": "windows", "window": 12, "overlap": 4}


def documents(count=14):
    """Return texts of 0 to about 300 tokens. The model truncates texts of more than 64 tokens."""
    generator = random.Random(0)
    texts = ["", "a cat", "Dogs ran. It sat!"]
    for number in range(3, count):
        sentences = [
            " ".join(generator.choices(WORDS, k=generator.randrange(2, 17))).capitalize()
            for _ in range(generator.choice((1, 3, 6, 30)) + number % 2)
        ]
        texts.append(". ".join(sentences) + ".")
    return texts


@pytest.fixture(name="corpus")
def make_documents(tmp_path):
    """Write the texts of `documents` with an id and a number, and return the path."""
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": f"row-{i}", "text": text, "n": i} for i, text in enumerate(documents())]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def assert_close(embeddings, expected):
    """Check that embeddings are equal, except for rounding errors."""
    np.testing.assert_allclose(embeddings, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


# ------------------------------------------------------------------------------------------------
# embeddings


@pytest.mark.parametrize("prompt", ["", "find the cat: "])
def test_window_embeddings_match_sentence_transformers(
    corpus, model_folder, reference, tmp_path, prompt
):
    """The embedding of a window is that of its text, and the output contains its position."""
    embed(corpus, tmp_path / "out.parquet", model_folder, prompt=prompt, keep=["id"], **WINDOWS)
    table, embeddings = read_parquet(tmp_path / "out.parquet")
    assert table.column_names == ["id", "file", "row", "start", "end", "embedding"]
    windows = table.select(["id", "row", "start", "end"]).to_pylist()
    texts = documents()
    assert all(window["id"] == f"row-{window['row']}" for window in windows)

    parts = [texts[window["row"]][window["start"] : window["end"]] for window in windows]
    assert [window["row"] for window in windows] == sorted(window["row"] for window in windows)
    assert {window["row"] for window in windows} == {*range(len(texts))} and len(windows) > 60
    assert_close(embeddings, reference.encode(parts, prompt=prompt))


def test_window_within_a_word_keeps_the_tokens_of_the_text(model_folder):
    """A window that starts within a word has the tokens of the complete text.

    The word has more tokens than a window. Tokenizing its second part alone would give other
    tokens, and another embedding.
    """
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    word = "zxqvkjw" * 3
    tokenizer = encoder.sentence_transformer.tokenizer
    settings = WindowSettings.from_model(tokenizer, encoder.max_length, "", 4, 0)
    windows = text_windows(tokenizer, encoder.max_length, [word], "", settings)
    tokens = encoder.tokenize([word])[0][1:-1]
    assert np.concatenate([ids[1:-1] for ids in windows.tokens]).tolist() == tokens.tolist()

    second_text = word[windows.starts[1] : windows.ends[1]]
    embeddings = encoder.embed(windows.tokens)

    # docs/embeddings.md describes this difference.
    assert np.abs(embeddings[1] - encoder.encode([second_text])[0]).max() > 1e-3, (
        "the second window has the embedding of its text alone"
    )
    assert_close(embeddings[0], encoder.encode([word[: windows.ends[0]]])[0])


def test_short_text_has_the_same_embedding_as_without_windows(tmp_path, model_folder):
    """A text that fits into one window has the same embedding as without windows."""
    path = tmp_path / "short.txt"
    path.write_text("\n".join(text for text in documents(40) if len(text.split()) in range(1, 40)))
    embeddings = []
    for name, options in (("truncate", {}), ("windows", {"long_texts": "windows", "window": 62})):
        embed(path, tmp_path / f"{name}.parquet", model_folder, **options)
        embeddings.append(read_parquet(tmp_path / f"{name}.parquet")[1])
    assert np.array_equal(*embeddings) and len(embeddings[0]) > 5


def test_window_batches_respect_the_token_budget(tmp_path, model_folder, monkeypatch):
    """The batches of a text of 20,000 tokens keep the token budget."""
    (tmp_path / "long.txt").write_text("The cat sat on a mat. " * 2900 + "\nA dog.\n")
    token_counts = []
    forward_call = CpuForward.__call__

    monkeypatch.setattr(
        CpuForward,
        "__call__",
        lambda self, texts: token_counts.append(sum(map(len, texts))) or forward_call(self, texts),
    )

    options = {"long_texts": "windows", "batch_tokens": 1000}
    summary = embed(tmp_path / "long.txt", tmp_path / "out.parquet", model_folder, **options)

    assert summary.truncation == Truncation(0, 0, 20302) and summary.texts == 2
    assert 900 < max(token_counts) <= 1000
    assert 20300 < sum(token_counts) < 1.4 * 20300

    columns = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert (
        columns["start"][0] == 0 and max(columns["end"]) == len("The cat sat on a mat. " * 2900) - 1
    )


def test_texts_that_are_tokenized_in_several_batches(model_folder):
    """Texts that are tokenized in several batches have the correct rows and windows.

    A batch of the tokenizer has at most a million characters. The default overlap is an eighth of
    a window.
    """
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    texts = ["cat " * 150_000, "dog " * 150_000, "A horse.", "bird " * 150_000]
    tokenizer = encoder.sentence_transformer.tokenizer
    settings = WindowSettings.from_model(tokenizer, encoder.max_length, "", 40)
    assert settings.overlap == 5

    windows = text_windows(tokenizer, encoder.max_length, texts, "", settings)
    counts = np.bincount(windows.rows)
    assert counts.tolist() == [4286, 4286, 1, 4286]

    last_ends = windows.ends[np.cumsum(counts) - 1]
    assert last_ends.tolist() == [len(text.rstrip()) for text in texts]


@pytest.mark.parametrize("limit", [1, 10, 25, 1000])
def test_groups_of_texts_have_a_maximum_number_of_characters(monkeypatch, limit):
    """Groups contain every text once, and at most `limit` characters or a single text.

    Each group is as large as possible.
    """
    monkeypatch.setattr(windows_module, "_CHARACTERS", limit)
    generator = random.Random(limit)
    for count in range(30):
        lengths = [generator.choice((0, 1, 3, 9, 30)) for _ in range(count)]
        groups = [list(range(count))[group] for group in text_groups(lengths)]
        assert sum(groups, []) == list(range(count)) and all(groups)
        for group, following in zip(groups, [*groups[1:], None]):
            size = sum(lengths[index] for index in group)
            assert size <= limit or len(group) == 1
            if following is not None:
                assert size + lengths[following[0]] > limit


@pytest.mark.parametrize("include_prompt", [True, False])
def test_texts_are_encoded_without_the_tokenizer(reference, monkeypatch, include_prompt):
    """The thread that runs the model does not tokenize the prompt.

    Another thread tokenizes texts at the same time, and truncation is a setting of the tokenizer.
    """
    pooling = Pooling(64, "max", include_prompt=include_prompt)
    model = SentenceTransformer(modules=[reference[0], pooling], device="cpu")
    encoder = PackedEncoder(model, device="cpu")
    assert not encoder.packs

    prompt = "find the cat: "
    options = make_options(source="a", output="b", model="c", prompt=prompt, **WINDOWS)
    corpus_encoder = CorpusEncoder(encoder, options.model, options.long_texts, options.embeddings)
    windows, _ = corpus_encoder.tokenize(documents())
    texts = [documents()[row][start:end] for row, start, end in zip(*windows[1:4])]
    expected = model.encode(texts, prompt=prompt)

    pad = encoder._tokenizer.pad
    monkeypatch.setattr(encoder, "_tokenizer", SimpleNamespace(pad=pad))
    assert_close(corpus_encoder.embed(windows.tokens), expected)


# ------------------------------------------------------------------------------------------------
# output


def test_rows_contain_window_positions_and_copied_columns(corpus, model_folder, tmp_path, capsys):
    """Each row contains the position of its window and the copied columns of its text."""
    options = ["--model", str(model_folder), "--dtype", "float32", "--keep", "n,text"]
    options += ["--long-texts", "windows", "--window", "12", "--rows", "4"]

    for shard in ("0/2", "1/2"):
        assert encode.main([str(corpus), str(tmp_path / "out"), *options, "--shard", shard]) == 0

    rows = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
    assert all(row["n"] == row["row"] and row["file"] == "corpus.jsonl" for row in rows)
    assert all(row["text"] == documents()[row["row"]] for row in rows)

    assert encode.main([str(corpus), str(tmp_path / "out.parquet"), *options]) == 0
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist() == rows

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    longest = max(len(tokenizer(text, verbose=False)["input_ids"]) for text in documents())
    output = capsys.readouterr().out
    assert f"out.parquet: 14 texts in {len(rows)} windows; this run 14 texts of" in output
    assert output.endswith(
        f"none truncated, the longest has {longest} tokens; all parts are complete\n"
    )


@pytest.mark.parametrize("limit", [1, 2000])
def test_windows_with_long_copied_texts_are_written_in_parts(
    corpus, model_folder, tmp_path, monkeypatch, limit
):
    """The output does not depend on `_TABLE_BYTES`, which bounds the memory of repeated texts."""
    options = {"keep": ["id,text"], **WINDOWS}
    embed(corpus, tmp_path / "one.parquet", model_folder, **options)
    monkeypatch.setattr(parts, "_TABLE_BYTES", limit)
    embed(corpus, tmp_path / "many", model_folder, **options)

    table = pyarrow.parquet.read_table(tmp_path / "one.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "many").equals(table)

    # Each table that is written is a row group of the part.
    metadata = pyarrow.parquet.read_metadata(tmp_path / "many" / "corpus-00000.parquet")
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    assert sum(sizes) == len(table) > 60
    if limit == 1:
        assert set(sizes) == {1}
    else:
        # The mean size of a copied row is that of all texts.
        characters = sum(map(len, documents())) / len(documents())
        assert len(set(sizes[:-1])) == 1 and 1 < sizes[0] <= limit / characters


# ------------------------------------------------------------------------------------------------
# errors


def test_contradictory_options_are_refused():
    """Options that contradict each other end with an error."""
    for options, message in (
        ("--window 5", "`window` requires `--long-texts windows`."),
        ("--overlap 0", "`overlap` requires `--long-texts windows`."),
        ("--long-texts cut", "`--long-texts` must be one of truncate, windows, got 'cut'."),
        ("--prompt a --prompt-name b", "`prompt` and `prompt_name` cannot be combined. Pass one"),
    ):
        with pytest.raises(UserError, match=message):
            OPTIONS["encode"].read(["a", "b", "--model", "c", *options.split()])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"window": 63}, "`window` must be at most 62, the model's 64 tokens without the prompt"),
        ({"window": 8, "overlap": 8}, "`overlap` must be less than `window`, 8, got 8."),
        ({"prompt": "cat " * 70}, "`window` must be at most 0, the model's 64 tokens"),
        ({"keep": ["start"]}, "`keep` must not contain the output's own columns .*, got start."),
    ],
)
def test_unsupported_windows_are_refused(corpus, model_folder, tmp_path, settings, message):
    """Windows that the model or the output does not support end with an error."""
    with pytest.raises(UserError, match=message):
        embed(corpus, tmp_path / "out.parquet", model_folder, long_texts="windows", **settings)
    assert not list(tmp_path.glob("out*"))
