"""The sharding of a graph during the decision: mesh axes for the leaves of tensors and nodes.

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
    """Axes per splittable leaf of a tensor, and the axes over which it is partial."""

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
        return not self.partial and not any(self.leaves)

    def reduced(self) -> FactorSharding:
        """The same axes, without partial axes."""
        return FactorSharding(self.leaves) if self.partial else self


Shapes = Sequence[tuple[float, tuple[int, ...]]]
"""Shapes of a shard, with their weights."""


@dataclass
class ShardingState:
    """Axes of every tensor's leaves (by tensor) and of every node's leaves (by node).

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
        """A state with all leaves open; costs are those of the topology (None: the default one).
        Errors: StrategyError if the topology has fewer ranks than the mesh."""
        return ShardingState(
            mesh,
            factors,
            Costs((topology or Topology.default()).for_ranks(mesh.size), mesh),
            {name: [None] * len(t.leaves) for name, t in factors.tensors.items()},
            {op.node.name: [None] * len(op.leaves) for op in factors.ops},
        )

    def assign_tensor(self, name: str, leaf: int, axes: Axes) -> bool:
        """Splits an open leaf of a tensor; False if the leaf is decided, or the axes are in use."""
        have = self.tensors[name]
        if have[leaf] is not None or not _fits(self.factors.tensors[name], have, leaf, axes):
            return False
        have[leaf] = axes
        return True

    def assign_op(self, op: OpFactors, leaf: int, axes: Axes) -> bool:
        """Splits an open leaf of a node, and all leaves tied to it; False if one of these leaves is
        decided, or the axes are in use."""
        together = self._tied_leaves(op, leaf)
        for other, i in together:
            have = self.ops[other.node.name]
            if have[i] is not None or not _fits(other, have, i, axes):
                return False
        for other, i in together:
            self.ops[other.node.name][i] = axes
        return True

    def fix(self, op: OpFactors, leaf: int, axes: Axes) -> None:
        """Splits a leaf of a node over `axes`, and the leaves bonded to it, even decided leaves. A
        bonded leaf stays as it is if another leaf uses the axes."""
        self.ops[op.node.name][leaf] = axes
        for other, i in self.factors.bonded(op, leaf):
            have = self.ops[other.node.name]
            if _fits(other, have, i, axes):
                have[i] = axes

    def close(self, op: OpFactors, leaf: int) -> None:
        """Makes a leaf of a node and the leaves bonded to it whole, as far as they are open."""
        for other, i in self.factors.bonded(op, leaf):
            have = self.ops[other.node.name]
            have[i] = () if have[i] is None else have[i]

    def close_tensor(self, name: str) -> None:
        """Makes all open leaves of a tensor whole."""
        self.tensors[name] = [() if axes is None else axes for axes in self.tensors[name]]

    def _tied_leaves(self, op: OpFactors, leaf: int) -> list[tuple[OpFactors, int]]:
        """This leaf, followed by all leaves that must have the same axes: bonded or co-sharded."""
        leaves = [(op, leaf)]
        for other, i in leaves:
            tied = [(other, j) for group in other.co_sharded if i in group for j in group]
            for new in [*self.factors.bonded(other, i), *tied]:
                if new not in leaves:
                    leaves.append(new)
        return leaves

    def settle(self) -> None:
        """Legalizes every node; bonded leaves whose axes differ then become whole."""
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
        - co-sharded leaves with different axes
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
        """True if ranks of a ring may hold some elements of a factor twice. Not if its size is
        open: ranks could not tell which elements are double."""

        def of(name: str) -> list[Axes]:
            return [axes[i] or () for i, leaf in enumerate(op.leaves) if leaf.factor == name]

        is_open = any(
            leaf.atom in self.factors.open_atoms for leaf in op.leaves if leaf.factor == factor
        )
        return not is_open and op.rule.may_overlap(factor, of)

    def _is_contiguous(self, op: OpFactors, factor: str, tree: Dim) -> bool:
        return factor not in op.rule.contiguous or isinstance(normalize(tree), Factor)

    def op_axes(self, op: OpFactors) -> list[Axes]:
        """The axes of every leaf of a node; an open leaf counts as whole."""
        return [axes or () for axes in self.ops[op.node.name]]

    def tensor_sharding(self, name: str) -> FactorSharding:
        """The sharding of a tensor as decided so far; an open leaf counts as whole."""
        return FactorSharding(tuple(axes or () for axes in self.tensors.get(name, [])))

    def operand_sharding(self, op: OpFactors, links: Sequence[int | None]) -> FactorSharding:
        """The sharding that a node requires of an operand, or produces for a result, without
        partial axes."""
        axes = self.op_axes(op)
        return FactorSharding(tuple(() if link is None else axes[link] for link in links))

    def state_leaves(
        self, leaves: Sequence[Axes], source: str, result: str, name: str
    ) -> tuple[Axes, ...]:
        """Axes for the leaves of `name`, the `source` or `result` of a state pair, if the leaves of
        `source` have the axes `leaves`; dimensions that grow are whole."""
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
        """The axes over which the node produces partial results, and the reduction."""
        axes: Axes = ()
        reduce: ReduceOp = "sum"
        for i, over in enumerate(self.op_axes(op)):
            if over and op.reduction(i):
                axes += tuple(a for a in plain(over) if a not in axes)
                reduce = op.reduction(i)  # type: ignore[assignment]
        return axes, reduce

    def parts_of_leaf(self, name: str, leaf: int, axes: Axes) -> Parts | None:
        """The result of `parts_of` for a leaf of a tensor."""
        return self.parts_of(self.factors.tensors[name].leaves[leaf].atom, axes)

    def parts_of(self, atom: int, axes: Axes) -> Parts | None:
        """Sizes of an atom's shards that the user gave, else the shares of the ranks along the
        axes; None for default sizes. An open size has a proportion that holds for all sizes."""
        if not axes or any(axis.at is not None for axis in axes):
            return None
        if self.parts and (by_hand := self.parts.get((atom, axes))):
            return by_hand
        is_open = atom in self.factors.open_atoms
        return self.costs.proportion(axes) if is_open else self.costs.shares(axes)

    def sizes_by_rank(self, atom: int, axes: Axes, size: int) -> Sequence[int]:
        """Each rank's number of elements of an atom that is split over axes."""
        sizes = sizes_of(self.parts_of(atom, axes), size, axes)
        return [sizes[at] for at in self.costs.places(axes)]

    def layout(self, tensor: gs.Tensor | str, factor_sharding: FactorSharding) -> Layout:
        """The factor sharding as a layout of the tensor's dimensions."""
        name = tensor if isinstance(tensor, str) else tensor.name
        return self._layout(name, factor_sharding, self.factors.tensors[name].dims)

    def costed_shapes(
        self, name: str, factor_sharding: FactorSharding, rank: int | None = None
    ) -> Shapes:
        """(weight, shape of the largest shard, or of the shard of `rank`) at each of the sizes for
        which costs are computed."""
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
    """The number of elements of a split dimension in the largest shard, or in the shard of a rank
    (`at`: mesh and rank)."""
    tree = with_axes(dim, iter(split))
    return largest_size(tree) if at is None else estimated_size(tree, *at)


def _fits(
    factors: TensorFactors | OpFactors, have: list[Axes | None], leaf: int, axes: Axes
) -> bool:
    """True if no other leaf uses the axes; leaves in different segments may share them."""
    used = (
        a for i, other in enumerate(have) if other and (i, leaf) not in factors.apart for a in other
    )
    return not overlaps(axes, used)


def covered_axes(dim: Dim) -> frozenset[Axis] | None:
    """The axes that split every element; None if the segments' axes differ."""
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
    """True if one of the axes overlaps one of the axes `used`."""
    taken = list(used)
    return any(a.overlaps(b) for a in axes for b in taken)
