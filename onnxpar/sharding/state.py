"""The sharding of a graph while it is being decided: mesh axes for the leaves of tensors and nodes.
A leaf is a part of a dimension that can be split.

Each leaf of a tensor or node has axes, or None while it is open (undecided). A `FactorSharding` is
the decided assignment of one tensor; applied to the tensor's dimensions, it becomes a `Layout`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import Costs
from onnxpar.cost.topology import Topology
from onnxpar.layout.layout import (
    Dim,
    Factor,
    Layout,
    Product,
    ReduceOp,
    estimated_size,
    largest_size,
    normalize,
)
from onnxpar.layout.mesh import Axes, Axis, Mesh, in_mesh_order, merge_axes, plain
from onnxpar.sharding.factors import OpFactors, Parts, TensorFactors, sizes_of, with_axes
from onnxpar.sharding.graph_factors import GraphFactors


@dataclass(frozen=True)
class FactorSharding:
    """The sharding of one tensor, without its sizes.

    leaves   the mesh axes of each splittable leaf (a part of a dimension); () for a whole leaf
    partial  the axes along which ranks hold terms of the value
    reduce   the reduction of these terms
    """

    leaves: tuple[Axes, ...]
    partial: Axes = ()
    reduce: ReduceOp = "sum"

    def __post_init__(self) -> None:
        object.__setattr__(self, "leaves", tuple(map(merge_axes, self.leaves)))
        if self.partial:
            object.__setattr__(self, "partial", merge_axes(in_mesh_order(plain(self.partial))))
        if not self.partial:
            object.__setattr__(self, "reduce", "sum")
        # searches look the same shardings up again and again
        object.__setattr__(self, "_hash", hash((self.leaves, self.partial, self.reduce)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __reduce__(self) -> tuple[object, ...]:
        return FactorSharding, (self.leaves, self.partial, self.reduce)  # hashes differ by process

    @property
    def is_whole(self) -> bool:
        """True if every rank holds the whole tensor."""
        return not self.partial and not any(self.leaves)

    def reduced(self) -> FactorSharding:
        """Returns the sharding after a reduction: the same axes on leaves (parts of dimensions),
        and no partial axes (along which ranks hold terms)."""
        return FactorSharding(self.leaves) if self.partial else self


Shapes = Sequence[tuple[float, tuple[int, ...]]]
"""(weight, shape of a shard) for each set of sizes at which costs are computed."""


@dataclass
class ShardingState:
    """The mesh axes of every tensor's leaves (by tensor) and of every node's leaves (by node); None
    for an open leaf (a part of a dimension), which is undecided.

    costs    cost model for communication and compute on the mesh
    pinned   tensors with a requested layout; producer and readers do not change the layout
    parts    shard sizes of an atom that the user gave, by atom and axes
    """

    mesh: Mesh
    factors: GraphFactors
    costs: Costs
    tensors: dict[str, list[Axes | None]] = field(default_factory=dict)
    ops: dict[str, list[Axes | None]] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    parts: dict[tuple[int, Axes], tuple[int, ...]] = field(default_factory=dict)
    _shapes: dict[tuple[str, FactorSharding], Shapes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @staticmethod
    def open(mesh: Mesh, factors: GraphFactors, topology: Topology | None = None) -> ShardingState:
        """Returns a state in which all leaves (parts of dimensions) are open (undecided); costs are
        those of the topology (None: the default one). Errors: StrategyError if the topology has
        fewer ranks than the mesh."""
        return ShardingState(
            mesh,
            factors,
            Costs((topology or Topology.default()).for_ranks(mesh.size), mesh),
            {name: [None] * len(t.leaves) for name, t in factors.tensors.items()},
            {op.node.name: [None] * len(op.leaves) for op in factors.ops},
        )

    def assign_tensor(self, name: str, leaf: int, axes: Axes) -> bool:
        """Splits an open leaf (a part of a dimension) of a tensor over `axes`. Returns False, and
        changes nothing, if the leaf is already decided, or another leaf of the tensor uses the
        axes."""
        have = self.tensors[name]
        if have[leaf] is not None or not _fits(self.factors.tensors[name], have, leaf, axes):
            return False
        have[leaf] = axes
        return True

    def assign_op(self, op: OpFactors, leaf: int, axes: Axes) -> bool:
        """Splits an open leaf (a part of a dimension) of a node, and all leaves tied to it, over
        `axes`. Returns False, and changes nothing, if one of these leaves is already decided, or
        another leaf of its node uses the axes."""
        together = self._tied_leaves(op, leaf)
        for other, i in together:
            have = self.ops[other.node.name]
            if have[i] is not None or not _fits(other, have, i, axes):
                return False
        for other, i in together:
            self.ops[other.node.name][i] = axes
        return True

    def fix(self, op: OpFactors, leaf: int, axes: Axes) -> None:
        """Splits a leaf (a part of a dimension) of a node, and the leaves bonded to it, over
        `axes`, even if they are decided. A bonded leaf is a leaf of a node that onnxruntime fuses
        with this one; it stays as it is if another leaf of its node uses the axes."""
        self.ops[op.node.name][leaf] = axes
        for other, i in self.factors.bonded(op, leaf):
            have = self.ops[other.node.name]
            if _fits(other, have, i, axes):
                have[i] = axes

    def close(self, op: OpFactors, leaf: int) -> None:
        """Makes a leaf (a part of a dimension) of a node and the leaves bonded to it whole, if they
        are open; leaves that are decided stay as they are."""
        for other, i in self.factors.bonded(op, leaf):
            have = self.ops[other.node.name]
            have[i] = () if have[i] is None else have[i]

    def close_tensor(self, name: str) -> None:
        """Makes all open leaves (parts of dimensions) of a tensor whole."""
        self.tensors[name] = [() if axes is None else axes for axes in self.tensors[name]]

    def _tied_leaves(self, op: OpFactors, leaf: int) -> list[tuple[OpFactors, int]]:
        """Returns this leaf (a part of a dimension), followed by all leaves that must have the same
        axes, as (node, leaf): bonded leaves (of nodes that onnxruntime fuses) and co-sharded
        leaves."""
        leaves = [(op, leaf)]
        for other, i in leaves:
            tied = [(other, j) for group in other.co_sharded if i in group for j in group]
            for new in [*self.factors.bonded(other, i), *tied]:
                if new not in leaves:
                    leaves.append(new)
        return leaves

    def settle(self) -> None:
        """Makes the axes of all nodes' leaves (parts of dimensions) legal (see `legalize`). Bonded
        leaves, which must have equal axes because onnxruntime fuses their nodes, all become whole
        if they then have different axes."""
        todo = list(self.factors.ops)
        while todo:
            op = todo.pop()
            self.legalize(op)
            for leaf, axes in enumerate(self.op_axes(op)):
                bonded = self.factors.bonded(op, leaf)
                if all((self.ops[o.node.name][i] or ()) == axes for o, i in bonded):
                    continue
                for other, i in bonded:
                    self.ops[other.node.name][i] = ()
                    todo.append(other)

    def legalize(self, op: OpFactors) -> None:
        """Makes factors whole that cannot be split as decided:

        - a reduced factor with some segments split (each rank would count the whole segments)
        - a factor whose shards must be contiguous, but would not be
        - co-sharded leaves (parts of dimensions) with different axes
        - the second leaf of a ring, if its axes overlap with the first leaf's axes, but differ
        """
        axes = self.ops[op.node.name]
        for name in {*op.rule.reduce, *op.rule.communicating, *op.rule.contiguous}:
            at = [i for i, leaf in enumerate(op.leaves) if leaf.factor == name]
            tree = (
                with_axes(op.trees[name], iter([(axes[i] or (), None) for i in at])) if at else None
            )
            is_covered = tree is None or covered_axes(tree) is not None
            is_covered |= self._may_overlap(op, name, axes)
            if tree and not (is_covered and self._is_contiguous(op, name, tree)):
                for i in at:
                    axes[i] = ()
        for group in op.co_sharded:
            if len({axes[i] or () for i in group}) > 1:
                for i in group:
                    axes[i] = ()
        for i, j in op.rings:
            if overlaps(axes[i] or (), axes[j] or ()) and axes[i] != axes[j]:
                axes[j] = ()

    def _may_overlap(self, op: OpFactors, factor: str, axes: Sequence[Axes | None]) -> bool:
        """True if ranks of a ring may hold some elements of a factor twice. False if the factor's
        size is open: ranks could not tell which elements are double. `axes` are those of all leaves
        (parts of dimensions) of the node."""

        def of(name: str) -> list[Axes]:
            return [axes[i] or () for i, leaf in enumerate(op.leaves) if leaf.factor == name]

        is_open = any(
            leaf.atom in self.factors.open_atoms for leaf in op.leaves if leaf.factor == factor
        )
        return not is_open and op.rule.may_overlap(factor, of)

    def _is_contiguous(self, op: OpFactors, factor: str, tree: Dim) -> bool:
        """True if the shards of the split `tree` are contiguous, or need not be."""
        return factor not in op.rule.contiguous or isinstance(normalize(tree), Factor)

    def op_axes(self, op: OpFactors) -> list[Axes]:
        """Returns the axes of every leaf (a part of a dimension) of a node; () for an open leaf."""
        return [axes or () for axes in self.ops[op.node.name]]

    def tensor_sharding(self, name: str) -> FactorSharding:
        """Returns the sharding of a tensor as decided so far; open leaves (parts of dimensions) are
        whole."""
        return FactorSharding(tuple(axes or () for axes in self.tensors.get(name, [])))

    def operand_sharding(self, op: OpFactors, links: Sequence[int | None]) -> FactorSharding:
        """Returns the sharding that a node requires of an operand, or produces for a result,
        without partial axes (along which ranks hold terms). `links` has the node's leaf (a part of
        a dimension) for each leaf of the tensor (`op.inputs[i]`, `op.outputs[i]`)."""
        axes = self.op_axes(op)
        return FactorSharding(tuple(() if link is None else axes[link] for link in links))

    def state_leaves(
        self, leaves: Sequence[Axes], source: str, result: str, name: str
    ) -> tuple[Axes, ...]:
        """Returns the axes for the leaves (parts of dimensions) of one tensor of a state pair, an
        input and the output that is its next value. A dimension that differs between both (a cache
        that grows) is whole.

        leaves          the axes of the leaves of `source`
        source, result  the names of the input and the output
        name            the tensor of the pair for which the axes are
        """
        tensors = self.factors.tensors
        by_dim: dict[int, list[Axes]] = defaultdict(list)
        for axes, dim in zip(leaves, tensors[source].dim_of_leaf, strict=True):
            by_dim[dim].append(axes)
        axes_of_leaves: list[Axes] = []
        for dim in dict.fromkeys(tensors[name].dim_of_leaf):
            grows = tensors[source].dims[dim] != tensors[result].dims[dim]
            count = tensors[name].dim_of_leaf.count(dim)
            axes_of_leaves += [()] * count if grows else by_dim[dim]
        return tuple(axes_of_leaves)

    def own_partial(self, op: OpFactors) -> tuple[Axes, ReduceOp]:
        """Returns the axes over which a node itself produces partial results (each rank holds one
        term), and the reduction. A MatMul whose inner dimension is split over tp gives ((tp,),
        "sum")."""
        axes: Axes = ()
        reduce: ReduceOp = "sum"
        for i, over in enumerate(self.op_axes(op)):
            if over and op.reduction(i):
                axes += tuple(a for a in plain(over) if a not in axes)
                reduce = op.reduction(i)  # type: ignore[assignment]
        return axes, reduce

    def parts_of_leaf(self, name: str, leaf: int, axes: Axes) -> Parts | None:
        """Returns `parts_of` the atom (a part of a dimension) of a tensor's leaf."""
        return self.parts_of(self.factors.tensors[name].leaves[leaf].atom, axes)

    def parts_of(self, atom: int, axes: Axes) -> Parts | None:
        """Returns the sizes of an atom's shards over `axes`: the sizes that the user gave, else the
        shares of ranks of unequal speed; None for default sizes. For an open size (known only at
        run time), the result is a proportion, which holds for all sizes."""
        if not axes or any(axis.at is not None for axis in axes):
            return None
        if self.parts and (by_hand := self.parts.get((atom, axes))):
            return by_hand
        is_open = atom in self.factors.open_atoms
        return self.costs.proportion(axes) if is_open else self.costs.shares(axes)

    def sizes_by_rank(self, atom: int, axes: Axes, size: int) -> Sequence[int]:
        """Returns each rank's number of elements of an atom (a part of a dimension) of `size`
        elements that is split over axes."""
        sizes = sizes_of(self.parts_of(atom, axes), size, axes)
        return [sizes[at] for at in self.costs.places(axes)]

    def layout(self, tensor: gs.Tensor | str, factor_sharding: FactorSharding) -> Layout:
        """Returns the layout that the factor sharding gives a tensor."""
        name = tensor if isinstance(tensor, str) else tensor.name
        return self._layout(name, factor_sharding, self.factors.tensors[name].dims)

    def costed_shapes(
        self, name: str, factor_sharding: FactorSharding, rank: int | None = None
    ) -> Shapes:
        """Returns (weight, shape of the tensor's largest shard) for each set of sizes at which
        costs are computed; with `rank`, the shape of this rank's shard."""
        if self.parts or rank is not None:
            return self._costed_shapes(name, factor_sharding, rank)
        key = name, factor_sharding
        if key not in self._shapes:
            self._shapes[key] = self._costed_shapes(*key)
        return self._shapes[key]

    def _costed_shapes(
        self, name: str, factor_sharding: FactorSharding, rank: int | None = None
    ) -> Shapes:
        factors = self.factors.tensors[name]
        splits: dict[int, DimSplit] = defaultdict(tuple)
        for axes, dim, leaf in zip(
            factor_sharding.leaves, factors.dim_of_leaf, factors.leaves, strict=True
        ):
            splits[dim] += ((axes, self.parts_of(leaf.atom, axes)),)
        at = None if rank is None else (self.mesh, rank)
        return [
            (weight, tuple(_part(d, splits[i], at) for i, d in enumerate(dims)))
            for weight, dims in factors.costed
        ]

    def _layout(self, name: str, factor_sharding: FactorSharding, of: tuple[Dim, ...]) -> Layout:
        factors = self.factors.tensors[name]
        splits = iter(
            (axes, self.parts_of(leaf.atom, axes))
            for leaf, axes in zip(factors.leaves, factor_sharding.leaves, strict=True)
        )
        dims = tuple(with_axes(dim, splits) for dim in of)
        return Layout(dims, factor_sharding.partial, factor_sharding.reduce)


