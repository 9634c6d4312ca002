"""Smaller weights for an ONNX graph: int8 with integer products, and blocks of 4 bits.

int8: the weights of a linear layer have one scale for each output, its inputs one scale for each
token (in place of one for a complete batch, as `onnxruntime.quantization.quantize_dynamic` has it).
A token with large values then takes no precision from the others, and a text's vector does not
depend on the texts beside it. Weights use 7 of the 8 bits: sums of two products stay within 16
bits, which processors without VNNI instructions would cut off.
"""

import copy

import numpy as np

from .graph import quiet


# Weights are -63 to 63, inputs 1 to 255 around 128: 2 * 255 * 63 < 2^15.
_WEIGHT_STEPS, _INPUT_STEPS, _INPUT_ZERO = 63, 127, 128
# Matrices with fewer outputs stay in float: the last layer of a classifier, which is small, and
# reads a few vectors.
_LEAST_OUTPUTS = 64
_BLOCK = 32
_SMALLEST = 1e-12


def int8(model):
    """An ONNX model, changed in place, with int8 linear layers and embeddings."""
    return _rewritten(model, linear=_int8_linear)


def q4(model):
    """An ONNX model, changed in place, with linear layers in blocks of 32 weights of 4 bits, and
    int8 embeddings."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    _rewritten(model, linear=None)
    excluded = [
        node.name for node, weight in _linear_layers(model) if weight.shape[1] < _LEAST_OUTPUTS
    ]
    with quiet():  # ONNX Runtime tells of every matrix
        quantiser = MatMulNBitsQuantizer(
            model,
            bits=4,
            block_size=_BLOCK,
            is_symmetric=True,
            accuracy_level=4,
            nodes_to_exclude=excluded,
            op_types_to_quantize=("MatMul",),
        )
        quantiser.process()
    return quantiser.model.model


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


def _rewritten(model, linear):
    """The model with int8 embeddings, and `linear(node, weight)`, (nodes, tensors), in the place of
    every linear layer."""
    from onnx import helper, numpy_helper

    graph, arrays = model.graph, _arrays(model)
    linear_layers = {node.name: weight for node, weight in _linear_layers(model)}
    nodes, tensors = [], {}
    for node in graph.node:
        new_nodes, new_tensors = [node], {}
        weight = linear_layers.get(node.name)
        if node.op_type == "Gather" and node.input[0] in arrays:
            new_nodes, new_tensors = _int8_rows(node, arrays[node.input[0]])
        elif linear and weight is not None and weight.shape[1] >= _LEAST_OUTPUTS:
            new_nodes, new_tensors = linear(node, weight)
        nodes += new_nodes
        tensors |= new_tensors
    _replace(graph.node, nodes)
    used = {name for node in graph.node for name in node.input}
    named = used | {name for node in graph.node for name in node.output}
    stored = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    initializers = [tensor for tensor in (*graph.initializer, *stored) if tensor.name in used]
    _replace(graph.initializer, initializers)
    _replace(graph.value_info, [value for value in graph.value_info if value.name in named])
    if not any(opset.domain == "com.microsoft" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def _replace(field, items):
    """Gives a repeated field of protobuf other items, which may be some of its own."""
    copies = [copy.deepcopy(item) for item in items]
    del field[:]
    field.extend(copies)


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
