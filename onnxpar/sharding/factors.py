"""The factors of a whole graph: the atoms that each dimension of each tensor consists of.

An *atom* is an index variable that no op cuts further: the 192 columns of a fused QKV weight are
`h d + h d + h d`, because a Reshape far downstream separates heads. A sharding assigns mesh axes to
atoms, so no split cuts a unit of any op. `analysis.py` finds the atoms.
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
        """Returns (weight, factors of the node) for each set of sizes at which costs are computed.
        Weights add up to 1; without such sizes, the node itself has the weight 1."""
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
