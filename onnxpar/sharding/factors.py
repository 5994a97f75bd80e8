"""The factors of a whole graph: the atoms of which each dimension of each tensor consists.

An *atom* is a part of a dimension that no op divides further: the 192 columns of a fused QKV weight
are `h d + h d + h d`, because a Reshape far downstream separates heads. A *leaf* is an occurrence
of an atom in a tensor or node. A sharding assigns mesh axes to leaves, so no split cuts a unit of
any op. `analysis.py` finds the atoms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.layout.layout import Dim, Factor, SizedFactor, default_parts
from onnxpar.layout.layout import leaves as leaves_of
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.layout.shares import Proportion, Shares
from onnxpar.rules.rule import Rule


@dataclass(frozen=True)
class Leaf:
    """An occurrence of an atom in a tensor. Only atoms of two or more elements are leaves: they can
    be split. `atom` is the atom's number, `size` its number of elements."""

    atom: int
    size: int


Pairs = frozenset[tuple[int, int]]
"""Pairs of leaves, in both orders, that may be split over the same axis; `apart.py` says why."""


@dataclass(frozen=True)
class TensorFactors:
    """The dimensions of a tensor as trees of factors without mesh axes, and the trees' leaves
    (parts of dimensions).

    dims         a tree for each dimension
    leaves       the splittable leaves of all trees, in order
    dim_of_leaf  for each leaf, the index of its dimension
    apart        pairs of leaves that may be split over the same axis
    open         indices of the leaves of dimensions whose size is data-dependent
    priced       (weight, trees of the dimensions) for each set of sizes at which costs are
                 computed; weights add up to 1. Empty: costs are computed at the sizes of `dims`
    """

    dims: tuple[Dim, ...]
    leaves: tuple[Leaf, ...]
    dim_of_leaf: tuple[int, ...]
    apart: Pairs = frozenset()
    open: frozenset[int] = frozenset()
    priced: tuple[tuple[float, tuple[Dim, ...]], ...] = ()

    @property
    def costed(self) -> tuple[tuple[float, tuple[Dim, ...]], ...]:
        """(weight, trees of the dimensions) for each set of sizes at which costs are computed."""
        return self.priced or ((1.0, self.dims),)


@dataclass(frozen=True)
class OpLeaf:
    """An occurrence of an atom (a part of a dimension) in a node, which can be split. `factor` is
    the factor of the node's rule that contains the atom: k in `m k, k n -> m n`."""

    atom: int
    size: int
    factor: str


Links = tuple[int | None, ...]
"""For each leaf of a tensor, the index of the node's leaf that has the same axes; None for a leaf
that the node needs whole."""


@dataclass(frozen=True, eq=False)
class BodyFactors:
    """The body of an If, Loop or Scan whose dimensions are split as its node's are. `inputs` and
    `outputs` are the links of the body's inputs and outputs to leaves (parts of dimensions) of the
    node."""

    graph: gs.Graph
    inputs: tuple[Links, ...]
    outputs: tuple[Links, ...]


@dataclass(frozen=True)
class Chosen:
    """How many rows the router of a mixture of experts chooses.

    share  the share of all pairs (expert, row) that the router chooses, on average
    atom   the atom (a part of a dimension) of the dimension of experts
    rows   the atoms of rows: a tensor without any of them is a gradient of weights, of which all
           elements are computed; empty if there is no backward pass
    """

    share: float
    atom: int
    rows: frozenset[int] = frozenset()


@dataclass(eq=False)
class OpFactors:
    """A node, and the leaves (parts of dimensions) that mesh axes may split: its sharding rule,
    expressed in atoms.

    graph      the graph or body that contains the node
    leaves     the splittable leaves of all factors
    inputs     links of each operand: `inputs[i][j]` is the node's leaf for leaf j of operand i
    outputs    links of each result
    whole      factors that stay whole, each with the reason
    trees      the rule's factors, as trees without mesh axes
    atoms      the atoms of each factor's leaves
    apart      pairs of leaves that may be split over the same axis
    co_sharded groups of leaves that are split over the same axes, or not at all
    rings      pairs of leaves (first, second) that the same axes may split: the shards of the
               second travel in a ring. `apart` has these pairs, too
    bodies     subgraphs that are split together with the node
    result     name of the first result before passes replace it
    priced     (weight, this node's factors) for each set of sizes at which costs are computed
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
        """(weight, factors of the node) for each set of sizes at which costs are computed. Weights
        add up to 1; without such sizes, there is one entry, this object with the weight 1."""
        return self.priced or ((1.0, self),)

    def operands(self) -> Iterator[tuple[gs.Tensor, Links]]:
        """Yields the operands and results of the node, then of its bodies, each with its links."""
        yield from zip(self.node.inputs, self.inputs, strict=True)
        yield from zip(self.node.outputs, self.outputs, strict=True)
        for body in self.bodies:
            yield from zip(body.graph.outputs, body.outputs, strict=True)
            yield from zip(body.graph.inputs, body.inputs, strict=True)

    def computed(self, axes: Sequence[Axes]) -> float:
        """Returns the share of its rows that a rank computes if the node's leaves (parts of
        dimensions) are split over `axes` (axes of each leaf). The share is below 1 only for a node
        of a mixture of experts: ranks then leave out rows that the router does not choose (pass
        compact-experts)."""
        if self.chosen is None:
            return 1.0
        split = zip(self.leaves, axes, strict=True)
        experts = [(leaf.size, over) for leaf, over in split if leaf.atom == self.chosen.atom]
        fits = all(parts_over(over) <= size for size, over in experts)
        return self.chosen.share if fits else 1.0

    def extent(self, leaf: int) -> int:
        """Returns the number of elements, in `trees`, of the node's leaf (a part of a dimension)
        number `leaf`. It differs from `leaves[leaf].size` if the trees are at other sizes, at which
        costs are computed."""
        op_leaf = self.leaves[leaf]
        sizes = (f.size for f in leaves_of(self.trees[op_leaf.factor]) if f.is_leaf)
        return dict(zip(self.atoms[op_leaf.factor], sizes, strict=True))[op_leaf.atom]

    def reduction(self, leaf: int) -> str | None:
        """Returns the reduction ("sum", "max", ...) that the results need if this leaf (a part of a
        dimension) is split; None if they need none."""
        return self.rule.reduce.get(self.leaves[leaf].factor)


Parts = tuple[int, ...] | Shares | Proportion
"""Sizes of a leaf's shards, or the ranks' shares of the leaf, which determine the sizes."""


def sizes_of(parts: Parts | None, size: int, axes: Axes) -> tuple[int, ...]:
    """Returns the sizes of the shards of a leaf (a part of a dimension) of `size` elements that is
    split over `axes`. Without `parts`, they are as equal as possible: 14 elements over 4 ranks
    become (4, 4, 3, 3)."""
    if size > 0 and isinstance(parts, (Shares, Proportion)):
        return parts.sizes(size)
    return parts if isinstance(parts, tuple) else default_parts(size, axes)


def with_axes(dim: Dim, axes: Iterator[tuple[Axes, Parts | None]]) -> Dim:
    """Returns a tree with mesh axes and part sizes for its splittable leaves (parts of dimensions).
    `axes` has (axes, sizes of parts or None) for each leaf, in order; leaves after its end stay
    whole."""
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
