"""Channels of a NeoBERT's hidden states whose values are many times those of the others, made
smaller before the values of a token share one scale of 8 bits.

SmoothQuant (arXiv 2211.10438): a channel is divided where it is made, in a norm or in the rows of a
linear layer, and the columns that read it are multiplied. The factors are powers of two, so the
model's outputs stay the same bits.
"""

import torch

from ..common.measures import one_thread
from ..modeling_neobert import NeoBERTModel


TIMES = 8  # the median channel: what is an outlier
_TEXTS, _LENGTH = 4, 64  # that are drawn
_SMALLEST = 1e-30


def encoders_of(model):
    """Every `NeoBERTModel` in a model, which may be one itself, by its name: a folder may have
    brought its code."""
    return [m for m in model.modules() if type(m).__name__ == NeoBERTModel.__name__]


def linear_layers(block):
    """(qkv, wo, up, down), the linear layers of a `NeoBERTBlock`."""
    ffn = block.ffn
    up, down = (ffn.w12, ffn.w3) if block.config.hidden_act == "swiglu" else (ffn[0], ffn[2])
    return block.qkv, block.wo, up, down


@torch.no_grad()
def drawn_states(encoder):
    """Hidden states of a `NeoBERTModel` for drawn tokens, on one thread, so that every process
    finds the same numbers."""
    generator = torch.Generator().manual_seed(0)
    length = min(_LENGTH, encoder.config.max_position_embeddings)
    tokens = torch.randint(encoder.config.vocab_size, (_TEXTS, length), generator=generator)
    with one_thread():
        return encoder(input_ids=tokens, unpad_inputs=False, return_dict=False)[0]


def largest_inputs(encoder):
    """Runs drawn tokens through a `NeoBERTModel`.

    Returns:
        {linear layer of a block: (K,) largest values of its inputs}, and the hidden states.
    """
    largest = {}

    def look(layer, inputs):
        largest[layer] = inputs[0].flatten(0, -2).abs().amax(0).float()

    hooks = [
        layer.register_forward_pre_hook(look)
        for block in encoder.transformer_encoder
        for layer in linear_layers(block)
    ]
    try:
        return largest, drawn_states(encoder)
    finally:
        for hook in hooks:
            hook.remove()


def factors(layer, largest):
    """(K,) powers of two by which the inputs of a layer are divided and its columns multiplied.

    Equation 4 of SmoothQuant with alpha = 1/2, for outliers alone: the bytes of a token are as
    coarse as its largest channel wants them. 1 for every other channel.
    """
    columns = layer.weight.float().abs().amax(0).clamp(min=_SMALLEST)
    ratio = (largest.clamp(min=_SMALLEST) / columns).log2() / 2
    ratio = torch.where(largest > TIMES * largest.median(), ratio - ratio.median(), 0.0)
    return ratio.round().clamp(-20, 20).exp2()


@torch.no_grad()
def smooth(encoder):
    """Smooths the outliers of a `NeoBERTModel`, in place; returns its `drawn_states`."""
    largest, hidden = largest_inputs(encoder)
    for block in encoder.transformer_encoder:
        layers = linear_layers(block)
        qkv, _, up, _ = layers
        of_qkv, of_wo, of_up, of_down = (factors(layer, largest[layer]) for layer in layers)
        if block.config.hidden_act != "swiglu":
            of_down.fill_(1)  # nothing linear is before `down`
        for layer, columns in zip(layers, (of_qkv, of_wo, of_up, of_down)):
            layer.weight.mul_(columns)
        for norm, columns in ((block.attention_norm, of_qkv), (block.ffn_norm, of_up)):
            for parameter in norm.parameters():
                parameter.div_(columns)
        values = qkv.weight.view(block.num_heads, 3, -1, qkv.in_features)[:, 2]
        values.div_(of_wo.view(block.num_heads, -1, 1))
        if block.config.hidden_act == "swiglu":  # the second half is what the gate multiplies
            up.weight[len(of_down) :].div_(of_down[:, None])
    return hidden
