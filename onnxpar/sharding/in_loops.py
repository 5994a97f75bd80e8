"""Finds nodes that ranks run in one loop with others: only what comes from outside the loop is
read, and only what others need is written."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.elementwise_groups import FEWEST, ONE, elementwise_units

if TYPE_CHECKING:
    from onnxpar.sharding.factors import OpFactors, TensorFactors


@dataclass(frozen=True)
class InLoop:
    """The operands of a node that its loop reads in memory and no earlier node of the loop has
    read, and the results that the loop writes; `is_first` if the node is the loop's first one."""

    operands: frozenset[int]
    results: frozenset[int]
    is_first: bool


def in_loops(ops: Sequence[OpFactors], tensors: Mapping[str, TensorFactors]) -> dict[str, InLoop]:
    """The nodes that ranks run in loops, by name, if no layout changes between the nodes of a
    loop."""

    def kind(tensor: gs.Tensor) -> Hashable | None:
        factors = tensors.get(tensor.name)
        if factors is None or tensor.dtype != np.float32:
            return None
        return (factors.dims, factors.leaves) if factors.leaves else ONE

    found: dict[str, InLoop] = {}
    for graph in {id(op.graph): op.graph for op in ops}.values():
        outputs = {t.name for t in graph.outputs}
        for unit in elementwise_units(graph, kind):
            if len(unit) >= FEWEST:
                found |= _of_loop(unit, outputs)
    return found


def _of_loop(unit: Sequence[gs.Node], outputs: set[str]) -> dict[str, InLoop]:
    names = {node.name for node in unit}
    known = set()
    found = {}
    for node in unit:
        operands = frozenset(i for i, t in enumerate(node.inputs) if t.name not in known)
        results = frozenset(
            i
            for i, t in enumerate(node.outputs)
            if t.name in outputs or any(reader.name not in names for reader in t.outputs)
        )
        known |= {t.name for t in (*node.inputs, *node.outputs)}
        found[node.name] = InLoop(operands, results, node is unit[0])
    return found
