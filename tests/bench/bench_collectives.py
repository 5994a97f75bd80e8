"""Collectives through shared memory against those over Gloo, and against memcpy, in alternating
rounds.

    python tests/bench/bench_collectives.py [--ranks 2] [--group 2] [--rounds 15]
        [--kinds AllReduce ...] [--bytes 4096 ...] [--sweep]

A graph of several collectives in a row runs in an onnxruntime session on each rank; the time is
that of one collective, on the slowest rank. Prints medians of the rounds in microseconds, and the
median of the rounds' ratios with its quartiles. With --group, all groups of so many ranks
communicate at once. --sweep takes all kinds and 11 sizes, and measures again where shared memory
is slower; it ends with those that are slower both times.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxpar.base.units import text_of
from onnxpar.runtime.ranks.groups import World, session_options

MEDIA = ("shared-memory", "gloo")
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "AllReduce": {},
    "AllGather": {"axis": 0},
    "ReduceScatter": {"axis": 0},
    "AllToAll": {"split_axis": 0, "concat_axis": 1},
    "Broadcast": {"root": 0},
    "CollectivePermute": {},
    "NeighborExchange": {"axis": 0},
    "Send": {},
}
KEEPS_SHAPE = ("AllReduce", "Broadcast", "CollectivePermute")
SIZES = [64, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
SWEEP = [64 << 2 * i for i in range(11)]
SLOWER = 1.05
"""The ratio from which shared memory counts as slower."""


def chain(
    kind: str, ranks: int, elements: int, length: int, rank: int = 0, first: int = 0
) -> bytes:
    """A model of a rank that runs `length` collectives in a row, among so many ranks from `first`
    on. AllGather has `elements` elements as its result, all others as operand. For Send, each
    second rank sends to the one after it."""
    rows = elements // ranks if kind == "AllGather" else elements
    shape = [ranks, rows // ranks] if kind == "AllToAll" else [rows]
    nodes, x, token = [], "X", "t0"
    for i in range(length):
        y = f"Y{i}"
        more = ATTRIBUTES[kind] | {"tag": i, **_sizes(kind, ranks, elements)}
        op, names = kind, [y, f"t{i + 1}"]
        if kind == "Send":
            place = rank - first
            sends, alone = place % 2 == 0, place + 1 == ranks and ranks % 2 == 1
            more["peer"] = -1 if alone else rank + 1 if sends else rank - 1
            op, names = ("Send", names[1:]) if sends else ("Recv", names)
        else:
            more["group"] = list(range(first, first + ranks))
        nodes.append(helper.make_node(op, [x, token], names, domain="onnxpar", **more))
        x, token = (y if kind in KEEPS_SHAPE else "X"), f"t{i + 1}"
    graph = helper.make_graph(
        nodes,
        "chain",
        [
            helper.make_tensor_value_info("X", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("t0", TensorProto.BOOL, [0]),
        ],
        [helper.make_tensor_value_info(token, TensorProto.BOOL, [0])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("onnxpar", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def _sizes(kind: str, ranks: int, elements: int) -> dict[str, list[int]]:
    """The attributes that say how much each member gives or gets."""
    if kind in ("AllGather", "ReduceScatter"):
        return {"sizes": [elements // ranks] * ranks}
    if kind == "CollectivePermute":
        return {"sources": [(i + 1) % ranks for i in range(ranks)], "shapes": [elements]}
    if kind == "NeighborExchange":
        halos = [elements] * (ranks - 1)
        return {"before": [0, *halos], "after": [*halos, 0]}
    return {}


def serve(connection: Connection, rank: int, ranks: int, store: str, medium: str) -> None:
    """Runs models on one rank: receives (model, runs), sends the seconds of each run."""
    os.environ["ONNXPAR_TRANSPORT"] = medium
    world = World.create(f"{medium}-{rank}", rank, ranks, store, timeout=60)
    sessions: dict[bytes, Any] = {}
    while (request := connection.recv()) is not None:
        model, runs = request
        if model not in sessions:
            sessions[model] = bound(world, model)
        session, binding = sessions[model]
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            times.append(time.perf_counter() - start)
        connection.send(times)
    world.close()


def bound(world: World, model: bytes) -> tuple[ort.InferenceSession, ort.IOBinding]:
    options = session_options(world)
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    shape = session.get_inputs()[0].shape
    binding.bind_cpu_input("X", np.full(shape, 0.5, np.float32))
    binding.bind_cpu_input("t0", np.zeros([0], np.bool_))
    binding.bind_output(session.get_outputs()[0].name)
    return session, binding


class Ranks:
    """Processes of a world over one medium."""

    def __init__(self, ranks: int, medium: str, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connections, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, ranks, f"file:{folder}/{medium}", medium)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def seconds(self, model: bytes | Sequence[bytes], runs: int) -> float:
        """Of one run on the slowest rank: the median of `runs`. One model, or one per rank."""
        models = [model] * len(self.connections) if isinstance(model, bytes) else model
        for connection, each in zip(self.connections, models, strict=True):
            connection.send((each, runs))
        times = [connection.recv() for connection in self.connections]
        return statistics.median(map(max, zip(*times, strict=True)))

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join()


def copy_seconds(size: int) -> float:
    """Of a memcpy of so many bytes: the median of 5."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, size)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--group", type=int, help="ranks of a group; all by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", choices=list(ATTRIBUTES))
    parser.add_argument("--bytes", nargs="+", type=int)
    parser.add_argument("--sweep", action="store_true", help="all kinds and sizes by default")
    args = parser.parse_args()
    kinds = args.kinds or (list(ATTRIBUTES) if args.sweep else ["AllReduce"])
    sizes = args.bytes or (SWEEP if args.sweep else SIZES)
    group = args.group or args.ranks
    with tempfile.TemporaryDirectory() as folder:
        worlds = [Ranks(args.ranks, medium, folder) for medium in MEDIA]
        print(f"{args.ranks} ranks in groups of {group}; microseconds, and shared memory / gloo")
        print(f"{'collective':<18}{'bytes':>9}{'shared':>10}{'gloo':>10}{'memcpy':>9}  ratio")
        cases = [(kind, size) for kind in kinds for size in sizes]

        def slower(cases: list[tuple[str, int]]) -> list[tuple[str, int]]:
            return [c for c in cases if report(*c, group, args.rounds, worlds) > SLOWER]

        again = slower(cases)
        if args.sweep:
            print(f"slower twice: {slower(again)}")
        for world in worlds:
            world.close()


