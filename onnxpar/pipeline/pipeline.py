"""Makes plans, annotated models, and folders for ranks from models."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import onnx

from onnxpar.base.log import LOG
from onnxpar.base.pass_times import OTHER, PREDICT, REPEAT
from onnxpar.canonicalize.encoder_decoder import DECODER
from onnxpar.compiler.expose import expose
from onnxpar.compiler.lengths import check_lengths
from onnxpar.compiler.open_ports import open_ports
from onnxpar.compiler.pass_ import ANNOTATIONS, LAYOUTS, Pass, PassContext, Stage
from onnxpar.compiler.plan import Plan, foreign_part
from onnxpar.compiler.replay import replay, stay_whole
from onnxpar.compiler.write_annotations import (
    Operands,
    operand_names,
    original,
    save,
    write_annotations,
)
from onnxpar.cost.topology import ANY_HOST
from onnxpar.errors import OpenSizesError, StrategyError
from onnxpar.files.new_folder import check_place
from onnxpar.files.write_file import writing
from onnxpar.ir.paged_attention import UnpagedError
from onnxpar.ir.tensors import Whole
from onnxpar.load.load import Model, unread_inputs, unseen
from onnxpar.manual.manual import MANUAL
from onnxpar.model.interchange import metadata_of
from onnxpar.model.model_folder import carried_files, encoder_file
from onnxpar.model.state_pairs import unpaired_text
from onnxpar.passes.split_ranks import check_open
from onnxpar.pipeline.balance import fitting_shares
from onnxpar.pipeline.context import load_model, prepare
from onnxpar.pipeline.default_passes import may_overlap, passes_of
from onnxpar.pipeline.encoder_decoders import encoder_options, note_encoder
from onnxpar.pipeline.lengths import Pins, check_same_step, digests_beside
from onnxpar.pipeline.memory_limit import Make, within_hardware, within_limit
from onnxpar.pipeline.options import Options, unknown_host, wanted_mesh
from onnxpar.pipeline.paging import refuse_paging
from onnxpar.pipeline.predicted_times import (
    Reckon,
    Reckoning,
    ignore,
    note_host,
    note_unsplit,
    note_weights,
    reckon_typical,
)
from onnxpar.pipeline.request import model_digest
from onnxpar.pipeline.run_passes import Watch, run_passes
from onnxpar.pipeline.timed_plan import time_here
from onnxpar.pipeline.write_bundle import check_chosen_ranks, write_bundle
from onnxpar.search.meshes import BETTER
from onnxpar.search.objective import Objective, OverLimit


@contextmanager
def _no_collector() -> Iterator[None]:
    """Turns off Python's cycle collector: graphs stay alive, and each collection would scan all
    their nodes in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def plan(
    path: str | Path,
    options: Options,
    watch: Watch | None = None,
    reckoning: Reckoning | None = None,
) -> tuple[Plan, PassContext]:
    """Makes the plan that `shard` writes, and its context. Errors: OnnxparError."""
    with options.times.of(OTHER):
        try:
            made, ctx = _fitting(path, options, watch, reckoning)
        except UnpagedError as error:
            if not options.pages_if_possible:
                raise
            made, ctx = _fitting(path, replace(options, page_size=0), watch, reckoning)
            if made.states:
                made.notes.append(f"caches are not in pages, because {error.reason}")
        topology = ctx.sharding.costs.topology
        if options.on_any_host and options.topology is None:
            made.predicted, made.costs = None, ANY_HOST
        else:
            time_here(made, Path(path), topology, options.objective.patience.tell)
        note_host(made, topology)
        return made, ctx


def _fitting(
    path: str | Path, options: Options, watch: Watch | None, reckoning: Reckoning | None
) -> tuple[Plan, PassContext]:
    """Makes a plan that keeps to the memory limit, or without one fits the hardware."""
    seen: Plan | None = None

    def make(objective: Objective, devices: int | None) -> tuple[Plan, PassContext]:
        nonlocal seen
        if devices != options.devices:  # to say how many ranks would do
            return _plan(path, replace(options, objective=objective, devices=devices, show=unseen))
        made = _plan(path, replace(options, objective=objective), watch, reckoning)
        seen = made[0]
        return made

    try:
        if options.objective.memory is None:
            made = make(options.objective, options.devices)
            fitting = _within_hardware(options, made[0], make)
            if fitting is None:
                return made
            within, made = fitting
        else:
            within, made = _within_limit(options, make)
        if made[0] is not seen and (watch is not None or reckoning is not None):
            notes = made[0].notes
            made = _plan(path, within, watch, reckoning)
            made[0].notes[:] = notes
        return made
    finally:
        options.objective.patience.tell("")


