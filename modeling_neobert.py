"""NeoBERT (arXiv 2502.19587): 28 pre-RMSNorm blocks with SwiGLU and RoPE, and its task heads.

Shape legend: B batch, L padded length, T packed tokens, N packed texts, D hidden size, H heads, K head size, V vocabulary, C labels.

One forward, two layouts: dense (B, L, D) and packed (1, T, D). Texts are packed by the caller (`cu_seq_lens_q`, ...) or by
`NeoBERTModel` when `attention_mask` has padding; the blocks do not know which. `_attention_plan` picks the attention function and its
mask once per forward.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple, logging

from .configuration_neobert import NeoBERTConfig


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch < 2.10
    varlen_attn = None

logger = logging.get_logger(__name__)

_PACKING_KWARGS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _is_tracing():
    """True under torch.compile, torch.export and torch.jit.trace, where shapes must not depend on values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


# ---------------------------------------------------------------------------------------------------------------- positions


class _RopeSettings:
    """The fields that `ROPE_INIT_FUNCTIONS` reads, under the names of both transformers 4 and 5."""

    def __init__(self, config):
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.head_dim = config.head_size
        self.max_position_embeddings = config.max_position_embeddings
        self.rope_parameters = dict(config.rope_parameters)
        self.rope_scaling = self.rope_parameters
        self.rope_theta = self.rope_parameters["rope_theta"]
        self.partial_rotary_factor = 1.0

    def standardize_rope_params(self):
        pass


def rotary_table(config, position_ids, length):
    """Cosines and sines of the rotary angles, position * theta^(-2i / K) for pair i (RoFormer, eq. 15), in float32.

    Worked out in every forward: a buffer would be cast by `.to(bfloat16)` and lost by transformers 5 loading.

    Args:
        position_ids: (B or 1, L).
        length: the longest text in tokens, which "dynamic" scaling depends on.
    Returns:
        cos, sin: (B or 1, L, K / 2) each, times the scaling's attention factor.
    """
    device = position_ids.device
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
        frequencies, attention_factor = config.rope_theta**-exponents, 1.0
    else:
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](_RopeSettings(config), device, seq_len=length)
    # An elementwise product: unlike a matrix product, autocast leaves it in float32.
    angles = position_ids[..., None].float() * frequencies.float()
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def apply_rotary(x, rotary):
    """Rotates the adjacent pairs (2i, 2i + 1) of the last axis, in float32.

    Args:
        x: (B, L, H, ..., K), any strides.
        rotary: from `prepare_rotary`.
    Returns:
        Same shape and dtype as `x`.
    """
    if len(rotary) == 1:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotary[0]).flatten(-2).type_as(x)
    cos, sin = rotary
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x.float() * cos + swapped.float() * sin).type_as(x)


def prepare_rotary(cos, sin, compiled=False):
    """The table in the form that multiplies q and k of (B, L, H, 2, K) cheapest.

    Eager on CPU and CUDA: one complex number a pair, a single pass over memory. Traced, for `compiled` blocks, and on devices that have few
    operations for complex numbers: cosines and signed sines of (.., K), which compilers fuse.
    """
    if compiled or _is_tracing() or cos.device.type not in ("cpu", "cuda", "meta"):
        cos = cos.repeat_interleave(2, dim=-1)
        sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
        return cos[:, :, None, None], sin[:, :, None, None]
    return (torch.complex(cos, sin)[:, :, None, None],)


# ---------------------------------------------------------------------------------------------------------------- attention


def eager_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """softmax(q k^T * scaling) v, the reference that can return its weights.

    Args:
        query, key, value: (B, H, L, K).
        attention_mask: boolean, True where attention is allowed, or additive; broadcastable to (B, H, L, L); or None.
    Returns:
        (B, L, H, K) and the weights (B, H, L, L).
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(query)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


def _plain_sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """SDPA alone: the library's function around it costs as much as the kernel on a short text."""
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2), None


class _TextByText:
    """Runs a dense attention function on a packed batch, text by text; neighbours of one length together.

    In place of an attention function; the mask it is called with is the `_Layout`: compiled blocks would guard on a list of lengths
    and recompile for every batch.
    """

    def __init__(self, attention):
        self.attention = attention

    @torch.compiler.disable
    def __call__(self, module, query, key, value, layout, **kwargs):
        groups = layout.groups
        sizes = [count * length for count, length in groups]
        outputs = []
        # One split a tensor: the gradient of many slices would be as many tensors of the whole batch.
        for (count, length), *parts in zip(groups, *(x.split(sizes, dim=2) for x in (query, key, value))):
            if count > 1:  # (1, H, count * length, K) -> (count, H, length, K), without a copy
                parts = (x[0].unflatten(1, (count, length)).transpose(0, 1) for x in parts)
            output, _ = self.attention(module, *parts, None, **kwargs)
            outputs.append(output.flatten(0, 1))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


class _Repadded:
    """Runs a dense attention function on a packed batch by scattering q, k and v alone to (N, H, longest text, K).

    In place of an attention function; the mask it is called with is `_Layout.padding`.
    """

    def __init__(self, attention):
        self.attention = attention

    def __call__(self, module, query, key, value, padding, **kwargs):
        index, mask, places = padding
        q, k, v = (x[0].transpose(0, 1)[index].transpose(1, 2) for x in (query, key, value))
        output, _ = self.attention(module, q, k, v, mask[:, None, None], **kwargs)
        return output.flatten(0, 1)[places][None], None


def varlen_sdpa(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """torch's own variable-length flash kernel (torch >= 2.10, CUDA, fp16 or bf16), on packed (1, H, T, K)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    lengths = (kwargs[name] for name in _PACKING_KWARGS)
    return varlen_attn(q, k, v, *lengths, scale=scaling)[None], None


def _flex_on_cpu(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """flex_attention without compilation: torch's compiled CPU kernel has no backward and does not build for changing shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    if kwargs.get("dropout", 0.0) > 0:
        raise ValueError("flex_attention has no dropout; set attention_dropout=0 or choose attn_implementation='sdpa'.")
    return flex_attention(query, key, value, block_mask=attention_mask, scale=scaling).transpose(1, 2), None


def _mask_convention(implementation):
    """What mask an attention implementation takes: "flash" (2-D or none), "flex" (BlockMask), "additive" or "boolean"."""
    if implementation in ("eager", "sdpa"):
        return "boolean"
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, None)
    for name, convention in (("flash_attention_2", "flash"), ("flex_attention", "flex"), ("eager", "additive")):
        if function is not None and function is ALL_MASK_ATTENTION_FUNCTIONS[name]:
            return convention
    return "boolean"


