"""Which texts are in batch k of an endless series of shuffled passes over the data: a function of
the seed and k."""

import numpy as np

from ..common.errors import UserError


# Draws of the rarest weighted source in a pass, so that rounding moves its share by 0.5 % of it at
# most.
LEAST_DRAWS = 100


class Plan:
    """Batches of one part of the mixture.

    Args:
        windows: `TokenWindows`.
        spec: `BatchArguments`.
        seed, number: of the run, and of the part.
        whole: one pass that leaves nothing out, for evaluation.
    Raises:
        UserError: there is no text that is long enough, or all together fill no batch.
    """

    def __init__(self, windows, spec, seed, number, whole=False):
        least = spec.parts[number][0]
        self.windows, self.spec, self.whole = windows, spec, whole
        self.seed = (seed, number)
        self.ids = windows.of_texts_from(least)
        shares = windows.texts.shares
        ends = np.searchsorted(self.ids, windows.source_ends()) if shares else [len(self.ids)]
        if not np.diff(ends, prepend=0).all():
            raise UserError(
                f"the mixture asks for texts of at least {least} tokens, but "
                f"{'a source' if shares else 'the data'} has none"
            )
        self.weighted = WeightedOrder(self.ids, ends, shares, self.seed) if shares else None
        self.ends = [0]  # batches before each pass
        self.current = None
        if not whole and not self.batches_of(0):
            raise UserError(
                f"a batch takes {spec.tokens_per_batch} tokens, but the data has fewer; lower "
                "tokens_per_batch"
            )

    def order(self, number):
        """Ids of the windows in the order of pass `number`."""
        if self.weighted:
            return self.weighted.order(number)
        ids = self.ids.copy()
        np.random.default_rng([*self.seed, number]).shuffle(ids)
        return ids

    def planned(self, number):
        """(order, bounds, totals) of pass `number`, the last one kept: batch i has the texts, or
        with `totals` (tokens before each text) the tokens, from bounds[i] to bounds[i + 1]."""
        if self.current is None or self.current[0] != number:
            self.current = None  # before the next one is made, so that two are never there together
            self.current = (number, self._plan(self.order(number)))
        return self.current[1]

    def _plan(self, order):
        spec = self.spec
        if spec.texts_per_batch is not None:
            bounds = np.append(np.arange(0, len(order), spec.texts_per_batch), len(order))
            return order, bounds, None
        totals = np.append(0, np.cumsum(self.windows.lengths(order), dtype=np.int64))
        if spec.layout == "packed_without_boundaries":
            # Texts of 3, 4, 2, 5 tokens are 14. Batches of 2 rows of 3 tokens take 6 each: two of
            # them, and 2 tokens are left out, or in a whole pass come in a row of 2.
            bounds = np.arange(totals[-1] // spec.tokens_per_batch + 1) * spec.tokens_per_batch
            if self.whole:
                rows = totals[-1] // spec.max_length * spec.max_length
                bounds = np.unique([*bounds, rows, totals[-1]])
            return order, bounds, totals
        # Texts of 3, 4, 2, 5 tokens and batches of 8: totals are 0, 3, 7, 9, 14. The first batch
        # ends before the first total above 8, at text 2; the next before the first above 7 + 8.
        bounds = [0]
        while bounds[-1] < len(order):
            most = totals[bounds[-1]] + spec.tokens_per_batch
            bounds.append(int(np.searchsorted(totals, most, side="right")) - 1)
        return order, np.array(bounds), None

    def batches_of(self, number):
        """How many batches pass `number` has."""
        return len(self.planned(number)[1]) - 1

    def locate(self, k):
        """(number of the pass, index in it) of batch k."""
        while self.ends[-1] <= k:
            self.ends.append(self.ends[-1] + self.batches_of(len(self.ends) - 1))
        number = int(np.searchsorted(self.ends, k, side="right")) - 1
        return number, k - self.ends[number]

    def batch(self, k):
        """The texts of batch k, int64 arrays; without boundaries one array of all tokens."""
        number, i = self.locate(k)
        order, bounds, totals = self.planned(number)
        start, stop = bounds[i], bounds[i + 1]
        if totals is None:
            return self.windows.read(order[start:stop])
        first = int(np.searchsorted(totals, start, side="right")) - 1
        last = int(np.searchsorted(totals, stop))
        joined = np.concatenate(self.windows.read(order[first:last]))
        return [joined[start - totals[first] : stop - totals[first]]]


class WeightedOrder:
    """Endless texts of weighted sources, cut into passes in which each source has its exact share.

    A weight is a share of texts (windows of `max_length`, with long_texts: split); a source of
    longer texts has a larger share of the tokens. Each source is read in shuffled passes of its
    own; one that ends begins again while the others go on.

    Args:
        ids: (texts,) ids that may be drawn, ascending.
        ends: (sources,) positions in `ids` behind each source's.
        shares: (sources,) that sum to 1.
        seed: tuple of integers.
    Attributes:
        count: texts of a pass: until the first source is exhausted, or so many that the rarest is
            drawn `LEAST_DRAWS` times.
    """

    def __init__(self, ids, ends, shares, seed):
        self.sources = np.split(ids, ends[:-1])
        self.seed, self.passes = seed, [None] * len(self.sources)
        shares = np.asarray(shares)
        sizes = np.array([len(source) for source in self.sources])
        total = max((sizes / shares).min(), LEAST_DRAWS / shares.min())
        self.draws = [max(1, round(share * total)) for share in shares]
        self.count = sum(self.draws)

    def order(self, number):
        """Ids of pass `number` in their order."""
        drawn = []
        for source, draws in enumerate(self.draws):
            first, last = number * draws, (number + 1) * draws
            size = len(self.sources[source])
            for turn in range(first // size, -(-last // size)):
                begin = turn * size
                ids = self._shuffled(source, turn)
                drawn.append(ids[max(first - begin, 0) : last - begin])
        order = np.concatenate(drawn)
        np.random.default_rng([*self.seed, number]).shuffle(order)
        return order

    def _shuffled(self, source, turn):
        """Pass `turn` of one source; the last one is kept."""
        if self.passes[source] is None or self.passes[source][0] != turn:
            ids = self.sources[source].copy()
            np.random.default_rng([*self.seed, turn, source + 1]).shuffle(ids)
            self.passes[source] = (turn, ids)
        return self.passes[source][1]
