"""The number of times that each node of a graph runs, also in bodies of loops."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import subgraphs

MOST = 1 << 20
"""Up to this, the limit of a Loop counts as its number of iterations. A Loop with a higher limit
ends by its condition, which is not known here; its body counts once."""


def repetitions(nodes: Iterable[gs.Node]) -> dict[str, int]:
    """Returns how often each of these nodes, and each node in their bodies, runs, by name."""
    runs: dict[str, int] = {}

    def add(node: gs.Node, times: int) -> None:
        runs[node.name] = times
        for body in subgraphs(node):
            for inner in body.nodes:
                add(inner, times * iterations(node))

    for node in nodes:
        if node.name not in runs:
            add(node, 1)
    return runs


def iterations(node: gs.Node) -> int:
    """Returns how often a node's bodies run; 1 if that is not known, or if it has none."""
    if node.op == "Scan":
        first = len(node.inputs) - node.attrs["num_scan_inputs"]
        axis = (node.attrs.get("scan_input_axes") or [0])[0]
        shape = node.inputs[first].shape
        size = shape[axis] if shape is not None else None
        return max(size, 1) if isinstance(size, int) else 1
    if node.op == "Loop" and isinstance(node.inputs[0], gs.Constant):
        count = int(np.reshape(node.inputs[0].values, -1)[0])
        return count if 1 <= count <= MOST else 1
    return 1
