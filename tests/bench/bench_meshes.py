"""What the search over meshes finds: what a third axis saves, and whether the compiled plan takes
what the search reckoned with.

python tests/bench/bench_meshes.py [--ranks 64] [--only bert ResNet-50 ...]

Milliseconds of a run by the cost model, on default links and on hosts of 8: of the fastest mesh on
which everything is decided at once, of what was found, and of its plan.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import model_shapes
from bench.rivals import TOPOLOGIES, WORKLOADS, searched
from committed import MODELS
from search.recording import Recording

from onnxpar.cost.topology import Topology
from onnxpar.planner.options import Options

SMALL = ("bert", "gpt2", "vit", "llama", "resnet", "mixtral", "dlrm")
"""Of models/, as both exporters write them."""
WRITTEN: Mapping[str, Callable[[Path], Path]] = {
    "ResNet-50, 4": partial(model_shapes.resnet, batch=4),
    "GPT-2, 32 x 128": partial(model_shapes.gpt2, batch=32, seq=128),
    **{name: work.write for name, work in WORKLOADS.items()},
}


def row(path: Path, ranks: int, topology: Topology) -> str:
    """The three times, and the meshes."""
    tried = Recording(path, ranks, topology)
    best = tried.best()
    sizes, two = min(tried.found.items(), key=itemgetter(1))
    plan = searched(path, Options(devices=ranks, topology=topology)).predicted.total
    shape = " x ".join(map(str, sizes))
    return (
        f"{two * 1e3:11.3f} ({shape}), {best.seconds * 1e3:.3f} ({best.mesh}), "
        f"{1 - best.seconds / two:.1%} saved; the plan takes {plan / best.seconds:.6f} of that"
    )


def main() -> None:
    """Prints a line for each model, topology and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--only", nargs="+", default=[""])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{name}.{exporter}" for name in SMALL for exporter in ("legacy", "dynamo")]
        for name in [*names, *WRITTEN]:
            if not name.startswith(tuple(args.only)):
                continue
            path = MODELS / f"{name}.static.onnx"
            if name in WRITTEN:
                path = WRITTEN[name](Path(folder) / "model.onnx")
            for machine, topology in TOPOLOGIES.items():
                for ranks in args.ranks:
                    print(
                        f"{name:22} {machine:10} {ranks:4} {row(path, ranks, topology)}", flush=True
                    )


if __name__ == "__main__":
    main()
