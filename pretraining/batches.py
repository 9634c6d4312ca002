"""Batches for masked-LM training: micro-batch i of a run is a pure function of the data, the seed
and i.

So a resumed run, another number of loader workers or another number of processes sees the same
batches with the same masks.
Shapes: T tokens of a packed batch, N texts in it, B rows, L row length.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..common.errors import UserError
from ..common.packing import pack
from .plans import Plan


@dataclass(frozen=True)
class BatchSpec:
    """What a micro-batch is made of; checked when it is made.

    Args:
        layout: "packed": texts side by side, (1, T), with their boundaries;
            "packed_without_boundaries" (ablation M6): (B, L) cut from the concatenated texts, which
            attend to each other.
        tokens: of a packed micro-batch at most; rows x length of one without boundaries.
        texts: of a packed micro-batch, in place of `tokens`.
        length: tokens of a text at most, special tokens included.
        mixture: ((least tokens of a text, probability), ...): each micro-batch comes from one of
            these parts. A mapping will do.
        long_texts: "truncate", or "split" into windows of `length`.
        seed: of order, mixture and masks.
    Raises:
        UserError: values that cannot be.
    """

    layout: str = "packed"
    tokens: int | None = None
    texts: int | None = None
    length: int = 1024
    mixture: tuple = ((0, 1.0),)
    long_texts: str = "truncate"
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "mixture", _parts(self.mixture))
        if (self.tokens is None) == (self.texts is None):
            raise UserError("give either tokens_per_batch or texts_per_batch")
        if self.layout == "packed_without_boundaries" and self.tokens is None:
            raise UserError(f"layout {self.layout} needs tokens_per_batch")
        if self.tokens is not None and self.tokens < self.length:
            raise UserError(
                f"tokens_per_batch {self.tokens} is less than one text of max_length "
                f"{self.length}; raise it or lower max_length"
            )
        if self.layout == "packed_without_boundaries" and self.tokens % self.length:
            raise UserError(
                f"tokens_per_batch {self.tokens} must be a multiple of max_length {self.length} "
                f"for layout {self.layout}"
            )

    @property
    def size(self):
        """("tokens" or "texts", how many a micro-batch has)."""
        return ("tokens", self.tokens) if self.texts is None else ("texts", self.texts)

    def of_all_texts(self, seed):
        """The same batches of all texts, for evaluation with masks of another seed."""
        return replace(self, mixture=((0, 1.0),), seed=seed)


def _parts(mixture):
    """`BatchSpec.mixture` in its form: (int, float) pairs."""
    try:
        pairs = dict(mixture if mixture is not None else {0: 1.0}).items()
        shares = {int(least): float(share) for least, share in pairs}
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"mixture must map least lengths to probabilities, as {{0: 0.2, 1024: 0.4, 2048: "
            f"0.4}}, but {mixture!r} was given"
        ) from None
    # NaN is neither
    if not (min(shares.values(), default=0) > 0 and abs(sum(shares.values()) - 1) <= 1e-6):
        raise UserError(
            f"the mixture's probabilities must be above 0 and sum to 1, but {mixture!r} was given"
        )
    return tuple(shares.items())


@dataclass(frozen=True)
class SpecialTokens:
    """Ids before and after every text."""

    first: int
    last: int

    @classmethod
    def of(cls, tokenizer):
        """Those of a tokenizer; UserError if texts have no start or end."""
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        first = tokenizer.bos_token_id if first is None else first
        last = tokenizer.eos_token_id if last is None else last
        if first is None or last is None:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no tokens for the start and end of a "
                "text ([CLS], [SEP])"
            )
        return cls(first, last)

    def around(self, body):
        """`body` between the two, an int64 array."""
        return np.concatenate(([self.first], body, [self.last])).astype(np.int64)


class Windows:
    """The training texts of a tokenised set: each text cut to `spec.length` tokens, or split into
    windows of it.

    Args:
        texts: `TokenisedTexts`.
        special: `SpecialTokens`.
        spec: `BatchSpec`.
    """

    def __init__(self, texts, special, spec):
        self.texts = texts
        self.special = special
        self.length = spec.length
        self.body = spec.length - 2
        self.rows = texts.rows.with_format("numpy", columns=["input_ids"])
        self.ends = None  # with "split": windows up to each text's end
        if spec.long_texts == "split":
            self.ends = np.cumsum(
                np.maximum(1, -(-(texts.lengths - 2) // self.body)), dtype=np.int64
            )

    def __len__(self):
        return len(self.texts.lengths) if self.ends is None else int(self.ends[-1])

    def source_ends(self):
        """The first window behind each weighted source's."""
        texts = np.cumsum(self.texts.sizes)
        return texts if self.ends is None else self.ends[texts - 1]

    def _place(self, ids):
        """(text, first token in it) of each window."""
        if self.ends is None:
            return ids, np.zeros(len(ids), dtype=np.int64)
        text = np.searchsorted(self.ends, ids, side="right")
        return text, (ids - np.where(text > 0, self.ends[text - 1], 0)) * self.body

    def lengths(self, ids):
        """Tokens of each window, special tokens included."""
        text, start = self._place(ids)
        return np.minimum(self.texts.lengths[text] - start, self.length)

    def of_texts_from(self, least):
        """Ids of the windows whose text has at least `least` tokens, uint32."""
        if least <= 0:
            return np.arange(len(self), dtype=np.uint32)
        ids = np.arange(len(self), dtype=np.uint32)
        return ids[self.texts.lengths[self._place(ids)[0]] >= least]

    def read(self, ids):
        """The windows as int64 arrays, special tokens included."""
        text, starts = self._place(ids)
        rows = self.rows[text]["input_ids"]
        return [
            self.special.around(row[start : start + self.body]) for row, start in zip(rows, starts)
        ]


