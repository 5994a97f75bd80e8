"""Common subexpression elimination in a training step, before layouts are decided."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import bodies, is_random, replace_reads

_LARGEST = 1024
"""The number of elements up to which constants are compared by value, and not by identity."""


def merge_equal(graph: gs.Graph, kept_tensors: Iterable[gs.Tensor]) -> None:
    """Merges nodes that apply the same op to the same operands into the first of them, in place.

    If several nodes read a tensor, their gradient rules each add the same node, such as its
    transpose; without merging, ranks would communicate each copy separately. Three kinds of nodes
    are not merged: Identities, which mark tensors to gather or compute again; zeros to which
    scatters add, because each gradient may have its own layout; and nodes of graph outputs and of
    `kept_tensors`.
    """
    first: dict[Hashable, gs.Node] = {}
    outputs = {id(t) for t in (*graph.outputs, *kept_tensors)}
    kept = []
    for node in graph.nodes:
        key = _key(node)
        known = first.setdefault(key, node) if key is not None else node
        if known is node or any(id(t) in outputs for t in node.outputs):
            kept.append(node)
            continue
        for old, new in zip(node.outputs, known.outputs, strict=True):
            replace_reads(old, new)
        node.inputs.clear()
    graph.nodes = kept


def _key(node: gs.Node) -> Hashable | None:
    """Returns a key that is equal for nodes to merge; None for a node that is never merged."""
    if node.op in ("ConstantOfShape", "Identity") or node.domain or bodies(node) or is_random(node):
        return None
    names = tuple(bool(t.name) for t in node.outputs)
    attrs = tuple(sorted((key, _attribute(value)) for key, value in node.attrs.items()))
    return node.op, names, attrs, tuple(map(_operand, node.inputs))


def _attribute(value: Any) -> str:
    """Returns an attribute's value as text, for comparison."""
    if isinstance(value, gs.Constant):
        return f"{value.values.dtype}{value.values.tolist()}"
    return repr(value)


def _operand(tensor: gs.Tensor) -> Hashable:
    """Returns a key for an operand: a small constant by its values, any other tensor by
    identity."""
    if not tensor.name:
        return None
    if isinstance(tensor, gs.Constant) and np.prod(tensor.shape) <= _LARGEST:
        values = np.asarray(tensor.values)
        return values.dtype.name, values.shape, values.tobytes()
    return id(tensor)
