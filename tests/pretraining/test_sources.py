"""Test the sources of pre-training text.

Covers types of files, names on the Hub, invalid sources, the digests that identify sources, and
prepared texts, which belong to their source and tokenizer.
"""

import json
import os

import pyarrow
import pytest
from datasets import Dataset, DatasetDict, Features, Value
from helpers.data_runs import make_tokenizer, prepare, rows_of  # noqa: F401
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from neobert.common.errors import UserError
from neobert.common.identity import tokenizer_fingerprint
from neobert.pretraining import sources
from neobert.pretraining.prepared import load_prepared, token_ids
from neobert.pretraining.sources import content_hash, load_rows, parse_sources, source_digest
from neobert.pretraining.tokenizer import count_words


def test_prepared_texts_exclude_empty_rows(tmp_path, tokenizer):
    """Check the counts, the token ids and the lengths of prepared texts."""
    rows = [{"text": text} for text in ("a river", "", " ", "green stone")]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = prepare(str(tmp_path / "text.jsonl"), tmp_path / "out", tokenizer)
    assert {name: summary[name] for name in ("rows", "kept", "tokens")} == {
        "rows": 4,
        "kept": 2,
        "tokens": 8,
    }

    tokens = load_prepared(tmp_path / "out")
    assert [tokenizer.decode(row) for row in tokens.rows["input_ids"]] == ["a river", "green stone"]
    assert tokens.lengths.tolist() == [4, 4], "[CLS] and [SEP] must be counted"


