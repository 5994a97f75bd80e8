"""Predicted beside measured times of strategies of BERT, ResNet, and training steps of BERT, GPT-2
and ResNet, over 2 ranks of this machine.

    python tests/bench/bench_strategies.py [CASE ...] [--topology cluster.yaml] [--rounds 40]
        [--write times.json | --read times.json]

Each strategy is sharded and started once. Then all of a model run in turns, a few runs each, when
the machine does little else, and after some runs that do not count, as cores that have slept are
slow at first. Of all runs of a strategy, the time that a tenth are below is what counts: other work
only adds. Without --topology, `onnxpar calibrate` measures the machine first. `--write` adds the
measured times to a file, by the programs of the ranks; `--read` predicts again, and takes the times
of the same programs from it.

For each model: the strategies, the fastest first; Spearman's correlation of predicted and measured
times; the median error of predicted times; and how far what the search has chosen is behind the
fastest. A second correlation counts no order among strategies whose measured times are within 3 %
of the fastest of them, which is noise: it places them as predicted. Fails where the latter is below
0.95, the median error above 25 %, or what was chosen takes more than 1.03 of the fastest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar import InferenceSession
from onnxpar.cli.command_line import main as command
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.loader import Loader
from onnxpar.planner.options import Options
from onnxpar.report.compare_strategies import Candidate, Refused, try_candidate
from onnxpar.strategy.strategy import Strategy
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.strategy_cases import CASES, CHOSEN, Case

MODELS = Path(__file__).parents[2] / "models"
RANKS = 2
LEAST_CORRELATION = 0.95
MOST_ERROR = 0.25
MOST_BEHIND = 1.03
SAME = 1.03
"""Measured times that differ by less than this ratio differ by noise."""
WARM_UP = 5
RUNS = 5
"""In a turn."""
AWAKE = 0.03
"""Seconds of runs in a turn that do not count."""
QUANTILE = 0.1
MOMENT = 0.05
QUIET = 0.25
"""Cores at work in a quiet moment."""

Times = dict[str, float]
"""Measured seconds of a run, by the digest of the ranks' programs."""


@dataclass
class Entry:
    """A strategy of a model, under all names that lead to the same ranks' programs, whose digest
    `programs` is; and the seconds of a run, once they are measured."""

    names: list[str]
    candidate: Candidate
    programs: str
    par: Path
    measured: float = math.nan

    @property
    def predicted(self) -> float:
        """Seconds of a run by the cost model."""
        return self.candidate.predicted.total


def options_of(case: Case, topology: Topology) -> Iterator[tuple[str, Options]]:
    """Each strategy, the presets, and what the search chooses, over 2 ranks."""
    common = Options(topology=topology, dims={} if case.loss else case.dims)
    mesh = Mesh((("tp", RANKS),))
    for name, entries in case.strategies.items():
        strategy = Strategy.from_argument(entries)
        yield name, replace(common, strategy=strategy, search="propagation", mesh=mesh)
    for preset in case.presets:
        yield preset, replace(common, preset=preset, devices=RANKS)
    yield CHOSEN, replace(common, search="auto", devices=RANKS)


def entries_of(case: Case, topology: Topology, folder: Path) -> list[Entry]:
    """Shards the model by each strategy that applies."""
    model = MODELS / f"{case.model}.onnx"
    if case.loss:
        step = folder / "step.onnx"
        grad(model, step, loss=case.loss, optimizer="adamw", dims=case.dims)
        model = step
    known: dict[str, Entry] = {}
    for number, (name, options) in enumerate(options_of(case, topology)):
        candidate = try_candidate(model, options, Loader(model))
        if isinstance(candidate, Refused):
            print(f"{name} does not apply: {candidate.reason}")
            continue
        par = folder / f"{number}.par"
        sharder.shard(model, par, options)
        programs = digest(par)
        if programs in known:
            known[programs].names.append(name)
        else:
            known[programs] = Entry([name], candidate, programs, par)
    return list(known.values())