def _text_index(cu_seq_lens, total):
    """(T,) index of the text that each packed token belongs to."""
    tokens = torch.arange(total, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return torch.searchsorted(cu_seq_lens[1:].contiguous(), tokens, right=True)


def _block_mask(shape, texts=None, mask=None):
    """flex_attention's BlockMask: tokens of one text see each other (`texts`, (T,)), or all see the real ones (`mask`, (B, L))."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = shape
    if texts is not None:

        def visible(b, h, q, k):
            return texts[q] == texts[k]
    else:

        def visible(b, h, q, k):
            return mask[b, k]

    device = (texts if texts is not None else mask).device
    # Compiled, the mask is made block by block; otherwise B x L x L booleans exist for a moment.
    return create_block_mask(visible, batch, None, length, length, device=device, _compile=device.type == "cuda")


def _runs(values):
    """[count, value] of neighbours that are equal."""
    runs = []
    for value in values:
        if runs and runs[-1][1] == value:
            runs[-1][0] += 1
        else:
            runs.append([1, value])
    return runs


class _Layout:
    """Where each text of a packed batch lies.

    Attributes:
        cu_seq_lens: (N + 1,) int32, first token of each text, then T.
        max_length: longest text in tokens.
        lengths: the N lengths as Python numbers, or None while tracing.
        groups: [number of texts, their length] of neighbours of one length; None while tracing.
        index: (T,) of each packed token in the flattened (B * L) batch, or None when the caller packed.
    """

    def __init__(self, cu_seq_lens, max_length, lengths=None, index=None):
        self.cu_seq_lens = cu_seq_lens
        self.max_length = max_length
        self.lengths = lengths
        self.index = index
        self.groups = None if lengths is None else _runs(lengths)

    @classmethod
    def from_mask(cls, mask):
        """Layout of a padded batch, or None if there is nothing to gain: no padding, or no token at all.

        Args:
            mask: (B, L) bool.
        """
        lengths = mask.sum(dim=-1)
        per_row = lengths.tolist()
        if sum(per_row) in (0, mask.numel()):
            return None
        # Sorted by length, so that texts of one length are neighbours.
        order = lengths.argsort(stable=True)
        index = mask[order].flatten().nonzero().squeeze(-1)
        index = order[index // mask.shape[1]] * mask.shape[1] + index % mask.shape[1]
        per_text = sorted(length for length in per_row if length)
        cu_seq_lens = torch.tensor([0, *per_text], device=mask.device).cumsum(0).to(torch.int32)
        return cls(cu_seq_lens, per_text[-1], per_text, index)

    @classmethod
    def from_rows(cls, shape, device):
        """Layout of a batch of rows (B, L) without padding."""
        bounds = torch.arange(0, (shape[0] + 1) * shape[1], shape[1], dtype=torch.int32, device=device)
        return cls(bounds, shape[1], [shape[1]] * shape[0], torch.arange(shape[0] * shape[1], device=device))

    @classmethod
    def from_kwargs(cls, cu_seq_lens, max_length):
        """Layout of a batch that the caller packed."""
        lengths = None if _is_tracing() else cu_seq_lens.diff().tolist()
        if lengths is not None:
            # A number, also where a tensor was given, which would cost a wait for the device in every layer.
            max_length = max(lengths, default=0)
        elif max_length is None:
            max_length = cu_seq_lens.diff().max()
        return cls(cu_seq_lens, max_length, lengths)

    @classmethod
    def from_traced_position_ids(cls, position_ids):
        """As `from_position_ids`, in shapes that do not depend on values: T texts, of which those at the end are empty; one text where the
        positions do not start again."""
        tokens = torch.arange(position_ids.shape[1], device=position_ids.device)
        starts = (position_ids[0] == 0) | (tokens == 0)
        first = torch.where(starts, tokens, 0).cummax(0).values
        fits = (position_ids[0] == tokens - first).all()
        starts = torch.where(fits, starts, tokens == 0)
        total = position_ids.shape[1]
        bounds = F.pad(torch.where(starts, tokens, total).sort().values, (0, 1), value=total).to(torch.int32)
        return cls(bounds, bounds.diff().max())

    @classmethod
    def from_position_ids(cls, position_ids):
        """Layout of (1, T) positions that start again at 0 with every text, as `DataCollatorWithFlattening` gives them; or None."""
        starts = (position_ids[0] == 0).nonzero().squeeze(-1).tolist()
        if len(starts) < 2 or starts[0] != 0:
            return None
        bounds = torch.tensor([*starts, position_ids.shape[1]], dtype=torch.int32, device=position_ids.device)
        if not torch.equal(position_ids[0], cls(bounds, 0).position_ids(position_ids.shape[1])[0]):
            return None
        return cls.from_kwargs(bounds, None)

    def position_ids(self, total):
        """(1, T): positions within each text."""
        tokens = torch.arange(total, device=self.cu_seq_lens.device)
        return (tokens - self.cu_seq_lens[:-1].long()[_text_index(self.cu_seq_lens, total)])[None]

    def parts(self, most):
        """Layouts of whole texts, in order, of up to `most` tokens together; a longer text is alone."""
        parts, room = [], -1
        for length in self.lengths:
            if length > room:
                parts.append([])
                room = most
            parts[-1].append(length)
            room -= length
        for lengths in parts:
            bounds = torch.tensor([0, *lengths], device=self.cu_seq_lens.device).cumsum(0).to(torch.int32)
            yield _Layout(bounds, max(lengths), lengths)

    def pack(self, x):
        """(B, L, ...) -> (1, T, ...)."""
        return x.flatten(0, 1)[self.index][None]

    def unpack(self, x, batch, length):
        """(1, T, ...) -> (B, L, ...) with zeros at padding."""
        output = x.new_zeros(batch * length, *x.shape[2:])
        return output.index_copy_(0, self.index, x[0]).unflatten(0, (batch, length))

    def kwargs(self, given):
        """The keyword arguments of variable-length attention functions: as `given`, with what is missing; offsets int32, as kernels ask for."""
        bounds, longest = self.cu_seq_lens, self.max_length
        packing = {name: given.get(name) for name in _PACKING_KWARGS}
        for name, value in zip(_PACKING_KWARGS, (bounds, bounds, longest, longest)):
            packing[name] = value if packing[name] is None else packing[name]
            if name.startswith("cu") and packing[name].dtype != torch.int32:
                packing[name] = packing[name].to(torch.int32)
        return {**given, **packing}

    def padding(self, total):
        """The batch in which every text has a row: index and mask, (N, longest text), and where each packed token is in it, (T,)."""
        bounds = self.cu_seq_lens.long()
        steps = torch.arange(self.max_length, device=bounds.device)
        index = (bounds[:-1, None] + steps).clamp(max=bounds[-1] - 1)
        texts = _text_index(bounds, total)
        places = self.position_ids(total)[0] + texts * self.max_length
        return index, steps < bounds.diff()[:, None], places


def _attention_plan(config, implementation, hidden, mask, layout, training, with_weights=False):
    """Attention function and its mask for one forward; the same for every block.

    Args:
        implementation: name of the attention implementation.
        hidden: embeddings, (B, L, D) or packed (1, T, D).
        mask: (B, L) bool, None without padding or when packed.
        layout: `_Layout` when packed, else None.
        with_weights: the function must return its weights, over the whole row.
    Returns:
        function(module, q, k, v, mask, dropout=, scaling=, **kwargs), mask.
    """
    if implementation != "eager" and implementation not in ALL_ATTENTION_FUNCTIONS:
        raise ValueError(_no_such(implementation))
    function = eager_attention if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    convention = _mask_convention(implementation)
    shape = hidden.shape[:2]
    if convention == "flash":
        return function, mask
    if convention == "flex":
        function = _flex_on_cpu if hidden.device.type == "cpu" else function
        if layout is not None:
            return function, _block_mask(shape, texts=_text_index(layout.cu_seq_lens, shape[1]))
        return function, _block_mask(shape, mask=_visible(mask)) if mask is not None else None
    if layout is None:
        allowed = _visible(mask)[:, None, None, :] if mask is not None else None
    elif layout.lengths is not None and implementation in ("eager", "sdpa") and not with_weights:
        function = _plain_sdpa if implementation == "sdpa" else function
        if hidden.device.type != "cuda" or implementation == "eager":
            return _TextByText(function), layout
        dropout = config.attention_dropout if training else 0.0
        if _varlen_obstacle(_attention_dtype(hidden), dropout) is None:
            return varlen_sdpa, None
        return _Repadded(function), layout.padding(shape[1])
    else:
        texts = _text_index(layout.cu_seq_lens, shape[1])
        allowed = (texts[:, None] == texts)[None, None]
    if convention == "additive" and allowed is not None:
        lowest = torch.finfo(hidden.dtype).min
        allowed = torch.zeros_like(allowed, dtype=hidden.dtype).masked_fill(~allowed, lowest)
    return function, allowed


def _no_such(implementation):
    return (
        f"There is no attention implementation {implementation!r}; set one with model.set_attn_implementation, such as 'sdpa', "
        "or register it with transformers.AttentionInterface.register."
    )


def _visible(mask):
    """`mask` with rows that are all padding seeing everything: softmax over nothing is not finite."""
    return mask | ~mask.any(dim=-1, keepdim=True)


def _attention_dtype(hidden):
    """The dtype that q, k and v will have."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _varlen_obstacle(dtype, dropout):
    """Why torch's variable-length kernel cannot run on CUDA, or None."""
    if varlen_attn is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen (2.10 or newer has)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if dropout > 0:
        return "the kernel has no dropout"
    return None


# ------------------------------------------------------------------------------------------------------------------- blocks


# Tokens whose feed-forward runs at once on the CPU without gradients: the inner activations (16 KiB a token at the published width)
# stay in cache and in reused memory. Measured 0.97 instead of 0.87 of the matrix-product rate; 512 to 2,048 differ little.
_CPU_SLICE = 1024

# Tokens that go through all blocks at once there, in whole texts: glibc maps tensors over 32 MiB anew at every use, and qkv has 9 KiB a token.
_CPU_PART = 3072

# Attributes of modules that accelerate moves between devices, and of compiled ones.
_HOOKED = {"_hf_hook", "_compiled_call_impl"}


def _plain_on_cpu(x):
    """True on the CPU without gradients or tracing, where what is best for its caches and memory is not in the way of anything."""
    return x.device.type == "cpu" and not torch.is_grad_enabled() and not _is_tracing()


class NeoBERTRMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019); on the CPU in 0.4 of the time of `torch.nn.RMSNorm`."""

    def forward(self, x):
        if not _plain_on_cpu(x) or x.dtype != torch.float32:
            return super().forward(x)
        return (x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt_()).mul_(self.weight)


class NeoBERTSwiGLU(nn.Module):
    """w3(silu(a) * b) with (a, b) the halves of w12(x) (Shazeer 2020); (..., D) -> (..., D)."""

    def __init__(self, config):
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.ffn_inner_size, bias=False)
        self.w3 = nn.Linear(config.ffn_inner_size, config.hidden_size, bias=False)

    def forward(self, x):
        if not _plain_on_cpu(x):
            gate, value = self.w12(x).chunk(2, dim=-1)
            return self.w3(F.silu(gate) * value)
        parts = []
        for part in x.flatten(0, -2).split(_CPU_SLICE):
            gate, value = self.w12(part).chunk(2, dim=-1)
            parts.append(self.w3(F.silu(gate).mul_(value)))
        return torch.cat(parts).view_as(x)


def _feed_forward(config):
    if config.hidden_act == "swiglu":
        return NeoBERTSwiGLU(config)
    return nn.Sequential(
        nn.Linear(config.hidden_size, config.ffn_inner_size, bias=False),
        nn.GELU(),
        nn.Linear(config.ffn_inner_size, config.hidden_size, bias=False),
    )


def _norm(config):
    norm = NeoBERTRMSNorm if config.norm_type == "rms" else nn.LayerNorm
    return norm(config.hidden_size, eps=config.norm_eps)


class NeoBERTBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + ffn(norm(x)).

    Attention functions receive this module: they read `is_causal`, `layer_idx` and `config`.
    """

    is_causal = False

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.scaling = config.head_size**-0.5
        self.attention_norm = _norm(config)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = _norm(config)
        self.ffn = _feed_forward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden, rotary, attention, mask, **kwargs):
        """
        Args:
            hidden: (B, L, D), or packed (1, T, D).
            rotary: from `prepare_rotary`, or None with learned positions.
            attention, mask: from `_attention_plan`.
        Returns:
            hidden states in the same shape, attention weights (B, H, L, L) or None.
        """
        attended, weights = self.attend(self.attention_norm(hidden), rotary, attention, mask, **kwargs)
        hidden = hidden + self.dropout(attended)
        return hidden + self.dropout(self.ffn(self.ffn_norm(hidden))), weights

    def attend(self, x, rotary, attention, mask, **kwargs):
        # The rows of qkv.weight are interleaved per head: (H, 3, K).
        qkv = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1))
        value = qkv[..., 2, :]
        query, key = (qkv[..., :2, :] if rotary is None else apply_rotary(qkv[..., :2, :], rotary)).unbind(-2)
        output, weights = attention(
            self,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.wo(output.flatten(-2)), weights


class NeoBERTPreTrainedModel(PreTrainedModel):
    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NeoBERTBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True
    _supports_flash_attn_3 = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # The classes without a decoder load masked-LM checkpoints, and the other way round for the heads.
    _keys_to_ignore_on_load_unexpected = [r"^decoder\."]

    def _init_weights(self, module):
        """Paper, section 3: uniform. `torch.nn.init` functions only: transformers 5 skips those on weights already loaded."""
        if isinstance(module, nn.Linear):
            nn.init.uniform_(module.weight, -self.config.decoder_init_range, self.config.decoder_init_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -self.config.embedding_init_range, self.config.embedding_init_range)
        elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def get_input_embeddings(self):
        return getattr(self, self.base_model_prefix, self).encoder

    def set_input_embeddings(self, value):
        getattr(self, self.base_model_prefix, self).encoder = value

    def attention_backend(self):
        """One sentence: which kernel packed batches run through on the model's device, in its dtype or that of autocast, and why no faster one does."""
        implementation, device = self.config._attn_implementation, self.device.type
        if device == "meta":
            return "The weights are not on a device yet (or accelerate moves them there one by one), so no kernel can be named."
        dtype = _attention_dtype(torch.empty(0, dtype=self.dtype, device=self.device))
        where = f"{implementation} on {device} in {str(dtype).removeprefix('torch.')}"
        low = dtype in (torch.float16, torch.bfloat16)
        convention = _mask_convention(implementation)
        if implementation != "eager" and implementation not in ALL_ATTENTION_FUNCTIONS:
            return _no_such(implementation)
        if convention == "flash":
            needs = [] if device == "cuda" else ["a CUDA device"]
            needs += [] if low else ["float16 or bfloat16 (dtype=torch.bfloat16, or autocast)"]
            needs = needs if implementation.startswith("flash_attention") else []  # a Hub kernel knows its own devices
            kernel = f"the variable-length kernels of {implementation}" + (f", which need {' and '.join(needs)}" if needs else "")
        elif convention == "flex":
            kernel = "flex_attention with a block mask per text" + (", not compiled on the CPU" if device == "cpu" else "")
        elif implementation == "eager":
            kernel = "matrix products text by text; attn_implementation='sdpa' is faster"
        elif implementation != "sdpa":
            kernel = f"the registered function {implementation!r} with a mask; padded batches are not packed for it"
        elif device != "cuda":
            kernel = "scaled_dot_product_attention text by text; variable-length flash kernels need a CUDA device"
        else:
            obstacle = _varlen_obstacle(dtype, self.config.attention_dropout if self.training else 0.0)
            kernel = "torch.nn.attention.varlen (flash kernels of torch itself)"
            if obstacle is not None:
                kernel = f"scaled_dot_product_attention on re-padded q, k, v; not torch.nn.attention.varlen, since {obstacle}"
        off = "" if self.config.unpad_inputs else " Padded batches are not packed: unpad_inputs is off."
        return f"{where}: {kernel}.{off}"


class NeoBERTModel(NeoBERTPreTrainedModel):
    """The backbone: token ids to hidden states."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        if config.position_embedding_type == "learned":
            # Row 0 is padding; positions count from 1.
            self.positional_embedding = nn.Embedding(config.max_position_embeddings + 1, config.hidden_size, padding_idx=0)
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)
        self.transformer_encoder = nn.ModuleList(NeoBERTBlock(config, i) for i in range(config.num_hidden_layers))
        self.layer_norm = _norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        output_attentions=None,
        output_hidden_states=None,
        **kwargs,
    ):
        """
        Args:
            input_ids: (B, L) token ids, or packed (1, T); or `inputs_embeds` (B, L, D) in their place.
            attention_mask: (B, L) of ones and zeros, int, bool or float; None if every token is real.
            token_type_ids: accepted for BERT's sake and ignored.
            position_ids: (L,), (1, L) or (B, L). By default the index in the row, or in the text when packed. A single row without
                attention_mask whose positions start again at 0 is a packed batch.
            output_attentions: also return (B, H, L, L) weights per block, computed by the eager function.
            output_hidden_states: also return the num_hidden_layers + 1 hidden states; the last one is normed.
            kwargs: handed to the attention function as they are. `cu_seq_lens_q`, `cu_seq_lens_k` ((N + 1,) int32) and `max_length_q`,
                `max_length_k` mark a packed (1, T) batch.
        Returns:
            BaseModelOutput in the caller's shape. Where the model packed a padded batch, padding positions are zero.
        Raises:
            ValueError: inputs that do not fit together.
        """
        _check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids)
        shape = self._checked_tokens(input_ids, inputs_embeds)
        device = (inputs_embeds if input_ids is None else input_ids).device
        mask = _checked_mask(attention_mask, shape)
        position_ids = _checked_positions(position_ids, shape)
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states

        implementation = self.config._attn_implementation
        if output_attentions and implementation != "eager":
            logger.warning_once(f"output_attentions=True: {implementation} returns no weights, the eager function is used instead.")
            implementation = "eager"

        layout = _caller_layout(shape, attention_mask, position_ids, kwargs)
        padded = None
        if layout is None and mask is not None and not _is_tracing() and mask.device.type != "meta":
            padded = _Layout.from_mask(mask)
            if padded is None and mask.all():
                mask = None
        in_parts = not output_attentions and not output_hidden_states and self._runs_in_parts(implementation, shape)
        if in_parts and layout is None and mask is None and shape[0] > 1:
            padded = _Layout.from_rows(shape, device)
        pack = padded is not None and self.config.unpad_inputs and not output_attentions and self._packs(implementation)

        # In real tokens, also where the batch stays padded: "dynamic" RoPE must not depend on padding.
        texts = layout or padded
        longest = texts.max_length if texts is not None else shape[1]
        if texts is None and mask is not None and self.config.rope_parameters["rope_type"] == "dynamic":
            longest = mask.sum(dim=-1).max()
        self._check_length(longest)
        positions = self._positions(input_ids, mask, position_ids, layout, shape, device)
        if pack:
            layout = padded
            positions = layout.pack(positions.expand(shape))
            input_ids, inputs_embeds = (x if x is None else layout.pack(x) for x in (input_ids, inputs_embeds))
        hidden = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.position_embedding_type == "learned":
            hidden = hidden + self.positional_embedding(positions)
        rotary = None
        if self.config.position_embedding_type == "rope":
            compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in self.transformer_encoder)
            rotary = prepare_rotary(*rotary_table(self.config, positions, longest), compiled)
        hidden = self.embedding_dropout(hidden)

        all_hidden, all_weights = [] if output_hidden_states else None, [] if output_attentions else None
        if in_parts and layout is not None:
            hidden = self._encode_in_parts(hidden, rotary, implementation, layout, kwargs)
        else:
            hidden = self._encode(hidden, rotary, implementation, mask, layout, kwargs, all_hidden, all_weights)
        if pack:
            hidden, *unpacked = (layout.unpack(x, *shape) for x in (hidden, *(all_hidden or ())))
            all_hidden = unpacked if output_hidden_states else None
        return BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=None if all_hidden is None else tuple(all_hidden),
            attentions=None if all_weights is None else tuple(all_weights),
        )

    def _encode(self, hidden, rotary, implementation, mask, layout, kwargs, all_hidden=None, all_weights=None):
        """Blocks and last norm over embeddings (B, L, D), or packed (1, T, D); adds to the lists what every block saw, and the result."""
        if layout is not None:
            mask, kwargs = None, layout.kwargs(kwargs)
        with_weights = all_weights is not None
        attention, allowed = _attention_plan(self.config, implementation, hidden, mask, layout, self.training, with_weights)
        for block in self.transformer_encoder:
            if all_hidden is not None:
                all_hidden.append(hidden)
            hidden, weights = block(hidden, rotary, attention, allowed, **kwargs)
            if with_weights:
                all_weights.append(weights)
        hidden = self.layer_norm(hidden)
        if all_hidden is not None:
            all_hidden.append(hidden)
        return hidden

    def _encode_in_parts(self, hidden, rotary, implementation, layout, kwargs):
        """`_encode` for a packed batch, some whole texts after others."""
        kwargs = {name: value for name, value in kwargs.items() if name not in _PACKING_KWARGS}
        parts = list(layout.parts(_CPU_PART))
        if len(parts) == 1:
            return self._encode(hidden, rotary, implementation, None, layout, kwargs)
        sizes = [sum(part.lengths) for part in parts]
        tables = [None] * len(parts) if rotary is None else zip(*(x.split(sizes, dim=1) for x in rotary))
        pieces = zip(hidden.split(sizes, dim=1), tables, parts)
        return torch.cat([self._encode(x, table, implementation, None, part, kwargs) for x, table, part in pieces], dim=1)

    def _runs_in_parts(self, implementation, shape):
        """Whether a batch (B, L) goes through all blocks in parts of whole texts; not where a hook or a compiled block would see the parts."""
        if not _plain_on_cpu(self.layer_norm.weight) or self.training or not self.config.unpad_inputs:
            return False
        if shape[0] * shape[1] <= _CPU_PART or implementation not in ("eager", "sdpa"):
            return False
        inner = [self.layer_norm, *self.transformer_encoder.modules()]
        return not any(module._forward_hooks or module._forward_pre_hooks or _HOOKED & vars(module).keys() for module in inner)

    @staticmethod
    def _packs(implementation):
        """Whether padded batches may be packed for this implementation: a function that we know nothing of gets a mask."""
        return implementation in ("eager", "sdpa") or _mask_convention(implementation) in ("flash", "flex")

    def _checked_tokens(self, input_ids, inputs_embeds):
        """(B, L) of the tokens given."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"Give either input_ids or inputs_embeds; {given} was given.")
        if inputs_embeds is not None:
            if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
                raise ValueError(
                    f"inputs_embeds must have shape (batch, length, {self.config.hidden_size}), but {tuple(inputs_embeds.shape)} was given."
                )
            if not inputs_embeds.is_floating_point():
                raise ValueError(f"inputs_embeds must be floating-point, but {inputs_embeds.dtype} was given; token ids go to input_ids.")
            return self._nonempty(inputs_embeds.shape[:2])
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"input_ids must be a (batch, length) tensor of int64 or int32, but {tuple(input_ids.shape)} of {input_ids.dtype} was given."
            )
        rows = self.encoder.weight.shape[0]
        if input_ids.device.type == "cpu" and input_ids.numel() and not _is_tracing():
            lowest, highest = input_ids.min().item(), input_ids.max().item()
            if lowest < 0 or highest >= rows:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(f"input_ids must lie between 0 and {rows - 1}, but {wrong} was given; is it this model's tokenizer?")
        return self._nonempty(input_ids.shape)

    @staticmethod
    def _nonempty(shape):
        if not _is_tracing() and 0 in shape:
            raise ValueError(f"A batch must hold at least one text of one token, but {tuple(shape)} was given.")
        return shape

    def _check_length(self, longest):
        limit = self.config.max_position_embeddings
        if not isinstance(longest, int) or longest <= limit or _is_tracing():
            return
        if self.config.position_embedding_type == "learned":
            raise ValueError(f"A text of {longest} tokens was given, but learned positions reach {limit}; truncate the texts.")
        logger.warning_once(
            f"A text of {longest} tokens is longer than max_position_embeddings={limit}: expect worse results; "
            "rope_scaling={'rope_type': 'yarn', 'factor': ...} extends the context."
        )

    def _positions(self, input_ids, mask, position_ids, layout, shape, device):
        """(1 or B, L) positions: from 0 for RoPE, from 1 with 0 at padding for learned ones (PAPER ablation M0)."""
        learned = self.config.position_embedding_type == "learned"
        if position_ids is None and layout is not None:
            position_ids = layout.position_ids(shape[1])
        if position_ids is not None and learned:
            limit = self.config.max_position_embeddings
            if device.type == "cpu" and not _is_tracing() and ((position_ids < 0) | (position_ids >= limit)).any():
                given = position_ids.min().item() if position_ids.min() < 0 else position_ids.max().item()
                raise ValueError(f"Learned position_ids must lie between 0 and {limit - 1}, but {given} was given.")
            return position_ids + 1
        if position_ids is not None:
            return position_ids
        if not learned:
            return torch.arange(shape[1], device=device)[None]
        if mask is not None:
            real = mask
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        else:
            real = torch.ones(shape, dtype=torch.bool, device=device)
        return real.cumsum(dim=-1) * real


