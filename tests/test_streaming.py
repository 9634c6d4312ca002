"""Pins streamed pre-training text: every row is tokenised by one reader alone, processes and
workers resume exactly, shards change their order with the epoch."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from data_runs import WORDS, make_texts, make_tokenizer, rows_of, texts_of_batch  # noqa: F401

from neobert.common.errors import UserError
from neobert.pretraining import streaming
from neobert.pretraining.batches import BatchSpec, SpecialTokens
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.prepared import Tokenise, tokenise_texts
from neobert.pretraining.streaming import (
    COUNTS,
    SNAPSHOT_EVERY,
    STATE,
    StreamedBatches,
    TokenStream,
)


def _stream(path, tokenizer, rank=0, world_size=1, workers=0, **spec):
    rows = rows_of(str(path), column="text", streaming=True)
    spec = BatchSpec(
        **{"length": 32, "seed": 1, **({} if spec.get("texts") else {"tokens": 64}), **spec}
    )
    tokenise, masking = Tokenise(tokenizer), TokenMasking(tokenizer)
    return StreamedBatches(
        TokenStream(rows, tokenise, SpecialTokens.of(tokenizer)),
        masking,
        spec,
        1000,
        rank,
        world_size,
        workers,
    )


def _loaded(stream, count):
    """The first batches as a trainer gets them: from a DataLoader, with worker processes where
    there are some."""
    workers = stream.workers if stream.workers > 1 else 0
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers)
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
        texts = [f"{text} {number} {i}" for i, text in enumerate(make_texts(rows, 25))]
        lines = [json.dumps({"text": text}) for text in texts] + ["{broken", '{"text": ""}']
        (folder / f"part{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


SPECS = [
    {},
    {"mixture": {0: 0.2, 12: 0.8}},
    {"texts": 4},
    {"layout": "packed_without_boundaries"},
    {"long_texts": "split", "length": 8},
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_stream_resumes_exactly_from_its_snapshot(tmp_path, tokenizer, spec):
    _corpus(tmp_path)
    batches = _loaded(_stream(tmp_path, tokenizer, **spec), SNAPSHOT_EVERY + 25)
    consumed = SNAPSHOT_EVERY + 9
    states = _states(batches[:consumed])
    assert states[0]["batch"] == SNAPSHOT_EVERY, (
        "the snapshot must be the last before the resumption"
    )
    resumed = _stream(tmp_path, tokenizer, **spec)
    resumed.load_state(json.loads(json.dumps(states)), consumed)
    for expected, batch in zip(batches[consumed:], resumed):
        assert _same(expected, batch)
    assert batches[-1][COUNTS][1]["broken"] >= 3, "broken rows must be counted"
    if not spec:
        seen = []
        for batch in batches:
            if len(seen) + len(texts_of_batch(batch)) > 120:
                break
            seen += texts_of_batch(batch)
        assert len(seen) > 100 and len(set(seen)) == len(seen), "an epoch must hold every text once"


def _in_turn(stream):
    """Batches of all workers of a process in the order of a DataLoader, without its processes."""
    workers = [
        stream.batches_of((stream.start + i) % stream.workers) for i in range(stream.workers)
    ]
    for worker in itertools.cycle(workers):
        yield next(worker)


@pytest.mark.parametrize("case", range(12))
def test_any_interruptions_end_as_none(tmp_path, tokenizer, monkeypatch, case):
    """Two and three random interruptions, also at once after a continuation: a checkpoint keeps the
    last snapshot of each worker."""
    random = np.random.default_rng(case)
    monkeypatch.setattr(streaming, "SNAPSHOT_EVERY", int(random.choice([1, 3, 50])))
    monkeypatch.setattr(streaming, "ROWS_AT_ONCE", int(random.choice([8, 40])))
    _corpus(tmp_path, files=int(random.choice([1, 3, 5])), rows=150)
    world_size = int(random.choice([1, 2]))
    given = {
        "workers": int(random.choice([0, 1, 3])),
        "world_size": world_size,
        "rank": int(random.integers(world_size)),
    }
    given |= SPECS[case % len(SPECS)]
    expected = list(itertools.islice(_in_turn(_stream(tmp_path, tokenizer, **given)), 60))
    for interruptions in (2, 2, 3, 3):
        states, consumed, batches = {}, 0, []
        for stop in (*sorted(random.integers(61, size=interruptions).tolist()), 60):
            stream = _stream(tmp_path, tokenizer, **given)
            stream.load_state(json.loads(json.dumps(states)), consumed)
            batches += (new := list(itertools.islice(_in_turn(stream), stop - consumed)))
            states, consumed = {**states, **_states(new)}, stop
        assert all(map(_same, expected, batches)), given
        assert [batch[COUNTS] for batch in batches] == [batch[COUNTS] for batch in expected]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("consumed", [1, 2, 7, 3 * SNAPSHOT_EVERY + 5])
def test_worker_processes_resume_exactly(tmp_path, tokenizer, workers, consumed):
    """Real worker processes, which have read ahead when the run is cut; also before each of them
    has given a batch."""
    _corpus(tmp_path, files=4)
    batches = _loaded(_stream(tmp_path, tokenizer, workers=workers), consumed + 6)
    resumed = _stream(tmp_path, tokenizer, workers=workers)
    resumed.load_state(_states(batches[:consumed]), consumed)
    again = _loaded(resumed, 6)
    assert all(map(_same, batches[consumed:], again)), (
        "the resumed batches must be those of the uninterrupted run"
    )
    texts = [text for batch in batches for text in texts_of_batch(batch)][:90]
    assert len(set(texts)) == len(texts), "workers must not read the same texts"


@pytest.mark.parametrize("files, readers", [(4, 2), (5, 2), (7, 3), (1, 2), (2, 6), (3, 4), (3, 1)])
def test_every_row_is_tokenised_by_one_reader_alone(tmp_path, tokenizer, files, readers):
    """Files dealt out, also where they do not come out even, and rows where there are fewer files
    than readers."""
    _corpus(tmp_path, files=files, rows=31)
    everything = Counter(
        line["text"] for line in rows_of(str(tmp_path), column="text", streaming=True)
    )
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
    """`Tokenise` that remembers what it was given, and how much of it belongs to the pass before
    the present one."""

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
        seen.append([text for batch in batches[:5] for text in texts_of_batch(batch)])
        resumed = _stream(tmp_path, tokenizer, rank=rank, world_size=world_size)
        resumed.load_state(_states(batches[:7]), 7)
        assert all(map(_same, batches[7:], _loaded(resumed, 5))), (
            f"process {rank} must continue with its own batches"
        )
    assert seen[0] and seen[1] and not set(seen[0]) & set(seen[1]), (
        "each process must read its own share"
    )
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
    assert all(sorted(epoch) == sorted(WORDS[:6]) for epoch in epochs), (
        "every epoch must read every shard once"
    )
    assert len({tuple(epoch) for epoch in epochs}) > 1, "and not always in the same order"


@pytest.mark.parametrize("files", [5, 1])
def test_a_reader_without_long_texts_waits_for_those_of_another_pass(tmp_path, tokenizer, files):
    """One long text for three readers, in one of their files or among the rows of one file: each
    comes to it sooner or later."""
    for number in range(files):
        texts = [f"river stone {number} {i}" for i in range(7)] + (
            ["paper " * 20] if number == 0 else []
        )
        (tmp_path / f"part{number}.txt").write_text("\n".join(texts) + "\n")
    for rank in range(3):
        (reader,) = _stream(
            tmp_path, tokenizer, rank=rank, world_size=3, mixture={15: 1.0}
        ).readers(0)
        assert [len(reader.next()) for _ in range(3)] == [22] * 3


def test_a_stream_without_long_texts_says_so(tmp_path, tokenizer):
    _corpus(tmp_path)
    with pytest.raises(UserError, match="no text of at least 500 tokens"):
        next(iter(_stream(tmp_path, tokenizer, mixture={500: 1.0})))


def test_tokenised_texts_leave_out_empty_ones(tokenizer):
    assert tokenise_texts(["a river", "", "stone"], tokenizer).lengths.tolist() == [4, 3]


def test_a_streamed_text_of_just_enough_tokens_is_taken(tmp_path, tokenizer):
    """As in a prepared set: [CLS] and [SEP] count, and a text of the least length is long
    enough."""
    (tmp_path / "one.txt").write_text("river\nriver stone\n")
    (reader,) = _stream(tmp_path, tokenizer, mixture={4: 1.0}).readers(0)
    assert len(reader.next()) == 4


def test_a_long_streamed_text_is_cut_or_split(tmp_path, tokenizer):
    (tmp_path / "one.txt").write_text(" ".join(WORDS) + "\n")
    ids = tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"]
    for long_texts, parts in (("truncate", [ids[:5], ids[:5]]), ("split", [ids[:5], ids[5:]])):
        (reader,) = _stream(tmp_path, tokenizer, length=7, long_texts=long_texts).readers(0)
        expected = [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in parts]
        assert [reader.next().tolist() for _ in parts] == expected, (
            "every token belongs to one window"
        )


def test_a_stream_without_boundaries_holds_every_token(tmp_path, tokenizer):
    texts = make_texts(30, 25)
    (tmp_path / "one.txt").write_text("\n".join(texts) + "\n")
    written = [token for text in texts for token in tokenizer(text)["input_ids"]]
    batches = _loaded(
        _stream(tmp_path, tokenizer, layout="packed_without_boundaries"), len(written) // 64
    )
    read = torch.cat(
        [
            torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"]).flatten()
            for batch in batches
        ]
    )
    assert read.tolist() == written[: len(read)], (
        "a text that a batch cuts goes on in the next batch"
    )


def test_empty_and_broken_rows_are_counted_apart(tmp_path, tokenizer):
    rows = ['{"text": "river stone"}', "{broken", '{"text": ""}', '{"text": " "}']
    (tmp_path / "one.jsonl").write_text("\n".join(rows) + "\n")
    (reader,) = _stream(tmp_path, tokenizer).readers(0)
    assert [len(reader.next()) for _ in range(2)] == [4, 4], (
        "the second one belongs to the next pass"
    )
    assert reader.skipped == {"empty": 2, "broken": 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_masks_of_a_process_are_those_of_the_complete_run(tmp_path, tokenizer, monkeypatch, rank):
    """Batch i of process r is batch 2 i + r of the run: its masks follow from this number, and a
    mask schedule from its share of the run."""
    _corpus(tmp_path)
    seen = []
    monkeypatch.setattr(streaming, "masked_batch", lambda *given: seen.append(given[3:]) or {})
    _loaded(_stream(tmp_path, tokenizer, rank=rank, world_size=2), 3)
    assert seen == [(number, number / 1000) for number in (rank, rank + 2, rank + 4)]
