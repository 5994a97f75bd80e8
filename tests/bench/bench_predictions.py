"""Do the times that a plan for this machine promises come true, and is it right about whether
splitting pays?

    python tests/bench/bench_predictions.py [MODEL ...] [--ranks 1 2 4 8] [--batch 1 8] [--rounds 8]
        [--json FILE]

Each model, by default all of models/ that a search can split, is sharded over each number of ranks
with what a user gets who names nothing else; a model that is a training step keeps its states on
the ranks. Runs of its session and of onnxruntime on the unsplit model, with all cores, take turns.
Of each, the time that a tenth of the runs are below is what counts: other work only adds. Prints
predicted and measured times of both, and, in the end, in how many cases the plan said rightly
whether splitting is faster or slower than onnxruntime, the median error of its times, and how far
what it takes for the best number of ranks is behind the best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxpar
from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.states.first_states import ZERO

ROOT = Path(__file__).parents[2]
QUANTILE = 0.1
SAME = 1.05
"""Times that differ by a smaller factor are neither faster nor slower."""
LEAST = 0.05
"""Seconds of runs of each kind in a round, at least."""


@dataclass(frozen=True)
class Case:
    """Seconds, predicted and measured, of a model over some ranks and of onnxruntime alone."""

    model: str
    batch: int
    ranks: int
    predicted: float
    measured: float
    alone_predicted: float
    alone: float

    @property
    def error(self) -> float:
        """By what fraction the predicted time is off."""
        return abs(self.predicted / self.measured - 1)

    @property
    def is_right(self) -> bool:
        """True if the plan says rightly whether ranks are faster than onnxruntime alone."""
        gain = self.alone / self.measured
        if 1 / SAME < gain < SAME:
            return True
        return (gain > 1) == (self.alone_predicted > self.predicted)

    def line(self) -> str:
        """The case as a line of a table."""
        told = [self.predicted, self.measured, self.alone_predicted, self.alone]
        marks = "" if self.is_right else "  wrong"
        return (
            f"{self.model:<34}{self.batch:>6}{self.ranks:>6}"
            + "".join(f"{seconds * 1e3:>11.3f}" for seconds in told)
            + f"{self.predicted / self.measured - 1:>+8.0%}{marks}"
        )


HEAD = (
    f"{'model':<34}{'batch':>6}{'ranks':>6}{'predicted':>11}{'measured':>11}"
    f"{'alone pr.':>11}{'alone':>11}{'off':>8}"
)


def models() -> list[Path]:
    """The models of the repository that are no training steps or parts of language models."""
    return sorted((ROOT / "models").glob("*.dynamo.dynamic.onnx")) + sorted(
        (ROOT / "models" / "ml").glob("*.onnx")
    )


def dims_of(path: Path, batch: int) -> dict[str, int]:
    """A size for each symbol of a model's inputs: the first one is the batch."""
    found: dict[str, int] = {}
    proto = onnx.load(path, load_external_data=False)
    for port in proto.graph.input:
        for axis, dim in enumerate(port.type.tensor_type.shape.dim):
            if dim.dim_param and dim.dim_param not in found:
                found[dim.dim_param] = batch if axis == 0 and not found else 16
    return found


def cases(path: Path, batch: int, ranks: Sequence[int], rounds: int) -> Iterator[Case]:
    """Measures a model over each number of ranks."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    unsplit = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                plan = onnxpar.shard(
                    path, Path(folder) / "m.par", devices=count, dims=dims_of(path, batch)
                )
            except OnnxparError as error:
                print(f"{path.stem}: {error}"[:120], file=sys.stderr)
                return
            assert plan.predicted is not None
            with onnxpar.InferenceSession(Path(folder) / "m.par") as session:
                specs = Bundle.load(Path(folder) / "m.par").input_specs
                sizes = [[s if isinstance(s, int) else batch for s in shape] for *_, shape in specs]
                ports = [(n, d, tuple(s)) for (n, d, _), s in zip(specs, sizes, strict=True)]
                ranges = {n: plan.ranges[n] for n, *_ in ports if n in plan.ranges}
                feeds = make_feeds(ports, ranges)
                first = {
                    port.name: np.zeros(port.shape or (), port.dtype)
                    for port in plan.inputs
                    if plan.initial.get(port.name) == ZERO
                }
                runs = [
                    partial(session.run, None, feeds, keep_states=bool(plan.states)),
                    partial(unsplit.run, None, {**feeds, **first}),
                ]
                each = in_turns(runs, rounds)
            told = plan.predicted
            yield Case(path.stem, batch, count, told.total, each[0], told.one_rank, each[1])


def in_turns(runs: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The seconds of each, of which rounds alternate."""
    taken: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for found, run in zip(taken, runs, strict=True):
            end = time.perf_counter() + LEAST
            while time.perf_counter() < end:
                start = time.perf_counter()
                run()
                if turn:  # the first round warms up
                    found.append(time.perf_counter() - start)
    return [float(np.quantile(found, QUANTILE)) for found in taken]


def summary(found: Sequence[Case]) -> Iterator[str]:
    """How far predictions came true."""
    right = sum(case.is_right for case in found)
    yield f"faster or slower: right in {right} of {len(found)} ({right / len(found):.0%})"
    yield f"median error of times: {statistics.median(case.error for case in found):.0%}"
    alone = [abs(case.alone_predicted / case.alone - 1) for case in found]
    yield f"median error of onnxruntime's own times: {statistics.median(alone):.0%}"
    behind = []
    for key in {(case.model, case.batch) for case in found}:
        each = [case for case in found if (case.model, case.batch) == key]
        ways = [(c.predicted, c.measured) for c in each]
        ways.append((each[0].alone_predicted, min(c.alone for c in each)))
        behind.append(min(ways)[1] / min(measured for _, measured in ways))
    within = sum(factor <= SAME for factor in behind)
    yield (
        f"what is predicted to be fastest is within {SAME - 1:.0%} of the fastest in {within} of "
        f"{len(behind)}, and {statistics.median(behind):.2f} of it in the median"
    )


def main() -> None:
    """Runs, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: list[Case] = []
    print(HEAD)
    for path in args.models or models():
        for batch in args.batch:
            for case in cases(path, batch, args.ranks, args.rounds):
                found.append(case)
                print(case.line(), flush=True)
    print("\n".join(summary(found)))
    if args.json:
        args.json.write_text(json.dumps([asdict(case) for case in found], indent=1))


if __name__ == "__main__":
    main()