def digest(par: Path) -> str:
    """A digest of the programs of all ranks."""
    found = hashlib.sha256()
    for path in sorted(par.glob("rank_*.onnx")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def start_session(par: Path, stack: ExitStack) -> Callable[[], object]:
    """Starts a session; returns what runs it."""
    session = stack.enter_context(InferenceSession(par, one_thread()))
    feeds = feeds_of(session)
    return lambda: session.run(None, feeds)


def start_step(par: Path, stack: ExitStack) -> Callable[[], object]:
    """Starts a training step; returns what takes one step."""
    trainer = stack.enter_context(Trainer(par, sess_options=one_thread()))
    feeds = feeds_of(trainer.session)
    batch = {port.name: feeds[port.name] for port in trainer.data}
    return lambda: trainer.step(batch, 1e-4)


def one_thread() -> ort.SessionOptions:
    """Options of a session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return options


def feeds_of(session: InferenceSession) -> dict[str, Any]:
    """Normal floats, and the integers 0 and 1."""
    draw = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for port in session.get_inputs():
        shape = tuple(int(size or 0) for size in port.shape)
        is_float = port.type == "tensor(float)"
        found[port.name] = (
            draw.standard_normal(shape, np.float32) if is_float else draw.integers(0, 2, shape)
        )
    return found


def measure(entries: Sequence[Entry], is_step: bool, rounds: int) -> None:
    """Starts the ranks of all strategies, of one thread each, and lets them run in turns, in
    another order each round."""
    draw = random.Random(0)
    start = start_step if is_step else start_session
    with ExitStack() as stack:
        runs = [start(entry.par, stack) for entry in entries]
        for run in runs * WARM_UP:
            run()
        seconds: list[list[float]] = [[] for _ in runs]
        for _ in range(rounds):
            for i in draw.sample(range(len(runs)), len(runs)):
                seconds[i] += turn(runs[i])
    for entry, found in zip(entries, seconds, strict=True):
        entry.measured = float(np.quantile(found, QUANTILE))


def recall(entries: Sequence[Entry], known: Times) -> None:
    """Takes the times of strategies whose programs were measured before; names the others."""
    for entry in entries:
        entry.measured = known.get(entry.programs, math.nan)
        if math.isnan(entry.measured):
            print(f"{' = '.join(entry.names)}: {entry.predicted * 1e3:.2f} ms, never measured")


def turn(run: Callable[[], object]) -> list[float]:
    """The seconds of RUNS runs on a quiet machine, after some that do not count."""
    wait_for_quiet()
    awake = time.perf_counter() + AWAKE
    for _ in range(WARM_UP):
        run()
    while time.perf_counter() < awake:
        run()
    moments = [time.perf_counter()]
    for _ in range(RUNS):
        run()
        moments.append(time.perf_counter())
    return [end - start for start, end in pairwise(moments)]


def wait_for_quiet(moments: int = 6) -> None:
    """Waits until the cores had little to do for a moment, but not long."""
    busy = busy_seconds()
    for _ in range(moments):
        time.sleep(MOMENT)
        before, busy = busy, busy_seconds()
        if busy - before <= MOMENT * QUIET:
            return


def busy_seconds() -> float:
    """What the cores have worked until now, in all."""
    user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def table(entries: Sequence[Entry]) -> Iterator[str]:
    """The strategies, the fastest first."""
    from scipy.stats import rankdata  # takes seconds, which tests of other benchmarks need not

    predicted = rankdata([entry.predicted for entry in entries])
    measured = rankdata([entry.measured for entry in entries])
    heads = f"{'predicted':>11}{'measured':>10}{'ratio':>7}{'ranks':>11}"
    yield f"{'strategy':<31}{'communication':>13}{heads}"
    for i in np.argsort(measured):
        entry = entries[i]
        sending = entry.candidate.predicted.communication
        yield (
            f"{' = '.join(entry.names):<36}{sending * 1e3:>8.2f}{entry.predicted * 1e3:>11.2f}"
            f"{entry.measured * 1e3:>10.2f}{entry.measured / entry.predicted:>7.2f}"
            f"{predicted[i]:>6g}{measured[i]:>5g}"
        )


def places(entries: Sequence[Entry]) -> list[float]:
    """The places by measured time, in which those that noise may have put in this order stand as
    predicted: times that are less than SAME of the fastest among them."""
    order = sorted(range(len(entries)), key=lambda i: entries[i].measured)
    group, first = [0] * len(entries), order[0]
    for i in order:
        first = i if entries[i].measured > SAME * entries[first].measured else first
        group[i] = first
    keys = [(entries[group[i]].measured, entries[i].predicted) for i in range(len(entries))]
    return [float(sorted(keys).index(key)) for key in keys]


def verdict(entries: Sequence[Entry]) -> tuple[str, bool]:
    """The last line of a table, and whether all limits are kept."""
    from scipy.stats import spearmanr

    predicted, measured = np.array([(entry.predicted, entry.measured) for entry in entries]).T
    plain = float(spearmanr(predicted, measured).statistic)
    correlation = float(spearmanr(predicted, places(entries)).statistic)
    error = float(np.median(np.abs(predicted / measured - 1)))
    chosen = [entry.measured for entry in entries if CHOSEN in entry.names]
    behind = min(chosen, default=math.nan) / min(measured)
    text = (
        f"Spearman's correlation {plain:.3f}, within noise {correlation:.3f}; median error "
        f"{error:.0%}; {CHOSEN}: {behind:.3f} of the fastest"
    )
    is_kept = correlation >= LEAST_CORRELATION and error <= MOST_ERROR and behind <= MOST_BEHIND
    return text, is_kept


def compare(case: Case, topology: Topology, rounds: int, known: Times | None) -> tuple[bool, Times]:
    """Prints the table of a model, with times that are known, or else measured; returns whether
    all limits are kept, and the times."""
    with tempfile.TemporaryDirectory() as folder:
        entries = entries_of(case, topology, Path(folder))
        if known is None:
            measure(entries, case.loss is not None, rounds)
        else:
            recall(entries, known)
    entries = [entry for entry in entries if not math.isnan(entry.measured)]
    text, is_kept = verdict(entries)
    print(f"{case}: milliseconds of a run over {RANKS} ranks")
    print("\n".join(table(entries)))
    print(f"{text}\n", flush=True)
    return is_kept, {entry.programs: entry.measured for entry in entries}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--topology", help="as onnxpar calibrate writes it, on this machine")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--write", type=Path, help="file to which measured times are added")
    parser.add_argument("--read", type=Path, help="file with times; nothing is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.topology or f"{folder}/cluster.yaml"
        if options.topology is None and command(["calibrate", "-o", path]) != 0:
            return 1
        topology = Topology.read(path)
    known = json.loads(options.read.read_text()) if options.read else None
    all_kept = True
    for name in options.cases or CASES:
        is_kept, times = compare(CASES[name], topology, options.rounds, known)
        all_kept = all_kept and is_kept
        if options.write:
            before = json.loads(options.write.read_text()) if options.write.exists() else {}
            options.write.write_text(json.dumps(before | times, indent=1))
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
