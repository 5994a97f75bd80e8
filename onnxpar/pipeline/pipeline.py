"""The one default order of passes, and the calls that run it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.compiler.expose import expose
from onnxpar.compiler.open_ports import open_ports
from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.compiler.plan import Plan, foreign_part, write_plan
from onnxpar.compiler.replay import opened, replay, stay_whole, variants
from onnxpar.compiler.summary import summarize
from onnxpar.compiler.verify import verify
from onnxpar.compiler.write_annotations import operand_names, original, save, write_annotations
from onnxpar.cost.topology import Topology
from onnxpar.errors import OnnxparError, OpenSizesError, PassError, StrategyError
from onnxpar.files.new_folder import check_place, new_folder
from onnxpar.files.write_file import writing
from onnxpar.ir.collectives import DOMAIN
from onnxpar.ir.tensors import Whole
from onnxpar.ir.training_spec import Step
from onnxpar.layout.mesh import Mesh, check_ranks
from onnxpar.load.load import InferTypes, Model, load
from onnxpar.lowering.buckets import BUCKET_BYTES, PART_BYTES
from onnxpar.lowering.compression import NONE
from onnxpar.manual.manual import MANUAL, Manual, refuse_collectives
from onnxpar.model.annotations import Configuration, choose_configuration
from onnxpar.model.interchange import metadata_of
from onnxpar.model.model_name import model_name
from onnxpar.model.state_pairs import unpaired_text
from onnxpar.open_sizes.typical import Profile, Typical
from onnxpar.passes.annotate_strategy import AnnotateStrategy
from onnxpar.passes.compress_collectives import CompressCollectives
from onnxpar.passes.fuse_all_reduces import FUSIONS, FuseAllReduces
from onnxpar.passes.gate_recomputation import GateRecomputation
from onnxpar.passes.insert_collectives import InsertCollectives
from onnxpar.passes.keep_collectives import KeepCollectives
from onnxpar.passes.localize_ops import LocalizeOps
from onnxpar.passes.order_collectives import OrderCollectives
from onnxpar.passes.propagate_layouts import PropagateLayouts
from onnxpar.passes.split_programs import SplitPrograms
from onnxpar.passes.split_ranks import SplitRanks, check_open
from onnxpar.pipeline.memory_limit import within_host, within_limit
from onnxpar.pipeline.pass_order import Placed, check_rewritten, insert, known_of
from onnxpar.pipeline.plugins import load_entry_points
from onnxpar.pipeline.reckoning import Reckon, note_unsplit, note_weights, predicted, reckon_typical
from onnxpar.pipeline.unused_options import refuse_for_manual, refuse_without_search
from onnxpar.presets.presets import preset_mesh
from onnxpar.search.given_mesh import best_on_mesh
from onnxpar.search.meshes import best_mesh
from onnxpar.search.objective import Objective
from onnxpar.search.op_strategies import Kept
from onnxpar.search.search import AUTO, EXHAUSTIVE, PROPAGATION, SEARCHES, Solution, solve
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import GraphFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.annotated_strategy import annotated_mesh
from onnxpar.strategy.strategy import Annotation, Strategy

DEFAULT_PASSES: tuple[type[Pass], ...] = (
    AnnotateStrategy,
    PropagateLayouts,
    InsertCollectives,
    CompressCollectives,
    FuseAllReduces,
    LocalizeOps,
    SplitPrograms,
    OrderCollectives,
    GateRecomputation,
)
"""Everything between load and split-ranks."""
MANUAL_PASSES: tuple[type[Pass], ...] = (
    KeepCollectives,
    SplitPrograms,
    OrderCollectives,
    GateRecomputation,
)
"""The same for a model that is each rank's program already."""

Watch = Callable[[Pass, Model, PassContext], None]
"""Is called after each pass, also after one that failed, with the graph as that has left it."""


def _ignore(weight: float, graph: gs.Graph, ctx: PassContext) -> None:
    pass


