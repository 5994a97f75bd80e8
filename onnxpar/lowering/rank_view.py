"""The shards that a rank has of a node: of its operands, its results, and the factors of its
rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import Size, tensor_shape
from onnxpar.layout.layout import (
    Concat,
    Dim,
    Factor,
    Layout,
    Product,
    dim_axes,
    first_index,
    indices,
    is_even,
    leaves,
    local_size,
    normalize,
)
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.rules.notation import Cat, Expr, Prod, Spec, Var
from onnxpar.rules.rule import Rule
from onnxpar.sharding.factors import OpFactors


@dataclass(frozen=True, eq=False)
class NodeView:
    """The shards of a node on all ranks.

    node             the node
    inputs, outputs  the layouts of its operands and results
    factors          the sharding of each factor (index variable) of its rule, by name
    mesh             the ranks
    open             the factors whose sizes differ between runs
    """

    node: gs.Node
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    factors: Mapping[str, Dim]
    mesh: Mesh
    open: frozenset[str] = frozenset()

    @staticmethod
    def of(
        op: OpFactors,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        open_atoms: Collection[int] = (),
    ) -> NodeView:
        """Returns the view of a node.

        op          the node, with the factors of its rule
        layouts     the layouts of its operands and results, by tensor name
        open_atoms  numbers of the factors of the whole graph (atoms) whose sizes differ between
                    runs
        """

        def layout(tensor: gs.Tensor) -> Layout:
            shape = tensor_shape(tensor) if tensor.name else ()
            return layouts.get(tensor.name) or Layout.whole([s or 0 for s in shape or ()])

        inputs = tuple(map(layout, op.node.inputs))
        outputs = tuple(map(layout, op.node.outputs))
        factors: dict[str, Dim] = {}
        operands = [*zip(op.node.inputs, op.rule.inputs, inputs, strict=False)]
        operands += zip(op.node.outputs, op.rule.outputs, outputs, strict=False)
        for tensor, spec, have in operands:
            if tensor.name and spec is not None:
                _match(spec, have.dims, op.rule.sizes, factors)
        whole = {f: Factor(size or 0) for f, size in op.rule.sizes.items() if f not in factors}
        opened = frozenset(leaf.factor for leaf in op.leaves if leaf.atom in open_atoms)
        return NodeView(op.node, inputs, outputs, {**factors, **whole}, mesh, opened)

    def filled(self, rule: Rule, names: Collection[str]) -> NodeView:
        """Returns the view that counts an empty shard of the factors `names` (index variables of
        the rule) as one element, a stand-in."""

        def fill(layout: Layout, spec: Spec | None) -> Layout:
            dims = zip(spec or (), layout.dims, strict=False)
            filled = tuple(_filled(expr, dim, rule.sizes, names) for expr, dim in dims)
            return replace(layout, dims=filled or layout.dims)

        return replace(
            self,
            inputs=tuple(map(fill, self.inputs, rule.inputs)),
            outputs=tuple(map(fill, self.outputs, rule.outputs)),
            factors={f: _fill_all(d) if f in names else d for f, d in self.factors.items()},
        )

    @property
    def stand_ins(self) -> frozenset[tuple[int, Axes]]:
        """The size and the mesh axes of each factor whose empty shards count as one element."""
        all_leaves = (leaf for dim in self.factors.values() for leaf in leaves(dim))
        return frozenset((leaf.size, leaf.axes) for leaf in all_leaves if leaf.filled and leaf.axes)

    def may_be_empty(self, factor: str) -> bool:
        """True if a shard of a factor (index variable of the rule) may be empty: mesh axes split
        the factor, and its size is open or a shard has size 0."""
        split = [f for f in leaves(self.factors[factor]) if f.axes and not f.filled]
        return bool(split) and (factor in self.open or any(0 in f.part_sizes() for f in split))

    def is_split(self, factor: str) -> bool:
        """True if mesh axes split a factor (index variable of the rule)."""
        return bool(dim_axes(self.factors[factor]))

    def breach(self, rule: Rule) -> str | None:
        """Returns the reason why the node cannot run on these shards, in words; None if it can.

        A dimension may be a concatenation of segments, each with a sharding of its own. If segments
        are split differently, a sum over them would count an unsplit segment once per rank (a max
        or min would still be right). Shards of a factor that the rule calls contiguous must not
        have gaps.
        """
        summed = [f for f, op in rule.reduce.items() if op in ("sum", "prod")]
        for factor in [*summed, *rule.communicating]:
            is_open = factor in self.open
            if not is_open and rule.may_overlap(factor, lambda f: dim_axes(self.factors[f])):
                continue
            if not _segments_agree(self.factors[factor]):
                return f"segments of {factor} are split differently"
        for factor in rule.contiguous:
            if not isinstance(normalize(self.factors[factor]), Factor):
                return f"shards of {factor} are not contiguous"
        return None

    def on(self, rank: int) -> RankView:
        """Returns the view of one rank."""
        return RankView(self, rank)

    def value(self, function: Callable[[RankView], Any]) -> tuple[Any, Callable[[int], Any] | None]:
        """Returns `function(view)` for rank 0 and, if it differs between ranks, the function from a
        rank to its value; else None."""
        first = self.on(0)
        value = function(first)
        return value, (lambda rank: function(self.on(rank))) if first.varies else None


class RankView:
    """A rank's view of a node; implements `rule.Local`, the interface that rules see.

    `varies` becomes True once a method returns a value that differs by rank.
    """

    def __init__(self, view: NodeView, rank: int) -> None:
        self.node = view.node
        self.varies = False
        self._view = view
        self._rank = rank

    def input_shape(self, index: int) -> tuple[int, ...]:
        """Returns the shape of the rank's shard of operand `index`."""
        return tuple(map(self._size, self._view.inputs[index].dims))

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Returns the shape of the rank's shard of result `index`."""
        return tuple(map(self._size, self._view.outputs[index].dims))

    def size(self, factor: str) -> int:
        """Returns the size of the rank's shard of a factor, an index variable of the op's rule."""
        return self._size(self._view.factors[factor])

    def positions(self, factor: str) -> Array:
        """Returns the global indices of the rank's shard of a factor (index variable of the op's
        rule), in the rank's order: [2, 3] on the second of two ranks that share 4 elements."""
        tree = self._view.factors[factor]
        self.varies |= bool(dim_axes(tree))
        return indices(tree, self._view.mesh, self._rank)

    def is_run(self, factor: str) -> bool:
        """True if the shards of a factor (index variable of the op's rule) are contiguous on every
        rank."""
        return isinstance(normalize(self._view.factors[factor]), Factor)

    def interval(self, factor: str) -> tuple[int, int]:
        """Returns (start, end) of the rank's shard of a factor (index variable of the op's rule):
        global indices, end exclusive. The shard must be contiguous."""
        tree = self._view.factors[factor]
        self.varies |= bool(dim_axes(tree))
        assert self.is_run(factor), factor
        start = first_index(tree, self._view.mesh, self._rank)
        return start, start + self._size(tree)

    def member(self, factor: str) -> int:
        """Returns the rank's index among the ranks that hold the shards of a factor (index variable
        of the op's rule)."""
        self.varies = True
        return self._view.mesh.coordinate(dim_axes(self._view.factors[factor]), self._rank)

    def is_split(self, factor: str) -> bool:
        """True if mesh axes split a factor (index variable of the op's rule)."""
        return self._view.is_split(factor)

    def may_be_empty(self, factor: str) -> bool:
        """True if mesh axes split a factor (index variable of the op's rule), and a shard may be
        empty: the size is open, or one of its shards has no elements. A shard with a stand-in, an
        element in its place, is not empty."""
        return self._view.may_be_empty(factor)

    def _size(self, dim: Dim) -> int:
        self.varies |= not all(map(is_even, leaves(dim)))
        return local_size(dim, self._view.mesh, self._rank)


