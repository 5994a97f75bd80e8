"""Infers types and folds constants in a whole model, also in the bodies of its control flow.

An input of a body gets the shape that it has in every iteration: dimensions that iterations change
stay open. Its value is never known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, helper

from onnxpar.graph.branches import taken_branch
from onnxpar.graph.counted_windows import round_down
from onnxpar.graph.misfits import check_fits
from onnxpar.graph.scopes import is_control, open_scopes
from onnxpar.graph.shape_inference import Walk, keep_nodes
from onnxpar.graph.stored import graphs_of, subgraphs_of

_Type = TypeProto | None


def infer(model: onnx.ModelProto, keep: Collection[str] | None = None) -> None:
    """Folds constants and Ifs with known conditions, and declares every type that can be inferred,
    in place; bodies lose their own shapes first (`open_scopes`). `keep` as for `Walk`. Errors:
    ModelError for a node that cannot run on its operands."""
    open_scopes(model.graph)
    walk = Walk(model, keep=keep)
    _Inference(walk).graph(model.graph)
    for graph in graphs_of(model.graph):
        round_down(graph, walk.sizes)
    walk.declare(model.graph)
    for node in model.graph.node:
        _declare_bodies(node, walk)


def infer_bodies(walk: Walk, node: NodeProto) -> None:
    """Adds the types of the results of an If, Loop or Scan to `walk`, the known types and values,
    by inferring its bodies for the types of its operands. Shapes that the bodies declare are
    ignored; the node itself is not changed."""
    copy = NodeProto()
    copy.CopyFrom(node)
    _Inference(walk).infer(copy)


class _Inference:
    """Infers graphs and their bodies, and records all types and values in one Walk."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk

    def graph(self, graph: GraphProto, is_body: bool = False) -> None:
        """Infers the nodes of a graph, or of a body (`is_body`), in place, and removes nodes whose
        results are constant."""
        results = {p.name for p in graph.output} if is_body else set()
        kept: list[NodeProto] = []
        todo = deque(graph.node)
        others = False
        while todo:
            node = todo.popleft()
            branch = taken_branch(node, self.walk.values, self.walk.types)
            if branch is not None:
                others = True
                todo.extendleft(reversed(branch.node))
                continue
            values = self.walk.evaluate(node)
            if values is None:
                self.infer(node)
                if not is_body and self.walk.conflicts[-1:] == [node]:  # a body may never run
                    check_fits([self.walk], node)
                kept.append(node)
            else:
                copies = self._fold(node, values, results)
                others = others or bool(copies)
                kept += copies
        keep_nodes(graph, kept, others)

    def _fold(
        self, node: NodeProto, values: Sequence[object], results: set[str]
    ) -> list[NodeProto]:
        """Records a node's results (`values`) as constants. Returns an Identity node for each of
        them that the body returns (`results`), because a node of the body must compute what it
        returns."""
        copies = []
        for i, name in enumerate(node.output):
            if name in results:
                node.output[i] = _stored_name(name)
                copies.append(helper.make_node("Identity", [node.output[i]], [name]))
                self.walk.know(copies[-1], [values[i]])
        self.walk.fold(node, values)
        return copies

    def infer(self, node: NodeProto) -> None:
        """Records the types of a node's results; infers its bodies in place."""
        if not is_control(node):
            self.walk.infer(node)
            return
        bodies = {a.name: a.g for a in node.attribute if a.HasField("g")}
        if node.op_type == "If":
            for branch in bodies.values():
                self.graph(branch, is_body=True)
            by_branch = [self._results(branch) for branch in bodies.values()]
            self._know(node.output, [_common(*types) for types in zip(*by_branch, strict=True)])
        elif node.op_type == "Loop":
            self._loop(node, bodies["body"])
        else:
            self._scan(node, bodies["body"])

    def _loop(self, node: NodeProto, body: GraphProto) -> None:
        before = [self.walk.types.get(name) for name in node.input[2:]]
        counters = [_scalar(p.type, d) for p, d in zip(body.input, _COUNTERS, strict=False)]
        carried = self._settle(body, before, before=counters)
        results = self._results(body)[1 + len(carried) :]
        iterations = self._iterations(node, body)
        self._know(node.output, [*carried, *(_stacked(t, 0, iterations) for t in results)])

    def _scan(self, node: NodeProto, body: GraphProto) -> None:
        attributes = {a.name: a for a in node.attribute}
        states = len(node.input) - attributes["num_scan_inputs"].i
        types = [self.walk.types.get(name) for name in node.input]
        axes = _axes(attributes.get("scan_input_axes"), len(types))
        parts = [_element(t, axis) for t, axis in zip(types[states:], axes, strict=False)]
        carried = self._settle(body, types[:states], after=[t for t, _ in parts])
        results = self._results(body)[states:]
        steps = next((size for _, size in parts if size is not None), None)
        axes = _axes(attributes.get("scan_output_axes"), len(results))
        stacked = [_stacked(t, axis, steps) for t, axis in zip(results, axes, strict=True)]
        self._know(node.output, [*carried, *stacked])

    def _settle(
        self,
        body: GraphProto,
        given: Sequence[_Type],
        before: Sequence[_Type] = (),
        after: Sequence[_Type] = (),
    ) -> list[_Type]:
        """Infers a body in place; returns the types that its carried tensors (the states of a loop)
        have in every iteration. It repeats inference with fewer known sizes until iterations do not
        change the types.

        given   the types of the carried tensors before the first iteration
        before  types of the body's inputs before the carried tensors
        after   types of the body's inputs after them
        """
        ports = body.input[len(before) :]
        carried = [t or _bare(p.type) for t, p in zip(given, ports, strict=False)]
        skipped = len(before) // 2  # a Loop's body returns its condition, but not its counter
        while True:
            trial = GraphProto()
            trial.CopyFrom(body)
            self._know([p.name for p in body.input], [*before, *carried, *after])
            self.graph(trial, is_body=True)
            back = self._results(trial)[skipped : skipped + len(carried)]
            common = [_common(a, b) for a, b in zip(carried, back, strict=True)]
            if common == carried:
                body.CopyFrom(trial)
                return list(carried)
            self._forget(body)
            carried = [c or _bare(t) for c, t in zip(common, carried, strict=True)]

    def _iterations(self, node: NodeProto, body: GraphProto) -> int | None:
        """Returns the number of iterations of a Loop; None if it is known only in a run."""
        count, start = (self.walk.values.get(name) for name in node.input[:2])
        makers = {o: n for n in body.node for o in n.output}
        name = body.output[0].name
        while name in makers and makers[name].op_type == "Identity":
            name = makers[name].input[0]
        starts = not node.input[1] or (start is not None and bool(start.all()))
        goes_on = name == body.input[1].name or np.all(self.walk.values.get(name, np.False_))
        if count is None or not starts or not goes_on:
            return None
        return max(0, int(count.reshape(-1)[0]))

    def _results(self, body: GraphProto) -> list[_Type]:
        return [self.walk.types.get(port.name) for port in body.output]

    def _know(self, names: Iterable[str], types: Iterable[_Type]) -> None:
        for name, type_ in zip(names, types, strict=False):
            if name and type_ is not None:
                self.walk.types[name] = TypeProto()  # a type of its own: it may change
                self.walk.types[name].CopyFrom(type_)

    def _forget(self, body: GraphProto) -> None:
        """Removes all recorded types and values of a body's tensors, because its inputs were
        assumed wrongly."""
        names = {p.name for p in body.input}
        for node in body.node:
            names.update(node.output, map(_stored_name, node.output))
            for inner in subgraphs_of(node):
                self._forget(inner)
        for name in names:
            self.walk.types.pop(name, None)
            self.walk.values.pop(name, None)
            self.walk.protos.pop(name, None)
            self.walk.folded.discard(name)


