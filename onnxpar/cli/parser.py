"""The parser of all commands. Each command has a function that adds its arguments."""

from __future__ import annotations

import argparse
from functools import cache
from textwrap import wrap
from typing import Any

from onnxpar.base.version import versions_text
from onnxpar.cli import commands, run_command, training_commands
from onnxpar.cli.command_parser import CommandParser
from onnxpar.cli.completion import SHELLS, PrintCompletion
from onnxpar.cli.generate_command import add_generate
from onnxpar.cli.launch_command import add_launch
from onnxpar.cli.options import (
    add_dump,
    add_model,
    add_option,
    add_save,
    add_time_passes,
    rank_numbers,
)
from onnxpar.cli.rank_options import add_runtime, add_timeout, add_verify
from onnxpar.cli.serve_command import add_serve
from onnxpar.cli.training_parser import add_grad, add_merge, add_train, add_weights
from onnxpar.cost.measure import MOST_RANKS
from onnxpar.equivalence.stored import COMPARED
from onnxpar.equivalence.verification import LEAST
from onnxpar.planner import calibrate as calibration
from onnxpar.planner.option_entry import NEEDED, OUTPUT, TRAINING, table
from onnxpar.planner.option_table import LayoutOptions
from onnxpar.planner.pass_registry import passes_help
from onnxpar.report.check import RATE, STEPS

EXAMPLES = """examples:
  onnxpar shard gpt2.onnx --devices 4                  # writes gpt2.par
  onnxpar run gpt2.par --inputs in.npz --outputs out.npz
  onnxpar check gpt2.onnx --mesh dp=2,tp=2 --dim batch=4

exit status: 0 success, 1 mismatch, 2 bad input or failed run. With ONNXPAR_TRACEBACK=1 in the
environment, an error also prints Python's traceback."""


@cache
def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line, with all commands."""
    top = CommandParser(
        prog="onnxpar",
        description="Shards an ONNX model over ranks that each run a stock onnxruntime.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=versions_text())
    top.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a script with which a shell completes commands, options and files: write it "
        "to ~/.local/share/bash-completion/completions/onnxpar, or for zsh to a file _onnxpar in "
        "a folder of fpath",
    )
    to = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _shard(to)
    _plan(to)
    _annotate(to)
    run_command.add_run(to)
    add_launch(to)
    add_generate(to)
    add_serve(to)
    _check(to)
    _verify(to)
    _inspect(to)
    _grad(to)
    _train(to)
    _checkpoint(to)
    _opt(to)
    _calibrate(to)
    _ops(to)
    return top


def command_names() -> set[str]:
    """Returns the names of all commands."""
    return {
        name
        for action in parser()._actions
        if isinstance(action, argparse._SubParsersAction)
        for name in action.choices
    }


def _shard(to: Any) -> None:
    examples = """
  onnxpar shard model.onnx --devices 8                  # the fastest split that the search finds
  onnxpar shard model.onnx --mesh dp=2,tp=4 --preset hybrid
  onnxpar shard model.onnx --devices 8 --memory-limit 16GB --typical batch=8,seq=512
  onnxpar shard model.onnx --devices 8 --strategy strategy.yaml -o model.par
  onnxpar shard llama/ --devices 2                      # a folder of a language model"""
    shard = _command(to, "shard", "write a sharded model", commands.shard, examples)
    groups = add_model(shard)
    output = groups[OUTPUT]
    groups[NEEDED].add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder to write; default: the model's name with .par, in the current folder",
    )
    add_save(output)
    add_time_passes(output)
    output.add_argument(
        "--ranks",
        type=rank_numbers,
        metavar="N,..",
        help="write the files of these ranks alone, such as 0,1 or 4-7, beside those of others if "
        "the folder has the same plan. Each host that shards the model makes the same plan: "
        "without --topology, costs are constants. Default: all ranks",
    )
    output.add_argument(
        "--verify",
        action="store_true",
        help="prove that the ranks compute the model, as `onnxpar verify` does, before the folder "
        "gets its name; exit status 1, and no folder, if they are not shown to",
    )
    groups[TRAINING].add_argument(
        "--shorter",
        action="append",
        default=[],
        metavar="STEP.onnx",
        help="of a training step: the same step for shorter samples; may be given several times. "
        "`onnxpar train` then makes batches of samples that are about as long, and gives each to "
        "the shortest step that holds them",
    )


