"""Short measurements of this process: peak memory of a block, and shortest time of a call."""

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch


class PeakMemory:
    """Context manager that measures the peak memory of a block.

    The memory is that reserved by torch's allocator on CUDA, and the resident memory of this
    process on other devices. Garbage and cached memory are released before the block, so the
    growth is that of the block. Resident memory is measured on Linux only.

    Args:
        device: Device whose memory is measured. By default CUDA if there is a GPU, else the CPU.

    Attributes:
        before: Memory at the start of the block in bytes, None if it is not known.
        peak: Peak memory in bytes, including the memory at the start.
        growth: Peak memory in bytes beyond that at the start.
    """

    before: int | None = None
    peak: int | None = None
    growth: int | None = None

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.device.type == "cuda":
            # Earlier kernels may still use memory that is about to be released.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_reserved(self.device)
            return self

        # Freed memory that malloc keeps would hide the growth. Writing 5 resets the peak of the
        # resident memory.
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _proc_status("VmRSS")
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        error_traceback: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_reserved(self.device)
        else:
            self.peak = _proc_status("VmHWM")
        if self.before is not None and self.peak is not None:
            self.growth = max(self.peak - self.before, 0)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread within the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_times(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the shortest of `repeats` times of each call, in seconds. The calls take turns.

    Args:
        calls: Functions to time, {name: function}.
        repeats: Number of timed repeats. Each function is called once more before.
        clock: Function that returns a time in seconds.
    """
    # If the calls take turns, other load and changes of the clock frequency affect all of them.
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    # The first call may compile or allocate.
    return {name: min(seconds[1:]) for name, seconds in times.items()}


def _proc_status(name: str) -> int | None:
    """Return a field of /proc/self/status in bytes, or None if the file does not exist."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        field, _, value = line.partition(":")
        if field == name:
            # Values have the form "1234 kB", where kB means 1024 bytes.
            return int(value.split()[0]) * 1024
    return None
