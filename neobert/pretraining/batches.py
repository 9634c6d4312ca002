"""Batches for masked-LM training: micro-batch i of a run is a pure function of the data, the seed
and i.

So a resumed run, another number of loader workers or another number of processes sees the same
batches with the same masks.
Shapes: T tokens of a packed batch, N texts in it, B rows, L row length.
"""

import numpy as np
import torch

from ..common.errors import UserError
from ..common.packing import pack
from .plans import Plan


def text_ends(tokenizer):
    """Ids of the tokens before and after every text; UserError if the tokenizer has none."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    first = tokenizer.bos_token_id if first is None else first
    last = tokenizer.eos_token_id if last is None else last
    if first is None or last is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no tokens for the start and end of a text "
            "([CLS], [SEP])"
        )
    return first, last


def surrounded(body, special):
    """`body` between the ids of `text_ends`, an int64 array."""
    return np.concatenate(([special[0]], body, [special[1]])).astype(np.int64)


class Windows:
    """The training texts of a tokenised set: each text cut to `max_length` tokens, or split into
    windows of it.

    Args:
        texts: `TokenisedTexts`.
        special: ids before and after every text.
        spec: `BatchArguments`.
    """

    def __init__(self, texts, special, spec):
        self.texts = texts
        self.special = special
        self.body = spec.max_length - 2
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
        return np.minimum(self.texts.lengths[text] - start, self.body + 2)

    def of_texts_from(self, least):
        """Ids of the windows whose text has at least `least` tokens, uint32."""
        ids = np.arange(len(self), dtype=np.uint32)
        return ids[self.texts.lengths[self._place(ids)[0]] >= least]

    def read(self, ids):
        """The windows as int64 arrays, special tokens included."""
        text, starts = self._place(ids)
        rows = self.rows[text]["input_ids"]
        return [
            surrounded(row[start : start + self.body], self.special)
            for row, start in zip(rows, starts)
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
        spec: `BatchArguments`.
        seed: of order, mixture and masks.
        count: micro-batches of the run; None: every text once, for evaluation.
    Attributes:
        tokens: of one pass over the data.
    Raises:
        UserError: a part of the mixture has no text, or all texts together fill no batch.
    """

    def __init__(self, windows, masking, spec, seed, count=None):
        self.windows, self.masking, self.spec = windows, masking, spec
        self.seed, self.count = seed, count
        self.tokens = int(windows.lengths(np.arange(len(windows))).sum())
        self.plans = [
            Plan(windows, spec, seed, number, whole=count is None)
            for number in range(len(spec.parts))
        ]
        if count is None:
            self.count = self.plans[0].batches_of(0)
        # The part of each batch, and how many batches of that part came before; of a single part
        # there is nothing to keep.
        self.source = self.rank = None
        if len(self.plans) > 1:
            choices = np.random.default_rng([seed, 20, 40, 40]).random(self.count)
            shares = np.cumsum([share for _, share in spec.parts])[:-1]
            self.source = np.searchsorted(shares, choices, side="right").astype(np.uint8)
            self.rank = np.zeros(self.count, dtype=np.int64)
            for number in range(len(self.plans)):
                mine = self.source == number
                self.rank[mine] = np.arange(mine.sum())

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        source, rank = (0, int(i)) if self.source is None else (self.source[i], int(self.rank[i]))
        texts = self.plans[source].batch(rank)
        return masked_batch(texts, self.spec, self.masking, self.seed, int(i), i / self.count)


def masked_batch(texts, spec, masking, seed, number, progress):
    """A micro-batch as the model takes it.

    Args:
        texts: list of int64 arrays; for "packed_without_boundaries" one array of all tokens.
        spec: `BatchArguments`. masking: `TokenMasking`.
        seed, number: of the run, and of the micro-batch in it: its masks follow from both.
        progress: share of the run that came before it, for a mask schedule.
    """
    if spec.layout == "packed":
        batch = pack(sorted(texts, key=len))
    else:
        batch = {
            "input_ids": torch.from_numpy(texts[0]).view(-1, min(len(texts[0]), spec.max_length))
        }
    batch["input_ids"], batch["labels"] = masking(
        batch["input_ids"], generator_for(seed, number), progress
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
