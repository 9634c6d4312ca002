"""Test the patch for llama.cpp's converter (upstream/llama_cpp).

The patched converter must write the same tensors as `neobert export gguf`.
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
    """Minimal substitute for the base class `BertModel` of llama.cpp's converter.

    It writes the pooling of the directory, and translates tensor names with the table of `gguf`.
    """

    def __init__(self, folder, path):
        self.dir_model = folder
        self.gguf_writer = gguf.GGUFWriter(path, gguf_file.ARCHITECTURE)
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
            for new_name, data in self.modify_tensors(tensor, name, None):
                self.gguf_writer.add_tensor(new_name, data.contiguous().numpy())
        self.gguf_writer.write_header_to_file()
        self.gguf_writer.write_kv_data_to_file()
        self.gguf_writer.write_tensors_to_file()
        self.gguf_writer.close()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_patched_converter_writes_the_model(pooling, tmp_path):
    """The file of the patched converter has the keys and values of the model.

    Without modules.json, the patch sets the pooling to the first token.
    """
    # The feed-forward has 344 inner units. The unpatched converter writes 2/3 of 512, 341, which
    # llama.cpp does not load.
    model = build(intermediate_size=512, rope_theta=500.0)
    model.save_pretrained(tmp_path)
    if pooling == "mean":
        (tmp_path / "modules.json").write_text("[]")

    path = tmp_path / "model.gguf"
    # The patch contains methods of a class that inherits from the converter's `BertModel`.
    type("Converter", (NeoBert, BertModel), {})(tmp_path, path).write()

    expected_writer = gguf.GGUFWriter(None, gguf_file.ARCHITECTURE)
    gguf_file.add_model_keys(expected_writer, model, pooling, "f32")
    assert gguf_file.compare_tensors(path, model, expected_writer) == (0, True)

    # `compare_tensors` ignores keys that are missing in the file, because they may have defaults.
    fields = gguf.GGUFReader(path).fields
    for key in ("feed_forward_length", "rope.freq_base", "pooling_type"):
        assert f"{gguf_file.ARCHITECTURE}.{key}" in fields
