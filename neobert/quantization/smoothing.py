"""Smoothing of channels before the activations of a token share one int8 scale.

SmoothQuant (arXiv 2211.10438): a channel is divided where it is computed, in a norm or in the rows
of a linear layer, and the columns that read it are multiplied. The factors are powers of two, so
the outputs of the model stay bit-identical.

`smooth` needs no texts and changes outliers only. `balance` observes texts and changes all
channels.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..common.measures import one_thread
from ..modeling_neobert import NeoBERTModel


# Channels whose largest value exceeds this multiple of that of the median channel are outliers.
OUTLIER_RATIO = 8

# Alpha of SmoothQuant in `balance`: 0 gives all columns of a weight the same norm, and 1 gives all
# channels the same largest activation.
ALPHA = 0.65
# Largest exponent of two of a factor of `balance`.
MAX_EXPONENT = 8
# Largest weight that `balance` leaves as it is. The range of float16 ends at 65,504.
MAX_WEIGHT = 4_096

# Number and length of the random texts that the activations are observed on.
_TEXTS = 4
_LENGTH = 64
# Lower bound of the values of a channel, so a channel of zeros is not divided by zero.
_MIN_ABSMAX = 1e-30


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

    The forward pass runs on one thread, so every process gets the same values.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(_LENGTH, encoder.config.max_position_embeddings)
    tokens = torch.randint(encoder.config.vocab_size, (_TEXTS, length), generator=generator)
    with one_thread():
        return encoder(input_ids=tokens, unpad_inputs=False, return_dict=False)[0]


def observe_inputs(encoder: Any, run: Callable[[], Any]) -> dict[nn.Module, torch.Tensor]:
    """Observe the inputs of the linear layers of a `NeoBERTModel`.

    Args:
        encoder: Model.
        run: Function that runs the model, once or on several batches.

    Returns:
        {linear layer of a block: (K,) largest absolute values of its inputs}.
    """
    largest: dict[nn.Module, torch.Tensor] = {}

    def observe(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        values = inputs[0].flatten(0, -2).abs().amax(0).float()
        largest[layer] = torch.maximum(largest[layer], values) if layer in largest else values

    layers = [layer for block in encoder.transformer_encoder for layer in linear_layers(block)]
    hooks = [layer.register_forward_pre_hook(observe) for layer in layers]
    unpad_inputs = encoder.config.unpad_inputs
    # A model with hooks does not pack its batches, and would warn about that.
    encoder.config.unpad_inputs = False
    try:
        run()
        return largest
    finally:
        encoder.config.unpad_inputs = unpad_inputs
        for hook in hooks:
            hook.remove()


def outlier_factors(layer: nn.Linear, largest: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that divide the inputs of a layer and multiply its columns, (K,).

    Equation 4 of SmoothQuant with alpha = 1/2 for outliers, because the largest channel of a token
    determines its scale. The factor of every other channel is 1.

    Args:
        layer: Linear layer.
        largest: (K,) largest absolute values of its inputs.
    """
    columns = layer.weight.float().abs().amax(0).clamp(min=_MIN_ABSMAX)
    # log2 of the factor of SmoothQuant, sqrt(max|x| / max|w|), relative to the median channel.
    # Channels that are no outliers keep the factor 1, and the others are rounded to a power of two.
    log2_factor = (largest.clamp(min=_MIN_ABSMAX) / columns).log2() / 2
    relative = log2_factor - log2_factor.median()
    log2_factor = torch.where(largest > OUTLIER_RATIO * largest.median(), relative, 0.0)
    # The bound only applies to channels of zeros, whose factor is arbitrary.
    return log2_factor.round().clamp(-20, 20).exp2()


@torch.no_grad()
def smooth(encoder: Any) -> torch.Tensor:
    """Smooth the outliers of a `NeoBERTModel` in place, and return its `random_token_states`."""
    states: list[torch.Tensor] = []
    # Random tokens are used, because a model comes without texts.
    largest = observe_inputs(encoder, lambda: states.append(random_token_states(encoder)))
    for block in encoder.transformer_encoder:
        divisors = [outlier_factors(layer, largest[layer]) for layer in linear_layers(block)]
        divide_inputs(block, divisors)
    return states[0]


