"""Pins the batches of pre-training: long texts cut or split, every text once an epoch within the
budget, batches that depend on seed and number alone, and the paper's mixture."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.data_runs import make_tokenizer, texts_of_batch  # noqa: F401

from neobert.common.errors import UserError
from neobert.pretraining.batches import MicroBatches, TokenWindows, batch_counts, batch_generator
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.options import BatchArguments
from neobert.pretraining.prepared import TokenizedTexts


def _tokens(lengths):
    """A tokenised set whose text i has `lengths[i]` tokens with the special ones; its tokens tell
    i."""
    rows = Dataset.from_dict({"input_ids": [[2000 + i] * (n - 2) for i, n in enumerate(lengths)]})
    return TokenizedTexts(rows, np.array(lengths, dtype=np.int32))


def _batches(lengths, tokenizer, count=None, seed=0, **spec):
    spec = BatchArguments(**spec)
    windows = TokenWindows(_tokens(lengths), (101, 102), spec)
    return MicroBatches(windows, TokenMasking(tokenizer), spec, seed, count)


def test_long_texts_are_cut_or_split():
    tokens = TokenizedTexts(
        Dataset.from_dict({"input_ids": [list(range(10, 20)), [30]]}),
        np.array([12, 3], dtype=np.int32),
    )
    cut = TokenWindows(tokens, (1, 2), BatchArguments(tokens_per_batch=64, max_length=6))
    assert [row.tolist() for row in cut.read(np.arange(len(cut)))] == [
        [1, 10, 11, 12, 13, 2],
        [1, 30, 2],
    ]
    spec = BatchArguments(tokens_per_batch=64, max_length=6, long_texts="split")
    split = TokenWindows(tokens, (1, 2), spec)
    everything = np.arange(len(split))
    assert [row.tolist() for row in split.read(everything)] == [
        [1, 10, 11, 12, 13, 2],
        [1, 14, 15, 16, 17, 2],
        [1, 18, 19, 2],
        [1, 30, 2],
    ], "windows must hold every token once"
    assert split.lengths(everything).tolist() == [6, 6, 4, 3] and split.of_texts_from(
        12
    ).tolist() == [0, 1, 2]


@pytest.mark.parametrize("spec", [{"tokens_per_batch": 64}, {"texts_per_batch": 7}], ids=str)
def test_every_text_once_an_epoch_within_the_budget(tokenizer, spec):
    lengths = [3 + i % 17 for i in range(101)]
    batches = _batches(lengths, tokenizer, 200, max_length=20, seed=5, **spec)
    expected = sorted((101, *[2000 + i] * (n - 2), 102) for i, n in enumerate(lengths))
    seen, first_epoch = [], None
    for i in range(len(batches)):
        batch = batches[i]
        texts = texts_of_batch(batch)
        seen += texts
        counts = {name: int(value) for name, value in batch_counts(batch).items()}
        sizes = [len(text) for text in texts]
        assert counts == {
            "tokens": sum(sizes),
            "squares": sum(n * n for n in sizes),
            "masked": int((batch["labels"] != -100).sum()),
        }
        if "tokens_per_batch" in spec:
            assert batch["input_ids"].shape[1] <= 64, "a packed batch must keep to its token budget"
        elif len(texts) != 7:
            # A batch has as many texts as were asked for, but the last of an epoch.
            assert len(seen) % len(lengths) == 0
        assert batch["max_length_q"] == max(sizes)
        if first_epoch is None and len(seen) >= len(lengths):
            first_epoch = list(seen)
    assert sorted(first_epoch) == expected, "the first epoch must hold every text exactly once"
    assert sum(map(len, first_epoch)) == batches.tokens
    assert sorted(seen[len(lengths) : 2 * len(lengths)]) == expected, "so must the second"
    assert seen[: len(lengths)] != seen[len(lengths) : 2 * len(lengths)], "in another order"


def test_packed_batches_are_as_full_as_the_texts_in_their_order_allow(tokenizer):
    """The next batch begins with the text that would have been one too many."""
    lengths = [3 + (7 * i) % 18 for i in range(500)]
    batches = _batches(lengths, tokenizer, tokens_per_batch=64, max_length=20, seed=5)
    order, bounds, _ = batches.plans[0].planned(0)
    totals = [sum(lengths[i] for i in order[start:stop]) for start, stop in zip(bounds, bounds[1:])]
    after = [lengths[order[stop]] for stop in bounds[1:-1]]
    assert bounds[-1] == 500 and max(totals) <= 64
    assert all(total + more > 64 for total, more in zip(totals, after))


def test_a_batch_depends_on_the_seed_and_its_number_alone(tokenizer):
    lengths, settings = [3 + i % 17 for i in range(50)], {"tokens_per_batch": 64, "max_length": 20}
    one = _batches(lengths, tokenizer, 40, seed=1, **settings)
    in_order = [one[i] for i in range(40)]
    fresh = _batches(lengths, tokenizer, 90, seed=1, **settings)
    for i in (33, 2, 39, 0):
        for name, value in in_order[i].items():
            same = (
                torch.equal(value, fresh[i][name])
                if torch.is_tensor(value)
                else value == fresh[i][name]
            )
            assert same
    other = _batches(lengths, tokenizer, 40, seed=2, **settings)
    assert not torch.equal(other[0]["labels"], in_order[0]["labels"])


def test_without_boundaries_rows_are_full_and_cross_texts(tokenizer):
    lengths = [3 + i % 17 for i in range(60)]
    settings = {"layout": "packed_without_boundaries", "tokens_per_batch": 96, "max_length": 32}
    batches = _batches(lengths, tokenizer, 7, **settings)
    # Batches of training are full, in the next epoch too.
    assert {batches[i]["input_ids"].shape for i in range(7)} == {(3, 32)}
    batches = _batches(lengths, tokenizer, **settings)
    shapes = [tuple(batches[i]["input_ids"].shape) for i in range(len(batches))]
    # One pass must hold the last rows too, the very last one shorter.
    assert shapes == [(3, 32)] * 6 + [(1, 32), (1, 16)]
    few = _batches([9, 8], tokenizer, **settings)
    # Text that does not fill a batch must be evaluated too.
    assert len(few) == 1 and few[0]["input_ids"].shape == (1, 17)
    ids = []
    for i in range(len(batches)):
        batch = batches[i]
        assert set(batch) == {"input_ids", "labels"}
        ids += (
            torch.where(batch["labels"] != -100, batch["labels"], batch["input_ids"])
            .flatten()
            .tolist()
        )
    starts = [i for i, token in enumerate(ids) if token == 101]
    texts = [tuple(ids[start:stop]) for start, stop in zip(starts, starts[1:])]
    assert len(texts) > 50 and len(set(texts)) == len(texts)
    assert all(text == (101, *[text[1]] * (lengths[text[1] - 2000] - 2), 102) for text in texts)
    with pytest.raises(UserError, match="a batch takes 96 tokens, but the data has fewer"):
        _batches([9, 8], tokenizer, 3, **settings)


def test_mixture_draws_20_40_40_from_long_texts(tokenizer):
    lengths = [8] * 60 + [16] * 30 + [32] * 30
    mixture = {0: 0.2, 16: 0.4, 32: 0.4}
    batches = _batches(
        lengths, tokenizer, 2000, tokens_per_batch=64, max_length=32, mixture=mixture, seed=3
    )
    shares = np.bincount(batches.source, minlength=3) / 2000
    assert np.abs(shares - [0.2, 0.4, 0.4]).max() < 0.04
    for i in range(60):
        texts = texts_of_batch(batches[i])
        assert min(map(len, texts)) >= [0, 16, 32][batches.source[i]]
    with pytest.raises(UserError, match="at least 64 tokens"):
        _batches(
            lengths, tokenizer, 10, tokens_per_batch=64, max_length=32, mixture={0: 0.5, 64: 0.5}
        )


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"tokens_per_batch": 10, "max_length": 20}, "less than one text"),
        (
            {
                "layout": "packed_without_boundaries",
                "tokens_per_batch": 30,
                "max_length": 20,
            },
            "a multiple of max_length 20",
        ),
        (
            {
                "layout": "packed_without_boundaries",
                "tokens_per_batch": None,
                "texts_per_batch": 4,
            },
            "needs tokens_per_batch",
        ),
        ({"texts_per_batch": 8}, "give either tokens_per_batch or texts_per_batch"),
        ({"mixture": {0: 0.5, 1024: 0.6}}, "sum to 1"),
        ({"mixture": {0: float("nan")}}, "above 0 and sum to 1"),
        ({"mixture": {0: -1.0, 8: 2.0}}, "above 0 and sum to 1"),
    ],
)
def test_impossible_batches_are_named(settings, words):
    with pytest.raises(UserError, match=words):
        BatchArguments(**{"tokens_per_batch": 4096, "max_length": 1024, **settings})


def test_every_batch_has_draws_of_its_own():
    draws = {tuple(torch.rand(4, generator=batch_generator(3, i)).tolist()) for i in (0, 1, 0, 7)}
    assert len(draws) == 3


def test_the_mixture_follows_the_seed(tokenizer):
    spec = {"tokens_per_batch": 64, "max_length": 32, "mixture": {0: 0.5, 16: 0.5}}
    draws = [_batches([8, 20] * 40, tokenizer, 200, seed, **spec).source for seed in (1, 1, 2)]
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()


def test_masks_of_another_seed_are_not_shifted():
    """Check that batch i + 1 of one seed and batch i of the next one have masks of their own."""
    first, second = (
        torch.rand(8, generator=batch_generator(seed, i)) for seed, i in ((1, 2), (2, 1))
    )
    assert not torch.equal(first, second)


def test_the_cost_of_a_batch_by_hand():
    labels = torch.tensor([[-100, 5, -100, 7, -100, -100]])
    batch = {"input_ids": torch.zeros(1, 6, dtype=torch.long), "labels": labels}
    assert batch_counts(batch) == {"tokens": 6, "squares": 36, "masked": 2}
    packed = batch_counts({**batch, "cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32)})
    assert packed == {"tokens": 6, "squares": 4 + 16, "masked": 2}
