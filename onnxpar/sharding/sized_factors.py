"""Recomputes the factors of a graph for other sizes than those at which the graph was analysed.

The compiler analyses a graph at distinct sizes, so that no two dimensions are equal by chance. It
computes costs at the sizes of real runs, where a batch may be 1: there, a dimension that can be
split may have one element or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from onnxpar.graph.tensors import tensor_shape
from onnxpar.layout.fits import fit
from onnxpar.layout.layout import Concat, Dim, Factor, SizedFactor, leaves
from onnxpar.layout.symbols import Binding, Variable
from onnxpar.rules.rule import Rule
from onnxpar.sharding.factors import OpFactors, TensorFactors
from onnxpar.sharding.graph_factors import GraphFactors

Sizes = Mapping[int, int]
"""The number of elements of each atom, by the atom's number."""
Sample = tuple[Mapping[Variable, int], GraphFactors]
"""The values of symbols and quotients at one binding of the open sizes, and the graph's factors
there."""


def atom_sizes(samples: Sequence[Sample], wanted: Binding) -> Sizes:
    """Returns the number of elements of each atom (a part of a dimension) whose size is not equal
    in all samples, at the binding `wanted`: a polynomial in the open sizes (known only at run time)
    that fits the samples gives it. An atom that no polynomial fits keeps its size in the first
    sample."""
    sizes_by_sample = [
        {leaf.atom: leaf.size for op in factors.ops for leaf in op.leaves}
        | {leaf.atom: leaf.size for t in factors.tensors.values() for leaf in t.leaves}
        for _, factors in samples
    ]
    variables = {name: [values[name] for values, _ in samples] for name in samples[0][0]}
    sizes: dict[int, int] = {}
    for atom, size in sizes_by_sample[0].items():
        values = [at.get(atom, size) for at in sizes_by_sample]
        if len(set(values)) > 1:
            polynomial = fit(values, variables)
            sizes[atom] = size if polynomial is None else max(polynomial.at(wanted), 0)
    return sizes


def at_sizes(factors: GraphFactors, sizes: Sizes) -> GraphFactors:
    """Returns the factors with these sizes of atoms (parts of dimensions) in their trees. Leaves
    keep their old sizes, so that the same leaves can be split."""
    tensors = {name: _tensor(tensor, sizes) for name, tensor in factors.tensors.items()}
    return replace(factors, tensors=tensors, ops=[_op(op, sizes) for op in factors.ops])


def is_hidden(rule: Rule, other: OpFactors) -> bool:
    """True if the node `other` tells nothing about its dimensions: its tensors are empty at its
    sizes, so its rule names other dimensions than `rule`, the same node's rule at the base
    sizes."""
    tensors = (*other.node.inputs, *other.node.outputs)
    return not is_alike(rule, other.rule) and any(0 in (tensor_shape(t) or ()) for t in tensors)


def is_alike(one: Rule, other: Rule) -> bool:
    """True if two rules of a node give each operand and result the same number of dimensions."""
    pairs = zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    return all(len(a or ()) == len(b or ()) for a, b in pairs)


def aligned(base: GraphFactors, other: GraphFactors) -> GraphFactors | None:
    """Returns the factors `other` with the leaves (parts of dimensions) of `base`, the factors of
    the same graph at other sizes. In `other`, a dimension of one element or none is no leaf; in the
    result, it is.

    None if the sizes of dimensions do not determine the sizes of all leaves, or contradict each
    other.
    """
    sizes: dict[int, int] = {}
    common = {name: base.tensors[name] for name in other.tensors}  # passes add tensors to `base`
    equations = [
        (op.trees[name], op.atoms[name], size)
        for op, own in zip(base.ops, other.ops, strict=True)
        for name, size in own.rule.sizes.items()
        if size is not None and not is_hidden(op.rule, own)
    ]
    for name, tensor in common.items():
        pairs = list(zip(tensor.leaves, tensor.dim_of_leaf, strict=True))
        for axis, dim in enumerate(other.tensors[name].dims):
            atoms = tuple(leaf.atom for leaf, at in pairs if at == axis)
            equations.append((tensor.dims[axis], atoms, dim.size))
    unknown = {atom for _, atoms, _ in equations for atom in atoms}
    while unknown - sizes.keys():
        before = len(sizes)
        for tree, atoms, size in equations:
            if not _solve(tree, list(atoms), size, sizes):
                return None
        if len(sizes) == before:
            return None
    tensors = {
        name: replace(
            tensor,
            dims=tuple(
                _sized_as(dim, own.size, resized)
                for dim, own, resized in zip(
                    tensor.dims, other.tensors[name].dims, _tensor(tensor, sizes).dims, strict=True
                )
            ),
            leaves=tuple(replace(leaf, size=sizes[leaf.atom]) for leaf in tensor.leaves),
            priced=(),
        )
        for name, tensor in common.items()
    }
    for name, tensor in tensors.items():
        own_sizes = [dim.size for dim in other.tensors[name].dims]
        if [dim.size for dim in tensor.dims] != own_sizes:
            return None  # a segment of one element, which is no leaf, has none in `other`
    ops = [_resize_op(op, own, sizes) for op, own in zip(base.ops, other.ops, strict=True)]
    return replace(other, tensors=tensors, ops=ops, open_atoms=base.open_atoms)


