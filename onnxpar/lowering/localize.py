"""Rewrites a node into what each rank runs: its local attributes, constants and, where it must be,
other nodes, collectives among them.

What depends on the rank stays a function of the rank (`PerRank`) until the ranks are split; values
that are the same on every rank become ordinary constants and attributes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxpar.ir.collectives import PerRank, collective_node
from onnxpar.ir.origin import note_origin
from onnxpar.ir.subgraphs import nodes_within
from onnxpar.layout.layout import Layout, dim_axes
from onnxpar.layout.mesh import Axes, Mesh, in_mesh_order
from onnxpar.lowering.halo import fetch
from onnxpar.lowering.rank_view import NodeView
from onnxpar.lowering.stand_ins import StandIns, factors_to_fill, fill
from onnxpar.model.shapes import infer_results
from onnxpar.rules.notation import expr_vars
from onnxpar.rules.rule import Local, Step
from onnxpar.sharding.factors import OpFactors


def localize_node(
    graph: gs.Graph,
    op: OpFactors,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    per_rank: PerRank,
    open_atoms: Collection[int] = (),
) -> None:
    """Rewrites a node of the graph into what each rank runs on its parts.

    `layouts` are those of the operands and results as the node reads and makes them, by name; the
    sizes of `open_atoms` differ between runs. A node none of whose factors is split stays as it is.
    """
    view = NodeView.of(op, layouts, mesh, open_atoms)
    if not any(map(view.is_split, view.factors)):
        return
    breach = view.breach(op.rule)
    assert breach is None, f"{op.node.op} '{op.node.name}': {breach}"
    names = factors_to_fill(op.rule, view) | _merged_zeros(graph, op, view)
    names |= _expanded_zeros(op, view)
    if names:
        view = _surround(graph, op, view, names, per_rank)
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
            _note_stand_ins(name, view, per_rank)
    if op.node.op == "Reshape":
        _keep_zeros(graph, op, view, per_rank)


def _surround(
    graph: gs.Graph, op: OpFactors, view: NodeView, names: Collection[str], per_rank: PerRank
) -> NodeView:
    """Puts nodes around a node that fill its empty parts of these factors, and drop what it makes
    of that; returns its view in between."""
    filled = view.filled(op.rule, names)
    before, behind = (
        LoweringBuilder(graph, each, per_rank, kind)
        for each, kind in ((filled, "fill"), (view, "drop"))
    )
    StandIns(op, names, before, behind).surround()
    before.insert(op.node, 0)
    behind.insert(op.node, 1)
    return filled


def _void_dims(op: OpFactors, view: NodeView) -> list[int]:
    """The dimensions of a Reshape's result that may have no elements on some rank."""

    def may_be_void(factor: str) -> bool:
        return view.may_be_empty(factor) or (factor in view.open and not view.is_split(factor))

    spec = op.rule.outputs[0] or ()
    return [i for i, e in enumerate(spec) if any(map(may_be_void, expr_vars(e)))]


def _strays(op: OpFactors, void: Sequence[int]) -> list[int]:
    """Those of a Reshape's dimensions that stand elsewhere in its operand: before opset 14, a size
    of 0 is a copy of the operand's size there, so that the others are right as they are."""
    before, after = op.rule.inputs[0] or (), op.rule.outputs[0] or ()
    return [i for i in void if before[i : i + 1] != after[i : i + 1]]


def _merged_zeros(graph: gs.Graph, op: OpFactors, view: NodeView) -> frozenset[str]:
    """The factors that a Reshape must not see empty: before opset 14 it can find one size by
    itself, where no other is 0."""
    if op.node.op != "Reshape" or graph.opset >= 14:
        return frozenset()
    void = _void_dims(op, view)
    if len(void) < 2 or not _strays(op, void):
        return frozenset()
    return frozenset(filter(view.may_be_empty, op.rule.sizes))


