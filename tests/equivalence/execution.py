"""Runs a model, and the graphs of all its ranks, in float64 with the reference implementation of
ONNX.

It shares no kernel, no simulator and no reading of layouts with `onnxpar.verify`: ops are those of
`onnx.reference`, layouts are cut by `onnxpar.layout`, collectives are written here a third time.
Ranks run one node at a time, and wait for each other as they would: a rank posts a collective to a
queue for each stream, and it runs when it is at the head of the queues of all members.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = npt.NDArray[Any]
PLUGIN = "onnxpar"
_LOCAL = ("Gate", "After", "Rank", "GroupSize")
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


class Stuck(Exception):
    """Ranks cannot go on: an op fails, members disagree, or all wait."""


def widened(model: ModelProto) -> ModelProto:
    """A copy of a model, without functions, that computes in float64."""
    copy = inline_local_functions(model) if model.functions else ModelProto.FromString(
        model.SerializeToString()
    )  # fmt: skip
    for graph in _graphs(copy.graph):
        del graph.value_info[:]
        for tensor in graph.initializer:
            _widen(tensor)
        for port in (*graph.input, *graph.output):
            if port.type.tensor_type.elem_type in _FLOATS:
                port.type.tensor_type.elem_type = TensorProto.DOUBLE
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    _widen(attribute.t)
                if attribute.name in ("to", "dtype") and attribute.i in _FLOATS:
                    attribute.i = TensorProto.DOUBLE
    return copy


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        value = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def ordered(graph: GraphProto) -> list[NodeProto]:
    """The nodes of a graph, each behind those that it reads: also behind its tokens. Stuck if they
    wait for each other."""
    waiting = {name for node in graph.node for name in node.output if name}
    rest, done = list(graph.node), list[NodeProto]()
    while rest:
        later = []
        for node in rest:
            if waiting.isdisjoint(_read(node)):
                done.append(node)
                waiting.difference_update(node.output)
            else:
                later.append(node)
        if len(later) == len(rest):
            raise Stuck(f"nodes wait for each other: {later[0].name}")
        rest = later
    return done


def _read(node: NodeProto) -> set[str]:
    names = {*node.input}
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            inner = set().union(*map(_read, attribute.g.node)) if attribute.g.node else set()
            names |= inner - {name for node in attribute.g.node for name in node.output}
    return names - {""}


def _apart(node: NodeProto) -> list[NodeProto]:
    """The ops of a FusedElementwise; other nodes as they are."""
    if (node.domain, node.op_type) != (PLUGIN, "FusedElementwise"):
        return [node]
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    steps = [step.split() for step in attrs["program"].decode().split(";")]
    large = sum(
        1 for i in range(len(node.input)) if any(f"x{i}" in operands for _, *operands in steps)
    )
    inputs = {f"x{i}": name for i, name in enumerate(node.input[:large])}
    inputs |= {f"s{i}": name for i, name in enumerate(node.input[large:])}
    inputs |= {f"v{i}": f"{node.output[0]}::step{i}" for i in range(len(steps))}
    made = [
        helper.make_node(op, [inputs[name] for name in operands], [inputs[f"v{i}"]])
        for i, (op, *operands) in enumerate(steps)
    ]
    return made + [
        helper.make_node("Identity", [inputs[f"v{step}"]], [name])
        for name, step in zip(node.output, attrs["results"], strict=True)
    ]


class Executable:
    """A graph that is ready to run. Stuck if an op is unknown."""

    def __init__(self, model: ModelProto) -> None:
        try:
            wide = widened(model)
            nodes = [part for node in ordered(wide.graph) for part in _apart(node)]
            del wide.graph.node[:]
            wide.graph.node.extend(nodes)
            self.evaluator = ReferenceEvaluator(wide, new_ops=_PLUGIN_OPS)
        except Exception as error:  # the reference raises types of its own
            raise Stuck(f"{error}") from None
        self.inputs = [port.name for port in wide.graph.input]
        self.outputs = [port.name for port in wide.graph.output]
        self.attrs = [{a.name: helper.get_attribute_value(a) for a in n.attribute} for n in nodes]

    def values(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The first values: inputs and constants."""
        wide = {
            name: np.asarray(value, np.float64) if value.dtype.kind == "f" else value
            for name, value in feeds.items()
        }
        return {"": None, **self.evaluator.rt_inits_, **wide}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of a graph without collectives."""
        values = self.values(feeds)
        for _ in self.steps(values):
            raise Stuck("a model has collectives")
        return {name: values[name] for name in self.outputs}

    def steps(self, values: dict[str, Array]) -> Steps:
        """Runs the nodes. Yields each collective when the rank calls it, with False, and when the
        rank needs its result, with True; gets the result then."""
        pending: dict[str, Call] = {}
        for node, attrs in zip(self.evaluator.rt_nodes_, self.attrs, strict=True):
            if node.onnx_node.domain == PLUGIN:
                yield from _communicate(node.onnx_node, attrs, values, pending)
                continue
            try:
                inputs = [values[name] for name in node.input]
                context = {"context": values} if node.need_context() else {}
                with np.errstate(all="ignore"):
                    results = node.run(*inputs, **context)
            except Exception as error:  # the reference raises types of its own
                raise Stuck(f"{node.onnx_node.name}: {error!s:.200}") from None
            values.update(zip(node.output, results, strict=False))


@dataclass(eq=False)
class Call:
    """A collective that a rank calls."""

    op: str
    name: str
    attrs: dict[str, Any]
    operands: list[Array]
    result: Array | None = None


Steps = Generator[tuple[Call, bool], Any, None]


def _communicate(
    node: NodeProto, attrs: dict[str, Any], values: dict[str, Array], pending: dict[str, Call]
) -> Steps:
    result = node.output[0]
    if node.op_type in _LOCAL:
        values[result] = values[node.input[0]]
    elif node.op_type == "Complete":
        if node.input[0] not in pending:
            raise Stuck(f"{node.name} completes no collective")
        values[result] = yield pending[node.input[0]], True
    else:
        operands = [values.get(name) for name in node.input]
        call = Call(node.op_type.removeprefix("Start"), node.name, attrs, operands)
        yield call, False
        if node.op_type.startswith("Start"):
            pending[result] = call
            values[result] = np.zeros_like(operands[0])  # not yet
        else:
            values[result] = yield call, True


_Queues = dict[tuple[int, int], deque[Call]]


def run_ranks(
    graphs: Sequence[Executable], feeds: Sequence[Mapping[str, Array]]
) -> list[dict[str, Array]]:
    """All tensors of each rank after a run. Stuck if it does not end."""
    values = [graph.values(feed) for graph, feed in zip(graphs, feeds, strict=True)]
    runs = [graph.steps(own) for graph, own in zip(graphs, values, strict=True)]
    queues: _Queues = defaultdict(deque)
    waits: dict[int, Call] = {}
    for rank, run in enumerate(runs):
        _go_on(rank, run, None, queues, waits)
    while waits:
        while _match(queues, len(graphs)):
            pass
        ready = [rank for rank, call in waits.items() if call.result is not None]
        if not ready:
            names = ", ".join(f"rank {rank} in {call.name}" for rank, call in waits.items())
            raise Stuck(f"ranks wait for each other: {names}")
        for rank in ready:
            _go_on(rank, runs[rank], waits.pop(rank).result, queues, waits)
    if any(queues.values()):
        raise Stuck("a collective is left over")
    return values


def _go_on(
    rank: int, run: Steps, result: Array | None, queues: _Queues, waits: dict[int, Call]
) -> None:
    """Runs a rank until it waits, or ends."""
    for call, is_needed in _sent(run, result):
        if not is_needed:
            queues[rank, int(call.attrs.get("stream", 0))].append(call)
        elif call.result is None:
            waits[rank] = call
            return


def _sent(run: Steps, result: Array | None) -> Iterator[tuple[Call, bool]]:
    """Yields what a rank yields, and sends it the results."""
    try:
        while True:
            call, is_needed = run.send(result)
            yield call, is_needed
            result = call.result if is_needed else None
    except StopIteration:
        return


def _match(queues: _Queues, ranks: int) -> bool:
    """Runs a collective that is at the head of the queues of all its members; False if none is."""
    for (rank, stream), queue in list(queues.items()):
        if not queue:
            continue
        group = [int(m) for m in queue[0].attrs.get("group", range(ranks))]
        tag = queue[0].attrs["tag"]
        if rank not in group or not {*group} <= {*range(ranks)} or len({*group}) < len(group):
            raise Stuck(f"rank {rank} calls {queue[0].name} in the group {group}")
        heads = [q[0] for m in group if (q := queues.get((m, stream)))]
        if len(heads) < len(group) or any(head.attrs["tag"] != tag for head in heads):
            continue
        kinds = {(h.op, tuple(h.attrs.get("group", range(ranks)))) for h in heads}
        if len(kinds) > 1:
            raise Stuck(f"members of {queue[0].name} call other collectives: {kinds}")
        _run_collective(heads)
        for member in group:
            queues[member, stream].popleft()
        return True
    return False


def _run_collective(calls: Sequence[Call]) -> None:
    try:
        for me, call in enumerate(calls):
            call.result = np.asarray(_COLLECTIVES[call.op](calls, me))
    except (ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise Stuck(f"{calls[0].name}: {error!r:.200}") from None


def _cut(array: Array, axis: int, sizes: Sequence[int] | None, count: int) -> list[Array]:
    """The shards of an array: of these sizes, or as equal as possible."""
    if sizes is None:
        return np.array_split(array, count, axis)
    if sum(sizes) != array.shape[axis] or len(sizes) != count or min(sizes) < 0:
        raise ValueError(f"{array.shape[axis]} elements are cut into {sizes}")
    return np.split(array, np.cumsum(sizes)[:-1], axis)


def _sizes(call: Call, name: str = "sizes") -> Sequence[int] | None:
    """The sizes that a member expects, by attribute or by operand."""
    if name in call.attrs:
        return list(call.attrs[name])
    if name == "sizes" and len(call.operands) > 2 and call.operands[2] is not None:
        return [int(n) for n in call.operands[2]]
    return None


def _reduced(calls: Sequence[Call], me: int) -> Array:
    ops = {call.attrs.get("op", b"sum") for call in calls}
    if len(ops) > 1 or len({call.operands[0].shape for call in calls}) > 1:
        raise ValueError("members reduce in other ways, or other shapes")
    parts = [call.operands[0] for call in calls]
    return np.asarray(_REDUCTIONS[ops.pop().decode()].reduce(parts)).astype(parts[me].dtype)


def _reduce_scatter(calls: Sequence[Call], me: int) -> Array:
    own = calls[me]
    return _cut(_reduced(calls, me), own.attrs["axis"], _sizes(own), len(calls))[me]


def _all_gather(calls: Sequence[Call], me: int) -> Array:
    parts, axis, sizes = [c.operands[0] for c in calls], calls[me].attrs["axis"], _sizes(calls[me])
    if sizes is not None and [part.shape[axis] for part in parts] != sizes:
        raise ValueError("members have other sizes than expected")
    return np.concatenate(parts, axis)


def _all_to_all(calls: Sequence[Call], me: int) -> Array:
    pieces = [
        _cut(c.operands[0], c.attrs["split_axis"], _sizes(c, "split_sizes"), len(calls))[me]
        for c in calls
    ]
    axis, sizes = calls[me].attrs["concat_axis"], _sizes(calls[me], "concat_sizes")
    if sizes is not None and [piece.shape[axis] for piece in pieces] != sizes:
        raise ValueError("members send other sizes than expected")
    return np.concatenate(pieces, axis)


def _all_to_all_v(calls: Sequence[Call], me: int) -> Array:
    axis = calls[me].attrs.get("axis", 0)
    pieces = [_cut(c.operands[0], axis, list(c.operands[1]), len(calls))[me] for c in calls]
    if [piece.shape[axis] for piece in pieces] != list(calls[me].operands[2]):
        raise ValueError("members send other sizes than expected")
    return np.concatenate(pieces, axis)


def _broadcast(calls: Sequence[Call], me: int) -> Array:
    return calls[calls[me].attrs.get("root", 0)].operands[0]


def _permute(calls: Sequence[Call], me: int) -> Array:
    source = calls[me].attrs["sources"][me]
    return np.zeros_like(calls[me].operands[0]) if source < 0 else calls[source].operands[0]


def _neighbours(calls: Sequence[Call], me: int) -> Array:
    axis, before, after = (calls[me].attrs[key] for key in ("axis", "before", "after"))
    pieces = [calls[me].operands[0]]
    if before[me]:
        part = calls[me - 1].operands[0]
        size = part.shape[axis]
        pieces.insert(0, part.take(range(size - before[me], size), axis))
    if after[me]:
        pieces.append(calls[me + 1].operands[0].take(range(after[me]), axis))
    return np.concatenate(pieces, axis)


def _halo(calls: Sequence[Call], me: int) -> Array:
    first, end = (int(n) for n in calls[me].operands[1])
    axis = calls[me].attrs["axis"]
    return np.concatenate([c.operands[0] for c in calls], axis).take(range(first, end), axis)


_COLLECTIVES: dict[str, Callable[[Sequence[Call], int], Array]] = {
    "AllReduce": _reduced,
    "ReduceScatter": _reduce_scatter,
    "AllGather": _all_gather,
    "AllToAll": _all_to_all,
    "AllToAllV": _all_to_all_v,
    "Broadcast": _broadcast,
    "CollectivePermute": _permute,
    "NeighborExchange": _neighbours,
    "HaloExchange": _halo,
}


def _plugin_op(name: str) -> type[OpRun]:
    return type(name, (OpRun,), {"op_domain": PLUGIN, "_run": lambda self: ()})


_PLUGIN_OPS = [
    *map(_plugin_op, [*_LOCAL, "Complete"]),
    *(_plugin_op(start + name) for name in _COLLECTIVES for start in ("", "Start")),
]
