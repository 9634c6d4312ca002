"""Micro-batches straight from a streamed data set: tokenised while training, by several workers,
and resumed exactly.

The readers of a run are the loader workers of all its processes. Shards (files) are divided among
them. If there are fewer shards than readers, the rows of a shard are divided too: one reader
tokenises each row. A reader takes down where it is every `SNAPSHOT_EVERY` micro-batches, which
travels with the batch; a checkpoint keeps the last ones, and a resumed run goes on from there and
passes over the few batches after it.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..common.errors import UserError
from .batches import masked_batch
from .prepared import BROKEN, EMPTY
from .weighted import WeightedReader


SNAPSHOT_EVERY = 50
ROWS_AT_ONCE = 64  # that are read and tokenised together
STATE = "stream_state"
COUNTS = "stream_counts"


@dataclass(frozen=True)
class TokenStream:
    """Rows that are tokenised while they are read.

    Args:
        rows: `datasets.IterableDataset` with the column "text"; {name: such} of weighted sources.
        tokenise: `Tokenise`.
        special: `SpecialTokens`, put around every text.
        shares: {name: share of the texts} of weighted sources, which sum to 1.
    """

    rows: Any
    tokenise: Any
    special: Any
    shares: dict = field(default_factory=dict)


class StreamedBatches(torch.utils.data.IterableDataset):
    """Endless micro-batches of one process; micro-batch i depends on the data, the seed, the
    numbers of processes and workers, and i alone.

    Args:
        source: `TokenStream`.
        masking, spec: `TokenMasking`, `BatchSpec`.
        count: micro-batches of the run in all processes, for a mask schedule.
        rank, world_size: of this process. Masks and mixture of its i-th batch are those of the
            run's (i * world_size + rank)-th.
        workers: of the DataLoader; 0: it reads in the process itself.
    """

    def __init__(self, source, masking, spec, count, rank=0, world_size=1, workers=0):
        self.source, self.masking, self.spec, self.count = source, masking, spec, count
        self.rank = rank
        self.world_size = world_size
        self.workers = max(1, workers)
        self.shares = np.cumsum([share for _, share in spec.mixture])[:-1]
        self.start, self.saved = 0, {}

    def load_state(self, states, consumed):
        """Continue with micro-batch `consumed` of this process.

        Args:
            states: {worker: snapshot}, each from the last batch with one at or before `consumed`.
        """
        self.start, self.saved = consumed, {int(worker): state for worker, state in states.items()}

    def readers(self, worker):
        """The part of the mixture -> `Reader` or `WeightedReader` of one worker; each part reads
        its share of the stream on its own."""
        return [
            self._reader(worker, least, (self.spec.seed, number))
            for number, (least, _) in enumerate(self.spec.mixture)
        ]

    def _reader(self, worker, least, seed):
        source, shares = self.source, self.source.shares
        reader, readers = worker * self.world_size + self.rank, self.workers * self.world_size
        if not shares:
            return Reader(source, self.spec, least, seed, reader, readers)
        own = {
            name: Reader(replace(source, rows=rows), self.spec, least, seed, reader, readers)
            for name, rows in source.rows.items()
        }
        return WeightedReader(own, shares.values(), (*seed, reader))

    def __iter__(self):
        """Worker w makes micro-batches w, w + workers, ... of this process, which is the order in
        which a DataLoader asks its workers."""
        info = torch.utils.data.get_worker_info()
        # The DataLoader begins with its first worker, whichever the first batch belongs to.
        return self.batches_of((self.start + (info.id if info else 0)) % self.workers)

    def batches_of(self, worker):
        """Endless micro-batches of one worker, from the process's batch `start` on."""
        readers, i = self.readers(worker), worker
        if worker in self.saved:
            i = self.saved[worker]["batch"]
            for reader, state in zip(readers, self.saved[worker]["readers"]):
                reader.load_state(state)
        since = None  # batches since the last snapshot
        while True:
            state = None
            if i >= self.start and (since is None or since == SNAPSHOT_EVERY):
                state = {
                    "worker": worker,
                    "batch": i,
                    "readers": [reader.state() for reader in readers],
                }
                since = 0
            number = i * self.world_size + self.rank
            texts = self._texts(readers[self._part(number)])
            if i >= self.start:
                batch = masked_batch(texts, self.spec, self.masking, number, number / self.count)
                batch[COUNTS] = (worker, self._counts(readers))
                if state is not None:
                    batch[STATE] = json.dumps(state)
                since += 1
                yield batch
            i += self.workers

    def _part(self, number):
        draw = np.random.default_rng([self.spec.seed, 20, 40, 40, number]).random()
        return int(np.searchsorted(self.shares, draw, side="right"))

    def _counts(self, readers):
        """Rows that one worker skipped, and its passes over its share of the data and of each
        weighted source."""
        counts = {
            name: sum(reader.skipped[name] for reader in readers) for name in ("empty", "broken")
        }
        counts["passes"] = sum(reader.passes for reader in readers)
        for name in self.source.shares:
            counts[f"passes_{name}"] = sum(reader.source_passes[name] for reader in readers)
        return counts

    def _texts(self, reader):
        """Texts of one batch, special tokens included."""
        spec = self.spec
        if spec.texts is not None:
            return [reader.next() for _ in range(spec.texts)]
        texts, total = [], 0
        if spec.layout == "packed":
            while total + len(text := reader.next()) <= spec.tokens:
                texts.append(text)
                total += len(text)
            reader.put_back(text)
            return texts
        while total < spec.tokens:
            texts.append(reader.next())
            total += len(texts[-1])
        if total > spec.tokens:
            reader.put_back(texts[-1][spec.tokens - total :])
        return [np.concatenate(texts)[: spec.tokens]]


