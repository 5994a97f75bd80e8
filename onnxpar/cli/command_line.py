"""The command line: `onnxpar shard | plan | run | check | grad | train | inspect | opt | ops`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from onnxpar.base.interrupts import STATUSES, Terminated
from onnxpar.base.version import versions_text
from onnxpar.calibration import command as calibration
from onnxpar.cli import commands, training_commands
from onnxpar.cli.command_parser import CommandParser
from onnxpar.cli.error_line import quiet_ends, report
from onnxpar.errors import OnnxparError
from onnxpar.files.write_file import cause
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering.compression import THRESHOLD
from onnxpar.manual.manual import MANUAL
from onnxpar.passes.fuse_all_reduces import FUSIONS
from onnxpar.pipeline.pass_list import passes_help
from onnxpar.presets.presets import PRESETS
from onnxpar.runtime.launch import HELP as LAUNCH_HELP
from onnxpar.runtime.launch import tell_of_all
from onnxpar.search.objective import LATENCY, OBJECTIVES
from onnxpar.search.search import SEARCHES
from onnxpar.trainer.rates import SCHEDULES
from onnxpar.training.batch_norm import STATISTICS
from onnxpar.training.losses import IGNORED, LOSSES
from onnxpar.training.optimizers import NONE, OPTIMIZERS
from onnxpar.training.precision import PRECISIONS

EXAMPLES = """examples:
  onnxpar shard gpt2.onnx --devices 4                  # writes gpt2.par
  onnxpar run gpt2.par --inputs in.npz --outputs out.npz
  onnxpar check gpt2.onnx --mesh dp=2,tp=2 --dim batch=4

exit status: 0 good, 1 mismatch, 2 bad input or failed run; ONNXPAR_TRACEBACK=1 in the environment
adds Python's traceback to an error"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (till the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
    warnings.formatwarning = _warning_line
    with quiet_ends():
        return _status_of(argv)


def _warning_line(message: Warning | str, *_: object, **__: object) -> str:
    """A warning as people read it, without the place in the code."""
    return f"onnxpar: warning: {message}\n"


def _status_of(argv: Sequence[str] | None) -> int:
    """Runs a command. Whatever goes wrong is one line on standard error."""
    failure: Exception | None = None
    try:
        args = parser().parse_args(argv)
        status = int(args.command(args))
    except BrokenPipeError:
        status = 0
    except KeyboardInterrupt:
        status = _ended(signal.SIGINT)
    except Terminated as end:
        status = _ended(signal.Signals(end.number))
    except SystemExit as end:  # --help, or arguments that are wrong
        _flush()
        raise end
    except Exception as error:  # the outermost boundary: no traceback reaches a user
        status, failure = 2, error
    failure = _flush() or failure
    if failure is not None:
        with suppress(KeyboardInterrupt, Terminated):  # a launcher ends ranks that wait in it
            report(failure)
        return 2
    return status


def _ended(number: signal.Signals) -> int:
    """Says what has ended the command; returns its exit status."""
    word, status = STATUSES[number]
    print(f"onnxpar: {word}", file=sys.stderr)
    tell_of_all(word)
    return status


