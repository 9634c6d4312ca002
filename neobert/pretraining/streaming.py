"""Micro-batches straight from a stream of rows: tokenised while training, by several workers, and
resumed exactly.

The readers of a run are the loader workers of all its processes. The files of a source are divided
among them; where there are fewer files than readers, the rows are. `datasets` reads, and says where
it is: that state travels with every batch, a checkpoint keeps it, and a resumed run goes on there.
"""

import json

import numpy as np
import torch
from datasets import Features, List, Value

from ..common.errors import UserError
from .batches import masked_batch, surrounded, text_ends
from .prepared import token_ids


ROWS_AT_ONCE = 64  # that are tokenised together
STATE = "stream_state"


class StreamedBatches(torch.utils.data.IterableDataset):
    """Endless micro-batches of one process; micro-batch i depends on the data, the seed, the
    numbers of processes and workers, and i alone.

    Args:
        rows: list of `datasets.IterableDataset` with the column "text", one a source.
        shares: of the texts, of weighted sources that sum to 1; [] of others.
        tokenizer, masking, spec: a fast tokenizer, `TokenMasking`, `BatchArguments`.
        seed: of order, mixture and masks.
        count: micro-batches of the run in all processes, for a mask schedule.
        rank, world_size: of this process. Masks and mixture of its i-th batch are those of the
            run's (i * world_size + rank)-th.
        workers: of the DataLoader; 0: it reads in the process itself.
    """

    def __init__(
        self, rows, shares, tokenizer, masking, spec, seed, count, rank=0, world_size=1, workers=0
    ):
        self.rows, self.shares, self.masking = rows, shares or [1.0], masking
        self.tokenizer, self.special = tokenizer, text_ends(tokenizer)
        self.spec, self.seed, self.count = spec, seed, count
        self.rank, self.world_size, self.workers = rank, world_size, max(1, workers)
        self.mixture = np.cumsum([share for _, share in spec.parts])[:-1]
        self.start, self.saved = 0, {}

    def load_state(self, states, consumed):
        """Continue with micro-batch `consumed` of this process.

        Args:
            states: {worker: state}, each of the worker's last batch before `consumed`.
        """
        self.start, self.saved = consumed, {int(worker): state for worker, state in states.items()}

    def passes(self, states):
        """Complete passes over the data of this process, a mean over its workers and weighted
        sources, by the newest state of each worker."""
        parts = [part["passes"] for state in states for part in state["parts"]]
        return sum(np.dot(self.shares, passes) for passes in parts) / max(1, len(states))

    def __iter__(self):
        """Worker w makes micro-batches w, w + workers, ... of this process, which is the order in
        which a DataLoader asks its workers."""
        info = torch.utils.data.get_worker_info()
        # The DataLoader begins with its first worker, whichever the first batch belongs to.
        return self.batches_of((self.start + (info.id if info else 0)) % self.workers)

    def batches_of(self, worker):
        """Endless micro-batches of one worker, from the process's batch `start` on."""
        reader, readers = worker * self.world_size + self.rank, self.workers * self.world_size
        parts = [self._texts(number, reader, readers) for number in range(len(self.spec.parts))]
        i = worker
        if worker in self.saved:
            i = self.saved[worker]["batch"]
            for part, state in zip(parts, self.saved[worker]["parts"]):
                part.load_state(state)
        while True:
            number = i * self.world_size + self.rank
            draw = np.random.default_rng([self.seed, 20, 40, 40, number]).random()
            part = parts[int(np.searchsorted(self.mixture, draw, side="right"))]
            texts = texts_of_batch(part, self.spec)
            batch = masked_batch(
                texts, self.spec, self.masking, self.seed, number, number / self.count
            )
            i += self.workers
            states = [part.state() for part in parts]
            batch[STATE] = json.dumps({"worker": worker, "batch": i, "parts": states})
            yield batch

    def _texts(self, number, reader, readers):
        """`Texts` of one part of the mixture for one reader; each part reads its share of the
        stream on its own."""
        windows = _Windows(self.tokenizer, self.special, self.spec, self.spec.parts[number][0])
        return Texts(self.rows, self.shares, windows, (self.seed, number), reader, readers)


class _Windows:
    """Batched `map` function: rows of text to windows of `max_length` tokens, special tokens
    included, of the texts of at least `least` tokens."""

    def __init__(self, tokenizer, special, spec, least):
        self.tokenizer, self.special, self.least = tokenizer, special, least
        self.body, self.split = spec.max_length - 2, spec.long_texts == "split"

    def __call__(self, batch):
        windows = []
        for ids in token_ids(self.tokenizer, [text or "" for text in batch["text"]]):
            if ids and len(ids) + 2 >= self.least:
                starts = range(0, len(ids), self.body) if self.split else (0,)
                windows += [
                    surrounded(ids[start : start + self.body], self.special) for start in starts
                ]
        return {"input_ids": windows}