class Reader:
    """Endless texts of at least `least` tokens from a share of a stream, with what was put back and
    a state that JSON holds.

    Shards come one after another, in another order every pass. There is no shuffle buffer: its
    contents cannot be saved in a checkpoint.

    Args:
        source, spec: the `TokenStream` and `BatchSpec`.
        least: tokens of a text, special tokens included.
        seed: tuple of integers.
        reader, readers: this reader's number among all.
    """

    def __init__(self, source, spec, least, seed, reader, readers):
        self.source, self.least, self.seed = source, least, seed
        self.body, self.split = spec.length - 2, spec.long_texts == "split"
        # Groups of readers share the shards evenly; the readers of one group deal out the rows of
        # each of its shards. 6 readers of 3 shards are 3 groups of 2: reader 4 has shard 1 (4 % 3)
        # of a pass's order, and of its rows every second one, from row 1 (4 // 3) on.
        shards = source.rows.num_shards
        groups = readers if shards >= readers else shards if readers % shards == 0 else 1
        self.first, self.step = reader % groups, groups
        self.place, self.sharers = reader // groups, readers // groups
        self.number, self.shard = 0, 0  # of the pass, and in it
        self.barren = 0  # shards since the last text that is long enough
        self.skipped, self.pending = {"empty": 0, "broken": 0}, []
        self.stream = self.groups = None  # of the shard
        self.group = self.before = None  # tokenised rows, and the stream's state before them
        self.row, self.ended = 0, False  # of the group that is next; whether the shard has no more

    @property
    def passes(self):
        """Passes over its share of the data, by shards."""
        return self.number + self.shard / len(self._order())

    def _order(self):
        """This reader's shards in this pass's order."""
        order = np.random.default_rng([*self.seed, self.number]).permutation(
            self.source.rows.num_shards
        )
        return order[self.first :: self.step]

    def _open(self, state=None):
        self.stream = self.source.rows.shard(
            num_shards=self.source.rows.num_shards, index=int(self._order()[self.shard])
        )
        if state is not None:
            self.stream.load_state_dict(state)
        # Read in groups: row by row, `datasets` would deal the shards out to the workers of a
        # DataLoader by a rule of its own.
        self.groups = self.stream.iter(batch_size=ROWS_AT_ONCE * self.sharers)
        self._read_group(state)

    def _read_group(self, before=None):
        """Reads the next rows of the shard and tokenises this reader's.

        Args:
            before: the stream's state, where it was loaded; until its first row `datasets` says
                that of the shard's start.
        """
        self.before, self.row = self.stream.state_dict() if before is None else before, 0
        texts = next(self.groups, {"text": []})["text"]
        # Other rows in every pass, so that each reader comes to see all of them.
        own = texts[(self.place + self.number) % self.sharers :: self.sharers]
        self.group = self.source.tokenise({"text": own}) if own else {"input_ids": [], "length": []}
        self.ended = not texts

    def _next_shard(self):
        self.shard += 1
        self.barren += 1
        # As much as all of the data 20 times: a single such text anywhere would have come to this
        # reader with probability 1 - exp(-20).
        if self.barren > 20 * self.source.rows.num_shards * self.sharers:
            raise UserError(f"the data has no text of at least {max(self.least, 1)} tokens")
        if self.shard == len(self._order()):
            self.number, self.shard = self.number + 1, 0
        self._open()

    def next(self):
        """The next window; a new pass begins when the last shard ends."""
        if self.stream is None:
            self._open()
        while not self.pending:
            if self.row == len(self.group["length"]):
                self._next_shard() if self.ended else self._read_group()
                continue
            length, ids = self.group["length"][self.row], self.group["input_ids"][self.row]
            self.row += 1
            if length in (EMPTY, BROKEN):
                self.skipped["empty" if length == EMPTY else "broken"] += 1
            elif length >= self.least:
                self.barren = 0
                starts = range(0, len(ids), self.body) if self.split else (0,)
                self.pending = [
                    self.source.special.around(ids[start : start + self.body]) for start in starts
                ]
        return self.pending.pop(0)

    def put_back(self, text):
        """Gives a window, or the rest of one, back: `next` returns it first."""
        self.pending.insert(0, text)

    def state(self):
        """Where the reader is."""
        if self.stream is None:
            self._open()
        return {
            "number": self.number,
            "shard": self.shard,
            "barren": self.barren,
            "skipped": dict(self.skipped),
            "pending": [text.tolist() for text in self.pending],
            "stream": self.before,
            "row": self.row,
        }

    def load_state(self, saved):
        """Goes on from a `state`."""
        self.number = saved["number"]
        self.shard = saved["shard"]
        self.barren = saved["barren"]
        self.skipped = dict(saved["skipped"])
        self.pending = [np.array(text, dtype=np.int64) for text in saved["pending"]]
        self._open(saved["stream"])
        self.row = saved["row"]