def _resize_op(op: OpFactors, own: OpFactors, sizes: Sizes) -> OpFactors:
    """Returns the factors of the node `op` at other sizes of atoms (parts of dimensions); `own` has
    the factors that the analysis found there."""
    resized = _op(op, sizes).trees
    own_leaves = tuple(replace(leaf, size=sizes[leaf.atom]) for leaf in op.leaves)
    rule, trees = own.rule, resized
    if is_hidden(op.rule, own):
        rule = replace(op.rule, sizes={name: tree.size for name, tree in resized.items()})
    else:
        trees = {
            name: _sized_as(tree, rule.sizes[name], resized[name])
            for name, tree in op.trees.items()
        }
    same = replace(op, node=own.node, graph=own.graph, bodies=own.bodies, priced=())
    return replace(same, rule=rule, trees=trees, leaves=own_leaves)


def _sized_as(dim: Dim, size: int | None, resized: Dim) -> Dim:
    """Returns `resized`, the tree `dim` with other sizes of its leaves (parts of dimensions). If
    `dim` is a single factor of one element, it has no leaf whose size could change, so a factor of
    `size` is returned, if not None."""
    is_one = isinstance(dim, Factor) and not dim.is_leaf and size is not None
    return Factor(size) if is_one and size is not None else resized


def _solve(tree: Dim, atoms: list[int], size: int, sizes: dict[int, int]) -> bool:
    """Adds to `sizes` the sizes of atoms (parts of dimensions) that follow from a dimension's size
    and the known sizes: 12 = 3 * n gives n = 4. False if sizes contradict each other.

    atoms  the atoms of the tree's leaves, in order
    size   the size of the dimension
    """
    if isinstance(tree, Factor):
        return not tree.is_leaf or sizes.setdefault(atoms[0], size) == size
    parts: list[list[int]] = []
    for child in tree.children:
        count = sum(leaf.is_leaf for leaf in leaves(child))
        parts.append(atoms[:count])
        atoms = atoms[count:]
    unknown = [i for i, own in enumerate(parts) if any(atom not in sizes for atom in own)]
    if len(unknown) != 1:
        return True
    known_sizes = [
        _resized(child, iter([sizes[atom] for atom in own])).size
        for i, (child, own) in enumerate(zip(tree.children, parts, strict=True))
        if i != unknown[0]
    ]
    if isinstance(tree, Concat):
        rest = size - sum(known_sizes)
    elif math.prod(known_sizes):
        rest = size // math.prod(known_sizes)
    else:
        return True
    return _solve(tree.children[unknown[0]], parts[unknown[0]], rest, sizes)


def priced(factors: GraphFactors, samples: Iterable[tuple[Sizes, float]]) -> GraphFactors:
    """Returns the factors with costs computed at these (sizes of atoms, weight) samples."""
    sized = [(weight, at_sizes(factors, sizes)) for sizes, weight in samples]
    tensors = {
        name: replace(tensor, priced=tuple((w, at.tensors[name].dims) for w, at in sized))
        for name, tensor in factors.tensors.items()
    }
    ops = [
        replace(op, priced=tuple((w, at.ops[i]) for w, at in sized))
        for i, op in enumerate(factors.ops)
    ]
    return replace(factors, tensors=tensors, ops=ops)


def _tensor(tensor: TensorFactors, sizes: Sizes) -> TensorFactors:
    """Returns the factors of a tensor with these sizes of atoms (parts of dimensions) in its
    trees."""
    leaf_sizes = iter([sizes.get(leaf.atom) for leaf in tensor.leaves])
    return replace(tensor, dims=tuple(_resized(dim, leaf_sizes) for dim in tensor.dims))


def _op(op: OpFactors, sizes: Sizes) -> OpFactors:
    """Returns the factors of a node with these sizes of atoms (parts of dimensions) in its trees
    and its rule."""
    trees = {
        name: _resized(tree, iter([sizes.get(atom) for atom in op.atoms[name]]))
        for name, tree in op.trees.items()
    }
    rule_sizes = {n: None if size is None else trees[n].size for n, size in op.rule.sizes.items()}
    return replace(op, trees=trees, rule=replace(op.rule, sizes=rule_sizes))


def _resized(dim: Dim, sizes: Iterator[int | None]) -> Dim:
    """Returns the tree with these sizes of its leaves (parts of dimensions), in order; None keeps a
    leaf's size."""
    if isinstance(dim, Factor):
        size = next(sizes) if dim.is_leaf else None
        return dim if size is None else SizedFactor(size)
    return type(dim)(tuple(_resized(child, sizes) for child in dim.children))
