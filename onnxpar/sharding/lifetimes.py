"""Lifetimes of tensors in a run, in bytes written: is a tensor still in cache at its last use?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import shape_bytes
from onnxpar.layout.layout import Layout
from onnxpar.sharding.factors import TensorFactors

VIEWS = frozenset(
    ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant")
)
"""Ops that move no data."""


def lifetimes(nodes: Iterable[gs.Node], tensors: Mapping[str, TensorFactors]) -> dict[str, float]:
    """The lifetime of each computed tensor: the bytes that nodes write from its computation
    (included) to its last use. `nodes` are unsplit, in graph order. A view counts as the only
    reader of its operand. Bytes are means over the sizes for which costs are computed.
    """
    written = 0.0
    start: dict[str, float] = {}
    lifetime: dict[str, float] = {}
    for node in nodes:
        for tensor in node.inputs:
            if tensor.name in start:
                lifetime[tensor.name] = written - start[tensor.name]
        for tensor in node.outputs:
            start[tensor.name] = written
            if node.op not in VIEWS and tensor.name in tensors:
                written += _bytes(tensor, tensors[tensor.name])
            lifetime[tensor.name] = written - start[tensor.name]
    return lifetime


def _bytes(tensor: gs.Tensor, factors: TensorFactors) -> float:
    shapes = ((weight, Layout(dims).shape) for weight, dims in factors.costed)
    return sum(weight * shape_bytes(tensor, shape) for weight, shape in shapes)
