"""Micro-batches for masked language modeling.

Micro-batch i of a run is a function of the data, the seed and i alone, so a resumed run, and a run
with another number of loader workers or processes, sees identical batches with identical masks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from ..common.packing import pack
from .masking import TokenMasking
from .options import BatchOptions
from .plans import Plan
from .prepared import TokenizedTexts
from .schedule import epoch_size, token_fractions


# Separates the random numbers that choose the part of the mixture from those of the masks and the
# order. Resumed runs depend on these constants.
MIXTURE_STREAM = (20, 40, 40)


def boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the ids of the tokens before and after every text: [CLS] and [SEP], or BOS and EOS.

    Raises:
        UserError: If the tokenizer has no such tokens.
    """
    first = tokenizer.cls_token_id
    last = tokenizer.sep_token_id
    # Tokenizers of the GPT and Llama families have BOS and EOS instead of [CLS] and [SEP].
    if first is None:
        first = tokenizer.bos_token_id
    if last is None:
        last = tokenizer.eos_token_id
    if first is None or last is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no tokens for the start and end of a "
            "text. Use a tokenizer with [CLS] and [SEP]."
        )
    return first, last


def add_boundaries(ids: Sequence[int] | np.ndarray, boundaries: tuple[int, int]) -> np.ndarray:
    """Return token ids between those of `boundary_tokens`, int64.

    Args:
        ids: Token ids of a text, (N,).
        boundaries: Ids of the special tokens before and after the text.
    """
    return np.concatenate(([boundaries[0]], ids, [boundaries[1]])).astype(np.int64)


