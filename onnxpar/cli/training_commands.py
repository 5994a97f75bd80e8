"""The training commands of the command line. Each takes the parsed arguments and returns the exit
status."""

from __future__ import annotations

import argparse
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from onnxpar.base.errors import RankError, RunError, StoppedError
from onnxpar.base.folder_lock import FolderLock
from onnxpar.base.interrupts import Terminated
from onnxpar.base.log import LOG
from onnxpar.base.units import quantity
from onnxpar.base.write_file import writing
from onnxpar.cli.compare_prediction import compare_prediction
from onnxpar.cli.error_line import report
from onnxpar.cli.options import values_of, with_times
from onnxpar.cli.training_bar import Bar
from onnxpar.graph.tensors import numel, shape_bytes
from onnxpar.graph.training_spec import Step
from onnxpar.report.plan_text import size_text, table
from onnxpar.report.trace_lines import trace_lines
from onnxpar.runtime.launch.launch import generation_number, launched_rank
from onnxpar.runtime.launch.supervision import AGAIN
from onnxpar.runtime.ranks.redirect import redirect_output
from onnxpar.trainer.checkpoint import Progress, tell
from onnxpar.trainer.data import Data
from onnxpar.trainer.elastic import Generations, generation_logs
from onnxpar.trainer.export_weights import export_weights
from onnxpar.trainer.grad_options import GradOptions
from onnxpar.trainer.launched_generation import LaunchedGeneration, NotNeededError
from onnxpar.trainer.living import held_unless_launched, living
from onnxpar.trainer.loop import Run, last_checkpoint
from onnxpar.trainer.loss_curve import draw_losses
from onnxpar.trainer.merge import merge as merge_checkpoint
from onnxpar.trainer.metrics_files import (
    METRICS,
    Csv,
    JsonLines,
    MetricsFile,
    PrintedLines,
    TensorBoard,
    row_of,
)
from onnxpar.trainer.run_request import RunRequest, run_request
from onnxpar.trainer.train_options import TrainOptions
from onnxpar.trainer.write_step import write_step
from onnxpar.training.gradients.trained import FROZEN, UNNAMED, Left, Trained, Weights


@with_times
def grad(args: argparse.Namespace) -> int:
    """Runs `grad`: writes the training step of a model as an ONNX graph, and prints what it
    trains."""
    options: Any = values_of(args, GradOptions)
    model, weights = write_step(args.model, Path(args.output), options, args.dump, args.times)
    assert model.step is not None
    lines = [*_trained_lines(weights.trained), *_left_lines(weights), *_step_lines(model.step)]
    print("\n".join(lines))
    warn_of(model.step)
    print(f"written to {args.output}")
    return 0


def train(args: argparse.Namespace) -> int:
    """Runs `train`: runs a sharded training step over data; under a launcher, this process is one
    rank."""
    options: Any = values_of(args, TrainOptions)
    request = run_request(options)
    run, elastic = request.run, request.elastic
    with held_unless_launched(run, elastic) as held:
        try:
            return _train(args, request, held)
        except (KeyboardInterrupt, Terminated) as end:
            end.args = (last_checkpoint(run),)
            raise
        except NotNeededError as end:
            print(f"onnxpar: {end}", file=sys.stderr)
            return 0
        except StoppedError as end:
            if elastic is None or launched_rank() is None:
                terminated = Terminated(signal.SIGTERM)
                terminated.args = (last_checkpoint(run),)
                raise terminated from None
            tell(str(end))
            return AGAIN
        except RankError as error:
            if isinstance(error, RunError) or elastic is None or launched_rank() is None:
                raise
            report(error)
            return AGAIN


