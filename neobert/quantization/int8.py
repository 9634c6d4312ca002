"""int8 linear layers for inference on a CPU, with one scale per token and per output channel.

    model = neobert.quantize_int8(model)

The values x of a token become codes round(x / scale) + 128 with scale = max|x| / 127, and the
weights w of an output channel become integers round(w / scale) of at most 127. The integer product
is exact, so the result of a text does not depend on the other rows of a batch.
Everything else, such as attention and residuals, stays in the dtype of the model.

The operation that computes the values of a token (norm, silu * up) also computes its codes, and
an operation that runs anyway (rotation, silu) multiplies by the scale. Both work on slices that
stay in the caches, as in the model. torch.compile skips them: compiled blocks were not faster.

Shape legend: T rows, B * L for a (B, L, D) batch, R rows with fillers, D hidden size, H heads,
K head_dim, F inner size of the feed-forward.
"""

import warnings
from collections.abc import Iterable
from types import MethodType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..common.errors import UserError
from ..common.loading import STANDARD_BLOCK, block_type
from ..modeling_neobert import apply_rotary_pos_emb, at_least_float32
from .int8_product import (
    MAX_WEIGHT,
    ZERO_POINT,
    check_int8_product,
    pack_weight,
    product,
    quantize_weight,
)
from .packed_linear import number_of_rows
from .smoothing import encoders_of, linear_layers, random_token_states, smooth


Model = TypeVar("Model", bound=nn.Module)

# Largest difference between a code and `ZERO_POINT`.
STEPS = 127
# A warning follows if the cosine similarity between the hidden states of a random token in the
# quantized and the original model is smaller.
MIN_COSINE = 0.99

# Number of elements per slice of an elementwise pass, and of tokens per slice of a feed-forward.
_ELEMENTS = 1 << 18
_TOKENS = 512
# Lower bound of the largest value of a row, so a row of zeros is not divided by zero.
_MIN_ABSMAX = 1e-30
# Added to a code before the conversion to uint8. The conversion truncates, so the sum of the
# code and this offset becomes the nearest code.
_OFFSET = torch.tensor(ZERO_POINT + 0.5)


# ----------------------------------------------------------------------------------------- passes