def length_of(size: int) -> int:
    """Collectives of so many bytes in a graph."""
    return 20 if size <= 64 << 10 else 4 if size <= 1 << 20 else 1


def runs_of(size: int) -> int:
    """Runs of such a graph in a round."""
    return 20 if size <= 1 << 20 else 3


def report(kind: str, size: int, group: int, rounds: int, worlds: list[Ranks]) -> float:
    """Measures a collective and prints a line; returns the ratio of shared memory to gloo."""
    length, runs = length_of(size), runs_of(size)
    elements = max(size // 4 // group, 1) * group
    firsts = [r // group * group for r in range(len(worlds[0].processes))]
    model = [chain(kind, group, elements, length, r, first) for r, first in enumerate(firsts)]
    for world in worlds:
        world.seconds(model, 3)
    figures = [
        [*(world.seconds(model, runs) / length for world in worlds), copy_seconds(size)]
        for _ in range(rounds)
    ]
    shared, gloo, copy = (statistics.median(column) * 1e6 for column in zip(*figures, strict=True))
    low, middle, high = statistics.quantiles([row[0] / row[1] for row in figures], n=4)
    print(
        f"{kind:<18}{text_of(size, 'B'):>9}{shared:>10.1f}{gloo:>10.1f}{copy:>9.1f}"
        f"  {middle:.2f} ({low:.2f} to {high:.2f})",
        flush=True,
    )
    return middle


if __name__ == "__main__":
    main()
