"""What mends NeoBERT in llama.cpp's converter; docs/native.md has the report.

Goes into `class NeoBert(BertModel)` of llama.cpp's conversion/bert.py: the first method in place of
the one there, the second is new.
"""

import gguf


class NeoBert:
    def set_gguf_parameters(self):
        super().set_gguf_parameters()
        # SwiGLU has two thirds of the width, rounded up to a multiple of 8.
        width = 8 * ((int(2 * self.hparams["intermediate_size"] / 3) + 7) // 8)
        self.gguf_writer.add_feed_forward_length(width)
        rope = self.hparams.get("rope_parameters") or self.hparams
        self.gguf_writer.add_rope_freq_base(rope.get("rope_theta") or 10000.0)
        self.gguf_writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        self.gguf_writer.add_layer_norm_rms_eps(self.hparams.get("norm_eps", 1e-5))
        if not (self.dir_model / "modules.json").is_file():  # else the base class has read it
            self.gguf_writer.add_pooling_type(gguf.PoolingType.CLS)

    def modify_tensors(self, data_torch, name, bid):
        if name.endswith("qkv.weight"):  # rows by head, then q, k, v; to q, k, v, then head
            rows = data_torch.unflatten(0, (self.hparams["num_attention_heads"], 3, -1))
            data_torch = rows.transpose(0, 1).flatten(0, 2)
        yield from super().modify_tensors(data_torch, name, bid)
