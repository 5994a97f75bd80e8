"""Simulates all ranks of a rank's graph (as lowering writes it) in one process, node by node, with
collectives in NumPy.

This is a second definition of each collective, independent of the plugin. The oracle uses it to
test rules of ops inside which ranks communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.per_rank import PerRank
from onnxpar.testing.case import Program, compiled, has_fixed_sizes

Values = dict[str, Array]
"""The tensors that a rank has, by name."""

_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def run_ranks(
    graph: gs.Graph, feeds: Sequence[Mapping[str, Array]], per_rank: PerRank
) -> list[list[Array]]:
    """Runs a graph on all ranks. Returns each rank's results, in order.

    feeds     each rank's operands, by name
    per_rank  the constants and attributes that differ between ranks
    """
    values: list[Values] = [
        {**feed, **{name: value(rank) for name, value in per_rank.constants.items()}}
        for rank, feed in enumerate(feeds)
    ]
    _run_nodes(graph, values, per_rank)
    return [[held[t.name] for t in graph.outputs] for held in values]


def _run_nodes(graph: gs.Graph, values: Sequence[Values], per_rank: PerRank) -> None:
    """Runs all nodes on all ranks, and adds their results to each rank's `values`."""
    for node in graph.nodes:
        attrs = [_attributes(node, per_rank, rank) for rank in range(len(values))]
        if node.domain == DOMAIN:
            _communicate(node, attrs, values)
            continue
        if node.op == "Scan":
            _scan(node, attrs, values, per_rank)
            continue
        differs = (
            "seed" in node.attrs
            or has_fixed_sizes(node)
            or any(name == node.name for name, _ in per_rank.attributes)
        )
        program = None
        for own, held in zip(attrs, values, strict=True):
            if program is None or differs:
                program = _program(node, own, graph, held)
            feeds = {t.name: held[t.name] for t in node.inputs if t.name in held}
            named = [t.name for t in node.outputs if t.name]
            held.update(zip(named, program.run(feeds), strict=True))


def _scan(
    node: gs.Node, attrs: Sequence[Mapping[str, Any]], values: Sequence[Values], per_rank: PerRank
) -> None:
    """Runs a Scan: each iteration runs on all ranks before the next one, as bodies may have
    collectives. Scan axes must be 0."""
    body = node.attrs["body"]
    carried = len(node.inputs) - node.attrs["num_scan_inputs"]
    states = [[held[t.name] for t in node.inputs[:carried]] for held in values]
    sequences = [[held[t.name] for t in node.inputs[carried:]] for held in values]
    made: list[list[list[Array]]] = [[[] for _ in body.outputs[carried:]] for _ in values]
    steps = len(sequences[0][0])
    for i in range(steps):
        inner: list[Values] = []
        for held, own, ends, given in zip(values, attrs, states, sequences, strict=True):
            flags = own["scan_input_directions"]
            elements = [s[steps - 1 - i if f else i] for s, f in zip(given, flags, strict=True)]
            names = [t.name for t in body.inputs]
            inner.append({**held, **dict(zip(names, [*ends, *elements], strict=True))})
        _run_nodes(body, inner, per_rank)
        for rank, held in enumerate(inner):
            ends = [held[t.name] for t in body.outputs]
            states[rank] = ends[:carried]
            for result, element in zip(made[rank], ends[carried:], strict=True):
                result.append(element)
    for held, own, ends, results in zip(values, attrs, states, made, strict=True):
        flags = own["scan_output_directions"]
        stacks = [np.array(r[::-1] if f else r) for r, f in zip(results, flags, strict=True)]
        held.update(zip([t.name for t in node.outputs], [*ends, *stacks], strict=True))


def _attributes(node: gs.Node, per_rank: PerRank, rank: int) -> dict[str, Any]:
    """Returns the attributes of a node on a rank."""
    varying = {k: f(rank) for (n, k), f in per_rank.attributes.items() if n == node.name}
    return {**node.attrs, **varying}


def _program(node: gs.Node, attrs: dict[str, Any], graph: gs.Graph, held: Values) -> Program:
    """Returns a program that runs one node with a rank's values `held`. Ranks with equal attributes
    share it; its random generator continues from run to run."""
    inputs = [
        gs.Variable.empty() if not t.name else _operand(t, held.get(t.name)) for t in node.inputs
    ]
    made = [gs.Variable(t.name) for t in node.outputs]
    alone = gs.Graph(
        [gs.Node(node.op, node.name, attrs, inputs, made, node.domain)],
        [t for t in inputs if isinstance(t, gs.Variable) and t.name],
        [t for t in made if t.name],
        opset=graph.opset,
        import_domains=graph.import_domains,
    )
    return compiled(alone)


