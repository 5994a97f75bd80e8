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
from statistics import median
from typing import Any

import onnxpar

sys.path.insert(0, str(Path(__file__).parent))
import llama_shape


def seconds(model: Path, **ranks: Any) -> float:
    """Seconds from the file to the plan."""
    start = time.perf_counter()
    onnxpar.plan(model, search="auto", **ranks)
    return time.perf_counter() - start


def main() -> None:
    """Runs the pairs: on square meshes, and with the mesh to be found as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "llama.onnx"
        sizes = {"hidden": 64, "heads": 16, "kv_heads": 8, "ffn": 96, "vocab": 64, "batch": 128}
        llama_shape.write(model, layers=args.layers, **sizes)
        for what, few, many in (
            ("square meshes", {"mesh": "dp=8,tp=8"}, {"mesh": "dp=64,tp=64"}),
            ("the best mesh", {"devices": 64}, {"devices": 4096}),
        ):
            pairs = [(seconds(model, **few), seconds(model, **many)) for _ in range(args.pairs)]
            for one, other in pairs:
                print(f"{what}: 64 ranks {one:.1f} s, 4096 ranks {other:.1f} s")
            print(f"median ratio {median(b / a for a, b in pairs):.2f}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak RSS {peak:.0f} MB")


if __name__ == "__main__":
    main()
