"""OpenVINO models of a NeoBERT with a dynamic batch and length, laid out as the OpenVINO backend of
sentence-transformers reads them.

What a model computes in is not part of its file: without an option the runtime chooses the
precision that is fastest on the processor, which is bfloat16 on newer server CPUs. So
`openvino/ov_config.json` beside the models says float32. Each model is run with it and compared
with torch before the folder is kept.
"""

import numpy as np
import torch
from tqdm.auto import tqdm

from ..common.errors import UserError, one_line
from ..common.files import write_json
from . import folder
from .check import Precision, Reference
from .graph import INPUTS, Graph, example, quiet
from .options import OpenvinoOptions
from .source import Source


check_output = folder.check_output

# Read by `compile_model` and, as `ov_config`, by sentence-transformers.
OPTIONS_FILE, OPTIONS = "ov_config.json", {"INFERENCE_PRECISION_HINT": "f32"}


PRECISIONS = {
    "fp32": Precision("openvino_model.xml", 0.99999, 0.99999),
    "fp16": Precision("openvino_model_fp16.xml", 0.995, 0.999),
    "int8": Precision("openvino_model_qint8_quantized.xml", 0.9, 0.99),
}


def export(source: Source, options: OpenvinoOptions) -> None:
    """Write the folder of a model.

    Raises:
        UserError: If a model differs too much from torch, or the output cannot be written.
    """
    import openvino

    model, reference = _trace(Graph(source)), Reference(source)
    with folder.new_export(source, options.model.output, "openvino") as (place, report):
        write_json(place / OPTIONS_FILE, OPTIONS)
        names = [name for name in PRECISIONS if name in options.format.precisions]
        for name in tqdm(names, desc="models", unit="model", disable=None):
            precision = PRECISIONS[name]
            path = place / precision.file
            if name == "int8":
                _compress(model)  # the last one
            openvino.save_model(model, str(path), compress_to_fp16=name == "fp16")
            size = path.with_suffix(".bin").stat().st_size
            written = f"{path.name:<35} {size / 1e6:8.1f} MB"
            entry = precision.prove(f"{name} in OpenVINO", reference, _runner(path), written)
            report["files"][path.stem] = entry


def _trace(graph):
    """openvino.Model of a Graph."""
    import openvino

    inputs, axes = example()
    try:
        with quiet():
            program = torch.export.export(graph.eval(), (), inputs, dynamic_shapes=axes)
            model = openvino.convert_model(program)
    except Exception as error:  # of both libraries, of many kinds
        raise UserError(f"this model cannot be traced for OpenVINO ({one_line(error)})") from error
    for ports, names in ((model.inputs, INPUTS), (model.outputs, graph.outputs)):
        for port, name in zip(ports, names):
            port.get_tensor().set_names({name})
    return model


def _compress(model):
    """Gives the constant matrices of a model int8 weights with one scale a row: of each output of a
    linear layer, of each token of the embedding."""
    import openvino
    from openvino import opset13 as ops

    for node in model.get_ops():
        kind = node.get_type_name()
        if kind not in ("MatMul", "Gather"):
            continue
        place = 1 if kind == "MatMul" else 0
        source = node.input(place).get_source_output()
        constant = source.get_node()
        if (
            constant.get_type_name() != "Constant"
            or len(constant.shape) != 2
            or not constant.get_element_type().is_real()
        ):
            continue
        matrix = constant.data
        # Rows of the embedding; outputs of the product, whichever axis they are.
        axis = 0 if kind == "MatMul" and not node.get_attributes()["transpose_b"] else 1
        scales = np.maximum(np.abs(matrix).max(axis, keepdims=True), 1e-12) / 127
        steps = ops.constant(np.rint(matrix / scales).astype(np.int8), openvino.Type.i8)
        small = ops.multiply(ops.convert(steps, "f32"), ops.constant(scales.astype(np.float32)))
        node.input(place).replace_source_output(small.output(0))
    model.validate_nodes_and_infer_types()


def _runner(path):
    """Function of (input_ids, attention_mask) -> {name: array}."""
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(str(path)), "CPU", OPTIONS)
    names = [output.any_name for output in compiled.outputs]

    def run(ids, mask):
        found = compiled({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        return {name: found[name] for name in names}

    return run
