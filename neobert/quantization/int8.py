"""int8 linear layers for inference on a CPU, with one scale per token and per output channel.

    model = neobert.quantize_int8(model)

The values x of a token become codes round(x / scale) + 128 with scale = max|x| / 127, and the
weights w of an output channel become integers round(w / scale) of at most `weight_steps`. The
integer product is exact, so the result of a text does not depend on the other rows of a batch.
Everything else, such as attention and residuals, stays in the dtype of the model.

The pass that computes the values of a token (norm, silu * up) also computes its codes, and the
scale is multiplied in a pass that exists anyway (rotation, silu). Passes work on slices that stay
in the caches, as in the model. torch.compile skips them: compiled blocks were not faster.

Shape legend: T rows, B * L for a (B, L, D) batch, R rows with fillers, D hidden size, H heads,
K head_dim, F inner size of the feed-forward.
"""

import warnings
from collections.abc import Iterator
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..common.errors import UserError
from ..modeling_neobert import apply_rotary_pos_emb, at_least_float32
from .int8_product import ZERO, pack_weight, product, weight_steps
from .outliers import encoders_of, linear_layers, random_token_states, smooth


Model = TypeVar("Model", bound=nn.Module)

# Codes of the largest value of a token.
STEPS = 127
# Minimum cosine of a random token between the quantized and the original model without a warning.
LEAST_COSINE = 0.99

# Elements of a slice of an elementwise pass, and tokens of a piece of a feed-forward.
_ELEMENTS = 1 << 18
_TOKENS = 512
# Smallest scale, so that rows of zeros have one.
_SMALLEST = 1e-30


# ----------------------------------------------------------------------------------------- passes


def _slices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return slices of tensors of T rows, together, of `_ELEMENTS` elements of the first one."""
    rows = max(1, _ELEMENTS // tensors[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors))


def _quantize_rows(
    values: torch.Tensor, factor: torch.Tensor | float, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write the codes of rows of float32 values, which are overwritten, and scales * `factor`."""
    largest = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg())
    largest = largest.clamp_(min=_SMALLEST)
    # The conversion to uint8 truncates, so 0.5 rounds to the nearest code.
    codes.copy_(values.mul_(STEPS / largest).add_(ZERO + 0.5))
    scales.copy_(largest.mul_(factor / STEPS))


