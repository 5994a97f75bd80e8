"""A rank that runs every collective, and prints with whom it shares memory and what it got."""

from __future__ import annotations

import hashlib
import json
import os
import sys

import numpy as np
from native.media import COLLECTIVES
from native.ranks import collective, run
from onnx import TensorProto

from onnxpar.runtime.ranks.groups import World

SHAPES = [(6, 5), (300, 501), (700, 900)]
"""In one message, over one step, and in many chunks."""


def results(world: World) -> dict[str, list[str]]:
    """Digests of the results on this rank, by collective."""
    found: dict[str, list[str]] = {}
    for name, (kind, attributes) in COLLECTIVES.items():
        if kind in ("CollectivePermute", "NeighborExchange"):  # these are for three ranks
            continue
        for shape in SHAPES:
            ranks = range(world.size)
            xs = [np.random.default_rng(r).integers(-99, 99, shape).astype("f4") for r in ranks]
            made = collective(kind, TensorProto.FLOAT, list(shape), **attributes)
            y = run(world, made, *xs)
            found.setdefault(name, []).append(hashlib.sha256(y.tobytes()).hexdigest())
    return found


def main() -> None:
    rank, size, store, address, killed = sys.argv[1:]
    with World.create("collectives", int(rank), int(size), store, address, timeout=60) as world:
        shared = [world.shares_memory_with(other) for other in range(world.size)]
        print(json.dumps({"shared": shared, "results": results(world)}), flush=True)
        made = collective("AllReduce", TensorProto.FLOAT, ["n"])
        xs = [np.ones(2_000_000, "f4")] * world.size
        for turn in range(1000 if killed != "none" else 0):
            if turn == 3 and rank == killed:
                os.kill(os.getpid(), 9)
            try:
                run(world, made, *xs)
            except Exception as error:
                print(json.dumps(str(error)), flush=True)
                os._exit(0)


if __name__ == "__main__":
    main()
