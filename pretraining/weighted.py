"""Weighted sources: which source the next text of a run comes from.

A weight is a share of texts (windows of `max_length`, with long_texts: split), as the probabilities
of `datasets.interleave_datasets` are, relative to the sum of all weights; a source of longer texts
has a larger share of the tokens. Each source is read in shuffled passes of its own. A source that
ends begins again while the others go on.

Prepared text gives every source its exact share of each pass (`WeightedOrder`); streamed text is
drawn text by text (`WeightedReader`).
"""

import math
from typing import NamedTuple

import numpy as np


# Draws of the rarest source in a pass, so that rounding moves its share by 0.5 % of it at most.
LEAST_DRAWS = 100


class Part(NamedTuple):
    """A weighted source: its name in the log, how many texts it has, its share of all texts."""

    name: str
    texts: int
    share: float


def shares_of(sources):
    """{name in the log: share} of weighted `Source`s, {} of others; the shares sum to 1. A name is
    without its folder where that tells the sources apart."""
    if sources[0].weight is None:
        return {}
    short = [source.name.rstrip("/").rpartition("/")[2] for source in sources]
    names = short if len(set(short)) == len(short) else [source.name for source in sources]
    if len(set(names)) < len(names):  # subsets or splits of one data set
        names = [f"{name}-{i}" for i, name in enumerate(names, 1)]
    total = math.fsum(source.weight for source in sources)
    return {name: source.weight / total for name, source in zip(names, sources)}


class WeightedOrder:
    """Endless texts of weighted sources, cut into passes in which each source has its exact share.

    Pass `number` is a function of the seed and the number.

    Args:
        ids: (texts,) ids that may be drawn, ascending.
        ends: (sources,) the first id behind each source's.
        shares: (sources,) that sum to 1.
        seed: tuple of integers.
    Attributes:
        count: texts of a pass: until the first source is exhausted, or so many that the rarest is
            drawn `LEAST_DRAWS` times.
    """

    def __init__(self, ids, ends, shares, seed):
        bounds = [0, *np.searchsorted(ids, ends)]
        self.own = [ids[start:stop] for start, stop in zip(bounds, bounds[1:])]
        self.seed, self.passes = seed, [None] * len(self.own)
        shares = np.asarray(shares)
        sizes = np.array([len(own) for own in self.own])
        total = max((sizes / shares).min(), LEAST_DRAWS / shares.min())
        self.draws = [max(1, round(share * total)) for share in shares]
        self.count = sum(self.draws)

    def order(self, number):
        """Ids of pass `number` in their order."""
        drawn = []
        for source, draws in enumerate(self.draws):
            first, last = number * draws, (number + 1) * draws
            size = len(self.own[source])
            for own in range(first // size, -(-last // size)):
                begin = own * size
                ids = self._shuffled(source, own)
                drawn.append(ids[max(first - begin, 0) : last - begin])
        order = np.concatenate(drawn)
        np.random.default_rng([*self.seed, number]).shuffle(order)
        return order

    def _shuffled(self, source, own):
        """Pass `own` of one source; the last one is kept."""
        if self.passes[source] is None or self.passes[source][0] != own:
            ids = self.own[source].copy()
            np.random.default_rng([*self.seed, own, source + 1]).shuffle(ids)
            self.passes[source] = (own, ids)
        return self.passes[source][1]


class WeightedReader:
    """Texts of several `Reader`s, each next one of a reader that is drawn with its share as
    probability; draw k is a function of the seed and k.

    Args:
        readers: {name: `Reader`}. shares: of each, that sum to 1.
        seed: tuple of integers.
    """

    def __init__(self, readers, shares, seed):
        self.names, self.readers, self.seed = list(readers), list(readers.values()), seed
        self.shares = list(shares)
        self.bounds = np.cumsum(self.shares)[:-1]
        self.drawn, self.pending = 0, []

    @property
    def passes(self):
        """Passes over the data: the mean of the sources', by share."""
        return sum(share * reader.passes for share, reader in zip(self.shares, self.readers))

    @property
    def source_passes(self):
        """{name: passes} of each source."""
        return {name: reader.passes for name, reader in zip(self.names, self.readers)}

    @property
    def skipped(self):
        """Rows that were skipped, as of `Reader`."""
        counts = [reader.skipped for reader in self.readers]
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def next(self):
        """The next window."""
        if self.pending:
            return self.pending.pop()
        draw = np.random.default_rng([*self.seed, self.drawn]).random()
        self.drawn += 1
        return self.readers[int(np.searchsorted(self.bounds, draw, side="right"))].next()

    def put_back(self, text):
        """Gives a window, or the rest of one, back: `next` returns it first."""
        self.pending.append(text)

    def state(self):
        """Where the reader is, in types of JSON."""
        return {
            "drawn": self.drawn,
            "pending": [text.tolist() for text in self.pending],
            "readers": [reader.state() for reader in self.readers],
        }

    def load_state(self, saved):
        """Goes on from a `state`."""
        self.drawn = saved["drawn"]
        self.pending = [np.array(text, dtype=np.int64) for text in saved["pending"]]
        for reader, state in zip(self.readers, saved["readers"]):
            reader.load_state(state)
