"""Linear layers of 8 bits for inference on a CPU: integer products with a scale a token and a scale
an output.

    model = neobert.quantize_int8(model)

A token's values x become bytes round(x / scale) + 128 with scale = max|x| / 127; an output's
weights w become integers round(w / scale) of at most `weight_steps`. Their product is exact, and
what a text gets does not depend on the other rows of a batch. Everything else, attention and
residuals among it, stays in the model's dtype.

A token's bytes are made in the pass that makes its values (norm, silu * up), and its scale is
multiplied in a pass that exists anyway (rotation, silu). Passes work on slices that stay in the
caches, as in the model. torch.compile leaves them alone: compiled blocks were not faster.

Shape legend: T rows, of a (B, L, D) batch B * L, R those rows filled up, D hidden size, H heads,
K head_dim, F inner size of the feed-forward.
"""

import warnings
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from ..common.errors import UserError
from ..modeling_neobert import apply_rotary_pos_emb, at_least_float32
from .int8_product import ZERO, pack_weight, product, weight_steps
from .outliers import drawn_states, encoders_of, linear_layers, smooth


STEPS = 127  # of a token's largest value
LEAST_COSINE = 0.99  # of a drawn token: what is told about
_ELEMENTS, _TOKENS = 1 << 18, 512  # of a slice of an elementwise pass, a piece of a feed-forward
_SMALLEST = 1e-30  # of a scale: rows of zeros have one too


# ----------------------------------------------------------------------------------------- passes


