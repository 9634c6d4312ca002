"""What several benchmarks share beside the clock of `neobert/throughput/timing.py`."""

import inspect
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest import mock

import torch

from neobert.common.arguments import Options
from neobert.common.errors import UserError
from neobert.common.results import environment, write_result


ROOT = Path(__file__).resolve().parents[1]
WORDS = "time year people way day man thing woman life child world school".split()


def benchmark(title, group):
    """Makes a script's `main(argv)` of the function that measures, which takes the options and
    gives (JSON values, page in markdown, what `environment` takes); writes OUTPUT.json and .md.

    Args:
        title: heading of the page.
        group: dataclass of the options, with `output`; `threads`, if it is a number, is for torch.
    """

    def script(measure):
        module = inspect.getmodule(measure)
        command = f"python -m benchmarks.{inspect.getmodulename(module.__file__)}"

        def main(argv=None, **more):
            options = Options(command, module.__doc__, (group,))
            (given,) = options.read(sys.argv[1:] if argv is None else argv)
            if isinstance(getattr(given, "threads", None), int):
                torch.set_num_threads(given.threads)
            data, page, made = measure(given, **more)
            print(write_result(given.output, title, environment(**made), data, page))
            return 0

        return main

    return script


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
