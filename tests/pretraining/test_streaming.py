"""Pins streamed pre-training text: every row is tokenised by one reader alone, processes and
workers resume exactly after any interruption, texts are cut or split, weights are shares."""

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
from neobert.pretraining.options import BatchArguments
from neobert.pretraining.sources import load_rows, parse_sources, shares_of
from neobert.pretraining.streaming import STATE, StreamedBatches


def _stream(dataset, tokenizer, rank=0, world_size=1, workers=0, **spec):
    sources = parse_sources(dataset if isinstance(dataset, list) else str(dataset))
    shares = shares_of(sources)
    rows = [load_rows([source]) for source in sources] if shares else [load_rows(sources)]
    size = {} if spec.get("texts_per_batch") else {"tokens_per_batch": 64}
    spec = BatchArguments(**{"max_length": 32, **size, **spec})
    places = (rank, world_size, workers)
    return StreamedBatches(rows, shares, tokenizer, TokenMasking(tokenizer), spec, 1, 1000, *places)


def _first_text(stream, count):
    """The first texts of a stream of one reader."""
    texts = stream.text_reader(0, 0)
    return [texts.next().tolist() for _ in range(count)]


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
    """{worker: its last state} of a list of batches, as a checkpoint keeps them."""
    states = [json.loads(batch[STATE]) for batch in batches]
    return {state["worker"]: state for state in states}


