"""Lets Scans read and stack their sequences along the first axis.

For another axis, onnxruntime transposes the sequence when the Scan starts or ends, and divides by
zero if it has no elements. A Transpose outside of the Scan costs the same, and accepts empty
tensors.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import bodies, scopes
from onnxpar.graph.tensors import tensor_shape


def scan_first_axes(graph: gs.Graph) -> None:
    """Lets each Scan of the graph and its bodies use the first axis for all its sequences, in
    place, with Transposes before and behind it. A sequence of unknown rank keeps its axis."""
    for scope in scopes(graph):
        nodes: list[gs.Node] = []
        for node in scope.nodes:
            is_scan = node.op == "Scan" and not node.domain
            nodes += _with_transposes(node) if is_scan else [node]
        scope.nodes[:] = nodes


def _with_transposes(node: gs.Node) -> list[gs.Node]:
    """Returns a Scan along first axes, with Transposes of its operands before it, and Transposes of
    its results behind it."""
    states = len(node.inputs) - node.attrs["num_scan_inputs"]
    before = _transposes(node, "scan_input_axes", node.inputs, states)
    (body,) = bodies(node)
    states = len(body.outputs) - len(node.attrs.get("scan_output_axes", ()))
    return [*before, node, *_transposes(node, "scan_output_axes", node.outputs, states)]


def _transposes(node: gs.Node, key: str, tensors: list[gs.Tensor], states: int) -> list[gs.Node]:
    """Makes a Scan use axis 0 for its operands, or for its results; returns the Transposes between
    the old and the new tensors.

    key      the attribute that has the axes, which become 0
    tensors  the Scan's operands or results; tensors with another axis are replaced
    states   how many of these are states, which have no axis
    """
    transposes = []
    axes = list(node.attrs.get(key, ()))
    for i, (axis, tensor) in enumerate(zip(axes, tensors[states:], strict=False)):
        shape = tensor_shape(tensor)
        if shape is None or not tensor.name or axis % len(shape) == 0:
            continue
        at, axes[i] = axis % len(shape), 0
        first = [at, *(a for a in range(len(shape)) if a != at)]
        sizes = [tensor.shape[a] for a in first]
        inner = gs.Variable(f"{node.name}::{key}.{i}", tensor.dtype, sizes)
        tensors[states + i] = inner
        is_result = tensors is node.outputs
        perm = [first.index(a) for a in range(len(shape))] if is_result else first
        ends = [[inner], [tensor]] if is_result else [[tensor], [inner]]
        transposes.append(gs.Node("Transpose", f"{inner.name}::Transpose", {"perm": perm}, *ends))
    if axes:
        node.attrs[key] = axes
    return transposes
