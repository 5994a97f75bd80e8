"""Finds groups of elementwise nodes that one loop over their elements can compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.recomputation_gates import gate_of
from onnxpar.graph.subgraphs import read_by

OPERATIONS = frozenset(("Add", "Sub", "Mul", "Div", "Sqrt", "Neg", "Abs", "Identity"))
"""Elementwise ops whose results IEEE 754 fixes to the bit; Identity copies."""
FEWEST = 3
"""Nodes of a group: fewer save too little memory traffic."""
ONE = "one element"
"""The kind of a tensor of one element, which is broadcast."""
Kind = Callable[[gs.Tensor], Hashable | None]
"""The kind of a tensor: equal only if two tensors have the same shape on each rank; None for a
tensor that cannot be in a group."""

_ACTIVATIONS = frozenset(("Erf", "Tanh", "Sigmoid"))
"""Ops that onnxruntime fuses with the elementwise nodes around them (a Gelu, for example), if only
one node reads the result."""
_FUSED = frozenset(("Softmax", "Conv", "ConvTranspose", "QuantizeLinear", "DequantizeLinear"))
"""Ops that onnxruntime fuses with the elementwise nodes around them."""
_INTEGERS = "MatMulInteger"
"""An op that onnxruntime fuses with the Cast of its result, and with the scaling after that."""
_PRODUCTS = frozenset(("MatMul", "FusedMatMul", "Gemm"))


def elementwise_units(graph: gs.Graph, kind: Kind) -> list[list[gs.Node]]:
    """Divides the nodes of a graph (not of its subgraphs) into units: groups of at least FEWEST
    elementwise nodes that one loop can compute, in graph order, and single nodes. Each unit follows
    its operands in the returned order.

    No unit depends on itself through others. A node that reads a unit may come later than in the
    graph, but no collective does.
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
    """True if a group may have the node: operands have the shape of the result, or one element.
    `kinds` has the kind of each tensor's shape."""
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
    """Returns the numbers of the nodes that onnxruntime may fuse with others: nodes beside a fused
    op, directly or through other nodes that fit a group, and nodes that become part of a
    product."""
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
    """Merges nodes into units, and keeps an order in which each unit follows its operands."""

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
        """The units in order, each with its nodes."""
        return (sorted(self._members[unit]) for unit in self._order if unit is not None)

    def merge(self, first: int, second: int) -> None:
        """Merges the units of two nodes (the second reads the first) at the place of the second;
        units that depend on the first come after. Does nothing if the second unit depends on the
        first through other units, or if a collective would move."""
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
        """Returns the units between two that depend on the first; None if the second depends on one
        of them, or one of them is a collective."""
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