def _flush() -> Exception | None:
    """Writes what was printed now, as at the exit nobody could tell that it fails. Returns why."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        _drop_output()
        return OnnxparError(f"cannot write to the standard output: {cause(error)}")
    return None


def _drop_output() -> None:
    """Lets the interpreter's last flush succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = CommandParser(
        prog="onnxpar",
        description="Shards an ONNX model over ranks that each run a stock onnxruntime.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=versions_text())
    commands_of = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    shard = _add(commands_of, "shard", "write a sharded model", commands.shard)
    _add_model(shard)
    _add_lowering(shard)
    _add_save(shard)
    shard.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder to write; default: the model's name with .par, in the current folder",
    )

    plan = _add(commands_of, "plan", "show what shard would do; nothing is written", commands.plan)
    _add_model(plan)
    _add_lowering(plan)
    _add_save(plan)
    plan.add_argument(
        "--compare",
        metavar="TRACE",
        help="what `onnxpar run --profile` has written: show, instead of the plan, what each op "
        "and collective takes by the cost model (give --topology), beside what it took. The "
        "other options must be those that shard was given",
    )
    plan.add_argument(
        "--candidates",
        action="store_true",
        help="show, instead of the plan, what each strategy that applies takes by the cost model "
        "(give --topology), what ranks send and hold, and why the fastest one wins",
    )
    plan.add_argument(
        "--html",
        metavar="FILE",
        help="write a page that stands alone: nodes by block with layouts, reshards and their "
        "costs, a rank's time and memory, and the candidates if asked for, of which it then shows "
        "the fastest (or what --preset or --search say)",
    )
    plan.add_argument("--json", action="store_true", help="any of these as JSON")

    annotate = _add(
        commands_of,
        "annotate",
        "write the model with its plan as ONNX's multi-device annotations",
        commands.annotate,
    )
    _add_model(annotate)
    annotate.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="model to write: annotated.onnx"
    )

    run = _add(commands_of, "run", "run a sharded model, one process per rank", commands.run)
    run.add_argument("par", metavar="model.par", help="what shard wrote")
    run.add_argument("--inputs", required=True, metavar="NPZ", help="arrays by input name")
    run.add_argument("--outputs", metavar="NPZ", help="where to put the arrays, by output name")
    _add_verify(run)
    run.add_argument("--repeat", type=int, default=1, metavar="N", help="run N times, print times")
    _add_profile(run, "runs")
    run.epilog, run.formatter_class = LAUNCH_HELP, argparse.RawDescriptionHelpFormatter
    _add_runtime(run)

    check = _add(
        commands_of,
        "check",
        "shard, run, and compare with onnxruntime on the whole model; of a manual model, which "
        "is no whole one, compare the copies of each output that ranks hold alike",
        commands.check,
    )
    _add_model(check)
    _add_lowering(check)
    check.add_argument(
        "--inputs",
        metavar="NPZ",
        help="arrays by input name; what is missing is random, of the typical sizes (--typical)",
    )
    check.add_argument("--seed", type=int, default=0, help="of random inputs")
    for name, term in (("rtol", "X * |reference|"), ("atol", "X")):
        check.add_argument(
            f"--{name}",
            type=_tolerance,
            metavar="X",
            help=f"each element may differ by {term}, as of numpy.allclose; both add up, and "
            "replace the tolerances by dtype, which are of the largest element",
        )
    check.add_argument(
        "--each",
        action="store_true",
        help="compare every tensor that both models have, not the outputs alone, and name the "
        "first that differs; those in bodies of If, Loop and Scan are left out",
    )
    check.add_argument(
        "--train",
        action="store_true",
        help="of a training step: take many steps, and compare the losses and what they leave; "
        "--inputs has any number of samples then",
    )
    check.add_argument(
        "--steps", type=int, default=50, metavar="N", help="with --train; default 50"
    )
    check.add_argument("--lr", type=float, default=0.01, metavar="X", help="with --train")
    _add_runtime(check)

    inspect = _add(commands_of, "inspect", "show the plan of a sharded model", commands.inspect)
    inspect.add_argument("par", metavar="model.par", help="what shard wrote")
    inspect.add_argument("--json", action="store_true", help="the plan as JSON")
    _add_verify(inspect)

    grad = _add(
        commands_of, "grad", "write the training step of a model as a graph", training_commands.grad
    )
    _add_grad(grad)

    train = _add(
        commands_of, "train", "run a sharded training step over data", training_commands.train
    )
    _add_train(train)

    checkpoint = commands_of.add_parser("checkpoint", help="work with checkpoints of a run")
    of_checkpoints = checkpoint.add_subparsers(required=True, metavar="COMMAND")
    merge = _add(
        of_checkpoints,
        "merge",
        "write a model with the weights of a checkpoint",
        training_commands.merge,
    )
    merge.add_argument("checkpoint", metavar="DIR", help="a checkpoint, or a folder of them")
    merge.add_argument("model", metavar="model.onnx", help="the model that was trained")
    merge.add_argument("-o", "--output", required=True, metavar="FILE", help="trained.onnx")
    merge.add_argument(
        "--training",
        action="store_true",
        help="leave Dropout and BatchNormalization as they are in training; by default, they are "
        "put to use",
    )

    opt = _add(
        commands_of, "opt", "run passes on a model or a dump, and print the graph", commands.opt
    )
    _add_model(opt, nargs="?")
    opt.add_argument("--passes", required=True, metavar="LIST", help=passes_help())
    opt.add_argument("--print-after", action="append", default=[], metavar="PASS", help="or 'all'")
    _add_dump(opt)
    opt.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the graph after the last pass as a model, instead of printing it; what passes "
        "have decided stands in its metadata, and opt reads it back",
    )

    calibrate = _add(
        commands_of,
        "calibrate",
        "measure this machine, which should do nothing else, and write a topology file: what ranks "
        "compute, and what each collective takes",
        calibration.command,
    )
    calibrate.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="for --topology: cluster.yaml"
    )
    calibrate.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"that run at once; default: one for each core, but at most {calibration.MOST_RANKS}",
    )
    calibrate.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="about how long; default 30"
    )
    calibrate.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="for every wait, seconds"
    )

    ops = _add(commands_of, "ops", "show each op's rule, and how it is proved", commands.ops)
    ops.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="a glob of names")
    ops.add_argument("--json", action="store_true", help="the table as JSON")
    _add_plugin(ops)
    return top


