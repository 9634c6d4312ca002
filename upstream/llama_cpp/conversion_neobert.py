"""Corrections for NeoBERT in llama.cpp's converter (docs/native.md).

The methods belong to `class NeoBert(BertModel)` in conversion/bert.py of llama.cpp: the first one
replaces the existing method, the second one is new.
"""

from collections.abc import Iterator

import gguf
import torch


class NeoBert:
    """Methods of llama.cpp's class of the same name."""

    def set_gguf_parameters(self) -> None:
        """Write the keys of the architecture."""
        super().set_gguf_parameters()
        # SwiGLU has two thirds of intermediate_size, rounded up to a multiple of 8.
        inner_size = 8 * ((int(2 * self.hparams["intermediate_size"] / 3) + 7) // 8)
        self.gguf_writer.add_feed_forward_length(inner_size)

        # transformers 5 stores the RoPE base in `rope_parameters`, and version 4 outside of it.
        rope = self.hparams.get("rope_parameters") or self.hparams
        self.gguf_writer.add_rope_freq_base(rope.get("rope_theta") or 10000.0)
        self.gguf_writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        self.gguf_writer.add_layer_norm_rms_eps(self.hparams.get("norm_eps", 1e-5))

        # The base class has read the pooling of modules.json.
        if not (self.dir_model / "modules.json").is_file():
            self.gguf_writer.add_pooling_type(gguf.PoolingType.CLS)

    def modify_tensors(
        self, data_torch: torch.Tensor, name: str, bid: int | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Reorder the rows of `qkv.weight` from (heads, 3, head_dim) to (3, heads, head_dim)."""
        if name.endswith("qkv.weight"):
            rows = data_torch.unflatten(0, (self.hparams["num_attention_heads"], 3, -1))
            data_torch = rows.transpose(0, 1).flatten(0, 2)
        yield from super().modify_tensors(data_torch, name, bid)
