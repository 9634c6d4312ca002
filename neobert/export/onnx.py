"""ONNX graphs of a NeoBERT with a dynamic batch and length, in a folder as transformers.js lays it
out.

OUTPUT is complete for transformers.js, text-embeddings-inference, fastembed and the ONNX backend of
sentence-transformers. Every graph is run by ONNX Runtime and compared with torch before the folder
is kept.
"""

import copy
from dataclasses import replace

import torch
from tqdm.auto import tqdm

from ..common.errors import UserError, one_line
from ..quantization.outliers import encoders_of, smooth
from . import folder
from .check import Precision, Reference
from .graph import INPUTS, Graph, example, quiet
from .options import OnnxOptions
from .source import Source


check_output = folder.check_output

# The first one that has all operations of the graph; ONNX Runtime, its builds for browsers, and
# text-embeddings-inference read it.
OPSET = 18
# A file of protobuf ends at 2 GiB: beyond this the weights lie in a file of their own.
LARGEST_FILE = 2**31 - 2**24


PRECISIONS = {
    "fp32": Precision("model.onnx", 0.99999, 0.99999),
    "fp16": Precision("model_fp16.onnx", 0.995, 0.999),
    "int8": Precision("model_quantized.onnx", 0.9, 0.99),
    "q4": Precision("model_q4.onnx", 0.3, 0.8),
}


def export(source: Source, options: OnnxOptions) -> None:
    """Write the folder of a model.

    Raises:
        UserError: If a graph differs too much from torch, or the output cannot be written.
    """
    reference = Reference(source)
    with folder.new_export(source, options.model.output, "onnx") as (place, report):
        report |= {"opset": OPSET, "token_type_ids": options.format.token_type_ids}
        names = list(dict.fromkeys(options.format.precisions))
        for name in tqdm(names, desc="graphs", unit="graph", disable=None):
            precision = PRECISIONS[name]
            path = place / precision.file
            graph = _graph(source, name)
            if options.format.token_type_ids:
                _add_token_types(graph)
            external = _write(graph, path)
            size = sum(file.stat().st_size for file in place.glob(f"{path.name}*"))
            written = f"{path.name:<21} {size / 1e6:8.1f} MB"
            entry = precision.prove(f"{name} in ONNX Runtime", reference, _runner(path), written)
            report["files"][path.stem] = {**entry, "external_data": external}


def _graph(source, precision):
    """onnx.ModelProto of a model in a precision."""
    from .onnx_quantize import int8, q4

    if precision == "fp16":
        return _trace(Graph(source, torch.float16))
    if precision == "int8":
        return int8(_trace(Graph(_smoothed(source))))
    graph = _trace(Graph(source))
    return q4(graph) if precision == "q4" else graph


def _smoothed(source):
    """A Source of the same outputs, without outliers that a scale a token would be made for."""
    model = copy.deepcopy(source.model)
    for encoder in encoders_of(model):
        smooth(encoder)
    return replace(source, model=model)


def _trace(graph):
    """onnx.ModelProto of a Graph."""
    inputs, axes = example()
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
        return program.model_proto
    except Exception as error:  # the exporter's own, of many kinds
        raise UserError(f"torch cannot trace this model for ONNX ({one_line(error)})") from error


def _add_token_types(graph):
    """BERT's third input, of which no node makes use: the outputs are the same bits. It is added
    after the trace, since exporters drop inputs that are not read."""
    added = graph.graph.input.add()
    added.CopyFrom(graph.graph.input[0])
    added.name = "token_type_ids"


def _write(graph, path):
    """Writes a graph; returns whether its weights are in a file of their own, `<path>_data`."""
    import onnx

    external = sum(len(tensor.raw_data) for tensor in graph.graph.initializer) > LARGEST_FILE
    options = {"all_tensors_to_one_file": True, "location": f"{path.name}_data"}
    onnx.save_model(graph, path, save_as_external_data=external, **(options if external else {}))
    return external


def _runner(path):
    """Function of (input_ids, attention_mask) -> {name: array}; a third input gets zeros."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise UserError(
            f"ONNX Runtime does not load {path.name} ({one_line(error)}), so it was not kept"
        ) from error
    names = [output.name for output in session.get_outputs()]
    third = {input.name for input in session.get_inputs()} - set(INPUTS)

    def run(ids, mask):
        rows = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        rows |= {name: torch.zeros_like(ids).numpy() for name in third}
        return dict(zip(names, session.run(names, rows)))

    return run
