"""The models that `neobert throughput` compares: built from their configurations with random
weights, so that nothing is downloaded.

A run is a model and an implementation ("neobert", "sdpa"); `build` gives a `Run` that takes a
`Batch`.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    RobertaConfig,
    RobertaModel,
)

from ..common.blocks import compile_blocks
from ..configuration_neobert import NeoBERTConfig
from ..modeling_neobert import NeoBERTModel
from .options import IMPLEMENTATIONS


_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_ROBERTA = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_MODERN_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 2624,
}

# name: (model class, configuration, longest text in tokens). NeoBERT's RoPE has no hard limit;
# 8,192 is measured as in the paper.
MODELS = {
    "neobert": (
        NeoBERTModel,
        lambda **small: NeoBERTConfig(**{"max_position_embeddings": 8192, **small}),
        8192,
    ),
    "bert-base": (BertModel, lambda **small: BertConfig(**small), 512),
    "bert-large": (BertModel, lambda **small: BertConfig(**{**_LARGE, **small}), 512),
    "roberta-base": (RobertaModel, lambda **small: RobertaConfig(**{**_ROBERTA, **small}), 512),
    "roberta-large": (
        RobertaModel,
        lambda **small: RobertaConfig(**{**_ROBERTA, **_LARGE, **small}),
        512,
    ),
    "modernbert-base": (ModernBertModel, lambda **small: ModernBertConfig(**small), 8192),
    "modernbert-large": (
        ModernBertModel,
        lambda **small: ModernBertConfig(**{**_MODERN_LARGE, **small}),
        8192,
    ),
}


class PublishedConstruction(nn.Module):
    """The forward of the published code around this package's weights and norms, written out here
    so that nothing of the model's own helpers is in it: every layer computes on padding, under an
    additive mask expanded to (B, H, L, L); RoPE is a complex product in float32; the feed-forward
    runs in one piece.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        """(B, L) ids and ones-and-zeros mask -> hidden states (B, L, D)."""
        model, length = self.model, input_ids.shape[1]
        heads = model.config.num_attention_heads
        hidden = model.encoder(input_ids)
        mask = torch.where(attention_mask.bool(), 0.0, float("-inf")).to(hidden.dtype)
        mask = mask[:, None, None, :].repeat(1, heads, length, 1)
        rotary = _complex_rotary(
            length, model.config.hidden_size // heads, model.config.rope_theta, input_ids.device
        )
        for block in model.transformer_encoder:
            query, key, value = (
                block.qkv(block.attention_norm(hidden)).unflatten(-1, (heads, -1)).chunk(3, dim=-1)
            )
            query, key, value = (
                x.transpose(1, 2) for x in (_rotated(query, rotary), _rotated(key, rotary), value)
            )
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            hidden = hidden + block.wo(attended.transpose(1, 2).flatten(-2))
            gate, up = block.ffn.w12(block.ffn_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + block.ffn.w3(F.silu(gate) * up)
        return model.layer_norm(hidden)


def _complex_rotary(length, head_dim, theta, device):
    """exp(i * position * theta^(-2j / K)), (L, 1, K / 2) complex."""
    frequencies = theta ** (
        -torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    )
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def _rotated(x, rotary):
    """(B, L, H, K) with each adjacent pair turned by its angle."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary).flatten(-2).type_as(x)


class Run:
    """One model under one implementation.

    Attributes:
        longest: the longest text that the model takes, in tokens.
        backend: which attention kernel runs, where the model says so.
    """

    def __init__(self, name, implementation, model, longest, backend):
        self.name = name
        self.implementation = implementation
        self.model = model
        self.longest = longest
        self.backend = backend
        self.layout = IMPLEMENTATIONS[implementation][1]

    def __call__(self, batch):
        """Last hidden states of a `Batch`, (B, L, D); packed by the caller it is one row, (1, T,
        D)."""
        if self.layout == "published":
            return self.model(batch.input_ids, batch.attention_mask)
        if self.layout == "packed":
            return self.model(**batch.packed).last_hidden_state
        mask = batch.attention_mask if batch.has_padding or self.layout == "masked" else None
        return self.model(input_ids=batch.input_ids, attention_mask=mask).last_hidden_state

    def flops(self, lengths):
        """Floating-point operations that the real tokens need: 2 a weight of every linear layer,
        and 4 D a pair of visible tokens.

        Args:
            lengths: of the texts, in tokens. Padding is not needed and not counted.
        """
        model = self.model.model if self.layout == "published" else self.model
        weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
        config, pairs = model.config, 0
        for layer in range(config.num_hidden_layers):
            local = _local_window(config, layer)
            pairs += sum(n * (n if local is None else min(n, local)) for n in lengths)
        return 2 * weights * sum(lengths) + 4 * config.hidden_size * pairs


def _local_window(config, layer):
    """Tokens that a token of this layer sees, or None for all (ModernBERT: two layers of three see
    64 to each side)."""
    every = getattr(config, "global_attn_every_n_layers", None)
    kinds = getattr(config, "layer_types", None)
    local = kinds[layer] == "sliding_attention" if kinds else every and layer % every
    return config.local_attention + 1 if local else None


# Options of torch.compile for every compiled block.
COMPILE_OPTIONS = {}


def build(name, implementation, device, dtype, small=None, shared=None):
    """A `Run` in eval mode with random weights.

    Args:
        name, implementation: keys of `MODELS` and `IMPLEMENTATIONS`.
        small: configuration fields that replace the published ones (tests).
        shared: a model of the same class and size whose weights are used again, so that a variant
            costs no memory.
    Raises:
        ImportError, ValueError: the implementation is not available here; the message is the
            library's.
    """
    attention, layout, compiled, _ = IMPLEMENTATIONS[implementation]
    model_class, make_config, longest = MODELS[name]
    config = make_config(**(small or {}))
    if name == "neobert":
        config.unpad_inputs = layout not in ("padded", "published")
    options = (
        {"add_pooling_layer": False}
        if "add_pooling_layer" in inspect.signature(model_class).parameters
        else {}
    )
    torch.manual_seed(0)
    if hasattr(config, "reference_compile"):
        config.reference_compile = False
    model = model_class._from_config(
        config, attn_implementation=attention, dtype=dtype, **options
    ).eval()
    if shared is not None:
        for mine, theirs in zip(model.modules(), shared.modules()):
            mine._parameters.update(theirs._parameters)
    model.to(device)
    backend = (
        model.attention_backend()
        if hasattr(model, "attention_backend")
        else f"{attention}, {layout} layout"
    )
    if layout == "published":
        model = PublishedConstruction(model)
        backend = "scaled_dot_product_attention with an expanded additive mask"
    elif compiled:
        model = compile_blocks(model, **COMPILE_OPTIONS)
        backend = f"compiled; {backend}"
    return Run(name, implementation, model, longest, backend)
