"""Worlds of processes, each with its own ONNXPAR_TRANSPORT."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from native.ranks import collective, run
from onnx import TensorProto

from onnxpar.runtime.ranks.groups import World

# Each imports onnxruntime for itself: it waits at its exit for a thread that a fork would not have.
_context = multiprocessing.get_context("forkserver")

COLLECTIVES: dict[str, tuple[str, dict[str, object]]] = {
    "all-reduce": ("AllReduce", {}),
    "reduce-scatter": ("ReduceScatter", {"axis": 0}),
    "all-gather": ("AllGather", {"axis": 1}),
    "all-to-all": ("AllToAll", {"split_axis": 1, "concat_axis": 0}),
    "broadcast": ("Broadcast", {"root": 2}),
    "permute": ("CollectivePermute", {"sources": [2, 0, 1]}),
    "neighbours": ("NeighborExchange", {"axis": 0, "before": [0, 1, 2], "after": [1, 1, 0]}),
}
SHAPES = [(4, 3), (5, 7), (300, 501), (700, 800)]
"""In one cell, in one message, and in many, with rows that are not contiguous."""


def results_over(folder: Path, *media: str) -> list[Any]:
    """For each rank, with whom it shares memory, and the bytes of its results; or the text of its
    error."""
    ranks = []
    for rank in range(len(media)):
        ours, theirs = _context.Pipe()
        arguments = (theirs, rank, media, f"file:{folder}")
        process = _context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    answers = []
    for process, ours in ranks:
        assert ours.poll(120), "the rank hangs"
        answers.append(ours.recv())  # EOFError if it has died
        process.join()
    return answers


def _serve(connection: Connection, rank: int, media: Sequence[str], store: str) -> None:
    os.environ["ONNXPAR_TRANSPORT"] = media[rank]
    try:
        with World.create(f"rank-{rank}", rank, len(media), store, timeout=60) as world:
            shared = [world.shares_memory_with(other) for other in range(world.size)]
            results = [[_result(world, name, shape) for shape in SHAPES] for name in COLLECTIVES]
        connection.send((shared, results))
    except Exception as error:
        connection.send(str(error))


def _result(world: World, name: str, shape: tuple[int, int]) -> bytes:
    kind, attributes = COLLECTIVES[name]
    ranks = range(world.size)  # sums of small integers have the same bits in every order
    xs = [np.random.default_rng(rank).integers(-99, 99, shape).astype("f4") for rank in ranks]
    model = collective(kind, TensorProto.FLOAT, list(shape), **attributes)
    return run(world, model, *xs).tobytes()
