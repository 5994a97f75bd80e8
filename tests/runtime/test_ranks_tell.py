"""What ranks that a launcher starts tell on its terminal, while their output goes to their logs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from onnxpar.cli.command_line import main

pytestmark = pytest.mark.processes

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
    table (int64[4] i) => (float[4,8] y) { y = Gather(t, i) }"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    model = onnx.parser.parse_model(TEXT)
    table = np.arange(80, dtype=np.float32).reshape(10, 8)
    model.graph.initializer.append(numpy_helper.from_array(table, "t"))
    onnx.save(model, made / "m.onnx")
    for preset in ("data-parallel", "tensor-parallel"):
        ways = ["--devices", "2", "--preset", preset, "-o", str(made / f"{preset}.par")]
        assert main(["shard", str(made / "m.onnx"), *ways]) == 0
    np.savez(made / "in.npz", i=np.int64([0, 1, 9, 3]))
    np.savez(made / "far.npz", i=np.int64([0, 1, 10, 3]))
    np.savez(made / "few.npz", i=np.int64([0, 1]))
    return made


class Job:
    """Two ranks, or the first of them, each with a terminal of its own."""

    def __init__(self, folder: Path, scratch: Path, *more: object, pars: Sequence[str]) -> None:
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "onnxpar", "run", par, *map(str, more)],
                cwd=folder,
                env={
                    **os.environ,
                    "ONNXPAR_RANK": str(rank),
                    "ONNXPAR_WORLD_SIZE": "2",
                    "ONNXPAR_STORE": f"file:{scratch}/store",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, par in enumerate(pars)
        ]

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of both."""
        said = [rank.communicate(timeout=60) for rank in self.ranks]
        return [(r.returncode, *s) for r, s in zip(self.ranks, said, strict=True)]


def job(folder: Path, scratch: Path, *more: object, second: str = "data-parallel.par") -> Job:
    given = ["--log-dir", scratch / "log", "--timeout", 8, *more]
    return Job(folder, scratch, *given, pars=("data-parallel.par", second))


@pytest.mark.slow
def test_results(folder: Path, tmp_path: Path) -> None:
    found = job(folder, tmp_path, "--inputs", "in.npz").end()
    assert found == [(0, "y: float32 4x8\n", ""), (0, "", "")]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "inputs,text",
    [
        ("few.npz", "input 'i' was given int64 [2], but expects int64 [4]"),
        ("far.npz", "index 10 at [2] is out of range for 't' of 10 rows"),
        ("gone.npz", "there is no file gone.npz"),
    ],
)
def test_inputs_that_are_wrong(folder: Path, tmp_path: Path, inputs: str, text: str) -> None:
    for rank, (code, out, error) in enumerate(job(folder, tmp_path, "--inputs", inputs).end()):
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert error.startswith(f"onnxpar: error{' on rank 1' if rank else ''}: ")
        assert text in error


@pytest.mark.slow
def test_a_rank_that_lacks_the_model(folder: Path, tmp_path: Path) -> None:
    """It gets the model from the other one, which says so."""
    gone = tmp_path / "gone.par"
    first, second = job(folder, tmp_path, "--inputs", "in.npz", second=str(gone)).end()
    code, out, said = first
    assert (code, out) == (0, "y: float32 4x8\n") and second == (0, "", "")
    assert re.match(rf"onnxpar: fetching 1 file of {gone}, [\d.]+ B, to rank 1 \(host ", said), said
    assert job(folder, tmp_path, "--inputs", "in.npz", second=str(gone)).end()[0][2] == ""


@pytest.mark.slow
def test_a_rank_that_does_not_come(folder: Path, tmp_path: Path) -> None:
    given = ["--inputs", "in.npz", "--timeout", 2, "--log-dir", tmp_path / "log"]
    (first,) = Job(folder, tmp_path, *given, pars=["data-parallel.par"]).end()
    assert first == (2, "", "onnxpar: error: rank 1 has not joined the world within 2 s\n")