def _add(commands_of: Any, name: str, text: str, command: Any) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands_of.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    made.set_defaults(command=command)
    return made


def _add_dump(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--dump",
        metavar="DIR",
        help="write the graph after every pass, also after one that fails: as text, "
        "01-NAME.onnxtxt, and up to localize-ops as a model, 01-NAME.onnx, which opt reads back",
    )


def _add_plugin(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="MODULE",
        help="import passes and sharding rules of your own: a module, or a file x.py; installed "
        "packages add theirs by entry points (see docs/how-to/pass.md)",
    )


def _add_model(to: argparse.ArgumentParser, nargs: str | None = None) -> None:
    to.add_argument("model", metavar="model.onnx", type=Path, nargs=nargs)
    to.add_argument("--devices", type=int, metavar="N", help="number of ranks")
    to.add_argument("--mesh", type=_mesh, metavar="dp=2,tp=4", help="named axes and their sizes")
    to.add_argument(
        "--preset",
        choices=PRESETS,
        help="instead of the search: data-parallel, tensor-parallel; hybrid for a mesh of dp and "
        "another axis, and so on. manual: the model is one rank's program, with "
        "onnxpar's collectives in it by hand, as the body of JAX's shard_map; a strategy's "
        "tensors say how inputs and weights are dealt and outputs put together, else whole",
    )
    to.add_argument(
        "--search",
        choices=SEARCHES,
        help="auto, the default without --preset, --strategy and annotations: find the fastest "
        "strategy by the cost model of --topology, and the mesh where none is given; what a "
        "strategy asks for is kept to. To compare with: a preset, all "
        "strategies one after the other (of a small model), nothing but what was asked for",
    )
    to.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="what a rank may hold at any time, as 16GB: weights, states, and what nodes make. The "
        "search keeps to it; where nothing does, or another strategy holds more, that is an error",
    )
    to.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=LATENCY,
        help="of the search. latency: the time of a run; throughput: the time from one run to the "
        "next where several are under way, so that communication and compute overlap. Default: "
        "%(default)s",
    )
    to.add_argument(
        "--untied",
        action="store_true",
        help="the search decides each of several repeated blocks by itself: worth the time where a "
        "limit on memory binds, and some layers need not pay for it",
    )
    to.add_argument(
        "--strategy",
        metavar="FILE",
        help="YAML: mesh, shard (by node), tensors; a preset decides what it leaves open",
    )
    to.add_argument(
        "--configuration",
        metavar="NAME",
        help="which of the multi-device annotations in the model to follow, or 'none'; default: "
        "those for N devices. A strategy adds to them and must not contradict them; a preset "
        "decides what they leave open. Pipeline stages are hints that are not followed",
    )
    to.add_argument(
        "--topology",
        metavar="FILE",
        help="YAML: levels of links between ranks, and a rank's speed and memory, as calibrate "
        "writes it; or MindSpore's and HCCL's rank table. Default: one host of slow cores",
    )
    to.add_argument(
        "--dim",
        dest="dims",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of a symbolic dimension: a number, or what it is of others, which ties them: "
        "s74=s2, total=past+seq",
    )
    to.add_argument(
        "--typical",
        action="append",
        default=[],
        metavar="NAME=N,..",
        help="sizes that runs usually have, where sizes are open: batch=1,seq=128. The search and "
        "all costs are for these; any size still runs. Give it several times, with weights, for "
        "a mix: batch=1,seq=1:0.9. Default: a batch of 1, and lengths of 128 or what the model "
        "allows",
    )
    to.add_argument(
        "--state",
        dest="states",
        action="append",
        default=[],
        metavar="IN=OUT",
        help="an output that is fed back as an input, beside those found by ops and by names",
    )
    to.add_argument(
        "--only-given-states",
        dest="find_states",
        action="store_false",
        help="look for no state pairs beside those of --state",
    )
    to.add_argument("--strict", action="store_true", help="an op that stays whole is an error")
    _add_plugin(to)