# ------------------------------------------------------------------------------------------------------------------- inputs


def _check_tensors(**given):
    for name, value in given.items():
        if value is not None and not torch.is_tensor(value):
            raise ValueError(
                f"{name} must be a tensor, but a {type(value).__name__} was given; tokenizers give tensors with return_tensors='pt'."
            )


def _checked_mask(attention_mask, shape):
    """(B, L) bool, or None."""
    if attention_mask is None:
        return None
    if attention_mask.shape != shape:
        raise ValueError(f"attention_mask must have the shape of the tokens, {tuple(shape)}, but {tuple(attention_mask.shape)} was given.")
    if attention_mask.dtype != torch.bool and not _is_tracing() and attention_mask.device.type != "meta":
        if not ((attention_mask == 0) | (attention_mask == 1)).all():
            raise ValueError("attention_mask must hold 1 for real tokens and 0 for padding, but other values were given.")
    return attention_mask.to(torch.bool)


def _checked_positions(position_ids, shape):
    """(1 or B, L) or None."""
    if position_ids is None:
        return None
    position_ids = position_ids[None] if position_ids.dim() == 1 else position_ids
    if position_ids.dim() != 2 or position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
        raise ValueError(f"position_ids must have shape {tuple(shape)} or (1, {shape[1]}), but {tuple(position_ids.shape)} was given.")
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise ValueError(f"position_ids must be whole numbers (int64), but {position_ids.dtype} was given.")
    return position_ids


