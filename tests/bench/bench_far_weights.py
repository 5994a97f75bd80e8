"""Products whose weights are in the cache, and products whose weights come from memory: what
`exposed` of a device stands for.

    python tests/bench/bench_far_weights.py [--rows 1 16 64 256] [--processes 2]

Each process runs the models that `calibrate` measures, all at the same time: a chain of products of
`rows` x 768 by 768 x 768 in onnxruntime with one thread, with one weight for all products, and with
16 weights, which the caches of a core do not hold together. Prints microseconds of a product on the
slowest process; a fifth of its runs take less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.synchronize import Barrier

import numpy as np
import onnxruntime as ort

from onnxpar.cost.calibration_models import APART, WIDTH, products

SECONDS, LEAST = 0.4, 5
Case = tuple[int, bool]
"""Rows, and whether each product has a weight of its own."""


def seconds(case: Case, barrier: Barrier) -> float:
    """Of a product, while the other processes run the same."""
    rows, apart = case
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    model = products(rows, APART, apart).SerializeToString()
    session = ort.InferenceSession(model, options)
    feeds = {"X0": np.ones((rows, WIDTH), np.float32)}
    session.run(None, feeds)
    barrier.wait()
    found: list[float] = []
    while sum(found) < SECONDS or len(found) < LEAST:
        start = time.perf_counter()
        session.run(None, feeds)
        found.append(time.perf_counter() - start)
    return float(np.quantile(found, 0.2)) / APART


def measure(cases: list[Case], barrier: Barrier, queue: multiprocessing.Queue) -> None:
    """Is one of the processes."""
    for case in cases:
        queue.put((case, seconds(case, barrier)))


def main() -> None:
    """Prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cases = [(rows, apart) for rows in args.rows for apart in (False, True)]
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(args.processes)
    started = [
        context.Process(target=measure, args=(cases, barrier, queue), daemon=True)
        for _ in range(args.processes)
    ]
    for process in started:
        process.start()
    slowest: dict[Case, float] = {}
    for _ in range(len(cases) * args.processes):
        case, taken = queue.get(timeout=120)
        slowest[case] = max(slowest.get(case, 0.0), taken)
    for rows in args.rows:
        near, far = (slowest[rows, apart] * 1e6 for apart in (False, True))
        print(f"{rows:4} rows: {near:8.0f} us in the cache, {far:8.0f} us from memory")


if __name__ == "__main__":
    main()