def _stored_name(result: str) -> str:
    """Returns the name of the constant which an Identity copies to this result of a body."""
    return f"{result}::value"


_COUNTERS = (TensorProto.INT64, TensorProto.BOOL)
"""Dtypes of the first two inputs of a Loop's body: the iteration number and the condition."""


def _axes(attribute: onnx.AttributeProto | None, count: int) -> Sequence[int]:
    """Returns the axis of each of a Scan's `count` sequences, from the node's attribute; 0 by
    default."""
    return [0] * count if attribute is None else attribute.ints


def _scalar(declared: TypeProto, dtype: int) -> TypeProto:
    """Returns the type of a scalar of this dtype; or of a vector of one element, if the body
    declares its input so."""
    rank = len(declared.tensor_type.shape.dim)
    return helper.make_tensor_type_proto(dtype, [1] * min(rank, 1))


def _bare(type_: TypeProto) -> TypeProto:
    """Returns a copy of a type without its shape."""
    bare = TypeProto()
    bare.CopyFrom(type_)
    inner = bare
    while inner.WhichOneof("value") in ("sequence_type", "optional_type"):
        inner = getattr(inner, inner.WhichOneof("value")).elem_type
    if inner.HasField("tensor_type"):
        inner.tensor_type.ClearField("shape")
    return bare