@torch.no_grad()
def balance(encoder: Any, run: Callable[[], Any]) -> None:
    """Scale all channels of a `NeoBERTModel` in place so that int8 changes its outputs less.

    Weights beyond the range of float16 are made smaller, too, see `limit_weights`.

    The largest channel of a token determines the rounding error of all its channels, and a column
    of a weight multiplies the error. Linear layers whose outputs are small differences of large
    terms, such as those of `transfer.initialize_blocks`, amplify the error most.

    Args:
        encoder: Model.
        run: Function that runs the model on texts that are typical of its use. Random tokens do not
            have the largest values of texts, and make int8 worse.
    """
    largest = observe_inputs(encoder, run)
    for block in encoder.transformer_encoder:
        divisors = [balanced_factors(layer, largest[layer]) for layer in linear_layers(block)]
        divide_inputs(block, divisors)
        limit_weights(block)


def balanced_factors(layer: nn.Linear, largest: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that divide all inputs of a layer and multiply its columns, (K,).

    Equation 4 of SmoothQuant with alpha = 0.65 and the norm of a column instead of its largest
    value, because the rounding errors of a channel are multiplied by the whole column.

    Args:
        layer: Linear layer.
        largest: (K,) largest absolute values of its inputs.
    """
    column_norms = layer.weight.float().norm(dim=0).clamp(min=_MIN_ABSMAX)
    log2_factor = ALPHA * largest.clamp(min=_MIN_ABSMAX).log2() - (1 - ALPHA) * column_norms.log2()
    relative = log2_factor - log2_factor.median()
    return relative.round().clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2()


def divide_inputs(block: Any, divisors: Sequence[torch.Tensor]) -> None:
    """Divide the inputs of the linear layers of a `NeoBERTBlock`, and multiply their columns.

    Args:
        block: Block, which is changed in place.
        divisors: (K,) divisors of the inputs of each of `linear_layers`.
    """
    layers = linear_layers(block)
    is_gated = block.config.hidden_act == "swiglu"
    qkv_divisors, wo_divisors, up_divisors, down_divisors = divisors
    if not is_gated:
        # The inputs of `down` come from an activation function and not from a linear layer.
        down_divisors = torch.ones_like(down_divisors)

    # The columns are multiplied here, and their inputs are divided below where they are computed.
    for layer, columns in zip(layers, (qkv_divisors, wo_divisors, up_divisors, down_divisors)):
        layer.weight.mul_(columns)
    # The parameters are the weight of a norm, and the bias of a LayerNorm.
    for norm, columns in ((block.attention_norm, qkv_divisors), (block.ffn_norm, up_divisors)):
        for parameter in norm.parameters():
            parameter.div_(columns)

    # The attention averages values, so a divisor of a value is one of the input of `wo`.
    value_rows(block).div_(wo_divisors.view(block.num_heads, -1, 1))
    if is_gated:
        gated_rows(block).div_(down_divisors[:, None])


def value_rows(block: Any) -> torch.Tensor:
    """Return the rows of `qkv` that compute the values of a `NeoBERTBlock`, (H, K, D)."""
    # The rows are interleaved per head: (H, 3, K).
    return block.qkv.weight.view(block.num_heads, 3, -1, block.qkv.in_features)[:, 2]


def gated_rows(block: Any) -> torch.Tensor:
    """Return the rows of the up projection of SwiGLU that the gate multiplies, (F, D)."""
    _, _, up, down = linear_layers(block)
    return up.weight[down.in_features :]


@torch.no_grad()
def limit_weights(block: Any) -> None:
    """Move powers of two between the matrices of a block until float16 can store them.

    RMSNorm removes the length of a hidden state, so training may increase the weights of a block
    without a bound. The outputs of attention and feed-forward are products of two matrices, and do
    not change if one is divided and the other multiplied by the same factor.

    Args:
        block: `NeoBERTBlock`, which is changed in place.
    """
    _, wo, _, down = linear_layers(block)
    pairs = [(wo.weight, value_rows(block))]
    if block.config.hidden_act == "swiglu":
        pairs.append((down.weight, gated_rows(block)))
    for outer, inner in pairs:
        largest = [float(weight.abs().max().clamp(min=_MIN_ABSMAX)) for weight in (outer, inner)]
        if max(largest) > MAX_WEIGHT:
            factor = 2.0 ** round(math.log2(largest[0] / largest[1]) / 2)
            outer.div_(factor)
            inner.mul_(factor)