def _expanded_zeros(op: OpFactors, view: NodeView) -> frozenset[str]:
    """The factors that an Expand must not make empty: where it makes no elements of one, to a
    constant shape, onnxruntime (1.32) may take it for an op that does nothing, and leave it out."""
    if op.node.op != "Expand" or op.node.domain:
        return frozenset()
    kept = {f for expr in op.rule.inputs[0] or () for f in expr_vars(expr)}
    made = {f for expr in op.rule.outputs[0] or () for f in expr_vars(expr)} - kept
    return frozenset(f for f in made - set(view.open) if view.may_be_empty(f))


def _keep_zeros(graph: gs.Graph, op: OpFactors, view: NodeView, per_rank: PerRank) -> None:
    """Makes a Reshape to a rank's own shape take a size of 0 for what it is, not for a size that
    is copied; before opset 14, the only such size is left to the op to find."""
    void = _void_dims(op, view)
    if graph.opset >= 14:
        if void:
            op.node.attrs["allowzero"] = 1
        return
    if len(void) != 1 or not _strays(op, void):
        return
    target = op.node.inputs[1]
    by_rank = per_rank.constants.pop(target.name, None)

    def shape(rank: int) -> npt.NDArray[Any]:
        sizes = np.array(target.values if by_rank is None else by_rank(rank))
        sizes[void[0]] = -1
        return sizes

    op.node.inputs[1] = gs.Constant(target.name, shape(0))
    if by_rank is not None:
        per_rank.constants[target.name] = shape


def _note_stand_ins(name: str, view: NodeView, per_rank: PerRank) -> None:
    if view.stand_ins:
        per_rank.stand_ins[name] = view.stand_ins


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
    """Whether the op takes its axes, or the sizes of a Split, as an operand (True) or as an
    attribute."""
    return opset >= (13 if op in ("Squeeze", "Unsqueeze", "ReduceSum", "Split") else 18)


