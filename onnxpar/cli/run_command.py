"""The command `run`: its arguments, and the start of its ranks.

This module imports nothing large, so that ranks start before the imports of this process.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from onnxpar.base.quick_imports import quick_imports
from onnxpar.cli.rank_options import (
    add_cores,
    add_launcher_help,
    add_library,
    add_profile,
    add_runtime,
    add_verify,
)
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.ranks.started_ranks import started_early


def add_run(to: Any) -> None:
    """Adds the command `run` to a parser's commands."""
    text = "run a sharded model, one process per rank"
    command = to.add_parser("run", help=text, description=f"{text.capitalize()}.")
    command.set_defaults(command=run)
    command.add_argument("par", metavar="model.par", help="folder that shard wrote")
    fed = command.add_mutually_exclusive_group(required=True)
    fed.add_argument("--inputs", metavar="NPZ", help="file with an array for each input, by name")
    fed.add_argument(
        "--random",
        action="store_true",
        help="random inputs; sizes that the model leaves open are the typical ones of the plan",
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of --random")
    command.add_argument(
        "--outputs", metavar="NPZ", help="file to write, with an array for each output, by name"
    )
    add_verify(command)
    command.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="run N times and print the times"
    )
    command.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="leave the first N of these runs out of the times; default: 1, if there are several",
    )
    command.add_argument(
        "--json", action="store_true", help="print the outputs and the times as JSON"
    )
    add_profile(command, "runs")
    add_launcher_help(command)
    add_cores(command)
    add_runtime(command)
    add_library(command)


def run(args: argparse.Namespace) -> int:
    """Runs `run`: starts the ranks and runs the model on them; under a launcher, this process is
    one rank."""
    rank = launched_rank()
    ranks = 0 if rank is not None or args.log_dir is not None else _count_ranks(args.par)
    with started_early(ranks) if ranks else nullcontext():
        with quick_imports():  # at the same time as the imports of ranks
            from onnxpar.cli.run_model import run_model

        return run_model(args, rank)


def _count_ranks(par: str) -> int:
    """Returns for how many ranks the folder of a sharded model has files."""
    return len([*Path(par).glob("rank_????.onnx")])