@pytest.mark.slow
def test_no_rank_has_the_model(folder: Path, tmp_path: Path) -> None:
    given = ["--inputs", "in.npz", "--log-dir", tmp_path / "log"]
    for code, out, said in Job(folder, tmp_path, *given, pars=["gone.par"] * 2).end():
        assert (code, out) == (2, "") and "there is no folder gone.par" in said


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_ranks_that_have_different_models(folder: Path, tmp_path: Path) -> None:
    other = "tensor-parallel.par"
    for code, _, error in job(folder, tmp_path, "--inputs", "in.npz", second=other).end():
        assert code == 2 and "the ranks disagree on the model" in error, error


LEAVES = """
import os, sys, numpy, onnxpar
try:
    with onnxpar.InferenceSession("data-parallel.par", timeout=20) as session:
        if os.environ["ONNXPAR_RANK"] == "1":
            raise ValueError("no more rows")
        session.run(None, {"i": numpy.int64([0, 1, 9, 3])})
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_a_rank_that_leaves_says_why(folder: Path, tmp_path: Path) -> None:
    """To those that wait for it: they may be all that a user sees."""
    common = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{tmp_path}/store"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES],
            cwd=folder,
            env={**os.environ, **common, "ONNXPAR_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=60)[1] for rank in ranks)
    assert second == "ValueError: no more rows\n"
    assert re.search(
        rf"^RankError: .*rank 1 \(pid {ranks[1].pid}\) left the world.*: ValueError: no more rows$",
        first.splitlines()[-1],
    ), first


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies(folder: Path, tmp_path: Path, victim: int) -> None:
    """The one that is left tells it, be it the first or not."""
    made = job(folder, tmp_path, "--inputs", "in.npz", "--repeat", 1_000_000)
    wait_until_they_run(tmp_path / "log")
    made.ranks[victim].kill()
    found = made.end()
    assert found[victim] == (-signal.SIGKILL, "", "")
    code, _, error = found[1 - victim]
    start = "onnxpar: error: " if victim else "onnxpar: error on rank 1: "
    assert code == 2 and error.startswith(start)
    pid = made.ranks[victim].pid
    assert re.search(rf"rank {victim} (\(pid {pid}\) died|has not joined)", error), error


def wait_until_they_run(log: Path, rank: int = 1) -> None:
    """Returns when they are likely to run; a death before that is told, too."""
    deadline = time.monotonic() + 30
    while not (log / f"rank.{rank}" / "stderr.log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)


@pytest.fixture
def waiting(folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A rank that waits for another one that never comes."""
    given = ["--inputs", "in.npz", "--timeout", 300, "--log-dir", tmp_path / "log"]
    (rank,) = Job(folder, tmp_path, *given, pars=["data-parallel.par"]).ranks
    wait_until_they_run(tmp_path / "log", 0)
    yield rank
    rank.kill()
    rank.communicate()


@pytest.mark.slow
def test_a_signal_ends_a_rank_that_waits(waiting: subprocess.Popen[str]) -> None:
    waiting.terminate()
    assert waiting.communicate(timeout=30) == ("", "onnxpar: terminated\n")
    assert waiting.returncode == 143


@pytest.mark.slow
def test_mpirun_tells_of_the_rank_that_cannot_have_the_model(folder: Path, tmp_path: Path) -> None:
    command = shutil.which("mpirun")
    if command is None:
        pytest.skip("there is no mpirun")
    script = tmp_path / "rank.sh"
    run = f"{sys.executable} -m onnxpar run"
    script.write_text(
        f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && model=no/gone || model=data-parallel\n'
        f"exec {run} $model.par --inputs in.npz --log-dir {tmp_path / 'log'}\n"
    )
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2", "sh", str(script)]
    done = subprocess.run(
        [command, *options], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "cannot fetch no/gone.par: cannot write " in done.stderr
