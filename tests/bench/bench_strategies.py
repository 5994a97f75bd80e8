"""Predicted beside measured times of strategies of BERT, ResNet and a training step of BERT, over
2 ranks of this machine.

    python tests/bench/bench_strategies.py [--topology cluster.yaml] [--rounds 40]
        [--bert models/bert.legacy.dynamic.onnx batch=64,seq=16]
        [--resnet models/resnet.legacy.dynamic.onnx batch=8] [--step MODEL SIZES]

Each strategy is sharded and started once. Then all of a model run in turns, a few runs each, when
the machine does little else, and after some runs that do not count, as cores that have slept are
slow at first. Of all runs of a strategy, the time that a tenth are below is what counts: other work
only adds. Without --topology, `onnxpar calibrate` measures the machine first.

For each model: the strategies, the fastest first; Spearman's correlation of predicted and measured
times; the median error of predicted times; and how far what the search has chosen is behind the
fastest. Fails where a correlation is below 0.8, or what was chosen takes more than 1.1 of the
fastest.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from scipy.stats import rankdata, spearmanr

from onnxpar import InferenceSession
from onnxpar.cli.command_line import main as command
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.pipeline import pipeline
from onnxpar.pipeline.options import Options
from onnxpar.report.candidates import Candidate, Refused, try_candidate
from onnxpar.strategy.strategy import Strategy
from onnxpar.trainer.trainer import Trainer
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models"
RANKS = 2
LEAST_CORRELATION = 0.8
MOST_BEHIND = 1.1
WARM_UP = 5
RUNS = 5
"""In a turn."""
AWAKE = 0.03
"""Seconds of runs in a turn that do not count."""
QUANTILE = 0.1
MOMENT = 0.05
QUIET = 0.25
"""Cores at work in a quiet moment."""
PRESETS = ("data-parallel", "tensor-parallel", "sequence-parallel")
STEP_PRESETS = ("data-parallel", "zero1", "zero3", "tensor-parallel")
CHOSEN = "auto"

Entries = Mapping[str, Mapping[str, Any]]
COLUMNS, SUMS = {"n": "tp"}, {"k": "tp"}
BATCH = [["tp", 1, 1], [1, 1]]
WHOLE = [[1, 1, 1], [1, 1]]
HEADS = {f"*/attention/self/{name}/MatMul": COLUMNS for name in ("query", "key", "value")}
MLP = {"*/intermediate/dense/MatMul": COLUMNS}
BERT: dict[str, Entries] = {
    "whole": {},
    "heads": {"shard": HEADS},
    "MLPs": {"shard": MLP},
    "heads and MLPs": {"shard": HEADS | MLP},
    "heads and MLP of layer 1": {
        "shard": {f"*layer.1{name[1:]}": split for name, split in (HEADS | MLP).items()}
    },
    "MLP of layer 0": {"shard": {"*layer.0/intermediate/dense/MatMul": COLUMNS}},
    "columns of all products": {"shard": {"*layer.*/MatMul": COLUMNS}},
    "columns of heads, sums of the rest": {"shard": {"*layer.*/dense/MatMul": SUMS} | HEADS},
    "rows of the table of words": {"shard": {"*word_embeddings/Gather": {"v": "tp"}}},
    "width of the table of words": {"shard": {"*word_embeddings/Gather": {"d1": "tp"}}},
    "sequence": {"tensors": {"input_ids": [1, "tp"]}},
    "batch, MLPs whole": {
        "shard": {
            "*/attention/self/query/MatMul": BATCH,
            "*/intermediate/dense/MatMul": WHOLE,
            "*layer.*/output/dense/MatMul": WHOLE,
        }
    },
    "batch, columns of MLPs": {"shard": {"*/attention/self/query/MatMul": BATCH} | MLP},
}

IMAGES, HEIGHT, ALL = [["tp", 1, 1, 1]], [[1, 1, "tp", 1]], [[1, 1, 1, 1]]
OUT, INTO = {"o": "tp"}, {"c": "tp"}
RESNET: dict[str, Entries] = {
    "whole": {},
    "height": {"tensors": {"pixel_values": HEIGHT[0]}},
    "width": {"tensors": {"pixel_values": [1, 1, 1, "tp"]}},
    "output channels": {"shard": {"*stages.*Conv": OUT}},
    "input channels": {"shard": {"*stages.*Conv": INTO}},
    "channels within blocks": {
        "shard": {"*/layer/layer.0/*Conv": OUT, "*/layer/layer.1/*Conv": INTO}
    },
    "channels of stage 3": {"shard": {"*stages.3/*layer.0/*Conv": OUT}},
    "3x3 channels of stages 2, 3": {"shard": {"*stages.[23]/*/layer/layer.1/*Conv": OUT}},
    "batch of stage 0": {"shard": {"*stages.0/*Conv": IMAGES, "*stages.1/*Conv": ALL}},
    "batch, from stage 2 on channels": {
        "shard": {"*stages.[01]/*Conv": IMAGES, "*stages.[23]/*Conv": OUT}
    },
    "height, from stage 2 on batch": {
        "shard": {"*stages.[01]/*Conv": HEIGHT, "*stages.[23]/*Conv": IMAGES}
    },
    "batch, from stage 2 on whole": {
        "shard": {"*stages.[01]/*Conv": IMAGES, "*stages.[23]/*Conv": ALL}
    },
}


@dataclass
class Entry:
    """A strategy of a model, under all names that lead to the same ranks' programs, and the seconds
    of its runs."""

    names: list[str]
    candidate: Candidate
    run: Callable[[], object]
    runs: list[float] = field(default_factory=list)

    @property
    def predicted(self) -> float:
        """Seconds of a run by the cost model."""
        return self.candidate.predicted.total

    @property
    def measured(self) -> float:
        """Seconds of a run that little else disturbed."""
        return float(np.quantile(self.runs, QUANTILE))


def options_of(
    strategies: Mapping[str, Entries], common: Options, presets: Sequence[str] = PRESETS
) -> Iterator[tuple[str, Options]]:
    """Each strategy, the presets, and what the search chooses, over 2 ranks."""
    mesh = Mesh((("tp", RANKS),))
    for name, entries in strategies.items():
        strategy = Strategy.given(entries)
        yield name, replace(common, strategy=strategy, search="propagation", mesh=mesh)
    for preset in presets:
        yield preset, replace(common, preset=preset, devices=RANKS)
    yield CHOSEN, replace(common, search="auto", devices=RANKS)


def start(
    model: Path, options: Mapping[str, Options], folder: Path, stack: ExitStack, is_step: bool
) -> Iterator[Entry]:
    """Shards the model by each strategy, and starts its ranks, of one thread each, until the end of
    the stack."""
    known: dict[bytes, Entry] = {}
    for number, (name, of) in enumerate(options.items()):
        candidate = try_candidate(model, of)
        if isinstance(candidate, Refused):
            print(f"{name} does not apply: {candidate.reason}")
            continue
        par = folder / f"{number}.par"
        pipeline.shard(model, par, of)
        programs = b"".join(path.read_bytes() for path in sorted(par.glob("rank_*.onnx")))
        if programs in known:
            known[programs].names.append(name)
            continue
        run = start_step(par, stack) if is_step else start_session(par, stack)
        known[programs] = Entry([name], candidate, run)
        yield known[programs]


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


def measure(entries: list[Entry], rounds: int) -> None:
    """Lets all run in turns, in another order each round."""
    draw = random.Random(0)
    for entry in entries * WARM_UP:
        entry.run()
    for _ in range(rounds):
        for entry in draw.sample(entries, len(entries)):
            wait_for_quiet()
            awake = time.perf_counter() + AWAKE
            while time.perf_counter() < awake:
                entry.run()
            for _ in range(RUNS):
                start = time.perf_counter()
                entry.run()
                entry.runs.append(time.perf_counter() - start)


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


def bench(
    model: Path, dims: str, strategies: Mapping[str, Entries], topology: Topology, rounds: int
) -> bool:
    """Prints the table of a model; whether both limits are kept."""
    common = Options(topology=topology, dims=sizes_of(dims))
    return compare(model, f"{model.name}, {dims}", dict(options_of(strategies, common)), rounds)


def bench_step(model: Path, dims: str, topology: Topology, rounds: int) -> bool:
    """Prints the table of a training step of a model; whether both limits are kept."""
    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / "step.onnx"
        grad(model, step, loss="softmax-cross-entropy", optimizer="adamw", dims=sizes_of(dims))
        options = dict(options_of({}, Options(topology=topology), STEP_PRESETS))
        return compare(step, f"training step of {model.name}, {dims}", options, rounds, True)


def sizes_of(dims: str) -> dict[str, int]:
    """The sizes in a text such as batch=8,seq=16."""
    return {name: int(size) for name, size in (part.split("=") for part in dims.split(","))}


def compare(
    model: Path, what: str, options: Mapping[str, Options], rounds: int, is_step: bool = False
) -> bool:
    """Prints the table of these strategies; whether both limits are kept."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        entries = list(start(model, options, Path(folder), stack, is_step))
        measure(entries, rounds)
    predicted, measured = np.array([(entry.predicted, entry.measured) for entry in entries]).T
    correlation = float(spearmanr(predicted, measured).statistic)
    error = float(np.median(np.abs(predicted / measured - 1)))
    chosen = next(entry for entry in entries if CHOSEN in entry.names)
    behind = chosen.measured / min(measured)
    print(f"{what}: milliseconds of a run over {RANKS} ranks")
    print("\n".join(table(entries)))
    print(
        f"Spearman's correlation {correlation:.3f}; median error {error:.0%}; {CHOSEN}: "
        f"{behind:.3f} of the fastest\n"
    )
    sys.stdout.flush()
    return correlation >= LEAST_CORRELATION and behind <= MOST_BEHIND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", help="as onnxpar calibrate writes it, on this machine")
    parser.add_argument("--rounds", type=int, default=40)
    bert, resnet = MODELS / "bert.legacy.dynamic.onnx", MODELS / "resnet.legacy.dynamic.onnx"
    given = ("MODEL", "SIZES")
    parser.add_argument("--bert", nargs=2, metavar=given, default=(bert, "batch=64,seq=16"))
    parser.add_argument("--resnet", nargs=2, metavar=given, default=(resnet, "batch=8"))
    parser.add_argument("--step", nargs=2, metavar=given, default=(bert, "batch=64,seq=16"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.topology or f"{folder}/cluster.yaml"
        if options.topology is None and command(["calibrate", "-o", path]) != 0:
            return 1
        topology = Topology.read(path)
    cases = [(options.bert, BERT), (options.resnet, RESNET)]
    kept = [
        bench(Path(model), dims, strategies, topology, options.rounds)
        for (model, dims), strategies in cases
    ]
    kept.append(bench_step(Path(options.step[0]), options.step[1], topology, options.rounds))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
