"""Names and layouts of the published checkpoint, for the weight conversion of transformers.

`SplitHeads` belongs in src/transformers/core_model_loading.py, and `MAPPINGS` in
src/transformers/conversion_mapping.py (docs/native.md).
"""

import torch
from transformers import PreTrainedConfig
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PermuteForRope,
    WeightConverter,
    WeightRenaming,
)


class SplitHeads(ConversionOps):
    """Reorder rows from (heads, parts, head_dim) to (parts, heads, head_dim), for `Chunk`, and back.

    Args:
        parts: Number of projections in the tensor.
        inverse: Whether to restore the order of the checkpoint.
    """

    def __init__(self, parts: int = 3, inverse: bool = False):
        self.parts = parts
        self.inverse = inverse

    @torch.no_grad
    def convert(
        self,
        input_dict: dict[str, torch.Tensor | list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        config: PreTrainedConfig,
        **kwargs,
    ) -> dict[str, torch.Tensor]:
        """Return the tensor with its rows reordered."""
        name, tensor = next(iter(input_dict.items()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        rows = (config.num_attention_heads, self.parts)
        if self.inverse:
            rows = (self.parts, config.num_attention_heads)

        swapped = tensor.unflatten(0, (*rows, -1)).transpose(0, 1).reshape(tensor.shape)
        # With several targets, a later operation splits the tensor and needs its source name.
        return {name if len(target_patterns) > 1 else target_patterns[0]: swapped.contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        """Operation that restores the order, for `save_pretrained`."""
        return SplitHeads(self.parts, inverse=not self.inverse)


NEOBERT_CONVERSION = [
    WeightRenaming(r"encoder\.weight", "embed_tokens.weight"),
    WeightRenaming(r"transformer_encoder\.", r"layers\."),
    # The lookbehind keeps the reverse renaming from matching the norms of the layers.
    WeightRenaming(r"layer_norm\.weight", r"(?<![a-z_])norm\.weight"),
    WeightRenaming(r"\.attention_norm\.", r"\.input_layernorm\."),
    WeightRenaming(r"\.ffn_norm\.", r"\.post_attention_layernorm\."),
    WeightRenaming(r"\.wo\.", r"\.self_attn\.o_proj\."),
    WeightRenaming(r"\.ffn\.w3\.", r"\.mlp\.down_proj\."),
    WeightConverter(
        "qkv.weight",
        ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        operations=[
            SplitHeads(parts=3),
            Chunk(dim=0),
            # RoPE rotates adjacent pairs in the checkpoint, and the two halves of a head in transformers.
            PermuteForRope(permute_layer_names=["q_proj", "k_proj"]),
        ],
    ),
    WeightConverter(
        "ffn.w12.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        operations=[Chunk(dim=0)],
    ),
]

# Mappings by `model_type`, or by class for a head whose names differ.
MAPPINGS = {
    "neobert": NEOBERT_CONVERSION,
    "NeoBertForTokenClassification": [WeightRenaming(r"^classifier\.", r"^score\.")],
}