def _slices(*tensors):
    """Slices of tensors of T rows, together, of `_ELEMENTS` of the first."""
    rows = max(1, _ELEMENTS // tensors[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors))


def _codes(values, factor, codes, scales):
    """Writes the bytes of rows of float32 values, which are lost, and their scales * `factor`."""
    largest = torch.maximum(values.amax(-1, keepdim=True), values.amin(-1, keepdim=True).neg())
    largest = largest.clamp_(min=_SMALLEST)
    codes.copy_(values.mul_(STEPS / largest).add_(ZERO + 0.5))  # rounds: the bytes are cut
    scales.copy_(largest.mul_(factor / STEPS))


class Codes:
    """The rows of a batch as bytes.

    Attributes:
        codes: (R, K) uint8; the last R - T are anything.
        rows: (T, K), the first T of them.
        scales: (T, 1) float32.
        shape, dtype: of the hidden states that they stand for.
    """

    def __init__(self, shape, dtype):
        rows = shape[:-1].numel()
        step = 16 if rows < 512 else 64  # oneDNN builds a kernel for every number of rows
        self.codes = torch.empty(-(-rows // step) * step, shape[-1], dtype=torch.uint8)
        self.rows, self.scales = self.codes[:rows], torch.empty(rows, 1)
        self.shape, self.dtype = shape, dtype


class Int8Norm(nn.Module):
    """The bytes of what an RMSNorm gives: (B, L, D) -> `Codes`."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    @torch.compiler.disable
    def forward(self, hidden):
        if self.training or hidden.device.type != "cpu":
            raise UserError(
                "an int8 model is for inference on the CPU: call model.eval(), and load the model "
                "anew for training or a GPU"
            )
        made = Codes(hidden.shape, hidden.dtype)
        for codes, scales, x in _slices(made.rows, made.scales, hidden.flatten(0, -2)):
            _codes(*self.values(at_least_float32(x)), codes, scales)
        return made

    def values(self, x):
        """Rows that are the norm's up to a factor a row, (T, D), and that factor, (T, 1)."""
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
        return x * self.norm.weight.float(), (squares / x.shape[-1] + self.norm.eps).rsqrt()


class Int8Linear(nn.Module):
    """A linear layer without a bias: (B, L, K) -> (B, L, N).

    Args:
        weight: (N, K).
        steps: the largest integer.
    """

    def __init__(self, weight, steps):
        super().__init__()
        weight = weight.detach().float()
        largest = torch.maximum(weight.amax(1), weight.amin(1).neg()).clamp(min=_SMALLEST)
        integers = (weight * (steps / largest)[:, None]).round_().to(torch.int8)
        self.out_features, self.in_features = weight.shape
        # No buffers: `.to(bfloat16)` would round the scales.
        self.packed, self.weight_scales = pack_weight(integers), largest / steps

    def product(self, codes, dtype):
        """(R, K) bytes -> (R, N) of `dtype`, still without the scales of the rows."""
        return product(codes, self.packed, self.weight_scales, dtype)

    @torch.compiler.disable
    def forward(self, x):
        made = Codes(x.shape, x.dtype)
        for codes, scales, values in _slices(made.rows, made.scales, x.flatten(0, -2)):
            _codes(values.to(torch.float32, copy=True), 1.0, codes, scales)
        output = self.product(made.codes, x.dtype)[: len(made.scales)]
        for values, scales in _slices(output, made.scales):
            values.mul_(scales)
        return output.unflatten(0, x.shape[:-1])

    def _refuse(self, *args, **kwargs):
        raise UserError(
            "an int8 model cannot be saved or sent to another process: its weights are laid out "
            "for this processor; save the model that it was made of, and quantise where it runs"
        )

    _save_to_state_dict = __getstate__ = _refuse


class Int8FeedForward(nn.Module):
    """down(silu(a) * b) with (a, b) the halves of up(x): `Codes` -> (B, L, D)."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    @torch.compiler.disable
    def forward(self, tokens):
        pieces = zip(tokens.codes.split(_TOKENS), tokens.scales.split(_TOKENS))
        outputs = [self.piece(*piece, tokens.dtype) for piece in pieces]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).view(tokens.shape)

    def piece(self, codes, scales, dtype):
        """(R, D) bytes and (T, 1) scales -> (T, D)."""
        inner = self.up.product(codes, dtype)[: len(scales)]
        made = Codes(torch.Size([len(scales), self.down.in_features]), dtype)
        for codes, row_scales, x, factor in _slices(made.rows, made.scales, inner, scales):
            gate, value = at_least_float32(x).chunk(2, dim=-1)  # still without the factor
            gated = F.silu(gate * factor, inplace=True).mul_(value)
            _codes(gated, factor, codes, row_scales)
        output = self.down.product(made.codes, dtype)[: len(scales)]
        for x, row_scales in _slices(output, made.scales):
            x.mul_(row_scales)
        return output


@torch.compiler.disable
def _project(block, hidden, position_embeddings):
    """`NeoBERTBlock.project`; the rotation multiplies the scales of the rows."""
    made = block.attention_norm(hidden)
    qkv = block.qkv.product(made.codes, made.dtype)[: len(made.scales)]
    qkv = qkv.view(*hidden.shape[:2], block.num_heads, 3, -1)
    scales = made.scales.view(*hidden.shape[:2], 1, 1, 1)
    query_key, value = qkv.split((2, 1), dim=-2)
    turns = tuple(angles * scales for angles in position_embeddings)
    query_key = apply_rotary_pos_emb(query_key, turns, in_place=True)
    query, key = query_key.unbind(-2)
    value = value.mul_(scales).squeeze(-2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


# -------------------------------------------------------------------------------------- the model


def quantize_int8(model: nn.Module, even_if_slow: bool = False) -> nn.Module:
    """Gives the blocks of a NeoBERT linear layers of 8 bits, in place, for inference on a CPU.

    Drawn tokens run through the model before and after. Outliers among its channels are smoothed,
    and where a token's cosine is below `LEAST_COSINE` a warning says so.

    Args:
        model: `NeoBERTModel`, one of its heads, or what contains one, such as a
            SentenceTransformer; in float32 or bfloat16, in which everything else stays.
        even_if_slow: also where the products of this CPU are not faster than in float32.
    Returns:
        `model`, in evaluation, without gradients.
    Raises:
        UserError: another model, or one of the paper's ablations; training, a GPU; a CPU whose
            products are slow or not exact.
    """
    encoders = encoders_of(model)
    if not encoders:
        raise UserError(f"int8 is for NeoBERT, but a {type(model).__name__} without it was given")
    for encoder in encoders:
        _check(encoder)
    steps = weight_steps(even_if_slow)
    model.eval().requires_grad_(False)
    with torch.inference_mode(False), torch.no_grad():
        for encoder in encoders:
            exact = smooth(encoder)
            for block in encoder.transformer_encoder:
                _quantise(block, steps)
            states = drawn_states(encoder.eval()).double()
            cosine = F.cosine_similarity(states, exact.double(), dim=-1).min().item()
            if not cosine >= LEAST_COSINE:
                warnings.warn(
                    f"int8 is not near to this model: of {exact[..., 0].numel()} drawn tokens the "
                    f"worst has cosine {cosine:.3f} to the model as it was",
                    stacklevel=2,
                )
    return model


def is_int8(model):
    """Whether a model, or a part of it, went through `quantize_int8`."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def _check(encoder):
    """Raises UserError unless the linear layers of this encoder can be quantised."""
    if is_int8(encoder):
        raise UserError("this model is in int8 already")
    config = encoder.config
    block = (config.norm_type, config.hidden_act, config.position_embedding_type)
    if block != ("rms", "swiglu", "rope"):
        raise UserError(f"int8 takes blocks of rms, swiglu and rope, but these are of {block}")
    for name, module in encoder.named_modules():
        if hasattr(module, "base_layer") or isinstance(module, nn.Linear) != (
            type(module) is nn.Linear
        ):
            raise UserError(
                f"{name} is a {type(module).__name__}, but int8 takes plain linear layers; merge "
                "adapters first, with merge_and_unload()"
            )
    weight = encoder.transformer_encoder[0].qkv.weight
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(
            "int8 takes a model in float32 or bfloat16 on the CPU, but this one is in "
            f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
        )


def _quantise(block, steps):
    """Replaces the linear layers of a block, and what quantises for them."""
    layers = (Int8Linear(layer.weight, steps) for layer in linear_layers(block))
    block.qkv, block.wo, up, down = layers
    block.attention_norm = Int8Norm(block.attention_norm)
    block.ffn_norm = Int8Norm(block.ffn_norm)
    block.ffn = Int8FeedForward(up, down)
    block.project = MethodType(_project, block)
