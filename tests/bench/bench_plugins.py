"""Two builds of the plugin in alternating rounds: what its loops take, and whether they give the
same bits.

    python tests/bench/bench_plugins.py A.so B.so [--rounds 15]

Each round runs each build in a process of its own. A time is the least of several runs, on one
thread for each rank. Prints medians of the rounds in microseconds, and the median of the ratios of
B to A with its quartiles.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from onnxpar.graph.paged_attention import COMPUTE

RUNS = 15
ADAM = (
    "Mul x1 s0; Mul x2 s1; Add v0 v1; Mul x2 x2; Mul v3 s2; Mul x3 s3; Add v5 v4; Div v2 s4; "
    "Div v6 s5; Sqrt v8; Add v9 s6; Div v7 v10; Mul x0 s7; Sub x0 v12; Mul v11 s7; Sub v13 v14"
)
ROWS, PAGE, WIDTH = 2048, 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plugins", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if len(options.plugins) == 1:
        print(json.dumps(measure(options.plugins[0].resolve())))
        return
    rounds = [[child(plugin) for plugin in options.plugins] for _ in range(options.rounds)]
    print(f"{'':26} {'A us':>9} {'B us':>9}  B/A (quartiles)")
    for name in rounds[0][0]:
        times = [[plugin[name][0] for plugin in each] for each in rounds]
        a, b = (statistics.median(t) * 1e6 for t in zip(*times, strict=True))
        low, middle, high = statistics.quantiles([b / a for a, b in times], n=4)
        same = len({plugin[name][1] for each in rounds for plugin in each}) == 1
        bits = "same bits" if same else "OTHER BITS"
        print(f"{name:26} {a:9.1f} {b:9.1f}  {middle:.2f} ({low:.2f} to {high:.2f})  {bits}")


def child(plugin: Path) -> dict[str, tuple[float, str]]:
    """Seconds and a digest of the results for each measurement of a build."""
    command = [sys.executable, __file__, str(plugin)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    found: dict[str, tuple[float, str]] = json.loads(done.stdout)
    return found


def measure(plugin: Path) -> dict[str, tuple[float, str]]:
    """What `child` returns, in this process."""
    from onnxpar.runtime.ranks import library

    library.library_path = lambda: plugin
    rng = np.random.default_rng(0)
    found = {}
    for elements in (1 << 14, 1 << 22):
        found[f"AdamW of {elements}"] = timed(adam(elements, rng))
    for dtype in ("float32", "float16"):
        for tokens in (1, 64):
            found[f"pages {dtype} {tokens}"] = timed(pages(dtype, tokens, rng))
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int64):
        found[f"AllReduce of {np.dtype(dtype)}"] = timed_sum(np.dtype(dtype), rng)
    return found


def timed(run: Callable[[], list[np.ndarray]]) -> tuple[float, str]:
    """The least seconds, and a digest of the results."""
    digest = hashlib.sha256()
    for array in run():
        digest.update(array.tobytes())
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), digest.hexdigest()


def timed_sum(dtype: np.dtype, rng: np.random.Generator) -> tuple[float, str]:
    """The same for an AllReduce of 1 MiB among two ranks, which are threads."""
    from onnxpar.runtime.ranks.collectives import all_reduce
    from onnxpar.runtime.ranks.groups import thread_worlds

    x = (rng.standard_normal((2, (1 << 20) // dtype.itemsize)) * 9).astype(dtype)
    worlds = thread_worlds(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(timed, lambda r=r: [all_reduce(worlds[r], x[r])]) for r in (0, 1)]
        found = [rank.result() for rank in ranks]
        list(pool.map(lambda world: world.close(), worlds))
    return found[0]


def session(model: bytes) -> ort.InferenceSession:
    """A session on one thread, of a world of one rank."""
    from onnxpar.runtime.ranks.groups import session_options, thread_worlds

    (world,) = thread_worlds(1)
    options = session_options(world)
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def model_of(node: object, inputs: dict[str, np.ndarray], outputs: dict[str, int]) -> bytes:
    """A model of one node, with shapes that are open."""
    ports = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
        for n, x in inputs.items()
    ]
    results = [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()]
    opsets = [helper.make_opsetid(d, v) for d, v in (("", 20), ("onnxpar", 1), (COMPUTE, 1))]
    graph = helper.make_graph([node], "one", ports, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def adam(elements: int, rng: np.random.Generator) -> Callable[[], list[np.ndarray]]:
    """A step of AdamW in one loop."""
    feeds = {f"x{i}": np.abs(rng.standard_normal(elements)).astype("f4") for i in range(4)}
    feeds |= {f"s{i}": np.array(0.1 * (i + 1), "f4") for i in range(8)}
    outputs = {"y0": TensorProto.FLOAT, "y1": TensorProto.FLOAT}
    attributes = {"program": ADAM, "results": [15, 2], "domain": "onnxpar"}
    node = helper.make_node("FusedElementwise", list(feeds), list(outputs), **attributes)
    made = session(model_of(node, feeds, outputs))
    return lambda: made.run(None, feeds)


def pages(dtype: str, tokens: int, rng: np.random.Generator) -> Callable[[], list[np.ndarray]]:
    """Attention of the last tokens of a text, of 16 heads of which 4 share keys."""
    heads, shared = 16, 4
    feeds = {
        name: rng.standard_normal((1, tokens, n * WIDTH)).astype("f4")
        for name, n in (("query", heads), ("key", shared), ("value", shared))
    }
    for name in ("keys", "values"):
        cache = rng.standard_normal((ROWS // PAGE, shared, PAGE, WIDTH))
        feeds[name] = cache.astype(dtype)
    feeds["table"] = rng.permutation(ROWS // PAGE)[None]
    feeds["rows"] = np.zeros(tokens, np.int64)
    feeds["positions"] = np.arange(ROWS - tokens, ROWS)
    kinds = dict.fromkeys(
        ("new_keys", "new_values"), helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    )
    outputs = {"y": TensorProto.FLOAT, **kinds}
    attributes = {"num_heads": heads, "kv_num_heads": shared, "domain": COMPUTE}
    node = helper.make_node("PagedAttention", list(feeds), list(outputs), **attributes)
    made = session(model_of(node, feeds, outputs))
    return lambda: made.run(None, feeds)


if __name__ == "__main__":
    main()
