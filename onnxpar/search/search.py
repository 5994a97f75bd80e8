"""The strategy that finds itself: the fastest one by the cost model, over all meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.errors import StrategyError
from onnxpar.factors import GraphFactors
from onnxpar.mesh import Mesh
from onnxpar.search.elimination import TooLarge
from onnxpar.search.problem import Problem
from onnxpar.sharding import Sharding
from onnxpar.strategy import NodeSeed, Seed, TensorSeed
from onnxpar.topology import Topology

AUTO, EXHAUSTIVE, PROPAGATION = "auto", "exhaustive", "propagation"
SEARCHES = (AUTO, "data-parallel", "tensor-parallel", EXHAUSTIVE, PROPAGATION)
"""The search; two presets; every strategy, one after the other; and nothing but what was given."""
SAME = 1e-6
"""What is slower by this share is as fast; then the mesh with fewer axes is taken."""
BATCH, WIDTH = "dp", "tp"
"""Names of the axes that split the batch, and of others."""


@dataclass(frozen=True)
class Solution:
    """A strategy for one mesh: seconds of a run by the cost model, and what it decides."""

    mesh: Mesh
    seconds: float
    seeds: list[Seed]


def solve(
    graph: gs.Graph,
    sharding: Sharding,
    states: Sequence[tuple[str, str]],
    given: Iterable[Iterable[Seed]] = (),
    how: str = AUTO,
) -> Solution:
    """The fastest strategy for the sharding's mesh that keeps to what is given. Errors:
    StrategyError where nothing does, or where there are too many strategies to try them all."""
    sketch = Sharding.open(sharding.mesh, sharding.factors, sharding.costs.topology)
    for seeds in given:
        for seed in seeds:
            seed.apply(sketch)
    problem = Problem(graph, sketch, states)
    try:
        seconds, chosen, held = problem.solve(exhaustively=how == EXHAUSTIVE)
    except TooLarge as error:
        raise StrategyError(f"--search {how}: {error}; take {AUTO}") from None
    if math.isinf(seconds):
        raise StrategyError("no strategy agrees with all that is asked for; ask for less")
    seeds = [TensorSeed(name, placement.leaves) for name, placement in held.items()]
    nodes = [
        NodeSeed(op, dict(enumerate(chosen[op.node.name].axes)), {}) for op in sharding.factors.ops
    ]
    return Solution(sharding.mesh, seconds, [*seeds, *nodes])


def best_mesh(
    graph: gs.Graph,
    factors: GraphFactors,
    states: Sequence[tuple[str, str]],
    devices: int,
    topology: Topology | None,
    how: str = AUTO,
) -> Solution:
    """The fastest strategy over all meshes of so many ranks with one axis or two."""
    open_ones = (Sharding.open(mesh, factors, topology) for mesh in meshes(devices))
    found = [solve(graph, sharding, states, how=how) for sharding in open_ones]
    least = min(solution.seconds for solution in found)
    return next(solution for solution in found if solution.seconds <= least * (1 + SAME))


def meshes(devices: int) -> Iterator[Mesh]:
    """One axis, then two of all sizes; the last axis joins neighbours."""
    yield Mesh(((WIDTH, devices),))
    for major in range(2, devices):
        if devices % major == 0:
            yield Mesh(((BATCH, major), (WIDTH, devices // major)))
