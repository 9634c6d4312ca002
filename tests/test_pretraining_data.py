"""Pins the data path of pre-training: sources, skipped rows, prepared sets, windows, batches, mixture, streaming and its resumption."""

import gzip
import json

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Value
from transformers import AutoTokenizer

from neobert.common import local_text
from neobert.common.errors import UserError
from neobert.pretraining import batching
from neobert.pretraining.batching import MicroBatches, Windows
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.pretraining_data import (
    BROKEN,
    EMPTY,
    Tokenise,
    load_prepared,
    load_rows,
    prepare,
    source_digest,
    tokens_from_texts,
)
from neobert.pretraining.streaming import COUNTS, SNAPSHOT_EVERY, STATE, StreamedBatches


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
    return Dataset.from_dict({"input_ids": [[2000 + i] * (n - 2) for i, n in enumerate(lengths)], "length": list(lengths)})


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
    assert [tokenizer.decode(row) for row in tokens["input_ids"]] == ["a river", "green stone"]
    assert list(tokens["length"]) == [4, 4], "the stored length counts [CLS] and [SEP]"


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
    rows, kind = load_rows(str(source), streaming=True)
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
        return list(load_rows(dataset, text_column=column)[0]["text"])

    assert read(str(tmp_path / "a.txt"), "content") == ["a river", "green stone"]
    assert read(str(tmp_path / "b.parquet"), "body") == ["winter"]
    assert read(str(tmp_path / "saved"), "body") == ["north"]
    assert read(f"{tmp_path / 'b.parquet'}, {tmp_path / 'saved'}", "body") == ["winter", "north"]
    large = Dataset.from_dict({"body": ["south"]}, features=Features({"body": Value("large_string")}))
    large.to_parquet(str(tmp_path / "l.parquet"))
    assert read(f"{tmp_path / 'b.parquet'}, {tmp_path / 'l.parquet'}", "body") == ["winter", "south"], "both kinds of strings must mix"
    stream = load_rows(f"{tmp_path / 'a.txt'}, {tmp_path / 'l.parquet'}", text_column="body", streaming=True)[0]
    batches = stream.map(lambda batch: {"length": [len(text) for text in batch["text"]]}, batched=True, batch_size=64)
    assert [row["length"] for row in batches] == [7, 11, 5], "also in one batch of a stream"
    streamed = load_rows(str(tmp_path / "saved"), text_column="body", streaming=True)[0]
    assert [row["text"] for row in streamed] == ["north"], "a saved set can be streamed too"


