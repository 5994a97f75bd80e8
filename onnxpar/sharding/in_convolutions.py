"""Finds nodes that onnxruntime runs inside the preceding convolution: they take no extra time,
unless ranks communicate between the convolution and the node."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_graphsurgeon as gs

ACTIVATIONS = frozenset(("Relu", "Clip", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid"))
"""Ops that onnxruntime's convolutions apply to their results."""


def in_convolutions(nodes: Iterable[gs.Node]) -> frozenset[str]:
    """Returns the names of nodes that onnxruntime runs inside the preceding convolution: an Add of
    the convolution's result and another tensor, and an activation. Such a node must be the only
    reader of the result before it. `nodes` are in graph order."""
    inside: set[str] = set()
    fusable: set[str] = set()
    for node in nodes:
        if node.op == "Conv":
            ends = True
        elif (node.op in ACTIVATIONS or node.op == "Add") and any(
            t.name in fusable for t in node.inputs
        ):
            inside.add(node.name)
            ends = node.op == "Add"
        else:
            continue
        if ends and len(node.outputs[0].outputs) == 1:
            fusable.add(node.outputs[0].name)
    return frozenset(inside)
