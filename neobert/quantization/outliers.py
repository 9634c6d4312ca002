"""Smoothing of outlier channels before the activations of a token share one int8 scale.

SmoothQuant (arXiv 2211.10438): a channel is divided where it is computed, in a norm or in the rows
of a linear layer, and the columns that read it are multiplied. The factors are powers of two, so
the outputs of the model stay bit-identical.
"""

from typing import Any

import torch
from torch import nn

from ..common.measures import one_thread
from ..modeling_neobert import NeoBERTModel


# Channels whose largest value exceeds this multiple of that of the median channel are outliers.
TIMES = 8

# Number and length of the random texts that the activations are observed on.
_TEXTS = 4
_LENGTH = 64
_SMALLEST = 1e-30


def encoders_of(model: nn.Module) -> list[Any]:
    """Return every `NeoBERTModel` in a model, which may be one itself.

    They are identified by the name of the class, because the code may come from the directory of
    the model.
    """
    return [module for module in model.modules() if type(module).__name__ == NeoBERTModel.__name__]


def linear_layers(block: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """Return (qkv, wo, up, down), the linear layers of a `NeoBERTBlock`."""
    ffn = block.ffn
    if block.config.hidden_act == "swiglu":
        return block.qkv, block.wo, ffn.w12, ffn.w3
    # The feed-forward of the GELU ablation is a Sequential of linear, activation, linear.
    return block.qkv, block.wo, ffn[0], ffn[2]


@torch.no_grad()
def random_token_states(encoder: Any) -> torch.Tensor:
    """Return the hidden states of a `NeoBERTModel` for random tokens, (4, 64, D).

    The forward pass runs on one thread, so that every process gets the same values.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(_LENGTH, encoder.config.max_position_embeddings)
    tokens = torch.randint(encoder.config.vocab_size, (_TEXTS, length), generator=generator)
    with one_thread():
        return encoder(input_ids=tokens, unpad_inputs=False, return_dict=False)[0]


def largest_inputs(encoder: Any) -> tuple[dict[nn.Module, torch.Tensor], torch.Tensor]:
    """Run random tokens through a `NeoBERTModel` and observe the inputs of its linear layers.

    Returns:
        {linear layer of a block: (K,) largest absolute values of its inputs}, and the hidden
        states.
    """
    # Random tokens are used, because a model comes without texts.
    largest: dict[nn.Module, torch.Tensor] = {}

    def observe(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # A layer runs once, on all tokens, so that no value is overwritten.
        largest[layer] = inputs[0].flatten(0, -2).abs().amax(0).float()

    layers = [layer for block in encoder.transformer_encoder for layer in linear_layers(block)]
    hooks = [layer.register_forward_pre_hook(observe) for layer in layers]
    try:
        return largest, random_token_states(encoder)
    finally:
        for hook in hooks:
            hook.remove()


def factors(layer: nn.Linear, largest: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that divide the inputs of a layer and multiply its columns, (K,).

    Equation 4 of SmoothQuant with alpha = 1/2 for outliers, because the largest channel of a token
    determines its scale. The factor of every other channel is 1.

    Args:
        layer: Linear layer.
        largest: (K,) largest absolute values of its inputs.
    """
    columns = layer.weight.float().abs().amax(0).clamp(min=_SMALLEST)
    # log2 of sqrt(largest / columns), rounded below to an integer for a power of two. The median
    # ratio is that of the other channels, whose factor is 1.
    ratio = (largest.clamp(min=_SMALLEST) / columns).log2() / 2
    ratio = torch.where(largest > TIMES * largest.median(), ratio - ratio.median(), 0.0)
    return ratio.round().clamp(-20, 20).exp2()


@torch.no_grad()
def smooth(encoder: Any) -> torch.Tensor:
    """Smooth the outliers of a `NeoBERTModel` in place, and return its `random_token_states`."""
    largest, hidden = largest_inputs(encoder)
    for block in encoder.transformer_encoder:
        layers = linear_layers(block)
        qkv, _, up, _ = layers
        is_gated = block.config.hidden_act == "swiglu"
        qkv_factors, wo_factors, up_factors, down_factors = (
            factors(layer, largest[layer]) for layer in layers
        )
        if not is_gated:
            # The inputs of `down` come from an activation function and not from a linear layer.
            down_factors.fill_(1)

        # The columns are multiplied here, and their inputs are divided below where they are
        # computed.
        for layer, columns in zip(layers, (qkv_factors, wo_factors, up_factors, down_factors)):
            layer.weight.mul_(columns)
        # The parameters are the weight of a norm, and the bias of a LayerNorm.
        for norm, columns in ((block.attention_norm, qkv_factors), (block.ffn_norm, up_factors)):
            for parameter in norm.parameters():
                parameter.div_(columns)

        # The attention averages values, so that a factor of a value is one of the input of `wo`.
        # The rows of qkv are interleaved per head: (H, 3, K).
        values = qkv.weight.view(block.num_heads, 3, -1, qkv.in_features)[:, 2]
        values.div_(wo_factors.view(block.num_heads, -1, 1))
        if is_gated:
            # The second half of the rows is the one that the gate multiplies.
            up.weight[len(down_factors) :].div_(down_factors[:, None])
    return hidden
