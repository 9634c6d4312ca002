"""Pins the data path of pre-training: sources, skipped rows, prepared sets, windows, batches, mixture, streaming and its resumption."""

import gzip
import json
import textwrap
import time
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Value
from transformers import AutoTokenizer

from neobert.common import local_text, locks
from neobert.common.errors import UserError
from neobert.pretraining import plans, prepared, sources
from neobert.pretraining.batches import BatchSpec, MicroBatches, SpecialTokens, Windows, batch_counts
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.prepared import BROKEN, EMPTY, Tokenise, TokenisedTexts, load_prepared, source_digest, tokenise_texts
from neobert.pretraining.sources import load_rows, parse_sources
from neobert.pretraining.streaming import COUNTS, SNAPSHOT_EVERY, STATE, StreamedBatches, TokenStream


WORDS = ["river", "stone", "music", "paper", "green", "table", "winter", "north"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def _texts(count, longest=20):
    """Texts of 1 to `longest` words, one token each; no two alike."""
    rng = np.random.default_rng(0)
    lengths = [1 + i % longest for i in range(count)]
    return [" ".join(rng.choice(WORDS, size)) for size in lengths]


def _tokens(lengths):
    """A tokenised set whose text i has `lengths[i]` tokens with the special ones; its tokens tell i."""
    rows = Dataset.from_dict({"input_ids": [[2000 + i] * (n - 2) for i, n in enumerate(lengths)]})
    return TokenisedTexts(rows, np.array(lengths, dtype=np.int32))


def _batches(lengths, tokenizer, count=None, **spec):
    spec = BatchSpec(**spec)
    return MicroBatches(Windows(_tokens(lengths), SpecialTokens(101, 102, 0), spec), TokenMasking(tokenizer), spec, count)


def prepare(source, out, tokenizer, column="content", **more):
    return prepared.prepare(parse_sources(source, column=column), out, tokenizer, **more)


def rows_of(dataset, streaming=False, **more):
    return load_rows(parse_sources(dataset, **more), streaming)


def _texts_of(batch):
    """The texts of a packed or padded batch, unmasked, as tuples of ids."""
    ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
    if "cu_seq_lens_q" in batch:
        bounds = batch["cu_seq_lens_q"].tolist()
        return [tuple(ids[0, start:stop].tolist()) for start, stop in zip(bounds, bounds[1:])]
    return [tuple(row[mask.bool()].tolist()) for row, mask in zip(ids, batch["attention_mask"])]


def test_jsonl_with_empty_and_broken_rows_is_counted(tmp_path, tokenizer):
    rows = ['{"content": "a river"}', '{"content": ""}', "{broken", '{"other": 1}', '{"content": 7}', "", '{"content": "green stone"}']
    (tmp_path / "text.jsonl").write_text("\n".join(rows) + "\n")
    summary = prepare(str(tmp_path / "text.jsonl"), tmp_path / "out", tokenizer)
    counts = {name: summary[name] for name in ("rows", "kept", "empty", "broken", "tokens")}
    assert counts == {"rows": 7, "kept": 2, "empty": 2, "broken": 3, "tokens": 8}, "every row must be kept or counted"
    tokens, _ = load_prepared(tmp_path / "out", tokenizer)
    assert [tokenizer.decode(row) for row in tokens.rows["input_ids"]] == ["a river", "green stone"]
    assert tokens.lengths.tolist() == [4, 4], "the stored length counts [CLS] and [SEP]"


BROKEN_ROWS = (
    b"caf\xe9 in another encoding", b'{"content": null}', b"[1, 2]", b"null", b'{"content": "\\ud800 half a pair"}', b"[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("streaming", [False, True])
def test_no_broken_row_is_fatal(tmp_path, tokenizer, streaming):
    """Bytes that are no UTF-8, other JSON types, line separators within a text, a byte order mark, Windows line ends, no last line end."""
    good = [b'\xef\xbb\xbf{"content": "a river"}\r', '{"content": "green\u2028stone\x85"}'.encode(), b'{"content": "winter"}']
    (tmp_path / "text.jsonl").write_bytes(b"\n".join([good[0], *BROKEN_ROWS, b"", b"   ", *good[1:]]))
    expected = {"kept": 3, "empty": 2, "broken": len(BROKEN_ROWS)}
    assert _counts(tmp_path / "text.jsonl", tmp_path / "a", tokenizer, streaming) == expected
    (tmp_path / "lines.txt").write_bytes(b"a river\ncaf\xe9\n\ngreen\xe2\x80\xa8stone")
    assert _counts(tmp_path / "lines.txt", tmp_path / "b", tokenizer, streaming) == {"kept": 2, "empty": 1, "broken": 1}
    Dataset.from_dict({"content": ["a river", None, ""]}).to_parquet(str(tmp_path / "rows.parquet"))
    assert _counts(tmp_path / "rows.parquet", tmp_path / "c", tokenizer, streaming) == {"kept": 1, "empty": 1, "broken": 1}


def _counts(source, out, tokenizer, streaming):
    if not streaming:
        summary = prepare(str(source), out, tokenizer)
        return {name: summary[name] for name in ("kept", "empty", "broken")}
    rows, kind = rows_of(str(source), streaming=True)
    lengths = [row["length"] for row in rows.map(Tokenise(tokenizer, kind, "content"), batched=True, batch_size=2, remove_columns=["text"])]
    return {"kept": sum(length > 0 for length in lengths), "empty": lengths.count(EMPTY), "broken": lengths.count(BROKEN)}


def test_the_column_may_appear_after_many_broken_rows(tmp_path, tokenizer):
    (tmp_path / "text.jsonl").write_text("{broken\n" * 300 + '{"content": "a river"}\n')
    assert prepare(str(tmp_path / "text.jsonl"), tmp_path / "out", tokenizer)["kept"] == 1


def test_text_parquet_saved_and_several_sources(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a river\ngreen stone\n")
    Dataset.from_dict({"body": ["winter"], "n": [1]}).to_parquet(str(tmp_path / "b.parquet"))
    Dataset.from_dict({"body": ["north"]}).save_to_disk(str(tmp_path / "saved"))

    def read(dataset, column):
        return list(rows_of(dataset, column=column)[0]["text"])

    assert read(str(tmp_path / "a.txt"), "content") == ["a river", "green stone"]
    assert read(str(tmp_path / "b.parquet"), "body") == ["winter"]
    assert read(str(tmp_path / "saved"), "body") == ["north"]
    assert read(f"{tmp_path / 'b.parquet'}, {tmp_path / 'saved'}", "body") == ["winter", "north"]
    large = Dataset.from_dict({"body": ["south"]}, features=Features({"body": Value("large_string")}))
    large.to_parquet(str(tmp_path / "l.parquet"))
    assert read(f"{tmp_path / 'b.parquet'}, {tmp_path / 'l.parquet'}", "body") == ["winter", "south"], "both kinds of strings must mix"
    stream = rows_of(f"{tmp_path / 'a.txt'}, {tmp_path / 'l.parquet'}", column="body", streaming=True)[0]
    batches = stream.map(lambda batch: {"length": [len(text) for text in batch["text"]]}, batched=True, batch_size=64)
    assert [row["length"] for row in batches] == [7, 11, 5], "also in one batch of a stream"
    streamed = rows_of([str(tmp_path / "saved")], column="body", streaming=True)[0]
    assert [row["text"] for row in streamed] == ["north"], "a saved set can be streamed too"


def test_a_hub_name_may_carry_a_subset_and_a_revision(tmp_path, monkeypatch):
    asked = []

    def loaded(name, config, **more):
        asked.append((name, config, more["revision"], more["split"]))
        return Dataset.from_dict({"content": ["a river"]})

    monkeypatch.setattr(sources, "load_dataset", loaded)
    rows, _ = rows_of("me/one:big@v2, me/two@refs/convert/parquet, me/three", subset="small")
    assert asked == [
        ("me/one", "big", "v2", "train"),
        ("me/two", "small", "refs/convert/parquet", "train"),
        ("me/three", "small", None, "train"),
    ]
    assert len(rows) == 3
    monkeypatch.setattr(sources, "load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(UserError, match="dataset me/one cannot be read from the Hub .division by zero."):
        rows_of("me/one")
    monkeypatch.undo()
    (tmp_path / "a:b@c.txt").write_text("a river\n")
    assert list(rows_of(str(tmp_path / "a:b@c.txt"))[0]["text"]) == ["a river"], "a file that is there is taken by its whole name"


def test_bad_sources_are_one_sentence(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    Dataset.from_dict({"body": ["winter"]}).to_parquet(str(tmp_path / "b.parquet"))
    (tmp_path / "c.csv").write_text("x")
    (tmp_path / "d.txt").write_text("\n\n")
    (tmp_path / "e.txt").write_text("")
    (tmp_path / "f.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(b'{"content": "a river"}\n' * 999)[:-9])
    Dataset.from_dict({"content": [1, 2]}).to_parquet(str(tmp_path / "h.parquet"))
    for dataset, words in (
        (tmp_path / "a.jsonl", "no column 'content', only body"),
        (tmp_path / "b.parquet", "no column 'content', only body"),
        (tmp_path / "c.csv", "found .csv"),
        (tmp_path / "no" / "such.jsonl", "found nothing"),
        (tmp_path / "d.txt", "none of its 2 rows has text"),
        (tmp_path / "e.txt", "it has no rows"),
        (tmp_path / "f.parquet", "cannot be read .*arquet"),
        (tmp_path / "g.jsonl.gz", "cannot be read .*ended before"),
        (tmp_path / "h.parquet", "holds int64, not text"),
    ):
        with pytest.raises(UserError, match=words) as error:
            prepare(str(dataset), tmp_path / f"out-{dataset.name}", tokenizer)
        assert "\n" not in str(error.value)
        assert not (tmp_path / f"out-{dataset.name}" / "prepared.json").exists(), "nothing may look finished"


def test_a_json_array_is_told_how_to_become_jsonl(tmp_path, tokenizer):
    for name, text in (
        ("compact.json", '[{"content": "a river"}, {"content": "green"}]'),
        ("indented.json", '[\n  {"content": "a river"}\n]'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=rf"{name} holds one JSON array; write one object a line: jq -c"):
            rows_of(str(tmp_path / name))
    (tmp_path / "rows.jsonl").write_text('[1, 2]\n{"content": "a river"}\n')
    assert prepare(str(tmp_path / "rows.jsonl"), tmp_path / "out", tokenizer)["kept"] == 1, "a broken first row is a broken row"


def test_a_book_is_not_one_text_a_line(tmp_path, capsys):
    book = textwrap.fill("It was a dark and stormy night, and the rain fell in torrents, except at occasional intervals. " * 40, 72)
    verse = "\n".join(["A short line.", "Another one!"] * 30)
    longer = "\n".join(["a text of one line that goes on and on " * 10] * 30)
    for name, text, warned in (("book", book, True), ("verse", verse, False), ("longer", longer, False)):
        (tmp_path / f"{name}.txt").write_text(text)
        assert len(rows_of(str(tmp_path / f"{name}.txt"))[0]) == text.count("\n") + 1
        error = capsys.readouterr().err
        warnings = [line for line in error.splitlines() if "its lines look broken at a width" in line]
        assert len(warnings) == warned, name
        assert not warned or ("book.txt" in warnings[0] and "give jsonl with one text a row" in warnings[0])


def test_zst_is_read_or_its_package_is_named(tmp_path, monkeypatch):
    import neobert.common.errors

    (tmp_path / "text.jsonl.zst").write_bytes(b"not looked at")
    with monkeypatch.context() as patch:
        patch.setattr(neobert.common.errors.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="this needs zstandard, not installed here"):
            rows_of(str(tmp_path / "text.jsonl.zst"))
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "text.jsonl.zst").write_bytes(zstandard.compress(b'{"content": "a river"}\n{"content": "stone"}\n'))
    for streaming in (False, True):
        assert len(list(rows_of(str(tmp_path / "text.jsonl.zst"), streaming=streaming)[0])) == 2


def test_a_missing_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "load_dataset", lambda *given, **more: pytest.fail("the Hub was asked"))
    (tmp_path / "data").mkdir()
    for name in ("texts.txt", "more.jsonl.gz", "./texts", "texts/", "/texts", "~/texts", "a/b/c", "data/wordnet", "a.csv"):
        with pytest.raises(UserError, match=f"dataset {name}: .*found nothing"):
            rows_of(name)
    for name in ("wikitext", "me/data", "me/data-v1.5", "me/some.data"):
        assert sources.local_files(name) is None, f"{name} may be on the Hub"


def test_a_set_is_prepared_by_one_run_at_a_time(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a river\n")
    with locks.FolderLock(tmp_path / "out"), pytest.raises(UserError, match="out is in use by process"):
        prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer)


def test_preparing_in_parallel_and_in_shards_resumes(tmp_path, tokenizer, monkeypatch):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"content": text}) + "\n" for text in _texts(30)))
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
    assert all(shard.stat().st_mtime_ns == time for shard, time in kept.items()), "finished shards must not be made again"
    left = [path.name for path in (tmp_path / "two").iterdir() if path.name.startswith(".")]
    assert not left, f"nothing of the killed run may stay: {left}"
    names = ("rows", "kept", "tokens")
    assert [again[name] for name in names] == [whole[name] for name in names]
    first, second = (load_prepared(tmp_path / name, tokenizer)[0] for name in ("one", "two"))
    assert list(first.rows["input_ids"]) == list(second.rows["input_ids"]), "shards and processes must not change the rows or their order"
    assert first.lengths.tolist() == second.lengths.tolist() == [len(row) + 2 for row in first.rows["input_ids"]]


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


def test_other_text_under_the_same_names_is_another_source(tmp_path, tokenizer):
    """A file rewritten at the same size, a set saved to the same folder, another prepared set; a copy is the same source."""

    def digest(path):
        return source_digest(parse_sources(str(path)), tokenizer)

    def write(folder, word, count=2):
        (folder / "a.jsonl").write_text(f'{{"content": "{word}"}}\n' * count)
        Dataset.from_dict({"content": [word]}).save_to_disk(str(folder / "saved"))
        DatasetDict({"train": Dataset.from_dict({"content": [word]})}).save_to_disk(str(folder / "splits"))
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
        text[max(0, i - 70_000) : i + 70_000] = b"x" * (min(len(text), i + 70_000) - max(0, i - 70_000))
        (tmp_path / "long.txt").write_bytes(text)
        assert digest(tmp_path / "long.txt") != before, f"a part rewritten around byte {i} must be seen"
    Dataset.from_dict({"content": ["river"]}).save_to_disk(str(tmp_path / "saved"))
    prepare(str(tmp_path / "saved"), tmp_path / "out", tokenizer)
    Dataset.from_dict({"content": ["stone"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="prepared with another content .*; choose another --prepared"):
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
        assert list(rows_of(str(tmp_path / pattern))[0]["text"]) == found, pattern


def test_long_texts_are_cut_or_split():
    tokens = TokenisedTexts(Dataset.from_dict({"input_ids": [list(range(10, 20)), [30]]}), np.array([12, 3], dtype=np.int32))
    special = SpecialTokens(1, 2, 0)
    cut = Windows(tokens, special, BatchSpec(tokens=64, length=6))
    assert [row.tolist() for row in cut.read(np.arange(len(cut)))] == [[1, 10, 11, 12, 13, 2], [1, 30, 2]]
    split = Windows(tokens, special, BatchSpec(tokens=64, length=6, long_texts="split"))
    everything = np.arange(len(split))
    assert [row.tolist() for row in split.read(everything)] == [
        [1, 10, 11, 12, 13, 2], [1, 14, 15, 16, 17, 2], [1, 18, 19, 2], [1, 30, 2],
    ], "windows must hold every token once"  # fmt: skip
    assert split.lengths(everything).tolist() == [6, 6, 4, 3] and split.of_texts_from(12).tolist() == [0, 1, 2]


@pytest.mark.parametrize("spec", [{"tokens": 64}, {"texts": 7}, {"texts": 7, "layout": "padded"}], ids=str)
def test_every_text_once_an_epoch_within_the_budget(tokenizer, spec, monkeypatch):
    monkeypatch.setattr(plans, "CHUNK", 16)  # so that a plan has several
    lengths = [3 + i % 17 for i in range(101)]
    batches = _batches(lengths, tokenizer, 200, length=20, seed=5, **spec)
    expected = sorted((101, *[2000 + i] * (n - 2), 102) for i, n in enumerate(lengths))
    seen, first_epoch = [], None
    for i in range(len(batches)):
        batch = batches[i]
        texts = _texts_of(batch)
        assert batches.passes(i) == pytest.approx(len(seen) / len(lengths)), "passes over the data"
        seen += texts
        counts = {name: int(value) for name, value in batch_counts(batch).items()}
        sizes = [len(text) for text in texts]
        assert counts == {"tokens": sum(sizes), "squares": sum(n * n for n in sizes), "masked": int((batch["labels"] != -100).sum())}
        if "tokens" in spec:
            assert batch["input_ids"].shape[1] <= 64, "a packed batch must keep to its token budget"
        elif len(texts) != 7:
            assert len(seen) % len(lengths) == 0, "a batch has as many texts as were asked for, but the last of an epoch"
        if "layout" not in spec:
            assert batch["max_length_q"] == max(sizes)
        if first_epoch is None and len(seen) >= len(lengths):
            first_epoch = list(seen)
    assert sorted(first_epoch) == expected, "the first epoch must hold every text exactly once"
    assert sorted(seen[len(lengths) : 2 * len(lengths)]) == expected, "so must the second"
    assert seen[: len(lengths)] != seen[len(lengths) : 2 * len(lengths)], "in another order"


def test_packed_batches_are_as_full_as_the_texts_in_their_order_allow(tokenizer, monkeypatch):
    """The next batch begins with the text that would have been one too many, also where a plan is made in chunks."""
    lengths = [3 + (7 * i) % 18 for i in range(500)]
    plan = []
    for chunk in (1 << 20, 64):
        monkeypatch.setattr(plans, "CHUNK", chunk)
        batches = _batches(lengths, tokenizer, tokens=64, length=20, seed=5)
        order, bounds, count = batches.plans[0].planned(0)
        plan.append(bounds.tolist())
        totals = [sum(lengths[i] for i in order[start:stop]) for start, stop in zip(bounds, bounds[1:])]
        after = [lengths[order[stop]] for stop in bounds[1:-1]]
        assert count == len(totals) and max(totals) <= 64 and all(total + more > 64 for total, more in zip(totals, after))
    assert plan[0] == plan[1]


def test_a_batch_depends_on_the_seed_and_its_number_alone(tokenizer):
    lengths, settings = [3 + i % 17 for i in range(50)], {"tokens": 64, "length": 20}
    one = _batches(lengths, tokenizer, 40, seed=1, **settings)
    in_order = [one[i] for i in range(40)]
    fresh = _batches(lengths, tokenizer, 90, seed=1, **settings)
    for i in (33, 2, 39, 0):
        for name, value in in_order[i].items():
            same = torch.equal(value, fresh[i][name]) if torch.is_tensor(value) else value == fresh[i][name]
            assert same, f"batch {i} must be the same when it is the first that is asked for ({name})"
    other = _batches(lengths, tokenizer, 40, seed=2, **settings)
    assert not torch.equal(other[0]["labels"], in_order[0]["labels"]), "another seed must give another batch"


@pytest.mark.parametrize("block", [4096, 7])
def test_without_boundaries_rows_are_full_and_cross_texts(tokenizer, monkeypatch, block):
    monkeypatch.setattr(plans, "BLOCK", block)
    lengths = [3 + i % 17 for i in range(60)]
    settings = {"layout": "packed_without_boundaries", "tokens": 96, "length": 32, "seed": 0}
    batches = _batches(lengths, tokenizer, 7, **settings)
    assert {batches[i]["input_ids"].shape for i in range(7)} == {(3, 32)}, "batches of training are full, in the next epoch too"
    batches = _batches(lengths, tokenizer, **settings)
    shapes = [tuple(batches[i]["input_ids"].shape) for i in range(len(batches))]
    assert shapes == [(3, 32)] * 6 + [(1, 32), (1, 16)], "one pass must hold the last rows too, the very last one shorter"
    few = _batches([9, 8], tokenizer, **settings)
    assert len(few) == 1 and few[0]["input_ids"].shape == (1, 17), "text that does not fill a batch must be evaluated too"
    ids = []
    for i in range(len(batches)):
        batch = batches[i]
        assert set(batch) == {"input_ids", "labels"}
        ids += torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"]).flatten().tolist()
    starts = [i for i, token in enumerate(ids) if token == 101]
    texts = [tuple(ids[start:stop]) for start, stop in zip(starts, starts[1:])]
    assert len(texts) > 50 and len(set(texts)) == len(texts), "texts must follow each other, each once"
    assert all(text == (101, *[text[1]] * (lengths[text[1] - 2000] - 2), 102) for text in texts), "no token may be lost between rows"
    with pytest.raises(UserError, match="a batch takes 96 tokens, but the data has 17"):
        _batches([9, 8], tokenizer, 3, **settings)


def test_mixture_draws_20_40_40_from_long_texts(tokenizer):
    lengths = [8] * 60 + [16] * 30 + [32] * 30
    mixture = {0: 0.2, 16: 0.4, 32: 0.4}
    batches = _batches(lengths, tokenizer, 2000, tokens=64, length=32, mixture=mixture, seed=3)
    shares = np.bincount(batches.source, minlength=3) / 2000
    assert np.abs(shares - [0.2, 0.4, 0.4]).max() < 0.04, f"parts must be drawn 20 / 40 / 40, got {shares}"
    seen = 0
    for i in range(60):
        texts = _texts_of(batches[i])
        assert batches.passes(i) == pytest.approx(seen / len(lengths))
        assert min(map(len, texts)) >= [0, 16, 32][batches.source[i]], "a batch must keep to its part's least length"
        seen += len(texts)
    with pytest.raises(UserError, match="at least 64 tokens"):
        _batches(lengths, tokenizer, 10, tokens=64, length=32, mixture={0: 0.5, 64: 0.5})


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"tokens": 10, "length": 20}, "less than one text"),
        ({"layout": "packed_without_boundaries", "tokens": 30, "length": 20}, "must be a multiple"),
        ({"layout": "packed_without_boundaries", "tokens": None, "texts": 4}, "needs tokens_per_batch"),
        ({"layout": "padded"}, "needs texts_per_batch"),
        ({"texts": 8}, "give either tokens_per_batch or texts_per_batch"),
        ({"layout": "ragged"}, "layout must be one of"),
        ({"long_texts": "spilt"}, "long_texts must be one of"),
        ({"length": 2}, "max_length must be at least 3"),
        ({"layout": "padded", "tokens": None, "texts": 0}, "at least 1"),
        ({"mixture": {0: 0.5, 1024: 0.6}}, "sum to 1"),
        ({"mixture": [1, 2]}, "must map"),
    ],
)
def test_impossible_batches_are_named(settings, words):
    with pytest.raises(UserError, match=words):
        BatchSpec(**{"tokens": 4096, "length": 1024, **settings})


