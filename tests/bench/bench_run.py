"""What a run costs beside its compute: a tiny model in onnxruntime, and over ranks, in alternating
rounds.

    python tests/bench/bench_run.py [--ranks 1 2 4] [--states 0 24] [--rounds 15] [--runs 300]

A model multiplies 8 x 16 elements by a matrix, and negates states of 128 elements, which the ranks
keep and onnxruntime's session is fed. `bells` is what this machine allows: a call to as many
processes, and their answers, without a model; in `bells and onnxruntime`, each process runs its
rows of the product before it answers. Prints medians of the rounds in microseconds, with quartiles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, save

import onnxpar
from onnxpar.runtime.ranks.cores import own_cores
from onnxpar.runtime.ranks.doorbell import Doorbell

STATE = [2, 64]
Run = Callable[[], object]


def write(folder: Path, states: int, rows: int | str = 8) -> Path:
    """y = x @ w, and t = -s of each state."""
    names = [(f"s{i}", f"t{i}") for i in range(states)]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    nodes += [helper.make_node("Neg", [s], [t]) for s, t in names]

    def port(name: str, shape: list[int | str]) -> object:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "tiny",
        [port("x", [rows, 16]), *(port(s, STATE) for s, _ in names)],
        [port("y", [rows, 16]), *(port(t, STATE) for _, t in names)],
        [numpy_helper.from_array(np.ones((16, 16), np.float32), "w")],
    )
    path = folder / f"{rows}.{states}.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), path)
    return path


def microseconds(run: Run, runs: int) -> float:
    """Of one run."""
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - start) / runs * 1e6


def answer(fd: int, rank: int, ranks: int, spins: bool, model: Path | None) -> None:
    """Is a rank that only answers, or first runs its rows of the model's product."""
    bell = Doorbell(fd, ranks, spins)
    run = own_rows(model, ranks) if model else lambda: None
    while True:
        call = bell.wait_for_call()
        run()
        bell.answer(rank, call)


def own_rows(model: Path, ranks: int) -> Run:
    """A run of the product of a rank's rows, whose input and result stay where they are."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options)
    binding = session.io_binding()
    rows = 8 // ranks
    binding.bind_ortvalue_input(
        "x", ort.OrtValue.ortvalue_from_numpy(np.ones((rows, 16), np.float32))
    )
    binding.bind_ortvalue_output(
        "y", ort.OrtValue.ortvalue_from_numpy(np.empty((rows, 16), np.float32))
    )
    return lambda: session.run_with_iobinding(binding)


@contextmanager
def bells(ranks: int, model: Path | None = None) -> Iterator[Run]:
    """A run of so many ranks that only answer, or run their rows of the model's product."""
    bell = Doorbell.create(ranks, spins=len(own_cores()) > ranks)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=answer, args=(bell.fd, rank, ranks, bell.spins, model), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()

    def run() -> None:
        bell.call(again=True)
        while not bell.wait_for_answers(1.0):
            pass

    yield run
    for process in processes:
        process.kill()
        process.join()
    bell.close()


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--states", type=int, nargs="+", default=[0, 24])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=300)
    args = parser.parse_args()
    print("states  session                    median  (quartiles)")
    with tempfile.TemporaryDirectory() as name, ExitStack() as rung:
        rows = write(Path(name), 0, "n")
        bare = {f"{ranks} bells": rung.enter_context(bells(ranks)) for ranks in args.ranks} | {
            f"{ranks} bells and onnxruntime": rung.enter_context(bells(ranks, rows))
            for ranks in args.ranks
        }
        for states in args.states:
            _measure(args, Path(name), states, bare)


def _measure(args: argparse.Namespace, folder: Path, states: int, bare: dict[str, Run]) -> None:
    model = write(folder, states)
    x = {"x": np.ones((8, 16), np.float32)}
    first = {f"s{i}": np.ones(STATE, np.float32) for i in range(states)}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    whole = ort.InferenceSession(model, options)
    runs: dict[str, Run] = {"onnxruntime, 1 thread": lambda: whole.run(None, {**x, **first})} | bare
    sessions = []
    for ranks in args.ranks:
        par = folder / f"{states}.{ranks}.par"
        pairs = [(f"s{i}", f"t{i}") for i in range(states)]
        onnxpar.shard(model, par, devices=ranks, preset="data-parallel", states=pairs)
        session = onnxpar.InferenceSession(par)
        session.run(None, {**x, **first}, keep_states=True)
        sessions.append(session)
        runs[f"{ranks} rank{'s' * (ranks > 1)}"] = lambda session=session: session.run(
            None, x, keep_states=True
        )
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            found[name].append(microseconds(run, args.runs))
    for session in sessions:
        session.close()
    for name, each in found.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(f"{states:6}  {name:28} {middle:8.1f}  ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