@torch.compiler.disable
def _counted_layout(position_ids):
    return _Layout.from_position_ids(position_ids)


def _caller_layout(shape, attention_mask, position_ids, kwargs, counted=False):
    """`_Layout` of a batch that the caller packed, or None.

    Args:
        shape: (B, L).
        counted: without empty texts at its end, also while compiling, for which the graph breaks.
    """
    cu_seq_lens, other = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_seq_lens is None:
        if other is not None:
            raise ValueError("cu_seq_lens_k was given without cu_seq_lens_q; a packed batch has both, or cu_seq_lens_q alone.")
        if shape[0] != 1 or attention_mask is not None or position_ids is None or position_ids.device.type == "meta":
            return None
        if torch.compiler.is_compiling() and not counted:
            return _Layout.from_traced_position_ids(position_ids)
        return None if torch.jit.is_tracing() else _counted_layout(position_ids)
    if not torch.is_tensor(cu_seq_lens) or cu_seq_lens.dim() != 1 or cu_seq_lens.dtype not in (torch.int32, torch.int64):
        given = f"{tuple(cu_seq_lens.shape)} of {cu_seq_lens.dtype}" if torch.is_tensor(cu_seq_lens) else f"a {type(cu_seq_lens).__name__}"
        raise ValueError(f"cu_seq_lens_q must be an int32 tensor of shape (texts + 1,), but {given} was given.")
    if shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q marks a packed batch of shape (1, tokens), but a batch of {tuple(shape)} was given.")
    layout = _Layout.from_kwargs(cu_seq_lens, kwargs.get("max_length_q"))
    if layout.lengths is None:
        return layout
    if min(layout.lengths, default=0) < 0 or sum(layout.lengths) != shape[1] or cu_seq_lens[0] != 0:
        raise ValueError(f"cu_seq_lens_q must rise from 0 to the number of tokens, {shape[1]}, but {cu_seq_lens.tolist()} was given.")
    if other is not None and other is not cu_seq_lens and not torch.equal(other.to(cu_seq_lens), cu_seq_lens):
        raise ValueError("cu_seq_lens_k must equal cu_seq_lens_q: the tokens of a text see that text, but other bounds were given.")
    for name in ("max_length_q", "max_length_k"):
        if kwargs.get(name) is not None and kwargs[name] < layout.max_length:
            raise ValueError(f"{name} must be at least the longest text, {layout.max_length} tokens, but {int(kwargs[name])} was given.")
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("A packed batch has no padding, but attention_mask has zeros beside cu_seq_lens_q; leave attention_mask out.")
    return layout


