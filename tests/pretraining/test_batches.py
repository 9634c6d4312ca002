"""Test the batches of pre-training.

Long texts are truncated or split, every text occurs once per epoch, batches keep their token budget
and depend only on the seed and their number, and lengths are mixed as in the paper.
"""

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.data_runs import make_tokenizer, texts_of_batch  # noqa: F401

from neobert.common.errors import UserError
from neobert.pretraining.batches import MicroBatches, TokenWindows, batch_counts, batch_generator
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.options import BatchOptions
from neobert.pretraining.prepared import TokenizedTexts


def _tokenized_texts(lengths):
    """Return texts of these lengths, including special tokens; text i repeats the id 2000 + i."""
    rows = Dataset.from_dict({"input_ids": [[2000 + i] * (n - 2) for i, n in enumerate(lengths)]})
    return TokenizedTexts(rows, np.array(lengths, dtype=np.int32))


def _batches(lengths, tokenizer, count=None, seed=0, **batch_options):
    """Return micro-batches over texts of these lengths.

    `count` is the number of micro-batches of a training run. Without it, the batches are a single
    epoch for evaluation.
    """
    batch_options = BatchOptions(**batch_options)
    windows = TokenWindows(_tokenized_texts(lengths), (101, 102), batch_options)
    return MicroBatches(windows, TokenMasking(tokenizer), batch_options, seed, count)


def test_long_texts_are_truncated_or_split():
    """Check the windows of a long and a short text, each with its boundary tokens."""
    texts = TokenizedTexts(
        Dataset.from_dict({"input_ids": [list(range(10, 20)), [30]]}),
        np.array([12, 3], dtype=np.int32),
    )
    batch_options = BatchOptions(micro_batch_tokens=64, max_length=6)
    truncated = TokenWindows(texts, (1, 2), batch_options)
    assert [row.tolist() for row in truncated.read(np.arange(len(truncated)))] == [
        [1, 10, 11, 12, 13, 2],
        [1, 30, 2],
    ]

    batch_options = BatchOptions(micro_batch_tokens=64, max_length=6, long_texts="split")
    split = TokenWindows(texts, (1, 2), batch_options)
    ids = np.arange(len(split))
    assert [row.tolist() for row in split.read(ids)] == [
        [1, 10, 11, 12, 13, 2],
        [1, 14, 15, 16, 17, 2],
        [1, 18, 19, 2],
        [1, 30, 2],
    ], "windows must contain every token exactly once"
    assert split.lengths(ids).tolist() == [6, 6, 4, 3]
    assert split.ids_of_texts_with(12).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "batch_options", [{"micro_batch_tokens": 64}, {"micro_batch_size": 7}], ids=str
)
def test_every_text_occurs_once_per_epoch_within_the_budget(tokenizer, batch_options):
    lengths = [3 + i % 17 for i in range(101)]
    batches = _batches(lengths, tokenizer, 200, max_length=20, seed=5, **batch_options)

    seen = []
    for i in range(len(batches)):
        batch = batches[i]
        texts = texts_of_batch(batch)
        seen += texts
        sizes = [len(text) for text in texts]
        assert {name: int(value) for name, value in batch_counts(batch).items()} == {
            "tokens": sum(sizes),
            "squares": sum(size * size for size in sizes),
            "masked": int((batch["labels"] != -100).sum()),
        }
        assert batch["max_length_q"] == max(sizes)
        if "micro_batch_tokens" in batch_options:
            assert batch["input_ids"].shape[1] <= 64, "a packed batch must keep its token budget"
        elif len(texts) != 7:
            # Only the last batch of an epoch is smaller.
            assert len(seen) % len(lengths) == 0

    expected = sorted((101, *[2000 + i] * (n - 2), 102) for i, n in enumerate(lengths))
    first_epoch = seen[: len(lengths)]
    second_epoch = seen[len(lengths) : 2 * len(lengths)]
    assert sorted(first_epoch) == expected
    assert sorted(second_epoch) == expected
    assert first_epoch != second_epoch, "the order must differ between epochs"
    assert sum(map(len, first_epoch)) == batches.epoch_tokens


def test_packed_batches_are_filled_in_order(tokenizer):
    """Check that each batch starts with the text that would exceed the budget of the last one."""
    lengths = [3 + (7 * i) % 18 for i in range(500)]
    batches = _batches(lengths, tokenizer, micro_batch_tokens=64, max_length=20, seed=5)
    plan = batches.plans[0].epoch(0)
    order = plan.order
    bounds = plan.bounds
    totals = [sum(lengths[i] for i in order[start:stop]) for start, stop in zip(bounds, bounds[1:])]
    next_lengths = [lengths[order[stop]] for stop in bounds[1:-1]]
    assert bounds[-1] == 500
    assert max(totals) <= 64
    assert all(total + length > 64 for total, length in zip(totals, next_lengths))


def test_batch_depends_only_on_seed_and_index(tokenizer):
    lengths = [3 + i % 17 for i in range(50)]
    settings = {"micro_batch_tokens": 64, "max_length": 20}
    batches = _batches(lengths, tokenizer, 40, seed=1, **settings)
    in_order = [batches[i] for i in range(40)]

    longer_run = _batches(lengths, tokenizer, 90, seed=1, **settings)
    for i in (33, 2, 39, 0):
        batch = longer_run[i]
        for name, value in in_order[i].items():
            if torch.is_tensor(value):
                assert torch.equal(value, batch[name])
            else:
                assert value == batch[name]

    other = _batches(lengths, tokenizer, 40, seed=2, **settings)
    assert not torch.equal(other[0]["labels"], in_order[0]["labels"])


