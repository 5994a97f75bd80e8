"""Computes parts of a model, and of all ranks' graphs, on drawn values: single ops by onnxruntime,
collectives by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxpar.base.arrays import Array
from onnxpar.equivalence.program import Node, Program, captured
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks

Values = dict[str, Array]
SUPPORTED = frozenset(
    ["AllReduce", "AllGather", "ReduceScatter", "AllToAll", "AllToAllV", "Broadcast",
     "CollectivePermute", "NeighborExchange", "HaloExchange", "Gate"]
)  # fmt: skip
"""The ops of the plugin that are computed here."""
Reduction = Callable[[Sequence[Array]], Array]
_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


class NotComputed(Exception):
    """onnxruntime does not compute a part of a graph on these values."""


def plain_session(model: bytes) -> ort.InferenceSession:
    """A session that computes a model node by node, on one thread."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, ["CPUExecutionProvider"])


class Evaluator:
    """Runs nodes; sessions are kept for equal nodes."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, ort.InferenceSession] = {}

    def run(
        self, nodes: Sequence[Node], values: Mapping[str, Array], program: Program,
        wanted: Sequence[str],
    ) -> list[Array]:  # fmt: skip
        """The values of tensors that nodes compute. Errors: NotComputed."""
        made = {name for node in nodes for name in node.outputs}
        read = sorted({name for node in nodes for name in node.inputs if name} - made)
        read += sorted({name for node in nodes for name in captured(node.proto)} - made - {*read})
        try:
            feeds = {name: values[name] for name in read}
        except KeyError as error:
            raise NotComputed(f"{error} has no value") from None
        inputs = [
            helper.make_tensor_value_info(name, _type(value), None) for name, value in feeds.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in wanted]
        graph = helper.make_graph([n.proto for n in nodes], "part", inputs, outputs)
        opsets = [helper.make_opsetid(d, v) for d, v in program.opsets.items() if d != PLUGIN]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        data = model.SerializeToString(deterministic=True)
        try:
            if data not in self._sessions:
                self._sessions[data] = plain_session(data)
            found = self._sessions[data].run(list(wanted), feeds)
        except Exception as error:  # onnxruntime raises types of its own
            raise NotComputed(f"{error!s:.200}") from None
        return [np.asarray(value) for value in found]

    def run_ranks(self, nodes: Sequence[RankNode], values: list[Values], ranks: Ranks) -> None:
        """Adds the results of nodes of ranks, which are in order, to the values of each rank. Nodes
        that cannot be computed on these values, and those behind them, have no results."""
        segment: list[RankNode] = []
        for node in [*nodes, None]:
            if node is not None and node.first.domain != PLUGIN:
                segment.append(node)
                continue
            if segment and not self._run_segment(segment, values, ranks):
                for each in segment:
                    self._run_segment([each], values, ranks)
            segment = []
            if node is not None and all(node.first.inputs[0] in own for own in values):
                try:
                    communicate(node, values)
                except NotComputed:
                    continue

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
    try:
        for rank, attr in enumerate(attrs):
            group = [int(m) for m in attr["group"]]
            members = [held[m] for m in group], [attrs[m] for m in group], group.index(rank)
            values[rank][result] = np.asarray(_COLLECTIVES[op](*members))
    except (ValueError, IndexError, KeyError) as error:
        raise NotComputed(f"{first.name}: {error}") from None


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


def _all_gather(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    return np.concatenate(parts, attrs[me]["axis"])


def _all_to_all(parts: _Parts, attrs: _Attrs, me: int) -> Array:
    own = attrs[me]
    pieces = [
        _cut(part, a["split_axis"], a.get("split_sizes"), len(parts))[me]
        for part, a in zip(parts, attrs, strict=True)
    ]
    return np.concatenate(pieces, own["concat_axis"])


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
