"""A node as one rank sees it: the parts of its operands, results and factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.arrays import Array
from onnxpar.factors import OpFactors
from onnxpar.layout import (
    Concat,
    Dim,
    Factor,
    Layout,
    Product,
    dim_axes,
    indices,
    leaves,
    local_size,
    normalize,
)
from onnxpar.mesh import Mesh
from onnxpar.rules.rule import Expr, Prod, Rule, Size, Spec, Var, tensor_shape


@dataclass(frozen=True, eq=False)
class NodeView:
    """A node's layouts, and the tree of each factor of its rule, for all ranks."""

    node: gs.Node
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    factors: Mapping[str, Dim]
    mesh: Mesh

    @staticmethod
    def of(op: OpFactors, layouts: Mapping[str, Layout], mesh: Mesh) -> NodeView:
        """The view of a node whose operands and results have these layouts, by tensor name."""

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
        return NodeView(op.node, inputs, outputs, {**factors, **whole}, mesh)

    def is_split(self, factor: str) -> bool:
        """Whether the ranks hold parts of the factor."""
        return bool(dim_axes(self.factors[factor]))

    def breach(self, rule: Rule) -> str | None:
        """Why the node cannot run on such parts: every rank would count a whole segment beside a
        split one, or would hold gaps; None where it can. A max or min does not mind."""
        summed = [f for f, op in rule.reduce.items() if op in ("sum", "prod")]
        for factor in [*summed, *rule.across]:
            if not _segments_agree(self.factors[factor]):
                return f"segments of {factor} are split differently"
        for factor in rule.runs:
            if not isinstance(normalize(self.factors[factor]), Factor):
                return f"parts of {factor} are not consecutive"
        return None

    def on(self, rank: int) -> RankView:
        """What a rank sees."""
        return RankView(self, rank)

    def value(self, function: Callable[[RankView], Any]) -> tuple[Any, Callable[[int], Any] | None]:
        """The function's value on rank 0, and by rank where the ranks may differ."""
        first = self.on(0)
        value = function(first)
        return value, (lambda rank: function(self.on(rank))) if first.varies else None


class RankView:
    """A node as one rank sees it; implements `rule.Local`.

    `varies` records whether anything was asked for whose answer is not the same on every rank.
    """

    def __init__(self, view: NodeView, rank: int) -> None:
        self.node = view.node
        self.varies = False
        self._view = view
        self._rank = rank

    def input_shape(self, index: int) -> tuple[int, ...]:
        """The shape of the rank's part of an operand."""
        return tuple(map(self._size, self._view.inputs[index].dims))

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape of the rank's part of a result."""
        return tuple(map(self._size, self._view.outputs[index].dims))

    def size(self, factor: str) -> int:
        """How many values of a factor the rank computes."""
        return self._size(self._view.factors[factor])

    def positions(self, factor: str) -> Array:
        """The global values of a factor that the rank computes, in its order."""
        tree = self._view.factors[factor]
        self.varies |= bool(dim_axes(tree))
        return indices(tree, self._view.mesh, self._rank)

    def is_run(self, factor: str) -> bool:
        """Whether those are consecutive on every rank."""
        return isinstance(normalize(self._view.factors[factor]), Factor)

    def interval(self, factor: str) -> tuple[int, int]:
        """The first global value of a factor that the rank computes, and the one behind the
        last; they are consecutive."""
        held = self.positions(factor)
        assert self.is_run(factor), factor
        return (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)

    def member(self, factor: str) -> int:
        """The rank's place among those that hold the parts of a factor."""
        self.varies = True
        return self._view.mesh.coordinate(dim_axes(self._view.factors[factor]), self._rank)

    def is_split(self, factor: str) -> bool:
        """Whether the ranks hold parts of a factor."""
        return self._view.is_split(factor)

    def _size(self, dim: Dim) -> int:
        self.varies |= any(len(set(leaf.part_sizes())) > 1 for leaf in leaves(dim))
        return local_size(dim, self._view.mesh, self._rank)


def _segments_agree(dim: Dim) -> bool:
    if isinstance(dim, Factor):
        return True
    over = {frozenset(dim_axes(child)) for child in dim.children}
    if isinstance(dim, Concat) and len(over) > 1:
        return False
    return all(map(_segments_agree, dim.children))


def _match(
    spec: Spec, dims: Sequence[Dim], sizes: Mapping[str, Size], found: dict[str, Dim]
) -> None:
    """Finds the tree of each factor of an operand in the tree of its dimension."""
    for expr, dim in zip(spec, dims, strict=True):
        _match_dim(expr, dim, sizes, found)


def _match_dim(expr: Expr, dim: Dim, sizes: Mapping[str, Size], found: dict[str, Dim]) -> None:
    if isinstance(expr, Var):
        if expr.name not in found or not dim_axes(found[expr.name]):
            found[expr.name] = dim
        return
    kind = Product if isinstance(expr, Prod) else Concat
    rest = list(dim.children if isinstance(dim, kind) else (dim,))
    for child in expr.children:
        size = kind(_stand_ins(child, sizes)).size
        taken = 0
        while kind(tuple(rest[:taken])).size != size:
            if taken == len(rest):
                return  # the two cut the dimension differently: it is whole
            taken += 1
        piece = tuple(rest[:taken])
        _match_dim(child, piece[0] if taken == 1 else kind(piece), sizes, found)
        rest = rest[taken:]


def _stand_ins(expr: Expr, sizes: Mapping[str, Size]) -> tuple[Dim, ...]:
    """The expression as a tree of unsplit factors, as the only child of its parent."""
    if isinstance(expr, Var):
        return (Factor(sizes[expr.name] or 0),)
    children = tuple(d for c in expr.children for d in _stand_ins(c, sizes))
    return (Product(children) if isinstance(expr, Prod) else Concat(children),)
