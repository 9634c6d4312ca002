"""Which texts are in batch k of an endless series of shuffled passes over the data: a function of
the seed and k, in 4 bytes a text.

The data of the paper has a thousand million texts, so nothing here holds more than the order of the
current pass; sums go by chunks.
"""

from array import array

import numpy as np

from ..common.errors import UserError
from .weighted import WeightedOrder


CHUNK = 1 << 20
BLOCK = 4096


class Plan:
    """Base of the plans: batches of one pass after another.

    Args:
        windows: `Windows`.
        least: windows of texts of at least so many tokens are drawn from.
        seed: tuple of integers.
    Raises:
        UserError: there is no such text.
    """

    def __init__(self, windows, least, seed):
        self.windows, self.least, self.seed = windows, least, seed
        self.weighted = self._weighted() if windows.parts else None
        if self.weighted:
            self.count = self.weighted.count
        else:
            self.count = len(windows.of_texts_from(least)) if least > 0 else len(windows)
        if not self.count:
            raise UserError(
                f"the mixture asks for texts of at least {least} tokens, but the data has none"
            )
        self.ends = [0]  # batches before each pass
        self.current = None

    def _weighted(self):
        """`WeightedOrder` of the windows; UserError for a source without a text that is long
        enough."""
        ids, ends = self.windows.of_texts_from(self.least), self.windows.part_ends()
        parts = self.windows.parts
        for part, count in zip(parts, np.diff(np.searchsorted(ids, ends), prepend=0)):
            if not count:
                raise UserError(
                    f"the mixture asks for texts of at least {self.least} tokens, but {part.name} "
                    "has none"
                )
        return WeightedOrder(ids, ends, [part.share for part in parts], self.seed)

    def order(self, number):
        """Ids of the windows in the order of pass `number`."""
        if self.weighted:
            return self.weighted.order(number)
        ids = self.windows.of_texts_from(self.least)
        np.random.default_rng([*self.seed, number]).shuffle(ids)
        return ids

    def locate(self, k):
        """(the plan of the pass, index in it, number of the pass) of batch k."""
        number = int(np.searchsorted(self.ends, k, side="right")) - 1
        while number == len(self.ends) - 1:
            self.ends.append(self.ends[-1] + self.planned(number)[-1])
            number = number + 1 if k >= self.ends[-1] else number
        return self.planned(number), k - self.ends[number], number

    def planned(self, number):
        """`plan(number)`, the last one kept."""
        if self.current is None or self.current[0] != number:
            self.current = None  # before the next one is made, so that two are never there together
            self.current = (number, self.plan(number))
        return self.current[1]

    def plan(self, number):
        """A tuple that begins with the order of pass `number` and ends with its number of
        batches."""
        raise NotImplementedError

    def batch(self, k):
        """(ids of the windows of batch k, tokens to leave out at the start, tokens or None for
        all)."""
        raise NotImplementedError


class ByTokens(Plan):
    """As many windows as fit into `tokens` tokens."""

    def __init__(self, windows, least, seed, tokens):
        super().__init__(windows, least, seed)
        self.tokens = tokens

    def plan(self, number):
        # Texts of 3, 4, 2, 5 tokens and batches of 8: totals are 3, 7, 9, 14. The first batch ends
        # before the first total above 8, at text 2; the next before the first above 7 + 8, at 4.
        # Bounds: 0, 2, 4.
        order, bounds = self.order(number), array("q", [0])
        size = max(CHUNK, self.tokens)  # a chunk holds the texts of at least one batch
        while bounds[-1] < len(order):
            start, before = bounds[-1], 0
            totals = np.cumsum(self.windows.lengths(order[start : start + size]), dtype=np.int64)
            while before < totals[-1]:
                stop = int(np.searchsorted(totals, before + self.tokens, side="right"))
                if stop == len(totals) and start + stop < len(order):
                    break  # the batch goes on in the next chunk
                bounds.append(start + stop)
                before = totals[stop - 1]
        return order, np.frombuffer(bounds, dtype=np.int64), len(bounds) - 1

    def batch(self, k):
        (order, bounds, _), i, _ = self.locate(k)
        return order[bounds[i] : bounds[i + 1]], 0, None

    def texts_before(self, k):
        """Windows in the batches before k."""
        (order, bounds, _), i, number = self.locate(k)
        return number * len(order) + int(bounds[i])


class ByTexts(Plan):
    """A fixed number of windows; a pass's last batch may be smaller."""

    def __init__(self, windows, least, seed, texts):
        super().__init__(windows, least, seed)
        self.texts = texts

    def plan(self, number):
        return self.order(number), -(-self.count // self.texts)

    def batch(self, k):
        (order, _), i, _ = self.locate(k)
        return order[i * self.texts : (i + 1) * self.texts], 0, None

    def texts_before(self, k):
        """Windows in the batches before k."""
        _, i, number = self.locate(k)
        return number * self.count + i * self.texts


class ByRows(Plan):
    """Rows of `length` tokens cut from the windows written one after another.

    What does not fill a batch at a pass's end is left out or, with `remainder`, comes as a batch of
    fewer rows and one of a shorter row.
    """

    def __init__(self, windows, least, seed, length, rows, remainder=False):
        super().__init__(windows, least, seed)
        self.length, self.size, self.remainder = length, length * rows, remainder

    def plan(self, number):
        # Texts of 3, 4, 2, 5 tokens are 14. Batches of 2 rows of 3 tokens take 6 each: two of them,
        # and 2 tokens are left out, or with `remainder` a last batch of a row of 2.
        order = self.order(number)
        blocks = (
            self.windows.lengths(order[start : start + BLOCK]).sum(dtype=np.int64)
            for start in range(0, len(order), BLOCK)
        )
        before = np.concatenate(([0], np.cumsum(np.fromiter(blocks, dtype=np.int64))))
        total = before[-1]
        bounds = [total // self.size * self.size]
        if self.remainder:
            bounds = sorted({*bounds, total // self.length * self.length, total})
        return order, before, bounds, total // self.size + len(bounds) - 1

    def batch(self, k):
        (order, before, bounds, _), i, _ = self.locate(k)
        complete = bounds[0] // self.size
        start, stop = (
            (i * self.size, (i + 1) * self.size)
            if i < complete
            else bounds[i - complete : i - complete + 2]
        )
        first, skip = self._text_at(order, before, start)
        last, _ = self._text_at(order, before, stop - 1)
        return order[first : last + 1], skip, int(stop - start)

    def _text_at(self, order, before, position):
        """(the text that token `position` of the pass belongs to, tokens of it that come
        earlier)."""
        block = int(np.searchsorted(before, position, side="right")) - 1
        ends = np.cumsum(
            self.windows.lengths(order[block * BLOCK : (block + 1) * BLOCK]), dtype=np.int64
        )
        within = position - before[block]
        text = int(np.searchsorted(ends, within, side="right"))
        return block * BLOCK + text, int(within - (ends[text - 1] if text else 0))

    def texts_before(self, k):
        """Windows in the batches before k, to the share of the tokens."""
        (order, before, _, _), i, number = self.locate(k)
        return number * len(order) + int(len(order) * min(1.0, i * self.size / before[-1]))
