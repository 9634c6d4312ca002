"""What `neobert throughput` compares: models built from their configurations with random weights,
so that nothing is downloaded, and batches of texts of given lengths.

A candidate is a model and an implementation ("neobert", "sdpa"); `build` gives a `Candidate` that
takes a `Batch`.
"""

import inspect
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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

from ..common.constants import TOKENIZER
from ..common.errors import UserError
from ..common.loading import load_tokenizer
from ..common.packing import compile_blocks, pack
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


@dataclass
class Candidate:
    """One model under one implementation.

    Attributes:
        encoder: its weights and configuration; `model` is what runs.
        layout: of the batches that it is given.
        longest: the longest text that the model takes, in tokens.
        backend: which attention kernel runs, where the model says so.
    """

    encoder: nn.Module
    model: nn.Module
    layout: str
    longest: int
    backend: str

    def __call__(self, batch):
        """Last hidden states of a `Batch`, (B, L, D); packed by the caller it is one row, (1, T,
        D)."""
        if self.layout == "published":
            return self.model(batch.input_ids, batch.attention_mask)
        if self.layout == "packed":
            return self.model(**batch.packed).last_hidden_state
        mask = batch.attention_mask if batch.has_padding else None
        return self.model(input_ids=batch.input_ids, attention_mask=mask).last_hidden_state


def flops(model, lengths):
    """Floating-point operations of an encoder that the real tokens need: 2 a weight of every linear
    layer, and 4 D a pair of visible tokens.

    Args:
        lengths: of the texts, in tokens. Padding is not needed and not counted.
    """
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    config, pairs = model.config, 0
    # ModernBERT: in two layers of three a token sees 64 to each side.
    every = getattr(config, "global_attn_every_n_layers", None)
    kinds = getattr(config, "layer_types", None)
    for layer in range(config.num_hidden_layers):
        local = kinds[layer] == "sliding_attention" if kinds else every and layer % every
        pairs += sum(n * (min(n, config.local_attention + 1) if local else n) for n in lengths)
    return 2 * weights * sum(lengths) + 4 * config.hidden_size * pairs


def build(name, implementation, device, dtype, small=None, shared=None):
    """A `Candidate` in eval mode with random weights.

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
    pooled = "add_pooling_layer" in inspect.signature(model_class).parameters
    options = {"add_pooling_layer": False} if pooled else {}
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
    run = model
    if layout == "published":
        run = PublishedConstruction(model)
        backend = "scaled_dot_product_attention with an expanded additive mask"
    elif compiled:
        compile_blocks(model)
        backend = f"compiled; {backend}"
    return Candidate(model, run, layout, longest, backend)


# ------------------------------------------------------------------------------------------------
# batches


def draw_lengths(name, count, seed=0, file_lengths=None):
    """Lengths in tokens of `count` texts.

    Args:
        name: "512" (fixed), "normal-256", "normal-4096", "short" (log-normal, median 48, sigma 0.7,
        4 to 512: about 0.3 of a batch of 32 is real), "fill-30" (one text of 512 and others of
            which the batch has 30 % real tokens), "texts".
        file_lengths: of the texts of a file; drawn from without order, with repetition where it has
            fewer than `count`.
    """
    generator = torch.Generator().manual_seed(seed)
    if name.isdigit():
        return [int(name)] * count
    if name.startswith("normal-"):
        mean = int(name.removeprefix("normal-"))
        lengths = (
            (torch.randn(count, generator=generator) * mean / 4 + mean).round().clamp(16, 2 * mean)
        )
    elif name == "short":
        lengths = (
            torch.exp(torch.randn(count, generator=generator) * 0.7 + math.log(48))
            .round()
            .clamp(4, 512)
        )
    elif name == "texts":
        lengths = torch.tensor(file_lengths)[
            torch.randint(len(file_lengths), (count,), generator=generator)
        ]
    else:
        return _lengths_of_fill(int(name.removeprefix("fill-")) / 100, count, generator)
    return [int(n) for n in lengths]


def _lengths_of_fill(fill, count, generator, longest=512):
    """One text of `longest` tokens, the others spread evenly by up to a half around the length that
    makes the mean fill * longest."""
    rest = max((fill * count - 1) / max(count - 1, 1), 1 / longest) * longest
    spread = min(rest, longest - rest) / 2
    lengths = (
        rest + spread * torch.linspace(-1, 1, max(count - 1, 1)) if count > 1 else torch.empty(0)
    )
    lengths = lengths[torch.randperm(len(lengths), generator=generator)].round().clamp(1, longest)
    return [longest, *(int(n) for n in lengths)]


def lengths_of_file(path, tokenizer=None):
    """Lengths in tokens of the non-empty lines of a text file."""
    lines = [line for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path} holds no text")
    tokenizer = load_tokenizer(tokenizer or TOKENIZER)
    return [len(ids) for ids in tokenizer(lines, truncation=True, max_length=8192)["input_ids"]]


@dataclass(frozen=True)
class Batch:
    """Texts of known lengths.

    Attributes:
        lengths: of the texts, in tokens; Python numbers, so that nobody waits for the device to
            learn them.
        input_ids, attention_mask: (B, longest), padded on the right.
    """

    lengths: tuple
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def has_padding(self):
        return min(self.lengths) < max(self.lengths)

    @cached_property
    def packed(self):
        """One row without padding and its packing arguments, as
        `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes them."""
        rows = [ids[:count] for ids, count in zip(self.input_ids.cpu().numpy(), self.lengths)]
        device = self.input_ids.device
        positions = torch.cat([torch.arange(count, device=device) for count in self.lengths])
        return {"position_ids": positions[None], **pack(rows, device)}


def make_batch(lengths, device="cpu", seed=0):
    """A `Batch` of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
    return Batch(tuple(lengths), ids.to(device), mask.to(device))
