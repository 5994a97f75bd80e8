"""Planning for 1024 ranks against 8, in pairs; with --nodes, planning time by number of nodes.

python tests/bench/bench_plan.py [--pairs 5] [--layers 22]
python tests/bench/bench_plan.py --nodes 2000 5000 10000 20000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import onnxpar

sys.path.insert(0, str(Path(__file__).parent))
import llama_shape

NODES_PER_LAYER = 36


def write(model: Path, layers: int) -> None:
    """A narrow Llama of that many layers."""
    llama_shape.write(
        model, layers=layers, hidden=64, heads=16, kv_heads=8, ffn=96, vocab=64, batch=128
    )


def seconds(model: Path, mesh: str) -> float:
    """Seconds from the file to the plan."""
    start = time.perf_counter()
    onnxpar.plan(model, mesh=mesh, preset="hybrid")
    return time.perf_counter() - start


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--nodes", type=int, nargs="+", default=[])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "llama.onnx"
        for nodes in args.nodes:
            write(model, nodes // NODES_PER_LAYER)
            best = min(seconds(model, "dp=2,tp=4") for _ in range(2))
            print(f"{nodes} nodes: {best:.1f} s, {best / nodes * 1e3:.2f} ms a node")
        if args.nodes:
            return
        write(model, args.layers)
        seconds(model, "dp=2,tp=4")
        ratios = []
        for _ in range(args.pairs):
            few, many = seconds(model, "dp=2,tp=4"), seconds(model, "dp=128,tp=8")
            ratios.append(many / few)
            print(f"8 ranks {few:.2f} s, 1024 ranks {many:.2f} s: ratio {many / few:.2f}")
        print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.2f}")


if __name__ == "__main__":
    main()
