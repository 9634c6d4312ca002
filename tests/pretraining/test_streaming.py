"""Test the stream of micro-batches.

Each row is tokenized by exactly one reader, processes and workers resume exactly after any
interruption, long texts are truncated or split, and sources are sampled with their weights.
"""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.data_runs import WORDS, make_texts, make_tokenizer, rows_of, texts_of_batch  # noqa: F401

from neobert.common.errors import UserError
from neobert.pretraining import streaming
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.options import BatchOptions
from neobert.pretraining.sources import load_rows, normalized_weights, parse_sources
from neobert.pretraining.streaming import STATE, StreamedBatches


def _stream(dataset, tokenizer, rank=0, world_size=1, workers=0, **batch_options):
    """Return a stream of batches of 64 tokens, by default, from a path or a list of sources."""
    sources = parse_sources(dataset if isinstance(dataset, list) else str(dataset))
    weights = normalized_weights(sources)
    rows = [load_rows([source]) for source in sources] if weights else [load_rows(sources)]
    size = {} if batch_options.get("micro_batch_size") else {"micro_batch_tokens": 64}
    batch_options = BatchOptions(**{"max_length": 32, **size, **batch_options})
    return StreamedBatches(
        rows,
        weights,
        tokenizer,
        TokenMasking(tokenizer),
        batch_options,
        seed=1,
        count=1000,
        rank=rank,
        world_size=world_size,
        workers=workers,
    )


def _first_texts(stream, count):
    """Return the first texts of the first reader."""
    reader = stream.text_reader(0, 0)
    return [reader.next().tolist() for _ in range(count)]


def _load_batches(stream, count):
    """Return the first batches as a trainer receives them, from a DataLoader with workers."""
    workers = stream.workers if stream.workers > 1 else 0
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers)
    return [batch for _, batch in zip(range(count), loader)]


def _is_same(first, second):
    """Return whether two batches are identical."""
    names = ("input_ids", "labels", "cu_seq_lens_q")
    return all(
        torch.equal(first[name], second[name]) for name in names if name in first or name in second
    )


def _states(batches):
    """Return the last state of each worker, {worker: state}, as a checkpoint stores it."""
    states = [json.loads(batch[STATE]) for batch in batches]
    return {state["worker"]: state for state in states}


