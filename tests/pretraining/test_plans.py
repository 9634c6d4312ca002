"""Test weighted sources.

Covers the fraction of each source in prepared data, the epochs of each source, identical data after
interruptions, and invalid weights. Streams are tested in test_streaming.py.
"""

import json
from collections import Counter

import numpy as np
import pytest
from helpers.data_runs import make_tokenizer, texts_of_batch, tokenize_texts  # noqa: F401
from helpers.pretrain_runs import (  # noqa: F401
    Killed,
    arguments_of,
    log_of,
    make_corpus,
    run_of,
    same_weights,
    signaled,
)


pytest.importorskip("accelerate")

from neobert.cli import main
from neobert.pretraining.batches import MicroBatches, TokenWindows, add_boundaries, boundary_tokens
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.options import BatchOptions
from neobert.pretraining.plans import WeightedOrder
from neobert.pretraining.prepared import TokenizedTexts
from neobert.pretraining.sources import normalized_weights, parse_sources


WORDS = ["river", "stone", "music", "paper", "green", "table", "winter", "north"]
WEIGHTS = {"mine": 0.9, "general": 0.1}


def _texts(source, count):
    """Return different texts of 3 to 9 words, which start with the name of their source."""
    rng = np.random.default_rng(len(source))
    return [f"{source} {i} {' '.join(rng.choice(WORDS, 1 + i % 7))}" for i in range(count)]


def _batches(tokenizer, sizes, count=None, weights=WEIGHTS, **batch_options):
    """Return the micro-batches of weighted sources, and a set of the texts of each source.

    Texts are tuples of token ids.
    """
    batch_options = BatchOptions(**{"max_length": 32, "micro_batch_size": 4} | batch_options)
    sources = [tokenize_texts(_texts(name, size), tokenizer) for name, size in sizes.items()]
    special = boundary_tokens(tokenizer)
    source_texts = [
        {tuple(add_boundaries(row, special).tolist()) for row in source.rows["input_ids"]}
        for source in sources
    ]
    windows = TokenWindows(
        TokenizedTexts.concatenate(sources, weights.values()), special, batch_options
    )
    return MicroBatches(windows, TokenMasking(tokenizer), batch_options, 5, count), source_texts


def _first_texts(batches, count):
    """Return the texts of the first micro-batches."""
    return [text for i in range(count) for text in texts_of_batch(batches[i])]


def test_epoch_contains_exact_fractions_of_sources(tokenizer):
    """Check that an epoch of weighted sources contains their exact fractions, well mixed.

    The epoch has 900 / 0.9 = 1,000 texts, so that it ends when the first source is exhausted.
    """
    batches, (mine, general) = _batches(tokenizer, {"mine": 900, "general": 300}, 5000)
    texts = _first_texts(batches, 250)
    assert sum(text in general for text in texts) == 100 and len(texts) == 1000
    assert len(set(texts)) == 1000, "no text may occur twice in the epoch"

    # Three epochs contain each of the 300 texts of the second source once.
    assert len(set(_first_texts(batches, 750)) & general) == 300

    counts = [sum(text in general for text in texts[i : i + 100]) for i in range(0, 1000, 100)]
    assert 3 <= min(counts) and max(counts) <= 20, "the sources must be mixed"


def test_exhausted_source_starts_again():
    """Check that a source which is exhausted starts again, while the other one continues."""
    order = WeightedOrder(np.arange(1000), [30, 1000], [0.5, 0.5], (1, 0))
    assert order.samples == [100, 100], "an epoch must have 100 samples of the rarest source"

    ids = np.concatenate([order.order(number) for number in range(6)])
    small = ids[ids < 30]
    large = ids[ids >= 30]
    assert set(Counter(small.tolist()).values()) == {20}, "600 samples must be 20 turns of 30 texts"
    assert len(set(large.tolist())) == 600, "no text may occur twice before the source is exhausted"

    # An epoch is a function of its number.
    other = WeightedOrder(np.arange(1000), [30, 1000], [0.5, 0.5], (1, 0))
    assert (other.order(4) == order.order(4)).all() and (order.order(3) != order.order(4)).any()