def generator_for(seed, i):
    """The random numbers of micro-batch i."""
    return torch.Generator().manual_seed(
        int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)[0] >> 1)
    )


class MicroBatches(torch.utils.data.Dataset):
    """All micro-batches of a run, as the model takes them.

    Args:
        windows: `Windows`.
        masking: `TokenMasking`.
        spec: `BatchSpec`.
        count: micro-batches of the run; None: every text once, for evaluation.
    Raises:
        UserError: a part of the mixture has no text, or all texts together fill no batch.
    """

    def __init__(self, windows, masking, spec, count=None):
        self.windows, self.masking, self.spec, self.count = windows, masking, spec, count
        self.plans = [
            Plan(windows, spec, number, whole=count is None) for number in range(len(spec.mixture))
        ]
        if count is None:
            self.count = self.plans[0].batches_of(0)
        # The part of each batch, and how many batches of that part came before; of a single part
        # there is nothing to keep.
        self.source = self.rank = None
        if len(self.plans) > 1:
            choices = np.random.default_rng([spec.seed, 20, 40, 40]).random(self.count)
            shares = np.cumsum([share for _, share in spec.mixture])[:-1]
            self.source = np.searchsorted(shares, choices, side="right").astype(np.uint8)
            self.rank = np.zeros(self.count, dtype=np.int64)
            for number in range(len(self.plans)):
                mine = self.source == number
                self.rank[mine] = np.arange(mine.sum())

    def __len__(self):
        return self.count

    def passes(self, i):
        """How often the data has been read before micro-batch i, by the number of texts: 1.5 is
        once and a half."""
        counts = (
            [i] if self.source is None else np.bincount(self.source[:i], minlength=len(self.plans))
        )
        texts = (plan.texts_before(int(k)) for plan, k in zip(self.plans, counts))
        return sum(texts) / len(self.windows)

    def __getitem__(self, i):
        if not 0 <= i < self.count:
            raise IndexError(i)
        source, rank = (0, int(i)) if self.source is None else (self.source[i], int(self.rank[i]))
        texts = self.plans[source].batch(rank)
        return masked_batch(texts, self.spec, self.masking, int(i), i / self.count)


def masked_batch(texts, spec, masking, number, progress):
    """A micro-batch as the model takes it.

    Args:
        texts: list of int64 arrays; for "packed_without_boundaries" one array of all tokens.
        spec: `BatchSpec`. masking: `TokenMasking`.
        number: of the micro-batch in the run, which its masks follow from.
        progress: share of the run that came before it, for a mask schedule.
    """
    if spec.layout == "packed":
        batch = pack(sorted(texts, key=len))
    else:
        batch = {"input_ids": torch.from_numpy(texts[0]).view(-1, min(len(texts[0]), spec.length))}
    batch["input_ids"], batch["labels"] = masking(
        batch["input_ids"], generator_for(spec.seed, number), progress
    )
    return batch


def batch_counts(batch):
    """What a batch costs, as integers or 0-dimensional tensors: nothing waits for a GPU.

    Returns:
        dict: tokens, squares (sum over texts of length^2), masked (tokens with a
        label).
    """
    masked = (batch["labels"] != -100).sum()
    if "cu_seq_lens_q" in batch:
        return {
            "tokens": batch["input_ids"].numel(),
            "squares": batch["cu_seq_lens_q"].diff().long().square().sum(),
            "masked": masked,
        }
    rows, length = batch["input_ids"].shape
    return {"tokens": rows * length, "squares": rows * length**2, "masked": masked}