def _plan(to: Any) -> None:
    examples = """
  onnxpar plan model.onnx --devices 8
  onnxpar plan model.onnx --devices 8 --candidates      # all strategies that apply, compared
  onnxpar plan model.onnx --devices 8 --html plan.html
  onnxpar plan model.onnx --devices 8 --costs '*/fc1'   # every strategy of some nodes
  onnxpar plan model.onnx --devices 8 --node-data plan  # layouts and costs, for Model Explorer"""
    text = "show the plan that shard would follow; no model is written"
    parser = _command(to, "plan", text, commands.plan, examples)
    plan = add_model(parser)[OUTPUT]
    add_save(plan)
    add_time_passes(plan)
    plan.add_argument(
        "--compare",
        metavar="TRACE",
        help="instead of the plan, show the time of each op and collective: predicted by the cost "
        "model (give --topology) and measured in this file of `onnxpar run --profile`. All other "
        "options must be those that shard was given",
    )
    plan.add_argument(
        "--candidates",
        action="store_true",
        help="instead of the plan, compare the strategies that apply: the predicted time of each "
        "(give --topology), the bytes that a rank sends and holds, and why the fastest one wins",
    )
    plan.add_argument(
        "--costs",
        metavar="NODE",
        help="instead of the plan, list every strategy of the nodes of this name or glob (or that "
        "read a weight or input of this name) over the plan's mesh: compute, communication and "
        "memory of a rank by the cost model (give --topology). Communication is that inside the "
        "node, the all-reduce of a result that is a partial sum, and, in a training step, the "
        "all-reduces of the gradients of its weights",
    )
    plan.add_argument(
        "--html",
        metavar="FILE",
        help="write a self-contained page: nodes by block with layouts, reshards and their costs, "
        "the time and memory of a rank, what each pass did to the graph, and the graph of each "
        "rank. With --candidates, it has the candidates instead of passes and ranks, and shows the "
        "fastest one (or the one that --preset or --search names)",
    )
    plan.add_argument(
        "--node-data",
        metavar="DIR",
        help="write files for Google's Model Explorer, each with a value of each node of the "
        "model: layouts, the collectives before it, predicted milliseconds, bytes that a rank "
        "sends, and bytes of the weights that a rank holds",
    )
    plan.add_argument(
        "--json", action="store_true", help="print the plan, --compare or --candidates as JSON"
    )


def _annotate(to: Any) -> None:
    annotate = _command(
        to,
        "annotate",
        "write the model with its plan as ONNX's multi-device annotations",
        commands.annotate,
    )
    output = add_model(annotate, LayoutOptions)[NEEDED]
    output.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="model to write, such as annotated.onnx",
    )


def _check(to: Any) -> None:
    check = _command(
        to,
        "check",
        "shard and run a model, and compare its outputs with those of onnxruntime on the unsplit "
        "model; of a manual program, compare the replicas of each output with each other",
        commands.check,
        """
  onnxpar check model.onnx --devices 4
  onnxpar check model.onnx --devices 4 --preset tensor-parallel --each
  onnxpar check step.onnx --devices 2 --train --steps 20""",
    )
    add_model(check)
    check.add_argument(
        "--inputs",
        metavar="NPZ",
        help="file with arrays for inputs, by name; the other inputs are random, in the sizes of "
        "--typical",
    )
    check.add_argument("--seed", type=int, default=0, help="seed of random inputs")
    check.add_argument("--json", action="store_true", help="print the comparison as JSON")
    _add_tolerances(check)
    check.add_argument(
        "--each",
        action="store_true",
        help="compare not only the outputs but every tensor that both models have, and name the "
        "first that differs; tensors in the bodies of If, Loop and Scan are left out",
    )
    check.add_argument(
        "--train",
        action="store_true",
        help="for a training step: take many steps, and compare the losses and the updated "
        "parameters and states; --inputs may have any number of samples then",
    )
    check.add_argument(
        "--steps", type=int, metavar="N", help=f"number of steps of --train; default {STEPS}"
    )
    check.add_argument(
        "--lr", type=float, metavar="X", help=f"learning rate of --train; default {RATE}"
    )
    add_runtime(check)


def _add_tolerances(to: argparse.ArgumentParser) -> None:
    for name, term in (("rtol", "X * |reference|"), ("atol", "X")):
        to.add_argument(
            f"--{name}",
            type=_tolerance,
            metavar="X",
            help=f"allow each element to differ by {term}, as numpy.allclose does; --rtol and "
            "--atol add up. Without both, the tolerance depends on the dtype and is relative to "
            "the largest element",
        )


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of at least 0")
    return value