def test_a_text_takes_8_bytes_at_most(tokenizer):
    """The lengths are memory-mapped; what a run holds for them is the order of one pass, here with two parts of a mixture."""
    count = 1_000_000
    lengths = np.random.default_rng(0).integers(3, 2000, count, dtype=np.int32)
    spec = BatchSpec(tokens=32768, length=1024, mixture={0: 0.5, 1024: 0.5})
    windows = Windows(TokenisedTexts(_tokens([4]).rows, lengths), SpecialTokens(101, 102, 0), spec)
    tracemalloc.start()
    try:
        batches = MicroBatches(windows, TokenMasking(tokenizer), spec, 1000)
        for plan in batches.plans:
            plan.planned(0)
            plan.planned(1)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 8 * count, f"{held / count:.1f} bytes a text are held"


def test_lengths_are_read_at_once_and_memory_mapped(tmp_path, tokenizer):
    """datasets 5 gives a column row by row, 64 microseconds each, unless it is asked for a slice."""
    rows = Dataset.from_dict({"length": np.arange(200_000)})
    start = time.process_time()
    lengths = prepared._column(rows, "length")
    assert time.process_time() - start < 1, "a column of 200,000 numbers takes milliseconds"
    assert lengths.dtype == np.int32 and lengths[-1] == 199_999
    (tmp_path / "a.txt").write_text("a river\ngreen stone\n")
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer)
    assert isinstance(load_prepared(tmp_path / "out", tokenizer)[0].lengths, np.memmap)


