"""Smaller weights for an ONNX graph: int8 with integer products, and blocks of 4 bits.

int8: the weights of a linear layer have one scale for each output, its inputs one scale for each
token (in place of one for a complete batch, as `onnxruntime.quantization.quantize_dynamic` has it).
A token with large values then takes no precision from the others, and a text's vector does not
depend on the texts beside it. Weights use 7 of the 8 bits: sums of two products stay within 16
bits, which processors without VNNI instructions would cut off.
"""

import contextlib
import logging

import numpy as np


# Weights are -63 to 63, inputs 1 to 255 around 128: 2 * 255 * 63 < 2^15.
_WEIGHT_STEPS, _INPUT_STEPS, _INPUT_ZERO = 63, 127, 128
# Matrices with fewer outputs stay in float: the last layer of a classifier, which is small, and
# reads a few vectors.
_LEAST_OUTPUTS = 64
_BLOCK = 32
_SMALLEST = 1e-12


def int8(graph):
    """A copy of an ONNX model with int8 linear layers and embeddings."""
    return _rewritten(graph, linear=_int8_linear)


def q4(graph):
    """A copy of an ONNX model with linear layers in blocks of 32 weights of 4 bits, and int8
    embeddings."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    copied = _rewritten(graph, linear=None)
    excluded = [
        node.name for node, weight in _linear_layers(copied) if weight.shape[1] < _LEAST_OUTPUTS
    ]
    with _quiet_logging():
        quantiser = MatMulNBitsQuantizer(
            copied,
            bits=4,
            block_size=_BLOCK,
            is_symmetric=True,
            accuracy_level=4,
            nodes_to_exclude=excluded,
            op_types_to_quantize=("MatMul",),
        )
        quantiser.process()
    return quantiser.model.model


@contextlib.contextmanager
def _quiet_logging():
    """ONNX Runtime tells of every matrix."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _arrays(graph):
    """{name: 2-D float32 array} of the graph's constant matrices."""
    from onnx import TensorProto, numpy_helper

    found = (
        tensor
        for tensor in graph.graph.initializer
        if len(tensor.dims) == 2 and tensor.data_type == TensorProto.FLOAT
    )
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in found}


def _linear_layers(graph):
    """(node, (K, N) array) of every product with a constant matrix."""
    arrays = _arrays(graph)
    return [
        (node, arrays[node.input[1]])
        for node in graph.graph.node
        if node.op_type == "MatMul" and node.input[1] in arrays
    ]


def _rewritten(graph, linear):
    """A copy with int8 embeddings, and `linear(x, weight, output)`, a list of (nodes, tensors), in
    the place of every linear layer."""
    from onnx import helper

    copied = type(graph)()
    copied.CopyFrom(graph)
    arrays = _arrays(copied)
    nodes, tensors = [], {}
    for node in copied.graph.node:
        made = None
        if node.op_type == "Gather" and node.input[0] in arrays:
            made = _int8_rows(node, arrays[node.input[0]])
        elif (
            linear
            and node.op_type == "MatMul"
            and node.input[1] in arrays
            and arrays[node.input[1]].shape[1] >= _LEAST_OUTPUTS
        ):
            made = linear(node, arrays[node.input[1]])
        new_nodes, new_tensors = made or ([node], {})
        nodes += new_nodes
        tensors |= new_tensors
    kept = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del copied.graph.node[:]
    copied.graph.node.extend(kept)
    copied.graph.initializer.extend(_tensor(name, value) for name, value in tensors.items())
    used = {name for node in copied.graph.node for name in node.input}
    initializers = [tensor for tensor in copied.graph.initializer if tensor.name in used]
    values = [
        value
        for value in copied.graph.value_info
        if value.name in {name for node in kept for name in (*node.input, *node.output)}
    ]
    for field, left in (
        (copied.graph.initializer, initializers),
        (copied.graph.value_info, values),
    ):
        left = [type(item).FromString(item.SerializeToString()) for item in left]
        del field[:]
        field.extend(left)
    if not any(opset.domain == "com.microsoft" for opset in copied.opset_import):
        copied.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return copied


def _tensor(name, value):
    from onnx import numpy_helper

    return numpy_helper.from_array(value, name)


def _steps(matrix, axis, steps):
    """(int8 matrix, float32 scales along the other axis)."""
    scales = np.maximum(np.abs(matrix).max(axis), _SMALLEST) / steps
    rounded = np.rint(matrix / np.expand_dims(scales, axis))
    return rounded.astype(np.int8), scales.astype(np.float32)


def _int8_rows(node, table):
    """Rows of an embedding: one scale a row."""
    from onnx import helper

    name, ids, output = node.name, node.input[1], node.output[0]
    rows, scales = _steps(table, 1, 127)
    nodes = [
        helper.make_node("Gather", [f"{name}_rows", ids], [f"{name}_row"], name=f"{name}_row"),
        helper.make_node("Cast", [f"{name}_row"], [f"{name}_float"], name=f"{name}_float", to=1),
        helper.make_node(
            "Gather", [f"{name}_scales", ids], [f"{name}_scale"], name=f"{name}_scale"
        ),
        helper.make_node(
            "Mul", [f"{name}_float", f"{name}_scale"], [output], name=f"{name}_scaled"
        ),
    ]
    return nodes, {f"{name}_rows": rows, f"{name}_scales": scales[:, None]}


def _int8_linear(node, weight):
    """x @ weight: x / s in steps of 1 / 127 with s the largest value of the token, the product in
    integers, times s and the weights' scales."""
    from onnx import helper

    name, x, output = node.name, node.input[0], node.output[0]
    steps, scales = _steps(weight, 0, _WEIGHT_STEPS)
    shared = {
        "int8_last_axis": np.array([-1], np.int64),
        "int8_smallest": np.float32(_SMALLEST),
        "int8_step": np.float32(1 / _INPUT_STEPS),
        "int8_zero": np.uint8(_INPUT_ZERO),
    }

    def make(kind, inputs, result, **more):
        return helper.make_node(kind, inputs, [result], name=result, **more)

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
        helper.make_node("Mul", [f"{name}_product", f"{name}_token"], [output], name=name),
    ]
    return nodes, {**shared, f"{name}_weight": steps, f"{name}_scales": scales}
