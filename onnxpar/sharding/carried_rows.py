"""Finds nodes that mix the rows of a dimension, by their sharding rules."""

from __future__ import annotations

from collections.abc import Collection

import onnx_graphsurgeon as gs

from onnxpar.rules.rule import rule_of
from onnxpar.sharding.factors import GraphFactors, OpFactors


def mixing_node(factors: GraphFactors, atom: int, known: Collection[str]) -> gs.Node | None:
    """Returns the first node whose results are not computed row by row along the dimension of this
    atom, other than the `known` ones, given by name; None if there is none."""
    for op in factors.ops:
        reads = any(atom in _atoms(factors, t) for t in op.node.inputs)
        if reads and op.node.name not in known and not _is_by_row(factors, op, atom):
            return op.node
    return None


def _is_by_row(factors: GraphFactors, op: OpFactors, atom: int) -> bool:
    """True if a node reads and writes the dimension, and neither sums over it nor needs all of
    it."""
    rule = rule_of(op.node)
    own = [factor for factor, atoms in op.atoms.items() if atom in atoms]
    rings = {factor for ring in rule.rings for factor in ring}
    mixed = {*rule.whole, *rule.reduce, *rule.communicating, *rule.lowered, *rings}
    written = all(atom in _atoms(factors, t) for t in op.node.outputs if t.name)
    return bool(own) and mixed.isdisjoint(own) and written


def _atoms(factors: GraphFactors, tensor: gs.Tensor) -> set[int]:
    found = factors.tensors.get(tensor.name)
    return {leaf.atom for leaf in found.leaves} if found is not None else set()
