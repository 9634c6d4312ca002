"""Micro-batches straight from a streamed data set: tokenised while training, resumed exactly without reading everything again.

Every process reads its own share of the stream. Where the stream stands is taken down every `SNAPSHOT_EVERY` micro-batches and travels with the
batch; a checkpoint keeps the last one, and a resumed run goes on from it and skips the few batches after it.
"""

import json
import logging

import numpy as np
import torch
from datasets.distributed import split_dataset_by_node

from ..recipe import UserError
from .batching import check_batch, generator_for, pack, pad
from .pretraining_data import BROKEN, EMPTY, Tokenise


SNAPSHOT_EVERY = 50
STATE = "stream_state"
# A buffer of one row holds none between two reads, so nothing is lost.
logging.getLogger("datasets.iterable_dataset").addFilter(lambda record: "without the buffer content" not in record.getMessage())
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
        rows = split_dataset_by_node(rows, rank=rank, world_size=world_size) if world_size > 1 else rows
        tokens = rows.map(self.tokenise, batched=True, batch_size=64, remove_columns=["text"])
        # Each part reads the stream on its own; shards come in another order every epoch.
        self.sources = [_Source(tokens, least, (seed, number)) for number, least in enumerate(self.least)]
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
    """Endless texts of at least `least` tokens from a stream, with what was put back and a state that JSON holds."""

    def __init__(self, tokens, least, seed):
        self.tokens, self.least = tokens, least
        self.seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self.epoch, self.pending, self.skipped, self.stream, self.rows = 0, [], {"empty": 0, "broken": 0}, None, None
        self.found = False

    def _open(self, saved=None):
        # A buffer of one row: only the order of the shards is shuffled, which a saved state brings back exactly.
        self.stream = self.tokens.shuffle(seed=self.seed + self.epoch, buffer_size=1)
        if saved is not None:
            self.stream.load_state_dict(saved)
        self.rows = iter(self.stream)

    def next(self, windows):
        """The next window; a new epoch begins when the stream ends."""
        while not self.pending:
            if self.rows is None:
                self._open()
            row = next(self.rows, None)
            if row is None:
                if not self.found:
                    raise UserError(f"the data has no text of at least {max(self.least, 1)} tokens")
                self.epoch, self.found = self.epoch + 1, False
                self._open()
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
            "found": self.found,
            "pending": [text.tolist() for text in self.pending],
            "skipped": dict(self.skipped),
            "stream": self.stream.state_dict(),
        }

    def load(self, saved):
        self.epoch, self.found, self.skipped = saved["epoch"], saved["found"], dict(saved["skipped"])
        self.pending = [np.array(text, dtype=np.int64) for text in saved["pending"]]
        self._open(saved["stream"])
