"""The factors of a whole graph: the atoms that each dimension of each tensor consists of.

An *atom* is an index variable that no op cuts further: the 192 columns of a fused QKV weight are
`h d + h d + h d`, because a Reshape far downstream separates heads. A sharding assigns mesh axes to
atoms, so no split cuts a unit of any op. `analysis.py` finds the atoms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_graphsurgeon as gs

from onnxpar.graph.interchange import is_weight
from onnxpar.layout.layout import Dim, Factor, Layout, SizedFactor, default_parts
from onnxpar.layout.layout import leaves as leaves_of
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.layout.shares import Proportion, Shares
from onnxpar.rules.rule import Rule
from onnxpar.sharding.bonds import edges_of, groups
from onnxpar.sharding.in_convolutions import in_convolutions
from onnxpar.sharding.in_loops import InLoop, in_loops
from onnxpar.sharding.lifetimes import lifetimes
from onnxpar.sharding.mixtures import Mixture


@dataclass(frozen=True)
class Leaf:
    """An occurrence of an atom in a tensor; a leaf of two or more elements can be split."""

    atom: int
    size: int


Pairs = frozenset[tuple[int, int]]
"""Pairs of leaves (in both orders) in different segments, which may be split over the same axis."""


@dataclass(frozen=True)
class TensorFactors:
    """Dimensions of a tensor as unsplit trees, and their splittable leaves in order.

    apart   pairs of leaves that may be split over the same axis
    open    leaves of the dimensions whose size is data-dependent
    priced  (weight, dimensions) at the sizes for which costs are computed; weights add up to 1.
            Empty: costs are computed at the sizes of `dims`
    """

    dims: tuple[Dim, ...]
    leaves: tuple[Leaf, ...]
    dim_of_leaf: tuple[int, ...]
    apart: Pairs = frozenset()
    open: frozenset[int] = frozenset()
    priced: tuple[tuple[float, tuple[Dim, ...]], ...] = ()

    @property
    def costed(self) -> tuple[tuple[float, tuple[Dim, ...]], ...]:
        """(weight, dimensions) at each of the sizes for which costs are computed."""
        return self.priced or ((1.0, self.dims),)


@dataclass(frozen=True)
class OpLeaf:
    """A splittable index variable of a node: an atom in one of its rule's factors."""

    atom: int
    size: int
    factor: str


Links = tuple[int | None, ...]
"""For each leaf of a tensor, the index of the node's leaf that has the same axes; None for a leaf
that stays whole."""


@dataclass(frozen=True, eq=False)
class BodyFactors:
    """A subgraph that is split together with its node, with the links of its inputs and outputs."""

    graph: gs.Graph
    inputs: tuple[Links, ...]
    outputs: tuple[Links, ...]


@dataclass(frozen=True)
class Chosen:
    """The choice of a mixture's router.

    share  the share of pairs of an expert and a row that the router chooses, on average
    atom   the atom of experts
    rows   the atoms of rows, which distinguish tensors of rows from gradients of weights; may be
           empty
    """

    share: float
    atom: int
    rows: frozenset[int] = frozenset()


