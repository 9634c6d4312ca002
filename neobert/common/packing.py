"""Packed batches without padding, and compilation of a model block by block."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn


ModelT = TypeVar("ModelT")

# A float32 product on a CPU sums the rows behind its last complete group of 16 in another order. If
# unused rows complete the group, the result of a text does not depend on the batch.
FLOAT32_ROW_GROUP = 16


def pack(
    sequences: Sequence[Sequence[int] | np.ndarray], device: str | torch.device = "cpu"
) -> dict[str, Any]:
    """Concatenate token sequences into a batch without padding.

    Args:
        sequences: N lists or integer arrays of token ids, T tokens in total.
        device: Device of the tensors.

    Returns:
        Keyword arguments of a NeoBERT forward: `input_ids` of shape (1, T) and type int64,
        `cu_seq_lens_q` and `cu_seq_lens_k` of shape (N + 1,) and type int32, and the length of the
        longest sequence as `max_length_q` and `max_length_k`.
    """
    # numpy joins thousands of short lists much faster than torch.
    lengths = [len(sequence) for sequence in sequences]
    tokens = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    # The names are those of transformers for flash attention. Self-attention has the same sequences
    # as queries and keys.
    return {
        "input_ids": torch.from_numpy(tokens).to(device)[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def compile_blocks(model: ModelT, **options: Any) -> ModelT:
    """Compile every block of an encoder in place, with a dynamic number of tokens.

    The blocks share their graphs, and batches of any shape reuse them. Packing, whose graph would
    depend on the batch, is not compiled.

    Args:
        model: Model of transformers with `config.num_hidden_layers` blocks in one ModuleList.
        options: Options of `torch.compile`.

    Returns:
        The same model.
    """
    # One graph each for training and evaluation, with and without gradients, for the first and for
    # changing numbers of tokens.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    for block in _blocks(model):
        block.compile(dynamic=True, **options)
    return model


def uncompile_blocks(model: ModelT) -> ModelT:
    """Undo `compile_blocks`, and return the same model."""
    # torch has no public function for this: `compile` only sets the attribute that calls use.
    for block in _blocks(model):
        block._compiled_call_impl = None
    return model


def _blocks(model: Any) -> Iterator[nn.Module]:
    """Return an iterator over the blocks of an encoder, which may be below a head."""
    # The attribute has another name in every architecture, but all have a list of this length.
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return iter(module)
    raise ValueError(f"{type(model).__name__} has no list of {count} blocks.")
