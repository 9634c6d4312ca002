"""Micro-batches from a stream of rows, tokenized during training by several workers.

The readers of a run are the loader workers of all its processes. The files of a source are
distributed over the readers; if there are fewer files than readers, the rows are.

`datasets` tracks its read position. Each batch carries that state, checkpoints store it, and a
resumed run continues from it with identical batches.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from datasets import Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from .batches import MIXTURE_STREAM, add_boundaries, boundary_tokens, masked_batch
from .masking import TokenMasking
from .options import DEFAULT_MICRO_BATCH_SIZE, BatchOptions
from .prepared import token_ids


# Number of rows that are tokenized together.
ROWS_AT_ONCE = 64

# Key of the state of a worker in its batches.
STATE = "stream_state"

# A reader gives up if this number of complete epochs over a source yields no text.
MAX_EMPTY_EPOCHS = 2


class ReaderState(TypedDict):
    """State of a `TextReader` in JSON types; lists contain one item per source.

    The keys are part of the checkpoint format.

    Attributes:
        sampled: Number of texts that were sampled.
        pending: Tokens of the text that comes next, or None.
        epochs: Number of complete epochs.
        files: Number of files that were read in the current epoch.
        positions: Position of `datasets` in the open file, or None if no file is open.
    """

    sampled: int
    pending: list[int] | None
    epochs: list[int]
    files: list[int]
    positions: list[dict[str, Any] | None]


class WorkerState(TypedDict):
    """State of a loader worker in JSON types.

    Attributes:
        worker: Number of the worker.
        batch: Number of its next micro-batch, among those of its process.
        parts: State of the reader of each part of the mixture.
    """

    worker: int
    batch: int
    parts: list[ReaderState]


class StreamedBatches(torch.utils.data.IterableDataset):
    """Endless stream of the micro-batches of one process.

    Micro-batch i is a function of the data, the seed, the number of processes, the number of
    workers, and i. The masks and the mixture of the i-th micro-batch of a process are those of
    micro-batch i * world_size + rank of the run.

    Args:
        rows: Datasets with the column "text", one per source.
        sampling_weights: Sampling weights of the sources, which sum to 1; empty for a single
            source.
        tokenizer: Fast tokenizer.
        masking: Masking of the tokens.
        batch_options: Size and layout of the batches.
        seed: Random seed of the order, the mixture and the masks.
        count: Number of micro-batches of the run in all processes, for a schedule of the masking.
        rank: Rank of this process.
        world_size: Number of processes.
        workers: Number of workers of the DataLoader; with 0 the process itself reads.
    """

    def __init__(
        self,
        rows: Sequence[IterableDataset],
        sampling_weights: Sequence[float],
        tokenizer: PreTrainedTokenizerBase,
        masking: TokenMasking,
        batch_options: BatchOptions,
        seed: int,
        count: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
    ) -> None:
        self.rows = rows
        self.sampling_weights = sampling_weights or [1.0]
        self.tokenizer = tokenizer
        self.boundaries = boundary_tokens(tokenizer)
        self.masking = masking
        self.batch_options = batch_options
        self.seed = seed
        self.count = count
        self.rank = rank
        self.world_size = world_size
        self.workers = max(1, workers)
        # A uniform sample between two of these bounds selects a part of the mixture.
        self.mixture = np.cumsum([probability for _, probability in batch_options.parts])[:-1]
        self.start = 0
        self.saved: dict[int, WorkerState] = {}

    def load_state(
        self, states: Mapping[int, WorkerState] | Mapping[str, WorkerState], consumed: int
    ) -> None:
        """Continue with micro-batch `consumed` of this process.

        Args:
            states: State of each worker in its last batch before `consumed`, {worker: state}.
            consumed: Number of micro-batches of this process that were used for training.
        """
        self.start = consumed
        self.saved = {int(worker): state for worker, state in states.items()}

    def epochs(self, states: Collection[WorkerState]) -> float:
        """Return the number of complete epochs of this process.

        Args:
            states: Newest state of each worker.

        Returns:
            Mean over the workers, and over the sources with their sampling weights.
        """
        parts = [part for state in states for part in state["parts"]]
        total = sum(np.dot(self.sampling_weights, part["epochs"]) for part in parts)
        return total / max(1, len(states))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the micro-batches of the current worker.

        Worker w computes micro-batches w, w + workers, w + 2 * workers, ... of this process, in the
        order in which a DataLoader requests them.
        """
        # The DataLoader starts with its first worker, whichever worker the first batch belongs to.
        info = torch.utils.data.get_worker_info()
        loader_worker = 0 if info is None else info.id
        return self.worker_batches((self.start + loader_worker) % self.workers)

    def worker_batches(self, worker: int) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches of one worker, starting after those that were consumed."""
        readers = [self.text_reader(part, worker) for part in range(len(self.batch_options.parts))]
        # The checkpoint contains the state of each worker after its last batch that was used.
        i = worker
        if worker in self.saved:
            i = self.saved[worker]["batch"]
            for reader, state in zip(readers, self.saved[worker]["parts"]):
                reader.load_state(state)

        while True:
            # Number of the micro-batch among those of all processes.
            number = i * self.world_size + self.rank
            sample = np.random.default_rng([self.seed, *MIXTURE_STREAM, number]).random()
            reader = readers[int(np.searchsorted(self.mixture, sample, side="right"))]
            texts = next_texts(reader, self.batch_options)
            batch = masked_batch(
                texts, self.batch_options, self.masking, self.seed, number, number / self.count
            )

            # The state is attached to its batch, because batches that a worker has prepared in
            # advance are lost in an interruption. A checkpoint must contain the state after the
            # last batch that the model was trained on.
            i += self.workers
            states = [reader.state() for reader in readers]
            batch[STATE] = json.dumps({"worker": worker, "batch": i, "parts": states})
            yield batch

    def text_reader(self, part: int, worker: int) -> "TextReader":
        """Return the reader of a worker for one part of the mixture.

        Each part of the mixture reads the stream separately.

        Args:
            part: Number of the part of the mixture.
            worker: Number of the worker in this process.
        """
        min_tokens = self.batch_options.parts[part][0]
        splitter = _WindowSplitter(self.tokenizer, self.boundaries, self.batch_options, min_tokens)
        # Readers are numbered over the processes first, so all processes get files if there
        # are few of them.
        reader = worker * self.world_size + self.rank
        reader_count = self.workers * self.world_size
        # The readers of a source have the same seed, because they share one order of the files.
        sources = [
            SourceReader(rows, splitter, (self.seed, part, source), reader, reader_count)
            for source, rows in enumerate(self.rows)
        ]
        return TextReader(sources, self.sampling_weights, (self.seed, part, reader), min_tokens)


def next_texts(reader: "TextReader", batch_options: BatchOptions) -> list[np.ndarray]:
    """Read the texts of one micro-batch.

    Args:
        reader: Reader of the texts.
        batch_options: Size and layout of the batches.

    Returns:
        Token ids of each text, int64; for "packed_without_boundaries" a single array of all tokens.
    """
    budget = batch_options.micro_batch_tokens
    if budget is None:
        count = batch_options.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE
        return [reader.next() for _ in range(count)]

    texts: list[np.ndarray] = []
    total = 0
    if batch_options.layout == "packed":
        # The text that exceeds the budget is the first one of the next batch.
        while total + len(text := reader.next()) <= budget:
            texts.append(text)
            total += len(text)
        reader.pending = text
        return texts

    # The last text is split at the end of the batch, and the next batch starts with the remainder.
    while total < budget:
        texts.append(reader.next())
        total += len(texts[-1])
    if total > budget:
        reader.pending = texts[-1][budget - total :]
    return [np.concatenate(texts)[:budget]]


class TextReader:
    """Endless texts of one reader from weighted sources.

    The source of the k-th text is sampled by a function of the seed and k.

    Args:
        sources: Reader of each source.
        sampling_weights: Sampling weights of the sources, which sum to 1.
        seed: Random seed, which differs between readers.
        min_tokens: Minimum number of tokens of a text, for the error message.

    Attributes:
        sampled: Number of texts that were sampled.
        pending: Text, or remainder of a text, that `next` returns first, or None.
    """

    def __init__(
        self,
        sources: Sequence["SourceReader"],
        sampling_weights: Sequence[float],
        seed: tuple[int, ...],
        min_tokens: int,
    ) -> None:
        self.sources = sources
        self.bounds = np.cumsum(sampling_weights)[:-1]
        self.seed = seed
        self.min_tokens = min_tokens
        self.sampled = 0
        self.pending: np.ndarray | None = None

    def next(self) -> np.ndarray:
        """Return the token ids of the next text with special tokens, int64.

        Raises:
            UserError: If the sampled source contains no text that is long enough.
        """
        if self.pending is not None:
            text = self.pending
            self.pending = None
            return text

        # A sample that is a function of its number needs no generator state in the checkpoint.
        sample = np.random.default_rng([*self.seed, self.sampled]).random()
        self.sampled += 1
        source = self.sources[int(np.searchsorted(self.bounds, sample, side="right"))]
        next_text = source.next()
        if next_text is None:
            raise UserError(self._no_text_message(source.reader_count))
        return next_text

    def _no_text_message(self, reader_count: int) -> str:
        """Return the message about a source without a text that is long enough.

        Args:
            reader_count: Number of readers that share the source.
        """
        message = f"the stream contains no text of at least {max(self.min_tokens, 1)} tokens"
        if reader_count > 1:
            message += f" in the part of one of {reader_count} data loader workers"
        message += ". Pass other texts"
        if self.min_tokens:
            message += ", or lower the length in `mixture`"
        if reader_count > 1:
            message += (
                ". Other workers may have such texts: use fewer processes or a smaller "
                "--dataloader-num-workers, or tokenize the texts first with --prepare"
            )
        return f"{message}."

    def state(self) -> ReaderState:
        """Return the position in all sources in JSON types."""
        return {
            "sampled": self.sampled,
            "pending": None if self.pending is None else self.pending.tolist(),
            "epochs": [source.epoch for source in self.sources],
            "files": [source.file for source in self.sources],
            "positions": [source.position() for source in self.sources],
        }

    def load_state(self, state: ReaderState) -> None:
        """Continue from the result of `state`."""
        self.sampled = state["sampled"]
        if state["pending"] is not None:
            self.pending = np.array(state["pending"], dtype=np.int64)
        positions = zip(state["epochs"], state["files"], state["positions"])
        for source, (epoch, file, position) in zip(self.sources, positions):
            source.seek(epoch, file, position)


class SourceReader:
    """Endless texts of one reader from one source.

    Each reader has its own files, in a different order in each epoch. If there are fewer files
    than readers, all readers read all files and share their rows.

    Args:
        rows: Dataset with the column "text"; its shards are the files.
        splitter: `map` function that converts rows of text to token ids.
        seed: Random seed, the same for all readers.
        reader: Number of this reader.
        reader_count: Number of readers.

    Attributes:
        epoch: Number of complete epochs.
        file: Number of files that were read in the current epoch.
    """

    def __init__(
        self,
        rows: IterableDataset,
        splitter: "_WindowSplitter",
        seed: tuple[int, ...],
        reader: int,
        reader_count: int,
    ) -> None:
        self.rows = rows
        self.splitter = splitter
        self.seed = seed
        self.reader = reader
        self.reader_count = reader_count
        self.epoch = 0
        self.file = 0
        self._texts: IterableDataset | None = None
        self._iterator: Iterator[dict[str, list[list[int]]]] | None = None
        self._resumed_position: dict[str, Any] | None = None

    def next(self) -> np.ndarray | None:
        """Return the token ids of the next text, int64, or None if there is no text to be read."""
        # The current epoch may have begun before, so MAX_EMPTY_EPOCHS complete epochs are read
        # after the current epoch.
        last_epoch = self.epoch + MAX_EMPTY_EPOCHS
        while self.epoch <= last_epoch:
            if self._iterator is None:
                self._iterator = self._open()
            row = next(self._iterator, None)
            if row is not None:
                self._resumed_position = None
                return np.array(row["input_ids"][0], dtype=np.int64)
            self._close()
        return None

    def position(self) -> dict[str, Any] | None:
        """Return the position of `datasets` in the open file, or None if no file is open."""
        # Until the first row of a resumed file, `datasets` reports the start of the file.
        if self._resumed_position is not None or self._texts is None:
            return self._resumed_position
        return self._texts.state_dict()

    def seek(self, epoch: int, file: int, position: dict[str, Any] | None) -> None:
        """Continue from a position.

        Args:
            epoch: Number of complete epochs.
            file: Number of files that were read in this epoch.
            position: Result of `position`.
        """
        self.epoch = epoch
        self.file = file
        if position is not None:
            self._iterator = self._open(position)

    def _open(self, position: dict[str, Any] | None = None) -> Iterator[dict[str, list[list[int]]]]:
        """Open the current file, from its start or from a position, and return its rows."""
        # With as many shards as files, each shard is one file.
        rows = self.rows.shard(self.rows.num_shards, int(self._file_order()[self.file]))
        if self.rows.num_shards < self.reader_count:
            rows = rows.filter(self._is_row_of_reader, with_indices=True)
        self._texts = rows.map(
            self.splitter,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=["text"],
            features=Features({"input_ids": List(Value("int32"))}),
        )
        if position is not None:
            self._texts.load_state_dict(position)
            self._resumed_position = position

        # Read one row at a time: the state of a larger batch would point past rows that are not
        # used yet.
        return self._texts.iter(batch_size=1)

    def _close(self) -> None:
        """Close the current file, which has been read, and proceed to the next one."""
        self._texts = None
        self._iterator = None
        self._resumed_position = None
        self.file += 1
        if self.file == len(self._file_order()):
            self.epoch += 1
            self.file = 0

    def _file_order(self) -> np.ndarray:
        """Return the numbers of this reader's files in the order of the current epoch."""
        count = self.rows.num_shards
        order = np.random.default_rng([*self.seed, self.epoch]).permutation(count)
        return order[self.reader :: self.reader_count] if count >= self.reader_count else order

    def _is_row_of_reader(self, row: dict[str, Any], number: int) -> bool:
        return number % self.reader_count == self.reader


class _WindowSplitter:
    """Batched `map` function that converts rows of text to windows of token ids.

    Windows contain the special tokens, and at most `max_length` tokens.

    Args:
        tokenizer: Fast tokenizer.
        boundaries: Ids of the tokens before and after every text.
        batch_options: Maximum length, and whether long texts are truncated or split.
        min_tokens: Minimum number of tokens of a text, including special tokens. Shorter texts are
            omitted.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        boundaries: tuple[int, int],
        batch_options: BatchOptions,
        min_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.boundaries = boundaries
        self.min_tokens = min_tokens
        self.body_length = batch_options.sequence_length - 2
        self.split = batch_options.long_texts == "split"

    def __call__(self, rows: dict[str, list[str | None]]) -> dict[str, list[np.ndarray]]:
        # A batched `map` may return more rows than it receives, or fewer.
        windows = []
        for ids in token_ids(self.tokenizer, [text or "" for text in rows["text"]]):
            if not ids or len(ids) + 2 < self.min_tokens:
                continue
            starts = range(0, len(ids), self.body_length) if self.split else (0,)
            for start in starts:
                windows.append(
                    add_boundaries(ids[start : start + self.body_length], self.boundaries)
                )
        return {"input_ids": windows}
