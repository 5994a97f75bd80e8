"""Summarizes a graph as a plan: weights, memory, FLOPs, and nodes that stay whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx_graphsurgeon as gs

from onnxpar.base.packing import stored_bits
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import OnHost, Plan, Port, RankLoad, Weight, Whole, open_shape
from onnxpar.compiler.ranges import integer_ranges, lookups
from onnxpar.graph.collectives import KINDS
from onnxpar.graph.interchange import declared_shape, default_of, type_text
from onnxpar.graph.lazy_values import stacked_parts
from onnxpar.graph.paged_attention import written_in_place
from onnxpar.graph.reshards import is_reshard, operands_of
from onnxpar.graph.state_pairs import missing_states
from onnxpar.graph.subgraphs import all_nodes, bodies, captured, constants, read_by, subgraphs
from onnxpar.graph.tensors import numpy_dtype, tensor_shape
from onnxpar.layout.layout import Layout, leaves
from onnxpar.layout.mesh import Mesh
from onnxpar.rules.contrib_experts import EXPERT_WEIGHTS
from onnxpar.rules.rule import is_lack
from onnxpar.runtime.states.first_states import STORED, ZERO
from onnxpar.search.search import AUTO, EXHAUSTIVE
from onnxpar.sharding.factors import Links, OpFactors
from onnxpar.sharding.flops import flops, flops_of_ranks
from onnxpar.sharding.shard_bytes import largest_shard_bytes, shard_bytes
from onnxpar.strategy.contraction import is_contraction


def summarize(graph: gs.Graph, ctx: PassContext, name: str, preset: str | None) -> Plan:
    """Returns the plan of a graph after insert-collectives, while shapes are still global: without
    collectives and times, which later passes know.

    name, preset  for the entries `model` and `preset` of the plan
    """
    weights = _weights(graph, ctx)
    initial = _initial(graph, ctx)
    loads = _loads(graph, ctx)
    return Plan(
        name,
        ctx.sharding.mesh,
        preset,
        [_port(t, ctx, initial) for t in graph.inputs],
        [_port(t, ctx) for t in graph.outputs],
        list(ctx.model.states),
        [],
        weights,
        list(whole_nodes(ctx, preset)),
        _memory(graph, ctx, loads),
        _flops(ctx, loads),
        integer_ranges(graph),
        ctx.model.fixed,
        initial=initial,
        in_place=written_in_place(graph, ctx.model.states),
        on_host=_on_host(graph, ctx),
        step=ctx.model.step,
        lookups=lookups(graph, ctx.model.sizes is not None),
        unpaired=missing_states(graph, ctx.model.states),
        loads=loads,
        notes=list(_assumptions(ctx)),
        costs=ctx.sharding.costs.topology.origin,
        proof=ctx.request.proof,
    )


def _assumptions(ctx: PassContext) -> Iterator[str]:
    """Yields a sentence that says on which balance of experts FLOPs, memory and times of mixtures
    of experts rest; none for other models."""
    mixtures: dict[str, None] = {}
    for op in filter(is_contraction, ctx.sharding.factors.ops):
        if op.node.op in EXPERT_WEIGHTS:
            experts = (tensor_shape(op.node.inputs[1]) or ())[-1]
            mixtures[f"{op.node.attrs.get('k', 1)} of {experts} experts"] = None
        share = op.computed(ctx.sharding.op_axes(op))
        if share < 1 and op.chosen is not None:
            (experts,) = {leaf.size for leaf in op.leaves if leaf.atom == op.chosen.atom}
            mixtures[f"{share * experts:g} of {experts} experts"] = None
    if mixtures:
        yield (
            f"each row of a mixture has {' or '.join(mixtures)} (a token may be several rows); "
            "FLOPs, activations and times are of a router that chooses all of them equally often"
        )


def _memory(graph: gs.Graph, ctx: PassContext, loads: Sequence[RankLoad]) -> dict[str, int]:
    """Returns the bytes that a rank holds, by kind, each as the maximum over ranks."""
    if loads:
        return {
            "weights_per_rank": max(load.weights for load in loads),
            "states_per_rank": max(load.states for load in loads),
            "activations_per_rank": max(load.activations for load in loads),
        }
    return {
        "weights_per_rank": _most_weights(graph, ctx),
        "states_per_rank": max(_states(graph, ctx, r) for r in _sample(ctx.sharding.mesh.size)),
        "activations_per_rank": peak_activations(graph, graph.nodes, ctx),
    }


def _loads(graph: gs.Graph, ctx: PassContext) -> list[RankLoad]:
    """Returns the memory and work of each rank; empty if all ranks have the same kind of device."""
    topology, mesh = ctx.sharding.costs.topology, ctx.sharding.mesh
    if len(ctx.sharding.costs.devices) == 1:
        return []
    ops = [op for op in ctx.sharding.factors.ops if is_contraction(op)]
    columns = [flops_of_ranks(op, ctx.sharding, range(mesh.size)) for op in ops]
    counts = [sum(column) for column in zip(*columns, strict=True)] or [0] * mesh.size
    inner = sum(w.bytes for w in _inner_weights(graph, mesh))
    return [
        RankLoad(
            sum(_held_weight(t, ctx, rank) for t in constants(graph)) + inner,
            _states(graph, ctx, rank),
            peak_activations(graph, graph.nodes, ctx, rank),
            counts[rank],
            topology.device_of(rank).memory,
        )
        for rank in range(mesh.size)
    ]


def _weight_bytes(tensor: gs.Constant, ctx: PassContext, rank: int) -> int:
    layout = ctx.layouts.get(tensor.name) or Layout.whole(tensor.shape)
    return shard_bytes(tensor, layout, ctx.sharding.mesh, rank)


def _initial(graph: gs.Graph, ctx: PassContext) -> dict[str, str]:
    """Returns where the first value of each state comes from, by input name: STORED in the model,
    or ZERO. States that must be fed are left out."""
    states = dict(ctx.model.states)
    stored = {t.name for t in graph.inputs if t.name in states and default_of(t) is not None}
    zero = {slot.input for slot in ctx.model.step.slots} if ctx.model.step else set()
    return {n: STORED if n in stored else ZERO for n in states if n in stored | zero}


def _port(tensor: gs.Variable, ctx: PassContext, initial: Collection[str] = ()) -> Port:
    layout = ctx.layouts.get(tensor.name)
    shape = declared_shape(tensor) if layout is None else open_shape(layout.shape)
    dtype = None if tensor.dtype is None else numpy_dtype(tensor).name
    has_default = default_of(tensor) is not None or tensor.name in initial
    return Port(tensor.name, dtype, shape, layout, type_text(tensor), has_default)


def _weights(graph: gs.Graph, ctx: PassContext) -> list[Weight]:
    """Returns the entry of each weight for the plan, with the bytes of its largest shard."""
    out = []
    mesh = ctx.sharding.mesh
    for tensor in constants(graph):
        # A weight that only unsplit bodies read has no layout.
        layout = ctx.layouts.get(tensor.name) or Layout.whole(tensor.shape)
        dtype = numpy_dtype(tensor)
        size = -(-math.prod(tensor.shape) * stored_bits(dtype) // 8)
        largest = max(_weight_bytes(tensor, ctx, r) for r in _sample(mesh.size))
        name = ctx.copies.get(tensor.name, tensor.name)
        shape = tuple(int(s) for s in tensor.shape)
        stacks = tuple(part.name for part in stacked_parts(tensor))
        layouts = layout.to_json(), layout.text(mesh)
        out.append(Weight(name, tensor.name, shape, dtype.name, *layouts, size, largest, stacks))
    return [*out, *_inner_weights(graph, mesh)]


def _most_weights(graph: gs.Graph, ctx: PassContext) -> int:
    """Returns the bytes of weights on the rank that holds most."""
    mesh = ctx.sharding.mesh
    inner = sum(weight.bytes for weight in _inner_weights(graph, mesh))
    ranks = _sample(mesh.size)
    return inner + max(sum(_held_weight(t, ctx, r) for t in constants(graph)) for r in ranks)


def _held_weight(tensor: gs.Constant, ctx: PassContext, rank: int) -> int:
    """Bytes of a weight in a rank's memory; 0 for a weight that stays in its file."""
    return 0 if tensor.name in ctx.model.on_host else _weight_bytes(tensor, ctx, rank)