def _segments_agree(dim: Dim) -> bool:
    """True unless a dimension is a concatenation of segments that different mesh axes split."""
    if isinstance(dim, Factor):
        return True
    over = {frozenset(dim_axes(child)) for child in dim.children}
    if isinstance(dim, Concat) and len(over) > 1:
        return False
    return all(map(_segments_agree, dim.children))


def _match(
    spec: Spec, dims: Sequence[Dim], sizes: Mapping[str, Size], factors: dict[str, Dim]
) -> None:
    """Records the sharding of each factor of an operand in `factors`.

    spec   the operand's dimensions in its rule, as expressions of factors
    dims   its dimensions in its layout
    sizes  the sizes of factors
    """
    for expr, dim in zip(spec, dims, strict=True):
        _match_dim(expr, dim, sizes, factors)


def _match_dim(expr: Expr, dim: Dim, sizes: Mapping[str, Size], factors: dict[str, Dim]) -> None:
    """Records the sharding of each factor of one dimension in `factors`: `expr` is the dimension in
    the rule, `dim` in the layout."""
    if isinstance(expr, Var):
        if expr.name not in factors or not dim_axes(factors[expr.name]):
            factors[expr.name] = dim
        return
    for child, piece in _pieces(expr, dim, sizes) or ():
        _match_dim(child, piece, sizes, factors)


def _pieces(expr: Prod | Cat, dim: Dim, sizes: Mapping[str, Size]) -> list[tuple[Expr, Dim]] | None:
    """Returns each child of an expression (a product or concatenation of factors) with its part of
    the dimension's layout. None if the expression and the layout divide the dimension differently;
    the dimension is then whole."""
    kind = Product if isinstance(expr, Prod) else Concat
    rest = list(dim.children if isinstance(dim, kind) else (dim,))
    pieces: list[tuple[Expr, Dim]] = []
    for child in expr.children:
        size = kind(_unsplit(child, sizes)).size
        taken = 0
        while kind(tuple(rest[:taken])).size != size:
            if taken == len(rest):
                return None
            taken += 1
        piece = tuple(rest[:taken])
        pieces.append((child, piece[0] if taken == 1 else kind(piece)))
        rest = rest[taken:]
    return pieces


def _unsplit(expr: Expr, sizes: Mapping[str, Size]) -> tuple[Dim, ...]:
    """Returns the layout of a dimension of this expression with no factor split, in a tuple."""
    if isinstance(expr, Var):
        return (Factor(sizes[expr.name] or 0),)
    children = tuple(d for c in expr.children for d in _unsplit(c, sizes))
    return (Product(children) if isinstance(expr, Prod) else Concat(children),)


def _fill_all(dim: Dim) -> Dim:
    """Returns the layout of a dimension in which empty shards of every split factor count as one
    element."""
    if isinstance(dim, Factor):
        return replace(dim, filled=bool(dim.axes))
    return type(dim)(tuple(map(_fill_all, dim.children)))


def _filled(expr: Expr, dim: Dim, sizes: Mapping[str, Size], names: Collection[str]) -> Dim:
    """Returns the layout of a dimension in which empty shards of the factors `names` count as one
    element. `expr` is the dimension in the rule."""
    if isinstance(expr, Var):
        return _fill_all(dim) if expr.name in names else dim
    kind = Product if isinstance(expr, Prod) else Concat
    pieces = _pieces(expr, dim, sizes) or []
    filled = [_filled(child, piece, sizes, names) for child, piece in pieces]
    return dim if filled == [piece for _, piece in pieces] else kind(tuple(filled))
