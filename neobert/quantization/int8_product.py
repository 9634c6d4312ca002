"""The integer product of this CPU, checked and timed before it is used.

`torch.ops.onednn.qlinear_pointwise` with bytes is the only one in torch that is fast; with int8 in
their place oneDNN runs its reference code, 10,000 times slower. CPUs with VNNI or AMX-INT8 add
products in 32 bits. Others add pairs of them in 16 bits first, and saturate: there weights are at
most 64, with which the product is exact again.

Shape legend: R rows, K inputs, N outputs.
"""

import functools
import time

import torch
import torch.nn.functional as F

from ..common.errors import UserError
from ..common.measures import best_times, one_thread


ZERO = 128  # what stands for 0 among the bytes
WEIGHT_STEPS = (127, 64)  # 2 * 255 * 64 < 2^15
LEAST_SPEED = 1.1  # times float32, below which int8 does not pay
_fine = time.get_clock_info("thread_time").resolution < 1e-5  # not on Windows
_clock = time.thread_time if _fine else time.perf_counter


def pack_weight(weight):
    """(N, K) int8 weights in the layout of the CPU's product."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def product(codes, packed, scales, dtype=torch.float32):
    """(codes - 128) @ weight.T * scales.

    Args:
        codes: (R, K) uint8. With int8 oneDNN would run its reference code, 10,000 times slower.
        packed: from `pack_weight`.
        scales: (N,) float32.
    Returns:
        (R, N) of `dtype`.
    """
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    return torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, dtype, "none", [], ""
    )


def is_exact(steps, rows, width=520):
    """Whether the product is the integer product where its sums are largest.

    Args:
        steps: the weights are -steps or steps, the bytes 0 or 255.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (24, width), generator=generator) * 2 - 1
    signs[:3] = torch.tensor([1, -1, 1])[:, None]
    signs[2, ::2] = -1
    weight = (signs * steps).to(torch.int8)
    codes = torch.randint(2, (rows, width), generator=generator) * 255
    codes[0] = 255
    output = product(codes.to(torch.uint8), pack_weight(weight), torch.ones(len(weight)))
    return torch.equal(output, ((codes - ZERO) @ weight.long().T).float())


@functools.cache
def weight_steps(even_if_slow=False):
    """The largest integer weight with which the product of this CPU is exact, 127 or 64, by a check
    and a short measurement on one thread, of 128 rows of 768.

    Raises:
        UserError: there is no product, it is not exact, or, unless `even_if_slow`, not faster than
            that of float32.
    """
    try:
        with one_thread(), torch.inference_mode():
            # A reference kernel takes seconds for what is timed below.
            slow = _seconds(16, 64, 2)
            exact = [
                steps for steps in WEIGHT_STEPS if all(is_exact(steps, rows) for rows in (1, 16))
            ]
            times = slow if slow[1] > 50 * slow[0] else _seconds(128, 768, 9)
    except (AttributeError, RuntimeError) as error:
        raise UserError(f"this processor has no int8 product in torch ({error})") from None
    if not exact:
        raise UserError("the int8 product of this processor is not exact; give float32")
    if times[0] < LEAST_SPEED * times[1] and not even_if_slow:
        raise UserError(
            "int8 does not pay on this processor: its int8 product takes "
            f"{times[1] / times[0]:.1f} times as long as that of float32; give float32 (or, from "
            "Python, neobert.quantize_int8(model, even_if_slow=True))"
        )
    return exact[0]


def _seconds(rows, width, repeats):
    """Seconds of a linear layer in float32 and in int8, the best of some runs in turns.

    Of processor time, which other work on a machine does not add to.
    """
    x, weight = torch.ones(rows, width), torch.ones(width, width)
    codes, scales = x.to(torch.uint8), torch.ones(width)
    packed = pack_weight(weight.to(torch.int8))
    calls = {
        "float32": lambda: F.linear(x, weight),
        "int8": lambda: product(codes, packed, scales),
    }
    return list(best_times(calls, repeats, _clock).values())
