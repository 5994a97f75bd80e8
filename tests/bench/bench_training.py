"""Training steps against each other: peak memory of ranks and time of a step, as ratios.

    python tests/bench/bench_training.py [--ranks 4] [--layers 8] [--width 2048] [--pairs 7]

First presets on an MLP with Adam and a tiny batch, where parameters and state dominate, each
against data-parallel; then a deep one with a large batch, with recomputation against without. The
two of a pair take steps in turns, so that what else the machine does falls on both. Peak memory is
VmHWM of the largest rank. Fails if zero3 needs more than 40 % of data-parallel's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxpar
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

PRESETS = ("zero1", "zero2", "zero3", "tensor-parallel")
LIMIT = 0.4
WARM = 3
DEEP_LAYERS, DEEP_WIDTH, DEEP_BATCH, DEEP_RANKS = 32, 256, 8192, 2


class Runner:
    """A sharded step in processes of its own."""

    def __init__(self, par: Path, batch: int, width: int) -> None:
        before = children()
        self.trainer = Trainer(par)
        self.ranks = children() - before
        x = np.random.default_rng(0).standard_normal((batch, width), np.float32)
        self.batch = {"x": x, "target": np.zeros_like(x)}

    def seconds(self) -> float:
        """Takes a step; how long it took."""
        start = time.perf_counter()
        self.trainer.step(self.batch, 1e-4)
        return time.perf_counter() - start

    def peak(self) -> float:
        """Most bytes that a rank has had in memory so far, in MB."""
        return max(peak_of(pid) for pid in self.ranks)


def children() -> set[int]:
    """Processes that this one has started."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in files for pid in file.read_text().split()}


def peak_of(pid: int) -> float:
    """VmHWM of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def write(path: Path, layers: int, width: int, batch: int) -> int:
    """Writes an MLP; returns the bytes of its parameters."""
    draw = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(layers):
        weight = draw.standard_normal((width, width), np.float32) * np.float32((2 / width) ** 0.5)
        weights += [
            numpy_helper.from_array(weight, f"w{i}"),
            numpy_helper.from_array(np.zeros(width, np.float32), f"b{i}"),
        ]
        y = "y" if i == layers - 1 else f"r{i}"
        nodes += [
            helper.make_node("Gemm", [x, f"w{i}", f"b{i}"], [f"h{i}"], f"fc{i}"),
            helper.make_node("Relu", [f"h{i}"], [y], f"relu{i}"),
        ]
        x = y
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [batch, width]) for n in "xy"]
    graph = helper.make_graph(nodes, "mlp", ports[:1], ports[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return layers * width * (width + 1) * 4


def compare(
    first: Path, second: Path, batch: int, width: int, pairs: int
) -> tuple[float, float, float, float]:
    """Peaks of both, seconds of a step of the first, and the median ratio of the second's to it."""
    one = Runner(first, batch, width)
    other = Runner(second, batch, width)
    with one.trainer, other.trainer:
        for _ in range(WARM):
            one.seconds()
            other.seconds()
        times = [(one.seconds(), other.seconds()) for _ in range(pairs)]
        ratio = statistics.median(b / a for a, b in times)
        return one.peak(), other.peak(), statistics.median(a for a, _ in times), ratio


def bench_presets(folder: Path, options: argparse.Namespace) -> float:
    """Prints a line for each preset; returns the ratio of memory of zero3."""
    batch = 2 * options.ranks
    size = write(folder / "model.onnx", options.layers, options.width, batch)
    print(f"{size / 1e6:.0f} MB of parameters, Adam, {options.ranks} ranks, a batch of {batch}")
    grad(folder / "model.onnx", folder / "step.onnx", loss="mse", optimizer="adam")
    found = {}
    for preset in ("data-parallel", *PRESETS):
        par = folder / f"{preset}.par"
        onnxpar.shard(folder / "step.onnx", par, devices=options.ranks, preset=preset)
    for preset in PRESETS:
        pars = folder / "data-parallel.par", folder / f"{preset}.par"
        one, other, seconds, ratio = compare(*pars, batch, options.width, options.pairs)
        found[preset] = other / one
        print(
            f"{preset:16} peak RSS {other:6.0f} MB, data-parallel {one:6.0f} MB: ratio "
            f"{other / one:.2f}; a step takes {ratio:.2f} times {seconds * 1e3:.0f} ms",
            flush=True,
        )
    return found["zero3"]


def bench_recompute(folder: Path, pairs: int) -> None:
    """Prints what recomputation saves and costs."""
    write(folder / "deep.onnx", DEEP_LAYERS, DEEP_WIDTH, DEEP_BATCH)
    pars = []
    for recompute in (False, True):
        step, par = folder / "deep.step.onnx", folder / f"deep-{recompute}.par"
        how = {"loss": "mse", "optimizer": "sgd", "recompute": recompute}
        grad(folder / "deep.onnx", step, **how)
        onnxpar.shard(step, par, devices=DEEP_RANKS, preset="data-parallel")
        pars.append(par)
    one, other, seconds, ratio = compare(*pars, DEEP_BATCH, DEEP_WIDTH, pairs)
    print(
        f"{'recompute':16} peak RSS {other:6.0f} MB, without       {one:6.0f} MB: ratio "
        f"{other / one:.2f}; a step takes {ratio:.2f} times {seconds * 1e3:.0f} ms"
    )


def main() -> int:
    """Prints a line for each pair; fails if zero3 saves too little memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratio = bench_presets(Path(folder), options)
        bench_recompute(Path(folder), options.pairs)
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
