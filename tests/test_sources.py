"""Pins the sources of pre-training text: skipped and broken rows, kinds of files, names of the Hub,
and prepared sets that belong to their source and tokenizer."""

import gzip
import json
import shutil
import textwrap

import pytest
from data_runs import make_texts, make_tokenizer, prepare, rows_of  # noqa: F401
from datasets import Dataset, DatasetDict, Features, Value

from neobert.common.errors import UserError
from neobert.common.runs import locked
from neobert.pretraining import prepared, sources
from neobert.pretraining.prepared import BROKEN, EMPTY, Tokenise, load_prepared, source_digest
from neobert.pretraining.sources import parse_sources


def test_jsonl_with_empty_and_broken_rows_is_counted(tmp_path, tokenizer):
    rows = [
        '{"text": "a river"}',
        '{"text": ""}',
        "{broken",
        '{"other": 1}',
        '{"text": 7}',
        "",
        '{"text": "green stone"}',
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(rows) + "\n")
    summary = prepare(str(tmp_path / "text.jsonl"), tmp_path / "out", tokenizer)
    counts = {name: summary[name] for name in ("rows", "kept", "empty", "broken", "tokens")}
    assert counts == {"rows": 6, "kept": 2, "empty": 1, "broken": 3, "tokens": 8}, (
        "every row must be kept or counted; a blank line is not one"
    )
    tokens, _ = load_prepared(tmp_path / "out", tokenizer)
    assert [tokenizer.decode(row) for row in tokens.rows["input_ids"]] == ["a river", "green stone"]
    assert tokens.lengths.tolist() == [4, 4], "the stored length counts [CLS] and [SEP]"


BROKEN_ROWS = (
    b"caf\xe9 in another encoding",
    b'{"text": null}',
    b"[1, 2]",
    b"null",
    b'{"text": "\\ud800 half a pair"}',
    b"[" * 100_000,
)


@pytest.mark.parametrize("streaming", [False, True])
def test_no_broken_row_is_fatal(tmp_path, tokenizer, streaming):
    """Bytes that are no UTF-8, other JSON types, line separators within a text, a byte order mark,
    Windows line ends, no last line end."""
    good = [
        b'\xef\xbb\xbf{"text": "a river"}\r',
        '{"text": "green\u2028stone\x85"}'.encode(),
        b'{"text": "winter"}',
    ]
    (tmp_path / "text.jsonl").write_bytes(
        b"\n".join([good[0], *BROKEN_ROWS, b"", b"   ", *good[1:]])
    )
    expected = {"kept": 3, "empty": 0, "broken": len(BROKEN_ROWS)}
    assert _counts(tmp_path / "text.jsonl", tmp_path / "a", tokenizer, streaming) == expected
    (tmp_path / "lines.txt").write_bytes(b"a river\ncaf\xe9\n\ngreen\xe2\x80\xa8stone")
    assert _counts(tmp_path / "lines.txt", tmp_path / "b", tokenizer, streaming) == {
        "kept": 2,
        "empty": 0,
        "broken": 1,
    }
    Dataset.from_dict({"text": ["a river", None, ""]}).to_parquet(str(tmp_path / "rows.parquet"))
    assert _counts(tmp_path / "rows.parquet", tmp_path / "c", tokenizer, streaming) == {
        "kept": 1,
        "empty": 1,
        "broken": 1,
    }


def _counts(source, out, tokenizer, streaming):
    if not streaming:
        summary = prepare(str(source), out, tokenizer)
        return {name: summary[name] for name in ("kept", "empty", "broken")}
    rows = rows_of(str(source), streaming=True)
    lengths = [
        row["length"]
        for row in rows.map(
            Tokenise(tokenizer), batched=True, batch_size=2, remove_columns=["text"]
        )
    ]
    return {
        "kept": sum(length > 0 for length in lengths),
        "empty": lengths.count(EMPTY),
        "broken": lengths.count(BROKEN),
    }


