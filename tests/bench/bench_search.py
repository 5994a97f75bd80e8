"""Seconds from the file to the plan with --search auto, and how far plans may be from the best.

python tests/bench/bench_search.py [--only gpt2 bert] [--model FILE ...] [--json FILE]
    [--ranks 64 4096] [--training-ranks 8] [--share 0.6]
python tests/bench/bench_search.py --layers 100 [--pairs 3]

Each model of models/ (or each FILE) is planned over 64 and over 4096 ranks; each training step of
them over 8; each again with a limit on memory, that share of what the plan without one needs.
Seconds are CPU time of the process, so that other load counts little. With --layers: a transformer
of so many layers over 4096 ranks against 64, in pairs.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import onnxpar
from onnxpar.errors import OnnxparError
from onnxpar.training import grad

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import llama_shape
from committed import DYNAMIC, MODELS, STATIC, TRAINING
from training.trajectories import expected


def seconds(model: Path, **ranks: Any) -> tuple[float, Any]:
    """Seconds of CPU time from the file to the plan, and the plan, or the error."""
    start = time.process_time()
    try:
        plan: Any = onnxpar.plan(model, search="auto", **ranks)
    except OnnxparError as error:
        plan = error
    return time.process_time() - start, plan


def training_step(name: str, folder: Path) -> Path:
    """Writes the training step of a committed model, with Adam."""
    told = expected(name.split(".")[0])
    step = folder / f"{name}.step.onnx"
    grad(MODELS / name, step, loss=told.kind, loss_of=told.output, optimizer="adam")
    return step


def row(model: Path, share: float, ranks: int) -> Iterator[dict[str, Any]]:
    """Plans a model without and with a limit on memory; yields what came of it."""
    took, plan = seconds(model, devices=ranks)
    yield {"model": model.name, "ranks": ranks, "limit": None, **_found(took, plan)}
    if isinstance(plan, OnnxparError) or not share:
        return
    most = sum(plan.memory.values())
    took, within = seconds(model, devices=ranks, memory_limit=f"{int(share * most)}B")
    yield {"model": model.name, "ranks": ranks, "limit": share, **_found(took, within)}


def _found(took: float, plan: Any) -> dict[str, Any]:
    if isinstance(plan, OnnxparError):
        return {"seconds": took, "error": str(plan)}
    return {
        "seconds": took,
        "predicted": plan.predicted.total,
        "bound": getattr(plan.predicted, "bound", None),
        "mesh": str(plan.mesh),
        "memory": sum(plan.memory.values()),
    }


def _line(one: dict[str, Any], few: float | None) -> str:
    limit = "" if one["limit"] is None else f"memory {one['limit']:.0%}"
    ratio = "" if few is None else f"{one['seconds'] / few:.2f}"
    start = f"{one['model']:34} {one['ranks']:5} {limit:11} {one['seconds']:6.1f} s {ratio:5}"
    if "error" in one:
        return f"{start} {one['error'][:90]}"
    bound = one["bound"]
    gap = "not proved" if bound is None else f"{1 - bound / one['predicted']:.2%}"
    return f"{start} {one['predicted'] * 1e3:10.4f} ms, gap {gap}, {one['mesh']}"


def plans(args: argparse.Namespace) -> None:
    """Prints a line for each plan, and writes them as JSON if asked for."""
    given = [Path(name) for name in args.model]
    chosen = given or [MODELS / n for n in [*STATIC, *DYNAMIC] if n.startswith(tuple(args.only))]
    trained = [n for n in TRAINING if n.startswith(tuple(args.only)) and not given]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in chosen:
            few: dict[float | None, float] = {}
            for ranks in args.ranks:
                for one in row(model, args.share, ranks):
                    print(_line(one, few.get(one["limit"])), flush=True)
                    few.setdefault(one["limit"], one["seconds"])
                    found.append(one)
        for name in trained if args.training_ranks else ():
            for one in row(training_step(name, Path(folder)), args.share, args.training_ranks):
                print(_line(one, None), flush=True)
                found.append(one)
    slowest = max(found, key=lambda one: one["seconds"])
    print(f"slowest: {_line(slowest, None)}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


def layers(count: int, pairs: int) -> None:
    """Runs the pairs: on square meshes, and with the mesh to be found as well."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "llama.onnx"
        sizes = {"hidden": 64, "heads": 16, "kv_heads": 8, "ffn": 96, "vocab": 64, "batch": 128}
        llama_shape.write(model, layers=count, **sizes)
        for what, few, many in (
            ("square meshes", {"mesh": "dp=8,tp=8"}, {"mesh": "dp=64,tp=64"}),
            ("the best mesh", {"devices": 64}, {"devices": 4096}),
        ):
            each = [(seconds(model, **few)[0], seconds(model, **many)[0]) for _ in range(pairs)]
            for one, other in each:
                print(f"{what}: 64 ranks {one:.1f} s, 4096 ranks {other:.1f} s")
            print(f"median ratio {median(b / a for a, b in each):.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--model", nargs="+", default=[])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--training-ranks", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--json")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args(argv)
    if args.layers:
        layers(args.layers, args.pairs)
    else:
        plans(args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak RSS {peak:.0f} MB")


if __name__ == "__main__":
    main()
