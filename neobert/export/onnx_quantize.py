"""Smaller weights for ONNX graphs: int8 with integer products, and blocks of 4-bit values.

In int8, the weights of a linear layer have one scale per output channel, and its inputs one scale
per token. (`onnxruntime.quantization.quantize_dynamic` has one scale per batch.) A token with large
values then does not reduce the precision of other tokens, and the embedding of a text does not
depend on the other texts of the batch. Pairs of weights are limited, so sums of two products
stay within 16 bits, which processors without VNNI instructions would saturate.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..quantization.int8_product import MAX_WEIGHT, ZERO_POINT, quantize_weight
from .graph import quiet


if TYPE_CHECKING:
    import onnx


# The inputs are 1 to 255, around `ZERO_POINT`.
_INPUT_STEPS = 127
# Matrices with fewer outputs stay in float32: the last layer of a classifier is small, and reads a
# single vector per text.
_MIN_OUTPUTS = 64
_BLOCK = 32
# Lower bound of the largest absolute value of a token, which avoids a division by zero.
_MIN_ABSMAX = 1e-12


@dataclass(frozen=True)
class _Replacement:
    """Nodes that replace a node, and the constants that they read, by name."""

    nodes: list["onnx.NodeProto"]
    tensors: dict[str, np.ndarray]


def int8(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Quantize linear layers and embeddings to int8, in place, and return the model."""
    return _rewrite(model, _int8_linear)