def _on_host(graph: gs.Graph, ctx: PassContext) -> OnHost | None:
    """Returns the weights and states that stay in files, and their bytes per rank; None if there
    are none."""
    mesh = ctx.sharding.mesh
    tensors = [t for t in (*graph.inputs, *constants(graph)) if t.name in ctx.model.on_host]
    layouts = {t.name: ctx.layouts.get(t.name) or Layout.whole(t.shape) for t in tensors}
    bytes_of_ranks = [
        sum(shard_bytes(t, layouts[t.name], mesh, rank) for t in tensors)
        for rank in _sample(mesh.size)
    ]
    return OnHost([t.name for t in tensors], max(bytes_of_ranks)) if tensors else None


def _inner_weights(graph: gs.Graph, mesh: Mesh) -> Iterator[Weight]:
    """Yields constants inside bodies (of loops and branches), which every rank has whole."""
    for node in all_nodes(graph):
        value = node.attrs.get("value") if node.op == "Constant" else None
        if isinstance(value, gs.Constant):
            dtype, shape = numpy_dtype(value), tuple(int(s) for s in value.shape)
            size = -(-math.prod(shape) * stored_bits(dtype) // 8)
            layout, name = Layout.whole(shape), node.outputs[0].name
            layouts = layout.to_json(), layout.text(mesh)
            yield Weight(name, name, shape, dtype.name, *layouts, size, size)


def _states(graph: gs.Graph, ctx: PassContext, rank: int) -> int:
    """Returns the bytes of the states (caches, parameters) that a rank keeps between runs."""
    names = {source for source, _ in ctx.model.states} - {*ctx.model.on_host}
    tensors = [t for t in graph.inputs if t.name in names and t.name in ctx.layouts]
    mesh = ctx.sharding.mesh
    return sum(shard_bytes(t, ctx.layouts[t.name], mesh, rank) for t in tensors)


def _sample(ranks: int) -> list[int]:
    """Returns the ranks among which to look for the largest shard: all ranks up to 64, because
    uneven layouts may give any of them the largest; beyond, the first and the last."""
    return list(range(ranks)) if ranks <= 64 else [0, ranks - 1]


def _spread(ranks: int) -> list[int]:
    """Returns the ranks over which to average: all ranks up to 64; beyond, 64 ranks with different
    coordinates along each axis."""
    step = ranks // 64
    return list(range(ranks)) if ranks <= 64 else [i * step + i % step for i in range(64)]


def whole_nodes(ctx: PassContext, preset: str | None) -> list[Whole]:
    """Returns the nodes that run whole on every rank, with reasons: nodes whose operands had to be
    gathered, because their rule needs them whole; nodes without a sharding rule; contractions
    (matrix products, convolutions) that no axis splits; and nodes with bodies that are not split.
    """
    out = []
    for op in ctx.sharding.factors.ops if ctx.sharding.mesh.size > 1 else []:
        lost = _gathered(op, ctx)
        unruled = any(map(is_lack, op.whole.values()))
        idle = is_contraction(op) and not any(ctx.sharding.op_axes(op))
        shut = bool(bodies(op.node)) and not op.bodies
        if lost or unruled or shut:
            reason = (
                "; ".join(dict.fromkeys(op.whole.values()))
                or "it is split along other axes than its operands were"
            )
            out.append(Whole(op.node.name, op.node.op, reason, lost))
        elif idle:
            lost = _bytes([t for t in op.node.inputs if _comes_gathered(t)], ctx)
            out.append(Whole(op.node.name, op.node.op, _why_idle(preset, bool(lost)), lost))
    return out


def _why_idle(preset: str | None, is_gathered: bool) -> str:
    """Returns why a node that could be split is not. Costs are given as the reason only after a
    search, because only a search compares them."""
    if preset not in (AUTO, EXHAUSTIVE):
        return "neither the strategy nor propagation splits it" + (
            ", so its operands are gathered" if is_gathered else ""
        )
    if is_gathered:
        return "gathering its operands costs less than splitting it"
    return "splitting it would save less time than the collectives cost"


def _gathered(op: OpFactors, ctx: PassContext) -> int:
    """Returns the bytes that ranks gather for this node alone: of its operands, and of outer
    tensors that its bodies read."""
    whole = [
        tensor
        for tensor, links in zip(op.node.inputs, op.inputs, strict=True)
        if any(_is_made_whole(n, links) for n in tensor.inputs)
    ]
    read = {} if op.bodies else {id(tensor): tensor for tensor, _, _ in captured(op.node)}
    whole += [t for t in read.values() if any(_makes_whole(n) for n in t.inputs)]
    return _bytes(whole, ctx)


def _bytes(tensors: Iterable[gs.Tensor], ctx: PassContext) -> int:
    """Returns the bytes of the largest shard of each of these tensors, summed; constants do not
    count."""
    return sum(
        largest_shard_bytes(tensor, ctx.layouts[tensor.name])
        for tensor in tensors
        if isinstance(tensor, gs.Variable)
    )


def _comes_gathered(tensor: gs.Tensor) -> bool:
    return any(_gathers(node) for node in tensor.inputs)


def _makes_whole(node: gs.Node) -> bool:
    return is_reshard(node) and KINDS[node.op].makes_whole


def _gathers(node: gs.Node) -> bool:
    return is_reshard(node) and node.op == "AllGather"


def _is_made_whole(node: gs.Node, links: Links) -> bool:
    """True if `node` gathers a dimension that its reader's rule cannot split; False if the reader
    could have taken it split.

    links  for each factor in the tensor's dimensions, the reader's factor; None: the reader needs
           it whole
    """
    if not _gathers(node):
        return False
    ((_, before, after),) = operands_of(node)
    old, new = (
        [leaf.axes for dim in layout.dims for leaf in leaves(dim) if leaf.is_leaf]
        for layout in (before, after)
    )
    return any(link is None and a != b for link, a, b in zip(links, old, new, strict=True))


def _flops(ctx: PassContext, loads: Sequence[RankLoad]) -> dict[str, int]:
    """Returns the FLOPs of matrix products and convolutions: `model` for the unsplit model,
    `per_rank` for the rank with most, `mean` over ranks."""
    ops = [op for op in ctx.sharding.factors.ops if is_contraction(op)]
    by_rank = [load.flops for load in loads]
    if not by_rank:
        ranks = _spread(ctx.sharding.mesh.size)
        columns = [flops_of_ranks(op, ctx.sharding, ranks) for op in ops]
        by_rank = [sum(column) for column in zip(*columns, strict=True)] or [0]
    return {
        "model": sum(flops(op) for op in ops),
        "per_rank": max(by_rank),
        "mean": round(sum(by_rank) / len(by_rank)),
    }


def activations(
    graph: gs.Graph, nodes: Sequence[gs.Node], ctx: PassContext, rank: int | None = None
) -> list[int]:
    """Returns the bytes of live activations while each of these nodes runs, in this order: on
    `rank`, or if that is None, by the largest shard of each tensor.

    An input counts all the time, a result until its last reader has run, an output to the end.
    States do not count, nor results that replace them in their memory, nor tensors inside bodies.
    """
    in_place = written_in_place(graph, ctx.model.states)
    states = {source for source, _ in ctx.model.states}
    states |= {result for source, result in ctx.model.states if source in in_place}
    alive = sum(_activation_bytes(t, ctx, rank) for t in graph.inputs if t.name not in states)
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for tensor in read_by(node):
            last[tensor.name] = i
    last.update((tensor.name, len(nodes)) for tensor in graph.outputs)
    ends: dict[int, list[int]] = {}
    live = []
    for i, node in enumerate(nodes):
        for tensor in node.outputs:
            size = 0 if tensor.name in states else _activation_bytes(tensor, ctx, rank)
            alive += size
            ends.setdefault(last.get(tensor.name, i), []).append(size)
        live.append(alive)
        alive -= sum(ends.pop(i, []))
    return live


def _activation_bytes(tensor: gs.Tensor, ctx: PassContext, rank: int | None) -> int:
    """Bytes of an activation on a rank; if `rank` is None, of its largest shard. 0 for a tensor
    without layout."""
    layout = ctx.layouts.get(tensor.name)
    if layout is None or tensor.name in ctx.model.on_host:
        return 0
    share = ctx.sharding.factors.share(tensor.name, layout)
    if rank is None:
        return math.ceil(largest_shard_bytes(tensor, layout) * share)
    return math.ceil(shard_bytes(tensor, layout, ctx.sharding.mesh, rank) * share)


def peak_activations(
    graph: gs.Graph, nodes: Sequence[gs.Node], ctx: PassContext, rank: int | None = None
) -> int:
    """Returns the peak of `activations` in bytes, including those inside bodies, if the nodes run
    in this order."""
    alive = activations(graph, nodes, ctx, rank)
    inside = [
        max((peak_activations(body, body.nodes, ctx, rank) for body in subgraphs(node)), default=0)
        for node in nodes
    ]
    return max((a + b for a, b in zip(alive, inside, strict=True)), default=0)