@dataclass(eq=False)
class OpFactors:
    """A node's rule over atoms.

    graph      the scope of the node
    inputs     links of each operand: `inputs[i][j]` is the node's leaf for leaf j of operand i
    outputs    links of each result
    whole      factors that stay whole, each with the reason
    trees      the rule's factors, unsplit
    atoms      the atoms of each factor's leaves
    co_sharded leaves that are split over the same axes, or not at all
    rings      pairs of leaves of the rule's rings, in order; `apart` has these pairs, too
    bodies     subgraphs that are split together with the node
    result     name of the first result before passes replace it
    priced     the node at the sizes for which costs are computed, as in `TensorFactors`
    chosen     of a node of a mixture of experts: the rows that ranks compute
    """

    node: gs.Node
    graph: gs.Graph
    rule: Rule
    leaves: tuple[OpLeaf, ...]
    inputs: tuple[Links, ...]
    outputs: tuple[Links, ...]
    whole: dict[str, str] = field(default_factory=dict)
    trees: dict[str, Dim] = field(default_factory=dict)
    apart: Pairs = frozenset()
    co_sharded: tuple[tuple[int, ...], ...] = ()
    rings: Pairs = frozenset()
    bodies: tuple[BodyFactors, ...] = ()
    result: str = ""
    atoms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    priced: tuple[tuple[float, OpFactors], ...] = ()
    chosen: Chosen | None = None

    @property
    def costed(self) -> tuple[tuple[float, OpFactors], ...]:
        """(weight, node) at each of the sizes for which costs are computed."""
        return self.priced or ((1.0, self),)

    def operands(self) -> Iterator[tuple[gs.Tensor, Links]]:
        """The operands and results of the node, then of its bodies, each with its links."""
        yield from zip(self.node.inputs, self.inputs, strict=True)
        yield from zip(self.node.outputs, self.outputs, strict=True)
        for body in self.bodies:
            yield from zip(body.graph.outputs, body.outputs, strict=True)
            yield from zip(body.graph.inputs, body.inputs, strict=True)

    def computed(self, axes: Sequence[Axes]) -> float:
        """The share of its rows that a rank computes if the node's leaves are split over these
        axes: 1, unless the pass compact-experts leaves rows out."""
        if self.chosen is None:
            return 1.0
        split = zip(self.leaves, axes, strict=True)
        experts = [(leaf.size, over) for leaf, over in split if leaf.atom == self.chosen.atom]
        fits = all(parts_over(over) <= size for size, over in experts)
        return self.chosen.share if fits else 1.0

    def extent(self, leaf: int) -> int:
        """The number of a leaf's elements in the node's trees; may differ from the leaf's size."""
        op_leaf = self.leaves[leaf]
        sizes = (f.size for f in leaves_of(self.trees[op_leaf.factor]) if f.is_leaf)
        return dict(zip(self.atoms[op_leaf.factor], sizes, strict=True))[op_leaf.atom]

    def reduction(self, leaf: int) -> str | None:
        """The reduction that results need if this leaf is split; None if no reduction is needed."""
        return self.rule.reduce.get(self.leaves[leaf].factor)


