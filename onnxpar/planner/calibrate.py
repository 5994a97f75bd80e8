"""The command `onnxpar calibrate`, and the function `onnxpar.calibrate`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tqdm import tqdm

from onnxpar.base.errors import InputError
from onnxpar.base.json_text import json_text
from onnxpar.base.plain_yaml import parse
from onnxpar.base.write_file import whole_file
from onnxpar.cost.fit import file_text, fit, lines
from onnxpar.cost.measure import Measurements, default_ranks, measure
from onnxpar.cost.topology import Topology
from onnxpar.planner.convert_options import shard_batch
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.session.checks import check_timeout


def calibrate(
    output: str | os.PathLike[str] | None = None,
    *,
    ranks: int | None = None,
    seconds: float = 30.0,
    timeout: float = 60.0,
) -> Topology:
    """Measures this machine, which should be idle, and returns its topology, for the option
    `topology` of `make_plan` and `shard`.

    output   also write the topology to this file
    ranks    number of ranks that run at once; by default a rank for each core, at most MOST_RANKS
    seconds  approximate duration
    timeout  longest wait for a rank, in seconds

    Errors: InputError, RankError.
    """
    return _calibrate(output, ranks, seconds, timeout)[1]


def command(args: argparse.Namespace) -> int:
    """Runs the command `onnxpar calibrate`: writes the topology file, and prints measured and
    fitted times. Returns the exit status."""
    measurements, topology = _calibrate(args.output, args.ranks, args.seconds, args.timeout)
    if args.json:
        print(json_text(parse(topology.text()), 1))
        return 0
    print("\n".join(lines(measurements, topology)))
    print()
    print(topology.text(), end="")
    print(f"written to {args.output}")
    return 0


def _calibrate(
    output: str | os.PathLike[str] | None, ranks: int | None, seconds: float, timeout: float
) -> tuple[Measurements, Topology]:
    ranks = default_ranks() if ranks is None else ranks
    if ranks < 2:
        raise InputError(
            f"--ranks {ranks}: calibrate measures links between ranks; give at least 2"
        )
    if not 0 < seconds < float("inf"):
        raise InputError(f"--seconds {seconds}: must be above 0")
    check_timeout(timeout)
    if launched_rank() is not None:
        raise InputError(
            "calibrate starts its own ranks on this host; run it without mpirun or another launcher"
        )
    if output is not None and not Path(output).parent.is_dir():
        raise InputError(f"{Path(output).parent}: no such folder for the output")
    is_quiet = not sys.stderr.isatty()
    with tqdm(total=1.0, desc="measured", disable=is_quiet, leave=False) as bar:
        measurements = measure(ranks, seconds, timeout, bar.update, shard=shard_batch)
    topology = fit(measurements)
    if output is not None:
        with whole_file(output) as file:
            file.write(file_text(measurements, topology))
    return measurements, topology