def _stream(path, tokenizer, rank=0, world_size=1, workers=0, **spec):
    rows, kind = rows_of(str(path), column="text", streaming=True)
    spec = BatchSpec(**{"length": 32, "seed": 1, **({} if spec.get("texts") else {"tokens": 64}), **spec})
    tokenise, masking = Tokenise(tokenizer, kind, "text"), TokenMasking(tokenizer)
    return StreamedBatches(TokenStream(rows, tokenise, SpecialTokens.of(tokenizer)), masking, spec, 1000, rank, world_size, workers)


def _loaded(stream, count):
    """The first batches as a trainer gets them: from a DataLoader, with worker processes where there are some."""
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=stream.workers if stream.in_workers else 0)
    return [batch for _, batch in zip(range(count), loader)]


def _same(one, two):
    names = ("input_ids", "labels", "cu_seq_lens_q")
    return all(torch.equal(one[name], two[name]) for name in names if name in one or name in two)


def _states(batches):
    """{worker: its last snapshot} of a list of batches, as a checkpoint keeps them."""
    states = [json.loads(batch[STATE]) for batch in batches if STATE in batch]
    return {state["worker"]: state for state in states}


def _corpus(folder, files=3, rows=40):
    for number in range(files):
        texts = [f"{text} {number} {i}" for i, text in enumerate(_texts(rows, 25))]
        lines = [json.dumps({"text": text}) for text in texts] + ["{broken", '{"text": ""}']
        (folder / f"part{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


SPECS = [{}, {"mixture": {0: 0.2, 12: 0.8}}, {"texts": 4}, {"texts": 4, "layout": "padded"}, {"layout": "packed_without_boundaries"},
         {"long_texts": "split", "length": 8}]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_stream_resumes_exactly_from_its_snapshot(tmp_path, tokenizer, spec):
    _corpus(tmp_path)
    batches = _loaded(_stream(tmp_path, tokenizer, **spec), SNAPSHOT_EVERY + 25)
    consumed = SNAPSHOT_EVERY + 9
    states = _states(batches[:consumed])
    assert states[0]["batch"] == SNAPSHOT_EVERY, "the snapshot must be the last before the resumption"
    resumed = _stream(tmp_path, tokenizer, **spec)
    resumed.load_state(json.loads(json.dumps(states)), consumed)
    for expected, batch in zip(batches[consumed:], resumed):
        assert _same(expected, batch)
    assert batches[-1][COUNTS][1]["broken"] >= 3, "broken rows must be counted"
    if not spec:
        seen = []
        for batch in batches:
            if len(seen) + len(_texts_of(batch)) > 120:
                break
            seen += _texts_of(batch)
        assert len(seen) > 100 and len(set(seen)) == len(seen), "an epoch must hold every text once"


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("consumed", [1, 2, 7, 3 * SNAPSHOT_EVERY + 5])
def test_worker_processes_resume_exactly(tmp_path, tokenizer, workers, consumed):
    """Real worker processes, which have read ahead when the run is cut; also before each of them has given a batch."""
    _corpus(tmp_path, files=4)
    batches = _loaded(_stream(tmp_path, tokenizer, workers=workers), consumed + 6)
    resumed = _stream(tmp_path, tokenizer, workers=workers)
    resumed.load_state(_states(batches[:consumed]), consumed)
    again = _loaded(resumed, 6)
    assert all(map(_same, batches[consumed:], again)), "the resumed batches must be those of the uninterrupted run"
    texts = [text for batch in batches for text in _texts_of(batch)][:90]
    assert len(set(texts)) == len(texts), "workers must not read the same texts"


@pytest.mark.parametrize("files, readers", [(4, 2), (5, 2), (7, 3), (1, 2), (2, 6), (3, 4), (3, 1)])
def test_every_row_is_tokenised_by_one_reader_alone(tmp_path, tokenizer, files, readers):
    """Files dealt out, also where they do not come out even, and rows where there are fewer files than readers."""
    _corpus(tmp_path, files=files, rows=31)
    everything = Counter(line["text"] for line in rows_of(str(tmp_path), column="text", streaming=True)[0])
    read, shares = Counter(), []
    for number in range(readers):
        stream = _stream(tmp_path, tokenizer, rank=number, world_size=readers)
        recording = _Recording(stream.source.tokenise)
        stream.source = replace(stream.source, tokenise=recording)
        (reader,) = stream.readers(0)
        while reader.number == 0:
            reader.next()
        # What was read of the next pass does not count.
        first = recording.seen[: recording.before_pass(reader)]
        shares.append(len(first))
        read.update(first)
    assert read == everything, "one pass of all readers must tokenise every row once"
    most = -(-files // readers) * 33 if files >= readers else -(-files * 33 // readers) + files
    assert max(shares) <= most, f"{files} files among {readers} readers: {shares}"


class _Recording:
    """`Tokenise` that remembers what it was given, and how much of it belongs to the pass before the present one."""

    def __init__(self, tokenise):
        self.tokenise, self.seen, self.last = tokenise, [], 0

    def __call__(self, batch):
        self.last = len(batch["text"])
        self.seen += batch["text"]
        return self.tokenise(batch)

    def before_pass(self, reader):
        assert reader.shard == 0 and reader.row > 0
        return len(self.seen) - self.last


@pytest.mark.parametrize("files, world_size", [(4, 2), (3, 2), (1, 2)])
def test_processes_share_a_stream_and_resume(tmp_path, tokenizer, files, world_size):
    _corpus(tmp_path, files=files)
    seen = []
    for rank in range(world_size):
        batches = _loaded(_stream(tmp_path, tokenizer, rank=rank, world_size=world_size), 12)
        seen.append([text for batch in batches[:5] for text in _texts_of(batch)])
        resumed = _stream(tmp_path, tokenizer, rank=rank, world_size=world_size)
        resumed.load_state(_states(batches[:7]), 7)
        assert all(map(_same, batches[7:], _loaded(resumed, 5))), f"process {rank} must continue with its own batches"
    assert seen[0] and seen[1] and not set(seen[0]) & set(seen[1]), "each process must read its own share"
    assert len(set(seen[0])) == len(seen[0]), "no text may come twice in an epoch"


def test_another_epoch_has_another_order_of_shards(tmp_path, tokenizer):
    for number in range(6):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"text": WORDS[number]}) + "\n")
    (reader,) = _stream(tmp_path, tokenizer).readers(0)
    words = []
    for i in range(18):
        words.append(tokenizer.decode(reader.next()[1:-1]))
        assert reader.passes == pytest.approx(i / 6), "passes over the data, by shards"
    epochs = [words[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(epoch) == sorted(WORDS[:6]) for epoch in epochs), "every epoch must read every shard once"
    assert len({tuple(epoch) for epoch in epochs}) > 1, "and not always in the same order"


@pytest.mark.parametrize("files", [5, 1])
def test_a_reader_without_long_texts_waits_for_those_of_another_pass(tmp_path, tokenizer, files):
    """One long text for three readers, in one of their files or among the rows of one file: each comes to it sooner or later."""
    for number in range(files):
        texts = [f"river stone {number} {i}" for i in range(7)] + (["paper " * 20] if number == 0 else [])
        (tmp_path / f"part{number}.txt").write_text("\n".join(texts) + "\n")
    for rank in range(3):
        (reader,) = _stream(tmp_path, tokenizer, rank=rank, world_size=3, mixture={15: 1.0}).readers(0)
        assert [len(reader.next()) for _ in range(3)] == [22] * 3


def test_a_stream_without_long_texts_says_so(tmp_path, tokenizer):
    _corpus(tmp_path)
    with pytest.raises(UserError, match="no text of at least 500 tokens"):
        next(iter(_stream(tmp_path, tokenizer, mixture={500: 1.0})))


def test_tokenised_texts_leave_out_empty_ones(tokenizer):
    assert tokenise_texts(["a river", "", "stone"], tokenizer).lengths.tolist() == [4, 3]


def test_wordnet_lines_become_sentences(tmp_path):
    head = "  1 This software and database is being provided\n"
    (tmp_path / "data.noun").write_text(
        head
        + "00000002 03 n 01 fishnet 0 000 | a net for catching fish  \n"
        + '00000010 06 n 02 landing_net 0 gaff 1 001 @ 00000002 n 0000 | a bag-shaped net; lifts a fish; "he used a landing net"; "his net"  \n'
    )
    (tmp_path / "data.verb").write_text(head + '00000020 29 v 01 take_in 2 000 01 + 08 00 | fool or hoax; "The man took me in"  \n')
    (tmp_path / "data.adj").write_text(head + "00000030 00 a 01 galore(ip) 0 000 | existing in abundance  \n")
    (tmp_path / "data.adv").write_text(head)
    rows = {row["id"]: row["text"] for row in local_text.wordnet_entries(tmp_path)}
    assert rows == {
        "noun-00000002": "fishnet: a net for catching fish.",
        "noun-00000010": "landing net, gaff: a bag-shaped net; lifts a fish. a landing net is a kind of fishnet. he used a landing net. his net.",
        "verb-00000020": "take in: fool or hoax. The man took me in.",
        "adj-00000030": "galore: existing in abundance.",
    }
    assert [row["text"] for row in local_text.wordnet_sentences(tmp_path)] == ["he used a landing net.", "The man took me in."]


def test_dictionary_entries_lose_their_apparatus(tmp_path):
    entries = (
        'Laminar \\Lam"i*nar\\, Laminal \\Lam"i*nal\\, a. [Cf. F. laminaire.\n   See {Lamina}]\n   In, or consisting of, thin plates or layers.\n'
        "   [1913 Webster]\n\nDowse \\Dowse\\, v. t. [imp. & p. p. {Dowsed} (doust).] [Cf. OD. doesen to strike.]\n   1. To plunge, or duck into water.\n"
        "      [1913 Webster]\n\n            A poor man was dowsed.   --Tillotson.\n"
    )
    with gzip.open(tmp_path / "gcide.dict.dz", "wt") as file:
        file.write(entries)
    assert [row["text"] for row in local_text.gcide_entries(tmp_path / "gcide.dict.dz")] == [
        "Laminar: In, or consisting of, thin plates or layers.",
        "Dowse: 1. To plunge, or duck into water. A poor man was dowsed.",
    ]


def test_absent_sources_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NEOBERT_SENTIMENT", raising=False)
    for read, words in (
        (lambda: local_text.wordnet_entries(tmp_path), "apt-get install wordnet-base"),
        (lambda: local_text.gcide_entries(tmp_path / "gcide.dict.dz"), "apt-get install dict-gcide"),
        (lambda: local_text.sentiment_sentences("movie"), "pip download .* vaderSentiment==3.3.2"),
        (lambda: local_text.sentiment_sentences("films"), "choose one of movie"),
    ):
        with pytest.raises(UserError, match=words):
            next(iter(read()))


def test_the_held_out_part_is_a_function_of_the_key(tmp_path):
    rows = [{"id": f"noun-{i:08d}", "text": "x"} for i in range(5000)]
    counts = local_text.write_split(rows, tmp_path / "a", 2.0)
    local_text.write_split(reversed(rows), tmp_path / "b", 2.0)
    assert counts["train"] + counts["heldout"] == 5000 and 60 < counts["heldout"] < 140
    keys = [{json.loads(line)["id"] for line in (tmp_path / name / "heldout.jsonl").read_text().splitlines()} for name in "ab"]
    assert keys[0] == keys[1], "the split must not depend on the order"
    assert local_text.is_held_out("noun-00000013") == ("noun-00000013" in keys[0])


def test_long_texts_are_joined_from_neighbours():
    assert list(local_text.join_texts(["a b", "c", "d e f g", "h", "i"], 3)) == ["a b c", "d e f g"], (
        "what does not reach the length is dropped"
    )
