"""Linear layers whose weights have the memory layout of oneDNN, for inference on a CPU.

`torch.nn.functional.linear` lays out a float32 weight again in every call. oneDNN's operators take
a weight that was laid out once; they are private operators of torch, which its compiler uses. They
also give a row the same bits for any number of other rows, unlike `linear`.

Shape legend: R rows, K inputs, N outputs.
"""

import functools

import torch
import torch.nn.functional as F


# Numbers of rows whose results must have the same bits as in a larger batch.
_CHECKED_ROWS = (2, 3, 5, 8, 16, 17, 31, 64)


class PackedLinear:
    """Linear layer without a bias: (R, K) -> (R, N), R at least 2.

    Args:
        weight: (N, K) weight on a CPU, float32 or bfloat16.

    Attributes:
        is_packed: Whether oneDNN's operators run. Without them, `linear` runs.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach().contiguous()
        self.is_packed = same_bits_in_any_batch(*weight.shape, weight.dtype)
        self.weight = _pack(weight) if self.is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with a contiguous input."""
        return _product(x, self.weight) if self.is_packed else F.linear(x, self.weight)

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return `hidden` plus the product, (R, N), in one operator."""
        if not self.is_packed:
            return hidden + F.linear(x, self.weight)
        return _product_plus(hidden, x, self.weight)


def number_of_rows(tokens: int) -> int:
    """Return the number of rows of a batch, with unused rows after its tokens.

    oneDNN builds a kernel for every number of rows, so larger batches have few of them. A single
    row has a kernel of its own with other bits.
    """
    if tokens <= 128:
        return max(2, tokens)
    step = 16 if tokens <= 512 else 64
    return -(-tokens // step) * step


@functools.cache
def same_bits_in_any_batch(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Return whether oneDNN's operators exist and give a row the same bits in any batch.

    The result is compared for several numbers of rows, with and without an added tensor.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(2 * max(_CHECKED_ROWS), inputs, generator=generator).to(dtype)
    hidden = torch.randn(len(x), outputs, generator=generator).to(dtype)

    try:
        with torch.inference_mode():
            packed = _pack(weight)
            expected = _product(x, packed)
            expected_sum = _product_plus(hidden, x, packed)
            # Other kernels round differently, but a wrong layout would give other values.
            if not torch.allclose(expected, F.linear(x, weight), rtol=1e-2, atol=1e-1):
                return False

            for rows in _CHECKED_ROWS:
                # The position of a row differs from that in the larger batch.
                part = slice(1, 1 + rows)
                if not torch.equal(_product(x[part], packed), expected[part]):
                    return False
                part_sum = _product_plus(hidden[part], x[part], packed)
                if not torch.equal(part_sum, expected_sum[part]):
                    return False
    # The operators are missing in builds of torch without oneDNN, or do not support the dtype.
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _product(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


def _product_plus(hidden: torch.Tensor, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x, hidden, packed, None, "add")
