"""A tensor that is still in its file, whatever the format, and what all formats refuse."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from ..common.errors import UserError, one_line


# A tensor has at most 2^48 numbers: what is said to be larger is damaged.
_LARGEST = 1 << 48


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that is still in its file.

    Attributes:
        shape, dtype: known without reading it.
        read: returns the tensor, on the CPU; checks what the format lets it check.
        storage: equal for tensors that share their memory (tied weights), None where the format
            cannot say.
    """

    shape: tuple
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    storage: Hashable = None


def unreadable(path, error):
    """The UserError about a file that its reader could not make sense of."""
    return UserError(
        f"{path} cannot be read, it is truncated or not a file of weights ({one_line(error)})."
    )


def checked_shape(sizes, name):
    """`sizes` of a file as a tuple of whole numbers; UserError naming the tensor `name` for
    anything else."""
    if (
        isinstance(sizes, (tuple, list))
        and all(type(size) is int and size >= 0 for size in sizes)
        and math.prod(sizes) <= _LARGEST
    ):
        return tuple(sizes)
    raise UserError(f"the file says that {name} has the shape {sizes!r:.100}, which no tensor has.")


def _kind(tensor):
    """What keeps a tensor from being plain numbers in the file; None for nothing."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of the class {type(tensor).__name__}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return "a sparse tensor"
    if tensor.is_meta:
        return "a tensor of the meta device, without numbers"
    if tensor.is_quantized:
        return "a quantised tensor"
    # A small file must not become a large one.
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        return "a tensor that repeats its numbers"
    return None


def tensors_of(mapping, path):
    """{name: StoredTensor} of what a file maps names to, without its other values.

    Args:
        mapping: {name: tensor or anything else}.
        path: the file, for messages.
    Raises:
        UserError: a tensor that has no plain numbers.
    """
    tensors = {}
    for name, value in mapping.items():
        if isinstance(value, torch.Tensor):
            if kind := _kind(value):
                raise UserError(
                    f"{path}: {name} is {kind}, which is not converted; save it as a plain tensor."
                )
            tensors[name] = stored(value.detach())
    return tensors


def stored(tensor):
    """The StoredTensor of a plain tensor, which may be memory-mapped."""
    shape = tuple(tensor.shape)
    place = (tensor.data_ptr(), shape, tensor.stride()) if tensor.numel() else None
    return StoredTensor(shape, tensor.dtype, lambda: tensor, place)


def is_plain_name(name):
    """Whether a file name that a checkpoint gives means an entry of its own folder, and nothing
    elsewhere."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not set(name) & set("/\\\0")
        and len(name) < 256
    )
