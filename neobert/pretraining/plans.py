"""Order of the texts: assigns windows to the batches of an endless series of shuffled epochs.

Batch k of a part of the mixture consists of the same windows in every run with the same data,
options and seed.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..common.errors import UserError
from .options import BatchOptions
from .prepared import TokenizedTexts


# Minimum number of samples of the rarest weighted source per epoch, so rounding changes its
# fraction by at most 0.5 %.
MIN_SAMPLES = 100


class Windows(Protocol):
    """Windows over texts, as `batches.TokenWindows` implements them."""

    texts: TokenizedTexts

    def source_ends(self) -> np.ndarray:
        """Return the number of windows up to the end of each weighted source, (sources,)."""

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each window, (N,)."""

    def ids_of_texts_with(self, min_tokens: int) -> np.ndarray:
        """Return the ids of the windows whose texts have at least `min_tokens` tokens."""

    def read(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return the token ids of windows."""


@dataclass(frozen=True)
class EpochPlan:
    """Batches of one epoch.

    Attributes:
        order: Ids of the windows in their order, (windows,).
        bounds: Positions between the batches, (batches + 1,): batch i contains the windows of
            `order` from bounds[i] to bounds[i + 1], or the tokens if `token_ends` is not None.
        token_ends: Number of tokens before each window and in all, (windows + 1,), for batches
            without boundaries.
    """

    order: np.ndarray
    bounds: np.ndarray
    token_ends: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.bounds) - 1


class Plan:
    """Batches of one part of the mixture.

    Args:
        windows: Windows over the texts.
        batch_options: Size, layout and mixture of the batches.
        seed: Random seed of the run.
        number: Number of the part in the mixture.
        single_epoch: Whether the plan is exactly one epoch without omitted tokens, as for an
            evaluation.

    Raises:
        UserError: If no text is long enough, or if all texts do not fill a batch.
    """

    def __init__(
        self,
        windows: Windows,
        batch_options: BatchOptions,
        seed: int,
        number: int,
        single_epoch: bool = False,
    ) -> None:
        self.windows = windows
        self.batch_options = batch_options
        self.single_epoch = single_epoch
        self.seed = (seed, number)

        min_tokens = batch_options.parts[number][0]
        self.ids = windows.ids_of_texts_with(min_tokens)
        sampling_weights = windows.texts.sampling_weights

        # The ids are ascending and each source is a range of them, so a binary search finds
        # where a source ends.
        source_ends = np.array([len(self.ids)])
        if sampling_weights:
            source_ends = np.searchsorted(self.ids, windows.source_ends())
        source_sizes = np.diff(source_ends, prepend=0)
        if not source_sizes.all():
            raise UserError(
                f"`mixture` needs texts of at least {min_tokens} tokens, but "
                f"{'a source' if sampling_weights else 'the data'} has none."
            )
        self.weighted: WeightedOrder | None = None
        if sampling_weights:
            self.weighted = WeightedOrder(self.ids, source_ends, sampling_weights, self.seed)

        # Number of batches before each epoch, for `locate`.
        self.batches_before_epoch = [0]
        self._newest: tuple[int, EpochPlan] | None = None

        # With epochs that have no batch, `locate` would never end.
        if not single_epoch and not self.num_batches(0):
            raise UserError(
                f"`micro_batch_tokens` is {batch_options.micro_batch_tokens}, but the data "
                "contains fewer tokens. Lower --micro-batch-tokens."
            )
        # Without a token budget, all epochs have the same number of batches.
        is_constant = batch_options.micro_batch_tokens is None and not single_epoch
        self._batches_per_epoch = self.num_batches(0) if is_constant else None

    def order(self, epoch: int) -> np.ndarray:
        """Return the ids of the windows in the order of an epoch."""
        if self.weighted is not None:
            return self.weighted.order(epoch)
        ids = self.ids.copy()
        np.random.default_rng([*self.seed, epoch]).shuffle(ids)
        return ids

    def epoch(self, number: int) -> EpochPlan:
        """Return the batches of an epoch. The newest epoch is cached."""
        if self._newest is None or self._newest[0] != number:
            # Release the previous epoch first, so two epochs are never in memory.
            self._newest = None
            self._newest = (number, self._plan(self.order(number)))
        return self._newest[1]

    def _plan(self, order: np.ndarray) -> EpochPlan:
        """Divide windows into batches."""
        if self.batch_options.micro_batch_tokens is None:
            # The last batch of an epoch may be smaller.
            size = self.batch_options.micro_batch_size
            bounds = np.append(np.arange(0, len(order), size), len(order))
            return EpochPlan(order, bounds)

        # The number of tokens of a large dataset exceeds the range of int32.
        lengths = self.windows.lengths(order)
        token_ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
        if self.batch_options.layout == "packed_without_boundaries":
            bounds = self._token_bounds(int(token_ends[-1]), self.batch_options.micro_batch_tokens)
            return EpochPlan(order, bounds, token_ends)
        return EpochPlan(order, _window_bounds(token_ends, self.batch_options.micro_batch_tokens))

    def _token_bounds(self, token_count: int, batch_tokens: int) -> np.ndarray:
        """Return the bounds of batches without boundaries, in tokens.

        Windows of 3, 4, 2 and 5 tokens have 14 tokens. With 2 rows of 3 tokens per batch there are
        two batches of 6 tokens. The remaining 2 tokens are omitted, or are a row of 2 tokens if the
        plan is a whole epoch.
        """
        bounds = np.arange(token_count // batch_tokens + 1) * batch_tokens
        if self.single_epoch:
            row_length = self.batch_options.sequence_length
            full_rows_end = token_count // row_length * row_length
            bounds = np.unique([*bounds, full_rows_end, token_count])
        return bounds

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return len(self.epoch(epoch))

    def locate(self, k: int) -> tuple[int, int]:
        """Return the epoch of batch k, and its index in the epoch."""
        if self._batches_per_epoch is not None:
            return divmod(k, self._batches_per_epoch)

        # With a token budget, the number of batches depends on the order of the windows, so
        # the epochs before batch k must be planned, too.
        counts = self.batches_before_epoch
        while counts[-1] <= k:
            last_epoch = len(counts) - 1
            counts.append(counts[-1] + self.num_batches(last_epoch))
        epoch = bisect.bisect_right(counts, k) - 1
        return epoch, k - counts[epoch]

    def epochs(self, count: int) -> float:
        """Return the number of epochs of the first `count` batches.

        An epoch of weighted sources ends when the first source does.
        """
        epoch, index = self.locate(count - 1)
        epochs = epoch + (index + 1) / self.num_batches(epoch)
        return epochs if self.weighted is None else epochs * self.weighted.passes

    def batch(self, k: int) -> list[np.ndarray]:
        """Return the token ids of the texts of batch k, int64.

        Without boundaries, the list contains a single array of all tokens.
        """
        number, i = self.locate(k)
        plan = self.epoch(number)
        start = plan.bounds[i]
        stop = plan.bounds[i + 1]
        if plan.token_ends is None:
            return self.windows.read(plan.order[start:stop])

        # Read all windows that overlap with the tokens of the batch, and remove the tokens before
        # and after it.
        first = int(np.searchsorted(plan.token_ends, start, side="right")) - 1
        last = int(np.searchsorted(plan.token_ends, stop))
        tokens = np.concatenate(self.windows.read(plan.order[first:last]))
        offset = plan.token_ends[first]
        return [tokens[start - offset : stop - offset]]


def _window_bounds(token_ends: np.ndarray, batch_tokens: int) -> np.ndarray:
    """Return the bounds of batches of complete windows, in windows.

    Windows of 3, 4, 2 and 5 tokens end at 3, 7, 9 and 14 tokens. With at most 8 tokens per batch,
    the first batch ends before the first window that ends after token 8, the next one before the
    first window that ends after token 7 + 8.
    """
    window_count = len(token_ends) - 1
    bounds = [0]
    while bounds[-1] < window_count:
        max_end = token_ends[bounds[-1]] + batch_tokens
        bounds.append(int(np.searchsorted(token_ends, max_end, side="right")) - 1)
    return np.array(bounds)


class WeightedOrder:
    """Endless order of the texts of weighted sources.

    The order consists of epochs in which each source has its exact fraction of the texts (of the
    windows with `long_texts: split`). A source of longer texts has a larger fraction of the tokens.
    Each source is shuffled separately. A source that is exhausted starts again, while the others
    continue.

    Args:
        ids: Ids of the windows, ascending, (windows,).
        ends: Position in `ids` of the end of each source, (sources,).
        sampling_weights: Sampling weights of the sources, which sum to 1, (sources,).
        seed: Random seed.

    Attributes:
        samples: Number of windows of each source per epoch. An epoch ends when the first source is
            exhausted, but contains at least MIN_SAMPLES windows of the rarest source.
        passes: Number of times that an epoch contains the source that is exhausted first: 1, or
            more if MIN_SAMPLES applies.
    """

    def __init__(
        self,
        ids: np.ndarray,
        ends: np.ndarray | Sequence[int],
        sampling_weights: Sequence[float],
        seed: tuple[int, ...],
    ) -> None:
        self.sources = np.split(ids, ends[:-1])
        self.seed = seed
        # Newest order of each source, and its number.
        self._newest: list[tuple[int, np.ndarray] | None] = [None] * len(self.sources)

        # The source that is exhausted first ends an epoch. If an epoch contained few windows of the
        # rarest source, rounding would change the fractions, so an epoch may contain windows
        # of that source more than once.
        weights = np.asarray(sampling_weights)
        sizes = np.array([len(source) for source in self.sources])
        first_end = (sizes / weights).min()
        epoch_size = max(first_end, MIN_SAMPLES / weights.min())
        self.passes = epoch_size / first_end
        self.samples = [max(1, round(weight * epoch_size)) for weight in weights]

    def order(self, epoch: int) -> np.ndarray:
        """Return the ids of the windows in the order of an epoch."""
        # Position p in the endless order of a source is window p % size of its turn p // size. An
        # epoch may cover the end of one turn and the start of the next.
        parts = []
        for source, samples in enumerate(self.samples):
            first = epoch * samples
            last = first + samples
            size = len(self.sources[source])
            for turn in range(first // size, -(-last // size)):
                turn_start = turn * size
                ids = self._shuffled(source, turn)
                parts.append(ids[max(first - turn_start, 0) : last - turn_start])

        order = np.concatenate(parts)
        np.random.default_rng([*self.seed, epoch]).shuffle(order)
        return order

    def _shuffled(self, source: int, turn: int) -> np.ndarray:
        """Return the ids of a source in the order of its turn. The newest order is cached."""
        newest = self._newest[source]
        if newest is None or newest[0] != turn:
            ids = self.sources[source].copy()
            np.random.default_rng([*self.seed, turn, source + 1]).shuffle(ids)
            newest = (turn, ids)
            self._newest[source] = newest
        return newest[1]
