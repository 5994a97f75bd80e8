"""Lifetimes of tensors, as bytes that a run writes from the computation of a tensor to its last
use. From a lifetime, the cost model tells whether the tensor is still in cache at its last use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import shape_bytes
from onnxpar.layout.layout import Layout
from onnxpar.sharding.factors import TensorFactors

VIEWS = frozenset(
    ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant")
)
"""Ops that move no data: their result is a view of the operand, or a few numbers."""


def lifetimes(nodes: Iterable[gs.Node], tensors: Mapping[str, TensorFactors]) -> dict[str, float]:
    """Returns the lifetime of each computed tensor, by name: the bytes that nodes write from its
    computation (included) to its last use. A tensor's last reader may be a view, such as a Reshape.

    `nodes` are unsplit, in graph order. Bytes are means over the sizes for which costs are
    computed.
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
    """Returns the bytes of a whole tensor, on average over the sizes for which costs are
    computed."""
    shapes = ((weight, Layout(dims).shape) for weight, dims in factors.costed)
    return sum(weight * shape_bytes(tensor, shape) for weight, shape in shapes)