def _write_corpus(folder, files=3, rows=40):
    """Write files of texts and one empty row each, and return their folder."""
    for number in range(files):
        texts = [f"{text} {number} {i}" for i, text in enumerate(make_texts(rows, 25))]
        lines = [json.dumps({"text": text}) for text in [*texts, ""]]
        (folder / f"part{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _in_turn(stream):
    """Yield the batches of all workers in the order of a DataLoader, without worker processes."""
    workers = [
        stream.worker_batches((stream.start + i) % stream.workers) for i in range(stream.workers)
    ]
    for worker in itertools.cycle(workers):
        yield next(worker)


def _epochs(batch):
    """Return the number of complete epochs over each source, of each part of the mixture."""
    return [part["epochs"] for part in json.loads(batch[STATE])["parts"]]


SPECS = [
    {},
    {"mixture": {0: 0.2, 12: 0.8}},
    {"micro_batch_size": 4},
    {"layout": "packed_without_boundaries"},
    {"long_texts": "split", "max_length": 8},
]


@pytest.mark.parametrize("case", range(12))
def test_interrupted_streams_resume_exactly(tmp_path, tokenizer, monkeypatch, case):
    """Check runs with two and three random interruptions over several epochs.

    A run may be interrupted immediately after it was resumed. Every second case has weighted
    sources.
    """
    random = np.random.default_rng(case)
    monkeypatch.setattr(streaming, "ROWS_AT_ONCE", int(random.choice([3, 8, 40])))
    _write_corpus(tmp_path, files=int(random.choice([1, 3, 5])), rows=60)
    if case % 2:
        (tmp_path / "other.txt").write_text("\n".join(make_texts(30, 25)))
        names = [str(tmp_path / "part0.jsonl"), str(tmp_path / "other.txt")]
        dataset = [{"name": name, "weight": weight} for name, weight in zip(names, (0.7, 0.3))]
    else:
        dataset = f"{tmp_path}/part*.jsonl"

    world_size = int(random.choice([1, 2]))
    settings = {
        "workers": int(random.choice([0, 1, 3])),
        "world_size": world_size,
        "rank": int(random.integers(world_size)),
        **SPECS[case % len(SPECS)],
    }
    expected = list(itertools.islice(_in_turn(_stream(dataset, tokenizer, **settings)), 60))

    for interruptions in (2, 3):
        states = {}
        consumed = 0
        batches = []
        for stop in (*sorted(random.integers(61, size=interruptions).tolist()), 60):
            stream = _stream(dataset, tokenizer, **settings)
            stream.load_state(json.loads(json.dumps(states)), consumed)
            new_batches = list(itertools.islice(_in_turn(stream), stop - consumed))
            batches += new_batches
            # The keys are integers in a process and strings in a checkpoint.
            states |= {str(worker): state for worker, state in _states(new_batches).items()}
            consumed = stop
        assert all(map(_is_same, expected, batches)), settings
        assert list(map(_epochs, batches)) == list(map(_epochs, expected))

    if case == 0:
        assert _states(expected)[0]["parts"][0]["epochs"][0] >= 1, (
            "the run must cover several epochs"
        )


@pytest.mark.parametrize("workers, consumed", [(1, 7), (3, 1), (3, 20)])
def test_worker_processes_resume_exactly(tmp_path, tokenizer, workers, consumed):
    """Check worker processes, which have prefetched batches at the time of the interruption.

    With 3 workers and one consumed batch, no batch of the two other workers has been used yet.
    """
    _write_corpus(tmp_path, files=4)
    batches = _load_batches(_stream(tmp_path, tokenizer, workers=workers), consumed + 6)
    resumed = _stream(tmp_path, tokenizer, workers=workers)
    resumed.load_state(_states(batches[:consumed]), consumed)
    assert all(map(_is_same, batches[consumed:], _load_batches(resumed, 6)))

    texts = [text for batch in batches for text in texts_of_batch(batch)][:90]
    assert len(set(texts)) == len(texts), "workers must not read the same texts"


@pytest.mark.parametrize("files, readers", [(4, 2), (4, 4), (5, 2), (1, 2), (2, 6), (3, 4), (3, 1)])
def test_each_row_is_tokenized_by_exactly_one_reader(
    tmp_path, tokenizer, monkeypatch, files, readers
):
    """Check that readers divide the files, or the rows if there are fewer files than readers.

    The number of files need not be a multiple of the number of readers.
    """
    _write_corpus(tmp_path, files=files, rows=31)
    token_ids = streaming.token_ids
    rows_of_readers = []
    for rank in range(readers):
        seen = []

        def record(tokenizer, texts, seen=seen):
            seen.extend(texts)
            return token_ids(tokenizer, texts)

        monkeypatch.setattr(streaming, "token_ids", record)
        reader = _stream(tmp_path, tokenizer, rank, readers).text_reader(0, 0)
        while reader.sources[0].epoch == 0:
            row_count = len(seen)
            reader.next()
        rows_of_readers.append(seen[:row_count])

    assert Counter(itertools.chain(*rows_of_readers)) == Counter(rows_of(str(tmp_path)))
    if files >= readers:
        max_rows = -(-files // readers) * 32
    else:
        max_rows = -(-files * 32 // readers) + files
    assert max(map(len, rows_of_readers)) <= max_rows


def test_order_of_files_differs_between_epochs(tmp_path, tokenizer):
    """Check the order of six files with one word each over three epochs."""
    for number in range(6):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"text": WORDS[number]}) + "\n")
    reader = _stream(tmp_path, tokenizer).text_reader(0, 0)
    words = [tokenizer.decode(reader.next()[1:-1]) for _ in range(18)]

    epochs = [words[start : start + 6] for start in (0, 6, 12)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(WORDS[:6])
    assert len(set(map(tuple, epochs))) > 1


def test_stream_without_texts_of_required_length_is_rejected(tmp_path, tokenizer):
    """Only several workers are advised to be fewer."""
    _write_corpus(tmp_path)
    single = "no text of at least 500 tokens. Pass other texts, or lower the length in `mixture`.$"
    with pytest.raises(UserError, match=single):
        next(iter(_stream(tmp_path, tokenizer, mixture={500: 1.0})))
    several = "no text of at least 500 tokens in the part of one of 2 .* use fewer processes"
    with pytest.raises(UserError, match=several):
        next(iter(_stream(tmp_path, tokenizer, mixture={500: 1.0}, workers=2)))


def test_minimum_and_maximum_length_of_streamed_texts(tmp_path, tokenizer):
    """Check the minimum length of a text, and that windows contain every token exactly once."""
    path = tmp_path / "one.txt"
    path.write_text("river\nriver stone\n")
    assert len(_first_texts(_stream(path, tokenizer, mixture={4: 1.0}), 1)[0]) == 4

    path.write_text(" ".join(WORDS) + "\n")
    ids = tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"]
    for long_texts, parts in (("truncate", [ids[:5], ids[:5]]), ("split", [ids[:5], ids[5:]])):
        expected = [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in parts]
        stream = _stream(path, tokenizer, max_length=7, long_texts=long_texts)
        assert _first_texts(stream, 2) == expected


def test_a_stream_without_boundaries_contains_every_token(tmp_path, tokenizer):
    texts = make_texts(30, 25)
    (tmp_path / "one.txt").write_text("\n".join(texts) + "\n")
    written = [token for text in texts for token in tokenizer(text)["input_ids"]]
    stream = _stream(tmp_path, tokenizer, layout="packed_without_boundaries")
    read = []
    for batch in _load_batches(stream, len(written) // 64):
        ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
        read += ids.flatten().tolist()
    assert read == written[: len(read)], (
        "a text that is split at the end of a batch must continue in the next batch"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_batch_numbers_are_global_across_processes(tmp_path, tokenizer, monkeypatch, rank):
    """Check the numbers of the batches of two processes.

    Batch i of process r is batch 2 * i + r of the run. This number determines the masks of the
    batch, and the progress of the run for a masking schedule.
    """
    _write_corpus(tmp_path)
    numbers = []

    def record(texts, batch_options, masking, seed, number, progress):
        numbers.append((number, progress))
        return {}

    monkeypatch.setattr(streaming, "masked_batch", record)
    _load_batches(_stream(tmp_path, tokenizer, rank=rank, world_size=2), 3)
    assert numbers == [(number, number / 1000) for number in (rank, rank + 2, rank + 4)]


def test_sources_are_sampled_with_their_weights(tmp_path, tokenizer):
    """Check the fraction of a source among 20,000 texts, and the epochs of both sources.

    A source that is exhausted starts again.
    """
    for name, count in (("mine", 300), ("general", 70)):
        texts = [f"{name} {i} {text}" for i, text in enumerate(make_texts(count, 4))]
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    dataset = [
        {"name": str(tmp_path / "mine.txt"), "weight": 9},
        {"name": str(tmp_path / "general.txt"), "weight": 1},
    ]

    reader = _stream(dataset, tokenizer).text_reader(0, 0)
    (general,) = tokenizer("general", add_special_tokens=False)["input_ids"]
    is_general = [reader.next()[1] == general for _ in range(20_000)]
    assert abs(np.mean(is_general) - 0.1) < 0.005
    # About 18,000 texts of 300, and 2,000 of 70.
    mine, general = (source.epoch for source in reader.sources)
    assert abs(mine - 60) <= 1 and abs(general - 28) <= 2


def test_readers_sample_different_sources(tmp_path, tokenizer):
    """Check that two readers of weighted sources do not read them in the same order."""
    for name in ("mine", "general"):
        texts = [f"{name} {i} {text}" for i, text in enumerate(make_texts(80, 4))]
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    names = [str(tmp_path / f"{name}.txt") for name in ("mine", "general")]
    dataset = [{"name": name, "weight": 1} for name in names]

    orders = []
    for rank in range(2):
        reader = _stream(dataset, tokenizer, rank, 2).text_reader(0, 0)
        orders.append([int(reader.next()[1]) for _ in range(40)])
    assert len(set(orders[0])) == len(set(orders[1])) == 2
    assert orders[0] != orders[1]


def test_epochs_of_a_stream_are_a_mean_over_workers_and_sources(tmp_path, tokenizer):
    """Check states of two workers, and of two sources with weights of 0.75 and 0.25."""
    _write_corpus(tmp_path)
    stream = _stream(tmp_path, tokenizer)
    assert stream.epochs([]) == 0
    assert stream.epochs([{"parts": [{"epochs": [n]}]} for n in (2, 4)]) == 3
    stream.sampling_weights = [0.75, 0.25]
    assert stream.epochs([{"parts": [{"epochs": [4, 8]}]}]) == 5


def test_the_state_keeps_its_format(tmp_path, tokenizer):
    """Check the keys of the state, which checkpoints of earlier releases contain."""
    _write_corpus(tmp_path)
    (batch,) = _load_batches(_stream(tmp_path, tokenizer), 1)
    state = json.loads(batch[STATE])
    assert state.keys() == {"worker", "batch", "parts"}
    assert (state["worker"], state["batch"]) == (0, 1)

    (part,) = state["parts"]
    assert part.keys() == {"sampled", "pending", "epochs", "files", "positions"}
    assert part["sampled"] == len(texts_of_batch(batch)) + 1, "the last text is pending"
    assert part["pending"][0] == tokenizer.cls_token_id
    assert (part["epochs"], part["files"]) == ([0], [0])
    assert isinstance(part["positions"][0], dict)
