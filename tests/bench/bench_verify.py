"""Proving ranks against parsing their files, in pairs; with the memory that a proof takes.

python tests/bench/bench_verify.py [--pairs 3] [--case tiny llama step large deep] [--folder DIR]

tiny   a Llama of models/ over 4 ranks
llama  a Llama of 1.1 billion parameters over 8 ranks, all weights compared
step   its AdamW step under zero2, weights not compared
large  the shape of a Llama of 405 billion over 64 ranks, weights not compared
deep   that shape with half of its layers

Each runs in a process of its own; seconds are without imports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import llama_shape

import onnxpar
from onnxpar.training import grad

TINY = Path(__file__).parents[2] / "models" / "llama.dynamo.static.onnx"
LARGE = {"hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256}
PARSE = (
    "for p in [model, *sorted(par.glob('rank_????.onnx'))]: onnx.load(p, load_external_data=False)"
)
VERIFY = "result = onnxpar.verify(model, par, weights={weights!r}); assert result.ok, result.text()"
CHILD = """
import resource, sys, time
from pathlib import Path
import onnx, onnxpar.api, onnxruntime, onnxpar.equivalence.verify
model, par = map(Path, sys.argv[1:])
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
Case = tuple[Path, dict[str, Any], str]
"""A model, how it is split, and which weights are compared."""


def tiny(folder: Path) -> Case:
    return TINY, {"mesh": "dp=2,tp=2", "preset": "hybrid"}, "all"


def llama(folder: Path) -> Case:
    llama_shape.write(folder / "llama.onnx", batch=8)
    return folder / "llama.onnx", {"mesh": "tp=8", "preset": "tensor-parallel"}, "all"


def step(folder: Path) -> Case:
    llama_shape.write(folder / "llama.onnx", batch=8, sparse=True)
    grad(folder / "llama.onnx", folder / "step.onnx", optimizer="adamw", loss="cross_entropy")
    return folder / "step.onnx", {"mesh": "dp=8", "preset": "zero2"}, "none"


def large(folder: Path, layers: int = 126) -> Case:
    llama_shape.write(folder / "large.onnx", layers=layers, batch=8, sparse=True, **LARGE)
    return folder / "large.onnx", {"mesh": "dp=8,tp=8", "preset": "hybrid"}, "none"


def deep(folder: Path) -> Case:
    return large(folder, layers=63)


CASES: dict[str, Callable[[Path], Case]] = {
    each.__name__: each for each in (tiny, llama, step, large, deep)
}


def measured(work: str, model: Path, par: Path) -> tuple[float, float]:
    """The seconds and the MiB of a process."""
    command = [sys.executable, "-c", CHILD.format(work=work), str(model), str(par)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, memory = map(float, out.split())
    return seconds, memory


def main() -> None:
    """Runs the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help="where models are written (4.4 GB for llama)")
    args = parser.parse_args()
    for name in args.case:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            model, how, weights = CASES[name](Path(scratch))
            par = Path(scratch) / "model.par"
            onnxpar.shard(model, par, **how)
            pairs = []
            for _ in range(args.pairs):
                parsed, _ = measured(PARSE, model, par)
                pairs.append((parsed, *measured(VERIFY.format(weights=weights), model, par)))
        seconds = [verified for _, verified, _ in pairs]
        ratios = [verified / parsed for parsed, verified, _ in pairs]
        print(
            f"{name}: {median(seconds):.2f} s, {median(ratios):.1f} times parsing, "
            f"{max(memory for *_, memory in pairs):.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
