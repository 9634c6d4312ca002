"""Export to OpenVINO models with a dynamic batch size and sequence length.

The folder has the layout of the OpenVINO backend of sentence-transformers.

The file of a model does not contain the precision of the computation: by default the runtime
chooses the fastest precision of the processor, which is bfloat16 on newer server CPUs. Therefore
`openvino/ov_config.json` beside the models sets float32. Each model is run with this file, and its
outputs are compared with torch before the folder appears.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..common.errors import UserError, one_line
from ..common.files import write_json
from . import folder
from .check import Precision, Reference, Runner
from .graph import INPUTS, Graph, example_inputs, quiet
from .options import OpenvinoOptions
from .source import SourceModel


if TYPE_CHECKING:
    import openvino


check_output = folder.check_output

# Properties for `compile_model`, and for sentence-transformers as `ov_config`.
OPTIONS_FILE = "ov_config.json"
OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}

PRECISIONS = {
    "fp32": Precision("openvino_model.xml", min_token_cosine=0.99999, min_pooled_cosine=0.99999),
    "fp16": Precision("openvino_model_fp16.xml", min_token_cosine=0.995, min_pooled_cosine=0.999),
    "int8": Precision(
        "openvino_model_qint8_quantized.xml", min_token_cosine=0.9, min_pooled_cosine=0.99
    ),
}


def export(source: SourceModel, options: OpenvinoOptions) -> None:
    """Write the folder of a model.

    Raises:
        UserError: If a model differs too much from torch, or the output cannot be written.
    """
    import openvino

    # One trace is enough: the precisions differ in the stored weights only.
    model = _trace(Graph(source))
    reference = Reference(source)
    with folder.new_export(source, options.model.output, "openvino") as output:
        write_json(output.folder / OPTIONS_FILE, OPTIONS)
        # int8 is the last one, because the model is quantized in place.
        names = [name for name in PRECISIONS if name in options.format.precisions]
        for name in tqdm(names, desc="models", unit="model", disable=None):
            precision = PRECISIONS[name]
            path = output.folder / precision.file
            if name == "int8":
                _quantize(model)
            openvino.save_model(model, str(path), compress_to_fp16=name == "fp16")

            # The .xml file contains the graph, and a .bin file beside it the weights.
            size = path.with_suffix(".bin").stat().st_size
            summary = f"{path.name:<35} {size / 1e6:8.1f} MB"
            run = _load_runner(path)
            output.files[path.stem] = precision.verify(name, "OpenVINO", reference, run, summary)


def _trace(graph: Graph) -> "openvino.Model":
    """Return the OpenVINO model of a graph.

    Raises:
        UserError: If torch or OpenVINO fails.
    """
    import openvino

    inputs, axes = example_inputs()
    try:
        with quiet():
            program = torch.export.export(graph.eval(), (), inputs, dynamic_shapes=axes)
            model = openvino.convert_model(program)
    except Exception as error:  # Both libraries raise exceptions of many classes.
        raise UserError(f"OpenVINO cannot trace this model: {one_line(error)}.") from error

    # The converter names the ports by nodes of the graph, but clients pass inputs by name.
    for port, name in zip(model.inputs, INPUTS):
        port.get_tensor().set_names({name})
    for port, name in zip(model.outputs, graph.outputs):
        port.get_tensor().set_names({name})
    return model


def _quantize(model: "openvino.Model") -> None:
    """Quantize the constant matrices of a model to int8, in place.

    There is one scale per output channel of a linear layer, and one per token of the embedding.
    """
    import openvino
    from openvino import opset13 as ops

    # A matrix becomes Constant (int8) -> Convert -> Multiply by the scales. The runtime recognizes
    # this pattern and keeps the weights in int8.
    for node in model.get_ops():
        op_type = node.get_type_name()
        if op_type not in ("MatMul", "Gather"):
            continue
        # Position of the matrix among the inputs. Scalars and vectors remain in float.
        position = 1 if op_type == "MatMul" else 0
        constant = node.input(position).get_source_output().get_node()
        if (
            constant.get_type_name() != "Constant"
            or len(constant.shape) != 2
            or not constant.get_element_type().is_real()
        ):
            continue

        # There is one scale per row of the embedding, and per output of a product. The outputs of a
        # product are the rows of a transposed matrix, or the columns of another one.
        matrix = constant.data
        outputs_are_columns = op_type == "MatMul" and not node.get_attributes()["transpose_b"]
        axis = 0 if outputs_are_columns else 1
        scales = np.maximum(np.abs(matrix).max(axis, keepdims=True), 1e-12) / 127
        integers = ops.constant(np.rint(matrix / scales).astype(np.int8), openvino.Type.i8)
        values = ops.convert(integers, "f32")
        product = ops.multiply(values, ops.constant(scales.astype(np.float32)))
        node.input(position).replace_source_output(product.output(0))
    model.validate_nodes_and_infer_types()


def _load_runner(path: Path) -> Runner:
    """Return a function that runs a model in OpenVINO."""
    import openvino

    # The model is read from the file again, because this is what users run.
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(str(path)), "CPU", OPTIONS)
    names = [output.any_name for output in compiled.outputs]

    def run(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        feed = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        outputs = compiled(feed)
        return {name: outputs[name] for name in names}

    return run
