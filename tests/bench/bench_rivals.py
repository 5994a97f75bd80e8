"""The search beside every preset and Megatron's plan: what they take by the cost model, in units
of what it has found.

python tests/bench/bench_rivals.py [--ranks 2 4 8 64 1024] [--only GPT-2 DLRM ...]

Of each strategy the fastest mesh counts. Fails where one is faster than the search, be it over all
meshes or over its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.rivals import SAME, TOPOLOGIES, WORKLOADS, Workload, meshes, rivals, searched

from onnxpar.cost.topology import Topology
from onnxpar.planner.options import Options


def row(work: Workload, model: Path, ranks: int, topology: Topology) -> tuple[str, list[str]]:
    """A line of the table, and what is faster than the search."""
    start = time.perf_counter()
    best = searched(model, Options(devices=ranks, topology=topology))
    took = time.perf_counter() - start
    total = best.predicted.total
    least: dict[str, float] = {}
    faster = []
    for mesh in meshes(ranks):
        given = Options(mesh=mesh, topology=topology)
        own = searched(model, given).predicted.total
        found = {"search": own, **rivals(work, model, given)}
        for name, seconds in found.items():
            least[name] = min(seconds, least.get(name, seconds))
            for whose, other in ((best.mesh, total), (mesh, own)):
                if seconds < other * (1 - SAME):
                    faster.append(
                        f"{name} {mesh}: {seconds / other:.6f} of the search over {whose}"
                    )
    others = (f"{name} {least[name] / total:.3f}" for name in sorted(least))
    return f"{best.mesh!s:13} {total * 1e3:12.3f} ms in {took:4.1f} s  {', '.join(others)}", faster


def main() -> None:
    """Prints a line for each model, topology and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 64, 1024])
    parser.add_argument("--only", nargs="+", default=[""])
    args = parser.parse_args()
    is_slower = False
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model.onnx"
        for name, work in WORKLOADS.items():
            if not name.startswith(tuple(args.only)):
                continue
            work.write(model)
            for machine, topology in TOPOLOGIES.items():
                for ranks in args.ranks:
                    line, faster = row(work, model, ranks, topology)
                    is_slower |= bool(faster)
                    print(
                        f"{name:22} {machine:10} {ranks:4} {line}", *faster, sep="\n  ", flush=True
                    )
    sys.exit(is_slower)


if __name__ == "__main__":
    main()