class TokenWindows:
    """Windows of at most `max_length` tokens over the texts of a tokenized dataset.

    A text yields a single window, to which it is truncated, or with `long_texts: split` consecutive
    windows that contain all of its tokens.

    Args:
        texts: Tokenized texts.
        boundaries: Ids of the tokens before and after every window.
        batch_options: Maximum length, and whether long texts are truncated or split.

    Attributes:
        ends: Number of windows up to the end of each text, (texts,) int64; None if texts are
            truncated.
    """

    def __init__(
        self, texts: TokenizedTexts, boundaries: tuple[int, int], batch_options: BatchOptions
    ) -> None:
        self.texts = texts
        self.boundaries = boundaries
        # Two positions of each window are taken by the boundary tokens.
        self.body_length = batch_options.sequence_length - 2
        self.rows = texts.rows.with_format("numpy", columns=["input_ids"])
        self.ends: np.ndarray | None = None
        if batch_options.long_texts == "split":
            # Windows have no overlap. The division is rounded up, for a shorter last window.
            window_counts = np.maximum(1, -(-(texts.lengths - 2) // self.body_length))
            self.ends = np.cumsum(window_counts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.texts.lengths) if self.ends is None else int(self.ends[-1])

    def source_ends(self) -> np.ndarray:
        """Return the number of windows up to the end of each weighted source, (sources,)."""
        text_counts = np.cumsum(self.texts.sizes)
        return text_counts if self.ends is None else self.ends[text_counts - 1]

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each window, including special tokens.

        Args:
            ids: Numbers of windows, (N,).
        """
        # `texts.lengths` includes two special tokens, as does each window of a split text.
        texts, starts = self._locate(ids)
        return np.minimum(self.texts.lengths[texts] - starts, self.body_length + 2)

    def ids_of_texts_with(self, min_tokens: int) -> np.ndarray:
        """Return the ids of the windows whose texts have at least `min_tokens` tokens, uint32."""
        ids = np.arange(len(self), dtype=np.uint32)
        texts, _ = self._locate(ids)
        return ids[self.texts.lengths[texts] >= min_tokens]

    def read(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return the token ids of windows with special tokens, int64.

        Args:
            ids: Numbers of windows, (N,).
        """
        texts, starts = self._locate(ids)
        rows = self.rows[texts]["input_ids"]
        return [
            add_boundaries(row[start : start + self.body_length], self.boundaries)
            for row, start in zip(rows, starts)
        ]

    def _locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the text of each window and the position of its first token in the text, (N,)."""
        if self.ends is None:
            return ids, np.zeros(len(ids), dtype=np.int64)
        # `ends` is ascending, so a binary search finds the text of a window without a table
        # with one entry per window.
        texts = np.searchsorted(self.ends, ids, side="right")
        windows_before = np.where(texts > 0, self.ends[texts - 1], 0)
        return texts, (ids - windows_before) * self.body_length


class MicroBatches(torch.utils.data.Dataset):
    """Dataset of all micro-batches of a run.

    Args:
        windows: Windows over the texts.
        masking: Masking of the tokens.
        batch_options: Size, layout and mixture of the batches.
        seed: Random seed of the order, the mixture and the masks.
        count: Number of micro-batches of the run; None for one epoch without omissions, for
            evaluation.

    Attributes:
        epoch_tokens: Number of tokens of an epoch. An epoch of weighted sources ends when the
            first source does.
        part: Part of the mixture that each micro-batch belongs to, (count,) uint8; None for a
            single part.
        index_in_part: Number of preceding micro-batches of the same part, (count,) int64; None for
            a single part.

    Raises:
        UserError: If a part of the mixture contains no text, or all texts do not fill one batch.
    """

    def __init__(
        self,
        windows: TokenWindows,
        masking: TokenMasking,
        batch_options: BatchOptions,
        seed: int,
        count: int | None = None,
    ) -> None:
        self.windows = windows
        self.masking = masking
        self.batch_options = batch_options
        self.seed = seed
        self.epoch_tokens = _epoch_tokens(windows)
        # Each part of the mixture shuffles its texts separately.
        self.plans = [
            Plan(windows, batch_options, seed, number, single_epoch=count is None)
            for number in range(len(batch_options.parts))
        ]
        self.count = self.plans[0].num_batches(0) if count is None else count

        # Sample the part of each micro-batch in advance: micro-batch i of the run is then the batch
        # `index_in_part[i]` of the part `part[i]`, without iterating over earlier ones.
        self.part: np.ndarray | None = None
        self.index_in_part: np.ndarray | None = None
        if len(self.plans) > 1:
            samples = np.random.default_rng([seed, *MIXTURE_STREAM]).random(self.count)
            bounds = np.cumsum([probability for _, probability in batch_options.parts])[:-1]
            self.part = np.searchsorted(bounds, samples, side="right").astype(np.uint8)
            self.index_in_part = np.zeros(self.count, dtype=np.int64)
            for number in range(len(self.plans)):
                is_part = self.part == number
                self.index_in_part[is_part] = np.arange(is_part.sum())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        part = 0
        index = int(i)
        if self.part is not None and self.index_in_part is not None:
            part = self.part[i]
            index = int(self.index_in_part[i])
        texts = self.plans[part].batch(index)
        return masked_batch(
            texts, self.batch_options, self.masking, self.seed, int(i), i / self.count
        )


def _epoch_tokens(windows: TokenWindows) -> float:
    """Return the number of tokens of an epoch; for weighted sources, the expected number."""
    lengths = windows.lengths(np.arange(len(windows)))
    sampling_weights = windows.texts.sampling_weights
    if not sampling_weights:
        return int(lengths.sum())
    sources = np.split(lengths, windows.source_ends()[:-1])
    token_counts = [int(source.sum()) for source in sources]
    fractions = token_fractions(sampling_weights, token_counts, [len(part) for part in sources])
    return epoch_size(token_counts, fractions)


def masked_batch(
    texts: Sequence[np.ndarray],
    batch_options: BatchOptions,
    masking: TokenMasking,
    seed: int,
    number: int,
    progress: float,
) -> dict[str, Any]:
    """Build a micro-batch from texts, and mask its tokens.

    Args:
        texts: Token ids of each text, int64; for "packed_without_boundaries" a single array of all
            tokens.
        batch_options: Layout and maximum length of the batch.
        masking: Masking of the tokens.
        seed: Random seed of the run.
        number: Number of the micro-batch in the run. The masks are a function of `seed` and
            `number`.
        progress: Fraction of the run before this micro-batch, for a schedule of the masking.

    Returns:
        Keyword arguments of the model: those of `pack`, or `input_ids` (B, L); and `labels` of the
        shape of `input_ids`.
    """
    batch: dict[str, Any]
    if batch_options.layout == "packed":
        # Without a kernel for sequences of different lengths, attention is computed per group of
        # adjacent sequences of equal length.
        batch = pack(sorted(texts, key=len))
    else:
        # The tokens form complete rows. Only the last row of a validation set is shorter, in a
        # batch of its own.
        row_length = min(len(texts[0]), batch_options.sequence_length)
        batch = {"input_ids": torch.from_numpy(texts[0]).view(-1, row_length)}

    generator = batch_generator(seed, number)
    batch["input_ids"], batch["labels"] = masking(batch["input_ids"], generator, progress)
    return batch


def batch_generator(seed: int, number: int) -> torch.Generator:
    """Return the random number generator of a micro-batch.

    Args:
        seed: Random seed of the run.
        number: Number of the micro-batch in the run.
    """
    # SeedSequence mixes both numbers, so neighboring micro-batches have independent masks. The
    # shift keeps the seed within the signed 64-bit integers.
    state = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> 1))


def batch_counts(batch: dict[str, Any]) -> dict[str, int | torch.Tensor]:
    """Return the quantities that determine the cost of a batch.

    They are integers or 0-dimensional tensors, so computing them does not wait for the GPU.

    Returns:
        Number of tokens as "tokens", sum of the squared sequence lengths as "squares", and number
        of tokens with a label as "masked".
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