def _train(args: argparse.Namespace, request: RunRequest, held: FolderLock | None) -> int:
    """Trains, and writes logs and checkpoints; returns the exit status. `held` is the lock on the
    folder of checkpoints, if there is one."""
    run, elastic = request.run, request.elastic
    logs = Path(args.log_dir)
    rank = launched_rank()
    files = _metrics_files(args, logs) if rank is None or rank.rank == 0 else []
    if rank is not None:
        own = generation_logs(logs, generation_number() if elastic else 0)
        redirect_output(own, rank, stdout=rank.rank != 0)
    options = {**request.of_trainer, "log_dir": None if rank else logs}
    with living(Path(args.par), run, elastic, held, **options) as generations:
        trainer = generations.trainer
        data, held_out = request.data(trainer, args.data)
        try:
            if not trainer.leads:
                deque(generations.records(data, held_out), maxlen=0)
            else:
                with writing(logs):
                    logs.mkdir(parents=True, exist_ok=True)
                _follow(generations, data, run, held_out, logs, files, is_told=not args.json)
        except RankError as error:
            generations.trainer.close()  # may complete a checkpoint
            first, *more_lines = str(error).split("\n")
            goes_on = elastic is not None and rank is not None
            error.args = ("\n".join([f"{first}; {last_checkpoint(run, goes_on)}", *more_lines]),)
            raise
        trace = trainer.session.end_profile(args.profile, warm_up=1) if args.profile else None
    if trace is not None and not args.json:
        print("\n" + "\n".join(trace_lines(trace)))
        print(f"the trace is in {args.profile}, for https://ui.perfetto.dev or chrome://tracing")
    return 0


def _follow(
    generations: Generations | LaunchedGeneration,
    data: Data,
    run: Run,
    held_out: Data | None,
    logs: Path,
    files: Sequence[MetricsFile],
    is_told: bool,
) -> None:
    """Runs all steps, writes the metrics of each to `files`, and draws the loss in the folder
    `logs`. If `is_told`, prints the loss of each step, and at the end where the files are."""

    def say(text: str) -> None:
        if is_told:
            print(text, flush=True)

    loss = generations.trainer.spec.loss
    metrics = logs / METRICS
    for word, source in (("", data), ("evaluation: ", held_out)):
        if source is not None and (left_out := source.left_out()):
            say(f"{word}{left_out}")
    last: int | None = None
    best_step = 0
    seconds: list[float] = []
    with Bar(run.steps(data, Progress()), data.batch) as bar:
        for record in generations.records(data, held_out):
            if last is None or record.total <= last:  # a run that cannot start keeps all rows
                for file in files:
                    file.begin(record.total)
            last, best_step = record.total, record.best_step
            seconds.append(record.seconds)
            lines = record.lines(loss) if is_told else ()
            bar.show(record.total, lines, record.values[loss])
            for file in files:
                file.add(row_of(record))
    for file in files:
        file.close()
    predicted = generations.trainer.bundle.data.get("predicted")
    if predicted and predicted["total"] and len(seconds) > 1:
        step_seconds = median(seconds[1:])
        text = compare_prediction(predicted, step_seconds, "step")
        if generations.trainer.bundle.programs:
            text = f"predicted for the longest samples: {predicted['total'] * 1e3:.3f} ms"
        say(f"{len(seconds)} steps, {step_seconds * 1e3:.3f} ms each (the median); {text}")
    with writing(logs / "loss.png"):
        draw_losses(metrics, logs / "loss.png")
    say(f"metrics are in {metrics}, the loss is drawn in {logs / 'loss.png'}")
    if run.checkpoint is not None:
        say(f"the last checkpoint is {generations.trainer.checkpoint}")
    if run.checkpoint is not None and run.keep_best and best_step:
        say(f"the best checkpoint is {run.checkpoint / Progress(best_step).name}")


def _metrics_files(args: argparse.Namespace, logs: Path) -> list[MetricsFile]:
    """Returns the files that get the metrics of each step: one in the folder `logs`, and further
    ones that the user asked for. Errors: InputError."""
    files: list[MetricsFile] = [JsonLines(logs / METRICS)]
    if args.json:
        files.append(PrintedLines())
    if args.csv:
        files.append(Csv(Path(args.csv)))
    if args.tensorboard:
        files.append(TensorBoard(Path(args.tensorboard)))
    return files


