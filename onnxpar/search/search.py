"""The strategy that finds itself: the fastest one by the cost model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.base.units import text_of
from onnxpar.errors import StrategyError
from onnxpar.ir.training_spec import Step
from onnxpar.layout.mesh import Mesh
from onnxpar.search.objective import Aim, OverLimit
from onnxpar.search.op_strategies import Choice, Kept
from onnxpar.search.problem import Problem
from onnxpar.search.solver.elimination import TooLarge
from onnxpar.search.solver.limits import TooMuch, Undecided
from onnxpar.sharding.state import Sharding
from onnxpar.strategy.strategy import NodeSeed, Seed, TensorSeed

AUTO, EXHAUSTIVE, PROPAGATION = "auto", "exhaustive", "propagation"
SEARCHES = (AUTO, "data-parallel", "tensor-parallel", EXHAUSTIVE, PROPAGATION)
"""The search; two presets; every strategy, one after the other; and nothing but what was given."""


@dataclass(frozen=True)
class Solution:
    """A strategy for one mesh: seconds of a run by the cost model, and what it decides, as seeds
    and of each node by name."""

    mesh: Mesh
    seconds: float
    seeds: list[Seed]
    chosen: dict[str, Choice]


def solve(
    graph: gs.Graph,
    sharding: Sharding,
    states: Sequence[tuple[str, str]],
    given: Iterable[Iterable[Seed]] = (),
    how: str = AUTO,
    kept: Kept | None = None,
    aim: Aim | None = None,
    step: Step | None = None,
) -> Solution:
    """The fastest strategy for the sharding's mesh that keeps to what is given, and to what is kept
    of another; `step` says what the ports of a training step are. Errors: StrategyError where
    nothing does, or where there are too many strategies to try them all; OverLimit where it would
    hold too much."""
    sketch = Sharding.open(sharding.mesh, sharding.factors, sharding.costs.topology)
    for seeds in given:
        for seed in seeds:
            seed.apply(sketch)
    problem = Problem(graph, sketch, states, kept, aim, step)
    try:
        seconds, chosen, held = problem.solve(exhaustively=how == EXHAUSTIVE)
    except TooLarge as error:
        raise StrategyError(f"--search {how}: {error}; take {AUTO}") from None
    except (TooMuch, Undecided) as error:
        needed = f"a rank would hold {text_of(error.found, 'B')}"
        text = f"over {sharding.mesh}, {needed}"
        raise OverLimit(text, error.least, error.found) from None
    if math.isinf(seconds):
        raise StrategyError("no strategy agrees with all that is asked for; ask for less")
    seeds = [TensorSeed(name, placement.leaves) for name, placement in held.items()]
    nodes = [
        NodeSeed(op, dict(enumerate(chosen[op.node.name].axes)), {}) for op in sharding.factors.ops
    ]
    return Solution(sharding.mesh, seconds, [*seeds, *nodes], chosen)