def test_damaged_prepared_texts_are_reported(tmp_path, tokenizer):
    """Check the errors about truncated files of prepared texts, as after an incomplete copy."""
    (tmp_path / "text.txt").write_text("a river\n" * 3000)
    path = tmp_path / "out"
    prepare(str(tmp_path / "text.txt"), path, tokenizer)
    content = (path / "texts.arrow").read_bytes()

    # pyarrow reads a file that ends between two batches without an error.
    with pyarrow.ipc.open_stream(path / "texts.arrow") as reader:
        schema_size = reader.schema.serialize().size
    batch_size = (len(content) - schema_size) // 3
    for size in (0, len(content) // 2, schema_size + batch_size):
        (path / "texts.arrow").write_bytes(content[:size])
        with pytest.raises(UserError, match="texts.arrow cannot be read.*to tokenize the texts"):
            load_prepared(path)

    for text in ("[]", '{"dataset": "text.txt"}'):
        (path / "prepared.json").write_text(text)
        with pytest.raises(UserError, match="prepared.json must describe"):
            prepare(str(tmp_path / "text.txt"), path, tokenizer)


def test_file_types_and_concatenated_sources(tmp_path):
    """Check text files, Parquet files and saved datasets, alone and one after another.

    A saved dataset may have several splits, or a column of the type large_string, which cannot be
    concatenated with strings of another type before it is converted.
    """
    (tmp_path / "a.txt").write_text("a river\ngreen stone\n")
    Dataset.from_dict({"body": ["winter"], "n": [1]}).to_parquet(str(tmp_path / "b.parquet"))
    Dataset.from_dict({"body": ["north"]}).save_to_disk(str(tmp_path / "saved"))
    large = Dataset.from_dict(
        {"body": ["south"]}, features=Features({"body": Value("large_string")})
    )
    large.save_to_disk(str(tmp_path / "large"))
    DatasetDict({"dev": large}).save_to_disk(str(tmp_path / "splits"))

    assert rows_of(str(tmp_path / "a.txt")) == ["a river", "green stone"]
    assert rows_of(f"file://{tmp_path}/a.txt") == ["a river", "green stone"]
    names = ("a.txt", "b.parquet", "saved", "large")
    paths = [str(tmp_path / name) for name in names]
    expected = ["a river", "green stone", "winter", "north", "south"]
    assert rows_of(paths, column="body") == expected
    assert rows_of(str(tmp_path / "splits"), column="body", split="dev") == ["south"]


def test_hub_name_with_subset_and_revision(tmp_path, monkeypatch):
    """Check the arguments of `load_dataset` for names of the form name:subset@revision."""
    calls = []

    def load_dataset(name, config, **kwargs):
        calls.append((name, config, kwargs["revision"], kwargs["split"]))
        return Dataset.from_dict({"text": ["a river"]}).to_iterable_dataset()

    monkeypatch.setattr(sources, "load_dataset", load_dataset)
    assert len(rows_of(["me/one:big@v2", "me/two@refs/convert/parquet", "me/three"])) == 3
    assert calls == [
        ("me/one", "big", "v2", "train"),
        ("me/two", None, "refs/convert/parquet", "train"),
        ("me/three", None, None, "train"),
    ]

    # Any exception of `datasets` is reported with the name of the dataset.
    monkeypatch.setattr(sources, "load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(UserError, match="dataset me/one cannot be read: division by zero"):
        rows_of("me/one")

    # In the name of an existing file, a colon and an @ have no special meaning.
    (tmp_path / "a:b@c.txt").write_text("a river\n")
    assert rows_of(str(tmp_path / "a:b@c.txt")) == ["a river"]


def test_globs_with_at_signs_and_home_directories(tmp_path, monkeypatch):
    """Check that a glob or a path is not split at an @ or a colon, and that ~ is expanded."""
    (tmp_path / "a:b@c").mkdir()
    (tmp_path / "a:b@c" / "x.txt").write_text("a river\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (f"{tmp_path}/a:b@c/*.txt", "a:b@c/?.txt", "~/a:b@c", "~/a:b@c/[x].txt"):
        assert rows_of(name) == ["a river"], name
        assert source_digest(parse_sources(name))

    for name in ("./a@b", "/a@b", "~a@b/c"):
        (source,) = parse_sources(name)
        assert (source.name, source.revision, source.source_type) == (name, None, "files")


def test_lone_surrogates_are_replaced(tmp_path, tokenizer):
    """Check that one half of a surrogate pair, which no tokenizer can encode, becomes U+FFFD."""
    rows = ['{"text": "a \\ud800 river"}', '{"text": "green stone"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    assert rows_of(str(tmp_path / "a.jsonl")) == ["a \ufffd river", "green stone"]
    assert prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer)["kept"] == 2

    # Rows of other datasets are not read by `common.data`.
    assert token_ids(tokenizer, ["\ud800 river"]) == token_ids(tokenizer, ["\ufffd river"])
    words, _ = count_words([{"text": "a \udfff river"}], 100, tokenizer.backend_tokenizer)
    assert words["river"] == 1


def test_paths_are_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    """Check which names of sources are paths and which are names on the Hub."""
    monkeypatch.chdir(tmp_path)
    for name in ("texts.txt", "more.jsonl.gz", "./texts", "/texts", "~/texts", "a/b/c", "a*"):
        assert parse_sources(name)[0].source_type == "files", name
        with pytest.raises(UserError):
            rows_of(name)
    for name in ("wikitext", "me/data", "me/data-v1.5", "me/some.data"):
        assert parse_sources(name)[0].source_type == "hub", name


BAD = {
    "a.jsonl": "no column 'text'",
    "d.txt": "it has no rows|d.txt has no rows",
    "h.parquet": "'text' must be text, got 1",
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_sources_are_reported(tmp_path, tokenizer, name):
    """Check that an error has a single line, and that nothing is written."""
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "d.txt").write_text("\n\n")
    Dataset.from_dict({"text": [1, 2]}).to_parquet(str(tmp_path / "h.parquet"))

    with pytest.raises(UserError, match=BAD[name]) as error:
        prepare(str(tmp_path / name), tmp_path / "out", tokenizer)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    # Processes that fork later must not wait for threads of the tokenizer.
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_empty_cells_of_files_are_ignored(tmp_path, tokenizer):
    """Check that an empty cell of a file is an empty text, like that of a saved dataset."""
    texts = Dataset.from_dict({"text": ["a river", None, "green stone"]})
    texts.to_parquet(str(tmp_path / "a.parquet"))
    texts.to_json(str(tmp_path / "a.jsonl"))
    texts.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "a.jsonl", "saved"):
        summary = prepare(str(tmp_path / name), tmp_path / f"prepared-{name}", tokenizer)
        assert (summary["rows"], summary["kept"]) == (3, 2), name


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "`texts` must contain at least one source, got an empty list"),
        ([{"column": "a"}], "every entry of `texts` must have a name"),
        ([{"name": "a", "size": 1}], "unknown key 'size' in `texts`"),
    ],
)
def test_invalid_lists_of_sources_are_reported(dataset, message):
    """Check that the error contains the name of the option."""
    with pytest.raises(UserError, match=message):
        parse_sources(dataset, option="texts")


@pytest.mark.parametrize("values", [[1, 2], [["a"], ["b"]]])
def test_a_column_of_a_saved_dataset_must_contain_text(tmp_path, values):
    """Check the message about a column of numbers or lists."""
    Dataset.from_dict({"text": values}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="the column 'text' of the dataset .* must contain text"):
        next(iter(load_rows(parse_sources(str(tmp_path / "saved")))))


def test_unknown_split_of_a_saved_dataset_is_reported(tmp_path):
    """Check that the message lists the splits."""
    rows = Dataset.from_dict({"text": ["a river"]})
    DatasetDict({"dev": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="it has no split 'train', only dev, test"):
        load_rows(parse_sources(str(tmp_path / "saved")))


def test_prepared_texts_require_the_same_source_and_tokenizer(tmp_path, tokenizer):
    """Check that prepared texts of another source or tokenizer, and other files, are refused."""
    (tmp_path / "a.txt").write_text("a river\n")
    (tmp_path / "b.txt").write_text("green stone\n")
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match="with other settings .dataset 'a.txt', now 'b.txt'"):
        prepare(str(tmp_path / "b.txt"), tmp_path / "out", tokenizer)

    summary = json.loads((tmp_path / "out" / "prepared.json").read_text())
    (tmp_path / "out" / "prepared.json").write_text(json.dumps({**summary, "tokenizer": "0"}))
    with pytest.raises(UserError, match="with other settings .tokenizer '0', now"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer)

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("")
    with pytest.raises(UserError, match="already exists"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "other", tokenizer)


def test_source_is_identified_by_content_and_not_by_path(tmp_path):
    """Check that the content of a source identifies it, and not its path.

    The sources are a file and a saved dataset. Their contents have the same size.
    """

    def write(folder, word):
        folder.mkdir()
        (folder / "a.jsonl").write_text(f'{{"text": "{word}"}}\n' * 2)
        Dataset.from_dict({"text": [word]}).save_to_disk(str(folder / "saved"))

    for folder, word in (("A", "river"), ("B", "river"), ("C", "stone")):
        write(tmp_path / folder, word)

    for name in ("a.jsonl", "saved"):
        one, copy, other = (
            source_digest(parse_sources(str(tmp_path / folder / name))) for folder in "ABC"
        )
        assert one == copy, f"a copy of {name} must be the same source"
        assert one != other, f"{name} with other text must be another source"


def test_the_column_of_every_source_identifies_the_sources(tmp_path):
    """Check that the digest changes with the column of one source of several.

    The set of all columns remains the same.
    """
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "river", "title": "stone"}\n')

    def digest(*columns):
        names = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
        entries = zip(names, columns, strict=True)
        return source_digest(
            parse_sources([{"name": name, "column": column} for name, column in entries])
        )

    assert digest("text", "title", "text") == digest("text", "title", "text")
    assert digest("text", "title", "text") != digest("text", "title", "title")


@pytest.mark.parametrize("block", range(16))
def test_content_hash_detects_a_change_in_each_sampled_block(tmp_path, block):
    """Check that a change of one byte in a block that is read changes the digest.

    The file has 61 blocks of 64 KiB, of which every fourth is read.
    """
    path = tmp_path / "large.txt"
    content = bytearray(61 << 16)
    path.write_bytes(content)
    before = content_hash([path])
    content[(4 * block << 16) + 7] = 1
    path.write_bytes(content)
    assert content_hash([path]) != before


def test_tokenizer_fingerprint_depends_on_case(tokenizer):
    """Check that an uncased and a cased tokenizer with the same vocabulary are distinguished."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["normalizer"]["lowercase"] = False
    roles = {role: getattr(tokenizer, role) for role in ("unk_token", "cls_token", "sep_token")}
    cased = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), **roles
    )
    assert cased.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_fingerprint(cased) != tokenizer_fingerprint(tokenizer)
