"""Time of a training step of a mixture whose experts compute their own tokens, against one whose
experts all compute all tokens.

    python tests/bench/bench_experts.py [--tokens 2048] [--width 256] [--hidden 1024] [--pairs 9]
    python tests/bench/bench_experts.py --inference [--experts 8] [--chosen 2] ...
    python tests/bench/bench_experts.py --ranks 4 [--experts 8] ...

One rank; of 8 experts, a router chooses 2 for each token. Both steps are taken in turns, so that
what else the machine does falls on both. With --inference, two ranks of half of the tokens each run
the model: with the rows of each expert apart, and with those of all experts in one tensor. The
times are then those of the CPU, of both ranks. With --ranks, ranks exchange the rows of chosen
experts in one step, and gather all rows in the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import onnx
from lowering.mixtures import SLOW, feeds_of
from lowering.mixtures import mixture as routed
from training.expert_steps import behind_layer, mixture
from training.steps import ThreadTrainer, batches, shard, write_step

import onnxpar
from onnxpar.compiler.plan import Plan
from onnxpar.lowering import pair_program
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy import expert_parallel

EXPERTS = 8
FINDER = "onnxpar.passes.lower.compact_experts.find_expert_rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tokens", 2048), ("width", 256), ("hidden", 1024), ("pairs", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("experts", EXPERTS), ("chosen", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help="with --inference")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--ranks", type=int)
    args = parser.parse_args()
    if args.inference:
        compare_forms(args)
        return
    if args.ranks:
        compare_dispatch(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        text = mixture(EXPERTS, args.tokens, args.width, args.hidden)
        step = write_step(text, Path(folder), "mse")
        chosen, plan = shard(step, "data-parallel 1")
        with patch(FINDER, return_value=iter(())):
            dense, _ = shard(step, "data-parallel dp=1")
        few, all_rows = step_times(chosen, dense, plan, args.pairs)
    print(f"chosen rows {few * 1e3:.0f} ms, all rows {all_rows * 1e3:.0f} ms a step")
    print(f"all rows take {all_rows / few:.2f} times as long")


def compare_dispatch(args: argparse.Namespace) -> None:
    """Prints the bytes and times of a step whose ranks exchange rows, or gather all."""
    with tempfile.TemporaryDirectory() as folder:
        text = behind_layer(mixture(args.experts, args.tokens, args.width, args.hidden))
        step = write_step(text, Path(folder), "mse")
        layout = f"expert-parallel {args.ranks}"
        exchanged, plan = shard(step, layout, topology=SLOW)
        with patch(f"{expert_parallel.__name__}.exchanged_mixtures", return_value=()):
            gathered, other = shard(step, layout.replace(" ", " ep="), topology=SLOW)
        few, all_rows = step_times(exchanged, gathered, plan, args.pairs)
    first, second = (sum(c.bytes for c in each.collectives) for each in (plan, other))
    print(f"exchange {few * 1e3:.0f} ms, gather {all_rows * 1e3:.0f} ms a step")
    ratio = few / all_rows
    print(f"the exchange takes {ratio:.2f} of the time, with {first / second:.2f} of the bytes")


def step_times(first: Path, second: Path, plan: Plan, pairs: int) -> tuple[float, float]:
    """Median seconds of a step of two sharded folders, which take steps in turns."""
    (batch,) = batches(plan, 1)
    with ThreadTrainer(first) as one, ThreadTrainer(second) as other:
        seconds: dict[ThreadTrainer, list[float]] = {one: [], other: []}
        for _ in range(pairs + 1):
            for trainer, taken in seconds.items():
                start = time.perf_counter()
                trainer.step(batch, 1e-3)
                taken.append(time.perf_counter() - start)
    one_time, other_time = (statistics.median(taken[1:]) for taken in seconds.values())
    return one_time, other_time


def compare_forms(args: argparse.Namespace) -> None:
    """Prints the times of a run with experts' rows apart and joined."""
    random = np.random.default_rng(0)
    draws = (random.permutation(args.experts)[: args.chosen] for _ in range(args.tokens))
    feeds = feeds_of(np.stack(list(draws)), width=args.width)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        sizes = {"width": args.width, "hidden": args.hidden, "out": args.width}
        onnx.save(routed(args.experts, args.chosen, args.tokens, **sizes), model)
        pars = [Path(folder) / f"{most}.par" for most in (args.experts, 0)]
        for par, most in zip(pars, (args.experts, 0), strict=True):
            with patch(f"{pair_program.__name__}.MOST_APART", most):
                onnxpar.shard(model, par, devices=2, preset="data-parallel")
        with ThreadSession(pars[0]) as apart, ThreadSession(pars[1]) as joined:
            seconds: dict[ThreadSession, list[float]] = {apart: [], joined: []}
            for _ in range(args.pairs + 1):
                for session, taken in seconds.items():
                    start = time.process_time()
                    session.run(None, feeds)
                    taken.append(time.process_time() - start)
            apart_time, joined_time = (statistics.median(s[1:]) for s in seconds.values())
    print(f"apart {apart_time * 1e3:.2f} ms, joined {joined_time * 1e3:.2f} ms a run")
    print(f"joined rows take {joined_time / apart_time:.2f} times as long")


if __name__ == "__main__":
    main()
