"""Names and layouts of the published checkpoint, for the library's weight conversion.

`SplitHeads` goes to src/transformers/core_model_loading.py of the library, the list to the mapping
of src/transformers/conversion_mapping.py (docs/native.md).
"""

import torch
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PermuteForRope,
    WeightConverter,
    WeightRenaming,
)


class SplitHeads(ConversionOps):
    """Rows that are interleaved per head, (heads, parts, head_dim), to parts one after the other,
    (parts, heads, head_dim), for `Chunk`; and back."""

    def __init__(self, parts: int = 3, inverse: bool = False):
        self.parts = parts
        self.inverse = inverse

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, config, **kwargs):
        name, tensor = next(iter(input_dict.items()))
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        rows = (config.num_attention_heads, self.parts)
        rows = rows[::-1] if self.inverse else rows
        swapped = tensor.unflatten(0, (*rows, -1)).transpose(0, 1).reshape(tensor.shape)
        return {name if len(target_patterns) > 1 else target_patterns[0]: swapped.contiguous()}

    @property
    def reverse_op(self):
        return SplitHeads(self.parts, inverse=not self.inverse)


NEOBERT_CONVERSION = [
    WeightRenaming(r"encoder\.weight", "embed_tokens.weight"),
    WeightRenaming(r"transformer_encoder\.", r"layers\."),
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
            # Adjacent pairs to the two halves of the library's rotate_half.
            PermuteForRope(permute_layer_names=["q_proj", "k_proj"]),
        ],
    ),
    WeightConverter(
        "ffn.w12.weight",
        ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        operations=[Chunk(dim=0)],
    ),
]

MAPPINGS = {
    "neobert": NEOBERT_CONVERSION,
    "NeoBertForTokenClassification": [WeightRenaming(r"^classifier\.", r"^score\.")],
}