def _operand(tensor: gs.Tensor, value: Array | None) -> gs.Tensor:
    """Returns a tensor as an operand: a variable like `value`, or a constant if `value` is None."""
    if value is None:
        return gs.Constant(tensor.name, tensor.values)
    return gs.Variable(tensor.name, value.dtype, value.shape)


def _communicate(
    node: gs.Node, attrs: Sequence[Mapping[str, Any]], values: Sequence[Values]
) -> None:
    """Runs a collective on all ranks, and adds its result to each rank's `values`."""
    source, result = node.inputs[0].name, node.outputs[0].name
    held = [own[source] if source in own else np.asarray(node.inputs[0].values) for own in values]
    if node.op == "HaloExchange":
        wanted = node.inputs[1].name
        attrs = [{**own, "bounds": mine[wanted]} for own, mine in zip(attrs, values, strict=True)]
    if node.op == "AllToAllV":
        sizes = [[mine[t.name] for t in node.inputs[1:3]] for mine in values]
        attrs = [
            {**own, "sends": sends, "receives": receives}
            for own, (sends, receives) in zip(attrs, sizes, strict=True)
        ]
    for rank, own in enumerate(attrs):
        group = own["group"]
        values[rank][result] = _COLLECTIVES[node.op](
            [held[m] for m in group], [attrs[m] for m in group], group.index(rank)
        )


def _all_reduce(parts: Sequence[Array], attrs: Sequence[Mapping[str, Any]], me: int) -> Array:
    """Returns the reduction of all members' parts.

    In this function and the next ones, `parts` are the operands of the members of a group, `attrs`
    their attributes, and `me` the index of the member whose result is returned.
    """
    return np.asarray(_REDUCTIONS[attrs[me]["op"]].reduce(parts)).astype(parts[me].dtype)


def _all_gather(parts: Sequence[Array], attrs: Sequence[Mapping[str, Any]], me: int) -> Array:
    axis = attrs[me]["axis"]
    assert [p.shape[axis] for p in parts] == list(attrs[me]["sizes"])
    return np.concatenate(parts, axis)


def _exchange(parts: Sequence[Array], attrs: Sequence[Mapping[str, Any]], me: int) -> Array:
    """Returns this member's part between the last elements of the member before and the first
    elements of the member after."""
    axis, before, after = (attrs[me][key] for key in ("axis", "before", "after"))
    pieces = [parts[me]]
    if before[me]:
        size = parts[me - 1].shape[axis]
        pieces.insert(0, parts[me - 1].take(range(size - before[me], size), axis))
    if after[me]:
        pieces.append(parts[me + 1].take(range(after[me]), axis))
    return np.concatenate(pieces, axis)


def _halo_exchange(parts: Sequence[Array], attrs: Sequence[Mapping[str, Any]], me: int) -> Array:
    """Returns the elements of the members' joined parts between this member's bounds."""
    axis, (first, end) = attrs[me]["axis"], attrs[me]["bounds"]
    whole = np.concatenate(parts, axis)
    assert 0 <= first <= end <= whole.shape[axis]
    return whole.take(range(first, end), axis)


def _all_to_all(parts: Sequence[Array], attrs: Sequence[Mapping[str, Any]], me: int) -> Array:
    pieces = []
    for part, own in zip(parts, attrs, strict=True):
        ends = np.cumsum(own["split_sizes"])
        pieces.append(np.split(part, ends[:-1], own["split_axis"])[me])
    axis = attrs[me]["concat_axis"]
    assert [p.shape[axis] for p in pieces] == list(attrs[me]["concat_sizes"])
    return np.concatenate(pieces, axis)


def _all_to_all_v(parts: Sequence[Array], attrs: Sequence[Mapping[str, Any]], me: int) -> Array:
    axis = attrs[me]["axis"]
    pieces = [
        np.split(part, np.cumsum(own["sends"])[:-1], axis)[me]
        for part, own in zip(parts, attrs, strict=True)
    ]
    assert [p.shape[axis] for p in pieces] == list(attrs[me]["receives"])
    return np.concatenate(pieces, axis)


def _permute(parts: Sequence[Array], attrs: Sequence[Mapping[str, Any]], me: int) -> Array:
    source = attrs[me]["sources"][me]
    return np.zeros_like(parts[me]) if source < 0 else parts[source]


_COLLECTIVES = {
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "NeighborExchange": _exchange,
    "HaloExchange": _halo_exchange,
    "AllToAll": _all_to_all,
    "AllToAllV": _all_to_all_v,
    "CollectivePermute": _permute,
}
