"""Products whose weights are in the cache, and products whose weights come from memory: what
`exposed` of a device stands for.

    python tests/bench/bench_far_weights.py [--rows 1 16 64 256] [--width 768] [--processes 2]

Each process runs, all at the same time, a chain of products of `rows` x `width` by `width` x
`width` in onnxruntime with one thread: with one weight for all products, and with 16 weights, which
no cache holds together. Prints microseconds of a product of the slowest process, which takes
longer than a fifth of the runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.synchronize import Barrier

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

PRODUCTS, SECONDS, LEAST = 16, 0.4, 5
Case = tuple[int, int]
"""Rows, and the number of weights."""


def model(rows: int, width: int, weights: int) -> bytes:
    """A chain of PRODUCTS products that read so many weights in turn."""
    random = np.random.default_rng(0)
    scale = np.float32(width**-0.5)
    given = [
        numpy_helper.from_array(random.standard_normal((width, width), np.float32) * scale, f"w{i}")
        for i in range(weights)
    ]
    nodes = [
        helper.make_node("MatMul", [f"x{i}", f"w{i % weights}"], [f"x{i + 1}"])
        for i in range(PRODUCTS)
    ]
    ends = "x0", f"x{PRODUCTS}"
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [rows, width]) for n in ends)
    graph = helper.make_graph(nodes, "products", [x], [y], given)
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(made.SerializeToString())


def seconds(case: Case, width: int, barrier: Barrier) -> float:
    """Of a product, while the other processes run the same."""
    rows, weights = case
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model(rows, width, weights), options)
    feeds = {"x0": np.ones((rows, width), np.float32)}
    session.run(None, feeds)
    barrier.wait()
    found: list[float] = []
    while sum(found) < SECONDS or len(found) < LEAST:
        start = time.perf_counter()
        session.run(None, feeds)
        found.append(time.perf_counter() - start)
    return float(np.quantile(found, 0.2)) / PRODUCTS


def measure(cases: list[Case], width: int, barrier: Barrier, queue: multiprocessing.Queue) -> None:
    """Is one of the processes."""
    for case in cases:
        queue.put((case, seconds(case, width, barrier)))


def main() -> None:
    """Prints a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cases = [(rows, weights) for rows in args.rows for weights in (1, PRODUCTS)]
    context = multiprocessing.get_context("spawn")
    queue, barrier = context.Queue(), context.Barrier(args.processes)
    started = [
        context.Process(target=measure, args=(cases, args.width, barrier, queue), daemon=True)
        for _ in range(args.processes)
    ]
    for process in started:
        process.start()
    slowest: dict[Case, float] = {}
    for _ in range(len(cases) * args.processes):
        case, taken = queue.get(timeout=120)
        slowest[case] = max(slowest.get(case, 0.0), taken)
    for rows in args.rows:
        near, far = (slowest[rows, weights] * 1e6 for weights in (1, PRODUCTS))
        print(f"{rows:4} rows: {near:8.0f} us in the cache, {far:8.0f} us from memory")


if __name__ == "__main__":
    main()