class Codes:
    """Rows of a batch as unsigned 8-bit codes.

    Args:
        shape: Shape of the hidden states that the codes stand for.
        dtype: Dtype of the hidden states.

    Attributes:
        codes: (R, K) uint8; the last R - T rows are not initialized.
        rows: (T, K), the first T rows.
        scales: (T, 1) float32.
        shape: Shape of the hidden states.
        dtype: Dtype of the hidden states.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        rows = shape[:-1].numel()
        # oneDNN builds a kernel for every number of rows.
        step = 16 if rows < 512 else 64
        self.codes = torch.empty(-(-rows // step) * step, shape[-1], dtype=torch.uint8)
        self.rows = self.codes[:rows]
        self.scales = torch.empty(rows, 1)
        self.shape = shape
        self.dtype = dtype


class Int8Norm(nn.Module):
    """RMSNorm that returns the codes of its outputs: (B, L, D) -> `Codes`."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> Codes:
        """Return the codes of the normalized hidden states."""
        if self.training or hidden.device.type != "cpu":
            raise UserError(
                "an int8 model must run on the CPU in evaluation mode. Call model.eval(), or load "
                "the model again for training or for a GPU."
            )
        outputs = Codes(hidden.shape, hidden.dtype)
        for codes, scales, x in _slices(outputs.rows, outputs.scales, hidden.flatten(0, -2)):
            values, factor = self.scaled_values(at_least_float32(x))
            _quantize_rows(values, factor, codes, scales)
        return outputs

    def scaled_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows, (T, D), and the factor of each row, (T, 1), whose product is the norm."""
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
        return x * self.norm.weight.float(), (squares / x.shape[-1] + self.norm.eps).rsqrt()


class Int8Linear(nn.Module):
    """Linear layer without a bias: (B, L, K) -> (B, L, N).

    Args:
        weight: (N, K) weight.
        steps: Largest integer weight.
    """

    def __init__(self, weight: torch.Tensor, steps: int) -> None:
        super().__init__()
        weight = weight.detach().float()
        largest = torch.maximum(weight.amax(1), weight.amin(1).neg()).clamp(min=_SMALLEST)
        integers = (weight * (steps / largest)[:, None]).round_().to(torch.int8)
        self.out_features, self.in_features = weight.shape
        # Not buffers, because `.to(bfloat16)` would round the scales.
        self.packed = pack_weight(integers)
        self.weight_scales = largest / steps

    def product(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the product with (R, K) codes, (R, N), without the scales of the rows."""
        return product(codes, self.packed, self.weight_scales, dtype)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize the inputs per token and return the outputs of the layer."""
        inputs = Codes(x.shape, x.dtype)
        for codes, scales, values in _slices(inputs.rows, inputs.scales, x.flatten(0, -2)):
            _quantize_rows(values.to(torch.float32, copy=True), 1.0, codes, scales)

        output = self.product(inputs.codes, x.dtype)[: len(inputs.scales)]
        for values, scales in _slices(output, inputs.scales):
            values.mul_(scales)
        return output.unflatten(0, x.shape[:-1])

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(
            "an int8 model cannot be saved or sent to another process, because its weights have "
            "the memory layout of this processor. Save the original model and quantize it where "
            "it runs."
        )

    _save_to_state_dict = _refuse
    __getstate__ = _refuse


class Int8FeedForward(nn.Module):
    """down(silu(a) * b) with (a, b) the halves of up(x): `Codes` -> (B, L, D)."""

    def __init__(self, up: Int8Linear, down: Int8Linear) -> None:
        super().__init__()
        self.up = up
        self.down = down

    @torch.compiler.disable
    def forward(self, tokens: Codes) -> torch.Tensor:
        """Return the output of the feed-forward, computed in pieces of `_TOKENS` tokens."""
        pieces = zip(tokens.codes.split(_TOKENS), tokens.scales.split(_TOKENS))
        outputs = [self.run_piece(codes, scales, tokens.dtype) for codes, scales in pieces]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).view(tokens.shape)

    def run_piece(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the output for (R, D) codes and (T, 1) scales, (T, D)."""
        inner = self.up.product(codes, dtype)[: len(scales)]
        gated = Codes(torch.Size([len(scales), self.down.in_features]), dtype)
        for row_codes, row_scales, x, factor in _slices(gated.rows, gated.scales, inner, scales):
            # Both halves still lack the factor of their row.
            gate, value = at_least_float32(x).chunk(2, dim=-1)
            values = F.silu(gate * factor, inplace=True).mul_(value)
            _quantize_rows(values, factor, row_codes, row_scales)

        output = self.down.product(gated.codes, dtype)[: len(scales)]
        for x, row_scales in _slices(output, gated.scales):
            x.mul_(row_scales)
        return output


