"""From the file to the plan with --search auto: many layers over 4096 ranks against 64, in pairs.

python tests/bench/bench_search.py [--pairs 3] [--layers 100]
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import onnxpar

sys.path.insert(0, str(Path(__file__).parent))
import llama_shape


def seconds(model: Path, devices: int) -> tuple[float, str]:
    """Seconds from the file to the plan, and the mesh that was found."""
    start = time.perf_counter()
    made = onnxpar.plan(model, devices=devices, search="auto")
    return time.perf_counter() - start, str(made.mesh)


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "llama.onnx"
        sizes = {"hidden": 64, "heads": 16, "kv_heads": 8, "ffn": 96, "vocab": 64, "batch": 128}
        llama_shape.write(model, layers=args.layers, **sizes)
        ratios = []
        for _ in range(args.pairs):
            (few, mesh), (many, other) = seconds(model, 64), seconds(model, 4096)
            ratios.append(many / few)
            print(f"64 ranks {few:.1f} s ({mesh}), 4096 ranks {many:.1f} s ({other})")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.2f}, peak RSS {peak:.0f} MB")


if __name__ == "__main__":
    main()
