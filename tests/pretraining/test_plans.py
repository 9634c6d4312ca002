"""Test weighted sources.

Covers the fraction of each source in prepared data, epochs of a source, identical data after
interruptions, and invalid weights. Streams are in test_streaming.py.
"""

import json
from collections import Counter

import numpy as np
import pytest
from helpers.data_runs import make_tokenizer, texts_of_batch, tokenise_texts  # noqa: F401
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
from neobert.pretraining.sources import parse_sources, shares_of


WORDS = ["river", "stone", "music", "paper", "green", "table", "winter", "north"]
SHARES = {"mine": 0.9, "general": 0.1}


def _texts(mark, count):
    """Different texts of 3 to 9 words with a word that tells the source."""
    rng = np.random.default_rng(len(mark))
    return [f"{mark} {i} {' '.join(rng.choice(WORDS, 1 + i % 7))}" for i in range(count)]


def _batches(tokenizer, sizes, count=None, shares=SHARES, **spec):
    """`MicroBatches` of prepared sources, and the texts of each source as tuples of ids."""
    spec = BatchOptions(**{"max_length": 32, "micro_batch_size": 4} | spec)
    tokens = [tokenise_texts(_texts(name, size), tokenizer) for name, size in sizes.items()]
    special = boundary_tokens(tokenizer)
    own = [
        {tuple(add_boundaries(row, special).tolist()) for row in each.rows["input_ids"]}
        for each in tokens
    ]
    windows = TokenWindows(TokenizedTexts.concatenate(tokens, shares.values()), special, spec)
    return MicroBatches(windows, TokenMasking(tokenizer), spec, 5, count), own


def _drawn(batches, count):
    return [text for i in range(count) for text in texts_of_batch(batches[i])]


def test_a_prepared_pass_has_the_exact_shares(tokenizer):
    batches, (mine, general) = _batches(tokenizer, {"mine": 900, "general": 300}, 5000)
    drawn = _drawn(batches, 250)
    assert sum(text in general for text in drawn) == 100 and len(drawn) == 1000
    assert len(set(drawn)) == 1000, "900 / 0.9 texts before the first source is exhausted"
    # The second pass takes other general texts, and the third begins them again.
    assert len(set(_drawn(batches, 750)) & general) == 300
    near = [sum(text in general for text in drawn[i : i + 100]) for i in range(0, 1000, 100)]
    assert 3 <= min(near) and max(near) <= 20, "they must be mixed"


def test_each_source_is_read_in_passes_of_its_own():
    order = WeightedOrder(np.arange(1000), [30, 1000], [0.5, 0.5], (1, 0))
    assert order.samples == [100, 100], "so many that the rounding of a share is small"
    drawn = np.concatenate([order.order(number) for number in range(6)])
    small, large = drawn[drawn < 30], drawn[drawn >= 30]
    assert set(Counter(small.tolist()).values()) == {20}, "20 complete passes over its 30 texts"
    assert len(set(large.tolist())) == 600, "no text twice before the source is exhausted"
    # A pass follows from its number alone.
    fresh = WeightedOrder(np.arange(1000), [30, 1000], [0.5, 0.5], (1, 0))
    assert (fresh.order(4) == order.order(4)).all() and (order.order(3) != order.order(4)).any()


def test_shares_are_rounded_and_each_source_has_an_order_of_its_own():
    order = WeightedOrder(np.arange(1010), [10, 1010], [0.31, 0.69], (1, 0))
    assert order.samples == [100, 223], "100 / 0.31 * 0.69 is 222.58"
    alike = WeightedOrder(np.arange(1400), [500, 1000, 1400], [0.1, 0.1, 0.8], (1, 0)).order(0)
    first, second = alike[alike < 500], alike[(alike >= 500) & (alike < 1000)]
    assert len(first) == len(second) == 100 and {*first} != {*(second - 500)}


def test_shares_of_many_small_sources_add_up():
    sources = parse_sources(
        [{"name": f"{i}.txt", "weight": weight} for i, weight in enumerate([3, 1, 4])]
    )
    assert shares_of(sources) == [3 / 8, 1 / 8, 4 / 8]
    (alone,) = parse_sources([{"name": "a.txt", "weight": 3}])
    assert alone.weight is None, "one source needs no sampler"


@pytest.fixture(name="weighted")
def make_weighted(corpus):
    general = [f"old men sing loud songs number {i}" for i in range(12)]
    (corpus / "general.txt").write_text("\n".join(general) + "\n")
    return json.dumps(
        [
            {"name": str(corpus / "train.txt"), "weight": 0.9},
            {"name": str(corpus / "general.txt"), "weight": 0.1},
        ]
    )


@pytest.mark.parametrize("more", [{}, {"streaming": "true"}], ids=str)
def test_continuing_twice_equals_not_stopping(corpus, tmp_path, weighted, more):
    given = {"dataset": weighted, "prepared": corpus / "weighted", "save_steps": 2, **more}
    run_of(arguments_of(corpus, tmp_path / "whole", **given))
    for stop in (3, 6):
        with pytest.raises(Killed), signaled(stop):
            run_of(arguments_of(corpus, tmp_path / "stopped", **given))
    run_of(arguments_of(corpus, tmp_path / "stopped", **given))
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "whole")
    assert same_weights(tmp_path / "whole", tmp_path / "stopped")


BAD = [
    ({"weight": 0}, "must have a weight greater than 0, or none"),
    ({"weight": "much"}, "`weight` in `dataset` must be a number, got 'much'"),
    ({"name": ""}, "every entry of `dataset` must have a name"),
]


@pytest.mark.parametrize("wrong, words", BAD, ids=str)
def test_bad_weights_are_one_sentence(
    corpus, tmp_path, weighted, capsys, monkeypatch, wrong, words
):
    monkeypatch.chdir(corpus)
    given = json.loads(weighted)
    given[1] |= wrong
    given, out = (
        arguments_of(corpus, tmp_path / "out", dataset=json.dumps(given), prepared=None),
        tmp_path / "out",
    )
    assert main(["pretrain", *given]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().split("\n")) == 1, error
    assert not out.exists()


def test_other_weights_are_another_run(corpus, tmp_path, weighted, capsys, caplog):
    prepared = tmp_path / "prepared"
    run_of(arguments_of(corpus, tmp_path / "out", dataset=weighted, prepared=prepared))
    given = json.loads(weighted)
    # The same shares in other numbers are the same run.
    for entry in given:
        entry["weight"] *= 10
    again = arguments_of(corpus, tmp_path / "out", dataset=json.dumps(given), prepared=prepared)
    assert main(["pretrain", *again]) == 0
    assert "the run has already finished" in caplog.text
    given[1]["weight"] = 3
    other = arguments_of(corpus, tmp_path / "out", dataset=json.dumps(given), prepared=prepared)
    assert main(["pretrain", *other]) == 2
    assert "holds a run with other settings (data" in capsys.readouterr().err
