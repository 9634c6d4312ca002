"""Test the queue of the server.

Batches keep the token budget and the order of the texts. A request that fails or is canceled does
not affect other requests.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.exceptions import HTTPException

from neobert.serving.batcher import Batcher
from neobert.serving.metrics import Metrics


@pytest.fixture
def executor():
    """Yield an executor of one thread, in which the model runs."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def make_batcher(function, executor, queue_tokens=33):
    """Return a queue of strings, each of which represents a text with one token per character.

    A batch has at most 10 tokens.
    """
    return Batcher("encoder", function, executor, 10, queue_tokens, Metrics())


def test_token_budget_order_and_full_queue(executor):
    """Texts are batched in order, and requests that do not fit into the queue are refused.

    A request that fits into an empty queue gets status 429, and a larger one status 413.
    """
    batches = []

    def function(texts):
        batches.append(texts)
        return [text.upper() for text in texts]

    async def run():
        batcher = make_batcher(function, executor)
        requests = [["aa", "bbb"], ["cccc", "dddd"], ["e" * 12], ["f"], ["g" * 8], ["h" * 34]]
        results = await asyncio.gather(*map(batcher.run, requests), return_exceptions=True)
        return results, batcher

    (first, second, long, last, full, never), batcher = asyncio.run(run())
    assert (first, second, long, last) == (["AA", "BBB"], ["CCCC", "DDDD"], ["E" * 12], ["F"])
    assert batches == [["aa", "bbb", "cccc"], ["dddd"], ["e" * 12], ["f"]]

    assert isinstance(full, HTTPException) and isinstance(never, HTTPException)
    assert (full.status_code, full.headers, never.status_code) == (429, {"Retry-After": "1"}, 413)
    assert "got 26 and 8 of this request" in full.detail and "got 34" in never.detail
    assert (batcher.tokens, batcher.requests) == (0, 0)


def test_failing_text_fails_only_its_own_request(executor):
    """A text that fails affects only its own request, even if it shares a batch with others."""
    batches = []

    def function(texts):
        batches.append(texts)
        if "bad" in texts:
            raise ValueError("bad text")
        return [text.upper() for text in texts]

    async def run():
        batcher = make_batcher(function, executor, 100)
        # The text "bad" shares a batch with the first request, and more texts of its own request
        # follow in later batches.
        requests = [["aa"], ["bad", "c" * 8, "d" * 8], ["ee", "ff"]]
        results = await asyncio.gather(*map(batcher.run, requests), return_exceptions=True)
        return results, batcher

    (first, failing, last), batcher = asyncio.run(run())
    assert (first, last) == (["AA"], ["EE", "FF"])
    assert isinstance(failing, ValueError) and str(failing) == "bad text"
    assert batches == [["aa", "bad"], ["aa"], ["bad"], ["ee", "ff"]], (
        "The remaining texts of the failed request must not be processed."
    )
    assert (batcher.tokens, batcher.requests) == (0, 0)


def test_a_cancelled_request_leaves_the_queue(executor):
    """The texts of a canceled request are removed from the queue, unless their batch is running."""
    computed = []
    may_finish = threading.Event()

    def function(texts):
        assert may_finish.wait(30)
        computed.extend(texts)
        return texts

    async def run():
        batcher = make_batcher(function, executor)
        running = asyncio.create_task(batcher.run(["first", "i" * 6]))
        cancelled = asyncio.create_task(batcher.run(["cancelled", "j" * 9]))
        waiting = asyncio.create_task(batcher.run(["last"]))
        while batcher.tokens < 33:
            await asyncio.sleep(0.001)

        running.cancel()
        cancelled.cancel()
        await asyncio.gather(running, cancelled, return_exceptions=True)
        # The first text is in the running batch. The other texts of the canceled requests have left
        # the queue before that batch ends, so that a new request fits.
        sizes = batcher.tokens, batcher.requests
        room = asyncio.create_task(batcher.run(["k" * 20]))
        await asyncio.sleep(0)
        may_finish.set()
        return sizes, await waiting, await room, batcher

    sizes, waiting, room, batcher = asyncio.run(run())
    assert sizes == (len("first") + len("last"), 1)
    assert (waiting, room) == (["last"], ["k" * 20])
    assert computed == ["first", "last", "k" * 20]
    assert (batcher.tokens, batcher.requests) == (0, 0)


def test_batch_and_queue_metrics(executor):
    """Check the metrics after one batch of three texts."""

    async def run():
        batcher = make_batcher(lambda texts: texts, executor)
        await asyncio.gather(batcher.run(["aaa", "bb"]), batcher.run(["cccc"]))
        return batcher.metrics.render().decode()

    text = asyncio.run(run())
    for line in (
        'neobert_tokens_total{model="encoder"} 9.0',
        'neobert_batch_texts_sum{model="encoder"} 3.0',
        'neobert_batch_tokens_sum{model="encoder"} 9.0',
        'neobert_batch_seconds_count{model="encoder"} 1.0',
        'neobert_queue_tokens{model="encoder"} 0.0',
    ):
        assert line in text.splitlines()