def test_the_column_may_appear_after_many_broken_rows(tmp_path, tokenizer):
    (tmp_path / "text.jsonl").write_text("{broken\n" * 300 + '{"text": "a river"}\n')
    assert prepare(str(tmp_path / "text.jsonl"), tmp_path / "out", tokenizer)["kept"] == 1


def test_text_parquet_saved_and_several_sources(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a river\ngreen stone\n")
    Dataset.from_dict({"body": ["winter"], "n": [1]}).to_parquet(str(tmp_path / "b.parquet"))
    Dataset.from_dict({"body": ["north"]}).save_to_disk(str(tmp_path / "saved"))

    def read(dataset, column):
        return list(rows_of(dataset, column=column)["text"])

    assert read(str(tmp_path / "a.txt"), "text") == ["a river", "green stone"]
    assert read(str(tmp_path / "b.parquet"), "body") == ["winter"]
    assert read(str(tmp_path / "saved"), "body") == ["north"]
    assert read(f"{tmp_path / 'b.parquet'}, {tmp_path / 'saved'}", "body") == ["winter", "north"]
    large = Dataset.from_dict(
        {"body": ["south"]}, features=Features({"body": Value("large_string")})
    )
    large.to_parquet(str(tmp_path / "l.parquet"))
    assert read(f"{tmp_path / 'b.parquet'}, {tmp_path / 'l.parquet'}", "body") == [
        "winter",
        "south",
    ], "both kinds of strings must mix"
    stream = rows_of(
        f"{tmp_path / 'a.txt'}, {tmp_path / 'l.parquet'}", column="body", streaming=True
    )
    batches = stream.map(
        lambda batch: {"length": [len(text) for text in batch["text"]]}, batched=True, batch_size=64
    )
    assert [row["length"] for row in batches] == [7, 11, 5], "also in one batch of a stream"
    streamed = rows_of([str(tmp_path / "saved")], column="body", streaming=True)
    assert [row["text"] for row in streamed] == ["north"], "a saved set can be streamed too"


def test_a_hub_name_may_carry_a_subset_and_a_revision(tmp_path, monkeypatch):
    asked = []

    def loaded(name, config, **more):
        asked.append((name, config, more["revision"], more["split"]))
        return Dataset.from_dict({"text": ["a river"]})

    monkeypatch.setattr(sources, "load_dataset", loaded)
    rows = rows_of("me/one:big@v2, me/two@refs/convert/parquet, me/three", subset="small")
    assert asked == [
        ("me/one", "big", "v2", "train"),
        ("me/two", "small", "refs/convert/parquet", "train"),
        ("me/three", "small", None, "train"),
    ]
    assert len(rows) == 3
    monkeypatch.setattr(sources, "load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(
        UserError, match="dataset me/one cannot be read from the Hub .division by zero."
    ):
        rows_of("me/one")
    monkeypatch.undo()
    (tmp_path / "a:b@c.txt").write_text("a river\n")
    assert list(rows_of(str(tmp_path / "a:b@c.txt"))["text"]) == ["a river"], (
        "a file that is there is taken by its whole name"
    )


def test_a_comma_may_be_in_a_files_name(tmp_path):
    (tmp_path / "a,b.txt").write_text("a river\n")
    (tmp_path / "c.txt").write_text("winter\n")
    one, other = str(tmp_path / "a,b.txt"), str(tmp_path / "c.txt")
    assert [source.name for source in parse_sources(one)] == [one]
    assert [source.name for source in parse_sources([one, f"{other}, {other}"])] == [
        one,
        other,
        other,
    ]
    assert len(parse_sources(", ".join([other] * 500))) == 500, (
        "a list may be longer than a file's name can be"
    )


def test_bad_sources_are_one_sentence(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    Dataset.from_dict({"body": ["winter"]}).to_parquet(str(tmp_path / "b.parquet"))
    (tmp_path / "c.csv").write_text("x")
    (tmp_path / "c.odt").write_text("x")
    (tmp_path / "d.txt").write_text("\n\n")
    (tmp_path / "e.txt").write_text("")
    (tmp_path / "f.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a river"}\n' * 999)[:-9])
    Dataset.from_dict({"text": [1, 2]}).to_parquet(str(tmp_path / "h.parquet"))
    for dataset, words in (
        (tmp_path / "a.jsonl", "no column 'text', only body"),
        (tmp_path / "b.parquet", "no column 'text', only body"),
        (tmp_path / "c.csv", "no column 'text', nor any row; name it with --column"),
        (tmp_path / "c.odt", "found .odt"),
        (tmp_path / "no" / "such.jsonl", "found nothing"),
        (tmp_path / "d.txt", "it has no rows"),
        (tmp_path / "e.txt", "it has no rows"),
        (tmp_path / "f.parquet", "cannot be read .*arquet"),
        (tmp_path / "g.jsonl.gz", "cannot be read .*ended before"),
        (tmp_path / "h.parquet", "holds int64, not text"),
    ):
        with pytest.raises(UserError, match=words) as error:
            prepare(str(dataset), tmp_path / f"out-{dataset.name}", tokenizer)
        assert "\n" not in str(error.value)
        assert not (tmp_path / f"out-{dataset.name}" / "prepared.json").exists(), (
            "nothing may look finished"
        )


def test_a_json_array_is_told_how_to_become_jsonl(tmp_path, tokenizer):
    for name, text in (
        ("compact.json", '[{"text": "a river"}, {"text": "green"}]'),
        ("indented.json", '[\n  {"text": "a river"}\n]'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(
            UserError, match=rf"{name}, line 1 .*; of an array make such lines: jq -c"
        ):
            rows_of(str(tmp_path / name))
    (tmp_path / "rows.jsonl").write_text('[1, 2]\n{"text": "a river"}\n')
    assert prepare(str(tmp_path / "rows.jsonl"), tmp_path / "out", tokenizer)["kept"] == 1, (
        "a broken first row is a broken row"
    )


def test_a_book_is_not_one_text_a_line(tmp_path, capsys):
    book = textwrap.fill(
        "It was a dark and stormy night, and the rain fell in torrents, except at occasional "
        "intervals. " * 40,
        72,
    )
    verse = "\n".join(["A short line.", "Another one!"] * 30)
    longer = "\n".join(["a text of one line that goes on and on " * 10] * 30)
    for name, text, warned in (
        ("book", book, True),
        ("verse", verse, False),
        ("longer", longer, False),
    ):
        (tmp_path / f"{name}.txt").write_text(text)
        assert len(rows_of(str(tmp_path / f"{name}.txt"))) == text.count("\n") + 1
        error = capsys.readouterr().err
        warnings = [
            line for line in error.splitlines() if "its lines look broken at a width" in line
        ]
        assert len(warnings) == warned, name
        assert not warned or (
            "book.txt" in warnings[0] and "give jsonl with one text a row" in warnings[0]
        )


def test_zst_is_read_or_its_package_is_named(tmp_path, monkeypatch):
    import neobert.common.errors

    (tmp_path / "text.jsonl.zst").write_bytes(b"not looked at")
    with monkeypatch.context() as patch:
        patch.setattr(neobert.common.errors.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="this needs zstandard, not installed here"):
            rows_of(str(tmp_path / "text.jsonl.zst"))
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "text.jsonl.zst").write_bytes(
        zstandard.compress(b'{"text": "a river"}\n{"text": "stone"}\n')
    )
    for streaming in (False, True):
        assert len(list(rows_of(str(tmp_path / "text.jsonl.zst"), streaming=streaming))) == 2


def test_a_missing_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sources, "load_dataset", lambda *given, **more: pytest.fail("the Hub was asked")
    )
    (tmp_path / "data").mkdir()
    for name in (
        "texts.txt",
        "more.jsonl.gz",
        "./texts",
        "texts/",
        "/texts",
        "~/texts",
        "a/b/c",
        "data/wordnet",
        "a.csv",
    ):
        with pytest.raises(UserError, match=f"dataset {name}: .*found nothing"):
            rows_of(name)
    for name in ("wikitext", "me/data", "me/data-v1.5", "me/some.data"):
        assert sources.local_files(name) is None, f"{name} may be on the Hub"


def test_a_set_is_prepared_by_one_run_at_a_time(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a river\n")
    with locked(tmp_path / "out"), pytest.raises(UserError, match="out is in use by another run"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer)


def test_a_prepared_set_that_lost_a_shard_is_refused(tmp_path, tokenizer):
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in make_texts(30))
    )
    prepare(str(tmp_path / "text.jsonl"), tmp_path / "out", tokenizer, shards=3)
    load_prepared(tmp_path / "out", tokenizer)
    shutil.rmtree(tmp_path / "out" / "shard-00001-of-00003")
    with pytest.raises(
        UserError, match="out cannot be read .*has 20 rows and 30 lengths, and was made with 30"
    ):
        load_prepared(tmp_path / "out", tokenizer)


def test_preparing_in_parallel_and_in_shards_resumes(tmp_path, tokenizer, monkeypatch):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(30)))
    whole = prepare(str(source), tmp_path / "one", tokenizer)
    real = prepared._prepare_shard

    def interrupted(rows, folder, *rest):
        if folder.name == "shard-00002-of-00004":
            raise KeyboardInterrupt
        return real(rows, folder, *rest)

    monkeypatch.setattr(prepared, "_prepare_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), tmp_path / "two", tokenizer, shards=4)
    with pytest.raises(UserError, match="not a complete prepared set"):
        load_prepared(tmp_path / "two", tokenizer)
    monkeypatch.setattr(prepared, "_prepare_shard", real)
    kept = {shard: shard.stat().st_mtime_ns for shard in (tmp_path / "two").glob("shard-*")}
    assert len(kept) == 2, "two shards were finished before the interruption"
    (tmp_path / "two" / ".shard-00002-of-00004.123").mkdir()
    (tmp_path / "two" / ".shard-00002-of-00004.map").mkdir()
    again = prepare(str(source), tmp_path / "two", tokenizer, shards=4, workers=2)
    assert all(shard.stat().st_mtime_ns == time for shard, time in kept.items()), (
        "finished shards must not be made again"
    )
    left = [path.name for path in (tmp_path / "two").iterdir() if path.name.startswith(".")]
    assert not left, f"nothing of the killed run may stay: {left}"
    names = ("rows", "kept", "tokens")
    assert [again[name] for name in names] == [whole[name] for name in names]
    first, second = (load_prepared(tmp_path / name, tokenizer)[0] for name in ("one", "two"))
    assert list(first.rows["input_ids"]) == list(second.rows["input_ids"]), (
        "shards and processes must not change the rows or their order"
    )
    assert (
        first.lengths.tolist()
        == second.lengths.tolist()
        == [len(row) + 2 for row in first.rows["input_ids"]]
    )


def test_a_prepared_set_belongs_to_its_source_and_tokenizer(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a river\n")
    (tmp_path / "b.txt").write_text("green stone\n")
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match="another dataset"):
        prepare(str(tmp_path / "b.txt"), tmp_path / "out", tokenizer)
    summary = json.loads((tmp_path / "out" / "prepared.json").read_text())
    (tmp_path / "out" / "prepared.json").write_text(json.dumps({**summary, "tokenizer": "0" * 16}))
    with pytest.raises(UserError, match="another tokenizer"):
        load_prepared(tmp_path / "out", tokenizer)


def test_a_set_is_prepared_in_a_folder_of_its_own(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a river\n")
    prepare(str(tmp_path / "a.txt"), tmp_path / "own", tokenizer)
    for name, text, words in (
        (
            "lengths.npy",
            "years of work",
            "holds lengths.npy, but no set that neobert pretrain prepared",
        ),
        ("source.json", "[1]", "source.json was not written by neobert pretrain"),
        ("source.json", "{", "source.json is not valid JSON"),
        ("prepared.json", "{}", "holds prepared.json, but no set that neobert pretrain prepared"),
    ):
        folder = tmp_path / f"{name}-{len(text)}"
        folder.mkdir()
        (folder / name).write_text(text)
        with pytest.raises(UserError, match=words):
            prepare(str(tmp_path / "a.txt"), folder, tokenizer)
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, text)], (
            "the user's file stays, alone"
        )
    with pytest.raises(
        UserError, match="prepared must be a folder or a new name, but .*a.txt is a file"
    ):
        prepare(str(tmp_path / "a.txt"), tmp_path / "a.txt" / "train", tokenizer)
    (tmp_path / "own" / "lengths.npy").write_bytes(b"")
    with pytest.raises(
        UserError,
        match="the prepared set .*own cannot be read .No data left in file.; prepare it again",
    ):
        load_prepared(tmp_path / "own", tokenizer)
    (tmp_path / "own" / "prepared.json").write_text('{"tokenizer": "x"}')
    for read in (
        lambda: prepare(str(tmp_path / "a.txt"), tmp_path / "own", tokenizer),
        lambda: load_prepared(tmp_path / "own", tokenizer),
    ):
        with pytest.raises(UserError, match="prepared.json was not written by neobert pretrain"):
            read()