def _within_limit(options: Options, make: Make) -> tuple[Options, tuple[Plan, PassContext]]:
    """Returns a plan that keeps to the memory limit, and options that give the same plan without a
    search."""
    is_bounded = options.topology is not None and bool(options.topology.devices)
    may_grow = options.devices is not None and wanted_mesh(options) is None and not is_bounded
    is_paged = bool(options.page_size)
    found = within_limit(options.objective, options.devices, may_grow, is_paged, make)
    return _again(options, *found)


def _within_hardware(
    options: Options, made: Plan, make: Make
) -> tuple[Options, tuple[Plan, PassContext]] | None:
    """Returns a plan that fits the memory of the hardware, with options that give the same plan;
    None if the given plan fits, or no other plan was found."""
    if options.preset == MANUAL or (options.on_any_host and options.topology is None):
        return None
    found = within_hardware(
        options.objective, made, options.topology, lambda to, _: make(to, options.devices)
    )
    return None if found is None else _again(options, *found)


def _again(
    options: Options, objective: Objective, made: tuple[Plan, PassContext]
) -> tuple[Options, tuple[Plan, PassContext]]:
    """Returns options that give the same plan again without a search, and the plan."""
    plan, ctx = made
    found, proof = ctx.request.found, ctx.request.proof
    return replace(options, objective=objective, mesh=plan.mesh, found=found, proof=proof), made


def _plan(
    path: str | Path,
    options: Options,
    watch: Watch | None = None,
    reckoning: Reckoning | None = None,
) -> tuple[Plan, PassContext]:
    if not options.balance:
        return _faster(path, options, watch, reckoning)
    found, made = fitting_shares(options, lambda one: _plan_once(path, one))
    if watch is None and reckoning is None:
        return made
    return _plan_once(path, found, watch, reckoning)


def _faster(
    path: str | Path, options: Options, watch: Watch | None, reckoning: Reckoning | None
) -> tuple[Plan, PassContext]:
    """Makes a plan. If a search decides on a training step that communicates while it computes, the
    plan is the faster one of two, as the passes predict them: of a search in which sums of
    gradients between hosts count in full, and of one in which compute hides them."""
    made = _plan_once(path, options, watch, reckoning)
    plan, ctx = made
    was_searched = ctx.request.found is not None and options.found is None
    is_step = plan.step is not None and ctx.model.sizes is None
    if not (was_searched and is_step and may_overlap(options)) or options.objective.any_fit:
        return made
    objective = replace(options.objective, hides_sums=True)
    hiding = replace(options, objective=objective, show=unseen)
    try:
        other = _plan_once(path, hiding)
    except OverLimit:  # the first one fits
        return made
    assert plan.predicted is not None and other[0].predicted is not None
    if other[0].predicted.total >= plan.predicted.total * (1 - BETTER):
        return made
    if watch is None and reckoning is None:
        return other
    return _plan_once(path, _again(options, objective, other)[0], watch, reckoning)


@_no_collector()
def _plan_once(
    path: str | Path,
    options: Options,
    watch: Watch | None = None,
    reckoning: Reckoning | None = None,
) -> tuple[Plan, PassContext]:
    tell = options.objective.patience.tell
    whole: Whole = {}
    while True:
        tell("reading the model")
        model = load_model(path, options)
        model.whole = {**model.whole, **whole}
        unread = unread_inputs(model)
        tell("analysing the model")
        reckon = reckoning() if reckoning else ignore
        made, ctx, lowering = _made(model, options, watch, reckon)
        try:
            if model.sizes is not None:
                tell("repeating the plan at other sizes")
            with options.times.of(REPEAT) if model.sizes is not None else nullcontext():
                replay(model, ctx, lowering)
            check_open(model.graph, ctx)
            if model.sizes is not None:
                with options.times.of(PREDICT):
                    reckon_typical(made, model, ctx, lowering, reckon, options.reckon_at)
            open_ports(made, ctx)
            break
        except OpenSizesError as error:  # decide again, with these nodes whole
            more = stay_whole(error.nodes, model.graph, ctx, model.whole)
            if not more:
                raise
            LOG.debug("planning again, with %d nodes whole: %s", len(more), error)
            whole = {**whole, **more}
    made.metadata = metadata_of(model.header)
    if made.step is not None and made.step.deal is None and options.request is not None:
        made.request = {"file": Path(path).name, "options": options.request, "sha256": None}
    if options.exposed:
        expose(made, ctx, options.exposed)
    note_unsplit(made, ctx.sharding)
    if unread:
        names = ("input " if len(unread) == 1 else "inputs ") + ", ".join(map(repr, unread))
        made.notes.append(f"no node reads the {names}, but runs need a value")
    if model.sizes is not None and options.fusion not in (None, "none"):
        made.notes.append(
            "--fusion fuses only all-reduces, because the model has open sizes: shards that are "
            "equal at one size may differ at another. To fuse other collectives too, fix the "
            f"sizes with {model.sizes.flags}"
        )
    note_weights(made, ctx.sharding)
    if made.unpaired:
        warnings.warn(unpaired_text(made.unpaired), stacklevel=2)
    unruled = [w for w in made.whole if w.is_lack]
    if options.strict and unruled:
        first = unruled[0]
        raise StrategyError(
            f"--strict: {len(unruled)} {'node has' if len(unruled) == 1 else 'nodes have'} no "
            f"sharding rule and would run whole on every rank, the first of them {first.op} "
            f"'{first.node}' ({first.reason}); `onnxpar plan` without --strict lists them"
        )
    return made, ctx


