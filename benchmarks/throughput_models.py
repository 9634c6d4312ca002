"""The models that `neobert throughput` compares: built from their configurations with random weights, so that nothing is downloaded.

A run is a model and an implementation ("neobert", "sdpa"); `build` gives a `Run` that takes batches of token ids and an attention mask.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, RobertaConfig, RobertaModel

from ..common.errors import UserError
from ..configuration_neobert import NeoBERTConfig
from ..modeling_neobert import NeoBERTModel, prepare_rotary, rotary_table


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_MODERN_LARGE = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624}

# name: (model class, configuration, longest text in tokens). NeoBERT's RoPE has no hard limit; 8,192 is measured as in the paper.
MODELS = {
    "neobert": (NeoBERTModel, lambda **small: NeoBERTConfig(**{"max_position_embeddings": 8192, **small}), 8192),
    "bert-base": (BertModel, lambda **small: BertConfig(**small), 512),
    "bert-large": (BertModel, lambda **small: BertConfig(**{**_LARGE, **small}), 512),
    "roberta-base": (RobertaModel, lambda **small: RobertaConfig(**{**_ROBERTA, **small}), 512),
    "roberta-large": (RobertaModel, lambda **small: RobertaConfig(**{**_ROBERTA, **_LARGE, **small}), 512),
    "modernbert-base": (ModernBertModel, lambda **small: ModernBertConfig(**small), 8192),
    "modernbert-large": (ModernBertModel, lambda **small: ModernBertConfig(**{**_MODERN_LARGE, **small}), 8192),
}

# name: (attention implementation, layout of the batch, compiled, what it is)
IMPLEMENTATIONS = {
    "sdpa": ("sdpa", "own", False, "the model's own default; NeoBERT packs, the others compute on padding"),
    "padded": ("sdpa", "padded", False, "NeoBERT with unpad_inputs=False"),
    "published": ("sdpa", "published", False, "NeoBERT as published: padded, additive mask expanded to (B, H, L, L)"),
    "compiled": ("sdpa", "own", True, "torch.compile; NeoBERT: its blocks, with a dynamic token count"),
    "flash_attention_2": ("flash_attention_2", "own", False, "flash-attn 2"),
    "flash_attention_2-packed": ("flash_attention_2", "packed", False, "flash-attn 2, packed by the caller (no padding for the peers)"),
    "flash_attention_2-compiled": ("flash_attention_2", "own", True, "flash-attn 2 under torch.compile"),
    "flash_attention_3": ("flash_attention_3", "own", False, "flash-attn 3"),
    "flex_attention": ("flex_attention", "own", False, "flex_attention"),
}
NEOBERT_ONLY = ("padded", "published")


class PublishedConstruction(nn.Module):
    """The published forward around this package's blocks: every layer computes on padding, under a (B, H, L, L) additive mask, and the
    feed-forward runs in one piece.

    Norms, RoPE and projections are ours, so that a comparison shows what layout, mask and slicing cost, and nothing else.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        """(B, L) ids and ones-and-zeros mask -> hidden states (B, L, D)."""
        model, length = self.model, input_ids.shape[1]
        hidden = model.encoder(input_ids)
        mask = torch.where(attention_mask.bool(), 0.0, float("-inf")).to(hidden.dtype)
        mask = mask[:, None, None, :].repeat(1, model.config.num_attention_heads, length, 1)
        positions = torch.arange(length, device=input_ids.device)[None]
        rotary = prepare_rotary(*rotary_table(model.config, positions, length))
        for block in model.transformer_encoder:
            hidden = hidden + block.attend(block.attention_norm(hidden), rotary, _masked_sdpa, mask)[0]
            gate, value = block.ffn.w12(block.ffn_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + block.ffn.w3(F.silu(gate) * value)
        return model.layer_norm(hidden)


def _masked_sdpa(module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2), None


class Run:
    """One model under one implementation.

    Attributes:
        longest: the longest text that the model takes, in tokens.
        backend: which attention kernel runs, where the model says so.
    """

    def __init__(self, name, implementation, model, longest, backend):
        self.name, self.implementation, self.model, self.longest, self.backend = name, implementation, model, longest, backend
        self.layout = IMPLEMENTATIONS[implementation][1]

    def __call__(self, input_ids, attention_mask):
        """Last hidden states of a padded batch, (B, L); packed by the caller it is one row."""
        if self.layout == "published":
            return self.model(input_ids, attention_mask)
        if self.layout == "packed":
            return self.model(**packed_inputs(input_ids, attention_mask)).last_hidden_state
        if attention_mask.all():
            attention_mask = None
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    def flops(self, lengths):
        """Floating-point operations that the real tokens need: 2 a weight of every linear layer, and 4 D a pair of visible tokens.

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
    """Tokens that a token of this layer sees, or None for all (ModernBERT: two layers of three see 64 to each side)."""
    every = getattr(config, "global_attn_every_n_layers", None)
    kinds = getattr(config, "layer_types", None)
    local = kinds[layer] == "sliding_attention" if kinds else every and layer % every
    return config.local_attention + 1 if local else None


def packed_inputs(input_ids, attention_mask):
    """One row without padding and its packing arguments, as `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes them."""
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1)
    bounds = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    positions = (mask.cumsum(dim=1) - 1)[mask][None]
    packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return {"input_ids": input_ids[mask][None], "position_ids": positions, **packing}


def compile_blocks(model, **options):
    """Regional compilation: every block is compiled in place, with a dynamic token count, and all share one graph.

    Packing and scattering stay outside of the graphs, so that batches of any shape reuse them.
    """
    for block in model.transformer_encoder:
        block.compile(dynamic=True, **options)
    return model


def check_runs(models, implementations):
    """Raises UserError for a name that does not exist."""
    for given, known, what in ((models, MODELS, "model"), (implementations, IMPLEMENTATIONS, "implementation")):
        for name in given:
            if name not in known:
                raise UserError(f"there is no {what} {name!r} to measure; choose from {', '.join(known)}")


def build(name, implementation, device, dtype, small=None, shared=None):
    """A `Run` in eval mode with random weights.

    Args:
        name, implementation: keys of `MODELS` and `IMPLEMENTATIONS`.
        small: configuration fields that replace the published ones (tests).
        shared: a model of the same class and size whose weights are used again, so that a variant costs no memory.
    Raises:
        ImportError, ValueError: the implementation is not available here; the message is the library's.
    """
    attention, layout, compiled, _ = IMPLEMENTATIONS[implementation]
    model_class, make_config, longest = MODELS[name]
    config = make_config(**(small or {}))
    if name == "neobert":
        config.unpad_inputs = layout not in ("padded", "published")
    options = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(model_class).parameters else {}
    torch.manual_seed(0)
    if hasattr(config, "reference_compile"):
        config.reference_compile = False
    model = model_class._from_config(config, attn_implementation=attention, dtype=dtype, **options).eval()
    if shared is not None:
        for mine, theirs in zip(model.modules(), shared.modules()):
            mine._parameters.update(theirs._parameters)
    model.to(device)
    backend = model.attention_backend() if hasattr(model, "attention_backend") else f"{attention}, {layout} layout"
    if layout == "published":
        model, backend = PublishedConstruction(model), "scaled_dot_product_attention with an expanded additive mask"
    elif compiled:
        model = compile_blocks(model) if name == "neobert" else torch.compile(model, dynamic=True)
        backend = f"compiled; {backend}"
    return Run(name, implementation, model, longest, backend)
