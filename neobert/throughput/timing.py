"""Timing of calls that take turns, together with a plain matrix product.

The speed of a shared machine changes over time. Calls that take turns in every repeat are slowed
down together, so ratios between neighboring measurements remain valid. The matrix product
measures the speed of the machine at that time.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch.utils import benchmark


# Sizes N of the square matrix product, of which the fastest is used, and the duration in seconds
# for which the product runs before and after every timed call.
GEMM_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
GEMM_SECONDS = 0.1

Clock = Callable[[], float]

# The timer of torch waits for the GPU. "processor" is the CPU time of all threads of this process,
# which is meaningful for one thread.
CLOCKS: dict[str, Clock] = {"wall": benchmark.timer, "processor": time.process_time}


class Ratio(TypedDict):
    """Median and quartiles of a ratio of times, over the repeats."""

    ratio: float
    quartiles: list[float]


class Speed(TypedDict):
    """Median and quartiles of a speed, over the repeats."""

    median: float
    quartiles: list[float]


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and third quartile, or the range of fewer than three values."""
    if len(values) > 2:
        # The second of the three values is the median.
        return statistics.quantiles(values, n=4)[::2]
    return [min(values), max(values)]


def between(pair: Sequence[float], form: str = ",.0f") -> str:
    """Return a range as text, "1 to 2", with both values in the format `form`.

    Args:
        pair: Lower and upper value.
        form: Format specification of both values.
    """
    return " to ".join(f"{value:{form}}" for value in pair)


def ratio(times: Sequence[float], reference_times: Sequence[float]) -> Ratio:
    """Return the ratio of the duration of a call to that of a reference.

    The ratio is computed for each repeat, so changes of the machine's speed cancel.

    Args:
        times: Seconds of every repeat.
        reference_times: Seconds of the reference in the same repeats.
    """
    ratios = [seconds / reference for seconds, reference in zip(times, reference_times)]
    return {"ratio": statistics.median(ratios), "quartiles": quartiles(ratios)}


class MatrixProduct:
    """Square matrix product that measures the speed of the machine.

    Args:
        device: Device of the matrices.
        dtype: Dtype of the matrices.
        clock: One of `CLOCKS`.
        threads: Number of CPU threads, by default that of torch.

    Attributes:
        size: Size N of the matrices, the fastest of `GEMM_SIZES`.
    """

    def __init__(
        self,
        device: str | torch.device,
        dtype: torch.dtype,
        clock: Clock = CLOCKS["wall"],
        threads: int | None = None,
    ) -> None:
        # Small matrices do not use the complete machine, and very large ones may not fit its
        # caches.
        products = {}
        for size in GEMM_SIZES[str(device).partition(":")[0]]:
            left = torch.randn(size, size, device=device).to(dtype)
            right = torch.randn(size, size, device=device).to(dtype)
            products[size] = benchmark.Timer(
                "torch.mm(left, right)",
                globals={"torch": torch, "left": left, "right": right},
                timer=clock,
                num_threads=threads or torch.get_num_threads(),
            )

        # Sizes are compared by the time of one operation.
        times = {size: timer.timeit(3).median / size**3 for size, timer in products.items()}
        self.size = min(times, key=lambda size: times[size])
        self.timer = products[self.size]

    def __call__(self) -> float:
        """Return floating-point operations per second, over at least `GEMM_SECONDS`."""
        seconds = self.timer.blocked_autorange(min_run_time=GEMM_SECONDS).mean

        # Each element of the product needs N multiplications and N additions.
        return 2 * self.size**3 / seconds


@dataclass
class Timing:
    """Times of one call.

    Attributes:
        seconds: Duration of every repeat.
        rates: Speed of the matrix product around every repeat in operations per second, empty if it
            was not measured.
    """

    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, seconds: float, rate: float | None) -> None:
        """Add a repeat.

        Args:
            seconds: Duration of the call.
            rate: Speed of the matrix product around the call in operations per second, None if it
                was not measured.
        """
        self.seconds.append(seconds)
        if rate is not None:
            self.rates.append(rate)

    def per_second(self, amount: float) -> Speed:
        """Return the speed for an amount of tokens or operations."""
        speeds = [amount / seconds for seconds in self.seconds]
        return {"median": statistics.median(speeds), "quartiles": quartiles(speeds)}

    def fraction_of_product(self, operations: float) -> float:
        """Return the speed for a number of operations as a fraction of the matrix product's."""
        return statistics.median(
            operations / seconds / rate for seconds, rate in zip(self.seconds, self.rates)
        )


def timed(
    call: Callable[[], object],
    product: Callable[[], float] | None = None,
    clock: Clock = CLOCKS["wall"],
) -> tuple[float, float | None]:
    """Time one call.

    Args:
        call: Function to time.
        product: Matrix product that is measured before and after the call.
        clock: One of `CLOCKS`.

    Returns:
        The seconds of the call, and the mean rate of the matrix product or None.
    """
    # The mean of the rates before and after the call follows changes during the call.
    rate_before = product() if product else None
    start = clock()
    call()
    seconds = clock() - start
    if product is None or rate_before is None:
        return seconds, None
    return seconds, (rate_before + product()) / 2


def in_turns(
    calls: Mapping[Any, Callable[[], object]],
    repeats: int,
    product: Callable[[], float] | None = None,
    clock: Clock = CLOCKS["wall"],
    progress: Callable[[], object] | None = None,
) -> dict[Any, Timing]:
    """Time functions, each once per repeat.

    Args:
        calls: Functions to time, {name: function}.
        repeats: Number of repeats.
        product: Matrix product that is measured around every call.
        clock: One of `CLOCKS`.
        progress: Function that is called after every call.

    Returns:
        The times, {name: `Timing`}.
    """
    timings = {name: Timing() for name in calls}
    # Each repeat calls every function, so the machine has about the same speed for all of
    # them.
    for _ in range(repeats):
        for name, call in calls.items():
            timings[name].add(*timed(call, product, clock))
            if progress is not None:
                progress()
    return timings
