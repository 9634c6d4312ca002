"""Forward pass of NeoBERT over packed texts on a CPU, with few operators and prepacked weights.

The model checks and prepares every type of batch, which takes longer than the matrix products of a
short text. This forward pass takes lists of token ids only. In float32 and int8 the result of a
text does not depend on the other texts of a batch: linear layers give each row the same bits,
attention runs text by text, and everything else works on single rows.

Shape legend: T tokens of all texts, R rows (T and unused rows), D hidden size, H heads, K head_dim,
F inner size of the feed-forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..attention_neobert import CPU_ROWS, CPU_TOKENS
from ..common.loading import STANDARD_BLOCK, block_type
from ..common.packing import FLOAT32_ROW_GROUP
from ..modeling_neobert import (
    NeoBERTForSequenceClassification,
    NeoBERTModel,
    rotary_embeddings,
)
from ..quantization.int8 import concat_rows, is_int8, norm_floor, normalize_and_quantize
from ..quantization.packed_linear import PackedLinear, number_of_rows


# Rotary angles are computed for a multiple of this number of positions.
_POSITIONS = 512


@dataclass(frozen=True)
class Layout:
    """Rotary angles and text lengths of a batch, which all blocks use.

    Attributes:
        angles: (R, 1, 1, K / 2) complex rotary angles.
        groups: (number of texts, length) of neighboring texts of one length.
    """

    angles: torch.Tensor
    groups: list[tuple[int, int]]


class CpuForward:
    """Forward pass of a `NeoBERTModel`, with a copy of its linear weights.

    Args:
        model: Model for which `CpuForward.supports` is true. Later changes of its weights have no
            effect.
    """

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.embedding = model.encoder.weight.detach()
        self.angles = self._rotary_angles(_POSITIONS)
        block_class = Int8Block if is_int8(model) else FloatBlock
        self.blocks = [block_class(block) for block in model.transformer_encoder]
        self.norm = model.layer_norm

    @staticmethod
    def supports(model: Any) -> bool:
        """Return whether this pass can replace the forward of a model."""
        # Classes are compared by name, because remote code defines the class a second time.
        config = getattr(model, "config", None)
        if type(model).__name__ != NeoBERTModel.__name__ or config is None:
            return False
        if block_type(config) != STANDARD_BLOCK:
            return False
        # Adapters and other replacements of linear layers run in the model itself.
        is_plain = is_int8(model) or all(
            type(layer) is torch.nn.Linear
            for block in model.transformer_encoder
            for layer in (block.qkv, block.wo, block.ffn.w12, block.ffn.w3)
        )
        # The angles of dynamic rotary positions depend on the length of the text. A hook would not
        # run, because this pass does not call the modules of the model.
        return (
            is_plain
            and config.rope_parameters["rope_type"] != "dynamic"
            and config._attn_implementation == "sdpa"
            and model.device.type == "cpu"
            and model.dtype in (torch.float32, torch.bfloat16)
            and not model._is_observed()
        )

    def __call__(self, texts: Sequence[np.ndarray]) -> torch.Tensor:
        """Return the hidden states of tokenized texts, one after another, (T, D).

        Args:
            texts: Token ids, integer arrays.

        Raises:
            IndexError: If a token id is not in the vocabulary.
        """
        lengths = [len(ids) for ids in texts]
        # The cached angles are computed again only for a text that is longer than any before.
        # Another thread may replace them by those of fewer positions, so they are read once.
        cached = self.angles
        if max(lengths) > len(cached):
            cached = self.angles = self._rotary_angles(max(lengths))

        # Every text starts at position 0, so the angles of the first positions repeat.
        total = sum(lengths)
        unused = number_of_rows(total) - total

        tokens = texts[0] if len(texts) == 1 else np.concatenate(texts)
        hidden = F.embedding(torch.from_numpy(tokens.astype(np.int64)), self.embedding)
        angles = cached[: lengths[0]]
        if len(texts) > 1:
            angles = torch.cat([cached[:length] for length in lengths])

        # oneDNN builds a kernel for every number of rows, so unused rows round the number up. Their
        # angles may have any value.
        if unused:
            hidden = F.pad(hidden, (0, 0, 0, unused))
            angles = torch.cat([angles, cached[:1].expand(unused, -1, -1, -1)])

        # Neighboring texts of the same length run in one call of the attention. `token_batches`
        # sorts texts by length, so there are few groups.
        groups = [(len(list(group)), length) for length, group in groupby(lengths)]
        layout = Layout(angles, groups)
        for block in self.blocks:
            hidden = block(hidden, layout)
        return rms_norm(hidden[:total], self.norm)

    def _rotary_angles(self, positions: int) -> torch.Tensor:
        """Return the complex angles of at least this number of positions, (N, 1, 1, K / 2)."""
        # Rounding up avoids a computation for every new maximum length.
        positions = -(-positions // _POSITIONS) * _POSITIONS
        embeddings = rotary_embeddings(self.config, torch.arange(positions)[None], positions)
        assert embeddings is not None
        return embeddings[0][0]


class CpuClassifier:
    """Forward pass of a `NeoBERTForSequenceClassification` with a `CpuForward`.

    Args:
        model: Model that `for_model` accepts.
    """

    def __init__(self, model: Any) -> None:
        self.pooling: str = model.config.classifier_pooling
        self.forward = CpuForward(model.model)
        self.dense = model.dense
        self.classifier = model.classifier

    @classmethod
    def from_model(cls, model: Any) -> "CpuClassifier | None":
        """Return the forward pass of a model, or None if the model is not supported."""
        is_supported = (
            type(model).__name__ == NeoBERTForSequenceClassification.__name__
            and CpuForward.supports(model.model)
            and not model._is_observed()
        )
        if not is_supported:
            return None
        with torch.no_grad():
            return cls(model)

    def __call__(self, texts: Sequence[np.ndarray]) -> torch.Tensor:
        """Return the logits of tokenized texts, (N, C).

        Args:
            texts: Token ids, integer arrays of at least one token.

        Raises:
            IndexError: If a token id is not in the vocabulary.
        """
        pooled = pool_texts(self.forward(texts), [len(ids) for ids in texts], self.pooling)

        # With complete groups of rows, the logits of a text do not depend on the batch.
        pooled = F.pad(pooled, (0, 0, 0, -len(texts) % FLOAT32_ROW_GROUP))
        return self.classifier(torch.tanh(self.dense(pooled)))[: len(texts)]


class FloatBlock:
    """`NeoBERTBlock` in float32 or bfloat16.

    In float32, the weights of the norms are folded into the linear layers that follow them. In
    bfloat16, the product of two weights would be rounded.

    Args:
        block: `NeoBERTBlock`.
    """

    def __init__(self, block: Any) -> None:
        self.num_heads: int = block.num_heads
        self.head_dim: int = block.wo.weight.shape[0] // self.num_heads
        self.attention_norm = block.attention_norm
        self.ffn_norm = block.ffn_norm
        self.is_folded = block.qkv.weight.dtype == torch.float32
        # Both norms of a block have the same size and epsilon.
        self.norm_floor = norm_floor(block.attention_norm)
        self.qkv = PackedLinear(self._fold(block.qkv.weight, block.attention_norm))
        self.wo = PackedLinear(block.wo.weight)
        self.up = PackedLinear(self._fold(block.ffn.w12.weight, block.ffn_norm))
        self.down = PackedLinear(block.ffn.w3.weight)

    def __call__(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the hidden states after this block, (R, D)."""
        # The weight interleaves query, key and value per head.
        normalized = self._normalize(hidden, self.attention_norm)
        qkv = self.qkv(normalized).view(-1, self.num_heads, 3, self.head_dim)
        rotate(qkv, layout.angles)
        hidden = self.wo.add_to(hidden, attend(qkv, layout.groups))

        # The feed-forward has the largest inner states, so it runs on a chunk of rows at a time.
        outputs = []
        for rows in split_rows(hidden, CPU_TOKENS):
            gate, value = self.up(self._normalize(rows, self.ffn_norm)).chunk(2, 1)
            outputs.append(self.down.add_to(rows, torch.mul(F.silu(gate, True), value)))
        return concat_rows(outputs)

    def _fold(self, weight: torch.Tensor, norm: Any) -> torch.Tensor:
        """Return a linear weight times the weight of the norm and sqrt(D), if norms are folded."""
        return weight * (norm.weight * weight.shape[1] ** 0.5) if self.is_folded else weight

    def _normalize(self, hidden: torch.Tensor, norm: Any) -> torch.Tensor:
        """Return the normalized hidden states, without the factors that `_fold` has folded."""
        if not self.is_folded:
            return rms_norm(hidden, norm)
        # x / sqrt(mean(x^2) + eps) = sqrt(D) * x / hypot(|x|, sqrt(D * eps))
        outputs = [
            x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.norm_floor)
            for x in split_rows(hidden, CPU_ROWS)
        ]
        return concat_rows(outputs)


