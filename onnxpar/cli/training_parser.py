"""The arguments of `train` and `checkpoint`."""

from __future__ import annotations

import argparse

from onnxpar.cli.options import Options, named_value
from onnxpar.cli.rank_options import (
    add_cores,
    add_launcher_help,
    add_library,
    add_profile,
    add_runtime,
    add_verify,
)
from onnxpar.trainer.rates import SCHEDULES


def add_train(to: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    to.add_argument("par", metavar="step.par", help="a sharded training step")
    to.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help=".npz file with an array of samples for each input, by name, or .parquet file with a "
        "column for each input; or a folder of such files, or with NAME.npy, or a folder NAME of "
        ".npy files, for each input",
    )
    to.add_argument(
        "--eval",
        metavar="PATH",
        help="like --data: samples to evaluate after each epoch, and at the end",
    )
    to.add_argument(
        "--pad",
        type=named_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fill samples of this input that are shorter than those of the step, at their end; "
        "labels are filled with -100",
    )
    to.add_argument(
        "--patience",
        type=int,
        default=0,
        metavar="N",
        help="end the run after N evaluations in a row without a lower loss; default: 0, never",
    )
    to.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="expected number of samples in a step; it is an error if the step has another one",
    )
    to.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="passes over the data; default: 1, or as many as --max-steps takes",
    )
    to.add_argument(
        "--max-steps",
        type=int,
        metavar="N",
        help="end the run after N steps, also in the middle of an epoch",
    )
    to.add_argument("--lr", type=float, required=True, metavar="X", help="learning rate")
    to.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="constant",
        help="learning-rate schedule after warm-up",
    )
    to.add_argument(
        "--warmup",
        type=int,
        default=0,
        metavar="N",
        help="warm-up steps, in which the learning rate rises from 0",
    )
    to.add_argument(
        "--min-lr",
        type=float,
        default=0.0,
        metavar="X",
        help="learning rate to which a schedule falls; default: 0",
    )
    to.add_argument(
        "--lr-power", type=float, metavar="X", help="for polynomial: its degree; default: 1"
    )
    to.add_argument(
        "--lr-step-size",
        type=int,
        metavar="N",
        help="for step: steps after which the rate is multiplied by --lr-gamma, again and again",
    )
    to.add_argument("--lr-gamma", type=float, metavar="X", help="for step; default: 0.1")
    to.add_argument(
        "--decay-steps",
        type=int,
        metavar="N",
        help="for wsd (warm-up, stable, decay): steps at the end of the run in which the rate "
        "falls, along half a cosine",
    )
    to.add_argument(
        "--csv",
        metavar="FILE",
        help="also write the metrics of each step to a file of this format",
    )
    to.add_argument(
        "--json",
        action="store_true",
        help="print the metrics of each step as a line of JSON, and nothing else",
    )
    to.add_argument(
        "--tensorboard",
        metavar="DIR",
        help="also write the metrics of each step for TensorBoard; needs onnxpar[tensorboard]",
    )
    to.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order of samples")
    to.add_argument(
        "--no-shuffle",
        dest="shuffle",
        action="store_false",
        help="take samples in the order of the file",
    )
    _add_checkpoints(to.add_argument_group("checkpoints"))
    _add_elastic(to.add_argument_group("ranks that die"))
    _add_tables(to.add_argument_group("tables on the host"))
    add_verify(to)
    add_profile(to, "steps")
    add_launcher_help(to)
    add_cores(to)
    add_runtime(to)
    add_library(to)
    to.set_defaults(log_dir="log")


def _add_tables(to: Options) -> None:
    to.add_argument(
        "--table-dir",
        metavar="DIR",
        help="folder for the files of tables on the host (`onnxpar shard --place`), which vanish "
        "with the run; default: step.par",
    )
    to.add_argument(
        "--table-cache",
        metavar="SIZE",
        help="most bytes of rows of such tables that a rank keeps in memory, such as 2GB; default: "
        "256 MiB",
    )


def _add_checkpoints(to: Options) -> None:
    to.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="folder for checkpoints, one of which is written at the end; no other training may "
        "use the folder at the same time",
    )
    to.add_argument(
        "--every",
        type=int,
        default=0,
        metavar="N",
        help="also write a checkpoint after every N steps",
    )
    to.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="keep only the newest N complete checkpoints; 0: keep all",
    )
    to.add_argument(
        "--keep-best",
        action="store_true",
        help="also save a checkpoint after the evaluation with the least loss, and keep it; the "
        "command prints its name at the end",
    )
    to.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint; start anew if there is none",
    )
    to.add_argument(
        "--allow-changed",
        action="store_true",
        help="with --resume, go on also if data, batch size, --seed, --schedule or the trained "
        "weights are not those of the checkpoint's run",
    )
    to.add_argument(
        "--async-checkpoint",
        action="store_true",
        help="write checkpoints while training goes on: ranks copy their shards in memory, and "
        "take the next steps while the copies are written",
    )


def _add_elastic(to: Options) -> None:
    to.add_argument(
        "--elastic",
        action="store_true",
        help="go on from the last checkpoint when ranks die; needs --checkpoint and --every",
    )
    to.add_argument(
        "--min-ranks",
        type=int,
        metavar="N",
        help="with --elastic, the fewest ranks with which the run goes on; default: 1",
    )
    to.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="with --elastic, how often ranks that died are started again (default: 3); after "
        "that, the run goes on without them, on a smaller mesh",
    )
    to.add_argument(
        "--step",
        metavar="step.onnx",
        help="with --elastic, the step of which step.par was made, which is sharded again for "
        "fewer ranks; default: the file of its name beside step.par",
    )


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