def weights(args: argparse.Namespace) -> int:
    """Runs `checkpoint weights`: writes the weights of a checkpoint as safetensors files."""
    most = int(quantity(args.max_shard_size, "B", "--max-shard-size"))
    count = export_weights(args.checkpoint, args.output, max_shard_size=most)
    print(f"{count} weights of {args.checkpoint} are in {args.output}")
    return 0


def merge(args: argparse.Namespace) -> int:
    """Runs `checkpoint merge`: writes a model with the weights of a checkpoint."""
    count = merge_checkpoint(
        args.checkpoint, args.model, args.output, training=args.training, ema=args.ema
    )
    print(f"{count} weights of {args.checkpoint} are in {args.output}")
    return 0


def warn_of(step: Step) -> None:
    """Logs warnings about differences between the trained network and the exported one, such as a
    Dropout that the export removed."""
    for caution in step.cautions:
        LOG.warning(caution)


def _trained_lines(trained: Sequence[Trained]) -> Iterator[str]:
    """Yields the lines of a table of the trained weights, and their total size."""
    rows = [
        (t.name, "x".join(map(str, t.tensor.shape)), f"{t.node.op} operand {t.operand}")
        for t in trained
    ]
    yield from table(rows, ("trained", "shape", "as"))
    count = sum(numel(t.tensor.shape) for t in trained)
    size = sum(shape_bytes(t.tensor, t.tensor.shape) for t in trained)
    yield ""
    yield f"{len(trained)} parameters of {count:,} elements, {size_text(size)}"


def _left_lines(weights: Weights) -> Iterator[str]:
    """Yields the lines of a table of the weights that are not trained, with reasons. Weights with a
    single element, and weights that the user excluded, are only counted."""
    by_choice = (FROZEN, UNNAMED)
    listed = [w for w in weights.left if _elements(w) != 1 and w.reason not in by_choice]
    if listed:
        yield ""
        rows = [(w.name, "x".join(map(str, w.tensor.shape)), w.reason) for w in listed]
        yield from table(rows, ("not trained", "shape", "why"))
    for reason in by_choice:
        count = sum(w.reason == reason for w in weights.left)
        if count:
            yield f"{count} not trained, {reason}"
    numbers = [w for w in weights.left if _elements(w) == 1 and w.reason not in by_choice]
    if numbers:
        like = f", such as {numbers[0].name}"
        line = f"1 single number is not trained: {numbers[0].name}"
        yield line if len(numbers) == 1 else f"{len(numbers)} single numbers are not trained{like}"
    yield ""


def _elements(weight: Left) -> int:
    return numel(weight.tensor.shape)


def _step_lines(step: Step) -> Iterator[str]:
    """Yields lines about a training step: its states (such as moments), inputs and outputs."""
    kinds = dict.fromkeys(s.kind for s in step.slots if s.of and s.kind != "parameter")
    yield f"state of each parameter: {', '.join(kinds) or 'none'}"
    for group, names in step.groups.items():
        count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
        yield f"{count}: {group}"
    looked_up = [name for name in step.rows if name not in step.sampled]
    if looked_up:
        yield f"only looked-up rows are updated: {', '.join(looked_up)}"
    for name, (groups, sampled, classes) in step.sampled.items():
        updated = ", and updates only these" if name in step.rows else ""
        share = f"{groups * sampled:,} of {classes:,} classes"
        yield f"a step samples {share}, {sampled:,} from each of {groups} groups{updated}: {name}"
    metrics = f", {', '.join(step.metrics)}" if step.metrics else ""
    seed = f", {step.seed}" if step.seed else ""
    yield f"a step takes {', '.join(step.data)}, {step.rate}{seed}; it returns {step.loss}{metrics}"
