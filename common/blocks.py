"""Compilation block by block: equal blocks share their graphs, and packing stays outside of
them."""

import torch


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
