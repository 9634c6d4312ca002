"""Test `neobert export openvino`.

Outputs against torch, configuration files, and weight compression.
"""

import json

import numpy as np
import pytest
import torch

from neobert import NeoBERTForSequenceClassification, NeoBERTModel
from neobert.export import command
from neobert.export import openvino as target


pytestmark = pytest.mark.slow


openvino = pytest.importorskip("openvino", reason="needs the extra openvino")
INT8 = "openvino_model_qint8_quantized"
FILES = {"fp32": "openvino_model", "fp16": "openvino_model_fp16", "int8": INT8}


def run(path, ids, mask):
    core = openvino.Core()
    options = json.loads((path.parent / "ov_config.json").read_text())
    compiled = core.compile_model(core.read_model(str(path)), "CPU", options)
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
    values = compiled({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    return {output.any_name: values[output] for output in compiled.outputs}


@pytest.fixture(scope="module")
def exported(sentence_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "out"
    command.main(["openvino", str(sentence_folder), str(folder), "--precisions", *FILES])
    return folder


@pytest.mark.parametrize("lengths", [(1,), (3, 1), (9, 4, 30, 2, 17)])
def test_any_batch_and_length(exported, sentence_folder, lengths, padded_batch):
    ids, mask = padded_batch(*lengths)
    model = NeoBERTModel.from_pretrained(sentence_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    for name, least in (("fp32", 0.999999), ("fp16", 0.9999), ("int8", 0.99)):
        outputs = run(exported / "openvino" / f"{FILES[name]}.xml", ids, mask)
        assert list(outputs) == ["last_hidden_state", "sentence_embedding"]
        assert outputs["sentence_embedding"].shape == (len(lengths), 48)
        hidden = torch.from_numpy(outputs["last_hidden_state"])[mask.bool()]
        assert torch.cosine_similarity(hidden, expected, dim=-1).min() > least, name


def test_weights_of_one_byte(exported):
    """Products and embeddings have int8 constants; the file is a quarter of that in float32, and a
    half in float16."""
    folder = exported / "openvino"
    sizes = {name: (folder / f"{file}.bin").stat().st_size for name, file in FILES.items()}
    assert sizes["fp16"] < 0.6 * sizes["fp32"] and sizes["int8"] < 0.45 * sizes["fp32"]
    operations = openvino.Core().read_model(str(folder / f"{INT8}.xml")).get_ops()
    constants = [op for op in operations if op.get_type_name() == "Constant" and len(op.shape) == 2]
    types = [op.get_element_type() for op in constants if min(op.shape) >= 48]
    assert types == [openvino.Type.i8] * (1 + 2 * 4 + 1)


def test_the_axis_of_the_scales():
    """Outputs of a product, rows of an embedding: a row with large weights takes no precision from
    the others."""
    from openvino import opset13 as ops

    generator = np.random.default_rng(0)
    weight = generator.normal(size=(6, 48)).astype(np.float32)
    weight[2] *= 1000
    for transposed in (True, False):
        x = ops.parameter([1, 48], np.float32)
        stored = weight if transposed else np.ascontiguousarray(weight.T)
        model = openvino.Model([ops.matmul(x, ops.constant(stored), False, transposed)], [x], "one")
        target._compress(model)
        inputs = generator.normal(size=(1, 48)).astype(np.float32)
        options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        (actual,) = openvino.compile_model(model, "CPU", options)(inputs).values()
        expected = inputs @ weight.T
        assert np.abs((actual - expected) / np.abs(weight).max(1)).max() < 0.1


def test_a_head(hub_folder, tmp_path, padded_batch):
    head, out = NeoBERTForSequenceClassification, tmp_path / "out"
    folder = hub_folder(head, num_hidden_layers=1, num_labels=3)
    command.main(["openvino", str(folder), str(out)])
    ids, mask = padded_batch(11, 5)
    with torch.no_grad():
        expected = head.from_pretrained(folder).eval()(ids, attention_mask=mask).logits
    outputs = run(out / "openvino" / "openvino_model.xml", ids, mask)
    assert list(outputs) == ["logits"] and np.abs(outputs["logits"] - expected.numpy()).max() < 1e-3