def _verify(to: Any) -> None:
    verify = _command(
        to,
        "verify",
        "prove from the files alone that the ranks of a sharded model compute the unsplit model, "
        "without running either",
        commands.verify,
        """
  onnxpar verify model.onnx model.par
  onnxpar verify step.onnx step.par --least lemma
  onnxpar verify model.onnx model.par --dim batch=7 --dim seq=33""",
    )
    verify.add_argument("model", metavar="model.onnx", help="the model, or the training step")
    verify.add_argument(
        "par",
        metavar="model.par",
        help="folder that shard wrote; or one with rank files of others and a ports.json",
    )
    verify.add_argument(
        "--dim",
        dest="dims",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="value of an open size; the others have those of the plan's example",
    )
    verify.add_argument(
        "--least",
        choices=list(LEAST),
        default="assumed",
        help="the weakest proof of a node that is accepted: exact (arithmetic on positions), "
        "lemma (the rule of an op), sampled (both sides computed on drawn values), or assumed "
        "(believed without proof, for a reason that is printed); default: %(default)s",
    )
    verify.add_argument(
        "--weights",
        choices=list(COMPARED),
        default="all",
        help="how much of the weights in files is compared: all, a sample of their rows, or none: "
        "then they need not exist, and ranks are believed to hold what plan.json says; default: "
        "%(default)s",
    )
    verify.add_argument("--seed", type=int, default=0, help="seed of drawn values")
    verify.add_argument(
        "--shorter",
        action="append",
        default=[],
        metavar="STEP.onnx",
        help="of a training step, the step for shorter samples that was sharded with it; programs "
        "of ranks for which none is given are assumed; may be repeated",
    )
    verify.add_argument(
        "--keep",
        metavar="DIR",
        help="folder to write the part of the model, and of its ranks, to, where the proof ends: "
        "two models that onnxruntime runs, and values of their inputs",
    )
    verify.add_argument("--json", action="store_true", help="print the result as JSON")


def _inspect(to: Any) -> None:
    inspect = _command(to, "inspect", "show the plan of a sharded model", commands.inspect)
    inspect.add_argument("par", metavar="model.par", help="folder that shard wrote")
    inspect.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_verify(inspect)
    inspect.add_argument(
        "--sha256sums",
        action="store_true",
        help="instead of the plan, print the SHA-256 of each file in the folder, after comparing "
        "every byte, for `sha256sum --check` where there is no onnxpar",
    )


def _grad(to: Any) -> None:
    text = "write the training step of a model as a graph"
    add_grad(_command(to, "grad", text, training_commands.grad))


def _train(to: Any) -> None:
    add_train(
        _command(to, "train", "run a sharded training step over data", training_commands.train)
    )


def _checkpoint(to: Any) -> None:
    text = "work with checkpoints of a training run"
    checkpoint = to.add_parser("checkpoint", help=text, description=f"{text.capitalize()}.")
    of_checkpoints = checkpoint.add_subparsers(required=True, metavar="COMMAND")
    text = "write a model with the weights of a checkpoint"
    add_merge(_command(of_checkpoints, "merge", text, training_commands.merge))
    text = "write the weights of a checkpoint as safetensors files"
    add_weights(_command(of_checkpoints, "weights", text, training_commands.weights))


def _opt(to: Any) -> None:
    opt = _command(to, "opt", "run passes on a model or a dump, and print the graph", commands.opt)
    output = add_model(opt, LayoutOptions, nargs="?")[OUTPUT]
    opt.add_argument("--passes", required=True, metavar="LIST", help=passes_help())
    opt.add_argument(
        "--print-after",
        action="append",
        default=[],
        metavar="PASS",
        help="print the graph after this pass, or after 'all', instead of after the last one",
    )
    add_dump(output)
    add_time_passes(output)
    output.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the graph after the last pass as a model instead of printing it; its metadata "
        "holds the decisions of passes, which opt reads back",
    )


def _calibrate(to: Any) -> None:
    calibrate = _command(
        to,
        "calibrate",
        "measure the speed of ranks and of each collective on this machine, which should do "
        "nothing else, and write a topology file",
        calibration.command,
    )
    calibrate.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="file for --topology, such as cluster.yaml",
    )
    calibrate.add_argument("--json", action="store_true", help="print the topology as JSON")
    calibrate.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks that run at once; default: one for each core, but at most "
        f"{MOST_RANKS}",
    )
    calibrate.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="approximate duration; default %(default)g",
    )
    add_timeout(calibrate)


def _ops(to: Any) -> None:
    ops = _command(to, "ops", "show each op's sharding rule and how it is proved", commands.ops)
    ops.add_argument(
        "pattern",
        nargs="?",
        default="*",
        metavar="PATTERN",
        help="glob of op names, such as '*Conv*'",
    )
    ops.add_argument("--json", action="store_true", help="print the table as JSON")
    add_option(ops, table(LayoutOptions)["plugin"])


def _command(
    to: Any, name: str, text: str, command: Any, examples: str = ""
) -> argparse.ArgumentParser:
    about = "\n".join(wrap(text[0].upper() + text[1:] + ".", 80))
    subparser: argparse.ArgumentParser = to.add_parser(
        name,
        help=text,
        description=about,
        epilog=f"examples:{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparser.set_defaults(command=command)
    return subparser
