"""The start of a sharded model, which compares its files with their digests, against the start of
the same model without digests, in alternating pairs; and all that `--verify` reads.

    python tests/bench/bench_start.py [--pairs 15] [--ranks 2] [--megabytes 59] [--folder DIR]

Prints the median of the pairs' ratios, its quartiles, and the median seconds of each. The files are
in the page cache. First prints the seconds of a model of one product: to import onnxpar, to start
its session, and the command `run` from start to exit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_run
import llama_shape

import onnxpar
from onnxpar.base.digests import sealed

SIZES = {"hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1376, "vocab": 512, "batch": 1, "seq": 16}
"""Of a layer of 12.6 MB."""
LAYER = 4 * (4 * 512 * 512 + 3 * 512 * 1376)


def without_digests(par: Path, folder: Path) -> Path:
    """The same sharded model, whose plan lists no files; those are links."""
    folder.mkdir()
    for file in par.iterdir():
        if file.name != "plan.json":
            os.link(file, folder / file.name)
    plan = json.loads((par / "plan.json").read_text())
    (folder / "plan.json").write_text(sealed({**plan, "files": {}}))
    return folder


def seconds(par: Path, verify: bool = False) -> float:
    """From a folder to a session that can run."""
    start = time.perf_counter()
    session = onnxpar.InferenceSession(par, verify=verify)
    taken = time.perf_counter() - start
    session.close()
    return taken


def small(folder: Path, ranks: int, rounds: int) -> None:
    """Prints what starts take with a model of one product."""
    folder.mkdir()
    par = folder / "small.par"
    onnxpar.shard(bench_run.write(folder, 0), par, devices=ranks, preset="data-parallel")
    np.savez(folder / "x.npz", x=np.ones((8, 16), np.float32))
    run = ["-m", "onnxpar", "run", str(par), "--inputs", str(folder / "x.npz")]
    found: dict[str, list[float]] = {"import onnxpar": [], "session": [], "onnxpar run": []}
    for _ in range(rounds):
        for what, arguments in (("import onnxpar", ["-c", "import onnxpar"]), ("onnxpar run", run)):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            found[what].append(time.perf_counter() - start)
        found["session"].append(seconds(par))
    for what, each in found.items():
        low, middle, high = np.percentile(each, (25, 50, 75))
        print(f"{what}, {ranks} ranks: {middle:.3f} s ({low:.3f} to {high:.3f})")


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=59, help="of weights per rank")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        small(folder / "small", args.ranks, args.pairs)
        layers = max(1, round(args.megabytes * 1e6 * args.ranks / LAYER))
        llama_shape.write(folder / "m.onnx", layers=layers, **SIZES)
        par = folder / "m.par"
        onnxpar.shard(folder / "m.onnx", par, devices=args.ranks, preset="tensor-parallel")
        size = sum(f.stat().st_size for f in par.glob("rank_0000.*"))
        print(f"{args.ranks} ranks, {size / 1e6:.0f} MB of each")
        bare = without_digests(par, folder / "bare.par")
        for what, verify in (("start", False), ("start with --verify", True)):
            checked, plain = [], []
            for pair in range(args.pairs + 1):
                ways = [(checked, par, verify), (plain, bare, False)]
                for taken, where, whole in ways if pair % 2 else ways[::-1]:
                    taken.append(seconds(where, whole))
            ratios = np.array(checked[1:]) / np.array(plain[1:])  # the first pair warms up
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            print(
                f"{what}: ratio {middle:.3f} ({low:.3f} to {high:.3f}); medians "
                f"{np.median(checked[1:]):.3f} s, without digests {np.median(plain[1:]):.3f} s"
            )


if __name__ == "__main__":
    main()