@pytest.mark.slow
def test_other_text_under_the_same_names_is_another_source(tmp_path, tokenizer):
    """A file rewritten at the same size, a set saved to the same folder, another prepared set; a
    copy is the same source."""

    def digest(path):
        return source_digest(parse_sources(str(path)), tokenizer)

    def write(folder, word, count=2):
        (folder / "a.jsonl").write_text(f'{{"text": "{word}"}}\n' * count)
        Dataset.from_dict({"text": [word]}).save_to_disk(str(folder / "saved"))
        DatasetDict({"train": Dataset.from_dict({"text": [word]})}).save_to_disk(
            str(folder / "splits")
        )
        prepare(str(folder / "a.jsonl"), folder / "train", tokenizer)

    names = ("a.jsonl", "saved", "splits", "train")
    for folder, word in (("A", "river"), ("B", "river"), ("C", "stone")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, word)
    for name in names:
        one, copy, other = (digest(tmp_path / folder / name) for folder in "ABC")
        assert one == copy, f"a copy of {name} must be the same source"
        assert one != other, f"{name} with other text must be another source"
    (tmp_path / "A" / "saved" / "cache-12.arrow").write_bytes(b"what datasets computed")
    assert digest(tmp_path / "A" / "saved") == digest(tmp_path / "B" / "saved")
    for i in (0, 10**6, 2 * 10**6 - 1):
        text = bytearray(b"a river\n" * 250_000)
        (tmp_path / "long.txt").write_bytes(text)
        before = digest(tmp_path / "long.txt")
        text[max(0, i - 70_000) : i + 70_000] = b"x" * (
            min(len(text), i + 70_000) - max(0, i - 70_000)
        )
        (tmp_path / "long.txt").write_bytes(text)
        assert digest(tmp_path / "long.txt") != before, (
            f"a part rewritten around byte {i} must be seen"
        )
    Dataset.from_dict({"text": ["river"]}).save_to_disk(str(tmp_path / "saved"))
    prepare(str(tmp_path / "saved"), tmp_path / "out", tokenizer)
    Dataset.from_dict({"text": ["stone"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(
        UserError, match="prepared with another content .*; choose another --prepared"
    ):
        prepare(str(tmp_path / "saved"), tmp_path / "out", tokenizer)


def test_a_pattern_may_have_wildcards_in_folders(tmp_path):
    for name in ("a/x/train.txt", "b/train.txt", "b/test.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    for pattern, found in (
        ("*/train.txt", ["b/train.txt"]),
        ("**/train.txt", ["a/x/train.txt", "b/train.txt"]),
        ("b/t*", ["b/test.txt", "b/train.txt"]),
    ):
        assert list(rows_of(str(tmp_path / pattern))["text"]) == found, pattern
