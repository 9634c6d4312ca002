"""Integer matrix product of this CPU, checked and timed before it is used.

`torch.ops.onednn.qlinear_pointwise` with unsigned 8-bit inputs is the only fast one in torch. With
signed inputs oneDNN runs its reference code, which is 10,000 times slower. CPUs with VNNI or
AMX-INT8 add products in 32 bits. Other CPUs first add the products of inputs 2j and 2j + 1 in 16
bits, and saturate. Their product is exact if the weights of such a pair that have the same sign add
up to at most 128: 255 * 128 < 2^15.

Shape legend: R rows, K inputs, N outputs.
"""

import functools
import logging
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..common.errors import UserError
from ..common.measures import best_times, one_thread


# Code of the value 0, the zero point of the inputs.
ZERO_POINT = 128
# Largest integer weight.
MAX_WEIGHT = 127
# Minimum speedup over float32. Measurements vary by some percent, so a product that is about as
# fast as the one in float32 is accepted with a warning.
MIN_SPEEDUP = 0.5
# Minimum speedup without a warning.
MIN_USEFUL_SPEEDUP = 1.1
# Lower bound of the largest absolute value of a channel, so a channel of zeros is not divided by
# zero.
_MIN_ABSMAX = 1e-30

logger = logging.getLogger("neobert.quantization")

# The processor time of a thread is too coarse on Windows.
_has_fine_clock = time.get_clock_info("thread_time").resolution < 1e-5
_clock: Callable[[], float] = time.thread_time if _has_fine_clock else time.perf_counter


def largest_weights(weight: torch.Tensor, limit_pairs: bool) -> torch.Tensor:
    """Return the magnitude of each output channel, (N,), that becomes the integer 127.

    Args:
        weight: (N, K) weight.
        limit_pairs: Whether the integers of inputs 2j and 2j + 1 that have the same sign add up to
            at most 128. Limiting each integer to 64 would ensure this, too, but is less accurate,
            because large weights are rarely neighbors.
    """
    if limit_pairs:
        pairs = F.pad(weight, (0, weight.shape[1] % 2)).unflatten(1, (-1, 2))
        # Rounding adds at most 1/2 to each of the two weights: 127 + 2/2 = 128.
        highest = pairs.clamp(min=0).sum(-1).amax(1)
        lowest = pairs.clamp(max=0).sum(-1).amin(1)
    else:
        highest = weight.amax(1)
        lowest = weight.amin(1)
    return torch.maximum(highest, lowest.neg()).clamp(min=_MIN_ABSMAX)