def _check_labels(name, labels, shape, classes, floating=False):
    """`labels` has `shape`, and its values are classes or -100 (ignored)."""
    _check_tensors(**{name: labels})
    if labels.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, but {tuple(labels.shape)} was given.")
    if floating:
        return
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"{name} must be whole numbers (int64), but {labels.dtype} was given.")
    if _is_tracing() or not labels.numel() or labels.device.type == "meta":
        return
    wrong = (labels != -100) & ((labels < 0) | (labels >= classes))
    if wrong.any():
        raise ValueError(f"{name} must lie between 0 and {classes - 1}, or be -100 (ignored), but {labels[wrong][0].item()} was given.")


# -------------------------------------------------------------------------------------------------------------------- heads


def _mean(total, count, num_items_in_batch):
    """`total` over the items of the whole (accumulated) batch if they are given, else over this one's."""
    if num_items_in_batch is None:
        return total / count.clamp(min=1)
    if torch.is_tensor(num_items_in_batch):
        return total / num_items_in_batch.to(total.device).clamp(min=1)
    return total / max(num_items_in_batch, 1)


def _cross_entropy(logits, labels, num_items_in_batch=None):
    """Mean cross-entropy, in float32, over labels other than -100; logits (..., C), labels (...)."""
    labels = labels.flatten().long()
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels, ignore_index=-100, reduction="sum")
    return _mean(total, (labels != -100).sum(), num_items_in_batch)


