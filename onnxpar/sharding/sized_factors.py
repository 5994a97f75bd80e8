"""Recomputes the factors of a graph for other sizes than those at which it was analysed.

The compiler analyses a graph at distinct sizes, so that no two dimensions are equal by chance. It
computes costs at the sizes of real runs, where a batch may be 1: a dimension that can be split then
has one element, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from onnxpar.layout.layout import Dim, Factor, SizedFactor
from onnxpar.sharding.factors import GraphFactors, OpFactors, TensorFactors
from onnxpar.symbols.fits import fit
from onnxpar.symbols.symbols import Binding, Variable

Sizes = Mapping[int, int]
"""The number of elements of atoms, by number of the atom."""
Sample = tuple[Mapping[Variable, int], GraphFactors]
"""The values of symbols and quotients at one binding, and the graph's factors there."""


def atom_sizes(found: Sequence[Sample], wanted: Binding) -> Sizes:
    """The number of elements of each open atom at the binding `wanted`, interpolated from several
    samples. An atom that no polynomial fits keeps its size in the first sample."""
    each = [
        {leaf.atom: leaf.size for op in factors.ops for leaf in op.leaves}
        | {leaf.atom: leaf.size for t in factors.tensors.values() for leaf in t.leaves}
        for _, factors in found
    ]
    variables = {name: [values[name] for values, _ in found] for name in found[0][0]}
    sizes: dict[int, int] = {}
    for atom, size in each[0].items():
        values = [at.get(atom, size) for at in each]
        if len(set(values)) > 1:
            polynomial = fit(values, variables)
            sizes[atom] = size if polynomial is None else max(polynomial.at(wanted), 0)
    return sizes


def at_sizes(factors: GraphFactors, sizes: Sizes) -> GraphFactors:
    """The factors with these sizes of atoms in their trees. Leaves keep their old sizes, so that
    the same leaves can be split."""
    tensors = {name: _tensor(tensor, sizes) for name, tensor in factors.tensors.items()}
    ops = [_op(op, sizes) for op in factors.ops]
    return GraphFactors(tensors, ops, factors.open_atoms, factors.fused, factors.on_host)


def priced(factors: GraphFactors, each: Iterable[tuple[Sizes, float]]) -> GraphFactors:
    """The same factors, for which costs are computed at these sizes, with weights."""
    sized = [(weight, at_sizes(factors, sizes)) for sizes, weight in each]
    tensors = {
        name: replace(tensor, priced=tuple((w, at.tensors[name].dims) for w, at in sized))
        for name, tensor in factors.tensors.items()
    }
    ops = [
        replace(op, priced=tuple((w, at.ops[i]) for w, at in sized))
        for i, op in enumerate(factors.ops)
    ]
    return GraphFactors(tensors, ops, factors.open_atoms, factors.fused, factors.on_host)


def _tensor(tensor: TensorFactors, sizes: Sizes) -> TensorFactors:
    given = iter([sizes.get(leaf.atom) for leaf in tensor.leaves])
    return replace(tensor, dims=tuple(_resized(dim, given) for dim in tensor.dims))


def _op(op: OpFactors, sizes: Sizes) -> OpFactors:
    """The node with these sizes of atoms."""
    trees = {
        name: _resized(tree, iter([sizes.get(atom) for atom in op.atoms[name]]))
        for name, tree in op.trees.items()
    }
    rule_sizes = {n: None if size is None else trees[n].size for n, size in op.rule.sizes.items()}
    return replace(op, trees=trees, rule=replace(op.rule, sizes=rule_sizes))


def _resized(dim: Dim, sizes: Iterator[int | None]) -> Dim:
    """The tree with these sizes of its leaves, in order; None keeps a size."""
    if isinstance(dim, Factor):
        size = next(sizes) if dim.is_leaf else None
        return dim if size is None else SizedFactor(size)
    return type(dim)(tuple(_resized(child, sizes) for child in dim.children))