def test_a_hub_name_may_carry_a_subset_and_a_revision(tmp_path, monkeypatch):
    from neobert.pretraining import pretraining_data

    asked = []

    def loaded(name, config, **more):
        asked.append((name, config, more["revision"], more["split"]))
        return Dataset.from_dict({"content": ["a river"]})

    monkeypatch.setattr(pretraining_data, "load_dataset", loaded)
    rows, _ = load_rows("me/one:big@v2, me/two@refs/convert/parquet, me/three", config="small")
    assert asked == [
        ("me/one", "big", "v2", "train"),
        ("me/two", "small", "refs/convert/parquet", "train"),
        ("me/three", "small", None, "train"),
    ]
    assert len(rows) == 3
    monkeypatch.setattr(pretraining_data, "load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(UserError, match="dataset me/one cannot be read from the Hub .division by zero."):
        load_rows("me/one")
    monkeypatch.undo()
    (tmp_path / "a:b@c.txt").write_text("a river\n")
    assert list(load_rows(str(tmp_path / "a:b@c.txt"))[0]["text"]) == ["a river"], "a file that is there is taken by its whole name"


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


def test_preparing_in_parallel_and_in_shards_resumes(tmp_path, tokenizer, monkeypatch):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"content": text}) + "\n" for text in _texts(30)))
    whole = prepare(str(source), tmp_path / "one", tokenizer)
    from neobert.pretraining import pretraining_data

    real, done = pretraining_data._prepare_shard, []

    def interrupted(rows, number, *rest):
        if number == 2:
            raise KeyboardInterrupt
        done.append(number)
        return real(rows, number, *rest)

    monkeypatch.setattr(pretraining_data, "_prepare_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), tmp_path / "two", tokenizer, shards=4)
    with pytest.raises(UserError, match="not a whole prepared set"):
        load_prepared(tmp_path / "two", tokenizer)
    monkeypatch.setattr(pretraining_data, "_prepare_shard", real)
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
    first, second = (load_prepared(tmp_path / name, tokenizer)[0]["input_ids"] for name in ("one", "two"))
    assert list(first) == list(second), "shards and processes must not change the rows or their order"


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
        return source_digest(str(path), None, "train", "content", tokenizer)

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
    with pytest.raises(UserError, match="prepared with another content .*; choose another prepared_dir"):
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
        assert list(load_rows(str(tmp_path / pattern))[0]["text"]) == found, pattern


def test_long_texts_are_cut_or_split():
    tokens = Dataset.from_dict({"input_ids": [list(range(10, 20)), [30]], "length": [12, 3]})
    cut = Windows(tokens, 1, 2, 6, "truncate")
    assert [row.tolist() for row in cut.read(np.arange(len(cut)))] == [[1, 10, 11, 12, 13, 2], [1, 30, 2]]
    split = Windows(tokens, 1, 2, 6, "split")
    assert [row.tolist() for row in split.read(np.arange(len(split)))] == [
        [1, 10, 11, 12, 13, 2], [1, 14, 15, 16, 17, 2], [1, 18, 19, 2], [1, 30, 2],
    ], "windows must hold every token once"  # fmt: skip
    assert split.lengths.tolist() == [6, 6, 4, 3] and split.text_lengths.tolist() == [12, 12, 12, 3]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_text_once_an_epoch_within_the_budget(tokenizer, layout):
    lengths = [3 + i % 17 for i in range(101)]
    settings = {"layout": layout, "tokens_per_batch": 64, "texts_per_batch": 7, "max_length": 20, "seed": 5}
    windows = Windows(_tokens(lengths), 101, 102, 20)
    batches = MicroBatches(windows, TokenMasking(tokenizer), count=200, **settings)
    expected = sorted((101, *[2000 + i] * (n - 2), 102) for i, n in enumerate(lengths))
    seen, first_epoch = [], None
    for i in range(len(batches)):
        batch = batches[i]
        seen += _texts_of(batch)
        assert batching.real_tokens(batch) == sum(map(len, _texts_of(batch)))
        if layout == "packed":
            assert batch["input_ids"].shape[1] <= 64, "a packed batch must keep to its token budget"
            assert batch["max_length_q"] == max(map(len, _texts_of(batch)))
        if first_epoch is None and len(seen) >= len(lengths):
            first_epoch = list(seen)
    assert sorted(first_epoch) == expected, "the first epoch must hold every text exactly once"
    assert sorted(seen[len(lengths) : 2 * len(lengths)]) == expected, "so must the second"
    assert seen[: len(lengths)] != seen[len(lengths) : 2 * len(lengths)], "in another order"


def test_a_batch_depends_on_the_seed_and_its_number_alone(tokenizer):
    windows = Windows(_tokens([3 + i % 17 for i in range(50)]), 101, 102, 20)
    settings = {"tokens_per_batch": 64, "max_length": 20}
    one = MicroBatches(windows, TokenMasking(tokenizer), count=40, seed=1, **settings)
    in_order = [one[i] for i in range(40)]
    fresh = MicroBatches(windows, TokenMasking(tokenizer), count=90, seed=1, **settings)
    for i in (33, 2, 39, 0):
        for name, value in in_order[i].items():
            same = torch.equal(value, fresh[i][name]) if torch.is_tensor(value) else value == fresh[i][name]
            assert same, f"batch {i} must be the same when it is the first that is asked for ({name})"
    other = MicroBatches(windows, TokenMasking(tokenizer), count=40, seed=2, **settings)
    assert not torch.equal(other[0]["labels"], in_order[0]["labels"]), "another seed must give another batch"


def test_without_boundaries_rows_are_full_and_cross_texts(tokenizer):
    lengths = [3 + i % 17 for i in range(60)]
    settings = {"layout": "packed_without_boundaries", "tokens_per_batch": 96, "max_length": 32, "seed": 0}
    windows = Windows(_tokens(lengths), 101, 102, 32)
    batches = MicroBatches(windows, TokenMasking(tokenizer), count=7, **settings)
    assert {batches[i]["input_ids"].shape for i in range(7)} == {(3, 32)}, "batches of training are full, in the next epoch too"
    batches = MicroBatches.one_pass(windows, TokenMasking(tokenizer), **settings)
    shapes = [tuple(batches[i]["input_ids"].shape) for i in range(len(batches))]
    assert shapes == [(3, 32)] * 6 + [(1, 32), (1, 16)], "one pass must hold the last rows too, the very last one shorter"
    few = MicroBatches.one_pass(Windows(_tokens([9, 8]), 101, 102, 32), TokenMasking(tokenizer), **settings)
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


def test_mixture_draws_20_40_40_from_long_texts(tokenizer):
    lengths = [8] * 60 + [16] * 30 + [32] * 30
    windows = Windows(_tokens(lengths), 101, 102, 32)
    mixture = {0: 0.2, 16: 0.4, 32: 0.4}
    batches = MicroBatches(windows, TokenMasking(tokenizer), count=2000, tokens_per_batch=64, max_length=32, mixture=mixture, seed=3)
    shares = np.bincount(batches.source, minlength=3) / 2000
    assert np.abs(shares - [0.2, 0.4, 0.4]).max() < 0.04, f"parts must be drawn 20 / 40 / 40, got {shares}"
    for i in range(60):
        shortest = min(map(len, _texts_of(batches[i])))
        assert shortest >= [0, 16, 32][batches.source[i]], "a batch must keep to its part's least length"
    with pytest.raises(UserError, match="at least 64 tokens"):
        MicroBatches(windows, TokenMasking(tokenizer), tokens_per_batch=64, max_length=32, mixture={0: 0.5, 64: 0.5})


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"tokens_per_batch": 10, "max_length": 20}, "less than one text"),
        ({"layout": "packed_without_boundaries", "tokens_per_batch": 30, "max_length": 20}, "must be a multiple"),
        ({"layout": "ragged"}, "layout must be one of"),
        ({"long_texts": "spilt"}, "long_texts must be one of"),
        ({"max_length": 2}, "max_length must be at least 3"),
        ({"layout": "padded", "texts_per_batch": 0}, "at least 1"),
        ({"mixture": {0: 0.5, 1024: 0.6}}, "sum to 1"),
        ({"mixture": [1, 2]}, "must map"),
    ],
)
def test_impossible_batches_are_named(settings, words):
    arguments = {"layout": "packed", "tokens_per_batch": 4096, "texts_per_batch": 8, "max_length": 1024, **settings}
    with pytest.raises(UserError, match=words):
        batching.check_batch(**arguments)


