"""Helpers that several benchmarks share: options, result files, texts and separate processes."""

import dataclasses
import inspect
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from neobert.common.environment import environment
from neobert.common.errors import UserError
from neobert.common.options import OptionGroup, OptionParser
from neobert.common.results import write_result


ROOT = Path(__file__).resolve().parents[1]
# Words that are one token each in the bundled tokenizer.
WORDS = "time year people way day man thing woman life child world school".split()

ResultT = TypeVar("ResultT")


def option_parser(
    module: str, description: str | None, group: type[OptionGroup]
) -> OptionParser[Any]:
    """Return the parser of a script whose options are one group, `read(argv).group`.

    Args:
        module: Name of the script in this folder.
        description: Description of the script for `--help`.
        group: Frozen dataclass of the options.
    """
    options = dataclasses.make_dataclass("ScriptOptions", [("group", group)], frozen=True)
    return OptionParser(f"python -m benchmarks.{module}", description or "", options)


def benchmark(
    title: str, group: type[OptionGroup]
) -> Callable[[Callable[..., tuple[dict[str, Any], str, dict[str, Any]]]], Callable[..., int]]:
    """Turn a function that measures into the `main(argv)` of a script.

    The decorated function takes the options, and returns the data of the JSON file, the text of the
    page in markdown, and the arguments of `environment`. The script writes OUTPUT.json and
    OUTPUT.md, and prints the page.

    Args:
        title: Heading of the page.
        group: Frozen dataclass of the options, with the option `output`. If there is an option
            `threads` with one number, it sets the number of torch's threads.
    """

    def script(
        measure: Callable[..., tuple[dict[str, Any], str, dict[str, Any]]],
    ) -> Callable[..., int]:
        path = inspect.getfile(measure)
        # The name and the description in `--help` are those of the script's module.
        description = inspect.getdoc(inspect.getmodule(measure))
        parser = option_parser(inspect.getmodulename(path) or path, description, group)

        def main(argv: Sequence[str] | None = None, **more: Any) -> int:
            options = parser.read(sys.argv[1:] if argv is None else argv).group
            # A script with several numbers of threads sets them itself.
            threads = getattr(options, "threads", None)
            if isinstance(threads, int):
                torch.set_num_threads(threads)

            data, page, recorded = measure(options, **more)
            print(write_result(options.output, title, environment(**recorded), data, page))
            return 0

        return main

    return script


def equal_texts(count: int, generator: random.Random) -> list[str]:
    """Return texts of 60 random words, each of which is one token."""
    return [" ".join(generator.choices(WORDS, k=60)) for _ in range(count)]


def mib(count: float | None) -> str:
    """Return a number of bytes in MiB for a table, "" for None."""
    return "" if count is None else f"{count / 2**20:,.0f}"


def run_in_process(
    function: Callable[..., ResultT],
    *arguments: Any,
    variables: Mapping[str, str] | None = None,
) -> ResultT:
    """Call a function in a new process, so its peak memory is that of this call.

    Args:
        function: Function of a module. Its result must be picklable.
        *arguments: Arguments of the function, which must be picklable.
        variables: Environment variables of the process.

    Raises:
        UserError: If the process was killed. Exceptions of the function are raised as they are.
    """
    # A forked process would share the memory of this one, which would distort the peak.
    context = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, variables or {}), ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise UserError(
                "the process of a measurement was killed, most likely because it ran out of "
                "memory. Measure a smaller case."
            ) from None
