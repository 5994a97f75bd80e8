"""Computes parts of a model, and of all ranks' graphs, on drawn values: single ops by onnxruntime,
or by ONNX's reference if it has no kernel, collectives by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import GraphProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.equivalence.program import Node, Program, captured, schema_of
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks, align, communicates

Values = dict[str, Array]
MOST_TURNS = 1024
"""The most turns of a Loop in which ranks communicate."""
SUPPORTED = frozenset(
    ["AllReduce", "AllGather", "ReduceScatter", "AllToAll", "AllToAllV", "Broadcast",
     "CollectivePermute", "NeighborExchange", "HaloExchange", "Gate"]
)  # fmt: skip
"""The ops of the plugin that are computed here."""
SIZED = {"ReduceScatter": "sizes", "AllGather": "sizes", "AllToAll": "split_sizes"}
"""The attribute in whose place these ops may have a third operand."""
Reduction = Callable[[Sequence[Array]], Array]
_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


class NotComputed(Exception):
    """onnxruntime does not compute a part of a graph on these values."""


def plain_session(model: bytes) -> ort.InferenceSession:
    """A session that computes a model node by node, on one thread."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


class Runner:
    """Computes a model: onnxruntime does, or ONNX's reference where onnxruntime has no kernel, or
    NumPy no array for it. Errors: NotComputed."""

    def __init__(self, model: bytes) -> None:
        self._model: ort.InferenceSession | ReferenceEvaluator
        try:
            self._model = plain_session(model)
            ports = (*self._model.get_inputs(), *self._model.get_outputs())
            if not any("float8" in port.type or "bfloat16" in port.type for port in ports):
                return
        except Exception as error:  # onnxruntime raises types of its own
            if "NOT_IMPLEMENTED" not in str(error):
                raise NotComputed(f"{error!s:.200}") from None
        try:
            self._model = ReferenceEvaluator(onnx.load_from_string(model))
        except Exception as error:  # an op that the reference does not know, either
            raise NotComputed(f"{error!s:.200}") from None

    def run(self, wanted: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        """The results of these names."""
        try:
            found = self._model.run(list(wanted), dict(feeds))
        except Exception as error:  # of both, of any type
            raise NotComputed(f"{error!s:.200}") from None
        if not all(isinstance(value, np.ndarray | np.generic) for value in found):
            raise NotComputed("a result is no tensor")
        return [np.asarray(value) for value in found]


class Evaluator:
    """Runs nodes; sessions are kept for equal nodes. One that `is_wide` computes what is float32 in
    float64."""

    def __init__(self, is_wide: bool = False) -> None:
        self.is_wide = is_wide
        self._runners: dict[bytes, Runner] = {}

    def run(
        self, nodes: Sequence[Node], values: Mapping[str, Array], program: Program,
        wanted: Sequence[str],
    ) -> list[Array]:  # fmt: skip
        """The values of tensors that nodes compute. Errors: NotComputed."""
        made = {name for node in nodes for name in node.outputs}
        read = sorted({name for node in nodes for name in node.inputs if name} - made)
        read += sorted({name for node in nodes for name in captured(node.proto)} - made - {*read})
        try:
            feeds = {name: self.fed(values[name]) for name in read}
        except KeyError as error:
            raise NotComputed(f"{error} has no value") from None
        is_free = all(_has_one_body(node, program) for node in nodes)
        inputs = [
            helper.make_tensor_value_info(
                n, _type(value), [None] * value.ndim if is_free else value.shape
            )
            for n, value in feeds.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in wanted]
        graph = helper.make_graph([n.proto for n in nodes], "part", inputs, outputs)
        opsets = [helper.make_opsetid(d, v) for d, v in program.opsets.items() if d != PLUGIN]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        if self.is_wide:
            _widen(model.graph)
        data = model.SerializeToString(deterministic=True)
        if data not in self._runners:
            self._runners[data] = Runner(data)
        return self._runners[data].run(wanted, feeds)

    def fed(self, value: Array) -> Array:
        """A value as it is computed with."""
        own = np.asarray(value)
        return own.astype(np.float64) if self.is_wide and own.dtype == np.float32 else own

    def run_ranks(self, nodes: Sequence[RankNode], values: list[Values], ranks: Ranks) -> None:
        """Adds the results of nodes of ranks, which are in order, to the values of each rank. Nodes
        that cannot be computed on these values, and those behind them, have no results."""
        segment: list[RankNode] = []
        for node in [*nodes, None]:
            if node is not None and not communicates(node.first):
                segment.append(node)
                continue
            if segment and not self._run_segment(segment, values, ranks):
                for each in segment:
                    self._run_segment([each], values, ranks)
            segment = []
            if node is None:
                return
            with suppress(NotComputed, KeyError, ModelError):
                if node.first.domain == PLUGIN:
                    communicate(node, values)
                else:
                    self._run_bodies(node, values, ranks)

    def _run_bodies(self, node: RankNode, values: list[Values], ranks: Ranks) -> None:
        """Adds the results of an If, a Loop or a Scan in which ranks communicate: all take the same
        branch, and as many turns."""
        pairs = zip(values, node.nodes, strict=True)
        given = [[own.get(name) for name in each.inputs] for own, each in pairs]
        if node.first.op == "If":
            branch = "then_branch" if _agreed(own[0] for own in given) else "else_branch"
            found = self._run_body(node, branch, [[] for _ in values], values, ranks)
        elif node.first.op == "Loop":
            found = self._run_loop(node, given, values, ranks)
        else:
            found = self._run_scan(node, given, values, ranks)
        for own, each, results in zip(values, node.nodes, found, strict=True):
            own.update(zip(each.outputs, results, strict=True))

    def _run_body(
        self, node: RankNode, name: str, given: Sequence[Sequence[Array | None]],
        values: Sequence[Values], ranks: Ranks,
    ) -> list[list[Array]]:  # fmt: skip
        """The results of a body on each rank, for the values of its inputs."""
        bodies = [each.bodies[name] for each in node.nodes]
        inner: list[Values] = []
        for outer, body, own in zip(values, bodies, given, strict=True):
            pairs = zip(body.inputs, own, strict=True)
            inner.append({**outer, **body.constants, **{n: v for n, v in pairs if v is not None}})
        self.run_ranks(align([body.nodes for body in bodies]), inner, ranks)
        return [[own[n] for n in body.outputs] for own, body in zip(inner, bodies, strict=True)]

    def _run_loop(
        self, node: RankNode, given: Sequence[Sequence[Array | None]], values: Sequence[Values],
        ranks: Ranks,
    ) -> list[list[Array]]:  # fmt: skip
        most = _agreed(own[0] for own in given)
        going = _agreed(own[1] for own in given)
        carried: list[list[Array | None]] = [list(own[2:]) for own in given]
        stacks: list[list[list[Array]]] = [[] for _ in values]
        turn = 0
        while (most is None or turn < most) and going is not False:
            if turn == MOST_TURNS:
                raise NotComputed(f"{node.first.name} takes more than {MOST_TURNS} turns")
            start = [np.array(turn, np.int64), np.array(True)]
            found = self._run_body(node, "body", [[*start, *c] for c in carried], values, ranks)
            going = _agreed(own[0] for own in found)
            count = len(carried[0])
            carried = [list(own[1 : 1 + count]) for own in found]
            for stack, own in zip(stacks, found, strict=True):
                stack.append(own[1 + count :])
            turn += 1
        if not turn:
            raise NotComputed(f"{node.first.name} takes no turn")
        return [
            [*map(np.asarray, own), *map(np.stack, zip(*stack, strict=True))]
            for own, stack in zip(carried, stacks, strict=True)
        ]

    def _run_scan(
        self, node: RankNode, given: Sequence[Sequence[Array | None]], values: Sequence[Values],
        ranks: Ranks,
    ) -> list[list[Array]]:  # fmt: skip
        scanned = int(node.first.attrs["num_scan_inputs"])
        count = len(given[0]) - scanned
        carried: list[list[Array | None]] = [list(own[:count]) for own in given]
        rows = []
        for own, each in zip(given, node.nodes, strict=True):
            ways = _ways(each, "input", scanned)
            moved = [
                np.moveaxis(_known(v), w[0], 0) for v, w in zip(own[count:], ways, strict=True)
            ]
            rows.append([v[::-1] if w[1] else v for v, w in zip(moved, ways, strict=True)])
        stacks: list[list[list[Array]]] = [[] for _ in values]
        for turn in range(_agreed(np.array(len(v)) for own in rows for v in own) or 0):
            start = [[*c, *(v[turn] for v in own)] for c, own in zip(carried, rows, strict=True)]
            found = self._run_body(node, "body", start, values, ranks)
            carried = [list(own[:count]) for own in found]
            for stack, own in zip(stacks, found, strict=True):
                stack.append(own[count:])
        results = []
        for own, stack, each in zip(carried, stacks, node.nodes, strict=True):
            parts = list(zip(*stack, strict=True))
            joined = [
                np.moveaxis(np.stack(part[::-1] if back else part), 0, axis)
                for part, (axis, back) in zip(parts, _ways(each, "output", len(parts)), strict=True)
            ]
            results.append([*map(_known, own), *joined])
        return results

    def _run_segment(
        self, segment: Sequence[RankNode], values: Sequence[Values], ranks: Ranks
    ) -> bool:
        """Runs nodes on all ranks; False if a rank cannot compute them."""
        wanted = [name for node in segment for name in node.first.outputs if name]
        results = []
        try:
            for rank, own in enumerate(values):
                part = [node.nodes[rank] for node in segment]
                results.append(self.run(part, own, ranks.programs[rank], wanted))
        except NotComputed:
            return False
        for own, found in zip(values, results, strict=True):
            own.update(zip(wanted, found, strict=True))
        return True


def _has_one_body(node: Node, program: Program) -> bool:
    """False for an op whose definition depends on the shapes of its operands, or is not known."""
    schema = schema_of(node, program.opsets) if node.domain == "" else None
    return schema is not None and not schema.has_context_dependent_function  # type: ignore[attr-defined]


def _ways(node: Node, kind: str, count: int) -> list[tuple[int, int]]:
    """The axis and the direction of each tensor that a Scan goes through, or stacks."""
    axes = node.attrs.get(f"scan_{kind}_axes") or [0] * count
    return list(zip(axes, node.attrs.get(f"scan_{kind}_directions") or [0] * count, strict=True))


def _known(value: Array | None) -> Array:
    """A token has no value."""
    return np.zeros(0, np.float32) if value is None else np.asarray(value)


def _agreed(values: Iterable[Array | None]) -> Any:
    """What all ranks have; None if they have none. Errors: NotComputed."""
    found = [None if value is None else np.asarray(value).item() for value in values]
    if any(value != found[0] for value in found):
        raise NotComputed("ranks take other branches, or another number of turns")
    return found[0]


def _widen(graph: GraphProto) -> None:
    """Lets a graph compute in float64 in the place of float32."""
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for port in (*graph.input, *graph.output, *graph.value_info):
        if port.type.tensor_type.elem_type == TensorProto.FLOAT:
            port.type.tensor_type.elem_type = TensorProto.DOUBLE
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(_ZERO)))
        for attribute in node.attribute:
            _widen_tensor(attribute.t)
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
            for body in [attribute.g, *attribute.graphs]:
                _widen(body)


