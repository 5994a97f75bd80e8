"""What data-parallel ranks hold and how long a run takes, with and without the weights that
onnxruntime packs for its products.

    python tests/bench/bench_packed_weights.py [--ranks 4] [--layers 6] [--width 4096] [--rounds 9]

The model is a perceptron of `layers` products of width x width. Prints the memory of a rank after
a run (PSS: memory that several processes share counts in parts), and the median seconds of a run of
1, 8 and 64 rows by each rank, in alternating rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

import onnxpar

WAYS = {"packed": {}, "not packed": {"session.disable_prepacking": "1"}}
ROWS = (1, 8, 64)


def write(folder: Path, layers: int, width: int) -> Path:
    """y = x @ w0 @ w1 ..., with values that stay near one."""
    random = np.random.default_rng(0)
    draw = [random.standard_normal((width, width), np.float32) for _ in range(layers)]
    weights = [
        numpy_helper.from_array(w / np.float32(width**0.5), f"w{i}") for i, w in enumerate(draw)
    ]
    names = ["x", *(f"x{i}" for i in range(1, layers)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", width]) for n in "xy"]
    graph = helper.make_graph(nodes, "perceptron", ports[:1], ports[1:], weights)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), folder / "m.onnx")
    return folder / "m.onnx"


def children() -> list[int]:
    """The processes that this one has started."""
    listed = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in listed for pid in file.read_text().split()]


def pss(pid: int) -> int:
    """Bytes of a process, of which each page counts by the number of processes that map it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Pss")


def main() -> None:
    """Measures memory, then time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        par = Path(name) / "m.par"
        model = write(Path(name), args.layers, args.width)
        onnxpar.shard(model, par, devices=args.ranks, preset="data-parallel")
        feeds = {n: {"x": np.ones((n * args.ranks, args.width), np.float32)} for n in ROWS}
        print(f"weights: {4e-6 * args.layers * args.width**2:.0f} MB")
        for way, config in WAYS.items():
            with onnxpar.InferenceSession(par, config=config) as made:
                made.run(None, feeds[1])
                each = [pss(pid) for pid in children()]
            print(f"{way:11} {statistics.median(each) / 1e6:6.0f} MB per rank")
        with ExitStack() as opened:
            sessions = {
                way: opened.enter_context(onnxpar.InferenceSession(par, config=config))
                for way, config in WAYS.items()
            }
            for rows, feed in feeds.items():
                _time(args.rounds, rows, feed, sessions)


def _time(
    rounds: int,
    rows: int,
    feed: dict[str, np.ndarray],
    sessions: dict[str, onnxpar.InferenceSession],
) -> None:
    found: dict[str, list[float]] = {way: [] for way in sessions}
    for number in range(rounds + 1):
        for way, made in sessions.items():
            start = time.perf_counter()
            made.run(None, feed)
            if number:
                found[way].append(time.perf_counter() - start)
    packed, bare = (statistics.median(found[way]) for way in WAYS)
    print(f"{rows:3} rows per rank: {packed * 1e3:.1f} ms packed, {bare / packed:.2f} times not")


if __name__ == "__main__":
    main()