def test_sample_counts_are_rounded_and_sources_shuffled_separately():
    """Check the number of samples, and that two sources of equal size are shuffled differently."""
    order = WeightedOrder(np.arange(1010), [10, 1010], [0.31, 0.69], (1, 0))
    assert order.samples == [100, 223], "100 / 0.31 * 0.69 = 222.58 must be rounded"

    ids = WeightedOrder(np.arange(1400), [500, 1000, 1400], [0.1, 0.1, 0.8], (1, 0)).order(0)
    first = ids[ids < 500]
    second = ids[(ids >= 500) & (ids < 1000)]
    assert len(first) == len(second) == 100 and {*first} != {*(second - 500)}


def test_weights_are_normalized():
    """Check that weights are normalized to sum to 1, and that a single source has no weight."""
    sources = parse_sources(
        [{"name": f"{i}.txt", "weight": weight} for i, weight in enumerate([3, 1, 4])]
    )
    assert normalized_weights(sources) == [3 / 8, 1 / 8, 4 / 8]
    (alone,) = parse_sources([{"name": "a.txt", "weight": 3}])
    assert alone.weight is None, "a single source needs no sampling"


@pytest.fixture(name="weighted")
def make_weighted(corpus):
    """Return the option `dataset` of two weighted sources."""
    texts = [f"old men sing loud songs number {i}" for i in range(12)]
    (corpus / "general.txt").write_text("\n".join(texts) + "\n")
    return json.dumps(
        [
            {"name": str(corpus / "train.txt"), "weight": 0.9},
            {"name": str(corpus / "general.txt"), "weight": 0.1},
        ]
    )


@pytest.mark.parametrize("overrides", [{}, {"streaming": "true"}], ids=str)
def test_run_killed_twice_equals_uninterrupted_run(corpus, tmp_path, weighted, overrides):
    """Check that a run with weighted sources, killed twice, equals an uninterrupted run."""
    options = {"dataset": weighted, "prepared": corpus / "weighted", "save_steps": 2, **overrides}
    run_of(arguments_of(corpus, tmp_path / "whole", **options))
    for stop in (3, 6):
        with pytest.raises(Killed), signaled(stop):
            run_of(arguments_of(corpus, tmp_path / "stopped", **options))
    run_of(arguments_of(corpus, tmp_path / "stopped", **options))

    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "whole")
    assert same_weights(tmp_path / "whole", tmp_path / "stopped")


BAD = [
    ({"weight": 0}, "must have a weight greater than 0, or none"),
    ({"weight": "much"}, "`weight` in `dataset` must be a number, got 'much'"),
    ({"name": ""}, "every entry of `dataset` must have a name"),
]


@pytest.mark.parametrize("invalid_fields, message", BAD, ids=str)
def test_invalid_weights_are_reported(
    corpus, tmp_path, weighted, capsys, monkeypatch, invalid_fields, message
):
    """Check that an invalid source is reported in one line, and no output is written."""
    monkeypatch.chdir(corpus)
    sources = json.loads(weighted)
    sources[1] |= invalid_fields
    arguments = arguments_of(corpus, tmp_path / "out", dataset=json.dumps(sources), prepared=None)
    out = tmp_path / "out"
    assert main(["pretrain", *arguments]) == 2

    error = capsys.readouterr().err
    assert message in error and len(error.strip().split("\n")) == 1, error
    assert not out.exists()


def test_run_is_identified_by_relative_weights(corpus, tmp_path, weighted, capsys, caplog):
    """Check that a run is identified by the relative weights of its sources."""
    prepared = tmp_path / "prepared"
    run_of(arguments_of(corpus, tmp_path / "out", dataset=weighted, prepared=prepared))

    # A common factor of all weights makes no difference.
    sources = json.loads(weighted)
    for source in sources:
        source["weight"] *= 10
    same = arguments_of(corpus, tmp_path / "out", dataset=json.dumps(sources), prepared=prepared)
    assert main(["pretrain", *same]) == 0
    assert "the run has already finished" in caplog.text

    sources[1]["weight"] = 3
    other = arguments_of(corpus, tmp_path / "out", dataset=json.dumps(sources), prepared=prepared)
    assert main(["pretrain", *other]) == 2
    assert "contains a run with other settings (data" in capsys.readouterr().err
