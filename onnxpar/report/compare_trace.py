"""Compares the times that a plan predicts with the times in a trace of recorded runs (`plan
--compare`).

onnxruntime fuses nodes, and lowering replaces one node by several. So times are compared for sets
of nodes of the global graph: the smallest ones such that each event of the trace belongs to one
set.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import onnx_graphsurgeon as gs

from onnxpar.base.errors import InputError, StrategyError
from onnxpar.compiler.pass_ import PassContext
from onnxpar.compiler.plan import Plan
from onnxpar.graph.clone import nodes_of_run
from onnxpar.graph.collectives import KINDS, LOCAL_STEPS
from onnxpar.graph.reshards import is_reshard
from onnxpar.graph.subgraphs import nodes_within
from onnxpar.graph.typical import Profile
from onnxpar.planner.observer import Observer
from onnxpar.report.comparison_result import Communicated, Comparison, Computed, sum_known
from onnxpar.runtime.profile.trace import Event, Trace
from onnxpar.search.predict import Prediction, predict_nodes
from onnxpar.sharding.state import ShardingState

_REMEDY = (
    "give plan the options that shard was given (--mesh, --preset, --strategy, --dim, --topology "
    "and so on), or shard the model with these options and record its runs again"
)


@dataclass(frozen=True)
class PlannedNode:
    """A node of the global graph with its predicted time.

    predicted      None for a node without a sharding rule, which a pass has added
    is_collective  True for a reshard by a collective
    always         True if every run executes it, because it is not in the body of a branch or loop
    """

    op: str
    predicted: Prediction | None
    is_collective: bool
    always: bool

    def weighted(self, weight: float, other: PlannedNode | None) -> PlannedNode:
        """Returns a copy whose time is multiplied by `weight`, plus the time of `other`: the same
        node at other sizes, or None. For weighted means."""
        if self.predicted is None:
            return self
        before = Prediction(0.0, 0.0)
        if other is not None and other.predicted is not None:
            before = other.predicted
        total = Prediction(
            before.compute + weight * self.predicted.compute,
            before.communication + weight * self.predicted.communication,
        )
        return replace(self, predicted=total)


class PlannedNodes(Observer):
    """An observer that collects the nodes of a run of a plan, by name, with their predicted times:
    means over `sizes`, the sizes of recorded runs, or if that is empty, over typical sizes."""

    def __init__(self, sizes: Sequence[Profile]) -> None:
        self.priced_at = sizes
        self.nodes: Mapping[str, PlannedNode] = {}

    def priced(self, weight: float, graph: gs.Graph, ctx: PassContext) -> None:
        apart = ctx.model.step.evaluation if ctx.model.step is not None else ()
        nodes = planned_nodes(graph, ctx.sharding, apart)
        own = {name: n.weighted(weight, self.nodes.get(name)) for name, n in nodes.items()}
        self.nodes = {**self.nodes, **own}


def planned_nodes(
    graph: gs.Graph, sharding: ShardingState, apart: Collection[str] = ()
) -> dict[str, PlannedNode]:
    """Returns the nodes of a run with their predicted times, by name, from a graph with reshard
    nodes (after insert-collectives). Leaves out nodes that only the outputs `apart` need."""
    nodes = nodes_of_run(graph, apart)
    within = list(nodes_within(nodes))
    predicted = predict_nodes(within, sharding)
    outer = {node.name for node in nodes}
    return {
        node.name: PlannedNode(
            node.op,
            predicted.get(node.name),
            is_reshard(node) and node.op not in LOCAL_STEPS,
            node.name in outer,
        )
        for node in within
    }


def compare_trace(trace: Trace, plan: Plan, nodes: Mapping[str, PlannedNode]) -> Comparison:
    """Compares the times of runs in a trace, except evaluations, with the times that the plan
    predicts (`nodes`). Errors: StrategyError if the trace is of another plan, InputError if it has
    no runs."""
    lengths = trace.lengths()
    if not lengths:
        raise InputError("the trace has no runs; record some with `onnxpar run --profile`")
    _check_same(trace, [e for e in trace.events if e.run in lengths], plan, nodes)
    by_length = sorted(lengths, key=lambda run: lengths[run])
    cut = len(by_length) // 4
    runs = by_length[cut : len(by_length) - cut]
    chosen = set(runs)
    events = [event for event in trace.events if event.run in chosen]
    rank, computed = _computed(events, len(runs), trace.ranks, nodes)
    return Comparison(
        trace.model,
        trace.mesh,
        len(runs),
        len(lengths),
        rank,
        mean(lengths[run] for run in runs),
        computed,
        _communicated(events, len(runs), nodes, plan.sent_at_runs),
        trace.session(runs),
        plan.predicted.session if plan.predicted else 0.0,
    )


def _check_same(
    trace: Trace, events: Sequence[Event], plan: Plan, nodes: Mapping[str, PlannedNode]
) -> None:
    """Raises StrategyError if the trace is of another plan: of another mesh, or with other
    collectives."""
    if tuple(trace.mesh) != plan.mesh.shape:
        was = ",".join(f"{name}={size}" for name, size in trace.mesh)
        raise StrategyError(f"the trace is of the mesh {was}, the plan of {plan.mesh}; {_REMEDY}")
    other = f"the trace is of another plan (of {trace.model}):"
    known = {entry.name: entry for entry in plan.collectives}
    recorded = {event.name: event for event in events if event.collective}
    always = [name for name, node in nodes.items() if node.is_collective and node.always]
    for name in (*recorded, *always):
        if (name in recorded) != (name in known):
            here, there = ("trace", "plan") if name in recorded else ("plan", "trace")
            raise StrategyError(
                f"{other} the {here} has the collective '{name}', the {there} does not; {_REMEDY}"
            )
    calls = Counter((e.name, e.rank, e.run) for e in events if e.collective)
    for name, event in recorded.items():
        ran, entry = event.collective, known[name]
        sent = entry.bytes // calls[name, event.rank, event.run]
        assert ran is not None
        is_other = ran.bytes != sent and not KINDS[entry.kind].by_data
        if ran.kind != entry.kind or is_other:
            raise StrategyError(
                f"{other} '{name}' is {ran.kind} of {ran.bytes} bytes in the trace, "
                f"{entry.kind} of {sent} in the plan; {_REMEDY}"
            )
    traced = {name for event in trace.events for name in event.nodes}
    if traced and not traced & nodes.keys():
        raise StrategyError(
            f"the trace is of {trace.model}, and has no node of {plan.model}; give the model that "
            "was sharded"
        )


def _computed(
    events: Iterable[Event], runs: int, ranks: int, nodes: Mapping[str, PlannedNode]
) -> tuple[int, list[Computed]]:
    """Returns the rank that computes longest, and its times by set of nodes, in graph order. `runs`
    and `ranks` are the numbers of recorded runs and of ranks."""
    own = [event for event in events if event.collective is None]
    sets = _Sets()
    for event in own:
        sets.join(_keys(event))
    at: list[dict[str, list[Event]]] = [defaultdict(list) for _ in range(ranks)]
    for event in own:
        at[event.rank][sets.find(_keys(event)[0])].append(event)
    seconds = [{k: sum(e.own for e in of) / runs for k, of in each.items()} for each in at]
    rank = max(range(ranks), key=lambda r: sum(seconds[r].values()))
    members: dict[str, list[str]] = {k: [] for each in at for k in each}
    for name, node in nodes.items():
        root = sets.find(name)
        if root in members or (node.predicted and not node.is_collective):
            members.setdefault(root, []).append(name)
    rows = [
        _row(names, at[rank].get(root, []), seconds[rank].get(root, 0.0), runs, nodes)
        for root, names in members.items()
    ]
    return rank, rows


def _row(
    names: Sequence[str],
    events: Sequence[Event],
    seconds: float,
    runs: int,
    nodes: Mapping[str, PlannedNode],
) -> Computed:
    """Returns the times of one set of nodes from their events in all recorded runs."""
    of = [nodes[name] for name in names]
    ops = dict.fromkeys(f"around {n.op}" if n.is_collective else n.op for n in of)
    predicted = sum_known(n.predicted.compute if n.predicted else None for n in of)
    ran = dict.fromkeys(event.op for event in events)
    calls = len(events) // runs
    return Computed(tuple(names), tuple(ops), tuple(ran), calls, predicted, seconds)


def _keys(event: Event) -> tuple[str, ...]:
    """Returns the names that an event joins into one set: the nodes that it computes; for a node
    that onnxruntime added, a name of its own."""
    return event.nodes or (f"{event.name}\0{event.op}",)


class _Sets:
    """Disjoint sets of names (union-find)."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def find(self, name: str) -> str:
        """Returns the representative of the set that contains `name`."""
        while (above := self._above.get(name, name)) != name:
            name = above
        return name

    def join(self, names: Sequence[str]) -> None:
        """Joins the sets of these names into one."""
        first = self.find(names[0])
        for name in names[1:]:
            self._above[self.find(name)] = first