DimSplit = tuple[tuple[Axes, Parts | None], ...]
"""Axes of each leaf of a dimension, and the sizes of its shards (None: default sizes)."""


@lru_cache(maxsize=1 << 16)
def _part(dim: Dim, split: DimSplit, at: tuple[Mesh, int] | None) -> int:
    """Returns the number of elements of a split dimension in the largest shard; with `at` (mesh and
    rank), in this rank's shard."""
    tree = with_axes(dim, iter(split))
    return largest_size(tree) if at is None else estimated_size(tree, *at)


def _fits(
    factors: TensorFactors | OpFactors, have: list[Axes | None], leaf: int, axes: Axes
) -> bool:
    """True if a leaf (a part of a dimension) of a tensor or node may have these axes: no other
    leaf uses them, except leaves in other segments of the dimension. `have` has the axes of all
    leaves."""
    used = (
        a for i, other in enumerate(have) if other and (i, leaf) not in factors.apart for a in other
    )
    return not overlaps(axes, used)


def covered_axes(dim: Dim) -> frozenset[Axis] | None:
    """Returns the axes that split every element of a dimension; None if its segments have different
    axes."""
    if isinstance(dim, Factor):
        return frozenset(dim.axes)
    by_child = [covered_axes(c) for c in dim.children if c.size]
    if None in by_child:
        return None
    sets = [f for f in by_child if f is not None]
    if isinstance(dim, Product):
        return frozenset[Axis]().union(*sets)
    return sets[0] if len(set(sets)) == 1 else None


def overlaps(axes: Iterable[Axis], used: Iterable[Axis]) -> bool:
    """True if one of `axes` has a factor in common with one of the axes `used`: tp and its sub-axis
    (a factor of a mesh axis) tp:(2)2 have."""
    taken = list(used)
    return any(a.overlaps(b) for a in axes for b in taken)