def _common(a: _Type, b: _Type) -> _Type:
    """Returns type `a` without the sizes (or without the whole shape) in which `b` differs: [2, 3]
    and [2, 4] give [2, ?]."""
    if a is None or a == b:
        return a
    shapes = [t.tensor_type.shape for t in (a, b) if t and t.tensor_type.HasField("shape")]
    common = _bare(a)
    if len(shapes) < 2 or len(shapes[0].dim) != len(shapes[1].dim):
        return common
    common.tensor_type.shape.SetInParent()
    for x, y in zip(shapes[0].dim, shapes[1].dim, strict=True):
        dim = common.tensor_type.shape.dim.add()
        is_known = x.HasField("dim_value") and y.HasField("dim_value")
        if is_known and x.dim_value == y.dim_value:  # names and denotations do not matter
            dim.dim_value = x.dim_value
    return common


def _element(sequence: _Type, axis: int) -> tuple[_Type, int | None]:
    """Returns the type of the slices along `axis` that a Scan passes to its body, and their number
    (None: known only in a run)."""
    if sequence is None:
        return None, None
    element = TypeProto()
    element.CopyFrom(sequence)
    dims = element.tensor_type.shape.dim
    if not dims:
        return element, None
    axis %= len(dims)
    steps = dims[axis].dim_value if dims[axis].HasField("dim_value") else None
    del dims[axis]
    return element, steps


def _stacked(element: _Type, axis: int, count: int | None) -> _Type:
    """Returns the type of `count` results of this type, stacked along a new axis; count None: known
    only in a run."""
    if element is None or not element.tensor_type.HasField("shape"):
        return element
    sizes = list(element.tensor_type.shape.dim)
    row = TypeProto()
    row.tensor_type.elem_type = element.tensor_type.elem_type
    row.tensor_type.shape.SetInParent()
    length = onnx.TensorShapeProto.Dimension()
    if count is not None:
        length.dim_value = count
    sizes.insert(axis % (len(sizes) + 1), length)
    row.tensor_type.shape.dim.extend(sizes)
    return row


def _declare_bodies(node: NodeProto, walk: Walk) -> None:
    """Declares the inferred types of all tensors in the bodies of a node, at any depth."""
    for body in subgraphs_of(node) if is_control(node) else ():
        del body.value_info[:]
        results = {p.name for p in body.output}
        for inner in body.node:
            _declare_bodies(inner, walk)
            for name in inner.output:
                if name in walk.types and name not in results:
                    body.value_info.append(helper.make_value_info(name, walk.types[name]))
        for port in (*body.input, *body.output):
            port.type.CopyFrom(walk.types.get(port.name) or _bare(port.type))