_ZERO = np.zeros(1, np.float32)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        value = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def _type(value: Array) -> int:
    if value.dtype.kind in "OSU":
        return int(TensorProto.STRING)
    return int(helper.np_dtype_to_tensor_dtype(value.dtype))


def communicate(
    node: RankNode, values: Sequence[Values], reduction: Reduction | None = None
) -> None:
    """Adds the results of a collective, or of a Gate, to the values of each rank. `reduction` takes
    the place of the collective's own."""
    first = node.first
    op, source, result = first.op.removeprefix("Start"), first.inputs[0], first.outputs[0]
    if op not in SUPPORTED:
        raise NotComputed(f"{op} is not computed here")
    held = [own[source] for own in values]
    for own in values:
        own.update(dict.fromkeys(first.outputs[1:], _known(None)))
    if op == "Gate":
        for own, value in zip(values, held, strict=True):
            own[result] = value
        return
    attrs: list[dict[str, Any]] = [dict(own.attrs) for own in node.nodes]
    for mine, attr in zip(values, attrs, strict=True):
        attr.setdefault("group", list(range(len(values))))
        if reduction is not None:
            attr["reduction"] = reduction
        if op == "AllToAllV":
            attr["sends"], attr["receives"] = (mine[n].tolist() for n in first.inputs[1:3])
        if op == "HaloExchange":
            attr["bounds"] = mine[first.inputs[1]].tolist()
        if op in SIZED and len(first.inputs) > 2:
            attr[SIZED[op]] = mine[first.inputs[2]].tolist()
    try:
        for rank, attr in enumerate(attrs):
            group = [int(m) for m in attr["group"]]
            members = [held[m] for m in group], [attrs[m] for m in group], group.index(rank)
            if attr.get("equal"):
                _check_equal(op, *members[:2])
            values[rank][result] = np.asarray(_COLLECTIVES[op](*members))
    except (ValueError, IndexError, KeyError) as error:
        raise NotComputed(f"{first.name}: {error}") from None


