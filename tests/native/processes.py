"""Ranks as processes that a test can kill, stop, or let end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
from native.ranks import TOKEN, collective, model, node, session
from onnx import NodeProto, TensorProto

from onnxpar.runtime.ranks.groups import World

# Each imports onnxruntime for itself: it waits at its exit for a thread that a fork would not have.
_context = multiprocessing.get_context("forkserver")


class RankProcess:
    """A rank that runs AllReduce 'node' when told to."""

    def __init__(self, rank: int, size: int, directory: Path, timeout: float) -> None:
        self._connection, child = _context.Pipe()
        self.process: ForkServerProcess = _context.Process(
            target=_serve,
            args=(child, rank, size, f"file:{directory}", timeout, os.environ["ONNXPAR_TRANSPORT"]),
            daemon=True,
        )
        self.process.start()
        child.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, runs: int = 1, which: str = "") -> None:
        """Begin so many all-reduces: of all ranks, the same "in two" ops, beside one of "two
        streams", or of the "pair" of ranks 1 and 2."""
        self._connection.send((runs, which))

    def finish(self, patience: float = 20) -> tuple[str, float]:
        """The message of the error that ended the runs ("" for none), and when it was raised."""
        assert self._connection.poll(patience), "the rank hangs"
        return self._connection.recv()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the process end as a program does, without closing its world."""
        self._connection.close()

    def wait_for(self, word: str) -> None:
        """Until the process says so; it may have to import onnxruntime first."""
        assert self.finish(patience=60) == (word, 0.0)

    def join(self) -> None:
        """Let it join the others."""
        self._connection.send("join")


def start_ranks(size: int, directory: Path, timeout: float) -> list[RankProcess]:
    ranks = [RankProcess(rank, size, directory, timeout) for rank in range(size)]
    for rank in ranks:
        rank.wait_for("up")
    for rank in ranks:
        rank.join()
    for rank in ranks:
        rank.wait_for("ready")
    return ranks


def _in_two(*between: NodeProto) -> bytes:
    """An all-reduce of all ranks that a thread of the plugin runs."""
    nodes = [
        node("StartAllReduce", ["X", "t"], ["P", "u"], tag=1, name="node", stream=len(between)),
        *between,
        node("Complete", ["P", "u"], ["Y", "s"], name="end"),
    ]
    return model(nodes, [("X", TensorProto.FLOAT, ["n"])], [("Y", TensorProto.FLOAT, None)])


def _serve(
    connection: Connection, rank: int, size: int, store: str, timeout: float, medium: str
) -> None:
    os.environ["ONNXPAR_TRANSPORT"] = medium
    connection.send(("up", 0.0))
    connection.recv()
    world = World.create(f"rank-{rank}", rank, size, store, timeout=timeout)
    world.open_streams(2)
    whole = collective("AllReduce", TensorProto.FLOAT, ["n"])
    sessions = {"": session(world, whole), "in two": session(world, _in_two())}
    beside = node("AllReduce", ["X", "t"], ["Z", "v"], tag=1, name="node2")
    sessions["two streams"] = session(world, _in_two(beside))
    if rank in (1, 2):
        pair = collective("AllReduce", TensorProto.FLOAT, ["n"], group=[1, 2], tag=2)
        sessions["pair"] = session(world, pair)
    feeds = {"X": np.full([10_000], rank, "f4"), "t": TOKEN}
    connection.send(("ready", 0.0))
    while True:
        try:
            runs, which = connection.recv()
        except EOFError:
            ctypes.CDLL(None).exit(0)  # a child of multiprocessing would skip C's exit handlers
        message = ""
        try:
            for _ in range(runs):
                sessions[which].run(["Y"], feeds)
        except Exception as error:
            message = str(error)
        connection.send((message, time.monotonic()))