def test_rows_without_boundaries_are_full_and_cross_texts(tokenizer):
    """Check that rows without boundaries contain all texts, one after another."""
    lengths = [3 + i % 17 for i in range(60)]
    settings = {"layout": "packed_without_boundaries", "micro_batch_tokens": 96, "max_length": 32}

    # All training batches are full, also in the second epoch.
    batches = _batches(lengths, tokenizer, 7, **settings)
    assert {batches[i]["input_ids"].shape for i in range(7)} == {(3, 32)}

    # An epoch for evaluation also contains the remaining rows, and its last row is shorter.
    batches = _batches(lengths, tokenizer, **settings)
    shapes = [tuple(batches[i]["input_ids"].shape) for i in range(len(batches))]
    assert shapes == [(3, 32)] * 6 + [(1, 32), (1, 16)]

    # Texts that do not fill a batch can be evaluated, but are refused for training.
    short_epoch = _batches([9, 8], tokenizer, **settings)
    assert len(short_epoch) == 1
    assert short_epoch[0]["input_ids"].shape == (1, 17)
    with pytest.raises(UserError, match="`micro_batch_tokens` is 96, but the data contains fewer"):
        _batches([9, 8], tokenizer, 3, **settings)

    # The concatenated rows contain each text once and unchanged.
    ids = []
    for i in range(len(batches)):
        batch = batches[i]
        assert set(batch) == {"input_ids", "labels"}
        is_masked = batch["labels"] != -100
        unmasked = torch.where(is_masked, batch["labels"], batch["input_ids"])
        ids += unmasked.flatten().tolist()
    starts = [i for i, token in enumerate(ids) if token == 101]
    texts = [tuple(ids[start:stop]) for start, stop in zip(starts, starts[1:])]
    assert len(texts) > 50
    assert len(set(texts)) == len(texts)
    for text in texts:
        length = lengths[text[1] - 2000]
        assert text == (101, *[text[1]] * (length - 2), 102)


def test_mixture_samples_minimum_lengths_by_weight(tokenizer):
    """Check the mixture of the paper with shorter lengths.

    20 % of the batches contain texts of any length, and 40 % each contain texts of at least 16 and
    of at least 32 tokens.
    """
    lengths = [8] * 60 + [16] * 30 + [32] * 30
    mixture = {0: 0.2, 16: 0.4, 32: 0.4}
    batches = _batches(
        lengths, tokenizer, 2000, micro_batch_tokens=64, max_length=32, mixture=mixture, seed=3
    )
    fractions = np.bincount(batches.part, minlength=3) / 2000
    assert np.abs(fractions - [0.2, 0.4, 0.4]).max() < 0.04
    for i in range(60):
        texts = texts_of_batch(batches[i])
        assert min(map(len, texts)) >= [0, 16, 32][batches.part[i]]

    with pytest.raises(UserError, match="at least 64 tokens"):
        _batches(
            lengths, tokenizer, 10, micro_batch_tokens=64, max_length=32, mixture={0: 0.5, 64: 0.5}
        )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"micro_batch_tokens": 10, "max_length": 20}, "must be at least `max_length`, 20, got 10"),
        (
            {
                "layout": "packed_without_boundaries",
                "micro_batch_tokens": 30,
                "max_length": 20,
            },
            "must be a multiple of `max_length`, 20",
        ),
        (
            {
                "layout": "packed_without_boundaries",
                "micro_batch_tokens": None,
                "micro_batch_size": 4,
            },
            "must be a multiple of `max_length`, 1024",
        ),
        ({"micro_batch_size": 8}, "cannot be combined"),
        ({"mixture": {0: 0.5, 1024: 0.6}}, "sum to 1"),
        ({"mixture": {0: float("nan")}}, "greater than 0 and sum to 1"),
        ({"mixture": {0: -1.0, 8: 2.0}}, "greater than 0 and sum to 1"),
    ],
)
def test_invalid_batch_options_are_rejected(settings, message):
    with pytest.raises(UserError, match=message):
        BatchOptions(**{"micro_batch_tokens": 4096, "max_length": 1024, **settings})


def test_random_numbers_differ_between_batches():
    """Check that the random numbers of a batch are reproducible and differ between batches."""
    samples = {tuple(torch.rand(4, generator=batch_generator(3, i)).tolist()) for i in (0, 1, 0, 7)}
    assert len(samples) == 3


def test_mixture_depends_on_the_seed(tokenizer):
    batch_options = {"micro_batch_tokens": 64, "max_length": 32, "mixture": {0: 0.5, 16: 0.5}}
    first, again, other = [
        _batches([8, 20] * 40, tokenizer, 200, seed, **batch_options).part for seed in (1, 1, 2)
    ]
    assert (first == again).all()
    assert (first != other).any()


def test_next_seed_does_not_yield_shifted_masks():
    """Check that batch i + 1 of one seed and batch i of the next seed have different masks."""
    first = torch.rand(8, generator=batch_generator(1, 2))
    second = torch.rand(8, generator=batch_generator(2, 1))
    assert not torch.equal(first, second)


def test_batch_counts():
    """Check the tokens, squared lengths and masked tokens of one text, and of two packed texts."""
    labels = torch.tensor([[-100, 5, -100, 7, -100, -100]])
    batch = {"input_ids": torch.zeros(1, 6, dtype=torch.long), "labels": labels}
    assert batch_counts(batch) == {"tokens": 6, "squares": 36, "masked": 2}
    packed = batch_counts({**batch, "cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32)})
    assert packed == {"tokens": 6, "squares": 4 + 16, "masked": 2}
