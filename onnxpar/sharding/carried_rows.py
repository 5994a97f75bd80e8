"""Finds nodes that mix the rows of a dimension, by their sharding rules. A node that computes each
row from the same row alone does not mix rows."""

from __future__ import annotations

from collections.abc import Collection

import onnx_graphsurgeon as gs

from onnxpar.rules.rule import rule_of
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.graph_factors import GraphFactors


def mixing_node(factors: GraphFactors, atom: int, known: Collection[str]) -> gs.Node | None:
    """Returns the first node that mixes rows of a dimension, such as a softmax along it; None if
    there is none. `atom` is the dimension's atom (a part of a dimension); nodes named in `known` do
    not count."""
    for op in factors.ops:
        reads = any(atom in _atoms(factors, t) for t in op.node.inputs)
        if reads and op.node.name not in known and not _is_by_row(factors, op, atom):
            return op.node
    return None


def _is_by_row(factors: GraphFactors, op: OpFactors, atom: int) -> bool:
    """True if a node computes each row of a dimension (given by its atom) from the same row alone:
    all results have the dimension, and the node neither reduces it nor needs it whole."""
    rule = rule_of(op.node)
    factors_of_atom = [factor for factor, atoms in op.atoms.items() if atom in atoms]
    rings = {factor for ring in rule.rings for factor in ring}
    mixed = {*rule.whole, *rule.reduce, *rule.communicating, *rule.ranks.lowered, *rings}
    written = all(atom in _atoms(factors, t) for t in op.node.outputs if t.name)
    return bool(factors_of_atom) and mixed.isdisjoint(factors_of_atom) and written


def _atoms(factors: GraphFactors, tensor: gs.Tensor) -> set[int]:
    """Returns the atoms (parts of dimensions) of all dimensions of a tensor."""
    dims = factors.tensors.get(tensor.name)
    return {leaf.atom for leaf in dims.leaves} if dims is not None else set()
