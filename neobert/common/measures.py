"""Short measurements of this process: the peak of its memory over a stretch of work, the shortest
time of a call."""

import contextlib
import ctypes
import gc
import time
from pathlib import Path

import torch


class PeakMemory:
    """Memory at the start of a `with` and the highest within it: reserved by torch's allocator on
    CUDA, else resident in this process.

    Before the start garbage and cached memory go back to the system, so that the growth is that of
    the work. All in bytes; None where the system does not tell: only Linux does.

    Args:
        device: "cuda", "cuda:1", "cpu", or a torch.device; by default CUDA where there is one.
    Attributes:
        before: memory at the start.
        peak: highest memory, with what was there at the start.
        growth: highest memory beyond that at the start.
    """

    def __init__(self, device=None):
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def __enter__(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_reserved(self.device)
            return self
        # Freed memory that malloc keeps would hide the growth; writing 5 resets the peak of
        # resident memory.
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        self.before = _proc_status("VmRSS")
        return self

    def __exit__(self, *error):
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_reserved(self.device)
        else:
            self.peak = _proc_status("VmHWM")
        self.growth = None if self.before is None else max(self.peak - self.before, 0)


@contextlib.contextmanager
def one_thread():
    """Within it torch computes on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_times(calls, repeats, clock=time.perf_counter):
    """The shortest of `repeats` times of each call, in seconds of `clock`; the calls take turns.

    Args:
        calls: {name: function without arguments}.
    Returns:
        {name: seconds}.
    """
    times = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: min(seconds[1:]) for name, seconds in times.items()}  # the first makes the kernel


def _proc_status(name):
    """A field of /proc/self/status in bytes, or None where there is no such file."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