def _first_real_token(mask):
    """(B,) index of each row's first real token; 0 where there is none."""
    return mask.to(torch.int32).argmax(dim=-1)


class NeoBERTForMaskedLM(NeoBERTPreTrainedModel):
    """Backbone and decoder: a bias and, unlike BERT, no transform and (as published) no tied weight."""

    _keys_to_ignore_on_load_unexpected = None
    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self):
        return self.decoder

    def set_output_embeddings(self, new_embeddings):
        self.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Inputs as in `NeoBERTModel`.

        Args:
            labels: (B, L) token ids; -100 is ignored.
            num_items_in_batch: what the summed loss is divided by; by default the labelled tokens of this batch.
        Returns:
            logits (B, L, V), zero at padding where the model packed; with `masked_lm_logits="masked"` and labels (labelled tokens, V).
        """
        outputs = self.model(input_ids, attention_mask, None, position_ids, inputs_embeds, return_dict=True, **kwargs)
        hidden = outputs.last_hidden_state
        loss = None
        if labels is not None:
            _check_labels("labels", labels, hidden.shape[:2], self.config.vocab_size)
        if labels is not None and self.config.masked_lm_logits == "masked" and not _is_tracing():
            rows = (labels.flatten() != -100).nonzero().squeeze(-1)
            logits, labels = self.decoder(hidden.flatten(0, 1)[rows]), labels.flatten()[rows]
        else:
            logits = self._decode(hidden, attention_mask)
        if labels is not None:
            loss = _cross_entropy(logits, labels, num_items_in_batch)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def _decode(self, hidden, attention_mask):
        """(B, L, D) -> (B, L, V), without work on padding."""
        if attention_mask is None or not self.config.unpad_inputs or _is_tracing() or attention_mask.device.type == "meta":
            return self.decoder(hidden)
        rows = attention_mask.flatten().nonzero().squeeze(-1)
        if len(rows) in (0, attention_mask.numel()):
            return self.decoder(hidden)
        logits = self.decoder(hidden.flatten(0, 1)[rows])
        padded = logits.new_zeros(attention_mask.numel(), logits.shape[-1])
        return padded.index_copy(0, rows, logits).unflatten(0, hidden.shape[:2])


class _TaskHeadModel(NeoBERTPreTrainedModel):
    """A backbone with newly initialised linear layers on top: normal(0, classifier_init_range), biases zero."""

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.classifier_init_range)
            nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class _PooledHeadModel(_TaskHeadModel):
    """dropout(pooled) -> dense -> tanh -> dropout -> classifier, as in the authors' sequence classifier."""

    def __init__(self, config, outputs):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, outputs)

    def pool(self, hidden, attention_mask=None, position_ids=None, **kwargs):
        """One vector a text: (B, L, D) -> (B, D), or packed (1, T, D) -> (N, D). The first real token, or the mean over real tokens."""
        mean = self.config.classifier_pooling == "mean"
        position_ids = _checked_positions(position_ids, hidden.shape[:2])
        layout = _caller_layout(hidden.shape[:2], attention_mask, position_ids, kwargs, counted=True)
        if layout is not None:
            lengths = layout.cu_seq_lens.diff()
            if not mean:
                firsts = layout.cu_seq_lens[:-1].long().clamp(max=hidden.shape[1] - 1)
                return hidden[0, firsts].masked_fill(lengths[:, None] == 0, 0.0)
            texts = _text_index(layout.cu_seq_lens, hidden.shape[1])
            # In float32, here and below: a sum in bfloat16 stops growing after a few hundred tokens, one in float16 ends at 65,504.
            sums = torch.zeros(len(lengths), hidden.shape[-1], device=hidden.device).index_add(0, texts, hidden[0].float())
            return (sums / lengths[:, None].clamp(min=1)).to(hidden.dtype)
        if attention_mask is None:
            return hidden.mean(dim=1) if mean else hidden[:, 0]
        mask = attention_mask.to(torch.bool)
        if mean:
            sums = (hidden * mask[..., None]).sum(dim=1, dtype=torch.float32)
            return (sums / mask.sum(dim=-1, keepdim=True).clamp(min=1)).to(hidden.dtype)
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), _first_real_token(mask)]

    def classify(self, pooled):
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(pooled)))))


