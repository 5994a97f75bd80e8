"""Makes small models that repeat one op, so that a run spends nearly all its time in the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxpar.graph.collectives import DOMAIN, KINDS

ROWS, WIDTH = 256, 768
"""The shape of the operand of matrix products: tokens, and BERT's width."""
WIDE, NARROW, PIXELS = 256, 64, 28
"""Outer and inner channels of a ResNet bottleneck, and the height and width of its images."""
FEW, APART = 16, 16
"""The number of rows for which a product reads about as long as it computes, and the number of
weights in a model whose products each read a weight from memory."""
PICKED, LENGTH = 1 << 16, 64
"""The number of elements that a Gather reads, and the number of elements in a row."""
BETWEEN = (64, 256)
"""The shape of the operand of the matrix product before each collective."""
RATED: dict[str, tuple[tuple[int, int], ...]] = {
    "Softmax": ((4096, 16), (512, 128)),
    "LayerNormalization": ((1024, 32), (64, 512)),
    "Erf": ((512, 128),),
    "Transpose": ((8192, 4), (8192, 32)),
    "MatMul": ((512, 8), (128, 32)),
}
"""The (rows, length of a row) of the models of `rated`, by kind of op. Short and long rows tell the
cost of a row from the cost of an element."""
_OF_TWO = ("Mul", "Add", "Sub", "Div", "Max")
_OF_ONE = ("Neg", "Sqrt", "Relu", "Identity", "Exp", "Transpose")
"""Small ops of two operands and of one."""
PLANE = 128
"""The number of rows in each of the planes that a Transpose exchanges."""
MASKED = -1e4
"""The addend of a mask for scores that a softmax must leave out."""
COLUMNS = 64
"""The number of columns in the tensors of collectives."""
_TOKEN = helper.make_tensor_value_info("token0", TensorProto.BOOL, [0])


def collective(kind: str, size: int, group: Sequence[int], repeats: int) -> onnx.ModelProto:
    """Returns a model of `repeats` collectives in a chain; the operand or the result has `size`
    bytes, whichever is larger.

    A matrix product comes before each collective. As in real models, ranks then arrive at different
    times, and wait. All collectives read the same X. No node reads their results, but onnxruntime
    runs them all.
    """
    ranks = len(group)
    part = max(size // (4 * COLUMNS * ranks), 1)
    joins, cuts = KINDS[kind].joins, KINDS[kind].cuts
    fed = part if joins and not cuts else part * ranks
    attributes: dict[str, Any] = {}
    if cuts:
        attributes |= {cuts.axis: 0, cuts.sizes: [part] * ranks}
    if joins:
        joined = (1, COLUMNS) if cuts else (0, part)
        attributes |= {joins.axis: joined[0], joins.sizes: [joined[1]] * ranks}
    if KINDS[kind].awaits == "root":
        attributes["root"] = 0
    if KINDS[kind].awaits == "source":
        attributes["sources"] = [(i + 1) % ranks for i in range(ranks)]
    nodes = []
    for i in range(repeats):
        nodes += [
            helper.make_node("MatMul", [f"Z{i}", "W"], [f"V{i}"]),
            helper.make_node("Gate", [f"V{i}", f"token{i}"], [f"Z{i + 1}", f"t{i}"], domain=DOMAIN),
            helper.make_node(
                kind,
                ["X", f"t{i}"],
                [f"Y{i}", f"token{i + 1}"],
                domain=DOMAIN,
                tag=i + 1,
                group=list(group),
                **attributes,
            ),
        ]
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, [fed, COLUMNS])
    z = helper.make_tensor_value_info("Z0", TensorProto.FLOAT, BETWEEN)
    last = helper.make_tensor_value_info(f"token{repeats}", TensorProto.BOOL, [0])
    return _model(nodes, [x, z, _TOKEN], [last], [_square(BETWEEN[1])])


def work_between(repeats: int) -> onnx.ModelProto:
    """Returns a chain of the matrix products that `collective` puts before each collective."""
    return _chain([("MatMul", ["W"], {})] * repeats, BETWEEN, [_square(BETWEEN[1])])


def _square(width: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros((width, width), np.float32), "W")


def products(rows: int, repeats: int, apart: bool = False) -> onnx.ModelProto:
    """Returns a chain of products of a [`rows`, WIDTH] matrix with a square weight. If `apart`,
    each product has another weight, with other values, so that the cache does not hold it."""
    random = np.random.default_rng(0)
    scale = np.float32(WIDTH**-0.5)
    weights = [
        numpy_helper.from_array(random.standard_normal((WIDTH, WIDTH), np.float32) * scale, f"W{i}")
        for i in range(repeats if apart else 1)
    ]
    links: list[tuple[str, list[str], dict[str, Any]]]
    links = [("MatMul", [weights[i % len(weights)].name], {}) for i in range(repeats)]
    return _chain(links, [rows, WIDTH], weights)