@dataclass(eq=False)
class GraphFactors:
    """The factors of all tensors, by name, and of all nodes.

    ops         in graph order; nodes of a body come before the node that has the body
    open_atoms  atoms whose size is data-dependent
    fused       tensors between nodes that onnxruntime fuses, and weights in attributes; they are
                never resharded
    on_host     tables that stay in files, and the results that replace them
    in_file     the names in the file of tensors that the loader has renamed
    mixtures    the mixtures of experts

    `in_convolutions` has the names of nodes that onnxruntime runs inside convolutions; `lifetimes`
    has the bytes that are written while a tensor lives, by name of the tensor.
    """

    tensors: dict[str, TensorFactors]
    ops: list[OpFactors]
    open_atoms: frozenset[int] = frozenset()
    fused: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()
    in_file: Mapping[str, str] = field(default_factory=dict)
    mixtures: Sequence[Mixture] = ()

    def op(self, name: str) -> OpFactors:
        """The factors of the node of that name. Errors: KeyError."""
        return self._by_name[name]

    @property
    def file_names(self) -> dict[str, str]:
        """Current names of renamed tensors, by name in the file; without names that are in use."""
        renamed = ((old, new) for new, old in self.in_file.items() if new in self.tensors)
        return {old: new for old, new in renamed if old not in self.tensors}

    def find(self, name: str) -> OpFactors | None:
        """The factors of the node of that name; None if there is no such node."""
        return self._by_name.get(name)

    def __post_init__(self) -> None:
        self._by_name = {op.node.name: op for op in self.ops}
        self.in_convolutions = in_convolutions(op.node for op in self.ops)
        self.lifetimes = lifetimes((op.node for op in self.ops), self.tensors)
        self._shares = {
            tensor.name: op.chosen.share
            for op in self.ops
            if op.chosen is not None
            for tensor in op.node.outputs
            if self.is_of_experts(tensor, op.chosen)
        }
        self._bonded: dict[tuple[str, int], list[tuple[OpFactors, int]]] = {}
        for group in groups(self.ops, edges_of(self.ops, self.fused)):
            members = [(self.ops[n], leaf) for n, leaf in sorted(group)]
            self._bonded |= {(op.node.name, leaf): members for op, leaf in members}

    @cached_property
    def in_loops(self) -> Mapping[str, InLoop]:
        """The memory accesses of nodes that run in a fused elementwise loop, by node name."""
        return in_loops(self.ops, self.tensors)

    def bonded(self, op: OpFactors, leaf: int) -> Sequence[tuple[OpFactors, int]]:
        """All leaves that must be split over the same axes as this leaf, including this leaf, as
        (node, leaf)."""
        return self._bonded.get((op.node.name, leaf)) or [(op, leaf)]

    def share(self, name: str, layout: Layout) -> float:
        """The share of a tensor that ranks compute: less than 1 for rows of experts, if each rank
        has an expert. `name` may be the name of the tensor's copy in another layout."""
        share = self._shares.get(name) or self._shares.get(name.rpartition("@")[0]) or 1.0
        return share if share < 1 and all(map(min, _parts(layout.dims[0]))) else 1.0

    def share_over(self, name: str, axes: Sequence[Axes]) -> float:
        """Like `share`, for a tensor whose leaves are split over these axes."""
        share = self._shares.get(name, 1.0)
        fits = share == 1 or parts_over(axes[0]) <= self.tensors[name].leaves[0].size
        return share if fits else 1.0

    def is_of_experts(self, tensor: gs.Tensor, chosen: Chosen) -> bool:
        """True if a tensor's first dimension is the dimension of experts, and the tensor is neither
        a weight nor the gradient of a weight."""
        factors = self.tensors.get(tensor.name)
        if factors is None or is_weight(tensor) or not factors.leaves:
            return False
        if chosen.rows.isdisjoint(leaf.atom for leaf in factors.leaves) and chosen.rows:
            return False
        return factors.leaves[0].atom == chosen.atom and factors.dim_of_leaf[0] == 0

    def opened(self, other: GraphFactors) -> GraphFactors:
        """These factors; atoms that have another size in `other` become open."""
        sizes = {leaf.atom: leaf.size for op in other.ops for leaf in op.leaves}
        leaves = [leaf for op in self.ops for leaf in op.leaves]
        atoms = frozenset(x.atom for x in leaves if sizes.get(x.atom, x.size) != x.size)
        tensors = {name: replace(t, open=_open(t, atoms)) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, open_atoms=atoms)


def _parts(dim: Dim) -> list[tuple[int, ...]]:
    return [leaf.part_sizes() for leaf in leaves_of(dim)]


def _open(tensor: TensorFactors, atoms: frozenset[int]) -> frozenset[int]:
    """The leaves of dimensions that contain an open atom."""
    pairs = list(zip(tensor.leaves, tensor.dim_of_leaf, strict=True))
    dims = {dim for leaf, dim in pairs if leaf.atom in atoms}
    return frozenset(i for i, (_, dim) in enumerate(pairs) if dim in dims)


Parts = tuple[int, ...] | Shares | Proportion
"""Sizes of the shards of a leaf, or the ranks' shares, which determine the sizes."""


def sizes_of(parts: Parts | None, size: int, axes: Axes) -> tuple[int, ...]:
    """Sizes of the shards of a leaf that is split over axes; without `parts`, default sizes."""
    if size > 0 and isinstance(parts, (Shares, Proportion)):
        return parts.sizes(size)
    return parts if isinstance(parts, tuple) else default_parts(size, axes)


def with_axes(dim: Dim, axes: Iterator[tuple[Axes, Parts | None]]) -> Dim:
    """Assigns axes and part sizes to the splittable leaves of a tree, in order; leaves after the
    end of the iterator are whole."""
    if isinstance(dim, Factor):
        if not dim.is_leaf:
            return dim
        over, parts = next(axes, ((), None))
        if isinstance(parts, Shares):
            parts = parts.sizes(dim.size) if over and dim.size > 0 else None
        elif isinstance(parts, Proportion):
            parts = parts if over and dim.size >= 0 else None
        elif isinstance(dim, SizedFactor):  # sizes by hand hold for one size of the dimension
            parts = parts if parts and sum(parts) == dim.size else None
        return type(dim)(dim.size, over, parts)
    return type(dim)(tuple(with_axes(c, axes) for c in dim.children))