class NeoBERTForSequenceClassification(_PooledHeadModel):
    """Regression, single-label and multi-label classification of texts, chosen by `config.problem_type` as in BERT."""

    def __init__(self, config):
        super().__init__(config, config.num_labels)
        self.num_labels = config.num_labels
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Inputs as in `NeoBERTModel`.

        Args:
            labels: (B,) classes; (B,) or (B, C) numbers for regression; (B, C) zeros and ones for multi-label.
            num_items_in_batch: what the summed loss is divided by; by default the labels of this batch.
        Returns:
            logits (B, C), or (N, C) for a packed batch.
        """
        outputs = self.model(input_ids, attention_mask, None, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classify(self.pool(outputs.last_hidden_state, attention_mask, position_ids, **kwargs))
        loss = self.loss(logits, labels, num_items_in_batch) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    def loss(self, logits, labels, num_items_in_batch=None):
        """Loss of (B, C) logits by `config.problem_type`; if that is None, by the number of labels and their dtype."""
        problem = self.config.problem_type
        if problem is None:
            whole = not labels.is_floating_point()
            problem = "regression" if self.num_labels == 1 else "single_label" if whole and labels.dim() == 1 else "multi_label"
        if problem.startswith("single_label"):
            _check_labels("labels", labels, logits.shape[:1], self.num_labels)
            return _cross_entropy(logits, labels, num_items_in_batch)
        expected = logits.shape[:1] if self.num_labels == 1 and labels.dim() == 1 else logits.shape
        _check_labels("labels", labels, expected, self.num_labels, floating=True)
        function = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        if problem != "regression" and not _is_tracing() and labels.device.type != "meta" and ((labels < 0) | (labels > 1)).any():
            given = labels.max().item() if labels.max() > 1 else labels.min().item()
            raise ValueError(f"Multi-label labels must lie between 0 and 1, but {given} was given.")
        total = function(logits.float().view_as(labels), labels.float(), reduction="sum")
        return _mean(total, torch.tensor(labels.numel(), device=total.device), num_items_in_batch)


class NeoBERTForMultipleChoice(_PooledHeadModel):
    """Scores C candidate texts of a question; inputs are (B, C, L)."""

    def __init__(self, config):
        super().__init__(config, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """
        Args:
            input_ids, attention_mask, position_ids: (B, C, L); inputs_embeds: (B, C, L, D).
            labels: (B,) index of the right candidate.
        Returns:
            logits (B, C).
        """
        _check_tensors(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds)
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.dim() != (3 if input_ids is not None else 4):
            shape = None if given is None else tuple(given.shape)
            raise ValueError(f"Multiple choice takes input_ids of (batch, choices, length), but {shape} was given.")
        if kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError(
                "Multiple choice takes no packed batch, but cu_seq_lens_q was given; give (batch, choices, length) and an attention_mask."
            )
        choices = given.shape[1]
        if position_ids is not None and position_ids.dim() != 3:
            raise ValueError(f"Multiple choice takes position_ids of (batch, choices, length), but {tuple(position_ids.shape)} was given.")
        flat = [x.flatten(0, 1) if x is not None else None for x in (input_ids, attention_mask, position_ids, inputs_embeds)]
        input_ids, attention_mask, position_ids, inputs_embeds = flat
        outputs = self.model(input_ids, attention_mask, None, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classify(self.pool(outputs.last_hidden_state, attention_mask)).view(-1, choices)
        loss = None
        if labels is not None:
            _check_labels("labels", labels, logits.shape[:1], choices)
            loss = _cross_entropy(logits, labels, num_items_in_batch)
        return MultipleChoiceModelOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class NeoBERTForTokenClassification(_TaskHeadModel):
    """A label for every token: dropout -> classifier."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NeoBERTModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        labels=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Inputs as in `NeoBERTModel`.

        Args:
            labels: (B, L) classes; -100 is ignored.
        Returns:
            logits (B, L, C).
        """
        outputs = self.model(input_ids, attention_mask, None, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            _check_labels("labels", labels, logits.shape[:2], self.num_labels)
            loss = _cross_entropy(logits, labels, num_items_in_batch)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class NeoBERTForQuestionAnswering(_TaskHeadModel):
    """Start and end of the answer: a linear layer with two outputs per token."""

    def __init__(self, config):
        super().__init__(config)
        self.model = NeoBERTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        start_positions=None,
        end_positions=None,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Inputs as in `NeoBERTModel`.

        Args:
            start_positions, end_positions: (B,) or (B, 1) token indices; those outside of the row are ignored, as in BERT.
            num_items_in_batch: what the summed loss is divided by; by default the answers of this batch.
        Returns:
            start_logits, end_logits (B, L), at padding the lowest number of their dtype.
        """
        outputs = self.model(input_ids, attention_mask, None, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        if attention_mask is not None:
            # An answer is no padding: the probabilities of a text do not depend on its neighbours.
            logits = logits.masked_fill(attention_mask[..., None] == 0, torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(dim=-1)
        loss = None
        if (start_positions is None) != (end_positions is None):
            raise ValueError("A loss needs both start_positions and end_positions, but one of them is missing.")
        if start_positions is not None:
            losses = []
            pairs = (("start_positions", start_positions, start_logits), ("end_positions", end_positions, end_logits))
            for name, positions, logits in pairs:
                _check_tensors(**{name: positions})
                positions = positions.squeeze(-1) if positions.dim() > 1 else positions
                positions = positions.masked_fill((positions < 0) | (positions >= logits.shape[1]), -100)
                _check_labels(name, positions, logits.shape[:1], logits.shape[1])
                losses.append(_cross_entropy(logits, positions, num_items_in_batch))
            loss = sum(losses) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# Names of the published code, which old auto_maps and other tools use.
NeoBERT = NeoBERTModel
NeoBERTLMHead = NeoBERTForMaskedLM

NeoBERTModel.register_for_auto_class("AutoModel")
NeoBERTForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
NeoBERTForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
NeoBERTForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
NeoBERTForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
NeoBERTForMultipleChoice.register_for_auto_class("AutoModelForMultipleChoice")

__all__ = [
    "NeoBERT",
    "NeoBERTForMaskedLM",
    "NeoBERTForMultipleChoice",
    "NeoBERTForQuestionAnswering",
    "NeoBERTForSequenceClassification",
    "NeoBERTForTokenClassification",
    "NeoBERTLMHead",
    "NeoBERTModel",
    "NeoBERTPreTrainedModel",
]
