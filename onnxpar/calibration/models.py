"""Small models whose run takes as long as what is to be measured: the same op again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxpar.collective import DOMAIN

ROWS, WIDTH = 256, 768
"""Of the products that are measured: tokens, and BERT's width."""
COLUMNS = 64
"""Of the tensors that collectives move, in rows."""
_TOKEN = helper.make_tensor_value_info("token0", TensorProto.BOOL, [0])


def collective(kind: str, size: int, group: Sequence[int], turns: int) -> onnx.ModelProto:
    """So many collectives of a tensor of `size` bytes where it is largest, one after the other.

    Each reads the same X. Nobody reads what they make, but onnxruntime runs them all.
    """
    ranks = len(group)
    part = max(size // (4 * COLUMNS * ranks), 1)
    fed = part if kind == "AllGather" else part * ranks
    attributes: dict[str, dict[str, Any]] = {
        "AllGather": {"axis": 0, "sizes": [part] * ranks},
        "ReduceScatter": {"axis": 0, "sizes": [part] * ranks},
        "AllToAll": {
            "split_axis": 0,
            "concat_axis": 1,
            "split_sizes": [part] * ranks,
            "concat_sizes": [COLUMNS] * ranks,
        },
        "Broadcast": {"root": 0},
    }
    nodes = [
        helper.make_node(
            kind,
            ["X", f"token{i}"],
            [f"Y{i}", f"token{i + 1}"],
            domain=DOMAIN,
            tag=i + 1,
            group=list(group),
            **attributes.get(kind, {}),
        )
        for i in range(turns)
    ]
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, [fed, COLUMNS])
    last = helper.make_tensor_value_info(f"token{turns}", TensorProto.BOOL, [0])
    return _model(nodes, [x, _TOKEN], [last])


def products(turns: int) -> onnx.ModelProto:
    """So many matrix products of [ROWS, WIDTH] by a weight, a chain."""
    weight = numpy_helper.from_array(np.zeros((WIDTH, WIDTH), np.float32), "W")
    return _chain("MatMul", [ROWS, WIDTH], turns, [weight])


def copies(size: int, turns: int) -> onnx.ModelProto:
    """So many elementwise ops that read and write a tensor of `size` bytes, a chain."""
    return _chain("Neg", [size // 4], turns)


def tiny_ops(turns: int) -> onnx.ModelProto:
    """So many ops of one element, a chain."""
    return _chain("Neg", [1], turns)


def _chain(
    kind: str, shape: Sequence[int], turns: int, weights: Sequence[onnx.TensorProto] = ()
) -> onnx.ModelProto:
    """The last result is summed up to one element, as what a run returns is copied."""
    others = [weight.name for weight in weights]
    nodes = [helper.make_node(kind, [f"X{i}", *others], [f"X{i + 1}"]) for i in range(turns)]
    nodes.append(helper.make_node("ReduceMax", [f"X{turns}"], ["Y"], keepdims=0))
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
