"""Runs passes one after the other, with dumps, verification, and errors that name the pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from onnxpar.base.log import LOG
from onnxpar.base.pass_times import CHECK_LAYOUTS, DUMP, SUMMARIZE, PassTimes
from onnxpar.compiler.check_layouts import check_layouts
from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.compiler.plan import Plan
from onnxpar.compiler.run_pass import failures, run_pass
from onnxpar.compiler.summarize_plan import summarize
from onnxpar.cost.topology import Topology
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.model_name import model_name
from onnxpar.graph.used_names import check_names
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.planner.observer import Observer
from onnxpar.planner.placed_passes import check_rewritten, names_in
from onnxpar.planner.predicted_times import predict_run, with_compute
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.state import ShardingState


def run_passes(
    model: Model,
    ctx: PassContext,
    passes: Iterable[Pass],
    observer: Observer | None = None,
    check: bool = False,
    times: PassTimes | None = None,
) -> Plan | None:
    """Runs passes in order; returns the plan, which is made after the passes that have
    `plan_after`; None if none has.

    observer  sees the graph after every pass, before the check, and the costs after the pass with
              `costs_after`, unless sizes are open
    check     True: check the layouts after every pass
    times     collects the wall time of each pass

    Errors: OnnxparError of a pass; PassError for any other failure, naming the pass and the passes
    before it.
    """
    plan = None
    times, observer = times or PassTimes(), observer or Observer()
    ran: list[str] = []
    for step in passes:
        with times.of(step.name):
            changed = _run(step, model, ctx, ran, observer, times)
        if check:
            with times.of(CHECK_LAYOUTS), failures(step, ran):
                check_layouts(model.graph, ctx)
        ran.append(step.name)
        what = f"{len(model.graph.nodes)} nodes" if changed else "changed nothing"
        LOG.debug("pass %s: %s", step.name, what)
        if step.plan_after and (plan is None or changed):
            with times.of(SUMMARIZE):
                plan = summarize(model.graph, ctx, model_name(model.path), ctx.request.preset)
        if step.costs_after and plan is not None and model.sizes is None:
            with times.of(SUMMARIZE):
                plan.predicted = predict_run(model.graph, ctx)
                plan.loads = with_compute(plan.loads, model.graph, ctx)
                observer.priced(1.0, model.graph, ctx)
    if plan is not None:
        plan.collectives = list(ctx.lowered.collectives)
        plan.streams = ctx.lowered.streams
        peak = plan.memory["activations_per_rank"] + ctx.lowered.held
        plan.memory = {**plan.memory, "activations_per_rank": peak}
        plan.loads = [
            replace(load, activations=load.activations + ctx.lowered.held) for load in plan.loads
        ]
        if plan.predicted is not None:
            plan.hidden = min(ctx.lowered.hidden, plan.predicted.communication)
            shown = plan.predicted.communication - plan.hidden
            plan.predicted = replace(plan.predicted, communication=shown)
        plan.mixtures = list(ctx.lowered.mixtures)
        plan.row_outputs = dict(ctx.lowered.row_outputs)
        plan.fused = {k: (a, b) for k, (a, b) in (ctx.fused or {}).items() if a != b}
    return plan


def _run(
    step: Pass,
    model: Model,
    ctx: PassContext,
    ran: Sequence[str],
    observer: Observer,
    times: PassTimes,
) -> bool:
    """Runs one pass and shows the observer its result; returns True if it changed anything. `ran`
    are the passes before it."""
    known = names_in(model.graph) if step.stage is Stage.REWRITE else None
    with failures(step, ran):
        try:
            changed = run_pass(step, model.graph, ctx)
            if known is not None:
                check_rewritten(step, model.graph, known)
                ctx.sharding = open_sharding(model, ctx.sharding.mesh, ctx.sharding.costs.topology)
        except Exception:
            with suppress(Exception):  # the graph that a failed pass left, if it can be shown
                observer.passed(step, model, ctx)
            check_names(model.graph, f"pass {step.name}")
            raise
    with times.of(DUMP) if observer.takes_time else nullcontext():
        observer.passed(step, model, ctx)
    return changed


def open_sharding(model: Model, mesh: Mesh, topology: Topology | None) -> ShardingState:
    """Returns the sharding state of a model in which nothing is split yet."""
    if any(node.domain == DOMAIN for node in model.graph.nodes):
        return ShardingState.open(mesh, GraphFactors({}, []), topology)  # a program per rank
    factors = analyse(model.graph, model.states, model.sizes is None, model.whole)
    return ShardingState.open(mesh, factors, topology)
