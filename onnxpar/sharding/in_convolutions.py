"""Finds nodes that onnxruntime runs inside the convolution before them: they take no time of their
own, unless the ranks must communicate in between."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_graphsurgeon as gs

ACTIVATIONS = frozenset(("Relu", "Clip", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid"))
"""Ops that onnxruntime's convolutions apply to their results."""


def in_convolutions(nodes: Iterable[gs.Node]) -> frozenset[str]:
    """The names of the nodes, given in graph order, that onnxruntime runs inside a convolution: the
    sum of its result and another tensor, and an activation. None whose operand others read too."""
    found: set[str] = set()
    made: set[str] = set()
    for node in nodes:
        if node.op == "Conv":
            ends = True
        elif (node.op in ACTIVATIONS or node.op == "Add") and any(
            t.name in made for t in node.inputs
        ):
            found.add(node.name)
            ends = node.op == "Add"
        else:
            continue
        if ends and len(node.outputs[0].outputs) == 1:
            made.add(node.outputs[0].name)
    return frozenset(found)
