"""Peak memory of a stretch of work: reserved CUDA memory on a GPU, else resident memory of the process."""

from pathlib import Path

import torch


class PeakMemory:
    """Starts at construction; `peak_mib()` gives the highest value since then, `before_mib` the value at the start.

    On a GPU: memory reserved by torch's allocator (what the device must have). On Linux CPUs: VmHWM, reset at the start; elsewhere the peak of
    the whole process.
    """

    def __init__(self):
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                pass
        self.before_mib = self.peak_mib()

    def peak_mib(self):
        """MiB, rounded."""
        if self.cuda:
            return round(torch.cuda.max_memory_reserved() / 2**20)
        try:
            status = Path("/proc/self/status").read_text().splitlines()
            return round(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 2**10)
        except (OSError, StopIteration):
            import resource  # not on Windows

            return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
