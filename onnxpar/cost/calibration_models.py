"""Builds the small models that calibration times; each repeats one op, so that a run spends nearly
all its time in that op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxpar.graph.collectives import DOMAIN, KINDS

ROWS, WIDTH = 256, 768
"""Shape of the left operand of measured matrix products: tokens, and BERT's width."""
WIDE, NARROW, PIXELS = 256, 64, 28
"""Outer and inner channels of a measured ResNet bottleneck, and height and width of its image."""
FEW, APART = 16, 16
"""FEW: the number of rows for which a product takes about as long to read its weight as to compute.
APART: the number of different weights in a model whose products read their weights from memory, not
cache."""
PICKED, LENGTH = 1 << 16, 64
"""The number of elements that a measured Gather reads in all, and in each row."""
BETWEEN = (64, 256)
"""Shape of the left operand of the matrix product that runs before each collective."""
RATED: dict[str, tuple[tuple[int, int], ...]] = {
    "Softmax": ((4096, 16), (512, 128)),
    "LayerNormalization": ((1024, 32), (64, 512)),
    "Erf": ((512, 128),),
    "Transpose": ((8192, 4), (8192, 32)),
    "MatMul": ((512, 8), (128, 32)),
}
"""For the ops that `rated` builds: (rows, length of a row) of each model, by kind of op. Two
shapes, short and long rows, tell the cost per row from the cost per element."""
_OF_TWO = ("Mul", "Add", "Sub", "Div", "Max")
_OF_ONE = ("Neg", "Sqrt", "Relu", "Identity", "Exp", "Transpose")
"""Kinds of small ops with two operands, and with one."""
PLANE = 128
"""Rows per plane in the Transpose that `rated` builds."""
MASKED = -1e4
"""Added to scores that a softmax must leave out."""
COLUMNS = 64
"""Columns of the tensors on which collectives are measured."""
_TOKEN = helper.make_tensor_value_info("token0", TensorProto.BOOL, [0])


def collective(kind: str, size: int, group: Sequence[int], repeats: int) -> onnx.ModelProto:
    """Returns a model that runs `repeats` collectives one after the other, each with an operand or
    result (the larger of the two) of `size` bytes.

    A matrix product comes before each collective, so that ranks arrive at different times and wait,
    as in real models. All collectives read the same X; no node reads their results, but onnxruntime
    runs them all.

    group  the numbers of the ranks that take part
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
    """Returns a model with only the matrix products that `collective` puts before its collectives,
    whose time is to be subtracted."""
    return _chain([("MatMul", ["W"], {})] * repeats, BETWEEN, [_square(BETWEEN[1])])


def _square(width: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros((width, width), np.float32), "W")


def products(rows: int, repeats: int, apart: bool = False) -> onnx.ModelProto:
    """Returns a chain of `repeats` products of a [`rows`, WIDTH] matrix with square weights. With
    `apart`, products alternate between APART weights, so that each is read from memory and not from
    the cache."""
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
    """Returns a model of `repeats` 3x3 convolutions from NARROW channels of a PIXELS x PIXELS image
    to few `channels`. Its output is a maximum of the results, so that none is optimized away."""
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
    """Returns a chain of `repeats` elementwise ops on a tensor of `size` bytes: memory traffic
    alone."""
    return _chain([("Neg", [], {})] * repeats, [size // 4])


def rows(repeats: int) -> onnx.ModelProto:
    """Returns a chain of `repeats` Gathers, each of which reads PICKED elements singly."""
    indices = numpy_helper.from_array(np.arange(LENGTH), "I")
    return _chain([("Gather", ["I"], {"axis": 1})] * repeats, [PICKED // LENGTH, LENGTH], [indices])


def rated(kind: str, rows: int, length: int, repeats: int) -> onnx.ModelProto:
    """Returns a model that repeats an op of a kind in RATED on `rows` rows of `length` elements.
    Softmax: half of each row is masked. Transpose: exchanges dimensions before the rows. MatMul:
    batched, `rows` square matrices of `length` rows."""
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
    """Returns a model of softmaxes that all read one masked operand. Only the last result is used,
    but onnxruntime runs them all."""
    mask = np.zeros(length, np.float32)
    mask[length // 2 :] = MASKED
    nodes = [helper.make_node("Add", ["X", "mask"], ["M"])]
    nodes += [helper.make_node("Softmax", ["M"], [f"S{i}"]) for i in range(repeats)]
    nodes.append(helper.make_node("ReduceMax", [f"S{repeats - 1}"], ["Y"], keepdims=0))
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, [rows, length])
    y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, [])
    return _model(nodes, [x], [y], [numpy_helper.from_array(mask, "mask")])


def negated() -> onnx.ModelProto:
    """Returns a model that negates its input, a [N, M] matrix, for measuring a session's
    overhead."""
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", "M"]) for n in "XY"]
    return _model([helper.make_node("Neg", ["X"], ["Y"])], ports[:1], ports[1:])


def tiny_ops(repeats: int) -> onnx.ModelProto:
    """Returns a chain of ops of several kinds on one element, for measuring the launch time of ops.
    Every other op reads a weight of its own, as updates of parameters do."""
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
    """Returns a model in which each op reads the result of the op before. Its output is the maximum
    of the last result: a single element, because a run copies its outputs.

    links  for each op: its type, the names of its operands after the first, and its attributes
    shape  of the input
    """
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