class Int8Block:
    """`NeoBERTBlock` whose linear layers are in int8.

    Args:
        block: `NeoBERTBlock` after `quantize_int8`.
    """

    def __init__(self, block: Any) -> None:
        self.num_heads: int = block.num_heads
        self.head_dim: int = block.wo.out_features // self.num_heads
        self.attention_norm_weight = block.attention_norm.norm.weight.float()
        self.ffn_norm_weight = block.ffn_norm.norm.weight.float()
        # Both norms of a block have the same size and epsilon.
        self.norm_floor = block.attention_norm.norm_floor
        self.qkv = block.qkv
        self.wo = block.wo
        self.ffn = block.ffn

    def __call__(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return the hidden states after this block, (R, D)."""
        codes, row_factors = normalize_and_quantize(
            hidden, self.attention_norm_weight, self.norm_floor
        )
        qkv = self.qkv.product(codes, hidden.dtype).view(-1, self.num_heads, 3, self.head_dim)

        # The product lacks the row factors. A rotation is linear, so the angles apply them to
        # queries and keys at no cost, and only the values need a multiplication.
        row_factors = row_factors[..., None, None]
        rotate(qkv, layout.angles * row_factors)
        qkv[:, :, 2].mul_(row_factors[..., 0])
        hidden = self.wo.from_rows(attend(qkv, layout.groups)).add_(hidden)

        # The first layer of the feed-forward takes codes, so nothing is quantized twice.
        codes, row_factors = normalize_and_quantize(hidden, self.ffn_norm_weight, self.norm_floor)
        return self.ffn.from_codes(codes, row_factors, hidden.dtype).add_(hidden)


# ------------------------------------------------------------------------------------------------
# operations on rows


def try_fast_forward(
    forward: CpuForward | CpuClassifier | None, texts: Sequence[np.ndarray]
) -> torch.Tensor | None:
    """Return the output of a fast forward pass, or None if the model itself must run.

    The model must run if there is no fast forward pass, and if a token id is not in the vocabulary,
    which the model reports with a helpful error.
    """
    if forward is None:
        return None
    try:
        return forward(texts)
    except IndexError:
        return None


def pool_texts(hidden: torch.Tensor, lengths: Sequence[int], pooling: str) -> torch.Tensor:
    """Return the pooled hidden states of each text, (N, D).

    Each text is summed separately, so its bits do not depend on the batch.

    Args:
        hidden: Hidden states of all texts, one after another, (T, D).
        lengths: Length of each text.
        pooling: "mean" or "cls".
    """
    texts = hidden.split(list(lengths))
    if pooling == "cls":
        return torch.stack([text[0] for text in texts])
    # A sum of many values in bfloat16 would lose the small ones.
    means = [text.sum(0, dtype=torch.float32) / text.shape[0] for text in texts]
    return torch.stack(means).to(hidden.dtype)


def rms_norm(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    """Return the RMSNorm of rows, computed in float32 as in the model."""
    weight = norm.weight.float()
    outputs = [
        F.rms_norm(x.float(), weight.shape, weight, norm.eps).to(hidden.dtype)
        for x in split_rows(hidden, CPU_ROWS)
    ]
    return concat_rows(outputs)


def rotate(qkv: torch.Tensor, angles: torch.Tensor) -> None:
    """Multiply the pairs of queries and keys by complex angles in place, in float32.

    Args:
        qkv: (R, H, 3, K).
        angles: (R, 1, 1, K / 2) complex.
    """
    # Neighboring values of a head are the real and the imaginary part of a complex number. `view`
    # shares the memory of `qkv`, which the multiplication writes to.
    rows, heads, _, head_dim = qkv.shape
    query_key = qkv[:, :, :2].view(rows, heads, 2, head_dim // 2, 2)
    for pairs, rotations in zip(split_rows(query_key, CPU_ROWS), split_rows(angles, CPU_ROWS)):
        # `float` returns float32 itself, and a copy of bfloat16, which must be written back.
        values = pairs.float()
        torch.view_as_complex(values).mul_(rotations)
        if values.dtype != pairs.dtype:
            pairs.copy_(values)


def attend(qkv: torch.Tensor, groups: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the attention of each text to itself, (R, D); zeros in unused rows.

    Args:
        qkv: (R, H, 3, K).
        groups: (number of texts, length) of neighboring texts of one length.
    """
    rows, heads, _, head_dim = qkv.shape
    outputs = []
    start = 0
    for count, length in groups:
        stop = start + count * length
        # (count, length, H, 3, K) -> three tensors of (count, H, length, K), without a copy.
        parts = qkv[start:stop].view(count, length, heads, 3, head_dim).transpose(1, 2)
        query, key, value = parts.unbind(3)
        output = F.scaled_dot_product_attention(query, key, value)
        outputs.append(output.transpose(1, 2).reshape(count * length, heads * head_dim))
        start = stop
    # The unused rows belong to no text.
    if start < rows:
        outputs.append(qkv.new_zeros(rows - start, heads * head_dim))
    return concat_rows(outputs)


def split_rows(x: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
    """Return `x` in chunks of at most `rows` rows; a single chunk needs no operator."""
    return (x,) if x.shape[0] <= rows else x.split(rows)
