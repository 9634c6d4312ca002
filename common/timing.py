"""Short measurements of this processor."""

import contextlib
import time

import torch


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
    return {name: min(found[1:]) for name, found in times.items()}  # the first makes the kernel
