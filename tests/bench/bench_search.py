"""Seconds from the file to the plan with --search auto, and how far plans may be from the best.

python tests/bench/bench_search.py [--only gpt2 bert] [--model FILE ...] [--json FILE]
    [--ranks 64 4096] [--training-ranks 8] [--share 0.6]
python tests/bench/bench_search.py --layers 100 [--pairs 3]

Each model of models/ and GPT-2 small (or each FILE) is planned over 64 and over 4096 ranks; each
training step of them over 8; each again with a limit on memory, that share of what the plan without
one needs. Seconds are CPU time from the file to the plan, each in a process of its own, so that
other load counts little, and nothing is known from the plan before. The end names the plans that
miss a target: 5 s over 64 ranks, 1.5 times that over 4096, 10 s for a step. With --layers: a
transformer of so many layers over 4096 ranks against 64, in pairs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import onnxpar
from onnxpar.base.errors import OnnxparError
from onnxpar.training import grad

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import llama_shape
from bench import model_shapes
from committed import DYNAMIC, MODELS, STATIC, TRAINING
from training.trajectories import expected

SMALL = "gpt2-small"
"""GPT-2 small in its real size, a batch of 8 texts of 128 tokens."""
MOST, MOST_OF_STEP, MOST_RATIO = 5.0, 10.0, 1.5
"""The targets, in seconds, and as a ratio of most ranks to fewest."""


def seconds(model: Path, **ranks: Any) -> tuple[float, Any]:
    """Seconds of CPU time from the file to the plan, and the plan, or the error."""
    start = time.process_time()
    try:
        plan: Any = onnxpar.plan(model, search="auto", **ranks)
    except OnnxparError as error:
        plan = error
    return time.process_time() - start, plan


def training_step(name: str, folder: Path) -> Path:
    """Writes the training step of a committed model, with AdamW."""
    told = expected(name.split(".")[0])
    step = folder / f"{name}.step.onnx"
    grad(MODELS / name, step, loss=told.kind, loss_of=told.output, optimizer="adamw")
    return step


def row(model: Path, share: float, ranks: int) -> Iterator[dict[str, Any]]:
    """Plans a model without and with a limit on memory; yields what came of it."""
    found = _alone(model, ranks, None)
    yield {**found, "limit": None}
    if share and "error" not in found:
        yield {**_alone(model, ranks, int(share * found["memory"])), "limit": share}


def _alone(model: Path, ranks: int, limit: int | None) -> dict[str, Any]:
    """What comes of planning, in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_planned, (model, ranks, limit))


def _planned(model: Path, ranks: int, limit: int | None) -> dict[str, Any]:
    limited = {} if limit is None else {"memory_limit": f"{limit}B"}
    took, plan = seconds(model, devices=ranks, **limited)
    found: dict[str, Any] = {"model": model.name, "ranks": ranks, "seconds": took}
    if isinstance(plan, OnnxparError):
        return {**found, "error": str(plan)}
    found |= {"predicted": plan.predicted.total, "mesh": str(plan.mesh)}
    found |= {"memory": sum(plan.memory.values()), "proof": plan.proof.to_json()}
    return found


def _line(one: dict[str, Any], few: float | None) -> str:
    limit = "" if one["limit"] is None else f"memory {one['limit']:.0%}"
    ratio = "" if few is None else f"{one['seconds'] / few:.2f}"
    start = f"{one['model']:34} {one['ranks']:5} {limit:11} {one['seconds']:6.1f} s {ratio:5}"
    if "error" in one:
        return f"{start} {one['error'][:90]}"
    proof = one["proof"]
    gap = f"{1 - proof['bound'] / proof['seconds']:.2%}" if proof["bound"] else "not proved"
    return f"{start} {one['predicted'] * 1e3:10.4f} ms, gap {gap}, {one['mesh']}"


def plans(args: argparse.Namespace) -> None:
    """Prints a line for each plan, and writes them as JSON if asked for."""
    given = [Path(name) for name in args.model]
    only = tuple(args.only)
    chosen = given or [MODELS / n for n in [*STATIC, *DYNAMIC] if n.startswith(only)]
    trained = [n for n in TRAINING if n.startswith(only) and not given]
    found: list[dict[str, Any]] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if SMALL.startswith(only) and not given:
            chosen.append(model_shapes.gpt2(Path(folder) / f"{SMALL}.onnx", batch=8, seq=128))
        for model in chosen:
            few: dict[float | None, float] = {}
            for ranks in args.ranks:
                for one in row(model, args.share, ranks):
                    line = _line(one, few.get(one["limit"]))
                    most = MOST_RATIO * few.setdefault(one["limit"], one["seconds"])
                    is_first = ranks == args.ranks[0]
                    missed += [line] * (one["seconds"] > (MOST if is_first else most))
                    print(line, flush=True)
                    found.append(one)
        for name in trained if args.training_ranks else ():
            for one in row(training_step(name, Path(folder)), args.share, args.training_ranks):
                print(_line(one, None), flush=True)
                missed += [_line(one, None)] * (one["seconds"] > MOST_OF_STEP)
                found.append(one)
    slowest = max(found, key=lambda one: one["seconds"])
    print(f"slowest: {_line(slowest, None)}")
    print(f"{len(missed)} of {len(found)} plans miss a target", *missed, sep="\n  ")
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
    os.environ.setdefault("ONNXPAR_MEASURE", "0")  # the first plan would measure the host
    if args.layers:
        layers(args.layers, args.pairs)
    else:
        plans(args)
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = max(resource.getrusage(one).ru_maxrss for one in who) / 1024
    print(f"peak RSS {peak:.0f} MB")


if __name__ == "__main__":
    main()
