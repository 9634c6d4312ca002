"""Memory of the process: its peak over a stretch of work, for everything that publishes such a
figure, and what malloc does with freed memory."""

import ctypes
import gc
import sys
from pathlib import Path

import torch


class PeakMemory:
    """Memory at the start and the highest since then: reserved by torch's allocator on CUDA, else
    resident in this process.

    The start is the construction; the end of a `with` keeps the peak. Before the start garbage and
    cached memory go back to the system, so that the growth is that of the work. All in bytes; None
    where the system does not tell (only Linux tells the memory at the start; on macOS the peak is
    that of the process since its start).

    Attributes:
        before: memory at the start.
    """

    def __init__(self, device=None):
        """Starts to measure.

        Args:
            device: "cuda", "cuda:1", "cpu", or a torch.device; by default CUDA where there is one.
        """
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._kept = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_reserved(self.device)
            return
        try:
            # Freed memory that malloc keeps would hide the growth; writing 5 resets the peak of
            # resident memory.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        except (OSError, AttributeError, TypeError):
            pass
        self.before = _proc_status("VmRSS")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._kept = self.peak
        return False

    @property
    def peak(self):
        """Highest memory since the start, with what was there at the start."""
        if self._kept is not None:
            return self._kept
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        peak = _proc_status("VmHWM")
        return _peak_of_the_process() if peak is None else peak

    @property
    def growth(self):
        """Highest memory beyond that at the start."""
        return None if self.before is None or self.peak is None else max(self.peak - self.before, 0)


def keep_freed_memory():
    """From here on malloc keeps what this process frees, for its next tensors.

    By default glibc gives large blocks back to the system, which must clear each page when it is
    used again: in training on the CPU, where a step frees all that it kept for the backward pass,
    this took an eighth of the time. Nothing happens with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block is mapped by itself
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the top of the heap stays
    except (OSError, AttributeError, TypeError):
        pass


def mebibytes(count):
    """Bytes as whole MiB; None stays None."""
    return None if count is None else round(count / 2**20)


def _proc_status(name):
    """A field of /proc/self/status in bytes, or None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
    )


def _peak_of_the_process():
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
