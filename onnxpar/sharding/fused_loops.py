"""Finds elementwise nodes that a rank runs together in one loop over elements. The loop reads only
tensors that nodes outside it write, and writes only tensors that nodes outside it read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.elementwise_groups import FEWEST, ONE, elementwise_units
from onnxpar.sharding.factors import OpFactors, TensorFactors


@dataclass(frozen=True)
class InLoop:
    """The tensors that a node in a fused elementwise loop reads from memory and writes to memory.
    The cost model counts the bytes of these tensors only.

    operands  indices of operands that no earlier node of the loop has read or computed
    results   indices of results that nodes outside the loop read
    is_first  True for the first node of the loop
    """

    operands: frozenset[int]
    results: frozenset[int]
    is_first: bool


def in_loops(ops: Sequence[OpFactors], tensors: Mapping[str, TensorFactors]) -> dict[str, InLoop]:
    """Returns the nodes that ranks run in loops, by name, provided that no reshard comes between
    the nodes of a loop."""

    def kind(tensor: gs.Tensor) -> Hashable | None:
        factors = tensors.get(tensor.name)
        if factors is None or tensor.dtype != np.float32:
            return None
        return (factors.dims, factors.leaves) if factors.leaves else ONE

    nodes: dict[str, InLoop] = {}
    for graph in {id(op.graph): op.graph for op in ops}.values():
        outputs = {t.name for t in graph.outputs}
        for unit in elementwise_units(graph, kind):
            if len(unit) >= FEWEST:
                nodes |= _nodes_of_loop(unit, outputs)
    return nodes


def _nodes_of_loop(unit: Sequence[gs.Node], outputs: set[str]) -> dict[str, InLoop]:
    """Returns the nodes of one loop, by name. `unit` has these nodes in order, `outputs` the names
    of the graph's outputs."""
    names = {node.name for node in unit}
    in_registers = set()
    nodes = {}
    for node in unit:
        operands = frozenset(i for i, t in enumerate(node.inputs) if t.name not in in_registers)
        results = frozenset(
            i
            for i, t in enumerate(node.outputs)
            if t.name in outputs or any(reader.name not in names for reader in t.outputs)
        )
        in_registers |= {t.name for t in (*node.inputs, *node.outputs)}
        nodes[node.name] = InLoop(operands, results, node is unit[0])
    return nodes