def _communicated(
    events: Iterable[Event],
    runs: int,
    nodes: Mapping[str, PlannedNode],
    sent: Mapping[str, int],
) -> list[Communicated]:
    """Returns the times of collectives in the order in which they ran, and then of collectives that
    did not run. `sent` has bytes by collective at the sizes of the recorded runs, which replace the
    bytes in the trace."""
    by_node: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: e.start):
        if event.collective is not None:
            is_reshard = event.name in nodes or not event.nodes
            by_node[event.name if is_reshard else event.nodes[0]].append(event)
    for name, node in nodes.items():
        if node.predicted and node.predicted.communication:
            by_node.setdefault(name, [])
    return [_collective(name, of, runs, nodes.get(name), sent) for name, of in by_node.items()]


def _collective(
    name: str,
    events: Sequence[Event],
    runs: int,
    node: PlannedNode | None,
    sent_in: Mapping[str, int],
) -> Communicated:
    """Returns the times of one collective, or of all collectives inside one node, from their events
    in all recorded runs."""
    recorded = [e.collective for e in events if e.collective]
    is_inner = node is not None and not node.is_collective
    kinds = dict.fromkeys(t.kind for t in recorded) or ([node.op] if node and not is_inner else [])
    tensor = next((t.tensor for t in recorded if t.tensor), f"in {name}" if is_inner else name)
    ranks = sorted({e.rank for e in events})
    calls = len(events) // (runs * len(ranks)) if ranks else 0
    sent = [t.bytes for e, t in zip(events, recorded, strict=True) if e.rank == ranks[0]]
    known = [size for size in sent if size is not None]
    size = sum(known) // runs if len(known) == len(sent) else None
    by_data = any(KINDS[t.kind].by_data for t in recorded)
    if events and not by_data and all(e.name in sent_in for e in events):
        size = sum(sent_in[each] for each in {e.name for e in events})
    wait, seconds = (
        sum(of) / (runs * max(len(ranks), 1))
        for of in ((e.wait for e in events), (e.busy[1] for e in events))
    )
    return Communicated(
        name,
        " ".join(kinds),
        tensor,
        calls,
        size,
        node.predicted.communication if node and node.predicted else None,
        seconds - wait,
        wait,
    )
