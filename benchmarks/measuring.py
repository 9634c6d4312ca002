"""How the benchmarks time: calls that are compared take turns, beside a plain matrix product; and
the largest batch that fits in memory.

A machine that is shared gets faster and slower. What takes turns in every repeat gets slower
together, so that the ratio of neighbouring measurements holds; the matrix product says how fast the
machine was then.
"""

import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..common.errors import UserError
from ..common.memory import PeakMemory
from .throughput_sets import make_batch


# Sides of the square matrix product that is taken for the machine's own rate (the fastest counts),
# and how long it runs before and after
# every timed call.
GEMM_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
GEMM_SECONDS = 0.1
# "processor" counts the CPU seconds of this process, those of all its threads together: it means
# something for one thread.
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def synchronise(device):
    """Waits until the device has done what it was given."""
    if str(device).startswith("cuda"):
        torch.cuda.synchronize()


def quartiles(values):
    """First and third quartile; the lowest and the highest of fewer than three values."""
    return statistics.quantiles(values, n=4)[::2] if len(values) > 2 else [min(values), max(values)]


def between(pair, form=",.0f"):
    """A range in words, "1 to 2", both in `form`."""
    return " to ".join(f"{value:{form}}" for value in pair)


def mib(count):
    """Bytes in MiB for a table; "" for None."""
    return "" if count is None else f"{count / 2**20:,.0f}"


def weight_megabytes(folder):
    """Size of the weights of a Hub folder, in 10^6 bytes."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e6


def ratio(others, mine):
    """How many times as long the others took: the median over repeats, and its quartiles.

    Args:
        others, mine: seconds of the same repeats. The ratio is that of neighbours, from which a
            change of the machine's pace cancels.
    """
    each = [other / own for other, own in zip(others, mine)]
    return {"ratio": statistics.median(each), "quartiles": quartiles(each)}


class MatrixProduct:
    """The machine's own rate: an n x n by n x n product in the same dtype, n chosen as the fastest
    of a few."""

    def __init__(self, device, dtype, clock=time.perf_counter):
        self.device, self.clock = str(device), clock
        rates = {}
        for size in GEMM_SIZES[self.device.partition(":")[0]]:
            self._prepare(size, dtype)
            rates[size] = max(self() for _ in range(5))
        self.size = max(rates, key=rates.get)
        self._prepare(self.size, dtype)

    def _prepare(self, size, dtype):
        self.left, self.right = (
            torch.randn(size, size, device=self.device).to(dtype) for _ in range(2)
        )

    def __call__(self, seconds=0.0):
        """Floating-point operations per second, over at least `seconds`."""
        size, count = self.left.shape[0], 0
        synchronise(self.device)
        start = self.clock()
        while count == 0 or self.clock() - start < seconds:
            torch.mm(self.left, self.right)
            count += 1
            synchronise(self.device)
        return 2 * size**3 * count / (self.clock() - start)


@dataclass
class Timing:
    """Seconds of every repeat of one call, and the matrix product's rate (FLOP/s) at that time,
    where there was one."""

    seconds: list = field(default_factory=list)
    rates: list = field(default_factory=list)

    def add(self, seconds, rate):
        self.seconds.append(seconds)
        if rate is not None:
            self.rates.append(rate)

    def per_second(self, amount):
        """{"median", "quartiles"} of `amount` (tokens, operations) a second."""
        speeds = [amount / second for second in self.seconds]
        return {"median": statistics.median(speeds), "quartiles": quartiles(speeds)}

    def share(self, operations):
        """The median share of the matrix product's rate at which `operations` were done."""
        return statistics.median(
            operations / second / rate for second, rate in zip(self.seconds, self.rates)
        )


def timed(call, device="cpu", product=None, clock=time.perf_counter):
    """(seconds of one call, the matrix product's rate around it or None)."""
    before = product(GEMM_SECONDS) if product else None
    synchronise(device)
    start = clock()
    call()
    synchronise(device)
    seconds = clock() - start
    return seconds, (before + product(GEMM_SECONDS)) / 2 if product else None


def in_turns(calls, repeats, device="cpu", product=None, clock=time.perf_counter, progress=None):
    """Times functions without arguments, each once in every repeat.

    Args:
        calls: {name: function}.
        product: a `MatrixProduct` measured around every call, or None.
        progress: called after each.
    Returns:
        ({name: Timing}, whether it was interrupted). After an interrupt complete repeats are kept.
    Raises:
        KeyboardInterrupt: there is not one complete repeat.
    """
    timings, interrupted = {name: Timing() for name in calls}, False
    try:
        for _ in range(repeats):
            for name, call in calls.items():
                timings[name].add(*timed(call, device, product, clock))
                if progress:
                    progress()
    except KeyboardInterrupt:
        interrupted, complete = True, min(len(timing.seconds) for timing in timings.values())
        if not complete:
            raise
        timings = {
            name: Timing(t.seconds[:complete], t.rates[:complete]) for name, t in timings.items()
        }
    return timings, interrupted


def out_of_memory(error):
    """Whether an exception says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and (
        "out of memory" in str(error) or "can't allocate memory" in str(error)
    )


def largest_batch(attempt, limit):
    """Largest number of texts, 1 to `limit`, for which `attempt(count)` is true: doubling, then
    halving the gap to an eighth.

    Returns:
        the number; 0 if not even one text fits.
    """
    good, bad = 0, None
    count = 1
    while bad is None and good < limit:
        if attempt(count):
            good, count = count, min(2 * count, limit)
        else:
            bad = count
    while bad is not None and bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if attempt(middle) else (good, middle)
    return good


@dataclass(frozen=True)
class BatchLimit:
    """What a batch may hold: texts, padded tokens, and bytes beyond the weights on the CPU (None:
    half of what is free)."""

    texts: int
    tokens: int
    memory: int | None = None

    def most(self, lengths):
        """Largest number of texts that keeps to the texts and the padded tokens; at least 1."""
        limit = self.texts
        while limit > 1 and limit * max(lengths(limit)) > self.tokens:
            limit -= 1
        return limit

    def search(self, run, lengths, device):
        """Largest number of texts that fits.

        On the CPU the peak of one attempt predicts that of others: a batch that surely fits, or
        surely does not, is not run.

        Args:
            run: takes a `Batch`.
            lengths: function of a number of texts.
        """
        cpu = not device.startswith("cuda")
        # Half of what is free: an attempt has at most twice the texts of one that fitted.
        budget = self.memory or _available_memory() / 2

        def attempt(count):
            try:
                with PeakMemory(device) as peak, torch.inference_mode():
                    run(make_batch(lengths(count), device))
                    synchronise(device)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                return False
            finally:
                if not cpu:
                    torch.cuda.empty_cache()
            return not cpu or (peak.growth or 0) <= budget

        return largest_batch(attempt, self.most(lengths))


def _available_memory():
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        return 4 * 2**30


def in_a_process(function, *arguments, variables=None):
    """Calls a function of a module in a fresh process, which ends afterwards: its peak memory is
    its own.

    Args:
        function, arguments: what pickle takes; the arguments and the result as well.
        variables: environment variables of that process.
    Raises:
        what the function raises; UserError if the process was killed.
    """
    before = {name: os.environ.get(name) for name in variables or {}}
    os.environ.update(variables or {})
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        raise UserError(
            "a measurement's process was killed, most often because memory ran out; measure "
            "something smaller"
        ) from None
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
