"""Loads the model, chooses mesh and strategy, and makes the context in which passes run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx_graphsurgeon as gs

from onnxpar.base.pass_times import ANALYSE, LOAD
from onnxpar.compiler.pass_ import Pass, PassContext, Request, Stage
from onnxpar.compiler.replay import mark_open_sizes, variants
from onnxpar.graph.rewriting import Show, unseen
from onnxpar.graph.training_spec import Step
from onnxpar.graph.typical import Typical
from onnxpar.load.load import Model, load
from onnxpar.load.loading import InferTypes, LoadRequest
from onnxpar.load.page_caches import HOLDING, USUAL
from onnxpar.planner.balance import balanced_topology, sampled_remainders
from onnxpar.planner.choose_strategy import choose_strategy
from onnxpar.planner.dataset_strategy import with_dataset
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options, least_size, manual_of, wanted_mesh
from onnxpar.planner.paging import check_tokens_apart
from onnxpar.planner.placed_tables import tables_on_host
from onnxpar.planner.plugins import load_entry_points
from onnxpar.planner.run_passes import open_sharding, run_passes
from onnxpar.planner.unused_options import (
    refuse_for_manual,
    refuse_groups,
    refuse_without_search,
)
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.manual import MANUAL, refuse_collectives
from onnxpar.strategy.presets import preset_mesh


def load_model(
    path: str | Path,
    options: Options,
    for_training: bool = False,
    untied: bool = False,
    shapes: Mapping[str, Sequence[int]] | None = None,
    show: Show = unseen,
) -> Model:
    """Loads the model as a global program, or with the preset `manual`, as the program of one rank.
    `for_training`, `untied` and `shapes` are as in a LoadRequest; `show` sees the model after each
    rewrite of the loader."""
    load_entry_points()
    request = load_request(options)
    request = replace(request, for_training=for_training, untied=untied, shapes=shapes)
    with options.times.of(LOAD):
        model = load(path, request, show, options.times)
    if options.preset == MANUAL:  # ports that look like a growing cache may be no pair here
        slots = model.step.slots if model.step is not None else []
        model.states = [*((slot.input, slot.output) for slot in slots), *options.states]
    model.on_host = tables_on_host(model, options.place, options.strategy)
    return model


def load_request(options: Options) -> LoadRequest:
    """Returns what the options ask of the loader, such as sizes of open dimensions and state
    pairs."""

    def own_types(step: Step | None) -> InferTypes | None:
        manual = manual_of(options, step)
        return None if manual is None else manual.infer

    typical = options.typical
    if options.page_size and not typical.profiles:
        typical = Typical(USUAL)
    return LoadRequest(
        dims=options.dims,
        states=options.states,
        find_states=options.find_states,
        least=least_size(options),
        remainders=sampled_remainders(options),
        typical=typical,
        page_size=options.page_size or 0,
        kv_dtype=options.kv_dtype,
        part=options.part,
        own_types=own_types,
    )


def prepare(
    model: Model,
    options: Options,
    passes: Sequence[Pass],
    observer: Observer | None = None,
) -> PassContext:
    """Runs the passes of the stage REWRITE, also on the graphs at other sample sizes of open
    dimensions; then chooses mesh and strategy, and returns the context for the other passes.
    Errors: OnnxparError."""
    steps = [p for p in passes if p.stage is Stage.REWRITE]
    if steps or options.passes or options.exposed:
        model.original = None
    if steps:
        ctx = _rewriting_context(model, options)
        run_passes(model, ctx, steps, observer, options.check_layouts, options.times)
    if steps and model.sizes is not None:
        at = model.sizes.graph

        def rewritten(i: int) -> gs.Graph:
            other = replace(model, graph=at(i))
            run_passes(other, _rewriting_context(other, options), steps, times=options.times)
            return other.graph

        model.sizes = replace(model.sizes, graph=rewritten)
    if len(steps) == len(passes):
        return _rewriting_context(model, options)
    with options.times.of(ANALYSE):
        return make_context(model, options)


def _rewriting_context(model: Model, options: Options) -> PassContext:
    """Returns a context in which nothing is split, for passes that rewrite the global graph."""
    mesh = wanted_mesh(options) or preset_mesh(None, options.devices or 1)
    manual = manual_of(options, model.step) if options.preset == MANUAL else None
    return PassContext(model, open_sharding(model, mesh, options.topology), Request(manual=manual))


def make_context(model: Model, options: Options) -> PassContext:
    """Analyses the model, chooses the mesh and the strategy, and returns the context for passes.
    Errors: StrategyError."""
    options = with_dataset(options, model)
    manual = manual_of(options, model.step)
    if manual is not None:
        refuse_for_manual(options)
        nothing = ShardingState.open(manual.mesh, GraphFactors({}, []), options.topology)
        return PassContext(model, nothing, Request(preset=MANUAL, manual=manual))
    refuse_groups(options)
    options.objective.check(model.step)
    holding = HOLDING if options.page_size else 0.0
    objective = replace(options.objective, on_host=model.on_host, holding=holding)
    options = replace(options, objective=objective)
    if not options.compared:
        refuse_without_search(options)
    refuse_collectives(model.graph)
    factors, others = variants(model)
    if options.page_size:
        check_tokens_apart(model.graph, factors)
    factors = mark_open_sizes(model, factors, others)
    options = replace(
        options, topology=balanced_topology(options, model, factors) or options.host()
    )
    chosen = choose_strategy(model, options, factors)
    return PassContext(
        model,
        ShardingState.open(chosen.mesh, factors, options.topology),
        Request(
            strategy=options.strategy,
            preset=chosen.preset,
            annotated=chosen.annotated,
            objective=options.objective,
            solution=chosen.solution,
            proof=chosen.proof,
        ),
        variants=others,
    )
