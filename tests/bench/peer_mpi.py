"""OpenMPI's all-reduce, for bench_peers.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.bench_collectives import length_of, runs_of

PROGRAM = Path(__file__).parent / "mpi_program.py"


def missing() -> str:
    """What OpenMPI lacks here, and the remedy."""
    if shutil.which("mpirun") is None:
        return "apt-get install openmpi-bin installs mpirun"
    if find_spec("mpi4py") is None:
        return "pip install 'onnxpar[peers]' installs mpi4py"
    return ""


def all_reduces(ranks: int, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of an all-reduce by bytes, in processes that end with the measurement, because
    OpenMPI's ranks never sleep. Errors: CalledProcessError."""
    asked = [f"{size}:{runs_of(size) * length_of(size)}" for size in sizes]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start = ["mpirun", *root, "--oversubscribe", "-n", str(ranks), sys.executable, str(PROGRAM)]
    done = subprocess.run([*start, *asked], stdout=subprocess.PIPE, text=True, check=True)
    return {int(size): seconds for size, seconds in json.loads(done.stdout).items()}
