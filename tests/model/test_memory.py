"""Test the measurement of peak memory, and the reuse of freed memory in training on the CPU.

The growth includes memory that is freed before the end of the block, and excludes memory that was
allocated before its start. It is None if the system does not report memory.
"""

import ctypes
import pathlib
import platform
import subprocess
import sys

import pytest
import torch

from neobert.common import measures
from neobert.common.measures import PeakMemory


MIB = 2**20
linux = pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(),
    reason="resident memory is measured on Linux only",
)


@pytest.fixture(autouse=True)
def _malloc_as_a_process_starts_with_it():
    """Reset the options of malloc to their defaults.

    Other tests in the process call `keep_freed_memory`. With its options, small tensors can be
    allocated in new memory although large tensors were freed.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # The parameters are M_MMAP_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
        for parameter, value in ((-4, 65536), (-3, 2**17), (-1, 2**17)):
            mallopt(parameter, value)


@linux
def test_growth_is_the_peak_of_the_block():
    """The growth is the peak of the block, without earlier allocations and earlier peaks."""
    earlier_tensor = torch.ones(64 * MIB // 4)
    with PeakMemory("cpu") as first:
        # This tensor is freed immediately. No free block of earlier tests is as large.
        torch.ones(480 * MIB // 4)
        torch.ones(160 * MIB // 4)
    assert 470 * MIB < first.growth < 500 * MIB
    assert first.peak == first.before + first.growth and first.before > earlier_tensor.nbytes

    with PeakMemory("cpu") as second:
        pass
    assert second.growth < 16 * MIB, "The growth includes the peak of an earlier block."


def test_growth_is_none_without_memory_statistics(monkeypatch):
    """The growth is None if the system does not report memory."""
    monkeypatch.setattr(measures, "_proc_status", lambda name: None)
    with PeakMemory("cpu") as peak:
        pass
    assert peak.growth is None, "The growth must be None if it cannot be measured."


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="keep_freed_memory changes options of glibc only"
)
def test_freed_memory_is_reused_without_page_faults():
    """After `keep_freed_memory`, tensors reuse freed memory without new page faults.

    The test counts the page faults of the same allocations before and after the call.
    """
    script = """if True:
        import resource, torch
        from neobert.training.checkpoints import keep_freed_memory

        def pages():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(4):
                torch.ones(40 * 2**20, dtype=torch.uint8)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        pages()
        usual = pages()
        keep_freed_memory()
        # The first calls grow the heap by an amount that depends on its contents.
        print(usual, [pages() for _ in range(10)][-1])
    """

    default_faults, faults_after_call = map(
        int,
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split(),
    )

    assert default_faults > 20 * faults_after_call
