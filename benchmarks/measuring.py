"""What several benchmarks share beside the clock of `throughput/timing.py`."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from unittest import mock

from ..common.errors import UserError


WORDS = "time year people way day man thing woman life child world school".split()


def equal_texts(count, draw):
    """`count` texts of 60 words, each a token; `draw` is a random.Random."""
    return [" ".join(draw.choices(WORDS, k=60)) for _ in range(count)]


def mib(count):
    """Bytes in MiB for a table; "" for None."""
    return "" if count is None else f"{count / 2**20:,.0f}"


def in_a_process(function, *arguments, variables=None):
    """Calls a function of a module in a fresh process, which ends afterwards: its peak memory is
    its own.

    Args:
        function, arguments: what pickle takes; the result as well.
        variables: environment variables of that process.
    Raises:
        what the function raises; UserError if the process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, variables or {}), ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise UserError(
                "a measurement's process was killed, most often because memory ran out; measure "
                "something smaller"
            ) from None
