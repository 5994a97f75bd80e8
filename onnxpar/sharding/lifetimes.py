"""How long tensors live in a run, which tells whether a core's cache still holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import shape_bytes
from onnxpar.layout.layout import Layout

if TYPE_CHECKING:
    from onnxpar.sharding.factors import TensorFactors

VIEWS = frozenset(
    ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant")
)
"""Ops that move no data."""


def lifetimes(nodes: Iterable[gs.Node], tensors: Mapping[str, TensorFactors]) -> dict[str, float]:
    """For each tensor that a node computes, the bytes that nodes write from then on until its last
    use, itself included. The nodes are in graph order, and not split. What is read through a view
    counts as read by the view alone. Bytes are means over the sizes for which costs are computed.
    """
    written = 0.0
    start: dict[str, float] = {}
    found: dict[str, float] = {}
    for node in nodes:
        for tensor in node.inputs:
            if tensor.name in start:
                found[tensor.name] = written - start[tensor.name]
        for tensor in node.outputs:
            start[tensor.name] = written
            if node.op not in VIEWS and tensor.name in tensors:
                written += _bytes(tensor, tensors[tensor.name])
            found[tensor.name] = written - start[tensor.name]
    return found


def _bytes(tensor: gs.Tensor, factors: TensorFactors) -> float:
    each = ((weight, Layout(dims).shape) for weight, dims in factors.costed)
    return sum(weight * shape_bytes(tensor, shape) for weight, shape in each)
