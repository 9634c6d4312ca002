"""A GPU for the rehearsal of `make gpu`: the same lines run, with "cuda" meaning the CPU and
stand-ins for what only CUDA can answer."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from ..throughput import command, models, timing
from ..throughput.models import draw_lengths
from . import profile_forward, training


class _OnTheCpu(TorchFunctionMode):
    """Every torch function that is given the device "cuda" gets "cpu"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(
            *map(_cpu, args), **{name: _cpu(value) for name, value in (kwargs or {}).items()}
        )


def _short_lengths(*arguments, **options):
    """A 32nd of the lengths of a set."""
    return [max(length // 32, 4) for length in draw_lengths(*arguments, **options)]


def _cpu(value):
    named = isinstance(value, str) and value.startswith("cuda")
    return (
        torch.device("cpu")
        if named or (isinstance(value, torch.device) and value.type == "cuda")
        else value
    )


@contextlib.contextmanager
def pretended_gpu():
    """Within it torch.cuda answers as a GPU would, tensors are on the CPU, texts are short, and
    blocks compile without a C++ compiler."""
    peak = iter(range(2**20, 2**60, 2**20))
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "a rehearsal on the CPU",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(major=9, minor=0, multi_processor_count=132),
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_reserved": 2**20,
        "mem_get_info": (2**36, 2**36),
        "get_rng_state": None,
        "set_rng_state": None,
        "current_device": 0,
    }
    autocast, activity = torch.autocast, torch.profiler.ProfilerActivity
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(
                mock.patch.object(torch.cuda, name, lambda *given, answer=answer, **others: answer)
            )
        # As in a build of torch without CUDA: one with it would ask the driver.
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: False))
        stack.enter_context(
            mock.patch.object(
                torch.accelerator, "current_accelerator", lambda *given, **others: None
            )
        )
        stack.enter_context(
            mock.patch.object(torch.cuda, "max_memory_reserved", lambda *given: next(peak) + 2**20)
        )
        stack.enter_context(
            mock.patch.object(
                torch, "autocast", lambda device, *others, **more: autocast("cpu", *others, **more)
            )
        )
        only_cpu = SimpleNamespace(CPU=activity.CPU, CUDA=activity.CPU)
        stack.enter_context(mock.patch.object(profile_forward, "ProfilerActivity", only_cpu))
        stack.enter_context(
            mock.patch.object(
                profile_forward,
                "own_seconds",
                lambda event, device: event.self_cpu_time_total / 1e6,
            )
        )
        stack.enter_context(mock.patch.dict(models.COMPILE_OPTIONS, backend="eager"))
        stack.enter_context(mock.patch.dict(timing.GEMM_SIZES, cuda=(64,)))
        stack.enter_context(mock.patch.object(timing, "GEMM_SECONDS", 0.001))
        for module in (profile_forward, command, training):
            stack.enter_context(mock.patch.object(module, "draw_lengths", _short_lengths))
        stack.enter_context(_OnTheCpu())
        yield