def _made(
    model: Model, options: Options, watch: Watch | None, reckon: Reckon
) -> tuple[Plan, PassContext, list[Pass]]:
    """Runs the passes up to split-ranks; returns the plan, the context, and the passes of the stage
    LOWER."""
    steps = passes_of(options, model)
    ctx = prepare(model, options, steps, watch)
    steps = [s for s in steps if s.stage is not Stage.REWRITE]
    made = run_passes(model, ctx, steps, watch, options.verify, reckon, options.times)
    assert made is not None
    return made, ctx, [s for s in steps if s.stage is Stage.LOWER]


def annotate(path: str | Path, output: str | Path, options: Options) -> Plan:
    """Writes the original model with the plan as ONNX's multi-device annotations. Errors:
    OnnxparError."""
    if options.preset == MANUAL:
        raise StrategyError(
            "a manual program is one rank's graph, and annotations describe the graph of all "
            "ranks; annotate the original model with another preset"
        )
    refuse_paging(options, "annotate")
    output = Path(output)
    annotated: list[onnx.ModelProto] = []  # by each attempt at the plan; the last one counts
    names: Operands = {}

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        nonlocal names
        if ANNOTATIONS in step.ensures:
            names = operand_names(ctx.sharding)
        if LAYOUTS in step.ensures and ctx.layouts:
            annotated.append(original(Path(path)))
            write_annotations(annotated[-1], ctx, names)

    made, _ = plan(path, options, watch)
    save(annotated[-1], Path(path), output)
    return made


def shard(
    path: str | Path,
    output: str | Path,
    options: Options,
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    reckoning: Reckoning | None = None,
    ranks: Collection[int] | None = None,
    shorter: Sequence[Path] = (),
) -> Plan:
    """Writes the sharded model to the folder `output`, which an InferenceSession runs; of `ranks`
    alone, if they are given. `shorter` are files of the same training step for shorter samples.
    Errors: OnnxparError."""
    place = check_place(Path(output), foreign_part)
    if ranks is not None:
        mesh = wanted_mesh(options)
        check_chosen_ranks(ranks, mesh.size if mesh is not None else options.devices)
        request = options.request and dict(
            sorted({**options.request, "for_any_host": True}.items())
        )
        options = replace(options, host=unknown_host, on_any_host=True, request=request)
    made, ctx = plan(path, options, watch, reckoning)
    others: dict[Path, tuple[Plan, PassContext]] = {}
    if shorter:
        check_same_step(Path(path), shorter)
    pins, before = Pins(), None
    while shorter and pins != before:
        if before is not None and pins.whole != before.whole:
            made, ctx = plan(path, pins.on(options), watch, reckoning)
        others = {file: plan(file, pins.on(options, made.mesh)) for file in shorter}
        plans = [made, *(other for other, _ in others.values())]
        check_lengths(plans, [Path(path), *others])
        pins, before = pins.more(plans), pins
    if ranks is not None:
        check_chosen_ranks(ranks, made.mesh.size)
    encoder = None
    if options.part == DECODER:
        encoder = plan(encoder_file(Path(path)), encoder_options(options, made))
        note_encoder(made, encoder[0])
    carried = carried_files(Path(path), options.part is not None)
    if made.request is not None:
        made.request = {**made.request, "sha256": model_digest(Path(path))}
        if shorter:
            made.request = {**made.request, "shorter": digests_beside(Path(path), shorter)}
    with options.times.of(OTHER), writing(output):
        write_bundle(place, made, ctx, encoder, others, carried, options.times, progress, ranks)
    return made
