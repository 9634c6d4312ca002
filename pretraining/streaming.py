"""Micro-batches straight from a streamed data set: tokenised while training, resumed exactly without reading everything again.

Every process reads its own share of the stream. Where the stream stands is taken down every `SNAPSHOT_EVERY` micro-batches and travels with the
batch; a checkpoint keeps the last one, and a resumed run goes on from it and skips the few batches after it.
"""

import json

import numpy as np
import torch
from datasets.distributed import split_dataset_by_node

from ..common.errors import UserError
from .batching import check_batch, generator_for, pack, pad
from .pretraining_data import BROKEN, EMPTY, Tokenise


SNAPSHOT_EVERY = 50
STATE = "stream_state"
COUNTS = "stream_counts"


class StreamedBatches(torch.utils.data.IterableDataset):
    """Endless micro-batches of one process; micro-batch i depends on the data, the seed and i alone.

    Arguments as in `MicroBatches`, and:
        rows: `datasets.IterableDataset` with the column "text" (jsonl: undecoded lines).
        kind: what `load_rows` said of the source.
        first, last: ids before and after every text.
        rank, world_size: this process's share. Masks and mixture of its i-th batch are those of the run's (i * world_size + rank)-th.
    """

    def __init__(
        self, rows, kind, text_column, tokenizer, first, last, masking, layout, tokens_per_batch, texts_per_batch, max_length, long_texts,
        mixture, seed, rank=0, world_size=1,
    ):  # fmt: skip
        check_batch(layout, tokens_per_batch, texts_per_batch, max_length, mixture)
        self.tokenise = Tokenise(tokenizer, kind, text_column)
        self.pad_token_id, self.first, self.last, self.masking = tokenizer.pad_token_id, first, last, masking
        self.layout, self.tokens_per_batch, self.texts_per_batch = layout, tokens_per_batch, texts_per_batch
        self.max_length, self.split, self.seed, self.rank, self.world_size = max_length, long_texts == "split", seed, rank, world_size
        mixture = {0: 1.0} if mixture is None else {int(least): float(share) for least, share in mixture.items()}
        self.least, self.bounds = list(mixture), np.cumsum(list(mixture.values()))[:-1]
        tokens = rows.map(self.tokenise, batched=True, batch_size=64, remove_columns=["text"])
        # Each part reads the stream on its own.
        self.sources = [_Source(tokens, least, (seed, number), rank, world_size) for number, least in enumerate(self.least)]
        self.start, self.from_snapshot = 0, 0

    def load_state(self, state, consumed):
        """Continue with micro-batch `consumed` from a snapshot taken at or before it."""
        for source, saved in zip(self.sources, state["sources"]):
            source.load(saved)
        self.from_snapshot, self.start = state["batch"], consumed

    def state(self, i):
        """Where everything stands before micro-batch i, as JSON."""
        return {"batch": i, "sources": [source.state() for source in self.sources]}

    def _choose(self, number):
        draw = np.random.default_rng([self.seed, 20, 40, 40, number]).random()
        return int(np.searchsorted(self.bounds, draw, side="right"))

    def _texts(self, source):
        """Texts of one batch, special tokens included."""
        if self.layout == "padded":
            return [source.next(self._windows) for _ in range(self.texts_per_batch)]
        texts, total = [], 0
        if self.layout == "packed":
            while total + len(text := source.next(self._windows)) <= self.tokens_per_batch:
                texts.append(text)
                total += len(text)
            source.put_back(text)
            return texts
        while total < self.tokens_per_batch:
            texts.append(source.next(self._windows))
            total += len(texts[-1])
        surplus = total - self.tokens_per_batch
        if surplus:
            source.put_back(texts[-1][-surplus:])
        return [np.concatenate(texts)[: self.tokens_per_batch]]

    def _windows(self, ids):
        body = self.max_length - 2
        starts = range(0, len(ids), body) if self.split else (0,)
        return [np.array([self.first, *ids[start : start + body], self.last], dtype=np.int64) for start in starts]

    def __iter__(self):
        workers = torch.utils.data.get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise UserError(f"a streamed data set takes at most one loader worker, but dataloader_num_workers is {workers.num_workers}")
        i = self.from_snapshot
        while True:
            state = self.state(i) if i % SNAPSHOT_EVERY == 0 or i == self.start else None
            number = i * self.world_size + self.rank
            texts = self._texts(self.sources[self._choose(number)])
            if i >= self.start:
                if self.layout == "packed":
                    batch = pack(texts)
                elif self.layout == "padded":
                    batch = pad(texts, self.pad_token_id)
                else:
                    batch = {"input_ids": torch.from_numpy(texts[0]).view(-1, self.max_length)}
                batch["input_ids"], batch["labels"] = self.masking(batch["input_ids"], generator_for(self.seed, number))
                batch[COUNTS] = {name: sum(source.skipped[name] for source in self.sources) for name in ("empty", "broken")}
                if state is not None:
                    batch[STATE] = json.dumps(state)
                yield batch
            i += 1


