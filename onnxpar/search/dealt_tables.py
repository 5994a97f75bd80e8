"""The search, with and without embedding tables dealt out: each table whole on one rank.

The strategies of a node divide tensors evenly. To deal tables is a decision about all tables
together, so the search compares two solutions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.tensors import shape_bytes
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes
from onnxpar.search.ports import Ports
from onnxpar.search.search import NotBelow, Solution
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.presets import batch_atoms
from onnxpar.strategy.strategy import Annotation
from onnxpar.strategy.table_parallel import HoldTable, table_annotations, tables

SHARE = 0.5
"""The search tries to deal tables if they have at least this share of the bytes of all weights: the
tables of a recommender, not the table of a language model."""


def fastest_with_tables(
    graph: gs.Graph,
    sharding: ShardingState,
    step: Step | None,
    solve: Callable[[Sequence[Annotation], float], Solution],
) -> Solution:
    """Returns the faster of two solutions: the result of `solve` without further annotations and,
    if the model has several large tables, its result with annotations that deal them out.

    step   the roles of the model's inputs and outputs, if it is a training step
    solve  a function from (annotations, bytes that a rank may need beyond the bytes that the search
           counts) to a solution

    Errors: the StrategyError of the first solution, if both fail.
    """
    dealt = _dealt(graph, sharding, step)
    other = None
    if dealt:
        with suppress(StrategyError):
            solution = solve(dealt, _beyond_mean(dealt, graph, sharding, step))
            other = _joined(solution, dealt, sharding)
    try:
        best = solve([], 0.0)
    except StrategyError as error:
        if other is None:
            raise
        least = error.bound if isinstance(error, NotBelow) else other.bound
        return replace(other, bound=min(other.bound, least))
    if other is None:
        return best
    bound = min(best.bound, other.bound)
    return replace(other if other.seconds < best.seconds else best, bound=bound)


def _beyond_mean(
    dealt: Sequence[Annotation], graph: gs.Graph, sharding: ShardingState, step: Step | None
) -> float:
    """Returns by how many bytes the dealt tables on the fullest rank, with their optimizer states,
    exceed the mean over the ranks."""
    known = {t.name: shape_bytes(t, t.shape) for t in (*graph.inputs, *constants(graph)) if t.shape}
    loads: dict[Axes, float] = defaultdict(float)
    for one in dealt:
        if isinstance(one, HoldTable):
            slots = [s.input for s in step.slots if s.of == one.table] if step is not None else []
            loads[one.axes] += sum(known.get(name, 0) for name in {one.table, *slots})
    return max(loads.values()) - sum(loads.values()) / sharding.mesh.size


def _dealt(
    graph: gs.Graph, sharding: ShardingState, step: Step | None
) -> Sequence[HoldTable | Annotation]:
    """Returns the annotations that deal out the tables; empty if that is not worth trying."""
    mesh = sharding.mesh
    axes = tuple(mesh.axis(name) for name, size in mesh.shape if size > 1)
    batch = batch_atoms(graph, sharding, step)
    candidates = list(tables(graph, sharding, batch)) if axes else []
    states = {slot.input for slot in step.slots if slot.kind != "parameter"} if step else set()
    weights = [t for t in graph.inputs if is_weight(t) and t.name not in states]
    total = sum(shape_bytes(t, t.shape) for t in [*weights, *constants(graph)])
    few = len(candidates) < max(2, mesh.size)  # ranks without tables would wait for the others
    if few or sum(table.bytes for table in candidates) < SHARE * total:
        return []
    return table_annotations(graph, sharding, axes, batch, step)


def _joined(solution: Solution, dealt: Sequence[Annotation], sharding: ShardingState) -> Solution:
    """Returns the solution with the latency of one all-to-all for the lookups of all tables, and of
    one for their gradients, instead of one all-to-all for each table, as the search counts them."""
    ports = Ports(sharding.factors.ops)

    def is_exchanged(name: str) -> bool:
        """True if the nodes before or behind this tensor divide it evenly over ranks, so that it is
        exchanged with a rank that has a table whole."""
        read = [port.required(solution.chosen[port.op.node.name]) for port in ports.readers[name]]
        producer = ports.producers[name]
        sides = [*read, producer.produced(solution.chosen[producer.op.node.name])]
        return any(axis.at is None for side in sides for over in side.leaves for axis in over)

    every = [one.borders for one in dealt if isinstance(one, HoldTable)]
    passes = [[name for name, _ in column] for column in zip(*every, strict=False)]
    counts = [sum(map(is_exchanged, names)) for names in passes]
    axes = tuple(sharding.mesh.axis(name) for name, size in sharding.mesh.shape if size > 1)
    latency = sharding.costs.collective("AllToAll", axes, 0.0)
    saved = sum(count - 1 for count in counts if count) * latency
    most = sum(len(names) - 1 for names in passes) * latency  # the most that a strategy saves
    return replace(solution, seconds=solution.seconds - saved, bound=solution.bound - most)
