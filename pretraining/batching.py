"""Batches for masked-LM training: micro-batch i of a run is a pure function of the data, the seed and i.

So a resumed run, another number of loader workers or another number of processes sees the same batches with the same masks.
Shapes: T tokens of a packed batch, N texts in it, B rows, L row length.
"""

import numpy as np
import torch

from ..common.errors import UserError


LAYOUTS = ("packed", "padded", "packed_without_boundaries")
LONG_TEXTS = ("truncate", "split")


class Windows:
    """The training texts of a tokenised set: each text cut to `max_length` tokens, or split into windows of it.

    Args:
        tokens: a `datasets.Dataset` with `input_ids` (without special tokens) and `length` (with the two special tokens).
        first, last: ids put before and after every window ([CLS], [SEP]).
        max_length: tokens of a window with its special tokens.
        long_texts: "truncate" or "split".
    """

    def __init__(self, tokens, first, last, max_length, long_texts="truncate"):
        self.tokens = tokens.with_format("numpy", columns=["input_ids"])
        self.first, self.last, self.body = first, last, max_length - 2
        full = np.asarray(tokens.with_format("numpy")["length"], dtype=np.int64)
        if long_texts == "truncate":
            self.text, self.start = np.arange(len(full)), np.zeros(len(full), dtype=np.int64)
        else:
            counts = np.maximum(1, -(-(full - 2) // self.body))
            self.text = np.repeat(np.arange(len(full)), counts)
            self.start = (np.arange(len(self.text)) - np.repeat(np.cumsum(counts) - counts, counts)) * self.body
        self.text_lengths = full[self.text]
        self.lengths = np.minimum(self.text_lengths - 2 - self.start, self.body) + 2

    def __len__(self):
        return len(self.text)

    def read(self, indices):
        """The windows as int64 arrays, special tokens included."""
        rows = self.tokens[self.text[indices]]["input_ids"]
        starts = self.start[indices]
        cut = (row[start : start + self.body] for row, start in zip(rows, starts))
        return [np.concatenate(([self.first], body, [self.last])).astype(np.int64) for body in cut]


class _Epochs:
    """Batch k of an endless series of shuffled passes over some windows."""

    def __init__(self, seed, count):
        self.seed, self.count = seed, count
        self.ends = [0]  # batches before each epoch
        self.current = None

    def order(self, epoch):
        return np.random.default_rng([*self.seed, epoch]).permutation(self.count)

    def locate(self, k):
        """(plan of the epoch, index in it) of batch k."""
        epoch = int(np.searchsorted(self.ends, k, side="right")) - 1
        while epoch == len(self.ends) - 1:
            plan = self._plan(epoch)
            self.ends.append(self.ends[-1] + plan[-1])
            epoch = epoch + 1 if k >= self.ends[-1] else epoch
        return self._plan(epoch), k - self.ends[epoch]

    def _plan(self, epoch):
        if self.current is None or self.current[0] != epoch:
            self.current = (epoch, self.plan(epoch))
        return self.current[1]


class _ByTokens(_Epochs):
    """As many windows as fit a token budget."""

    def __init__(self, lengths, budget, seed):
        super().__init__(seed, len(lengths))
        self.lengths, self.budget = lengths, budget

    def plan(self, epoch):
        order = self.order(epoch)
        total = np.concatenate(([0], np.cumsum(self.lengths[order])))
        bounds = [0]
        while bounds[-1] < len(order):
            bounds.append(int(np.searchsorted(total, total[bounds[-1]] + self.budget, side="right")) - 1)
        return order, bounds, len(bounds) - 1

    def batch(self, k):
        (order, bounds, _), i = self.locate(k)
        return order[bounds[i] : bounds[i + 1]]


class _ByCount(_Epochs):
    """A fixed number of windows; an epoch's last batch may be smaller."""

    def __init__(self, lengths, rows, seed):
        super().__init__(seed, len(lengths))
        self.rows = rows

    def plan(self, epoch):
        return self.order(epoch), -(-self.count // self.rows)

    def batch(self, k):
        (order, _), i = self.locate(k)
        return order[i * self.rows : (i + 1) * self.rows]


class _Stream(_Epochs):
    """Rows of L tokens cut from the windows written one after another.

    What does not fill a batch at an epoch's end is left out or, with `remainder`, comes as a batch of fewer rows and one of a shorter row.
    """

    def __init__(self, lengths, row, rows, seed, remainder=False):
        super().__init__(seed, len(lengths))
        self.lengths, self.row, self.rows, self.remainder = lengths, row, rows, remainder

    def plan(self, epoch):
        order = self.order(epoch)
        ends = np.cumsum(self.lengths[order])
        bounds, total = np.arange(0, ends[-1] + 1, self.row * self.rows), ends[-1]
        if self.remainder:
            bounds = np.unique([*bounds, total // self.row * self.row, total])
        return order, ends, bounds, len(bounds) - 1

    def batch(self, k):
        """(windows, tokens to leave out at the start, tokens)."""
        (order, ends, bounds, _), i = self.locate(k)
        start, stop = bounds[i : i + 2]
        first, last = np.searchsorted(ends, [start, stop - 1], side="right")
        return order[first : last + 1], start - (ends[first] - self.lengths[order[first]]), stop - start


def generator_for(seed, i):
    """The random numbers of micro-batch i."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)[0] >> 1))


class MicroBatches(torch.utils.data.Dataset):
    """All micro-batches of a run, as the model takes them.

    Args:
        windows: `Windows`.
        masking: `TokenMasking`.
        layout: "packed": texts side by side, (1, T), with their boundaries; "padded": (B, L) with a mask;
            "packed_without_boundaries" (ablation M6): (B, L) cut from the concatenated texts, which attend to each other.
        count: micro-batches of the run; None: every text once, for evaluation (no mixture).
        tokens_per_batch: most tokens of a packed batch; rows x max_length of one without boundaries.
        texts_per_batch: texts of a padded batch.
        pad_token_id: for "padded".
        mixture: {least length of a text in tokens: probability}: each batch comes from one of these parts. None: all texts.
        seed: of order, mixture and masks.
    Raises:
        UserError: impossible batch arithmetic, or a part of the mixture without texts.
    """

    def __init__(
        self,
        windows,
        masking,
        layout="packed",
        count=1,
        tokens_per_batch=8192,
        texts_per_batch=32,
        max_length=1024,
        pad_token_id=0,
        mixture=None,
        seed=0,
    ):
        check_batch(layout, tokens_per_batch, texts_per_batch, max_length, mixture)
        self.windows, self.masking, self.layout, self.count = windows, masking, layout, count
        self.rows, self.max_length, self.pad_token_id, self.seed = tokens_per_batch // max_length, max_length, pad_token_id, seed
        mixture = {0: 1.0} if mixture is None else {int(least): float(share) for least, share in mixture.items()}
        self.parts, self.plans = [], []
        for number, least in enumerate(mixture):
            part = np.flatnonzero(windows.text_lengths >= least)
            if not len(part):
                raise UserError(f"the mixture asks for texts of at least {least} tokens, but the data has none")
            lengths = windows.lengths[part]
            key = (seed, number)
            if layout == "packed":
                plan = _ByTokens(lengths, tokens_per_batch, key)
            elif layout == "padded":
                plan = _ByCount(lengths, texts_per_batch, key)
            else:
                if count is not None and lengths.sum() < self.rows * max_length:
                    raise UserError(
                        f"a batch takes {self.rows * max_length} tokens, but the data has {lengths.sum()}; lower tokens_per_batch"
                    )
                plan = _Stream(lengths, max_length, self.rows, key, remainder=count is None)
            self.parts.append(part)
            self.plans.append(plan)
        if count is None:
            self.count = self.plans[0].plan(0)[-1]
        # The part of each batch, and how many batches of that part came before; of a single part there is nothing to keep.
        self.source = self.rank = None
        if len(mixture) > 1:
            choices = np.random.default_rng([seed, 20, 40, 40]).random(count)
            self.source = np.searchsorted(np.cumsum(list(mixture.values()))[:-1], choices, side="right").astype(np.uint8)
            self.rank = np.zeros(count, dtype=np.int64)
            for number in range(len(mixture)):
                mine = self.source == number
                self.rank[mine] = np.arange(mine.sum())

    @classmethod
    def one_pass(cls, windows, masking, **settings):
        """Every text once, for evaluation."""
        return cls(windows, masking, count=None, **settings)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if not 0 <= i < self.count:
            raise IndexError(i)
        source, rank = (0, int(i)) if self.source is None else (self.source[i], int(self.rank[i]))
        part, plan = self.parts[source], self.plans[source]
        if self.layout == "packed_without_boundaries":
            chosen, skip, tokens = plan.batch(rank)
            flat = np.concatenate(self.windows.read(part[chosen]))[skip : skip + tokens]
            batch = {"input_ids": torch.from_numpy(flat).view(-1, min(tokens, self.max_length))}
        else:
            texts = self.windows.read(part[plan.batch(rank)])
            batch = pack(texts) if self.layout == "packed" else pad(texts, self.pad_token_id)
        batch["input_ids"], batch["labels"] = self.masking(batch["input_ids"], generator_for(self.seed, int(i)))
        return batch


def pack(texts):
    """Texts side by side with their boundaries, as transformers' variable-length kwargs; shortest first.

    Args:
        texts: list of int64 arrays.
    Returns:
        dict: input_ids (1, T), cu_seq_lens_q/k (N + 1,) int32, max_length_q/k.
    """
    texts = sorted(texts, key=len)
    bounds = torch.tensor([0, *np.cumsum([len(text) for text in texts])], dtype=torch.int32)
    longest = len(texts[-1])
    return {
        "input_ids": torch.from_numpy(np.concatenate(texts))[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def pad(texts, pad_token_id):
    """dict: input_ids and attention_mask, (B, longest text) int64."""
    longest = max(map(len, texts))
    input_ids = torch.full((len(texts), longest), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, text in enumerate(texts):
        input_ids[row, : len(text)] = torch.from_numpy(text)
        attention_mask[row, : len(text)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def real_tokens(batch):
    """Tokens of a batch without padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def squared_lengths(batch):
    """Sum over texts of length^2, what attention costs."""
    if "cu_seq_lens_q" in batch:
        return int(batch["cu_seq_lens_q"].diff().long().square().sum())
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum(dim=-1).square().sum())
    rows, length = batch["input_ids"].shape
    return rows * length**2


def check_batch(layout, tokens_per_batch, texts_per_batch, max_length, mixture=None, long_texts="truncate"):
    """Raises UserError for batch arithmetic that cannot be."""
    if layout not in LAYOUTS:
        raise UserError(f"layout must be one of {', '.join(LAYOUTS)}, but {layout!r} was given")
    if long_texts not in LONG_TEXTS:
        raise UserError(f"long_texts must be one of {', '.join(LONG_TEXTS)}, but {long_texts!r} was given")
    if max_length < 3:
        raise UserError(f"max_length must be at least 3 (a token between [CLS] and [SEP]), but {max_length} was given")
    if layout == "padded" and texts_per_batch < 1:
        raise UserError(f"texts_per_batch must be at least 1, but {texts_per_batch} was given")
    if layout != "padded" and tokens_per_batch < max_length:
        raise UserError(
            f"tokens_per_batch {tokens_per_batch} is less than one text of max_length {max_length}; raise it or lower max_length"
        )
    if layout == "packed_without_boundaries" and tokens_per_batch % max_length:
        raise UserError(f"tokens_per_batch {tokens_per_batch} must be a multiple of max_length {max_length} for layout {layout}")
    if mixture is None:
        return
    try:
        shares = {int(least): float(share) for least, share in mixture.items()}
    except (AttributeError, TypeError, ValueError):
        raise UserError(
            f"mixture must map least lengths to probabilities, as {{0: 0.2, 1024: 0.4, 2048: 0.4}}, but {mixture!r} was given"
        ) from None
    if not shares or min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-6:
        raise UserError(f"the mixture's probabilities must be above 0 and sum to 1, but {mixture!r} was given")