def q4(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Quantize linear layers to blocks of 32 4-bit values, and embeddings to int8.

    The model is changed in place. Use the returned one.
    """
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    # `accuracy_level` 4 lets kernels quantize the inputs to int8; the graph has 4-bit weights only.
    _rewrite(model, None)
    excluded = [
        node.name for node, weight in _linear_layers(model) if weight.shape[1] < _MIN_OUTPUTS
    ]
    # ONNX Runtime logs a line for every matrix.
    with quiet():
        quantizer = MatMulNBitsQuantizer(
            model,
            bits=4,
            block_size=_BLOCK,
            is_symmetric=True,
            accuracy_level=4,
            nodes_to_exclude=excluded,
            op_types_to_quantize=("MatMul",),
        )
        quantizer.process()
    return quantizer.model.model


def _matrices(model: "onnx.ModelProto") -> dict[str, np.ndarray]:
    """Return the constant float32 matrices of a graph by name."""
    from onnx import TensorProto, numpy_helper

    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and tensor.data_type == TensorProto.FLOAT
    }


def _linear_layers(model: "onnx.ModelProto") -> list[tuple["onnx.NodeProto", np.ndarray]]:
    """Return the products with a constant matrix: node, and matrix of shape (inputs, outputs)."""
    matrices = _matrices(model)
    # Products of two activations, as in attention, have no constant input.
    return [
        (node, matrices[node.input[1]])
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in matrices
    ]


def _rewrite(
    model: "onnx.ModelProto",
    linear: Callable[["onnx.NodeProto", np.ndarray], _Replacement] | None,
) -> "onnx.ModelProto":
    """Replace embeddings by int8 embeddings, and linear layers by the result of `linear`."""
    from onnx import helper, numpy_helper

    graph = model.graph
    matrices = _matrices(model)
    linear_layers = {node.name: weight for node, weight in _linear_layers(model)}
    nodes: list[onnx.NodeProto] = []
    tensors: dict[str, np.ndarray] = {}
    for node in graph.node:
        # Nodes of other operations stay as they are. A Gather from a matrix is an embedding.
        replacement = _Replacement([node], {})
        weight = linear_layers.get(node.name)
        if node.op_type == "Gather" and node.input[0] in matrices:
            replacement = _int8_rows(node, matrices[node.input[0]])
        elif linear and weight is not None and weight.shape[1] >= _MIN_OUTPUTS:
            replacement = linear(node, weight)
        nodes += replacement.nodes
        tensors |= replacement.tensors
    _replace(graph.node, nodes)

    # Remove the constants and types of the nodes that were replaced.
    inputs: set[str] = set()
    names: set[str] = set()
    for node in graph.node:
        inputs.update(node.input)
        names.update(node.input, node.output)
    constants = [*graph.initializer]
    constants += [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    _replace(graph.initializer, [tensor for tensor in constants if tensor.name in inputs])
    _replace(graph.value_info, [value for value in graph.value_info if value.name in names])

    # The domain of MatMulIntegerToFloat and of the 4-bit products.
    if not any(opset.domain == "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def _replace(field: Any, items: Iterable[Any]) -> None:
    """Replace the items of a repeated field of protobuf, which may be among the new ones."""
    # `del` frees the items of protobuf, so new items must be copies.
    copies = [copy.deepcopy(item) for item in items]
    del field[:]
    field.extend(copies)


def _int8_rows(node: "onnx.NodeProto", table: np.ndarray) -> _Replacement:
    """Return an int8 embedding with one scale per row."""
    from onnx import helper

    name = node.name
    ids = node.input[1]
    # Only the rows of the input are converted to float, not the complete table.
    integers, largest = quantize_weight(torch.tensor(table), limit_pairs=False)
    nodes = [
        helper.make_node("Gather", [f"{name}_rows", ids], [f"{name}_row"], name=f"{name}_row"),
        # Type 1 is FLOAT of TensorProto.
        helper.make_node("Cast", [f"{name}_row"], [f"{name}_float"], name=f"{name}_float", to=1),
        helper.make_node(
            "Gather", [f"{name}_scales", ids], [f"{name}_scale"], name=f"{name}_scale"
        ),
        helper.make_node(
            "Mul", [f"{name}_float", f"{name}_scale"], [node.output[0]], name=f"{name}_scaled"
        ),
    ]
    scales = (largest / MAX_WEIGHT)[:, None]
    return _Replacement(nodes, {f"{name}_rows": integers.numpy(), f"{name}_scales": scales.numpy()})


def _int8_linear(node: "onnx.NodeProto", weight: np.ndarray) -> _Replacement:
    """Return an int8 linear layer.

    With s = max |x| of a token, x / s is quantized in steps of 1 / 127. The integer product is
    multiplied by s and by the scales of the weights.
    """
    from onnx import helper

    name = node.name
    x = node.input[0]
    # The columns of an ONNX weight are the outputs, so each output has its own scale.
    integers, largest = quantize_weight(torch.tensor(weight.T), limit_pairs=True)
    tensors: dict[str, np.ndarray] = {
        "int8_last_axis": np.array([-1], np.int64),
        "int8_smallest": np.array(_MIN_ABSMAX, np.float32),
        "int8_step": np.array(1 / _INPUT_STEPS, np.float32),
        "int8_zero": np.array(ZERO_POINT, np.uint8),
        f"{name}_weight": integers.T.contiguous().numpy(),
        f"{name}_scales": (largest / MAX_WEIGHT).numpy(),
    }

    def make(op_type: str, inputs: list[str], result: str, **attributes: Any) -> "onnx.NodeProto":
        return helper.make_node(op_type, inputs, [result], name=result, **attributes)

    # ReduceMax over the last axis gives the scale of each token, of shape (B, L, 1). After the
    # division all values are between -1 and 1.
    nodes = [
        make("Abs", [x], f"{name}_abs"),
        make("ReduceMax", [f"{name}_abs", "int8_last_axis"], f"{name}_largest", keepdims=1),
        make("Max", [f"{name}_largest", "int8_smallest"], f"{name}_token"),
        make("Div", [x, f"{name}_token"], f"{name}_divided"),
        make("QuantizeLinear", [f"{name}_divided", "int8_step", "int8_zero"], f"{name}_steps"),
        make(
            "MatMulIntegerToFloat",
            [f"{name}_steps", f"{name}_weight", "int8_step", f"{name}_scales", "int8_zero"],
            f"{name}_product",
            domain="com.microsoft",
        ),
        helper.make_node("Mul", [f"{name}_product", f"{name}_token"], [node.output[0]], name=name),
    ]
    return _Replacement(nodes, tensors)
