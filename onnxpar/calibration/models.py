"""Small models whose run takes as long as what is to be measured: the same op again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxpar.ir.collectives import DOMAIN, KINDS

ROWS, WIDTH = 256, 768
"""Of the products that are measured: tokens, and BERT's width."""
WIDE, NARROW, PIXELS = 256, 64, 28
"""Channels of a bottleneck of ResNet, and its images."""
PICKED, LENGTH = 1 << 16, 64
"""Elements that are picked, and those in a row of theirs."""
BETWEEN = (64, 256)
"""Of the products between collectives."""
COLUMNS = 64
"""Of the tensors that collectives move, in rows."""
_TOKEN = helper.make_tensor_value_info("token0", TensorProto.BOOL, [0])


def collective(kind: str, size: int, group: Sequence[int], turns: int) -> onnx.ModelProto:
    """So many collectives of a tensor of `size` bytes where it is largest, one after the other,
    each behind some work: a rank that has worked is woken up by what arrives, or is waited for.

    Each reads the same X. Nobody reads what they make, but onnxruntime runs them all.
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
    nodes = []
    for i in range(turns):
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
    last = helper.make_tensor_value_info(f"token{turns}", TensorProto.BOOL, [0])
    return _model(nodes, [x, z, _TOKEN], [last], [_square(BETWEEN[1])])


def work_between(turns: int) -> onnx.ModelProto:
    """So many times what ranks do before each collective, a chain."""
    return _chain([("MatMul", ["W"], {})] * turns, BETWEEN, [_square(BETWEEN[1])])


def _square(width: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.zeros((width, width), np.float32), "W")


def products(turns: int) -> onnx.ModelProto:
    """So many matrix products of [ROWS, WIDTH] by a weight, a chain."""
    return _chain([("MatMul", ["W"], {})] * turns, [ROWS, WIDTH], [_square(WIDTH)])


def convolutions(turns: int) -> onnx.ModelProto:
    """So many times ResNet's 1x1 convolution to fewer channels, 3x3, and 1x1 back to all, a chain
    of images of PIXELS x PIXELS."""
    kernels = ((NARROW, WIDE, 1), (NARROW, NARROW, 3), (WIDE, NARROW, 1))
    weights = [
        numpy_helper.from_array(np.zeros((out, into, size, size), np.float32), f"W{i}")
        for i, (out, into, size) in enumerate(kernels)
    ]
    pads = {f"W{i}": [size // 2] * 4 for i, (_, _, size) in enumerate(kernels)}
    links = [("Conv", [weight], {"pads": pads[weight]}) for weight in pads] * turns
    return _chain(links, [1, WIDE, PIXELS, PIXELS], weights)


def copies(size: int, turns: int) -> onnx.ModelProto:
    """So many elementwise ops that read and write a tensor of `size` bytes, a chain."""
    return _chain([("Neg", [], {})] * turns, [size // 4])


def rows(turns: int) -> onnx.ModelProto:
    """So many ops that pick PICKED elements one by one, a chain."""
    each = numpy_helper.from_array(np.arange(LENGTH), "I")
    return _chain([("Gather", ["I"], {"axis": 1})] * turns, [PICKED // LENGTH, LENGTH], [each])


def tiny_ops(turns: int) -> onnx.ModelProto:
    """So many ops of one element, a chain."""
    return _chain([("Neg", [], {})] * turns, [1])


def _chain(
    links: Sequence[tuple[str, list[str], dict[str, Any]]],
    shape: Sequence[int],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """Each link is an op, what it reads besides the result of the one before, and its attributes.
    The last result is summed up to one element, as what a run returns is copied."""
    nodes = [
        helper.make_node(op, [f"X{i}", *others], [f"X{i + 1}"], **attributes)
        for i, (op, others, attributes) in enumerate(links)
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