def _add_lowering(to: argparse.ArgumentParser) -> None:
    """Options of how collectives run, and of passes beside onnxpar's own."""
    to.add_argument(
        "--fusion",
        choices=FUSIONS,
        help="of collectives that do not wait for each other: up to a size (default for training "
        "steps), as many as computing hides, or none",
    )
    to.add_argument(
        "--bucket-mb",
        type=float,
        metavar="X",
        help="that size; default: 64 for all-reduces, 8 for reduce-scatters and all-gathers",
    )
    to.add_argument(
        "--compression",
        metavar="KIND",
        help="how gradients of a training step travel: float16 or bfloat16, added up in float32; "
        "2bit:T, where a rank sends T, 0 or -T of each element and keeps the rest for later steps "
        f"(T should be near the largest elements, and is {THRESHOLD} by default); none",
    )
    to.add_argument(
        "--add-pass",
        dest="passes",
        action="append",
        default=[],
        metavar="PASS",
        help="run a pass of a plugin, too: 'NAME{option=value}' where it rewrites the model, "
        "'NAME before PASS' or 'NAME after PASS' for any place; `opt --passes list` shows all",
    )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number that is not below 0")
    return value


def _add_save(to: argparse.ArgumentParser) -> None:
    _add_dump(to)
    to.add_argument(
        "--save-strategy",
        metavar="FILE",
        help="write what was found (by --search, a preset, ...) as a strategy to read and to edit: "
        "few entries, from which the rest follows; `--strategy FILE` alone gives the same plan",
    )


