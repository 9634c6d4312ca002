"""Export to ONNX graphs with a dynamic batch size and sequence length.

The folder has the layout of transformers.js, and is complete for Text Embeddings Inference,
fastembed and the ONNX backend of sentence-transformers. ONNX Runtime runs every graph, and the
outputs are compared with torch before the folder appears.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from ..common.errors import UserError, one_line
from ..quantization.smoothing import encoders_of, smooth
from . import folder
from .check import Precision, Reference, Runner
from .graph import INPUTS, Graph, example_inputs, quiet
from .options import OnnxOptions
from .source import SourceModel


if TYPE_CHECKING:
    import onnx


check_output = folder.check_output

# The first version that has all operations of the graph. ONNX Runtime, its builds for browsers, and
# Text Embeddings Inference read it.
OPSET = 18
# A protobuf message is limited to 2 GiB. Larger weights are stored in a separate file. The nodes
# and names of a graph take less than the remaining 16 MiB.
MAX_WEIGHT_BYTES = 2**31 - 2**24

PRECISIONS = {
    "fp32": Precision("model.onnx", min_token_cosine=0.99999, min_pooled_cosine=0.99999),
    "fp16": Precision("model_fp16.onnx", min_token_cosine=0.995, min_pooled_cosine=0.999),
    "int8": Precision("model_quantized.onnx", min_token_cosine=0.9, min_pooled_cosine=0.99),
    "q4": Precision("model_q4.onnx", min_token_cosine=0.3, min_pooled_cosine=0.8),
}


def export(source: SourceModel, options: OnnxOptions) -> None:
    """Write the folder of a model.

    Raises:
        UserError: If a graph differs too much from torch, or the output cannot be written.
    """
    reference = Reference(source)
    token_type_ids = options.format.token_type_ids
    with folder.new_export(source, options.model.output, "onnx") as output:
        output.settings["opset"] = OPSET
        output.settings["token_type_ids"] = token_type_ids
        # A precision that was named twice is exported once.
        names = list(dict.fromkeys(options.format.precisions))
        for name in tqdm(names, desc="graphs", unit="graph", disable=None):
            precision = PRECISIONS[name]
            path = output.folder / precision.file
            graph = _build_graph(source, name)
            if token_type_ids:
                _add_token_types(graph)
            has_external_data = _write(graph, path)

            size = sum(file.stat().st_size for file in output.folder.glob(f"{path.name}*"))
            summary = f"{path.name:<21} {size / 1e6:8.1f} MB"
            # A graph that differs too much raises an error, and the folder is discarded.
            run = _load_runner(path)
            file = precision.verify(name, "ONNX Runtime", reference, run, summary)
            output.files[path.stem] = replace(file, external_data=has_external_data)


def _build_graph(source: SourceModel, precision: str) -> "onnx.ModelProto":
    """Return the graph of a model in a precision."""
    from .onnx_quantize import int8, q4

    if precision == "fp16":
        return _trace(Graph(source, torch.float16))
    # The weights of int8 and q4 are quantized in the graph, which is traced in float32.
    if precision == "int8":
        return int8(_trace(Graph(_smooth(source))))
    graph = _trace(Graph(source))
    return q4(graph) if precision == "q4" else graph


def _smooth(source: SourceModel) -> SourceModel:
    """Return a copy of the model with the same outputs, in which outliers are smoothed.

    Outliers would determine the scale of a token, and other values would lose their precision.
    """
    # The other precisions are traced from the unchanged model.
    model = copy.deepcopy(source.model)
    for encoder in encoders_of(model):
        smooth(encoder)
    return replace(source, model=model)


def _trace(graph: Graph) -> "onnx.ModelProto":
    """Return the ONNX graph of a model.

    Raises:
        UserError: If the exporter fails.
    """
    # The exporter based on torch.export keeps the sequence length dynamic.
    inputs, axes = example_inputs()

    try:
        with quiet():
            program = torch.onnx.export(
                graph.eval(),
                (),
                kwargs=inputs,
                dynamic_shapes=axes,
                input_names=list(INPUTS),
                output_names=graph.outputs,
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        assert program is not None
        return program.model_proto
    except Exception as error:  # The exporter raises exceptions of many classes.
        raise UserError(f"torch cannot trace this model for ONNX: {one_line(error)}.") from error


def _add_token_types(graph: "onnx.ModelProto") -> None:
    """Add BERT's third input, which no node reads.

    It is added after the trace, because exporters remove inputs that are not read.
    """
    token_type_ids = graph.graph.input.add()
    token_type_ids.CopyFrom(graph.graph.input[0])
    token_type_ids.name = "token_type_ids"


def _write(graph: "onnx.ModelProto", path: Path) -> bool:
    """Write a graph.

    Returns:
        Whether its weights are in a separate file, `<path>_data`.
    """
    import onnx

    weight_bytes = sum(len(tensor.raw_data) for tensor in graph.graph.initializer)
    is_large = weight_bytes > MAX_WEIGHT_BYTES
    if is_large:
        onnx.save_model(
            graph,
            path,
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location=f"{path.name}_data",
        )
    else:
        onnx.save_model(graph, path)
    return is_large


def _load_runner(path: Path) -> Runner:
    """Return a function that runs a graph in ONNX Runtime. A third input is filled with zeros.

    Raises:
        UserError: If ONNX Runtime cannot load the graph.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Log errors only.
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise UserError(
            f"ONNX Runtime cannot load {path.name}, so the export was discarded: {one_line(error)}."
        ) from error
    names = [output.name for output in session.get_outputs()]
    unused_inputs = {graph_input.name for graph_input in session.get_inputs()} - set(INPUTS)

    def run(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        # ONNX Runtime requires all inputs, also those that no node reads.
        feed = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
        for name in unused_inputs:
            feed[name] = torch.zeros_like(input_ids).numpy()
        return dict(zip(names, session.run(names, feed)))

    return run