class LoweringBuilder:
    """Builds a rank's own nodes in place of one node; implements `rule.Lowering`.

    `local` is rank 0's view, good for what all ranks share; what a rank's own view gives goes
    through `per_rank`, whose functions run after the node is gone and must not read `local.node`.
    """

    def __init__(
        self, graph: gs.Graph, view: NodeView, per_rank: PerRank, prefix: str = ""
    ) -> None:
        self.local: Local = view.on(0)
        self.view = view
        self.opset: int = graph.opset
        self._prefix = prefix
        self._graph = graph
        self._view = view
        self._per_rank = per_rank
        self._inputs = list(view.node.inputs)
        self._outputs = list(view.node.outputs)
        self._built: list[gs.Node] = []
        self._names = 0
        self._shapes: dict[str, Sequence[int]] = {
            tensor.name: layout.local_shape(view.mesh, 0)
            for tensor, layout in zip(self._inputs, view.inputs, strict=True)
        }

    def input(self, index: int) -> gs.Tensor:
        """An operand of the node, now the rank's part."""
        return self._inputs[index]

    def per_rank(self, value: Callable[[Any], Any]) -> gs.Tensor:
        """A constant that each rank computes from its own view."""
        first, by_rank = self._view.value(value)
        name = self._fresh("constant")
        _note_stand_ins(name, self._view, self._per_rank)
        return _constant(name, first, by_rank, self._per_rank)

    def by_rank(self, value: Callable[[int], Any]) -> gs.Tensor:
        """A constant that differs by rank."""
        return _constant(self._fresh("constant"), value(0), value, self._per_rank)

    def add(self, op: str, inputs: Sequence[Any], **attrs: Any) -> gs.Variable:
        """Adds a node with one result; operands may be arrays, which become constants, attributes
        functions of the rank's view."""
        name = self._fresh(op)
        result = gs.Variable(name)
        self._append(op, name, inputs, [result], attrs)
        return result

    def add_each(
        self, op: str, inputs: Sequence[Any], count: int, **attrs: Any
    ) -> list[gs.Variable]:
        """Adds a node with `count` results."""
        name = self._fresh(op)
        results = [gs.Variable(f"{name}:{i}") for i in range(count)]
        self._append(op, name, inputs, results, attrs)
        return results

    def all_reduce(self, x: gs.Tensor, factors: Iterable[str], op: str = "sum") -> gs.Tensor:
        """The reduction of the ranks' `x` over the parts of these factors; `x` where none is
        split."""
        axes = in_mesh_order(tuple(dict.fromkeys(a for f in factors for a in self._axes(f))))
        return self.collective("AllReduce", x, axes, self.shape(x), op=op) if axes else x

    def all_gather(
        self, x: gs.Tensor, factor: str, axis: int, extent: Callable[[Any], int]
    ) -> gs.Tensor:
        """What the holders of the factor's parts have as `x`, joined along `axis` in the order of
        the parts; `extent` is what each has there."""
        axes = self._axes(factor)
        if not axes:
            return x
        members = self._view.mesh.group(axes, 0)
        sizes = [extent(self._view.on(m)) for m in members]
        shape = self.shape(x)
        shape[axis] = sum(sizes)
        return self.collective("AllGather", x, axes, shape, axis=axis, sizes=sizes)

    def gathered(self, factor: str) -> npt.NDArray[Any]:
        """The global values of a factor in the order in which `all_gather` joins its parts."""
        members = self._view.mesh.group(self._axes(factor), 0)
        return np.concatenate([self._view.on(m).positions(factor) for m in members])

    def scan(
        self, step: Step, states: Sequence[gs.Tensor], sequences: Sequence[gs.Tensor], **attrs: Any
    ) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
        """Adds a Scan along the first dimension of sequences. `step(states, elements)` builds its
        body: collectives too, and what it builds may read what there is around it. It gives the new
        states, and the elements of the results. Returns the last states and the results."""
        name = self._fresh("Scan")
        body = gs.Graph(name=name, opset=self._graph.opset)
        shapes = [*map(self.shape, states), *(self.shape(s)[1:] for s in sequences)]
        for tensor, shape in zip((*states, *sequences), shapes, strict=True):
            body.inputs.append(gs.Variable(self._fresh("given"), tensor.dtype))
            self._shapes[body.inputs[-1].name] = shape
        around, self._built = self._built, body.nodes
        ends, elements = step(body.inputs[: len(states)], body.inputs[len(states) :])
        made = [self.add("Identity", [x]) for x in (*ends, *elements)]
        self._built = around
        results = []
        for i, tensor in enumerate(made):
            steps = [self.shape(sequences[0])[0]] if i >= len(ends) else []
            shape = [*steps, *self.shape(tensor)]
            results.append(gs.Variable(f"{name}:{i}", tensor.dtype, shape))
            tensor.shape = [None] * len(self.shape(tensor))  # its sizes differ by rank
            body.outputs.append(tensor)
        attrs |= {"body": body, "num_scan_inputs": len(sequences)}
        self._append("Scan", name, [*states, *sequences], results, attrs)
        return results[: len(ends)], results[len(ends) :]

    def filled(self, x: gs.Tensor, factor: str, axis: int, value: Any = 0) -> gs.Tensor:
        """`x`, whose dimension `axis` is the factor, with one element of `value` there where the
        rank's part is empty."""
        if not self._view.may_be_empty(factor):
            return x
        return fill(self, x, axis, np.array([1], np.int64), value)

    def fetch(
        self, x: gs.Tensor, factor: str, axis: int, wanted: Callable[[Any], tuple[int, int]]
    ) -> gs.Tensor:
        """The elements from `wanted[0]` to before `wanted[1]` of a dimension, which is the factor
        and split in runs, wherever they are held."""
        return fetch(self, self._view, x, factor, axis, wanted)

    def is_open(self, factor: str) -> bool:
        """Whether only a run knows the factor's size."""
        return factor in self._view.open

    def fetch_between(
        self, x: gs.Tensor, factor: str, axis: int, bounds: gs.Tensor, extent: int
    ) -> gs.Tensor:
        """See `Lowering.fetch_between`."""
        shape = self.shape(x)
        shape[axis] = extent
        y = self.collective("HaloExchange", x, self._axes(factor), shape, axis=axis)
        self._built[-1].inputs.append(bounds)
        return y

    def finish(self, op: str, inputs: Sequence[Any], output: int = 0, **attrs: Any) -> None:
        """Adds the node that makes the rank's part of a result."""
        name = self._view.node.name + (f"::{output}" if output else "")
        if self._prefix:
            name = self._fresh(op)
        self._append(op, name, inputs, [self._outputs[output]], attrs)

    def is_graph_output(self, output: int) -> bool:
        """Whether a result is a result of the whole graph."""
        return any(tensor is self._outputs[output] for tensor in self._graph.outputs)

    def make(
        self, op: str, inputs: Sequence[Any], type_: tuple[Any, Sequence[int]], **attrs: Any
    ) -> gs.Variable:
        """Adds a node whose result is of this type, (dtype, shape on rank 0)."""
        name = self._fresh(op)
        result = gs.Variable(name, *type_)
        self._append(op, name, inputs, [result], attrs)
        return result

    def finish_each(self, op: str, inputs: Sequence[Any], **attrs: Any) -> None:
        """Adds the node that makes the rank's parts of all results."""
        self._append(op, self._view.node.name, inputs, self._outputs, attrs)

    def collective(
        self, kind: str, x: gs.Tensor, axes: Axes, shape: Sequence[int], **attrs: Any
    ) -> gs.Variable:
        """Adds a collective; `shape` is that of its result on rank 0."""
        name = self._fresh(kind)
        y = gs.Variable(name, x.dtype, shape)
        mesh = self._view.mesh
        node = collective_node(kind, name, x, y, axes, mesh, self._per_rank, **attrs)
        node.attrs["axes"] = axes
        node.attrs["shape"] = max(self.shape(x), list(shape), key=math.prod)
        self._built.append(node)
        return y

    def shape(self, x: gs.Tensor) -> list[int]:
        """The shape of a tensor on rank 0."""
        return list(self._shapes.get(x.name, x.shape))

    def insert(self, node: gs.Node, behind: int) -> None:
        """Puts the new nodes before or behind a node."""
        at = next(i for i, other in enumerate(self._graph.nodes) if other is node) + behind
        note_origin(nodes_within(self._built), node.name)
        self._graph.nodes[at:at] = self._built

    def replace(self) -> None:
        """Puts the new nodes where the old one stood."""
        old = self._view.node
        at = next(i for i, node in enumerate(self._graph.nodes) if node is old)
        old.inputs.clear()
        old.outputs.clear()
        note_origin(nodes_within(self._built), old.name)
        self._graph.nodes[at : at + 1] = self._built

    def _append(
        self,
        op: str,
        name: str,
        inputs: Sequence[Any],
        results: list[gs.Tensor],
        attrs: dict[str, Any],
    ) -> None:
        operands = [self._operand(i) for i in inputs]
        key = "split" if op == "Split" else "axes"
        if key in attrs and axes_are_input(op, self._graph.opset):
            operands.append(self._sizes(attrs.pop(key)))
        node = gs.Node(op, name, {}, operands, results)
        for key, value in attrs.items():
            by_rank = None
            if callable(value):
                value, by_rank = self._view.value(value)
            _set_attribute(node, key, value, by_rank, self._per_rank)
        self._built.append(node)
        if results[0].shape is None:
            self._infer(node)

    def _infer(self, node: gs.Node) -> None:
        """Tells the types of the results on rank 0."""
        shapes = [None if not t.name else self.shape(t) for t in node.inputs]
        found = infer_results(node, shapes, self._graph.opset)
        for tensor, (dtype, shape) in zip(node.outputs, found, strict=True):
            tensor.dtype, tensor.shape = dtype, shape

    def _axes(self, factor: str) -> Axes:
        return dim_axes(self._view.factors[factor])

    def _sizes(self, value: Any) -> gs.Tensor:
        """Whole numbers as a constant; those of a rank, where it is a function."""
        if callable(value):
            return self.per_rank(lambda local: np.array(value(local), np.int64))
        return self._operand(np.array(value, np.int64))

    def _operand(self, operand: Any) -> gs.Tensor:
        if isinstance(operand, gs.Tensor):
            return operand
        return gs.Constant(self._fresh("constant"), np.asarray(operand))

    def _fresh(self, kind: str) -> str:
        self._names += 1
        return f"{self._view.node.name}::{self._prefix}{kind}{self._names}"
