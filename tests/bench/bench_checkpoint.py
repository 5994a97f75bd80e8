"""Checkpoints that are written while training goes on, against those that training waits for.

    python tests/bench/bench_checkpoint.py [--ranks 2] [--layers 4] [--width 2048] [--pairs 7]

An MLP with Adam under zero3. The two of a pair take turns: each takes some steps, saves, and takes
as many steps again. Prints how long training stands still for a checkpoint, how long a turn takes
until the checkpoint is on disk, and the peak memory of the largest rank (VmHWM). Fails unless the
checkpoints have the same bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_training import Runner, write

import onnxpar
from onnxpar.trainer.checkpoint import Progress
from onnxpar.training import grad

STEPS = 5
"""Steps before a checkpoint, and behind it."""


def turn(runner: Runner, folder: Path, number: int, is_async: bool) -> tuple[float, float]:
    """Takes a turn; returns the seconds for which training stood still, and those of the turn."""
    start = time.perf_counter()
    for _ in range(STEPS):
        runner.seconds()
    before = time.perf_counter()
    save = runner.trainer.async_save if is_async else runner.trainer.save
    save(folder, Progress(number))
    stood = time.perf_counter() - before
    for _ in range(STEPS):
        runner.seconds()
    runner.trainer.finish_save()
    return stood, time.perf_counter() - start


def bench(par: Path, folder: Path, options: argparse.Namespace) -> bool:
    """Prints what both take; returns whether they write the same bytes."""
    batch = 2 * options.ranks
    runners = {name: Runner(par, batch, options.width) for name in ("waiting", "async")}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for number in range(options.pairs + 1):
        for name, runner in runners.items():
            times = turn(runner, folder / name, number, name == "async")
            if number:  # the first one warms up
                found[name].append(times)
            runner.trainer.keep(folder / name, Progress(number), 1)
    for name, runner in runners.items():
        stood, took = (statistics.median(each) for each in zip(*found[name], strict=True))
        print(
            f"{name:8} training stands still {stood * 1e3:6.0f} ms, a turn of {2 * STEPS} steps "
            f"takes {took * 1e3:6.0f} ms, peak RSS {runner.peak():6.0f} MB"
        )
        runner.trainer.close()
    last = Progress(options.pairs).name
    files = [sorted((folder / name / last).iterdir()) for name in runners]
    return all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def main() -> int:
    """Prints a line for each way; fails if they differ in what they write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder / "model.onnx", options.layers, options.width, 2 * options.ranks)
        print(f"{size / 1e6:.0f} MB of parameters, Adam, {options.ranks} ranks, zero3")
        grad(folder / "model.onnx", folder / "step.onnx", loss="mse", optimizer="adam")
        par = folder / "step.par"
        onnxpar.shard(folder / "step.onnx", par, devices=options.ranks, preset="zero3")
        return int(not bench(par, folder, options))


if __name__ == "__main__":
    sys.exit(main())
