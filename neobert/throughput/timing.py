"""How speed is measured: calls that are compared take turns, beside a plain matrix product.

A machine that is shared gets faster and slower. What takes turns in every repeat gets slower
together, so that the ratio of neighbouring measurements holds; the matrix product says how fast the
machine was then.
"""

import statistics
import time
from dataclasses import dataclass, field

import torch
from torch.utils import benchmark


# Sides of the square matrix product that is taken for the machine's own rate (the fastest counts),
# and how long it runs before and after every timed call.
GEMM_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
GEMM_SECONDS = 0.1
# torch's timer waits for the GPU. "processor" counts the CPU seconds of all threads of this process
# together: it means something for one thread.
CLOCKS = {"wall": benchmark.timer, "processor": time.process_time}


def quartiles(values):
    """First and third quartile; the lowest and the highest of fewer than three values."""
    return statistics.quantiles(values, n=4)[::2] if len(values) > 2 else [min(values), max(values)]


def between(pair, form=",.0f"):
    """A range in words, "1 to 2", both in `form`."""
    return " to ".join(f"{value:{form}}" for value in pair)


def ratio(others, mine):
    """How many times as long the others took: the median over repeats, and its quartiles.

    Args:
        others, mine: seconds of the same repeats. The ratio is that of neighbours, from which a
            change of the machine's pace cancels.
    """
    each = [other / own for other, own in zip(others, mine)]
    return {"ratio": statistics.median(each), "quartiles": quartiles(each)}


class MatrixProduct:
    """The machine's own rate: an n x n by n x n product, n chosen as the fastest of a few.

    Args:
        device, dtype: of the matrices.
        clock: one of `CLOCKS`.
        threads: by default those that torch has now.
    """

    def __init__(self, device, dtype, clock=CLOCKS["wall"], threads=None):
        products = {}
        for size in GEMM_SIZES[str(device).partition(":")[0]]:
            left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            products[size] = benchmark.Timer(
                "torch.mm(left, right)",
                globals={"torch": torch, "left": left, "right": right},
                timer=clock,
                num_threads=threads or torch.get_num_threads(),
            )
        times = {size: timer.timeit(3).median / size**3 for size, timer in products.items()}
        self.size = min(times, key=times.get)
        self.timer = products[self.size]

    def __call__(self):
        """Floating-point operations per second, over at least `GEMM_SECONDS`."""
        seconds = self.timer.blocked_autorange(min_run_time=GEMM_SECONDS).mean
        return 2 * self.size**3 / seconds


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


def timed(call, product=None, clock=CLOCKS["wall"]):
    """(seconds of one call, the matrix product's rate around it or None)."""
    rate_before = product() if product else None
    start = clock()
    call()
    seconds = clock() - start
    return seconds, (rate_before + product()) / 2 if product else None


def in_turns(calls, repeats, product=None, clock=CLOCKS["wall"], progress=None):
    """Times functions without arguments, each once in every repeat.

    Args:
        calls: {name: function}.
        product: a `MatrixProduct` measured around every call, or None.
        progress: called after each.
    Returns:
        {name: `Timing`}.
    """
    timings = {name: Timing() for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            timings[name].add(*timed(call, product, clock))
            if progress:
                progress()
    return timings