def convolutions(repeats: int) -> onnx.ModelProto:
    """Returns a chain of ResNet bottlenecks on an image of PIXELS x PIXELS: a 1x1 convolution to
    NARROW channels, a 3x3 convolution, and a 1x1 convolution back to WIDE channels."""
    kernels = ((NARROW, WIDE, 1), (NARROW, NARROW, 3), (WIDE, NARROW, 1))
    weights = [
        numpy_helper.from_array(np.zeros((out, into, size, size), np.float32), f"W{i}")
        for i, (out, into, size) in enumerate(kernels)
    ]
    pads = {f"W{i}": [size // 2] * 4 for i, (_, _, size) in enumerate(kernels)}
    links = [("Conv", [weight], {"pads": pads[weight]}) for weight in pads] * repeats
    return _chain(links, [1, WIDE, PIXELS, PIXELS], weights)


def narrow_convolutions(channels: int, repeats: int) -> onnx.ModelProto:
    """Returns a model of 3x3 convolutions from NARROW channels of an image of PIXELS x PIXELS to
    fewer `channels`. The model returns a maximum of each result."""
    weights = [
        numpy_helper.from_array(np.full((channels, NARROW, 3, 3), i, np.float32), f"W{i}")
        for i in range(repeats)
    ]
    nodes = []
    for i in range(repeats):
        nodes += [
            helper.make_node("Conv", ["X", f"W{i}"], [f"Y{i}"], pads=[1] * 4),
            helper.make_node("GlobalMaxPool", [f"Y{i}"], [f"Z{i}"]),
            helper.make_node("ReduceMax", [f"Z{i}"], [f"M{i}"], keepdims=0),
        ]
    nodes.append(helper.make_node("Max", [f"M{i}" for i in range(repeats)], ["Y"]))
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, [1, NARROW, PIXELS, PIXELS])
    y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, [])
    return _model(nodes, [x], [y], weights)


def copies(size: int, repeats: int) -> onnx.ModelProto:
    """Returns a chain of elementwise ops that read and write a tensor of `size` bytes."""
    return _chain([("Neg", [], {})] * repeats, [size // 4])


def rows(repeats: int) -> onnx.ModelProto:
    """Returns a chain of Gathers that read PICKED elements one by one."""
    indices = numpy_helper.from_array(np.arange(LENGTH), "I")
    return _chain([("Gather", ["I"], {"axis": 1})] * repeats, [PICKED // LENGTH, LENGTH], [indices])


def rated(kind: str, rows: int, length: int, repeats: int) -> onnx.ModelProto:
    """Returns a model of ops of a kind in RATED on `rows` rows of `length` elements: softmaxes with
    half of each row masked, norms, exchanges of the dimensions before the rows, or products of
    `rows` square matrices of `length` rows."""
    if kind == "Softmax":
        return _softmaxes(rows, length, repeats)
    if kind == "LayerNormalization":
        scale = numpy_helper.from_array(np.ones(length, np.float32), "W")
        return _chain([(kind, ["W", "W"], {})] * repeats, [rows, length], [scale])
    if kind == "Transpose":
        shape = [rows // PLANE, PLANE // 8, 8, length]
        return _chain([(kind, [], {"perm": [0, 2, 1, 3]})] * repeats, shape)
    if kind == "MatMul":
        return _chain([(kind, ["X0"], {})] * repeats, [rows, length, length])
    return _chain([(kind, [], {})] * repeats, [rows, length])


def _softmaxes(rows: int, length: int, repeats: int) -> onnx.ModelProto:
    """A model of softmaxes of one masked operand. A node reads only the last result, but
    onnxruntime runs all softmaxes."""
    mask = np.zeros(length, np.float32)
    mask[length // 2 :] = MASKED
    nodes = [helper.make_node("Add", ["X", "mask"], ["M"])]
    nodes += [helper.make_node("Softmax", ["M"], [f"S{i}"]) for i in range(repeats)]
    nodes.append(helper.make_node("ReduceMax", [f"S{repeats - 1}"], ["Y"], keepdims=0))
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, [rows, length])
    y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, [])
    return _model(nodes, [x], [y], [numpy_helper.from_array(mask, "mask")])


def negated() -> onnx.ModelProto:
    """Returns a model that negates each row of its input."""
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", "M"]) for n in "XY"]
    return _model([helper.make_node("Neg", ["X"], ["Y"])], ports[:1], ports[1:])


def tiny_ops(repeats: int) -> onnx.ModelProto:
    """Returns a chain of ops of several kinds on a single element. Every other op has a weight of
    its own, as in the updates of parameters."""
    weights = [
        numpy_helper.from_array(np.ones(1, np.float32), f"W{i}") for i in range(0, repeats, 2)
    ]
    links: list[tuple[str, list[str], dict[str, Any]]] = []
    for i in range(repeats):
        kinds = _OF_ONE if i % 2 else _OF_TWO
        links.append((kinds[i // 2 % len(kinds)], [] if i % 2 else [f"W{i}"], {}))
    return _chain(links, [1], weights)


def _chain(
    links: Sequence[tuple[str, list[str], dict[str, Any]]],
    shape: Sequence[int],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """Returns a model in which each op reads the result of the op before. `links` has each op with
    its other operands and its attributes. The model returns the maximum of the last result, a
    single element, because a run copies its outputs."""
    nodes = [
        helper.make_node(op, [f"X{i}", *operands], [f"X{i + 1}"], **attributes)
        for i, (op, operands, attributes) in enumerate(links)
    ]
    nodes.append(helper.make_node("ReduceMax", [f"X{len(links)}"], ["Y"], keepdims=0))
    x = helper.make_tensor_value_info("X0", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, [])
    return _model(nodes, [x], [y], weights)


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "calibration", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