def texts_of_batch(part, spec):
    """Texts of one batch, int64 arrays; without boundaries one array of all tokens."""
    if spec.texts_per_batch is not None:
        return [part.next() for _ in range(spec.texts_per_batch)]
    texts, total = [], 0
    if spec.layout == "packed":
        while total + len(text := part.next()) <= spec.tokens_per_batch:
            texts.append(text)
            total += len(text)
        part.pending = text
        return texts
    while total < spec.tokens_per_batch:
        texts.append(part.next())
        total += len(texts[-1])
    if total > spec.tokens_per_batch:
        part.pending = texts[-1][spec.tokens_per_batch - total :]
    return [np.concatenate(texts)[: spec.tokens_per_batch]]


class Texts:
    """Endless texts of one reader. The next one is of a source that is drawn with its share as
    probability; draw k is a function of the seed and k. The files of a source come in another order
    in every pass.

    Args:
        rows: list of `datasets.IterableDataset` with the column "text", one a source.
        shares: of each, that sum to 1.
        windows: `_Windows`.
        seed: tuple of integers, the same for all readers.
        reader, readers: this reader's number among all.
    Attributes:
        passes: over each source, that are complete.
        pending: a text, or the rest of one, that was given back: `next` returns it first.
    """

    def __init__(self, rows, shares, windows, seed, reader, readers):
        self.sources, self.windows, self.seed = rows, windows, seed
        self.reader, self.readers = reader, readers
        self.bounds = np.cumsum(shares)[:-1]
        self.drawn, self.pending = 0, None
        self.passes, self.files = [0] * len(rows), [0] * len(rows)  # files of the pass
        self.open, self.iterators = [None] * len(rows), [None] * len(rows)
        self.places = [None] * len(rows)  # where an open file goes on, until its first row

    def next(self):
        """The next text, special tokens included."""
        if self.pending is not None:
            text, self.pending = self.pending, None
            return text
        draw = np.random.default_rng([*self.seed, self.reader, self.drawn]).random()
        self.drawn += 1
        source = int(np.searchsorted(self.bounds, draw, side="right"))
        first_pass = self.passes[source]
        while self.passes[source] < first_pass + 3:  # the rest of this pass, and complete ones
            if self.iterators[source] is None:
                self._open(source)
            for row in self.iterators[source]:
                self.places[source] = None
                return np.array(row["input_ids"][0], dtype=np.int64)
            self.open[source] = self.iterators[source] = self.places[source] = None
            self.files[source] += 1
            if self.files[source] == len(self._order(source)):
                self.passes[source], self.files[source] = self.passes[source] + 1, 0
        raise UserError(
            f"a reader of the stream has no text of at least {max(self.windows.least, 1)} tokens; "
            "give fewer processes and workers, or prepare the set"
        )

    def _order(self, source):
        """This reader's files in the order of this pass: where there are enough, each is of one
        reader; else of all, who share its rows."""
        count = self.sources[source].num_shards
        order = np.random.default_rng([*self.seed, source, self.passes[source]]).permutation(count)
        return order[self.reader :: self.readers] if count >= self.readers else order

    def _open(self, source, place=None):
        """Begins a file, or goes on in it."""
        rows, number = self.sources[source], int(self._order(source)[self.files[source]])
        file = rows.shard(rows.num_shards, number)
        if rows.num_shards < self.readers:
            file = file.filter(lambda row, i: i % self.readers == self.reader, with_indices=True)
        self.open[source] = file.map(
            self.windows,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=["text"],
            features=Features({"input_ids": List(Value("int32"))}),
        )
        if place is not None:
            self.open[source].load_state_dict(place)
            self.places[source] = place
        # Of more than one row at once the state would be that behind them.
        self.iterators[source] = self.open[source].iter(batch_size=1)

    def state(self):
        """Where the reader is, in types of JSON."""
        return {
            "drawn": self.drawn,
            "pending": None if self.pending is None else self.pending.tolist(),
            "passes": list(self.passes),
            "files": list(self.files),
            # Until its first row `datasets` says that a file begins at its start.
            "places": [
                rows.state_dict() if rows is not None and place is None else place
                for rows, place in zip(self.open, self.places)
            ],
        }

    def load_state(self, state):
        """Goes on from a `state`."""
        self.drawn, self.passes, self.files = state["drawn"], state["passes"], state["files"]
        if state["pending"] is not None:
            self.pending = np.array(state["pending"], dtype=np.int64)
        for source, place in enumerate(state["places"]):
            if place is not None:
                self._open(source, place)