@dataclass(frozen=True)
class Options:
    """What `shard`, `plan` and `check` have in common; see `onnxpar shard --help`. `found` is what
    a search has decided on the mesh, which is not searched again then. Costs of what was decided
    are computed at the sizes of `reckon_at`, if any, else at the `typical` ones."""

    devices: int | None = None
    mesh: Mesh | None = None
    preset: str | None = None
    strategy: Strategy | None = None
    dims: Mapping[str, int | str] | None = None
    states: Sequence[tuple[str, str]] = ()
    find_states: bool = True
    strict: bool = False
    verify: bool = False
    configuration: str | None = None
    compression: str | None = None
    replicas: bool = False
    exposed: Collection[str] = ()
    fusion: str | None = None
    bucket_bytes: int | None = None
    topology: Topology | None = None
    search: str | None = None
    objective: Objective = field(default_factory=Objective)
    passes: Sequence[Pass | Placed] = ()
    compared: bool = False  # with other strategies, by the objective
    found: list[Annotation] | None = None
    typical: Typical = field(default_factory=Typical)
    reckon_at: Sequence[Profile] = ()


def prepare(
    model: Model,
    options: Options,
    passes: Sequence[Pass],
    watch: Watch | None = None,
) -> PassContext:
    """Runs the passes of the stage REWRITE, at every binding of open sizes, and makes the context
    of the others. Errors: OnnxparError."""
    steps = [p for p in passes if p.stage is Stage.REWRITE]
    if steps:
        run_passes(model, _undecided(model, options), steps, watch, options.verify)
    if steps and model.sizes is not None:
        at = model.sizes.graph

        def rewritten(i: int) -> gs.Graph:
            other = replace(model, graph=at(i))
            run_passes(other, _undecided(other, options), steps)
            return other.graph

        model.sizes = replace(model.sizes, graph=rewritten)
    if len(steps) == len(passes):
        return _undecided(model, options)
    return make_context(model, options)


def _undecided(model: Model, options: Options) -> PassContext:
    """The context of passes that rewrite the global graph: whatever the mesh, nothing is split."""
    mesh = _wanted_mesh(options) or preset_mesh(None, options.devices or 1)
    manual = manual_of(options, model.step) if options.preset == MANUAL else None
    return PassContext(model, _open(model, mesh, options.topology), manual=manual)


def _open(model: Model, mesh: Mesh, topology: Topology | None) -> ShardingState:
    """A sharding of the graph as it is, with nothing decided."""
    if any(node.domain == DOMAIN for node in model.graph.nodes):
        return ShardingState.open(mesh, GraphFactors({}, []), topology)  # a program per rank
    factors = analyse(model.graph, model.states, model.sizes is None, model.whole)
    return ShardingState.open(mesh, factors, topology)


def make_context(model: Model, options: Options) -> PassContext:
    """Analyses the model and settles the mesh and the preset. Errors: StrategyError."""
    manual = manual_of(options, model.step)
    if manual is not None:
        refuse_for_manual(options)
        nothing = ShardingState.open(manual.mesh, GraphFactors({}, []), options.topology)
        return PassContext(model, nothing, preset=MANUAL, manual=manual)
    options.objective.check(model.step)
    if not options.compared:
        refuse_without_search(options)
    refuse_collectives(model.graph)
    factors = analyse(model.graph, model.states, model.sizes is None, model.whole)
    others = variants(model, factors)
    factors = opened(model, factors, others)
    mesh, preset, annotated, found = _mesh_and_preset(model, options, factors)
    return PassContext(
        model,
        ShardingState.open(mesh, factors, options.topology),
        strategy=options.strategy,
        preset=preset,
        annotated=annotated,
        objective=options.objective,
        found=found,
        variants=others,
    )


def _mesh_and_preset(
    model: Model, options: Options, factors: GraphFactors
) -> tuple[Mesh, str | None, Configuration | None, list[Annotation] | None]:
    """The mesh, the preset or search, the annotations to follow, and what was found with a mesh."""
    mesh, how = _wanted_mesh(options), _preset_or_search(options)
    devices = mesh.size if mesh is not None else options.devices
    annotated = choose_configuration(model.annotations, options.configuration, devices)
    if annotated is not None:
        if how is None:
            refuse_without_search(options, is_annotated=True)
        return annotated_mesh(annotated, mesh), how, annotated, options.found
    if devices is None:
        raise StrategyError("how many ranks? give --devices N or --mesh dp=..,tp=..")
    if how is None and options.strategy is None and options.search is None:
        how = AUTO
    if how not in (AUTO, EXHAUSTIVE) or (mesh is not None and options.found is not None):
        return mesh or preset_mesh(how, devices), how, None, options.found

    def on_mesh(
        sharding: ShardingState, given: Sequence[Sequence[Annotation]], kept: Kept | None
    ) -> Solution:
        states, objective = model.states, options.objective
        return solve(model.graph, sharding, states, given, how, kept, objective, model.step)

    given = (options.topology, on_mesh, options.strategy, options.objective)
    if mesh is not None:
        best = best_on_mesh(factors, mesh, *given)
    else:
        best = best_mesh(model, factors, devices, *given)
    return best.mesh, how, None, best.annotations


