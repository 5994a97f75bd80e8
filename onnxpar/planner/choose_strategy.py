"""Chooses the mesh, and the strategy or preset that the passes follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxpar.base.errors import StrategyError
from onnxpar.base.pass_times import SEARCH
from onnxpar.compiler.open_errors import at_open_sizes
from onnxpar.graph.annotations import Configuration, choose_configuration
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.planner.options import NO_RANKS, Options, preset_or_search, wanted_mesh
from onnxpar.planner.unused_options import refuse_without_search
from onnxpar.search.dealt_tables import fastest_with_tables
from onnxpar.search.given_mesh import best_on_mesh
from onnxpar.search.meshes import best_mesh
from onnxpar.search.op_strategies import Kept
from onnxpar.search.proof import Proof
from onnxpar.search.search import AUTO, EXHAUSTIVE, Solution, solve
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.annotated_strategy import annotated_mesh
from onnxpar.strategy.presets import preset_mesh
from onnxpar.strategy.requests import requests
from onnxpar.strategy.strategy import Annotation


@dataclass(frozen=True)
class Chosen:
    """The choice of a mesh and a strategy, before passes run.

    preset     the preset or the kind of search, if there is one
    annotated  the model's own annotations, if the plan follows them
    solution   the annotations (splits of nodes) that a search returned; None if there was no search
    proof      how far from the optimum this can be, by the search; None if there was no search
    """

    mesh: Mesh
    preset: str | None
    annotated: Configuration | None = None
    solution: list[Annotation] | None = None
    proof: Proof | None = None


def choose_strategy(model: Model, options: Options, factors: GraphFactors) -> Chosen:
    """Follows the model's annotations and the user's options, and searches for what they leave
    open. Errors: StrategyError."""
    mesh, how = wanted_mesh(options), preset_or_search(options)
    devices = mesh.size if mesh is not None else options.devices
    annotated = choose_configuration(model.annotations, options.configuration, devices)
    if annotated is not None:
        if how is None:
            refuse_without_search(options, is_annotated=True)
        mesh = annotated_mesh(annotated, mesh)
    elif devices is None:
        raise StrategyError(NO_RANKS)
    elif how is None and options.strategy is None and options.search is None:
        how = AUTO
    if how not in (AUTO, EXHAUSTIVE):
        if mesh is None:
            assert devices is not None
            mesh = preset_mesh(how, devices)
        return Chosen(mesh, how, annotated)
    with options.times.of(SEARCH):
        best = _search(model, options, factors, annotated, mesh, how)
    return Chosen(best.mesh, how, annotated, best.annotations, best.proof(options.objective))


def _search(
    model: Model,
    options: Options,
    factors: GraphFactors,
    annotated: Configuration | None,
    mesh: Mesh | None,
    how: str,
) -> Solution:
    """Returns the fastest strategy that agrees with the model's annotations, on `mesh`, or if that
    is None, on the best mesh. `how` is the kind of search."""

    def on_mesh(
        sharding: ShardingState,
        annotations: Sequence[Sequence[Annotation]],
        kept: Kept | None,
        below: float = math.inf,
    ) -> Solution:
        """Returns the fastest strategy on the mesh of `sharding`."""
        states, objective = model.states, options.objective

        def with_more(more: Sequence[Annotation], spare: float) -> Solution:
            goal, rounds = objective, [*annotations, more]
            if goal.memory is not None and spare:
                goal = replace(goal, memory=max(goal.memory - spare, 1.0))
            limited = goal, model.step, below
            return solve(model.graph, sharding, states, rounds, how, kept, *limited)

        # over several axes, dealing over all of them is the same as over one
        is_one = mesh is not None or sum(size > 1 for _, size in sharding.mesh.shape) == 1
        if kept is not None or how == EXHAUSTIVE or not is_one:
            return with_more([], 0.0)
        return fastest_with_tables(model.graph, sharding, model.step, with_more)

    if annotated is not None:
        assert mesh is not None
        sharding = ShardingState.open(mesh, factors, options.topology)
        with at_open_sizes(model):
            _, annotations = requests(annotated, options.strategy, sharding)
        return on_mesh(sharding, annotations, None)
    request = (options.topology, on_mesh, options.strategy, options.objective)
    if mesh is not None:
        return best_on_mesh(factors, mesh, *request)
    assert options.devices is not None
    return best_mesh(model, factors, options.devices, *request)
