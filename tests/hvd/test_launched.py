"""Ranks that are processes: under mpirun with a host file, torchrun, and one that dies."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from free_ports import server_before_a_free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "hvd_linear.py"

SCRIPT = """
import json, os, signal, sys
import numpy as np
import onnxpar.hvd as hvd
from onnxpar.base.errors import RankError

folder, victim = sys.argv[1], int(sys.argv[2])
for _ in range(2):  # also after a shutdown
    hvd.init(timeout=30)
    rank, size = hvd.rank(), hvd.size()
    found = {
        "place": [rank, size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank()],
        "sum": hvd.allreduce(np.arange(3.0) * rank, op=hvd.Sum).tolist(),
        "rows": hvd.allgather(np.full(rank, rank)).tolist(),
        "object": hvd.broadcast_object({"from": rank}, root_rank=size - 1),
    }
    hvd.barrier()
    if victim < 0:
        hvd.shutdown()
try:
    for step in range(victim >= 0 and 1_000_000):
        if rank == victim and step == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(np.ones(10_000), name="grad")
except RankError as error:
    found["error"] = str(error)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(found, file)
"""


def check(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        assert json.loads((folder / f"{rank}.json").read_text()) == {
            "place": [rank, ranks, rank, ranks, 0],
            "sum": [i * sum(range(ranks)) for i in range(3)],
            "rows": [each for each in range(ranks) for _ in range(each)],
            "object": {"from": ranks - 1},
        }


def mpirun(options: list[str], *arguments: object) -> str:
    command = shutil.which("mpirun")
    if command is None:
        pytest.skip("there is no mpirun")
    done = subprocess.run(
        [
            command,
            "--allow-run-as-root",
            "--bind-to",
            "none",
            *options,
            sys.executable,
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(folder: Path) -> Path:
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def start(folder: Path, ranks: list[dict[str, str]], victim: int) -> list[subprocess.Popen[bytes]]:
    """Processes with these variables, beside those of the tests but for a launcher's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "SLURM_", "PMIX_"))}
    command = [sys.executable, str(script(folder)), str(folder), str(victim)]
    return [subprocess.Popen(command, env={**kept, **variables}) for variables in ranks]


@pytest.mark.slow
def test_mpirun_with_a_host_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    options = ["--hostfile", str(tmp_path / "hosts"), "-n", "4"]
    mpirun(options, script(tmp_path), tmp_path, -1)
    check(tmp_path, 4)


def test_torchrun(tmp_path: Path) -> None:
    with server_before_a_free_port() as taken:  # as by a store of torch's own
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(taken.getsockname()[1])}
        common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
        assert [process.wait(60) for process in start(tmp_path, ranks, -1)] == [0, 0]
    check(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_a_killed_rank_is_named_on_the_others(tmp_path: Path) -> None:
    common = {"ONNXPAR_WORLD_SIZE": "3", "ONNXPAR_STORE": f"file:{tmp_path}/store"}
    ranks = [{**common, "ONNXPAR_RANK": str(rank)} for rank in range(3)]
    processes = start(tmp_path, ranks, victim=1)
    assert [process.wait(60) for process in processes] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        error = json.loads((tmp_path / f"{rank}.json").read_text())["error"]
        named = rf"AllReduce 'grad': rank 1 \(pid {processes[1].pid}\) died"
        assert re.search(named, error), error


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example_is_one_process_on_the_global_batch(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, file = tmp_path / "alone.npz", tmp_path / "ranks.npz"
    for name in [name for name in os.environ if name.startswith(("OMPI_", "SLURM_", "RANK"))]:
        monkeypatch.delenv(name)
    runpy.run_path(str(EXAMPLE))["main"](str(alone))
    expected = capsys.readouterr().out
    assert re.search(r"epoch: 5 step: 16, loss is 0\.05\d\d\n$", expected)
    assert mpirun(["--oversubscribe", "-n", str(ranks)], EXAMPLE, file) == expected
    with np.load(alone) as one, np.load(file) as many:
        for name in ("w", "b"):
            np.testing.assert_allclose(many[name], one[name], rtol=1e-13)