def _preset_or_search(options: Options) -> str | None:
    """What decides beside the strategy, if anything is named. Errors: StrategyError."""
    search, preset = options.search, options.preset
    if search is None:
        return preset
    if search not in SEARCHES:
        raise StrategyError(f"--search {search!r}: there are {', '.join(SEARCHES)}")
    if preset is not None:
        raise StrategyError(f"--search {search} and --preset {preset}: give one of them")
    return None if search == PROPAGATION else search


def _wanted_mesh(options: Options) -> Mesh | None:
    """The mesh that the user gives, in words or in the strategy."""
    mesh, strategy = options.mesh, options.strategy
    if mesh is not None and options.devices not in (None, mesh.size):
        raise StrategyError(f"mesh {mesh} has {mesh.size} ranks, --devices says {options.devices}")
    if mesh is None and strategy is not None and strategy.mesh is not None:
        mesh = strategy.mesh if options.devices in (None, strategy.mesh.size) else None
    return mesh


def manual_of(options: Options, step: Step | None = None) -> Manual | None:
    """How a manual program's tensors are dealt; None for any other preset. Errors: StrategyError
    where a training step says otherwise."""
    deal = step.deal if step is not None else None
    if options.preset != MANUAL:
        if deal is not None:
            raise StrategyError("the training step is a program per rank: give --preset manual")
        return None
    mesh = _wanted_mesh(options)
    if deal is not None:
        own = Mesh.of((name, size) for name, size in deal.mesh)
        if mesh not in (None, own) or options.devices not in (None, own.size):
            raise StrategyError(f"the training step was made for the mesh {own}; make another one")
        return Manual(own, options.strategy or Strategy(), deal)
    if mesh is None and options.devices is None:
        raise StrategyError("how many ranks? give --devices N or --mesh dp=..,tp=..")
    mesh = mesh or preset_mesh(MANUAL, options.devices or 1)
    return Manual(mesh, options.strategy or Strategy())