def _add_grad(to: argparse.ArgumentParser) -> None:
    to.add_argument("model", metavar="model.onnx", type=Path)
    to.add_argument("-o", "--output", required=True, metavar="FILE", help="the step: step.onnx")
    to.add_argument(
        "--loss",
        required=True,
        metavar="LOSS",
        help=f"{', '.join(LOSSES)}, or an output that is the loss itself. Labels are class "
        f"numbers, {IGNORED} does not count; bce is of scores, or of what a final Sigmoid gets",
    )
    to.add_argument("--loss-of", metavar="OUTPUT", help="which output, where there are several")
    to.add_argument(
        "--class-axis",
        type=int,
        metavar="N",
        help="dimension of classes; default: the last, of four dimensions or more the second",
    )
    to.add_argument(
        "--optimizer",
        required=True,
        choices=[*OPTIMIZERS, NONE],
        help=f"{NONE}: the gradients are outputs, NAME.grad, and nothing is updated",
    )
    for kind, names in (
        (float, ("weight-decay", "momentum", "beta1", "beta2", "epsilon")),
        (None, ("nesterov",)),
    ):
        for name in names:
            how: dict[str, Any] = (
                {"type": kind, "metavar": "X"} if kind else {"action": "store_true"}
            )
            to.add_argument(f"--{name}", default=None, **how)
    to.add_argument(
        "--batch-norm",
        choices=STATISTICS,
        help="over which samples a BatchNormalization computes its statistics: those of the whole "
        "batch, of a host or of a rank (give --groups); default: as the model says, whole",
    )
    to.add_argument(
        "--groups", type=int, metavar="N", help="parts of the batch: number of hosts, or of ranks"
    )
    to.add_argument(
        "--clip-norm",
        type=float,
        metavar="X",
        help="scale the gradients down where the norm of all of them exceeds this",
    )
    to.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="what the model computes in; parameters and their state keep their types",
    )
    to.add_argument(
        "--loss-scale",
        metavar="X",
        help="what gradients are multiplied by on their way: dynamic (default in float16), a "
        "number, or none",
    )
    to.add_argument(
        "--recompute",
        action="store_true",
        help="compute activations within blocks again for the backward pass, rather than keep them",
    )
    to.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="K",
        help="batches of the model's size that a step takes, one after the other",
    )
    for name, what in (
        ("params", "train the weights of these names, not those that are found"),
        ("frozen", "leave out the weights of these names"),
    ):
        to.add_argument(f"--{name}", action="append", default=[], metavar="GLOB", help=what)
    to.add_argument(
        "--untie",
        action="store_true",
        help="give each node that reads a vector as its scale or bias a copy of its own: exporters "
        "store vectors that are equal once, and they would be trained as one",
    )
    to.add_argument(
        "--dim",
        dest="dims",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of a symbolic dimension: a number, or what it is of others, which ties them: "
        "s74=s2, total=past+seq",
    )
    to.add_argument(
        "--preset",
        choices=[MANUAL],
        help="the model is one rank's program, and so is the step: it takes the mean loss of all "
        "ranks, and sums the gradients of what ranks hold alike",
    )
    to.add_argument("--devices", type=int, metavar="N", help="of a manual program: ranks")
    to.add_argument("--mesh", type=_mesh, metavar="dp=2,tp=4", help="or named axes")
    to.add_argument(
        "--strategy",
        metavar="FILE",
        help="YAML: mesh, and tensors that are dealt; the rest is whole",
    )


def _add_train(to: argparse.ArgumentParser) -> None:
    to.add_argument("par", metavar="step.par", help="a sharded training step")
    to.add_argument("--data", required=True, metavar="NPZ", help="arrays of samples, by input name")
    to.add_argument("--eval", metavar="NPZ", help="the same of samples to evaluate each epoch on")
    to.add_argument(
        "--batch", type=int, metavar="N", help="samples of a step: what it was made for"
    )
    to.add_argument("--epochs", type=int, default=1, metavar="N")
    to.add_argument("--lr", type=float, required=True, metavar="X", help="learning rate")
    to.add_argument("--schedule", choices=SCHEDULES, default="constant", help="of the rate, behind")
    to.add_argument("--warmup", type=int, default=0, metavar="N", help="steps in which it rises")
    to.add_argument("--seed", type=int, default=0, metavar="N", help="decides the order of samples")
    to.add_argument(
        "--no-shuffle", dest="shuffle", action="store_false", help="samples in the file's order"
    )
    to.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="folder for checkpoints, which no other training uses meanwhile; one at the end",
    )
    to.add_argument("--every", type=int, default=0, metavar="N", help="and one after N steps each")
    to.add_argument(
        "--keep", type=int, default=0, metavar="N", help="leave the newest N whole ones; 0: all"
    )
    to.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint that is whole; start where there is none",
    )
    _add_profile(to, "steps")
    to.epilog, to.formatter_class = LAUNCH_HELP, argparse.RawDescriptionHelpFormatter
    _add_runtime(to)
    to.set_defaults(log_dir="log")


def _add_runtime(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="for every wait, seconds"
    )
    to.add_argument("--log-dir", metavar="DIR", help="ranks' output, under rank.N/")


def _add_verify(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--verify",
        action="store_true",
        help="compare every byte of the folder with the SHA-256 that shard wrote; without it, the "
        "start reads only 8 parts, of 1 MiB each, of files above 8 MiB",
    )


def _add_profile(to: argparse.ArgumentParser, what: str) -> None:
    to.add_argument(
        "--profile",
        metavar="FILE",
        help="write what each rank did to a file for Perfetto or chrome://tracing: each node that "
        f"onnxruntime ran, and collectives with their waiting, of all {what}; of several, the "
        "first warms up and is left out",
    )


def _mesh(text: str) -> Mesh:
    try:
        return Mesh.parse(text)
    except OnnxparError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