def _stream(path, tokenizer, layout="packed", mixture=None, rank=0, world_size=1):
    rows, kind = load_rows(str(path), text_column="text", streaming=True)
    masking = TokenMasking(tokenizer)
    return StreamedBatches(
        rows, kind, "text", tokenizer, 101, 102, masking, layout, 64, 4, 32, "truncate", mixture, seed=1, rank=rank, world_size=world_size
    )


def _corpus(folder, files=3, rows=40):
    for number in range(files):
        texts = [f"{text} {number} {i}" for i, text in enumerate(_texts(rows, 25))]
        lines = [json.dumps({"text": text}) for text in texts] + ["{broken", '{"text": ""}']
        (folder / f"part{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    "layout, mixture", [("packed", None), ("packed", {0: 0.2, 12: 0.8}), ("padded", None), ("packed_without_boundaries", None)]
)
def test_a_stream_resumes_exactly_from_its_snapshot(tmp_path, tokenizer, layout, mixture):
    _corpus(tmp_path)
    whole = _stream(tmp_path, tokenizer, layout, mixture)
    batches, state = [], None
    for i, batch in zip(range(SNAPSHOT_EVERY + 25), whole):
        batches.append(batch)
        state = batch.get(STATE, state) if i <= SNAPSHOT_EVERY + 8 else state
    consumed = SNAPSHOT_EVERY + 9
    resumed = _stream(tmp_path, tokenizer, layout, mixture)
    resumed.load_state(json.loads(state), consumed)
    assert json.loads(state)["batch"] == SNAPSHOT_EVERY, "the snapshot must be the last before the resumption"
    for expected, batch in zip(batches[consumed:], resumed):
        assert torch.equal(batch["input_ids"], expected["input_ids"]) and torch.equal(batch["labels"], expected["labels"])
    assert batches[-1][COUNTS]["broken"] >= 3, "broken rows must be counted"
    if mixture is None and layout == "packed":
        seen = []
        for batch in batches:
            if len(seen) + len(_texts_of(batch)) > 120:
                break
            seen += _texts_of(batch)
        assert len(seen) > 100 and len(set(seen)) == len(seen), "an epoch must hold every text once"


@pytest.mark.parametrize("files, world_size", [(4, 2), (3, 2), (1, 2)])
def test_processes_share_a_stream_and_resume(tmp_path, tokenizer, files, world_size):
    """Shards dealt out, or rows of every shard where they do not come out even; each text once an epoch, in both cases."""
    _corpus(tmp_path, files=files)
    seen = []
    for rank in range(world_size):
        batches = [batch for _, batch in zip(range(12), _stream(tmp_path, tokenizer, rank=rank, world_size=world_size))]
        seen.append([text for batch in batches[:5] for text in _texts_of(batch)])
        resumed = _stream(tmp_path, tokenizer, rank=rank, world_size=world_size)
        resumed.load_state(json.loads(batches[0][STATE]), 7)
        for expected, batch in zip(batches[7:], resumed):
            assert torch.equal(batch["input_ids"], expected["input_ids"]), f"process {rank} must continue with its own batches"
    assert seen[0] and seen[1] and not set(seen[0]) & set(seen[1]), "each process must read its own share"
    assert len(set(seen[0])) == len(seen[0]), "no text may come twice in an epoch"


def test_another_epoch_has_another_order_of_shards(tmp_path, tokenizer):
    for number in range(6):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"text": WORDS[number]}) + "\n")
    stream = _stream(tmp_path, tokenizer)
    words = [tokenizer.decode(stream.sources[0].next(stream._windows)[1:-1]) for _ in range(18)]
    epochs = [words[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(epoch) == sorted(WORDS[:6]) for epoch in epochs), "every epoch must read every shard once"
    assert len({tuple(epoch) for epoch in epochs}) > 1, "and not always in the same order"


def test_a_stream_without_long_texts_says_so(tmp_path, tokenizer):
    _corpus(tmp_path)
    with pytest.raises(UserError, match="no text of at least 500 tokens"):
        next(iter(_stream(tmp_path, tokenizer, mixture={500: 1.0})))


def test_tokens_from_texts_leaves_out_empty_ones(tokenizer):
    assert list(tokens_from_texts(["a river", "", "stone"], tokenizer)["length"]) == [4, 3]


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
