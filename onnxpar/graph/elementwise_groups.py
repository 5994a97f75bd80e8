"""Finds groups of elementwise nodes that a single loop over their elements can compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.recomputation_gates import gate_of
from onnxpar.graph.subgraphs import read_by

OPERATIONS = frozenset(("Add", "Sub", "Mul", "Div", "Sqrt", "Neg", "Abs", "Identity"))
"""Elementwise ops whose results IEEE 754 fixes to the bit, so that fusing them changes nothing.
Identity copies."""
FEWEST = 3
"""Fewest nodes of a group; fewer would save too little memory traffic."""
ONE = "one element"
"""Stands in for the shape of a tensor with one element, which is broadcast."""
Kind = Callable[[gs.Tensor], Hashable | None]
"""Returns a value that is equal for two tensors only if they have the same shape on each rank; None
for a tensor that no group may contain."""

_ACTIVATIONS = frozenset(("Erf", "Tanh", "Sigmoid"))
"""Ops that onnxruntime fuses with elementwise nodes around them (into a Gelu), if only one node
reads the result."""
_FUSED = frozenset(("Softmax", "Conv", "ConvTranspose", "QuantizeLinear", "DequantizeLinear"))
"""Ops that onnxruntime fuses with the elementwise nodes around them."""
_INTEGERS = "MatMulInteger"
"""An op that onnxruntime fuses with the Cast of its result, and with the scaling after that."""
_PRODUCTS = frozenset(("MatMul", "FusedMatMul", "Gemm"))


def elementwise_units(graph: gs.Graph, kind: Kind) -> list[list[gs.Node]]:
    """Divides the nodes of a graph (not of its bodies) into units: groups of at least FEWEST
    elementwise nodes that one loop can compute, and single nodes. Returns the units in an order in
    which each comes after its operands.

    No unit depends on itself through others. A node may move behind its place in the graph, but no
    collective does.

    kind  see `Kind`
    """
    merger = _Merger(graph)
    nodes = merger.nodes
    kinds = {t.name: kind(t) for node in nodes for t in (*node.inputs, *node.outputs)}
    fits = {i for i, node in enumerate(nodes) if _fits(node, kinds)}
    fits -= _of_onnxruntime(merger, fits, {t.name for t in graph.outputs})
    for i in sorted(fits):
        for j in merger.operands[i]:
            if j in fits and kinds[nodes[i].outputs[0].name] == kinds[nodes[j].outputs[0].name]:
                merger.merge(j, i)
    return [[nodes[i] for i in unit] for unit in merger.units()]


def _fits(node: gs.Node, kinds: Mapping[str, Hashable | None]) -> bool:
    """True if a group may contain the node: each operand has the shape of the result, or one
    element."""
    if node.op not in OPERATIONS or node.domain not in (None, "", "ai.onnx"):
        return False
    result = kinds[node.outputs[0].name]
    if (
        result in (None, ONE)
        or gate_of(node) is not None
        or all(isinstance(t, gs.Constant) for t in node.inputs)
    ):
        return False
    if node.op == "Div" and isinstance(node.inputs[0], gs.Constant):
        return False  # onnxruntime turns 1 / x * y into y / x
    return all(kinds[t.name] in (result, ONE) for t in node.inputs)


def _of_onnxruntime(merger: _Merger, fits: set[int], outputs: set[str]) -> set[int]:
    """Returns the indices of nodes that onnxruntime may fuse on its own, so that groups must leave
    them out: nodes next to a fused op, directly or through other fitting nodes, and nodes that
    become part of a product.

    fits     indices of the nodes that groups may contain
    outputs  names of the graph's outputs
    """
    nodes = merger.nodes
    fused: set[int] = set()
    todo = [
        i
        for i, node in enumerate(nodes)
        if node.op in _FUSED
        or (node.op in _ACTIVATIONS and len(merger.readers[i]) == 1)
        or (node.op == "Cast" and any(nodes[j].op == _INTEGERS for j in merger.operands[i]))
    ]
    while todo:
        i = todo.pop()
        near = {*merger.operands[i], *merger.readers[i]} & fits - fused
        fused |= near
        todo += near
    for i in fits - fused:
        scales = nodes[i].op in ("Mul", "Div") and any(
            isinstance(t, gs.Constant) for t in nodes[i].inputs
        )
        behind = scales and any(nodes[j].op in _PRODUCTS for j in merger.readers[i])
        before = (scales or nodes[i].op == "Add") and any(
            nodes[j].op in _PRODUCTS
            and len(merger.readers[j]) == 1
            and nodes[j].outputs[0].name not in outputs
            for j in merger.operands[i]
        )
        if behind or before:
            fused.add(i)
    return fused


class _Merger:
    """Merges nodes into units step by step, and keeps an order in which each unit comes after its
    operands."""

    def __init__(self, graph: gs.Graph) -> None:
        self.nodes: Sequence[gs.Node] = list(graph.nodes)
        maker = {t.name: i for i, node in enumerate(self.nodes) for t in node.outputs if t.name}
        self.operands = [
            sorted({maker[t.name] for t in read_by(node) if t.name in maker}) for node in self.nodes
        ]
        self.readers: list[list[int]] = [[] for _ in self.nodes]
        for i, operands in enumerate(self.operands):
            for j in operands:
                self.readers[j].append(i)
        self._unit = list(range(len(self.nodes)))
        self._members: dict[int, list[int]] = {i: [i] for i in self._unit}
        self._order: list[int | None] = list(self._unit)
        self._place = list(self._unit)

    def units(self) -> Iterator[list[int]]:
        """Yields the units in order, each as the indices of its nodes."""
        return (sorted(self._members[unit]) for unit in self._order if unit is not None)

    def merge(self, first: int, second: int) -> None:
        """Merges the units of two nodes, where `second` reads `first`, at the place of the second;
        units that depend on the first move behind. Does nothing if the second unit depends on the
        first through other units, too, or if a collective would move."""
        first, second = self._unit[first], self._unit[second]
        later = self._between(first, second) if first != second else None
        if later is None:
            return
        begin, end = self._place[first], self._place[second] + 1
        window = [u for u in self._order[begin:end] if u is not None and u != first]
        kept = [u for u in window if u not in later]
        moved = [u for u in window if u in later]
        for at, unit in enumerate((None, *kept, *moved), begin):
            self._order[at] = unit
            if unit is not None:
                self._place[unit] = at
        for at in range(begin + 1 + len(window), end):
            self._order[at] = None
        self._members[second] += self._members.pop(first)
        for node in self._members[second]:
            self._unit[node] = second

    def _between(self, first: int, second: int) -> set[int] | None:
        """Returns the units that depend on unit `first` and come before unit `second`; None if
        `second` depends on one of them, or if one is a collective."""
        units: set[int] = set()
        todo = [first]
        while todo:
            for node in self._members[todo.pop()]:
                for reader in self.readers[node]:
                    unit = self._unit[reader]
                    if unit == second and self._unit[node] != first:
                        return None
                    if unit in units or self._place[unit] >= self._place[second]:
                        continue
                    if self._unit[node] != unit and self.nodes[reader].domain == DOMAIN:
                        return None
                    if unit != self._unit[node]:
                        units.add(unit)
                        todo.append(unit)
        return units
