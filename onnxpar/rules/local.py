"""A node as one rank runs it: its local attributes, constants and, where it must be, other nodes.

What depends on the rank stays a function of the rank (`PerRank`) until the ranks are split; values
that are the same on every rank become ordinary constants and attributes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

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
from onnxpar.rules.rule import Expr, Local, Prod, Size, Spec, Var, tensor_shape

Array = npt.NDArray[Any]


@dataclass
class PerRank:
    """Constants (by name) and attributes (by node and attribute) as functions of the rank.

    The graph itself holds the values of rank 0.
    """

    constants: dict[str, Callable[[int], Array]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Callable[[int], Any]] = field(default_factory=dict)


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

    def counted_twice(self, reduce: Mapping[str, str]) -> list[str]:
        """Reduced factors of which some segment is whole where another is split.

        Every rank would add the whole segment to its sum; a max or min does not mind.
        """
        summed = [f for f, op in reduce.items() if op in ("sum", "prod")]
        return [f for f in summed if not _segments_agree(self.factors[f])]

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

    def _size(self, dim: Dim) -> int:
        self.varies |= any(len(set(leaf.part_sizes())) > 1 for leaf in leaves(dim))
        return local_size(dim, self._view.mesh, self._rank)


def localize_node(
    graph: gs.Graph,
    op: OpFactors,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    per_rank: PerRank,
) -> None:
    """Rewrites a node of the graph into what each rank runs on its parts.

    `layouts` are those of the operands and results as the node reads and makes them, by name.
    A node none of whose factors is split stays as it is.
    """
    view = NodeView.of(op, layouts, mesh)
    if not any(map(view.is_split, view.factors)):
        return
    twice = view.counted_twice(op.rule.reduce)
    assert not twice, f"{op.node.op} '{op.node.name}': segments of {twice} are split differently"
    if op.rule.lower and any(map(view.is_split, op.rule.lowered)):
        builder = LoweringBuilder(graph, view, per_rank)
        op.rule.lower(builder)
        builder.replace()
        return
    for key, function in op.rule.local.items():
        value, by_rank = view.value(function)
        if isinstance(key, str):
            _set_attribute(op.node, key, value, by_rank, per_rank)
        elif value is not None:
            name = f"{op.node.name}::input{key}"
            while len(op.node.inputs) <= key:
                op.node.inputs.append(gs.Variable.empty())
            op.node.inputs[key] = _constant(name, value, by_rank, per_rank)


def _set_attribute(
    node: gs.Node, key: str, value: Any, by_rank: Callable[[int], Any] | None, per_rank: PerRank
) -> None:
    if value is None:
        node.attrs.pop(key, None)
        return
    node.attrs[key] = value
    if by_rank:
        per_rank.attributes[node.name, key] = by_rank


def _constant(
    name: str, value: Any, by_rank: Callable[[int], Any] | None, per_rank: PerRank
) -> gs.Constant:
    if by_rank:
        per_rank.constants[name] = lambda rank: np.asarray(by_rank(rank), order="C")
    return gs.Constant(name, np.array(value, order="C"))


def axes_are_input(op: str, opset: int) -> bool:
    """Whether the op takes its axes as an operand (True) or as an attribute."""
    return opset >= (13 if op in ("Squeeze", "Unsqueeze", "ReduceSum") else 18)


class LoweringBuilder:
    """Builds a rank's own nodes in place of one node; implements `rule.Lowering`.

    `local` is rank 0's view, good for what all ranks share; what a rank's own view gives goes
    through `per_rank`, whose functions run after the node is gone and must not read `local.node`.
    """

    def __init__(self, graph: gs.Graph, view: NodeView, per_rank: PerRank) -> None:
        self.local: Local = view.on(0)
        self._graph = graph
        self._view = view
        self._per_rank = per_rank
        self._inputs = list(view.node.inputs)
        self._outputs = list(view.node.outputs)
        self._built: list[gs.Node] = []
        self._names = 0

    def input(self, index: int) -> gs.Tensor:
        """An operand of the node, now the rank's part."""
        return self._inputs[index]

    def per_rank(self, value: Callable[[Any], Any]) -> gs.Tensor:
        """A constant that each rank computes from its own view."""
        first, by_rank = self._view.value(value)
        return _constant(self._fresh("constant"), first, by_rank, self._per_rank)

    def add(self, op: str, inputs: Sequence[Any], **attrs: Any) -> gs.Variable:
        """Adds a node with one result; operands may be arrays, which become constants."""
        name = self._fresh(op)
        result = gs.Variable(name)
        self._append(op, name, inputs, result, attrs)
        return result

    def finish(self, op: str, inputs: Sequence[Any], output: int = 0, **attrs: Any) -> None:
        """Adds the node that makes the rank's part of a result."""
        name = self._view.node.name + (f"::{output}" if output else "")
        self._append(op, name, inputs, self._outputs[output], attrs)

    def replace(self) -> None:
        """Puts the new nodes where the old one stood."""
        old = self._view.node
        at = next(i for i, node in enumerate(self._graph.nodes) if node is old)
        old.inputs.clear()
        old.outputs.clear()
        self._graph.nodes[at : at + 1] = self._built

    def _append(
        self, op: str, name: str, inputs: Sequence[Any], result: gs.Tensor, attrs: dict[str, Any]
    ) -> None:
        operands = [self._operand(i) for i in inputs]
        if "axes" in attrs and axes_are_input(op, self._graph.opset):
            operands.append(self._operand(np.array(attrs.pop("axes"), np.int64)))
        self._built.append(gs.Node(op, name, attrs, operands, [result]))

    def _operand(self, operand: Any) -> gs.Tensor:
        if isinstance(operand, gs.Tensor):
            return operand
        return gs.Constant(self._fresh("constant"), np.asarray(operand))

    def _fresh(self, kind: str) -> str:
        self._names += 1
        return f"{self._view.node.name}::{kind}{self._names}"


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
