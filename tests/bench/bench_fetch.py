"""How fast a rank fetches the files of a sharded model that it lacks, and what memory that takes.

    python tests/bench/bench_fetch.py [--megabytes 800] [--rounds 5] [--folder DIR]

Rank 0 has the folder, rank 1 has none. Prints for shared memory and for Gloo the median seconds and
the rate, beside those of `cp` and of SHA-256 on one core, and by how much the fetch raised the peak
memory of each rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import llama_shape

import onnxpar

SIZES = {"hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2752, "vocab": 512}
SIZES |= {"batch": 1, "seq": 16}
LAYER = 4 * (4 * 1024 * 1024 + 3 * 1024 * 2752)

RANK = """
import json, sys, time
from pathlib import Path
from onnxpar.runtime.ranks.fetch import complete
from onnxpar.runtime.ranks.groups import World
from onnxpar.runtime.session.session import InferenceSession  # what a rank has imported

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

par, rank, store = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with World.create("fetch", rank, 2, store) as world:
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, start = memory("VmRSS"), time.perf_counter()
    complete(par, world)
    print(json.dumps([time.perf_counter() - start, memory("VmHWM") - before]))
"""


def fetched(par: Path, new: Path, scratch: Path, transport: str) -> list[list[float]]:
    """Seconds and additional peak memory of both ranks."""
    shutil.rmtree(new, ignore_errors=True)
    os.sync()
    store = f"file:{tempfile.mkdtemp(dir=scratch)}"
    environment = {**os.environ, **({"ONNXPAR_TRANSPORT": transport} if transport else {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, folder, str(rank), store],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        for rank, folder in enumerate((par, new))
    ]
    return [json.loads(rank.communicate()[0]) for rank in ranks]


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=800)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        scratch = Path(name)
        model, par, new = (scratch / each for each in ("m.onnx", "m.par", "new.par"))
        llama_shape.write(model, layers=max(1, round(2e6 * args.megabytes / LAYER)), **SIZES)
        onnxpar.shard(model, par, devices=2, preset="tensor-parallel")
        model.with_suffix(".onnx.data").unlink(missing_ok=True)
        size = sum((par / f).stat().st_size for f in ("rank_0001.onnx", "rank_0001.weights"))
        start = time.perf_counter()
        shutil.copyfile(par / "rank_0001.weights", scratch / "copy")
        os.sync()
        copied = time.perf_counter() - start
        data = (scratch / "copy").read_bytes()
        start = time.perf_counter()
        hashlib.sha256(data)
        hashed = time.perf_counter() - start
        print(f"{size / 1e6:.0f} MB; a copy to the disk {copied:.2f} s, SHA-256 {hashed:.2f} s")
        for what, transport in (("shared memory", ""), ("Gloo", "gloo")):
            each = np.array([fetched(par, new, scratch, transport) for _ in range(args.rounds)])
            seconds = np.median(each[:, 1, 0])
            memory = each[:, :, 1].max(axis=0) / 2**20
            print(
                f"{what}: {seconds:.2f} s, {size / seconds / 1e6:.0f} MB/s; peak memory "
                f"+{memory[0]:.1f} MiB of the sender, +{memory[1]:.1f} MiB of the receiver"
            )


if __name__ == "__main__":
    main()