def _slices(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Return slices of tensors of T rows, together, of `_ELEMENTS` elements of the first one."""
    if tensors[0].numel() <= _ELEMENTS:
        return (tensors,)
    # The operators of a pass read a slice one after the other while it is in the caches.
    rows = max(1, _ELEMENTS // tensors[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors))


def concat_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the concatenation of chunks; a single chunk is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def norm_floor(norm: Any) -> torch.Tensor:
    """Return sqrt(D * eps), with which an RMSNorm is sqrt(D) * x / hypot(|x|, sqrt(D * eps))."""
    return torch.tensor((norm.weight.shape[0] * norm.eps) ** 0.5)


def _empty_codes(rows: int, inputs: int) -> torch.Tensor:
    """Return codes that are not initialized, with rows beyond T, see `number_of_rows`."""
    return torch.empty(number_of_rows(rows), inputs, dtype=torch.uint8)


def _write_codes(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Write the codes of rows of float32 values.

    Args:
        values: (T, K), which are overwritten.
        codes: (T, K) uint8.

    Returns:
        Largest absolute value of each row, (T, 1).
    """
    # Unlike `values.abs().amax()`, this needs no copy of the values.
    absmax = torch.maximum(values.amax(-1, True), values.amin(-1, True).neg_())
    absmax.clamp_(min=_MIN_ABSMAX)
    codes.copy_(torch.add(_OFFSET, values.div_(absmax), alpha=STEPS))
    return absmax


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of (T, K) rows, (R, K), and their row factors, max|x|, (T, 1)."""
    count = rows.shape[0]
    codes = _empty_codes(count, rows.shape[1])
    # float32 rows are copied, too, because `_write_codes` overwrites its values.
    absmax = [
        _write_codes(values.to(torch.float32, copy=True), row_codes)
        for values, row_codes in _slices(rows, codes[:count])
    ]
    return codes, concat_rows(absmax)


def normalize_and_quantize(
    rows: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of the RMSNorm of rows, (R, D), and their row factors, (T, 1); see `Codes`.

    x / sqrt(mean(x^2) + eps) = sqrt(D) * x / hypot(|x|, sqrt(D * eps)), so the row factors are
    max|x * weight| / hypot(|x|, floor).

    Args:
        rows: (T, D).
        weight: (D,) float32 weight of the norm.
        floor: `norm_floor` of the norm.
    """
    count = rows.shape[0]
    codes = _empty_codes(count, rows.shape[1])
    row_factors = []
    for x, row_codes in _slices(rows, codes[:count]):
        x = at_least_float32(x)
        # A factor of all values of a token does not change its codes, so the norm is part of
        # the row factor only.
        norms = torch.linalg.vector_norm(x, 2, -1, True)
        absmax = _write_codes(x * weight, row_codes)
        row_factors.append(absmax.div_(torch.hypot(norms, floor)))
    return codes, concat_rows(row_factors)


def gate_and_quantize(
    inner: torch.Tensor, inner_factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of silu(a * f) * b * f, (R, F), and their row factors, (T, 1); see `Codes`.

    Args:
        inner: (T, 2 F), the rows of a and b.
        inner_factors: (T, 1), the row factors f of `inner`.
    """
    count = inner.shape[0]
    codes = _empty_codes(count, inner.shape[1] // 2)
    row_factors = []
    for x, row_codes, x_factors in _slices(inner, codes[:count], inner_factors):
        gate, value = at_least_float32(x).chunk(2, -1)
        # silu is not linear, so the gate is multiplied before it. The factor of the values is
        # part of the row factor.
        values = torch.mul(F.silu(gate * x_factors, inplace=True), value)
        row_factors.append(_write_codes(values, row_codes).mul_(x_factors))
    return codes, concat_rows(row_factors)


# ----------------------------------------------------------------------------------------- layers


class Codes(NamedTuple):
    """Rows of a batch as unsigned 8-bit codes.

    The codes stand for the values (codes - 128) * row_factors * c. The constant c is part of the
    `weight_scales` of the layers that read the codes: sqrt(D) / 127 after a norm, else 1 / 127.

    Attributes:
        codes: (R, K) uint8; rows after the first T are not initialized.
        row_factors: (T, 1) float32.
        shape: Shape of the hidden states that the codes stand for.
        dtype: Dtype of the hidden states.
    """

    codes: torch.Tensor
    row_factors: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype


class Int8Norm(nn.Module):
    """RMSNorm that returns the codes of its outputs: (B, L, D) -> `Codes`."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm
        # Not a buffer, because `.to(bfloat16)` would round it.
        self.norm_floor = norm_floor(norm)

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> Codes:
        """Return the codes of the normalized hidden states."""
        if self.training or hidden.device.type != "cpu":
            raise UserError(
                "an int8 model must run on the CPU in evaluation mode. Call model.eval(), or load "
                "the model again for training or for a GPU."
            )
        weight = self.norm.weight.float()
        rows = hidden.flatten(0, -2)
        codes, row_factors = normalize_and_quantize(rows, weight, self.norm_floor)
        return Codes(codes, row_factors, hidden.shape, hidden.dtype)


class Int8Linear(nn.Module):
    """Linear layer without a bias: (B, L, K) -> (B, L, N).

    Args:
        weight: (N, K) weight.
        limit_pairs: See `largest_weights`.
        input_factor: Constant factor of the inputs that their row factors lack, beside 1 / 127.
    """

    def __init__(self, weight: torch.Tensor, limit_pairs: bool, input_factor: float = 1.0) -> None:
        super().__init__()
        integers, largest = quantize_weight(weight.detach().float(), limit_pairs)
        self.out_features, self.in_features = weight.shape

        # Not buffers, because `.to(bfloat16)` would round the scales.
        self.packed = pack_weight(integers)
        # w = integers * largest / MAX_WEIGHT, and `Codes` lack the constant input_factor / STEPS.
        self.weight_scales = largest * (input_factor / (MAX_WEIGHT * STEPS))
        self.weight_zero_points = torch.zeros(len(weight), dtype=torch.int64)

    def product(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the product with (R, K) codes, (R, N), without the row factors."""
        return product(codes, self.packed, self.weight_scales, dtype, self.weight_zero_points)

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Quantize (T, K) rows and return the outputs of the layer, (T, N)."""
        codes, row_factors = quantize(rows)
        return self.scaled_product(codes, row_factors, rows.dtype)

    def scaled_product(
        self, codes: torch.Tensor, row_factors: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the outputs of the layer, (T, N), for (R, K) codes and (T, 1) row factors."""
        output = self.product(codes, dtype)[: row_factors.shape[0]]
        for values, value_factors in _slices(output, row_factors):
            values.mul_(value_factors)
        return output

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize the inputs per token and return the outputs of the layer."""
        return self.from_rows(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(
            "an int8 model cannot be saved or sent to another process, because its weights have "
            "the memory layout of this processor. Save the original model and quantize it where "
            "it runs."
        )

    # `state_dict` and `save_pretrained` call the first method, pickle and `copy.deepcopy` the
    # second.
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
        """Return the output of the feed-forward."""
        return self.from_codes(tokens.codes, tokens.row_factors, tokens.dtype).view(tokens.shape)

    def from_codes(
        self, codes: torch.Tensor, row_factors: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the output, (T, D), for (R, D) codes and (T, 1) row factors."""
        outputs = []
        # The inner states of a slice, which are the largest ones, stay in the caches for `down`.
        for up_codes, up_factors in zip(codes.split(_TOKENS), row_factors.split(_TOKENS)):
            inner = self.up.product(up_codes, dtype)[: up_factors.shape[0]]
            down_codes, down_factors = gate_and_quantize(inner, up_factors)
            outputs.append(self.down.scaled_product(down_codes, down_factors, dtype))
        return concat_rows(outputs)


@torch.compiler.disable
def _project(
    block: Any, hidden: torch.Tensor, position_embeddings: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace `NeoBERTBlock.project`; the rotation also applies the row factors."""
    inputs = block.attention_norm(hidden)
    qkv = block.qkv.product(inputs.codes, inputs.dtype)[: inputs.row_factors.shape[0]]
    # The outputs of qkv are interleaved per head: (B, L, H, 3, K).
    qkv = qkv.view(*hidden.shape[:2], block.num_heads, 3, -1)
    row_factors = inputs.row_factors.view(*hidden.shape[:2], 1, 1, 1)

    query_key, value = qkv.split((2, 1), dim=-2)
    # Scaling the angles scales the rotated values, without a pass over queries and keys.
    scaled_angles = tuple(angles * row_factors for angles in position_embeddings)
    query_key = apply_rotary_pos_emb(query_key, scaled_angles, in_place=True)
    query, key = query_key.unbind(-2)
    value = value.mul_(row_factors).squeeze(-2)
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
        even_if_slow: Whether to quantize if the int8 products of this CPU take more than twice as
            long as those in float32. If they are not clearly faster, a warning is logged.

    Returns:
        `model` in evaluation mode, without gradients.

    Raises:
        UserError: If the model is not a NeoBERT, is one of the ablations of the paper, or is on a
            GPU, or if the products of this CPU are much slower than in float32 or not exact.

    Example:
        >>> from neobert import NeoBERTModel, quantize_int8
        >>> model = NeoBERTModel.from_pretrained("examples/sentence-encoder")
        >>> model = quantize_int8(model, even_if_slow=True)
        >>> print(model.transformer_encoder[0].qkv)
        Int8Linear()
    """
    # A CrossEncoder or a SentenceTransformer may contain the encoder at any depth.
    encoders = encoders_of(model)
    if not encoders:
        raise UserError(
            f"the model must contain a NeoBERT to be quantized, got a {type(model).__name__}."
        )
    for encoder in encoders:
        _check(encoder)
    limit_pairs = check_int8_product(even_if_slow)

    # Tensors that are created in inference mode cannot be used outside of it.
    model.eval().requires_grad_(False)
    with torch.inference_mode(False), torch.no_grad():
        for encoder in encoders:
            # Smoothing changes the weights, not the outputs, and returns the states before it.
            original = smooth(encoder)
            for block in encoder.transformer_encoder:
                _quantize_block(block, limit_pairs)
            _warn_if_different(random_token_states(encoder.eval()), original)
    return model


def is_int8(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, was quantized with `quantize_int8`."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def _check(encoder: Any) -> None:
    """Raise UserError unless the linear layers of this encoder can be quantized."""
    if is_int8(encoder):
        raise UserError(
            "the model must be in float32 or bfloat16, but is already quantized to int8. Quantize "
            "the original model."
        )

    block = block_type(encoder.config)
    if block != STANDARD_BLOCK:
        raise UserError(
            "int8 quantization requires blocks with RMSNorm, SwiGLU and RoPE, got "
            f"{', '.join(block)}. Use float32 or bfloat16."
        )

    for name, module in encoder.named_modules():
        # A subclass of Linear, as adapters have, would lose what it adds.
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


def _quantize_block(block: Any, limit_pairs: bool) -> None:
    """Replace the linear layers of a block, and the layers that compute their codes."""
    qkv, wo, up, down = linear_layers(block)
    # The codes of an `Int8Norm` stand for values without this factor, sqrt(D).
    norm_factor = qkv.in_features**0.5
    block.qkv = Int8Linear(qkv.weight, limit_pairs, norm_factor)
    block.wo = Int8Linear(wo.weight, limit_pairs)

    # Each norm returns codes, so qkv and up do not quantize their inputs again.
    block.attention_norm = Int8Norm(block.attention_norm)
    block.ffn_norm = Int8Norm(block.ffn_norm)
    block.ffn = Int8FeedForward(
        Int8Linear(up.weight, limit_pairs, norm_factor), Int8Linear(down.weight, limit_pairs)
    )
    # An attribute of the instance shadows the method of the class, for this block alone.
    block.project = MethodType(_project, block)


def _warn_if_different(states: torch.Tensor, original: torch.Tensor) -> None:
    """Warn if the minimum cosine between the hidden states of random tokens is too low or NaN."""
    cosine = F.cosine_similarity(states.double(), original.double(), dim=-1).min().item()
    # Negated, because comparisons with NaN are false.
    if not cosine >= MIN_COSINE:
        warnings.warn(
            f"the int8 model differs from the original one: the minimum cosine similarity of "
            f"{original[..., 0].numel()} random tokens is {cosine:.3f}.",
            stacklevel=3,
        )
