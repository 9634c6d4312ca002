"""Models to compare, built with random weights, and batches of random sequences.

Nothing is downloaded. `build` returns a `Candidate`, a model with one implementation ("neobert",
"sdpa"), which is called with a `Batch`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PretrainedConfig,
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


@dataclass(frozen=True)
class Architecture:
    """Model class with its published configuration.

    Attributes:
        model_class: Encoder class of transformers or of this package.
        config_class: Configuration class.
        fields: Fields of the configuration that differ from the defaults of the class.
        max_length: Maximum sequence length in tokens.
    """

    model_class: Any
    config_class: Callable[..., PretrainedConfig]
    fields: Mapping[str, Any]
    max_length: int

    def config(self, changes: Mapping[str, Any]) -> PretrainedConfig:
        """Return the configuration with some fields replaced."""
        return self.config_class(**{**self.fields, **changes})


_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
# The 514 position embeddings of RoBERTa are 512 positions, counted from 2.
_ROBERTA = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_MODERNBERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 2624,
}
# RoPE has no hard limit. NeoBERT is measured up to 8,192 tokens as in the paper.
_NEOBERT = {"max_position_embeddings": 8192}

MODELS = {
    "neobert": Architecture(NeoBERTModel, NeoBERTConfig, _NEOBERT, 8192),
    "bert-base": Architecture(BertModel, BertConfig, {}, 512),
    "bert-large": Architecture(BertModel, BertConfig, _LARGE, 512),
    "roberta-base": Architecture(RobertaModel, RobertaConfig, _ROBERTA, 512),
    "roberta-large": Architecture(RobertaModel, RobertaConfig, {**_ROBERTA, **_LARGE}, 512),
    "modernbert-base": Architecture(ModernBertModel, ModernBertConfig, {}, 8192),
    "modernbert-large": Architecture(ModernBertModel, ModernBertConfig, _MODERNBERT_LARGE, 8192),
}


# ------------------------------------------------------------------------------------------------
# the published implementation


class PublishedConstruction(nn.Module):
    """Forward pass of the published code with the weights and norms of this package.

    Every layer computes on padding, with an additive mask that is expanded to (B, H, L, L). RoPE is
    a complex product in float32, and the feed-forward layer processes all tokens at once. The
    forward pass uses none of the helpers of the model.
    """

    def __init__(self, model: NeoBERTModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, L, D).

        Args:
            input_ids: Token ids (B, L).
            attention_mask: Mask (B, L), 0 for padding.
        """
        model: Any = self.model
        length = input_ids.shape[1]
        heads = model.config.num_attention_heads
        hidden = model.encoder(input_ids)

        # The published code expands the mask to all heads and queries, instead of broadcasting it.
        mask = torch.where(attention_mask.bool(), 0.0, float("-inf")).to(hidden.dtype)
        mask = mask[:, None, None, :].repeat(1, heads, length, 1)
        head_dim = model.config.hidden_size // heads
        rotary = _complex_rotary(length, head_dim, model.config.rope_theta, input_ids.device)

        for block in model.transformer_encoder:
            # The projection contains the query, key and value of a head one after another.
            projected = block.qkv(block.attention_norm(hidden)).unflatten(-1, (heads, -1))
            query, key, value = projected.chunk(3, dim=-1)
            attended = F.scaled_dot_product_attention(
                _rotate(query, rotary).transpose(1, 2),
                _rotate(key, rotary).transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=mask,
            )
            hidden = hidden + block.wo(attended.transpose(1, 2).flatten(-2))

            gate, up = block.ffn.w12(block.ffn_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + block.ffn.w3(F.silu(gate) * up)
        return model.layer_norm(hidden)


def _complex_rotary(length: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return exp(i * position * theta^(-2j / K)), complex of shape (L, 1, K / 2)."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = theta**-exponents
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Return `x` of shape (B, L, H, K) with each adjacent pair of values rotated by its angle."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary).flatten(-2).type_as(x)


# ------------------------------------------------------------------------------------------------
# batches


@dataclass(frozen=True)
class Batch:
    """Batch of random sequences.

    Attributes:
        lengths: Sequence lengths in tokens, as Python numbers, so reading them does not wait
            for the device.
        input_ids: Token ids (B, L), padded on the right.
        attention_mask: Mask (B, L), 0 for padding.
    """

    lengths: tuple[int, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def has_padding(self) -> bool:
        """Whether the sequences have different lengths."""
        return min(self.lengths) < max(self.lengths)

    @cached_property
    def packed(self) -> dict[str, Any]:
        """Packed batch, with the arguments that DataCollatorWithFlattening returns."""
        # The first, untimed pass creates the packed batch.
        rows = [ids[:count] for ids, count in zip(self.input_ids.cpu().numpy(), self.lengths)]
        device = self.input_ids.device
        positions = torch.cat([torch.arange(count, device=device) for count in self.lengths])
        return {"position_ids": positions[None], **pack(rows, device)}


def make_batch(lengths: Sequence[int], device: str | torch.device = "cpu", seed: int = 0) -> Batch:
    """Return a batch of random token ids.

    Args:
        lengths: Sequence lengths in tokens.
        device: Device of the tensors.
        seed: Random seed of the token ids.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    # These ids are ordinary tokens in the vocabularies of all models. In BERT's vocabulary, special
    # and unused tokens come first.
    ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
    return Batch(tuple(lengths), ids.to(device), mask.to(device))


def draw_lengths(
    name: str, count: int, seed: int = 0, file_lengths: Sequence[int] | None = None
) -> list[int]:
    """Return the sequence lengths of a batch.

    Args:
        name: Workload: "512" (all sequences have this length), "normal-256", "normal-4096", "short"
            (log-normal with median 48 and sigma 0.7, from 4 to 512: about 30 % of a batch of 32 are
            not padding), "fill-30" (one sequence of 512 tokens, and others so that 30 % of the
            batch are not padding), or "texts".
        count: Batch size in sequences.
        seed: Random seed.
        file_lengths: Lengths of the workload "texts", which are sampled with replacement.

    Raises:
        ValueError: If there is no such workload.
    """
    # Every model gets a batch of the same lengths, as they are a function of the seed.
    generator = torch.Generator().manual_seed(seed)
    if name.isdigit():
        return [int(name)] * count
    if name.startswith("fill-"):
        return _lengths_of_fill(int(name.removeprefix("fill-")) / 100, count, generator)

    if name.startswith("normal-"):
        mean = int(name.removeprefix("normal-"))
        lengths = torch.randn(count, generator=generator) * mean / 4 + mean
        lengths = lengths.round().clamp(16, 2 * mean)
    elif name == "short":
        logarithms = torch.randn(count, generator=generator) * 0.7 + math.log(48)
        lengths = torch.exp(logarithms).round().clamp(4, 512)
    elif name == "texts" and file_lengths:
        indices = torch.randint(len(file_lengths), (count,), generator=generator)
        lengths = torch.tensor(file_lengths)[indices]
    else:
        raise ValueError(f"unknown workload {name!r}")
    return [int(length) for length in lengths]


def _lengths_of_fill(
    fill: float, count: int, generator: torch.Generator, longest: int = 512
) -> list[int]:
    """Return lengths whose mean is `fill` times that of the longest sequence.

    One sequence has the length `longest`. The lengths of the others are spread evenly around their
    mean, by at most a half of it.
    """
    if count == 1:
        return [longest]

    # The mean of the others leaves `fill` as the mean of all, with the longest one.
    mean = max((fill * count - 1) / (count - 1), 1 / longest) * longest
    spread = min(mean, longest - mean) / 2

    lengths = mean + spread * torch.linspace(-1, 1, count - 1)
    lengths = lengths[torch.randperm(len(lengths), generator=generator)].round().clamp(1, longest)
    return [longest, *(int(length) for length in lengths)]


def lengths_of_file(path: str | Path, tokenizer: str | Path | None = None) -> list[int]:
    """Return the lengths in tokens of the non-empty lines of a text file.

    Args:
        path: Text file with one text per line.
        tokenizer: Tokenizer, by default the bundled one.

    Raises:
        UserError: If the file contains no text, or there is no such tokenizer.
    """
    lines = [line for line in Path(path).read_text(errors="replace").splitlines() if line.strip()]
    if not lines:
        raise UserError(f"{path} contains no text.")
    # No model of the comparison supports longer sequences.
    encoded = load_tokenizer(tokenizer or TOKENIZER)(lines, truncation=True, max_length=8192)
    return [len(ids) for ids in encoded["input_ids"]]


# ------------------------------------------------------------------------------------------------
# candidates


@dataclass
class Candidate:
    """Model with one implementation.

    Attributes:
        encoder: Model with weights and configuration.
        model: Module that runs, which may be a wrapper of `encoder`.
        layout: Layout of the batches, see `options.Implementation`.
        longest: Maximum sequence length in tokens.
        backend: Attention kernel, if the model reports it.
    """

    encoder: nn.Module
    model: nn.Module
    layout: str
    longest: int
    backend: str

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the last hidden states, (B, L, D), or (1, T, D) of a packed batch."""
        if self.layout == "published":
            return self.model(batch.input_ids, batch.attention_mask)
        if self.layout == "packed":
            return self.model(**batch.packed).last_hidden_state
        mask = batch.attention_mask if batch.has_padding else None
        return self.model(input_ids=batch.input_ids, attention_mask=mask).last_hidden_state


def build(
    name: str,
    implementation: str,
    device: str | torch.device,
    dtype: torch.dtype,
    small: Mapping[str, Any] | None = None,
    shared: nn.Module | None = None,
) -> Candidate:
    """Return a model in eval mode with random weights.

    Args:
        name: Key of `MODELS`.
        implementation: Key of `IMPLEMENTATIONS`.
        device: Device of the model.
        dtype: Dtype of the weights.
        small: Configuration fields that replace the published ones.
        shared: Model of the same class and size whose weights are used, so a variant takes no
            additional memory.

    Raises:
        ImportError: If a package of the implementation is not installed.
        ValueError: If the model does not support the implementation.
    """
    variant = IMPLEMENTATIONS[implementation]
    architecture = MODELS[name]
    config = architecture.config(small or {})
    if name == "neobert":
        config.unpad_inputs = variant.layout not in ("padded", "published")
    # ModernBERT would compile itself.
    if hasattr(config, "reference_compile"):
        config.reference_compile = False

    model = _random_model(architecture.model_class, config, variant.attention, dtype)
    if shared is not None:
        # Both models refer to the same parameters, without a copy.
        for module, shared_module in zip(model.modules(), shared.modules()):
            module._parameters.update(shared_module._parameters)
    model.to(device)

    # The tables name the attention kernel, which depends on the machine for NeoBERT.
    running: nn.Module = model
    if variant.layout == "published":
        running = PublishedConstruction(model)
        backend = "scaled_dot_product_attention with an expanded additive mask"
    elif hasattr(model, "attention_backend"):
        backend = model.attention_backend()
    else:
        backend = f"{variant.attention}, {variant.layout} layout"

    if variant.compiled:
        compile_blocks(model)
        backend = f"compiled; {backend}"
    return Candidate(model, running, variant.layout, architecture.max_length, backend)


def _random_model(
    model_class: Any, config: PretrainedConfig, attention: str, dtype: torch.dtype
) -> Any:
    """Return a model in eval mode with random weights, without a pooler."""
    # The pooler is omitted, because the hidden states are the output of every model.
    has_pooler = "add_pooling_layer" in inspect.signature(model_class).parameters
    options = {"add_pooling_layer": False} if has_pooler else {}
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=attention, dtype=dtype, **options)
    return model.eval()


def flops(model: nn.Module, lengths: Sequence[int]) -> int:
    """Return the floating-point operations that an encoder needs for some sequences.

    A linear layer needs 2 operations per weight and token, and attention 4 D per pair of a token
    and a visible token. Padding is not counted.

    Args:
        model: Encoder.
        lengths: Sequence lengths in tokens.
    """
    # Embeddings are looked up and not multiplied, so only linear layers count.
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))

    config: Any = model.config
    layers = range(config.num_hidden_layers)
    pairs = sum(_visible_pairs(config, layer, lengths) for layer in layers)
    return 2 * weights * sum(lengths) + 4 * config.hidden_size * pairs


def _visible_pairs(config: Any, layer: int, lengths: Sequence[int]) -> int:
    """Return the number of pairs of a token and a visible token in a layer.

    In two of three layers of ModernBERT a token sees 64 tokens on each side.
    """
    layer_types = getattr(config, "layer_types", None)
    global_every = getattr(config, "global_attn_every_n_layers", 0)
    if layer_types:
        is_local = layer_types[layer] == "sliding_attention"
    else:
        is_local = global_every > 0 and layer % global_every != 0

    if not is_local:
        return sum(length * length for length in lengths)
    # `local_attention` counts the tokens on both sides, without the token itself. That tokens near
    # the ends of a sequence see fewer tokens is ignored.
    window = config.local_attention + 1
    return sum(length * min(length, window) for length in lengths)