def quantize_weight(weight: torch.Tensor, limit_pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight with one scale per output channel.

    Args:
        weight: (N, K) float32 weight.
        limit_pairs: See `largest_weights`.

    Returns:
        (N, K) int8 integers of at most 127, and the magnitude of each output channel, (N,), that
        becomes 127.
    """
    largest = largest_weights(weight, limit_pairs)
    return (weight * (MAX_WEIGHT / largest)[:, None]).round_().to(torch.int8), largest


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return (N, K) int8 weights in the memory layout of the CPU's product."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


def product(
    codes: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    zero_points: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (codes - 128) @ weight.T * scales, (R, N) of `dtype`.

    Args:
        codes: (R, K) uint8.
        packed: Weight, from `pack_weight`.
        scales: (N,) float32 scales of the outputs.
        dtype: Precision of the result.
        zero_points: (N,) int64 zero points of the weights, all 0. Passing them avoids an allocation
            per call.
    """
    if zero_points is None:
        zero_points = torch.zeros(len(scales), dtype=torch.int64)
    # The arguments are the inputs with scale and zero point, the weights with scales and zero
    # points, no bias, an output with scale 1 and zero point 0, and no function after the product.
    return torch.ops.onednn.qlinear_pointwise.default(
        codes, 1.0, ZERO_POINT, packed, scales, zero_points, None, 1.0, 0, dtype, "none", [], ""
    )


def is_exact(limit_pairs: bool, rows: int, inputs: int = 520) -> bool:
    """Return whether the product equals the integer product for inputs with the largest sums.

    Args:
        limit_pairs: Whether the weights of a pair add up to 128, or each weight is 127.
        rows: Number of rows; the codes are 0 or 255.
        inputs: Number of inputs.
    """
    # Besides random signs there are outputs whose weights have one sign, which reach the largest
    # sums of both signs, and one with alternating pairs.
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (24, inputs // 2), generator=generator) * 2 - 1
    signs[:3] = torch.tensor([1, -1, 1])[:, None]
    signs[2, ::2] = -1
    weight = torch.full((24, inputs // 2, 2), MAX_WEIGHT)
    if limit_pairs:
        weight[..., 0] = torch.randint(1, MAX_WEIGHT + 1, weight.shape[:2], generator=generator)
        weight[..., 1] = MAX_WEIGHT + 1 - weight[..., 0]
    weight = (weight * signs[..., None]).flatten(1)
    codes = torch.randint(2, (rows, inputs), generator=generator) * 255
    codes[0] = 255

    # float32 represents the sums exactly: 520 * 128 * 127 < 2^24.
    packed = pack_weight(weight.to(torch.int8))
    output = product(codes.to(torch.uint8), packed, torch.ones(len(weight)))
    return torch.equal(output, ((codes - ZERO_POINT) @ weight.T).float())


@functools.cache
def check_int8_product(even_if_slow: bool = False) -> bool:
    """Check that the product of this CPU is exact, and not much slower than the one in float32.

    The check takes some milliseconds on one thread. A product that is not clearly faster is
    reported in a warning.

    Args:
        even_if_slow: Whether to accept a product that is much slower than the one in float32.

    Returns:
        Whether the product is exact only if pairs of weights are limited, see `largest_weights`.

    Raises:
        UserError: If there is no product, or if it is not exact, or less than half as fast as the
            one in float32.
    """
    try:
        with one_thread(), torch.inference_mode():
            # A single row has a kernel of its own.
            exact_limits = [
                limit_pairs
                for limit_pairs in (False, True)
                if all(is_exact(limit_pairs, rows) for rows in (1, 16))
            ]
            speedup = _speedup()
    except (AttributeError, RuntimeError) as error:
        raise UserError(
            f"this processor has no int8 matrix product in torch ({error}). Use float32."
        ) from None

    if not exact_limits:
        raise UserError("the int8 matrix product of this processor is not exact. Use float32.")
    if speedup < MIN_SPEEDUP and not even_if_slow:
        raise UserError(
            "the int8 matrix product of this processor takes "
            f"{1 / speedup:.1f} times as long as the one in float32. Use float32, or call "
            "neobert.quantize_int8(model, even_if_slow=True)."
        )
    if speedup < MIN_USEFUL_SPEEDUP:
        logger.warning(
            "The int8 matrix product of this processor has a speedup of %.2f over the one in "
            "float32. float32 is more accurate and may be faster.",
            speedup,
        )
    # False comes first: pairs are only limited if this is necessary.
    return exact_limits[0]


def _speedup() -> float:
    """Return the speedup of the int8 product over float32, for 128 rows of 768."""
    # A reference kernel would take seconds for 128 rows, so a small product is measured first.
    float_seconds, int8_seconds = _seconds(16, 64, 2)
    if int8_seconds <= 50 * float_seconds:
        float_seconds, int8_seconds = _seconds(128, 768, 9)
    return float_seconds / int8_seconds


def _seconds(rows: int, inputs: int, repeats: int) -> list[float]:
    """Return the seconds of a linear layer in float32 and in int8, the best of some runs in turns.

    The seconds are processor time, which other processes on the machine do not increase.
    """
    x = torch.ones(rows, inputs)
    weight = torch.ones(inputs, inputs)
    codes = x.to(torch.uint8)
    scales = torch.ones(inputs)
    packed = pack_weight(weight.to(torch.int8))
    calls = {
        "float32": lambda: F.linear(x, weight),
        "int8": lambda: product(codes, packed, scales),
    }
    return list(best_times(calls, repeats, _clock).values())
