"""Makes plans, sharded models, and annotated models: what the commands `plan`, `shard` and
`annotate` do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from onnxpar.base.errors import InputError, StrategyError
from onnxpar.base.new_folder import check_place
from onnxpar.base.pass_times import OTHER
from onnxpar.base.write_file import writing
from onnxpar.compiler.length_buckets import check_lengths
from onnxpar.compiler.pass_ import ANNOTATIONS, LAYOUTS, Pass, PassContext
from onnxpar.compiler.plan import Plan, foreign_part
from onnxpar.compiler.write_annotations import (
    Operands,
    operand_names,
    original,
    save,
    write_annotations,
)
from onnxpar.graph.model_folder import carried_files, encoder_file
from onnxpar.load.encoder_decoder import DECODER
from onnxpar.load.load import Model
from onnxpar.planner.encoder_decoders import encoder_options, note_encoder
from onnxpar.planner.length_bucket_plans import Pins, check_same_step, digests_beside
from onnxpar.planner.loader import Loader
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options, unknown_host, wanted_mesh
from onnxpar.planner.paging import refuse_paging
from onnxpar.planner.planner import Planner
from onnxpar.planner.request import model_digest
from onnxpar.planner.write_bundle import check_chosen_ranks, write_bundle
from onnxpar.strategy.manual import MANUAL


def plan(
    path: str | Path,
    options: Options,
    observer: Observer | None = None,
    loader: Loader | None = None,
) -> tuple[Plan, PassContext]:
    """Returns the plan that `shard` would write, and the context after its passes. `loader` may
    have read the model before. Errors: OnnxparError."""
    observer = observer or Observer()
    planned = Planner(loader or Loader(path, observer.loading), options, observer).plan()
    return planned.plan, planned.ctx


def annotate(path: str | Path, output: str | Path, options: Options) -> Plan:
    """Writes the original model to `output` with the layouts of a plan as ONNX's multi-device
    annotations; returns the plan. Errors: OnnxparError."""
    if options.preset == MANUAL:
        raise StrategyError(
            "a manual program is one rank's graph, and annotations describe the graph of all "
            "ranks; annotate the original model with another preset"
        )
    refuse_paging(options, "annotate")
    output = Path(output)
    annotator = _Annotator(Path(path))
    result, _ = plan(path, options, annotator)
    assert annotator.annotated is not None
    save(annotator.annotated, Path(path), output)
    return result


class _Annotator(Observer):
    """An observer that keeps the original model, annotated with the layouts of the plan."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.annotated: onnx.ModelProto | None = None
        self._names: Operands = {}

    def passed(self, step: Pass, model: Model, ctx: PassContext) -> None:
        if ANNOTATIONS in step.ensures:
            self._names = operand_names(ctx.sharding)
        if LAYOUTS in step.ensures and ctx.layouts:
            self.annotated = original(self.path)
            write_annotations(self.annotated, ctx, self._names)


def shard(
    path: str | Path,
    output: str | Path,
    options: Options,
    progress: Callable[[int], None] | None = None,
    observer: Observer | None = None,
    ranks: Collection[int] | None = None,
    shorter: Sequence[Path] = (),
    prove: Callable[[Path], None] | None = None,
) -> Plan:
    """Writes the sharded model to the folder `output`, from which an InferenceSession runs it;
    returns its plan.

    progress  called with the number of bytes of weights that have been written since the last call
    ranks     write only the files of these ranks; None: all
    shorter   files of the same training step for shorter samples
    prove     called with the complete folder before it gets its name; an error leaves nothing

    Errors: OnnxparError.
    """
    if prove is not None and ranks is not None:
        raise InputError(
            "--verify needs the files of all ranks: leave out --ranks, or prove the "
            "complete folder with `onnxpar verify`"
        )
    place = check_place(Path(output), foreign_part)
    if ranks is not None:
        mesh = wanted_mesh(options)
        check_chosen_ranks(ranks, mesh.size if mesh is not None else options.devices)
        request = options.request and dict(
            sorted({**options.request, "for_any_host": True}.items())
        )
        options = replace(options, host=unknown_host, on_any_host=True, request=request)
    result, ctx = plan(path, options, observer)
    of_shorter: dict[Path, tuple[Plan, PassContext]] = {}
    if shorter:
        check_same_step(Path(path), shorter)
    pins, before = Pins(), None
    while shorter and pins != before:
        if before is not None and pins.whole != before.whole:
            result, ctx = plan(path, pins.on(options), observer)
        of_shorter = {file: plan(file, pins.on(options, result.mesh)) for file in shorter}
        plans = [result, *(other for other, _ in of_shorter.values())]
        check_lengths(plans, [Path(path), *of_shorter])
        pins, before = pins.more(plans), pins
    if ranks is not None:
        check_chosen_ranks(ranks, result.mesh.size)
    encoder = None
    if options.part == DECODER:
        encoder = plan(encoder_file(Path(path)), encoder_options(options, result))
        note_encoder(result, encoder[0])
    carried = carried_files(Path(path), options.part is not None)
    if result.request is not None:
        result.request = {**result.request, "sha256": model_digest(Path(path))}
        if shorter:
            result.request = {**result.request, "shorter": digests_beside(Path(path), shorter)}
    with options.times.of(OTHER), writing(output):
        write_bundle(
            place, result, ctx, encoder, of_shorter, carried, options.times, progress, ranks, prove
        )
    return result
