"""Moves the axes of a Scan's sequences out of the Scan.

onnxruntime's Scan stacks results along an axis other than the first by a copy, whose kernel divides
by zero if the results have no elements. A Transpose behind the Scan copies as much, and may be
empty.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.ir.subgraphs import bodies, scopes
from onnxpar.ir.tensors import tensor_shape

_AXES = "scan_output_axes"


def stack_first(graph: gs.Graph) -> None:
    """Makes each Scan stack its results along the first axis, with a Transpose behind, also in
    bodies. A result of unknown rank stays as it is."""
    for scope in scopes(graph):
        made: list[gs.Node] = []
        for node in scope.nodes:
            made.append(node)
            if any(node.attrs.get(_AXES, ())):
                made += _transposes(node)
        scope.nodes[:] = made


def _transposes(node: gs.Node) -> list[gs.Node]:
    """Stacks a Scan's results along the first axis; returns the nodes that move the axis back."""
    axes = list(node.attrs[_AXES])
    (body,) = bodies(node)
    states = len(body.outputs) - len(axes)
    made = []
    for i, axis in enumerate(axes):
        result = node.outputs[states + i]
        shape = tensor_shape(result)
        if shape is None or not result.name:
            continue
        rest = [*range(1, len(shape))]
        perm = [*rest[: (to := axis % len(shape))], 0, *rest[to:]]
        axes[i] = 0
        if to:
            stacked = gs.Variable(f"{result.name}/stacked", result.dtype)
            stacked.shape = [result.shape[to], *result.shape[:to], *result.shape[to + 1 :]]
            node.outputs[states + i] = stacked
            name = f"{node.name}/{result.name}"
            made.append(gs.Node("Transpose", name, {"perm": perm}, [stacked], [result]))
    node.attrs[_AXES] = axes
    return made
