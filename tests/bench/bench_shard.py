"""shard of a 4.4 GB model against cp of the same bytes, in pairs, and its peak memory.

    python tests/bench/bench_shard.py [--pairs 3] [--ranks 4] [--layers 22] [--folder DIR]

Both end with a sync of what they wrote. Prints each pair's ratio, and the peak RSS of shard.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import llama_shape


def timed(command: list[str], folder: Path) -> float:
    """Seconds of a command and a sync of its results."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for file in folder.iterdir():
        with file.open("rb") as data:
            os.fsync(data.fileno())
    return time.perf_counter() - start


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        model = folder / "llama.onnx"
        size = llama_shape.write(model, layers=args.layers)
        print(f"{size / 1e9:.2f} GB of weights, {args.ranks} ranks")
        for _ in range(args.pairs):
            copy, par = folder / "copy", folder / "llama.par"
            copy.mkdir()
            files = [str(model), str(model.with_suffix(".onnx.data"))]
            cp = timed(["cp", "--reflink=never", *files, str(copy)], copy)
            shutil.rmtree(copy)
            shard = [sys.executable, "-m", "onnxpar", "shard", str(model), "-o", str(par)]
            par.mkdir()
            par.rmdir()
            start = time.perf_counter()
            subprocess.run(
                [*shard, "--devices", str(args.ranks), "--preset", "tensor-parallel"],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            for file in par.iterdir():
                with file.open("rb") as data:
                    os.fsync(data.fileno())
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(
                f"cp {cp:.1f} s, shard {seconds:.1f} s: ratio {seconds / cp:.2f}; "
                f"peak RSS {peak:.0f} MB"
            )
            shutil.rmtree(par)


if __name__ == "__main__":
    main()