@torch.compiler.disable
def _project(
    block: Any, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace `NeoBERTBlock.project`; the rotation also multiplies the scales of the rows."""
    inputs = block.attention_norm(hidden)
    qkv = block.qkv.product(inputs.codes, inputs.dtype)[: len(inputs.scales)]
    qkv = qkv.view(*hidden.shape[:2], block.num_heads, 3, -1)
    scales = inputs.scales.view(*hidden.shape[:2], 1, 1, 1)

    query_key, value = qkv.split((2, 1), dim=-2)
    scaled_angles = tuple(angles * scales for angles in position_embeddings)
    query_key = apply_rotary_pos_emb(query_key, scaled_angles, in_place=True)
    query, key = query_key.unbind(-2)
    value = value.mul_(scales).squeeze(-2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


# -------------------------------------------------------------------------------------- the model


def quantize_int8(model: Model, even_if_slow: bool = False) -> Model:
    """Replace the linear layers of the blocks of a NeoBERT by int8 ones, in place.

    The model is then for inference on a CPU. Outlier channels of its activations are smoothed
    before. A warning follows if the hidden state of a random token differs too much from that of
    the original model.

    Args:
        model: `NeoBERTModel`, one of its heads, or a model that contains one, such as a
            SentenceTransformer; in float32 or bfloat16, in which everything else stays.
        even_if_slow: Whether to quantize if the int8 products of this CPU are not faster than those
            in float32.

    Returns:
        `model` in evaluation mode, without gradients.

    Raises:
        UserError: If the model is not a NeoBERT, is one of the ablations of the paper, or is on a
            GPU, or if the products of this CPU are slow or not exact.

    Example:
        >>> from neobert import NeoBERTModel, quantize_int8
        >>> model = NeoBERTModel.from_pretrained("examples/sentence-encoder")
        >>> model = quantize_int8(model, even_if_slow=True)
        >>> print(model.transformer_encoder[0].qkv)
        Int8Linear()
    """
    encoders = encoders_of(model)
    if not encoders:
        raise UserError(
            f"the model must contain a NeoBERT to be quantized, got a {type(model).__name__}."
        )
    for encoder in encoders:
        _check(encoder)
    steps = weight_steps(even_if_slow)

    model.eval().requires_grad_(False)
    with torch.inference_mode(False), torch.no_grad():
        for encoder in encoders:
            original = smooth(encoder)
            for block in encoder.transformer_encoder:
                _quantize_block(block, steps)
            _warn_if_different(random_token_states(encoder.eval()), original)
    return model


def is_int8(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, was quantized with `quantize_int8`."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def _check(encoder: Any) -> None:
    """Raise UserError unless the linear layers of this encoder can be quantized."""
    if is_int8(encoder):
        raise UserError("the model must be in float32 or bfloat16, got a model that is in int8.")
    config = encoder.config
    block = (config.norm_type, config.hidden_act, config.position_embedding_type)
    if block != ("rms", "swiglu", "rope"):
        raise UserError(
            f"the blocks must have norm, activation and positions rms, swiglu and rope, got {block}"
            "."
        )
    for name, module in encoder.named_modules():
        is_plain = isinstance(module, nn.Linear) == (type(module) is nn.Linear)
        if hasattr(module, "base_layer") or not is_plain:
            raise UserError(
                f"the linear layers must be plain ones, got {name} of type "
                f"{type(module).__name__}. Merge adapters first with merge_and_unload()."
            )
    weight = encoder.transformer_encoder[0].qkv.weight
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(
            "the model must be in float32 or bfloat16 on the CPU, got "
            f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}."
        )


def _quantize_block(block: Any, steps: int) -> None:
    """Replace the linear layers of a block, and the layers that compute their codes."""
    qkv, wo, up, down = (Int8Linear(layer.weight, steps) for layer in linear_layers(block))
    block.qkv = qkv
    block.wo = wo
    block.attention_norm = Int8Norm(block.attention_norm)
    block.ffn_norm = Int8Norm(block.ffn_norm)
    block.ffn = Int8FeedForward(up, down)
    block.project = MethodType(_project, block)


def _warn_if_different(states: torch.Tensor, original: torch.Tensor) -> None:
    """Warn if the minimum cosine between the hidden states of random tokens is too low or NaN."""
    cosine = F.cosine_similarity(states.double(), original.double(), dim=-1).min().item()
    if not cosine >= LEAST_COSINE:
        warnings.warn(
            f"the int8 model differs from the original one: the minimum cosine similarity of "
            f"{original[..., 0].numel()} random tokens is {cosine:.3f}.",
            stacklevel=3,
        )