def _corpus(folder, files=3, rows=40):
    for number in range(files):
        texts = [f"{text} {number} {i}" for i, text in enumerate(make_texts(rows, 25))]
        lines = [json.dumps({"text": text}) for text in [*texts, ""]]
        (folder / f"part{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _in_turn(stream):
    """Batches of all workers of a process in the order of a DataLoader, without its processes."""
    workers = [
        stream.worker_batches((stream.start + i) % stream.workers) for i in range(stream.workers)
    ]
    for worker in itertools.cycle(workers):
        yield next(worker)


def _passes(batch):
    return [part["passes"] for part in json.loads(batch[STATE])["parts"]]


SPECS = [
    {},
    {"mixture": {0: 0.2, 12: 0.8}},
    {"texts_per_batch": 4},
    {"layout": "packed_without_boundaries"},
    {"long_texts": "split", "max_length": 8},
]


@pytest.mark.parametrize("case", range(12))
def test_any_interruptions_end_as_none(tmp_path, tokenizer, monkeypatch, case):
    """Two and three random interruptions, also at once after a continuation; over several passes;
    every second case has weighted sources."""
    random = np.random.default_rng(case)
    monkeypatch.setattr(streaming, "ROWS_AT_ONCE", int(random.choice([3, 8, 40])))
    _corpus(tmp_path, files=int(random.choice([1, 3, 5])), rows=60)
    dataset = str(tmp_path)
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
        states, consumed, batches = {}, 0, []
        for stop in (*sorted(random.integers(61, size=interruptions).tolist()), 60):
            stream = _stream(dataset, tokenizer, **settings)
            stream.load_state(json.loads(json.dumps(states)), consumed)
            batches += (new := list(itertools.islice(_in_turn(stream), stop - consumed)))
            states, consumed = {**states, **_states(new)}, stop
        assert all(map(_same, expected, batches)), settings
        assert list(map(_passes, batches)) == list(map(_passes, expected))
    if case == 0:
        assert _states(expected)[0]["parts"][0]["passes"][0] >= 1, "it must run over several passes"


@pytest.mark.parametrize("workers, consumed", [(1, 7), (3, 1), (3, 20)])
def test_worker_processes_resume_exactly(tmp_path, tokenizer, workers, consumed):
    """Real worker processes, which have read ahead when the run is cut; also before each of them
    has given a batch."""
    _corpus(tmp_path, files=4)
    batches = _loaded(_stream(tmp_path, tokenizer, workers=workers), consumed + 6)
    resumed = _stream(tmp_path, tokenizer, workers=workers)
    resumed.load_state(_states(batches[:consumed]), consumed)
    assert all(map(_same, batches[consumed:], _loaded(resumed, 6)))
    texts = [text for batch in batches for text in texts_of_batch(batch)][:90]
    assert len(set(texts)) == len(texts), "workers must not read the same texts"


@pytest.mark.parametrize("files, readers", [(4, 2), (4, 4), (5, 2), (1, 2), (2, 6), (3, 4), (3, 1)])
def test_every_row_is_tokenised_by_one_reader_alone(
    tmp_path, tokenizer, monkeypatch, files, readers
):
    """Files dealt out, also where they do not come out even, and rows where there are fewer files
    than readers."""
    _corpus(tmp_path, files=files, rows=31)
    tokenise, shares = streaming.token_ids, []
    for rank in range(readers):
        seen = []
        monkeypatch.setattr(
            streaming,
            "token_ids",
            lambda tok, texts, seen=seen: seen.extend(texts) or tokenise(tok, texts),
        )
        texts = _stream(tmp_path, tokenizer, rank, readers).text_reader(0, 0)
        while texts.sources[0].epoch == 0:
            first = len(seen)
            texts.next()
        shares.append(seen[:first])
    assert Counter(itertools.chain(*shares)) == Counter(rows_of(str(tmp_path)))
    most = -(-files // readers) * 32 if files >= readers else -(-files * 32 // readers) + files
    assert max(map(len, shares)) <= most


def test_another_pass_has_another_order_of_files(tmp_path, tokenizer):
    for number in range(6):
        (tmp_path / f"part{number}.jsonl").write_text(json.dumps({"text": WORDS[number]}) + "\n")
    texts = _stream(tmp_path, tokenizer).text_reader(0, 0)
    words = [tokenizer.decode(texts.next()[1:-1]) for _ in range(18)]
    passes = [words[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(each) == sorted(WORDS[:6]) for each in passes)
    assert len(set(map(tuple, passes))) > 1


def test_a_stream_without_long_texts_says_so(tmp_path, tokenizer):
    _corpus(tmp_path)
    with pytest.raises(UserError, match="needs a text of at least 500 tokens"):
        next(iter(_stream(tmp_path, tokenizer, mixture={500: 1.0})))


def test_a_text_of_just_enough_tokens_is_taken_and_a_long_one_cut_or_split(tmp_path, tokenizer):
    """As in a prepared set: [CLS] and [SEP] count, and every token belongs to one window."""
    path = tmp_path / "one.txt"
    path.write_text("river\nriver stone\n")
    assert len(_first_text(_stream(path, tokenizer, mixture={4: 1.0}), 1)[0]) == 4
    path.write_text(" ".join(WORDS) + "\n")
    ids = tokenizer(" ".join(WORDS), add_special_tokens=False)["input_ids"]
    for long_texts, parts in (("truncate", [ids[:5], ids[:5]]), ("split", [ids[:5], ids[5:]])):
        expected = [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in parts]
        stream = _stream(path, tokenizer, max_length=7, long_texts=long_texts)
        assert _first_text(stream, 2) == expected


def test_a_stream_without_boundaries_holds_every_token(tmp_path, tokenizer):
    texts = make_texts(30, 25)
    (tmp_path / "one.txt").write_text("\n".join(texts) + "\n")
    written = [token for text in texts for token in tokenizer(text)["input_ids"]]
    stream = _stream(tmp_path, tokenizer, layout="packed_without_boundaries")
    read = []
    for batch in _loaded(stream, len(written) // 64):
        ids = torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
        read += ids.flatten().tolist()
    assert read == written[: len(read)], "a text that a batch cuts goes on in the next batch"


@pytest.mark.parametrize("rank", [0, 1])
def test_masks_of_a_process_are_those_of_the_complete_run(tmp_path, tokenizer, monkeypatch, rank):
    """Batch i of process r is batch 2 i + r of the run: its masks follow from this number, and a
    mask schedule from its share of the run."""
    _corpus(tmp_path)
    seen = []
    monkeypatch.setattr(streaming, "masked_batch", lambda *given: seen.append(given[4:]) or {})
    _loaded(_stream(tmp_path, tokenizer, rank=rank, world_size=2), 3)
    assert seen == [(number, number / 1000) for number in (rank, rank + 2, rank + 4)]


def test_weights_are_shares_of_texts(tmp_path, tokenizer):
    """Within half a percent of 20,000 texts; a source that ends begins again."""
    for name, count in (("mine", 300), ("general", 70)):
        texts = [f"{name} {i} {text}" for i, text in enumerate(make_texts(count, 4))]
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    dataset = [
        {"name": str(tmp_path / "mine.txt"), "weight": 9},
        {"name": str(tmp_path / "general.txt"), "weight": 1},
    ]
    texts = _stream(dataset, tokenizer).text_reader(0, 0)
    (general,) = tokenizer("general", add_special_tokens=False)["input_ids"]
    drawn = [texts.next() for _ in range(20_000)]
    assert abs(np.mean([text[1] == general for text in drawn]) - 0.1) < 0.005
    epochs = [source.epoch for source in texts.sources]
    assert epochs == [59, 28] or abs(epochs[0] - 60) <= 1


def test_readers_sample_different_sources(tmp_path, tokenizer):
    """Check that two readers of weighted sources do not read them in the same order."""
    for name in ("mine", "general"):
        texts = [f"{name} {i} {text}" for i, text in enumerate(make_texts(80, 4))]
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    names = [str(tmp_path / f"{name}.txt") for name in ("mine", "general")]
    dataset = [{"name": name, "weight": 1} for name in names]
    orders = []
    for rank in range(2):
        texts = _stream(dataset, tokenizer, rank, 2).text_reader(0, 0)
        orders.append([int(texts.next()[1]) for _ in range(40)])
    assert len(set(orders[0])) == len(set(orders[1])) == 2 and orders[0] != orders[1]


def test_epochs_of_a_stream_are_a_mean_over_workers_and_sources(tmp_path, tokenizer):
    _corpus(tmp_path)
    stream = _stream(tmp_path, tokenizer)
    assert stream.epochs([]) == 0
    assert stream.epochs([{"parts": [{"passes": [n]}]} for n in (2, 4)]) == 3
    stream.shares = [0.75, 0.25]
    assert stream.epochs([{"parts": [{"passes": [4, 8]}]}]) == 5
