"""Test `neobert export openvino`: outputs compared with torch, and the int8 weights."""

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
    """Return the outputs of a model by name, computed with the options of the export."""
    core = openvino.Core()
    options = json.loads((path.parent / "ov_config.json").read_text())
    compiled = core.compile_model(core.read_model(str(path)), "CPU", options)
    assert compiled.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
    values = compiled({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    return {output.any_name: values[output] for output in compiled.outputs}


@pytest.fixture(scope="module")
def exported(sentence_folder, tmp_path_factory):
    """Return the export of the sentence encoder in all precisions."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    command.main(["openvino", str(sentence_folder), str(folder), "--precisions", *FILES])
    return folder


@pytest.mark.parametrize("lengths", [(1,), (3, 1), (9, 4, 30, 2, 17)])
def test_dynamic_shapes(exported, sentence_folder, lengths, padded_batch):
    """The hidden states equal those of torch for shapes that differ from the traced example."""
    ids, mask = padded_batch(*lengths)
    model = NeoBERTModel.from_pretrained(sentence_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]

    for name, min_cosine in (("fp32", 0.999999), ("fp16", 0.9999), ("int8", 0.99)):
        outputs = run(exported / "openvino" / f"{FILES[name]}.xml", ids, mask)
        assert list(outputs) == ["last_hidden_state", "sentence_embedding"]
        assert outputs["sentence_embedding"].shape == (len(lengths), 48)
        hidden = torch.from_numpy(outputs["last_hidden_state"])[mask.bool()]
        assert torch.cosine_similarity(hidden, expected, dim=-1).min() > min_cosine, name


def test_int8_weights(exported):
    """The matrices of linear layers and embeddings are stored in int8.

    The files of float16 and int8 have about one half and one quarter of the size in float32.
    """
    folder = exported / "openvino"
    sizes = {name: (folder / f"{file}.bin").stat().st_size for name, file in FILES.items()}
    assert sizes["fp16"] < 0.6 * sizes["fp32"] and sizes["int8"] < 0.45 * sizes["fp32"]

    operations = openvino.Core().read_model(str(folder / f"{INT8}.xml")).get_ops()
    constants = [op for op in operations if op.get_type_name() == "Constant" and len(op.shape) == 2]
    types = [op.get_element_type() for op in constants if min(op.shape) >= 48]
    # The embedding, 4 linear layers in each of 2 blocks, and the Dense module.
    assert types == [openvino.Type.i8] * (1 + 2 * 4 + 1)


def test_quantization_scale_axis():
    """There is one scale per output of a product, for transposed matrices as well.

    With another axis, the output with large weights would reduce the precision of the others.
    """
    from openvino import opset13 as ops

    generator = np.random.default_rng(0)
    weight = generator.normal(size=(6, 48)).astype(np.float32)
    weight[2] *= 1000

    for transposed in (True, False):
        x = ops.parameter([1, 48], np.float32)
        stored = weight if transposed else np.ascontiguousarray(weight.T)
        model = openvino.Model([ops.matmul(x, ops.constant(stored), False, transposed)], [x], "one")
        target._quantize(model)

        inputs = generator.normal(size=(1, 48)).astype(np.float32)
        options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        (actual,) = openvino.compile_model(model, "CPU", options)(inputs).values()
        expected = inputs @ weight.T
        assert np.abs((actual - expected) / np.abs(weight).max(1)).max() < 0.1


def test_sequence_classifier(hub_folder, tmp_path, padded_batch):
    """The logits of a sequence classifier equal those of torch."""
    head = NeoBERTForSequenceClassification
    out = tmp_path / "out"
    folder = hub_folder(head, num_hidden_layers=1, num_labels=3)
    command.main(["openvino", str(folder), str(out)])
    ids, mask = padded_batch(11, 5)
    with torch.no_grad():
        expected = head.from_pretrained(folder).eval()(ids, attention_mask=mask).logits
    outputs = run(out / "openvino" / "openvino_model.xml", ids, mask)
    assert list(outputs) == ["logits"] and np.abs(outputs["logits"] - expected.numpy()).max() < 1e-3
