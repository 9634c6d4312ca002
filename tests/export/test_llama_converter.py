"""Test the patch for llama.cpp's converter (upstream/llama_cpp).

The patched converter writes the same tensors as `neobert export gguf`.
"""

import json
import runpy
from pathlib import Path

import pytest
from helpers.export_models import build
from safetensors.torch import load_file

import neobert


gguf = pytest.importorskip("gguf")

from neobert.export import gguf_file  # noqa: E402


ROOT = Path(neobert.__file__).resolve().parents[1]
NeoBert = runpy.run_path(str(ROOT / "upstream" / "llama_cpp" / "conversion_neobert.py"))["NeoBert"]


class BertModel:
    """What the converter's base class does of it: the pooling of a folder, names by the table of
    `gguf`."""

    def __init__(self, folder, path):
        self.dir_model, self.gguf_writer = folder, gguf.GGUFWriter(path, gguf_file.ARCHITECTURE)
        self.hparams = json.loads((folder / "config.json").read_text())
        blocks = self.hparams["num_hidden_layers"]
        self.names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NEO_BERT, blocks)

    def set_gguf_parameters(self):
        self.gguf_writer.add_feed_forward_length(self.hparams["intermediate_size"])
        if (self.dir_model / "modules.json").is_file():
            self.gguf_writer.add_pooling_type(gguf.PoolingType.MEAN)

    def modify_tensors(self, data_torch, name, bid):
        yield self.names.get_name(name, (".weight", ".bias")), data_torch

    def write(self):
        self.set_gguf_parameters()
        for name, tensor in load_file(self.dir_model / "model.safetensors").items():
            for new, data in self.modify_tensors(tensor, name, None):
                self.gguf_writer.add_tensor(new, data.contiguous().numpy())
        self.gguf_writer.write_header_to_file()
        self.gguf_writer.write_kv_data_to_file()
        self.gguf_writer.write_tensors_to_file()
        self.gguf_writer.close()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_converter_s_file_holds_the_model(pooling, tmp_path):
    # A feed-forward of 344: two thirds of 512 are 341, which llama.cpp does not load.
    model = build(intermediate_size=512, rope_theta=500.0)
    model.save_pretrained(tmp_path)
    if pooling == "mean":
        (tmp_path / "modules.json").write_text("[]")
    path = tmp_path / "model.gguf"
    type("Converter", (NeoBert, BertModel), {})(tmp_path, path).write()
    ours = gguf.GGUFWriter(None, gguf_file.ARCHITECTURE)
    gguf_file.describe_model(ours, model, pooling, "f32")
    assert gguf_file.largest_error(path, model, ours) == 0
    fields = gguf.GGUFReader(path).fields
    for key in ("feed_forward_length", "rope.freq_base", "pooling_type"):
        assert f"{gguf_file.ARCHITECTURE}.{key}" in fields  # others may be left to defaults