def load_model(
    path: str | Path,
    options: Options,
    for_training: bool = False,
    untied: bool = False,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Model:
    """The model as its preset sees it: a global program, or that of each rank; `for_training`,
    `untied` and `shapes` as for `load`."""

    def own_types(step: Step | None) -> InferTypes | None:
        manual = manual_of(options, step)
        return None if manual is None else partial(manual.infer, for_training=for_training)

    load_entry_points()
    least = _devices(options)
    model = load(
        path,
        options.dims,
        options.states,
        least=least,
        own_types=own_types,
        for_training=for_training,
        untied=untied,
        typical=options.typical,
        find_others=options.find_states,
        shapes=shapes,
    )
    if options.preset == MANUAL:  # what looks like a growing cache may be no pair here
        slots = model.step.slots if model.step is not None else []
        model.states = [*((slot.input, slot.output) for slot in slots), *options.states]
    return model


def passes_of(options: Options, model: Model) -> list[Pass]:
    """The passes between load and split-ranks, with those from outside in their places."""
    return insert(_own_passes(options, model), options.passes)


def _own_passes(options: Options, model: Model) -> list[Pass]:
    if options.preset == MANUAL:
        return [KeepCollectives(options.replicas), *(p() for p in MANUAL_PASSES[1:])]
    fusion = _fusion(options, model)
    together = 0 if fusion.by == "none" else fusion.bucket_bytes
    compression = CompressCollectives(options.compression or NONE, bucket_bytes=together)
    given: dict[type[Pass], Pass] = {type(p): p for p in (fusion, compression)}
    return [given.get(p) or p() for p in DEFAULT_PASSES]


def _fusion(options: Options, model: Model) -> FuseAllReduces:
    """Gradients are fused unless something else is asked for; activations wait for each other.
    Errors: StrategyError."""
    by = options.fusion or ("none" if model.step is None else "size")
    if by not in FUSIONS:
        raise StrategyError(f"fusion {by!r}: there are {', '.join(FUSIONS)}")
    if options.bucket_bytes is not None and options.bucket_bytes < 1:
        raise StrategyError(f"buckets of {options.bucket_bytes} bytes: at least 1")
    if options.bucket_bytes is not None and by != "size":
        raise StrategyError("--bucket-mb is for --fusion size: give that, or leave it out")
    given = options.bucket_bytes
    return FuseAllReduces(by, given or BUCKET_BYTES, given or PART_BYTES)


def run_passes(
    model: Model,
    ctx: PassContext,
    passes: Iterable[Pass],
    watch: Watch | None = None,
    check: bool = False,
    reckon: Reckon = _ignore,
) -> Plan | None:
    """Runs passes in order; the plan is taken after insert-collectives, and told of what comes.

    `check` verifies the invariants after every pass; `watch` is called before that, for dumps;
    `reckon` where costs are computed, unless sizes are open. Errors: OnnxparError of a pass;
    PassError for any other failure, naming the pass and those before it.
    """
    plan = None
    ran: list[str] = []
    for step in passes:
        changed = _run(step, model, ctx, ran, watch, check)
        ran.append(step.name)
        compressed = changed and isinstance(step, CompressCollectives)
        if compressed or isinstance(step, (InsertCollectives, KeepCollectives)):
            plan = summarize(model.graph, ctx, model_name(model.path), ctx.preset)
        if isinstance(step, FuseAllReduces) and plan is not None and model.sizes is None:
            plan.predicted = predicted(model.graph, ctx)
            reckon(1.0, model.graph, ctx)
    if plan is not None:
        plan.collectives = list(ctx.collectives)
    return plan


def _run(
    step: Pass,
    model: Model,
    ctx: PassContext,
    ran: Sequence[str],
    watch: Watch | None,
    check: bool,
) -> bool:
    """Runs a pass, lets `watch` see what it has left, and checks that; returns whether anything
    changed."""
    known = known_of(model.graph) if step.stage is Stage.REWRITE else None
    with _failures(step, ran):
        try:
            changed = step.run(model.graph, ctx)
            if known is not None:
                check_rewritten(step, model.graph, known)
                ctx.sharding = _open(model, ctx.sharding.mesh, ctx.sharding.costs.topology)
        except Exception:
            _show(step, model, ctx, watch)
            raise
    if watch is not None:
        watch(step, model, ctx)
    if check:
        with _failures(step, ran):
            verify(model.graph, ctx)
    return changed


@contextmanager
def _failures(step: Pass, ran: Sequence[str]) -> Iterator[None]:
    """Turns a failure that is no error for users into one that names the pass and those before."""
    try:
        yield
    except OnnxparError:
        raise
    except Exception as error:
        before = f" after {', '.join(ran)}" if ran else ""
        raise PassError(
            f"pass {step.name} failed{before}: {type(error).__name__}: {error}"
        ) from error


def _show(step: Pass, model: Model, ctx: PassContext, watch: Watch | None) -> None:
    """Shows what a pass that failed has left, as far as it can be shown."""
    if watch is not None:
        with suppress(Exception):
            watch(step, model, ctx)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without Python's cycle collector: graphs stay alive, and looking through them again and again
    takes longer the more nodes there are."""
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
    reckon: Reckon | None = None,
) -> tuple[Plan, PassContext]:
    """Everything that `shard` does, short of writing. Errors: OnnxparError."""
    try:
        if options.objective.memory is None:
            made = _plan(path, options, watch, reckon)
            fitting = _within_host(path, options, made[0])
            if fitting is None:
                return made
            within, made = fitting
        else:
            within, made = _within_limit(path, options)
        if watch is not None or reckon is not None:
            notes = made[0].notes
            made = _plan(path, within, watch, reckon)
            made[0].notes[:] = notes
        return made
    finally:
        options.objective.patience.tell("")


def _within_limit(path: str | Path, options: Options) -> tuple[Options, tuple[Plan, PassContext]]:
    """The plan that keeps to the limit on memory, and options with which it is made again."""

    def make(objective: Objective, devices: int | None) -> tuple[Plan, PassContext]:
        return _plan(path, replace(options, objective=objective, devices=devices))

    may_grow = options.devices is not None and _wanted_mesh(options) is None
    return _again(options, *within_limit(options.objective, options.devices, may_grow, make))


def _within_host(
    path: str | Path, options: Options, made: Plan
) -> tuple[Options, tuple[Plan, PassContext]] | None:
    """The same, where ranks that are all on this host would not fit its memory; else None."""
    if options.topology is not None or options.preset == MANUAL:
        return None

    def make(objective: Objective, devices: int | None) -> tuple[Plan, PassContext]:
        return _plan(path, replace(options, objective=objective))

    found = within_host(options.objective, made, make)
    return None if found is None else _again(options, *found)


def _again(
    options: Options, objective: Objective, made: tuple[Plan, PassContext]
) -> tuple[Options, tuple[Plan, PassContext]]:
    """Options with which a plan is made again, and the plan."""
    plan, ctx = made
    return replace(options, objective=objective, mesh=plan.mesh, found=ctx.found), made


@_no_collector()
def _plan(
    path: str | Path,
    options: Options,
    watch: Watch | None = None,
    reckon: Reckon | None = None,
) -> tuple[Plan, PassContext]:
    reckon = reckon or _ignore
    tell = options.objective.patience.tell
    whole: Whole = {}
    while True:
        tell("reading the model")
        model = load_model(path, options)
        model.whole = {**model.whole, **whole}
        tell("analysing the model")
        made, ctx, lowering = _made(model, options, watch, reckon)
        try:
            if model.sizes is not None:
                tell("repeating the plan at other sizes")
            replay(model, ctx, lowering)
            check_open(model.graph, ctx)
            if model.sizes is not None:
                reckon_typical(made, model, ctx, lowering, reckon, options.reckon_at)
            open_ports(made, ctx)
            break
        except OpenSizesError as error:  # such nodes stay whole, and all is decided anew
            more = stay_whole(error.nodes, model.graph, ctx, model.whole)
            if not more:
                raise
            whole = {**whole, **more}
    made.metadata = metadata_of(model.header)
    if options.exposed:
        expose(made, ctx, options.exposed)
    note_unsplit(made, ctx.sharding)
    if model.sizes is not None and options.fusion not in (None, "none"):
        made.notes.append(
            "while sizes are open, --fusion joins all-reduces only, as parts that are equal at one "
            f"size may not be at another; give {model.sizes.flags} for the others"
        )
    note_weights(made, ctx.sharding)
    if made.unpaired:
        warnings.warn(unpaired_text(made.unpaired), stacklevel=2)
    unruled = [w for w in made.whole if w.is_lack]
    if options.strict and unruled:
        first = unruled[0]
        raise StrategyError(
            f"--strict: {first.op} '{first.node}' stays whole ({first.reason}), as do "
            f"{len(unruled) - 1} more; `onnxpar plan` lists them"
        )
    return made, ctx


def _made(
    model: Model, options: Options, watch: Watch | None, reckon: Reckon
) -> tuple[Plan, PassContext, list[Pass]]:
    """What the passes before split-ranks make of a model, and those that lower it."""
    steps = passes_of(options, model)
    ctx = prepare(model, options, steps, watch)
    steps = [s for s in steps if s.stage is not Stage.REWRITE]
    made = run_passes(model, ctx, steps, watch, options.verify, reckon)
    assert made is not None
    return made, ctx, [s for s in steps if s.stage is Stage.LOWER]


def _devices(options: Options) -> int:
    """How many elements an open dimension should have at least, to be split like a large one."""
    mesh = _wanted_mesh(options)
    if options.devices is not None:
        check_ranks(options.devices)
    return max(2, options.devices or 1, mesh.size if mesh else 1)


def annotate(path: str | Path, output: str | Path, options: Options) -> Plan:
    """Writes the original model with the plan as ONNX's multi-device annotations. Errors:
    OnnxparError."""
    if options.preset == MANUAL:
        raise StrategyError("annotations are of a global program, which a manual one is not")
    if options.objective.memory is not None:
        options, _ = _within_limit(path, options)
    model = load_model(path, options)
    ctx = make_context(model, options)
    names = operand_names(ctx.sharding)
    steps = passes_of(options, model)
    first = DEFAULT_PASSES.index(InsertCollectives) + 1
    made = run_passes(model, ctx, steps[:first], check=options.verify)
    assert made is not None
    proto = original(Path(path))
    write_annotations(proto, ctx, names)
    save(proto, Path(path), Path(output))
    run_passes(model, ctx, steps[first:], check=options.verify)
    made.collectives = list(ctx.collectives)
    return made


def shard(
    path: str | Path,
    output: str | Path,
    options: Options,
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    reckon: Reckon | None = None,
) -> Plan:
    """Writes the model as a folder `output`, which an InferenceSession runs. Errors:
    OnnxparError."""
    place = check_place(Path(output), foreign_part)
    made, ctx = plan(path, options, watch, reckon)
    with writing(output), new_folder(place, foreign_part) as folder:
        extra: dict[str, Any] = {"progress": progress} if progress else {}
        SplitRanks(folder, **extra).run(ctx.model.graph, ctx)
        write_plan(folder, made.to_json())
    return made
