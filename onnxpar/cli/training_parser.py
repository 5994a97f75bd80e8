"""The arguments of `grad`, `train` and `checkpoint`."""

from __future__ import annotations

import argparse

from onnxpar.cli.options import GivenModel, add_groups, add_table, add_time_passes
from onnxpar.cli.rank_options import (
    add_cores,
    add_launcher_help,
    add_library,
    add_profile,
    add_runtime,
    add_verify,
)
from onnxpar.planner.option_entry import NEEDED, OUTPUT
from onnxpar.trainer import grad_options, train_options
from onnxpar.trainer.grad_options import GradOptions
from onnxpar.trainer.train_options import TrainOptions


def add_grad(to: argparse.ArgumentParser) -> None:
    """Adds the arguments of `grad`."""
    to.add_argument("model", metavar="model.onnx", action=GivenModel, help="an ONNX model")
    groups = add_groups(to, grad_options.GROUPS)
    groups[NEEDED].add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="training step to write, such as step.onnx",
    )
    add_table(groups, GradOptions)
    groups[OUTPUT].add_argument(
        "--dump",
        metavar="DIR",
        help="write the model as text after each rewrite that changes it, also after one that "
        "fails: of the loader to the folder 00-load, of the step to 01-step",
    )
    add_time_passes(groups[OUTPUT])


def add_train(to: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    to.add_argument("par", metavar="step.par", help="a sharded training step")
    groups = add_groups(to, train_options.GROUPS)
    groups[NEEDED].add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help=".npz file with an array of samples for each input, by name, or .parquet file with a "
        "column for each input; or a folder of such files, or with NAME.npy, or a folder NAME of "
        ".npy files, for each input",
    )
    add_table(groups, TrainOptions)
    output = groups[OUTPUT]
    output.add_argument(
        "--csv",
        metavar="FILE",
        help="also write the metrics of each step to a file of this format",
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print the metrics of each step as a line of JSON, and nothing else",
    )
    output.add_argument(
        "--tensorboard",
        metavar="DIR",
        help="also write the metrics of each step for TensorBoard; needs onnxpar[tensorboard]",
    )
    add_verify(to)
    add_profile(to, "steps")
    add_launcher_help(to)
    add_cores(to)
    add_runtime(to)
    add_library(to)
    to.set_defaults(log_dir="log")


def add_weights(to: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint weights`."""
    to.add_argument("checkpoint", metavar="DIR", help="a checkpoint, or a folder of them")
    to.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="folder to write, such as weights"
    )
    to.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="most bytes of weights in a file; default: %(default)s",
    )


def add_merge(to: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint merge`."""
    to.add_argument("checkpoint", metavar="DIR", help="a checkpoint, or a folder of them")
    to.add_argument("model", metavar="model.onnx", help="the model that was trained")
    to.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="model to write, such as trained.onnx"
    )
    to.add_argument(
        "--ema",
        action="store_true",
        help="write the moving averages of the weights, which `grad --ema` keeps",
    )
    to.add_argument(
        "--training",
        action="store_true",
        help="keep Dropout and BatchNormalization in training mode; by default, they are switched "
        "to inference mode",
    )
