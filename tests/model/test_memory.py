"""Test the measurement of peak memory.

Memory before the start is not counted, memory that is freed before the end is, and there is no
figure where the system has none. Training on the CPU keeps freed memory.
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
    reason="resident memory is read from Linux's /proc",
)


@pytest.fixture(autouse=True)
def _malloc_as_a_process_starts_with_it():
    """Other tests of the process call `keep_freed_memory`, after which small tensors take new
    memory beside freed large ones."""
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        for parameter, value in ((-4, 65536), (-3, 2**17), (-1, 2**17)):
            mallopt(parameter, value)


@linux
def test_growth_is_that_of_the_work():
    held = torch.ones(64 * MIB // 4)
    with PeakMemory("cpu") as first:
        torch.ones(480 * MIB // 4)  # freed at once; no block that earlier tests left is as large
        torch.ones(160 * MIB // 4)
    assert 470 * MIB < first.growth < 500 * MIB
    assert first.peak == first.before + first.growth and first.before > held.nbytes
    with PeakMemory("cpu") as second:
        pass
    assert second.growth < 16 * MIB, "an earlier, higher peak was not forgotten"


def test_where_the_system_tells_nothing(monkeypatch):
    monkeypatch.setattr(measures, "_proc_status", lambda name: None)
    with PeakMemory("cpu") as peak:
        pass
    assert peak.growth is None, "no figure is better than a wrong one"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_freed_memory_is_used_again_without_new_pages():
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
        print(usual, [pages() for _ in range(10)][-1])  # the first calls grow the heap, by how much depends on what lies in it
    """  # noqa: E501
    usual, kept = map(
        int,
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split(),
    )
    assert usual > 20 * kept
