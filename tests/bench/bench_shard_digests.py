"""What the digests cost when a model is sharded: `onnxpar.shard` as it is against the same without
any hashing, in alternating pairs; and with `--ranks`, which hashes the files of other ranks without
writing them.

    python tests/bench/bench_shard_digests.py [--pairs 11] [--megabytes 1500] [--ranks 4]

Prints the median of the pairs' ratios and its quartiles for the writing alone (split-ranks and the
plan) and for the whole call, and the median seconds of each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import llama_shape

import onnxpar
from onnxpar.base.hashing import Hashing
from onnxpar.base.pass_times import WRITE, PassTimes
from onnxpar.passes.write.split_ranks import SplitRanks

SIZES = {"hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2752, "vocab": 512}
SIZES |= {"batch": 1, "seq": 16}
"""Of a layer of 50.6 MB."""
LAYER = 4 * (4 * 1024 * 1024 + 3 * 1024 * 2752)


@contextmanager
def without_hashing() -> Iterator[None]:
    """Digests are texts that nobody computed."""
    add = Hashing.add
    Hashing.add = lambda self, pieces, done: done("0" * 64)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hashing.add = add  # type: ignore[method-assign]


def seconds(model: Path, par: Path, **options: Any) -> tuple[float, float]:
    """Of the writing, and of the whole call. The disk has nothing to write when it begins."""
    shutil.rmtree(par, ignore_errors=True)
    os.sync()
    times = PassTimes()
    start = time.perf_counter()
    onnxpar.shard(model, par, preset="tensor-parallel", time_passes=times, **options)
    whole = time.perf_counter() - start
    written = sum(times.rows[name].seconds for name in (SplitRanks.name, WRITE))
    return written, whole


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--megabytes", type=float, default=1500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        model, par = Path(scratch) / "m.onnx", Path(scratch) / "m.par"
        llama_shape.write(model, layers=max(1, round(args.megabytes * 1e6 / LAYER)), **SIZES)
        every: dict[str, Any] = {"devices": args.ranks}
        for what, options in (("shard", every), ("shard --ranks 0", {**every, "ranks": [0]})):
            hashed, plain = [], []
            for pair in range(args.pairs + 1):
                for is_plain in (False, True) if pair % 2 else (True, False):
                    if is_plain:
                        with without_hashing():
                            plain.append(seconds(model, par, **every))
                    else:
                        hashed.append(seconds(model, par, **options))
            own, others = np.array(hashed[1:]), np.array(plain[1:])  # the first pair warms up
            for column, part in enumerate(("writing", "in all")):
                ratios = own[:, column] / others[:, column]
                low, middle, high = np.percentile(ratios, (25, 50, 75))
                print(
                    f"{what}, {part}: ratio {middle:.3f} ({low:.3f} to {high:.3f}); medians "
                    f"{np.median(own[:, column]):.2f} s, all ranks without digests "
                    f"{np.median(others[:, column]):.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
