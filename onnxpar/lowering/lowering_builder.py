"""Builds the nodes that a rank runs in place of a single node of the global graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxpar.graph.origin import note_origin_of
from onnxpar.graph.per_rank import InnerCollective, PerRank, collective_node, note_inner
from onnxpar.graph.shape_inference import infer_results
from onnxpar.graph.subgraphs import nodes_within
from onnxpar.layout.layout import dim_axes
from onnxpar.layout.mesh import Axes, in_mesh_order
from onnxpar.lowering.empty_shards import fill
from onnxpar.lowering.halo import fetch
from onnxpar.lowering.rank_view import NodeView
from onnxpar.lowering.travel import exchange, shift
from onnxpar.rules.rule import Local, Step


class LoweringBuilder:
    """Builds the nodes that a rank runs in place of one node; implements `rule.Lowering`, the
    interface that rules see.

    graph     the graph of the node
    view      the node's shards
    per_rank  gets the constants and attributes that differ by rank
    prefix    a part of the names of new nodes, for nodes beside the node rather than in its place

    `local` is rank 0's view: read only values from it that all ranks share. Values that differ by
    rank go through `per_rank`. Functions given to `per_rank` run after the node is gone, and must
    not read `local.node`.
    """

    def __init__(
        self, graph: gs.Graph, view: NodeView, per_rank: PerRank, prefix: str = ""
    ) -> None:
        self.local: Local = view.on(0)
        self.view = view
        self._prefix = prefix
        self._graph = graph
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
        """Returns the rank's shard of operand `index` of the node."""
        return self._inputs[index]

    def per_rank(self, value: Callable[[Any], Any]) -> gs.Tensor:
        """Returns a constant whose value on a rank is `value(view)`, for the rank's view of the
        node."""
        first, by_rank = self.view.value(value)
        name = self._fresh("constant")
        note_stand_ins(name, self.view, self._per_rank)
        return rank_constant(name, first, by_rank, self._per_rank)

    def by_rank(self, value: Callable[[int], Any]) -> gs.Tensor:
        """Returns a constant whose value on a rank is `value(rank)`, for the rank's number."""
        return rank_constant(self._fresh("constant"), value(0), value, self._per_rank)

    @property
    def opset(self) -> int:
        """The opset of ONNX's own ops in the graph."""
        return int(self._graph.opset)

    def add(self, op: str, inputs: Sequence[Any], **attrs: Any) -> gs.Variable:
        """Adds a node, and returns its only result. An operand may be an array, which becomes a
        constant; an attribute may be a function of the rank's view."""
        name = self._fresh(op)
        result = gs.Variable(name)
        self._append(op, name, inputs, [result], attrs)
        return result

    def add_each(
        self, op: str, inputs: Sequence[Any], count: int, **attrs: Any
    ) -> list[gs.Variable]:
        """Adds a node, and returns its `count` results."""
        name = self._fresh(op)
        results = [gs.Variable(f"{name}:{i}") for i in range(count)]
        self._append(op, name, inputs, results, attrs)
        return results

    def all_reduce(self, x: gs.Tensor, factors: Iterable[str], op: str = "sum") -> gs.Tensor:
        """Adds an all-reduce of `x` by `op` over the ranks with different shards of these factors
        (index variables of the op's rule), and returns its result; returns `x` itself if none of
        the factors is split."""
        axes = in_mesh_order(tuple(dict.fromkeys(a for f in factors for a in self._axes(f))))
        return self.collective("AllReduce", x, axes, self.shape(x), op=op) if axes else x

    def all_gather(
        self, x: gs.Tensor, factor: str, axis: int, extent: Callable[[Any], int]
    ) -> gs.Tensor:
        """Returns the `x` of all ranks that hold shards of a factor (index variable of the op's
        rule), concatenated along `axis` in the order of the shards. `extent` returns the size of a
        rank's `x` along that axis, from its view."""
        axes = self._axes(factor)
        if not axes:
            return x
        members = self.view.mesh.group(axes, 0)
        sizes = [extent(self.view.on(m)) for m in members]
        shape = self.shape(x)
        shape[axis] = sum(sizes)
        attrs = {} if self.is_open(factor) else {"sizes": sizes}  # open sizes: found in each run
        return self.collective("AllGather", x, axes, shape, axis=axis, **attrs)

    def shares_axes(self, factor: str, other: str) -> bool:
        """True if two factors (index variables of the op's rule) are split over the same mesh
        axes."""
        return bool(self._axes(factor)) and self._axes(factor) == self._axes(other)

    def of_members(self, factor: str, value: Callable[[Any], Any]) -> list[Any]:
        """Returns `value(view)` for the view of each rank that holds a shard of a factor (index
        variable of the op's rule), in the order of shards."""
        return [value(self.view.on(m)) for m in self.view.mesh.group(self._axes(factor), 0)]

    def shift(self, x: gs.Tensor, factor: str, axis: int, sizes: Sequence[int]) -> gs.Tensor:
        """Sends `x` to the rank with the next shard of a factor (index variable of the op's rule),
        in a ring; returns the `x` of the rank with the previous shard. `sizes` are the sizes of the
        ranks' `x` along `axis`, in the order of shards."""
        return shift(self, x, self._axes(factor), axis, sizes)

    def exchange(
        self,
        x: gs.Tensor,
        factor: str,
        axis: int,
        held: Sequence[npt.NDArray[Any]],
        wanted: Sequence[npt.NDArray[Any]],
    ) -> gs.Tensor:
        """Returns the elements of `x` at the positions that a rank wants along `axis`, from the
        ranks that hold them.

        held    the positions that each rank holds, in the order of the shards of `factor`
        wanted  the positions that each rank wants
        """
        return exchange(self, self.view.mesh, x, self._axes(factor), axis, held, wanted)

    def gathered(self, factor: str) -> npt.NDArray[Any]:
        """Returns the global indices of a factor (index variable of the op's rule), in the order in
        which `all_gather` joins its shards."""
        members = self.view.mesh.group(self._axes(factor), 0)
        return np.concatenate([self.view.on(m).positions(factor) for m in members])

    def scan(
        self, step: Step, states: Sequence[gs.Tensor], sequences: Sequence[gs.Tensor], **attrs: Any
    ) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
        """Adds a Scan along the first dimension of `sequences`; returns its last states and its
        results. `step(states, elements)` builds the body and returns the new states and one element
        of each result. The body may have collectives, and may read tensors of the outer graph."""
        name = self._fresh("Scan")
        body = gs.Graph(name=name, opset=self._graph.opset)
        shapes = [*map(self.shape, states), *(self.shape(s)[1:] for s in sequences)]
        for tensor, shape in zip((*states, *sequences), shapes, strict=True):
            body.inputs.append(gs.Variable(self._fresh("given"), tensor.dtype))
            self._shapes[body.inputs[-1].name] = shape
        around, self._built = self._built, body.nodes
        ends, elements = step(body.inputs[: len(states)], body.inputs[len(states) :])
        body_results = [self.add("Identity", [x]) for x in (*ends, *elements)]
        self._built = around
        results = []
        for i, tensor in enumerate(body_results):
            steps = [self.shape(sequences[0])[0]] if i >= len(ends) else []
            shape = [*steps, *self.shape(tensor)]
            results.append(gs.Variable(f"{name}:{i}", tensor.dtype, shape))
            tensor.shape = [None] * len(self.shape(tensor))  # sizes differ by rank
            body.outputs.append(tensor)
        attrs |= {"body": body, "num_scan_inputs": len(sequences)}
        self._append("Scan", name, [*states, *sequences], results, attrs)
        return results[: len(ends)], results[len(ends) :]

    def filled(
        self, x: gs.Tensor, factor: str, axis: int, value: Any = 0, count: int = 1
    ) -> gs.Tensor:
        """Returns `x`, or, where the rank's shard of the factor is empty, `count` elements of
        `value` along `axis`. Dimension `axis` of `x` has `count` elements for each element of the
        factor, an index variable of the op's rule."""
        if not self.view.may_be_empty(factor):
            return x
        y = fill(self, x, axis, np.array([count], np.int64), value)
        least = [count * (i == axis) for i in range(len(x.shape))]
        self._shapes[y.name] = [max(s, n) for s, n in zip(self.shape(x), least, strict=True)]
        return y

    def fetch(
        self, x: gs.Tensor, factor: str, axis: int, wanted: Callable[[Any], tuple[int, int]]
    ) -> gs.Tensor:
        """Returns the elements of `x` from position `start` to before `end` of dimension `axis`,
        from the ranks that hold them; `wanted` returns (start, end) for a rank's view. The
        dimension is the factor; its shards are contiguous."""
        return fetch(self, self.view, x, factor, axis, wanted)

    def is_open(self, factor: str) -> bool:
        """True if the size of a factor (index variable of the op's rule) differs between runs."""
        return factor in self.view.open

    def fetch_between(
        self, x: gs.Tensor, factor: str, axis: int, bounds: gs.Tensor, extent: int
    ) -> gs.Tensor:
        """Returns the elements of `x` between the tensor `bounds`, which nodes compute in each run,
        along `axis`: implements `Lowering.fetch_between`. `extent` is their number on rank 0."""
        shape = self.shape(x)
        shape[axis] = extent
        y = self.collective("HaloExchange", x, self._axes(factor), shape, axis=axis)
        self._built[-1].inputs.append(bounds)
        return y

    def finish(self, op: str, inputs: Sequence[Any], output: int = 0, **attrs: Any) -> None:
        """Adds the node that computes the rank's shard of result number `output`."""
        name = self.view.node.name + (f"::{output}" if output else "")
        if self._prefix:
            name = self._fresh(op)
        self._append(op, name, inputs, [self._outputs[output]], attrs)

    def is_graph_output(self, output: int) -> bool:
        """True if result number `output` is also an output of the graph."""
        return any(tensor is self._outputs[output] for tensor in self._graph.outputs)

    def make(
        self, op: str, inputs: Sequence[Any], type_: tuple[Any, Sequence[int]], **attrs: Any
    ) -> gs.Variable:
        """Adds a node, and returns its only result, whose type is (dtype, shape on rank 0)."""
        name = self._fresh(op)
        result = gs.Variable(name, *type_)
        self._append(op, name, inputs, [result], attrs)
        return result

    def make_each(
        self,
        op: str,
        inputs: Sequence[Any],
        types: Sequence[tuple[Any, Sequence[int]] | int],
        **attrs: Any,
    ) -> list[gs.Variable]:
        """Adds a node with a result for each of `types`, and returns the results. A type is (dtype,
        shape on rank 0), or the number of a result of the node that is replaced, which this result
        becomes."""
        name = self._fresh(op)
        results = [
            self._outputs[type_] if isinstance(type_, int) else gs.Variable(f"{name}:{i}", *type_)
            for i, type_ in enumerate(types)
        ]
        self._append(op, name, inputs, results, attrs)
        return results

    def finish_each(self, op: str, inputs: Sequence[Any], **attrs: Any) -> None:
        """Adds the node that computes the rank's shards of all results."""
        self._append(op, self.view.node.name, inputs, self._outputs, attrs)

    def collective(
        self, kind: str, x: gs.Tensor, axes: Axes, shape: Sequence[int], **attrs: Any
    ) -> gs.Variable:
        """Adds a collective of this kind over `axes`, and returns its result, whose shape on rank 0
        is `shape`."""
        name = self._fresh(kind)
        y = gs.Variable(name, x.dtype, shape)
        mesh = self.view.mesh
        node = collective_node(kind, name, x, y, axes, mesh, self._per_rank, **attrs)
        larger = max(self.shape(x), list(shape), key=math.prod)
        note_inner(node, InnerCollective(axes, tuple(larger)))
        self._built.append(node)
        return y

    def shape(self, x: gs.Tensor) -> list[int]:
        """Returns the shape of a tensor on rank 0."""
        return list(self._shapes.get(x.name, x.shape))

    def insert_before(self, node: gs.Node) -> None:
        """Inserts the new nodes before a node."""
        at = self._index(node)
        self._graph.nodes[at:at] = self._built_for(node)

    def insert_after(self, node: gs.Node) -> None:
        """Inserts the new nodes after a node."""
        at = self._index(node) + 1
        self._graph.nodes[at:at] = self._built_for(node)

    def replace(self) -> None:
        """Puts the new nodes in the place of the old one in the graph."""
        old = self.view.node
        at = self._index(old)
        old.inputs.clear()
        old.outputs.clear()
        self._graph.nodes[at : at + 1] = self._built_for(old)

    def _index(self, node: gs.Node) -> int:
        return next(i for i, other in enumerate(self._graph.nodes) if other is node)

    def _built_for(self, node: gs.Node) -> list[gs.Node]:
        note_origin_of(nodes_within(self._built), node)
        return self._built

    def _append(
        self,
        op: str,
        name: str,
        inputs: Sequence[Any],
        results: list[gs.Tensor],
        attrs: dict[str, Any],
    ) -> None:
        """Makes a node of these operands, results and attributes, as `add` describes them."""
        operands = [self._operand(i) for i in inputs]
        key = "split" if op == "Split" else "axes"
        if key in attrs:
            operands.append(self._sizes(attrs.pop(key)))
        node = gs.Node(op, name, {}, operands, results, attrs.pop("domain", None))
        for key, value in attrs.items():
            by_rank = None
            if callable(value):
                value, by_rank = self.view.value(value)
            set_attribute(node, key, value, by_rank, self._per_rank)
        self._built.append(node)
        if results[0].shape is None and not node.domain:
            self._infer(node)

    def _infer(self, node: gs.Node) -> None:
        """Infers and sets the types of a node's results, as they are on rank 0."""
        shapes = [None if not t.name else self.shape(t) for t in node.inputs]
        types = infer_results(node, shapes, self._graph.opset)
        for tensor, (dtype, shape) in zip(node.outputs, types, strict=True):
            tensor.dtype, tensor.shape = dtype, shape

    def _axes(self, factor: str) -> Axes:
        return dim_axes(self.view.factors[factor])

    def _sizes(self, value: Any) -> gs.Tensor:
        """Returns an int64 constant: `value`, or, if that is a function, its result for each rank's
        view."""
        if callable(value):
            return self.per_rank(lambda local: np.array(value(local), np.int64))
        return self._operand(np.array(value, np.int64))

    def _operand(self, operand: Any) -> gs.Tensor:
        if isinstance(operand, gs.Tensor):
            return operand
        return gs.Constant(self._fresh("constant"), np.asarray(operand))

    def _fresh(self, kind: str) -> str:
        self._names += 1
        return f"{self.view.node.name}::{self._prefix}{kind}{self._names}"


def note_stand_ins(name: str, view: NodeView, per_rank: PerRank) -> None:
    """Records in `per_rank` that the constant `name` counts an empty shard as one element, if the
    view does so."""
    if view.stand_ins:
        per_rank.stand_ins[name] = view.stand_ins


def set_attribute(
    node: gs.Node, key: str, value: Any, by_rank: Callable[[int], Any] | None, per_rank: PerRank
) -> None:
    """Sets an attribute of a node to `value`, or removes it for None. `by_rank` returns the value
    on each rank, if ranks differ."""
    if value is None:
        node.attrs.pop(key, None)
        return
    node.attrs[key] = value
    if by_rank:
        per_rank.attributes[node.name, key] = by_rank


def rank_constant(
    name: str, value: Any, by_rank: Callable[[int], Any] | None, per_rank: PerRank
) -> gs.Constant:
    """Returns a constant of the value on rank 0. `by_rank` returns the value on each rank, if ranks
    differ."""
    if by_rank:
        per_rank.constants[name] = lambda rank: np.asarray(by_rank(rank), order="C")
    return gs.Constant(name, np.array(value, order="C"))
