"""Finds the fastest strategy on one mesh by the cost model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.base.units import text_of
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Mesh
from onnxpar.search.objective import Objective, OverLimit
from onnxpar.search.op_strategies import Kept, OpStrategy
from onnxpar.search.problem import Problem
from onnxpar.search.proof import Proof
from onnxpar.search.solver.elimination import TooLarge
from onnxpar.search.solver.limits import TooMuch, Undecided
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.strategy import Annotation, NodeAnnotation, TensorAnnotation

AUTO, EXHAUSTIVE, PROPAGATION = "auto", "exhaustive", "propagation"
SEARCHES = (AUTO, "data-parallel", "tensor-parallel", EXHAUSTIVE, PROPAGATION)
"""Values of `--search`: the search; two presets; trying every strategy; and only propagating
annotations."""


class NotBelow(StrategyError):
    """No strategy on a mesh takes less than the requested seconds: every compared one takes at
    least `bound`. `is_complete` is False if nodes had too many strategies to compare all."""

    def __init__(self, mesh: Mesh, bound: float, is_complete: bool = True) -> None:
        super().__init__(f"every strategy over {mesh} takes at least {bound * 1e3:.3f} ms")
        self.bound, self.is_complete = bound, is_complete


@dataclass(frozen=True)
class Solution:
    """A strategy for one mesh.

    mesh               the mesh
    seconds            of a run, by the cost model
    bound              a lower bound on the seconds of every strategy that was searched
    annotations        the decisions, as annotations of inputs and nodes
    chosen             the decisions, as the strategy of each node by name
    axes, is_complete  what the bound holds for, as in `Proof`
    """

    mesh: Mesh
    seconds: float
    bound: float
    annotations: list[Annotation]
    chosen: dict[str, OpStrategy]
    axes: int | None = None
    is_complete: bool = True

    def proof(self, objective: Objective) -> Proof:
        """Returns what the search has proved about this solution, for an objective."""
        memory = objective.memory
        seconds, bound = float(self.seconds), max(float(self.bound), 0.0)
        hides = objective.hides_sums
        return Proof(seconds, bound, self.axes, memory, self.is_complete, hides)


def solve(
    graph: gs.Graph,
    sharding: ShardingState,
    states: Sequence[tuple[str, str]],
    given: Iterable[Iterable[Annotation]] = (),
    how: str = AUTO,
    kept: Kept | None = None,
    objective: Objective | None = None,
    step: Step | None = None,
    below: float = math.inf,
) -> Solution:
    """Returns the fastest strategy on the sharding's mesh.

    states     the state pairs, (input, output)
    given      batches of annotations (the user's requests) with which the strategy must agree
    how        AUTO or EXHAUSTIVE
    kept       decisions of another search to keep
    objective  what to minimize, within which limits
    step       the roles of inputs and outputs of a training step
    below      the seconds that a strategy must stay below to be of use

    Errors: NotBelow if no strategy takes less than `below` seconds (a slower one may be returned,
    too); StrategyError if no strategy agrees with `given`, or if there are too many to try them
    all; OverLimit if no strategy was found that fits in memory.
    """
    sketch = ShardingState.open(sharding.mesh, sharding.factors, sharding.costs.topology)
    for batch in given:
        for annotation in batch:
            annotation.apply(sketch)
    problem = Problem(graph, sketch, states, kept, objective, step, below=below)
    try:
        solution = problem.solve(exhaustively=how == EXHAUSTIVE)
    except TooLarge as error:
        raise StrategyError(f"--search {how}: {error}; use --search {AUTO}") from None
    except (TooMuch, Undecided) as error:
        needed = f"a rank would need {text_of(error.found, 'B')}"
        text = f"over {sharding.mesh}, {needed}"
        is_proved = isinstance(error, TooMuch)
        of_states = problem.least_states()
        raise OverLimit(text, error.least, error.found, is_proved, of_states) from None
    if math.isinf(solution.seconds):
        if math.isfinite(solution.bound):
            raise NotBelow(sharding.mesh, solution.bound, problem.is_complete)
        raise StrategyError("no strategy satisfies all requested layouts; request fewer")
    annotations: list[Annotation] = [
        TensorAnnotation(name, factor_sharding.leaves)
        for name, factor_sharding in solution.inputs.items()
    ]
    annotations += [
        NodeAnnotation(op, dict(enumerate(solution.chosen[op.node.name].axes)), {})
        for op in sharding.factors.ops
    ]
    return Solution(
        sharding.mesh,
        solution.seconds,
        solution.bound,
        annotations,
        solution.chosen,
        is_complete=problem.is_complete,
    )