def _check_equal(op: str, parts: _Parts, attrs: _Attrs) -> None:
    """Members send blocks of one size. Errors: ValueError."""
    axis = attrs[0].get("axis", attrs[0].get("split_axis", 0))
    is_cut = op in ("ReduceScatter", "AllToAll")
    if len({p.shape for p in parts}) > 1 or (is_cut and parts[0].shape[axis] % len(parts)):
        raise ValueError("members send blocks of other sizes")


_Parts = Sequence[Array]
_Attrs = Sequence[Mapping[str, Any]]


def _cut(part: Array, axis: int, sizes: Sequence[int] | None, count: int) -> list[Array]:
    """The shards of a dimension: of the given sizes, or as equal as possible."""
    if sizes is None:
        return np.array_split(part, count, axis)
    if sum(sizes) != part.shape[axis]:
        raise ValueError(f"{part.shape[axis]} elements are cut into {list(sizes)}")
    return np.split(part, np.cumsum(sizes)[:-1], axis)


def _all_reduce(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    own = attrs[me]
    if "reduction" in own:
        return np.asarray(own["reduction"](parts))
    reduction = _REDUCTIONS[own.get("op", "sum")]
    return np.asarray(reduction.reduce(list(parts))).astype(parts[me].dtype)


def _reduce_scatter(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    own = attrs[me]
    return _cut(_all_reduce(parts, attrs, me), own["axis"], own.get("sizes"), len(parts))[me]


def _joined(parts: _Parts, axis: int, sizes: Sequence[int] | None) -> Array:
    whole = np.concatenate(parts, axis)
    if sizes is not None and [part.shape[axis] for part in parts] != list(sizes):
        raise ValueError("members send other sizes than expected")
    return whole


def _all_gather(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    return _joined(parts, attrs[me]["axis"], attrs[me].get("sizes"))


def _all_to_all(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    own = attrs[me]
    pieces = [
        _cut(part, a["split_axis"], a.get("split_sizes"), len(parts))[me]
        for part, a in zip(parts, attrs, strict=True)
    ]
    return _joined(pieces, own["concat_axis"], own.get("concat_sizes"))


def _all_to_all_v(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    axis = attrs[me].get("axis", 0)
    pieces = [
        _cut(part, axis, own["sends"], len(parts))[me]
        for part, own in zip(parts, attrs, strict=True)
    ]
    if [piece.shape[axis] for piece in pieces] != attrs[me]["receives"]:
        raise ValueError("a member sends another number of rows than is received")
    return np.concatenate(pieces, axis)


def _broadcast(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    return parts[int(attrs[me].get("root", 0))]


def _permute(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    source = attrs[me]["sources"][me]
    return np.zeros_like(parts[me]) if source < 0 else parts[source]


def _neighbours(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    axis, before, after = (attrs[me][key] for key in ("axis", "before", "after"))
    pieces = [parts[me]]
    if before[me]:
        size = parts[me - 1].shape[axis]
        pieces.insert(0, parts[me - 1].take(range(size - before[me], size), axis))
    if after[me]:
        pieces.append(parts[me + 1].take(range(after[me]), axis))
    return np.concatenate(pieces, axis)


def _halo(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    axis, (start, end) = attrs[me]["axis"], attrs[me]["bounds"]
    return np.concatenate(parts, axis).take(range(start, end), axis)


_COLLECTIVES = {
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "AllToAll": _all_to_all,
    "AllToAllV": _all_to_all_v,
    "Broadcast": _broadcast,
    "CollectivePermute": _permute,
    "NeighborExchange": _neighbours,
    "HaloExchange": _halo,
}
