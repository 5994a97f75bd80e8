"""Predicts the times of a plan, and for a model with open sizes, at typical sizes of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.base.units import text_of
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.compiler.plan import Plan, Predicted, RankLoad
from onnxpar.compiler.replay import replay_typical
from onnxpar.compiler.run_pass import run_pass
from onnxpar.compiler.summarize_plan import summarize
from onnxpar.cost.cost import bytes_sent
from onnxpar.cost.topology import Topology
from onnxpar.graph.clone import nodes_of_run
from onnxpar.graph.collectives import LOCAL_STEPS
from onnxpar.graph.reshards import is_reshard
from onnxpar.graph.subgraphs import nodes_within
from onnxpar.graph.tensors import numel, shape_bytes
from onnxpar.graph.typical import Profile
from onnxpar.layout.fits import fit
from onnxpar.load.load import Model
from onnxpar.planner.observer import Observer
from onnxpar.search.predict import compute_by_rank, predict_nodes, predict_on_one
from onnxpar.sharding.planned_collectives import Collective, collective_of
from onnxpar.sharding.state import ShardingState

_LOSS = 1.1
"""If a run is predicted to take at least this many times as long as the unsplit model, the plan
gets a note."""


VALUE_SECONDS, VALUE_OF_RANK_SECONDS = 25e-6, 33e-6
"""Additional seconds of a run for each input and output that is no tensor of numbers (strings,
sequences, maps), and for each of these on each rank, on two cores of an AMD EPYC."""
OBJECT_SECONDS = 6e-7
"""Seconds for each string, and for each number in a map, on the same processor."""


def predict_run(graph: gs.Graph, ctx: PassContext) -> Predicted:
    """Returns the predicted times of a run, from the graph after fuse-all-reduces, without the
    evaluation outputs of a training step."""
    step = ctx.model.step
    nodes = list(nodes_within(nodes_of_run(graph, step.evaluation if step is not None else ())))
    of_nodes = predict_nodes(nodes, ctx.sharding).values()
    return Predicted(
        sum(p.compute for p in of_nodes),
        sum(p.communication for p in of_nodes),
        predict_on_one(nodes, ctx.sharding),
        _session_seconds(graph, ctx),
        predict_on_one(nodes, ctx.sharding, alone=False),
    )


def _session_seconds(graph: gs.Graph, ctx: PassContext) -> float:
    """Returns the seconds that a session needs to pass inputs to the ranks and outputs back."""
    session = ctx.sharding.costs.topology.session
    if session is None:
        return 0.0
    apart = {name for pair in ctx.model.states for name in pair}
    apart |= {*ctx.model.step.evaluation} if ctx.model.step is not None else set()
    ports = [t for t in (*graph.inputs, *graph.outputs) if t.name not in apart]
    shapes = [(t, ctx.layouts[t.name].shape) for t in ports if t.name in ctx.layouts]
    moved = sum(
        shape_bytes(t, shape) for t, shape in shapes if t.dtype and min(shape, default=0) >= 0
    )
    return session.latency + moved / session.bandwidth + _value_seconds(ports, ctx)


def _value_seconds(ports: Sequence[gs.Tensor], ctx: PassContext) -> float:
    """Returns the additional seconds for inputs and outputs that are strings, sequences and maps,
    which become Python objects: one for each number of a ZipMap; for a tensor of strings, whose
    shape is unknown, one for each row of the other tensors."""
    values = [t for t in ports if t.name not in ctx.layouts]
    shapes = [ctx.layouts[t.name].shape for t in ports if t.name in ctx.layouts]
    rows = max((shape[0] for shape in shapes if shape), default=1)
    zipped = [n.inputs[0].name for t in values for n in t.inputs if n.op == "ZipMap"]
    maps = [ctx.layouts[name].shape for name in zipped if name in ctx.layouts]
    objects = sum(map(numel, maps)) + rows * (len(values) - len(zipped))
    value_seconds = VALUE_SECONDS + VALUE_OF_RANK_SECONDS * ctx.sharding.mesh.size
    return len(values) * value_seconds + objects * OBJECT_SECONDS


def with_compute(loads: Sequence[RankLoad], graph: gs.Graph, ctx: PassContext) -> list[RankLoad]:
    """Returns the loads of ranks, each with the seconds in which that rank computes in a run of the
    graph."""
    if not loads:
        return []
    step = ctx.model.step
    nodes = list(nodes_within(nodes_of_run(graph, step.evaluation if step is not None else ())))
    seconds = compute_by_rank(nodes, ctx.sharding)
    return [replace(load, compute=s) for load, s in zip(loads, seconds, strict=True)]


def note_weights(plan: Plan, sharding: ShardingState) -> None:
    """Adds a note to the plan if every rank holds all weights (in a training step, all parameters),
    which says how to split them."""
    if plan.mesh.size == 1 or plan.predicted is None:
        return
    note = _whole_states(plan) if plan.step is not None else _whole_weights(plan, sharding)
    if note is not None:
        plan.notes.append(note)


def _whole_states(plan: Plan) -> str | None:
    states = {source for source, _ in plan.states}
    layouts = [port.layout for port in plan.inputs if port.name in states and port.layout]
    if not all(layout.is_whole for layout in layouts):
        return None
    return (
        "every rank holds all parameters and optimizer states, "
        f"{text_of(plan.memory['states_per_rank'], 'B')}; to split them, give --preset zero3 or "
        "tensor-parallel, or --memory-limit SIZE for the search"
    )


def _whole_weights(plan: Plan, sharding: ShardingState) -> str | None:
    """Returns the note that every rank holds all weights; None if ranks split some."""
    total = sum(weight.bytes for weight in plan.weights)
    if not total or plan.memory["weights_per_rank"] < total:
        return None
    known = sharding.factors.tensors
    free = sum(weight.bytes for weight in plan.weights if weight.name in known)
    if 2 * free >= total:
        rest = "to split them, give --preset tensor-parallel, or --memory-limit SIZE for the search"
    elif free:
        rest = (
            f"{text_of(total - free, 'B')} of that is in bodies of If, Loop or Scan, which "
            "onnxpar does not split"
        )
    else:
        rest = "they are in bodies of If, Loop or Scan, which onnxpar does not split"
    return f"every rank holds all weights, {text_of(total, 'B')}; {rest}"


def note_unsplit(plan: Plan, sharding: ShardingState) -> None:
    """Adds a note to the plan if every rank computes the whole model, as under data-parallel with a
    batch of one."""
    split = (*sharding.tensors.values(), *sharding.ops.values())
    if plan.mesh.size > 1 and plan.predicted is not None and not any(any(axes) for axes in split):
        plan.notes.append(
            f"nothing is split: each of the {plan.mesh.size} ranks runs the whole model"
        )


def note_host(plan: Plan, topology: Topology) -> None:
    """Adds notes to the plan if ranks of a host take turns on its cores, and if onnxruntime on the
    unsplit model is faster."""
    times = plan.predicted
    if times is None or plan.mesh.size == 1:
        return
    if topology.turns > 1:
        here = min(plan.mesh.size, topology.levels[0].size or plan.mesh.size)
        plan.notes.append(
            f"a host runs {here / topology.turns:.0f} ranks at a time, and {here} take turns: a "
            f"run takes {topology.turns:.3g} times as long as with enough cores; --topology FILE "
            "plans for other machines"
        )
    if topology.alone is not None and times.total > _LOSS * times.one_rank:
        plan.notes.append(
            f"splitting does not pay here: onnxruntime on the unsplit model takes "
            f"{times.one_rank * 1e3:.3f} ms with all cores, and these {plan.mesh.size} ranks "
            f"{times.total * 1e3:.3f} ms; it can pay for larger models or batches, and where a "
            "model does not fit into the memory of one process"
        )


@dataclass(frozen=True)
class _Costs:
    """The costs of a plan at one of the typical sizes, and the share of runs with that size.

    sent  the collective of each reshard, by node, with the bytes that it sends
    """

    weight: float
    plan: Plan
    predicted: Predicted
    sent: Mapping[str, Collective]


def reckon_typical(
    main: Plan,
    model: Model,
    ctx: PassContext,
    passes: Sequence[Pass],
    observer: Observer,
) -> None:
    """Gives the plan `main` of a model with open sizes its costs: means over the typical sizes, and
    for memory the maximum.

    passes    the passes from insert-collectives on
    observer  sees each graph and its weight; if it needs the costs at other sizes (`priced_at`), it
              sees the graphs at these, and the plan gets the bytes that a rank sends at them
              (`sent_at_runs`)
    """
    assert model.sizes is not None
    at = next(i for i, step in enumerate(passes) if step.costs_after)
    first = ((model.sizes.bindings[0], 1.0),)
    if observer.priced_at:
        main.sent_at_runs = _reckon_runs(main, model, ctx, passes[: at + 1], observer)
        observer = Observer()
    costs: list[_Costs] = []
    for weight, graph, other in replay_typical(
        model, ctx, passes[:at], model.sizes.typical or first
    ):
        plan = summarize(graph, other, main.model, main.preset)
        run_pass(passes[at], graph, other)
        plan.loads = with_compute(plan.loads, graph, other)
        observer.priced(weight, graph, other)
        costs.append(_Costs(weight, plan, predict_run(graph, other), _sent(graph, other)))
    main.typical = model.sizes.typical or first
    main.is_told, main.caches = model.sizes.is_told, model.sizes.caches
    main.memory = {key: max(c.plan.memory[key] for c in costs) for key in main.memory}
    main.flops = {key: _mean((c.weight, c.plan.flops[key]) for c in costs) for key in main.flops}
    main.whole = costs[0].plan.whole
    main.loads = _joined_loads([(c.weight, c.plan.loads) for c in costs])
    main.predicted = Predicted(
        sum(c.weight * c.predicted.compute for c in costs),
        sum(c.weight * c.predicted.communication for c in costs),
        sum(c.weight * c.predicted.one_rank for c in costs),
        sum(c.weight * c.predicted.session for c in costs),
        sum(c.weight * c.predicted.on_rank for c in costs),
    )
    sent = _bytes(main, ctx, [(c.weight, _sizes(c.sent)) for c in costs], model.sizes.typical)
    layouts = {
        name: (collective.before, collective.after) for name, collective in costs[0].sent.items()
    }
    main.collectives = [
        replace(entry, bytes=size, before=before, after=after)
        for entry, size in zip(main.collectives, sent, strict=True)
        for before, after in [layouts.get(entry.name, (entry.before, entry.after))]
    ]


def _reckon_runs(
    main: Plan,
    model: Model,
    ctx: PassContext,
    passes: Sequence[Pass],
    observer: Observer,
) -> dict[str, int]:
    """Shows the observer the graph at each of its own sizes (`priced_at`); returns the bytes that a
    rank sends in each collective of a run at these sizes, by name. The last of `passes` must be
    fuse-all-reduces."""
    *first, fuse = passes
    sent_at: list[tuple[float, Mapping[str, int]]] = []
    sizes = observer.priced_at
    for weight, graph, other in replay_typical(model, ctx, first, sizes):
        sent_at.append((weight, _sizes(_sent(graph, other))))
        run_pass(fuse, graph, other)
        observer.priced(weight, graph, other)
    sent = _bytes(main, ctx, sent_at, sizes)
    return {entry.name: size for entry, size in zip(main.collectives, sent, strict=True)}


def _joined_loads(at_sizes: Sequence[tuple[float, Sequence[RankLoad]]]) -> list[RankLoad]:
    """Returns the load of each rank over several (weight, loads of all ranks): the maximum of
    bytes, the weighted mean of work."""
    weights = [weight for weight, _ in at_sizes]
    return [
        replace(
            same[0],
            weights=max(load.weights for load in same),
            states=max(load.states for load in same),
            activations=max(load.activations for load in same),
            flops=_mean((w, load.flops) for w, load in zip(weights, same, strict=True)),
            compute=sum(w * load.compute for w, load in zip(weights, same, strict=True)),
        )
        for same in zip(*(loads for _, loads in at_sizes), strict=True)
    ]


def _mean(weighted: Iterable[tuple[float, int]]) -> int:
    return round(sum(weight * value for weight, value in weighted))


def _sent(graph: gs.Graph, ctx: PassContext) -> dict[str, Collective]:
    """Returns the collective of each reshard, by node, with the bytes that it sends."""
    mesh = ctx.sharding.mesh
    nodes = [n for n in graph.nodes if is_reshard(n) and n.op not in LOCAL_STEPS]
    return {node.name: collective_of(node, mesh) for node in nodes}


def _sizes(sent: Mapping[str, Collective]) -> dict[str, int]:
    """Returns the bytes that a rank sends in each collective, by name."""
    return {name: entry.bytes for name, entry in sent.items()}


def _bytes(
    main: Plan,
    ctx: PassContext,
    sent_at: Sequence[tuple[float, Mapping[str, int]]],
    profiles: Sequence[Profile],
) -> Iterator[int]:
    """Yields the bytes that a rank sends in each collective of the plan: the weighted mean of
    `sent_at`. For a collective inside an op, which is not in `sent_at`, a polynomial through its
    bytes at all sample sizes gives the bytes at each profile.

    sent_at  (weight, bytes by collective) at each of the sizes
    """
    sizes = ctx.model.sizes
    assert sizes is not None
    variables = sizes.variables()
    for at, entry in enumerate(main.collectives):
        if all(entry.name in sent for _, sent in sent_at):
            yield _mean((weight, sent[entry.name]) for weight, sent in sent_at)
            continue
        operands = [
            entry.operand,
            *(other.lowered.collectives[at].operand for _, other in ctx.lowered.replays),
        ]
        operand, ranks = fit(operands, variables), len(entry.group)
        if operand is None or not profiles:
            yield entry.bytes
        else:
            sizes_at = [(weight, max(operand.at(b), 0)) for b, weight in profiles]
            yield _mean((weight, int(bytes_sent(entry.kind, ranks, n))) for weight, n in sizes_at)
