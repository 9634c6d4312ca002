"""How a model runs fast: sequences of tokens as one packed row, the input of NeoBERT without
padding, and compilation block by block: equal blocks share their graphs, and packing stays outside
of them."""

import numpy as np
import torch


def pack(sequences, device="cpu"):
    """Token sequences one after another, as the keyword arguments of a NeoBERT forward.

    Args:
        sequences: N lists or integer arrays of token ids, T tokens together.
    Returns:
        {input_ids (1, T) int64, cu_seq_lens_q and cu_seq_lens_k (N + 1,) int32, max_length_q and
        max_length_k: the longest sequence}.
    """
    lengths = [len(sequence) for sequence in sequences]
    tokens = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    packing = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return {"input_ids": torch.from_numpy(tokens).to(device)[None], **packing}


def compile_blocks(model, **options):
    """torch.compile of every block of an encoder in place, with a dynamic token count, so that
    batches of any shape reuse the graphs.

    Args:
        model: any model of transformers with `config.num_hidden_layers` blocks in a list, alone or
            under a head.
        options: of `torch.compile`.
    Returns:
        `model`.
    """
    # A graph for each of training and evaluation, with and without gradients, for the first and for
    # changing numbers of tokens.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for block in _blocks(model):
        block.compile(dynamic=True, **options)
    return model


def uncompile_blocks(model):
    """Takes `compile_blocks` back."""
    for block in _blocks(model):
        block._compiled_call_impl = None
    return model


def _blocks(model):
    count = model.config.num_hidden_layers
    return next(
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    )
