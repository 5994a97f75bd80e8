"""All-reduces of OpenMPI: mpirun -n 2 python tests/bench/mpi_program.py BYTES:RUNS ... prints JSON
with the seconds of each run, on the slowest rank, for each size."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI

WARM_UP = 3


def main() -> None:
    """Float32 sums, all ranks at once."""
    world, found = MPI.COMM_WORLD, {}
    for size, runs in (map(int, text.split(":")) for text in sys.argv[1:]):
        operand = np.full(size // 4, 0.5, np.float32)
        total = np.empty_like(operand)
        for _ in range(WARM_UP):
            world.Allreduce(operand, total)
        assert (total == 0.5 * world.size).all()
        world.Barrier()
        start = time.perf_counter()
        for _ in range(runs):
            world.Allreduce(operand, total)
        found[size] = world.reduce((time.perf_counter() - start) / runs, MPI.MAX)
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