class _Source:
    """Endless texts of at least `least` tokens from a stream, with what was put back and a state that JSON holds.

    Shards come one after another, in another order every epoch; a shuffle buffer would lose its rows in a resumption. Each process reads shards of its
    own where they can be dealt out evenly, else its own rows of every shard.
    """

    def __init__(self, tokens, least, seed, rank, world_size):
        self.tokens, self.least, self.seed, self.rank, self.world_size = tokens, least, seed, rank, world_size
        self.epoch, self.shard, self.pending, self.skipped, self.stream, self.rows = 0, 0, [], {"empty": 0, "broken": 0}, None, None
        self.found = False
        self.own_shards = tokens.num_shards % world_size == 0

    def _order(self):
        """This process's shards in this epoch's order."""
        order = np.random.default_rng([*self.seed, self.epoch]).permutation(self.tokens.num_shards)
        return order[self.rank :: self.world_size] if self.own_shards else order

    def _open(self, saved=None):
        self.stream = self.tokens.shard(num_shards=self.tokens.num_shards, index=int(self._order()[self.shard]))
        if not self.own_shards:
            self.stream = split_dataset_by_node(self.stream, rank=self.rank, world_size=self.world_size)
        if saved is not None:
            self.stream.load_state_dict(saved)
        self.rows = iter(self.stream)

    def _next_shard(self):
        self.shard += 1
        if self.shard == len(self._order()):
            if not self.found:
                raise UserError(f"the data has no text of at least {max(self.least, 1)} tokens")
            self.epoch, self.shard, self.found = self.epoch + 1, 0, False
        self._open()

    def next(self, windows):
        """The next window; a new epoch begins when the last shard ends."""
        while not self.pending:
            if self.rows is None:
                self._open()
            row = next(self.rows, None)
            if row is None:
                self._next_shard()
                continue
            length = row["length"]
            if length in (EMPTY, BROKEN):
                self.skipped["empty" if length == EMPTY else "broken"] += 1
            elif length >= self.least:
                self.found = True
                self.pending = windows(row["input_ids"])
        return self.pending.pop(0)

    def put_back(self, text):
        self.pending.insert(0, text)

    def state(self):
        if self.stream is None:
            self._open()
        return {
            "epoch": self.epoch,
            "shard": self.shard,
            "found": self.found,
            "pending": [text.tolist() for text in self.pending],
            "skipped": dict(self.skipped),
            "stream": self.stream.state_dict(),
        }

    def load(self, saved):
        self.epoch, self.shard, self.found, self.skipped = saved["epoch"], saved["shard"], saved["found"], dict(saved["skipped"])
        self.pending = [np.array(text, dtype=np.int64) for text in saved["pending"]]
        self._open(saved["stream"])
