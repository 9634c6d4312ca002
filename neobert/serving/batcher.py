"""Queue of tokenized texts that a model processes in batches with a token budget."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.exceptions import HTTPException

from .metrics import Metrics


SequenceT = TypeVar("SequenceT", bound=Sized)
ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Job(Generic[SequenceT, ResultT]):
    """Texts of one request.

    Attributes:
        sequences: Tokenized texts.
        future: Result of the request.
        results: Results of the texts that are finished, {index: result}.
        position: Index of the first text that is still in the queue.
    """

    sequences: Sequence[SequenceT]
    future: "asyncio.Future[list[ResultT]]"
    results: dict[int, ResultT]
    position: int = 0


class Batcher(Generic[SequenceT, ResultT]):
    """Queue in front of a model, which processes the texts of all requests, oldest first.

    A request whose task is cancelled leaves the queue at once. If a batch fails, its texts are
    processed one by one, so a request fails only because of its own texts.

    Args:
        name: Label of the metrics.
        function: Function from a list of sequences to a list with one result each.
        executor: Executor of one thread, in which `function` runs.
        batch_tokens: Maximum number of tokens per batch; a longer text is a batch of its own.
        queue_tokens: Maximum number of tokens in the queue.
        metrics: Metrics of the process.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[list[SequenceT]], Sequence[ResultT]],
        executor: Executor,
        batch_tokens: int,
        queue_tokens: int,
        metrics: Metrics,
    ) -> None:
        self.name = name
        self.function = function
        self.executor = executor
        self.batch_tokens = batch_tokens
        self.queue_tokens = queue_tokens
        self.metrics = metrics
        # Tokens and requests in the queue, with those of the running batch.
        self.tokens = 0
        self.requests = 0
        self._jobs: deque[_Job[SequenceT, ResultT]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def run(self, sequences: Sequence[SequenceT]) -> list[ResultT]:
        """Return the result of each sequence.

        Raises:
            HTTPException: 413 if the sequences never fit into the queue, 429 if the queue is full.
        """
        # A request that is too large for an empty queue would be retried without end after a 429.
        tokens = sum(map(len, sequences))
        if tokens > self.queue_tokens:
            raise HTTPException(
                413,
                f"a request must have at most {self.queue_tokens} tokens, got {tokens}. Send fewer "
                "texts per request.",
            )
        if self.tokens + tokens > self.queue_tokens:
            raise HTTPException(
                429,
                f"the queue must have at most {self.queue_tokens} tokens, got {self.tokens} and "
                f"{tokens} of this request. Retry later.",
                {"Retry-After": "1"},
            )

        job = _Job[SequenceT, ResultT](sequences, asyncio.get_running_loop().create_future(), {})
        self._jobs.append(job)
        self._update_queue_size(tokens, 1)
        # The task ends with the queue, and a later request starts another one.
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        # A request that is cancelled while it waits leaves the queue, too.
        try:
            return await job.future
        finally:
            self._remove(job)
            self._update_queue_size(0, -1)

    async def _work(self) -> None:
        """Process batches until the queue is empty."""
        while batch := self._next_batch():
            tokens = sum(len(job.sequences[index]) for job, index in batch)
            start = time.perf_counter()
            outcomes = await self._process(batch)

            self.metrics.batch_seconds.labels(self.name).observe(time.perf_counter() - start)
            self.metrics.batch_texts.labels(self.name).observe(len(batch))
            self.metrics.batch_tokens.labels(self.name).observe(tokens)
            self.metrics.tokens.labels(self.name).inc(tokens)

            for (job, index), outcome in zip(batch, outcomes, strict=True):
                self._finish(job, index, outcome)
            # Tokens of the running batch count as part of the queue until here.
            self._update_queue_size(-tokens, 0)

    def _next_batch(self) -> list[tuple[_Job[SequenceT, ResultT], int]]:
        """Take the oldest texts from the queue, as many as fit into a batch."""
        batch: list[tuple[_Job[SequenceT, ResultT], int]] = []
        tokens = 0
        while self._jobs:
            job = self._jobs[0]
            tokens += len(job.sequences[job.position])
            # The first text is always taken, even if it exceeds the budget.
            if batch and tokens > self.batch_tokens:
                break

            batch.append((job, job.position))
            job.position += 1
            if job.position == len(job.sequences):
                self._jobs.popleft()
        return batch

    async def _process(
        self, batch: list[tuple[_Job[SequenceT, ResultT], int]]
    ) -> list[ResultT | Exception]:
        """Return the result of each text of a batch, or the exception that it raised."""
        sequences = [job.sequences[index] for job, index in batch]
        # The model runs in its own thread, so the event loop can accept requests meanwhile.
        loop = asyncio.get_running_loop()
        try:
            return list(await loop.run_in_executor(self.executor, self.function, sequences))
        except Exception as error:
            if len(batch) == 1:
                return [error]

        # One text may have failed the batch, so each text is processed alone.
        outcomes: list[Any] = []
        for item in batch:
            outcomes += await self._process([item])
        return outcomes

    def _finish(
        self, job: _Job[SequenceT, ResultT], index: int, outcome: ResultT | Exception
    ) -> None:
        """Store the result of a text, and complete its request after the last one."""
        if job.future.done():
            # The request was cancelled, or another of its texts has failed.
            return

        # A request fails as a whole, and its other texts leave the queue.
        if isinstance(outcome, Exception):
            self._remove(job)
            job.future.set_exception(outcome)
            return

        # The texts of a request may be in several batches.
        job.results[index] = outcome
        if len(job.results) == len(job.sequences):
            job.future.set_result([job.results[i] for i in range(len(job.sequences))])

    def _remove(self, job: _Job[SequenceT, ResultT]) -> None:
        """Remove the texts of a request that are still in the queue."""
        # `_next_batch` has removed a request whose texts are all in a batch.
        if job in self._jobs:
            self._jobs.remove(job)
            self._update_queue_size(-sum(map(len, job.sequences[job.position :])), 0)

    def _update_queue_size(self, tokens: int, requests: int) -> None:
        """Add numbers of tokens and requests, which may be negative, to the size of the queue."""
        self.tokens += tokens
        self.requests += requests
        self.metrics.queue_tokens.labels(self.name).set(self.tokens)
        self.metrics.queue_requests.labels(self.name).set(self.requests)
