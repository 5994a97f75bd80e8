"""Under a launcher, all processes load the same checkpoint, and fail together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import MLP, ThreadTrainer, shard, write_step

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.folder_lock import FolderLock
from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.ranks import redirect
from onnxpar.trainer.checkpoint import Checkpoint, Progress, warn
from onnxpar.trainer.together import Together

SCRIPT = """
import json, os, sys, threading
from pathlib import Path
import numpy as np
from onnxpar.base.errors import OnnxparError
from onnxpar.trainer import checkpoint
from onnxpar.trainer.checkpoint import Checkpoint, Progress
from onnxpar.trainer.trainer import Trainer

rank, home = int(os.environ["OMPI_COMM_WORLD_RANK"]), Path(sys.argv[1])
os.chdir(home / f"host{rank}")
told = []
with Trainer(home / "step.par", timeout=60) as trainer:
    def tell(what):
        try:
            made = what()
        except OnnxparError as error:
            made = f"{type(error).__name__}: {error}"
        told.append([str(made), float(trainer.session.states.read("w2")[0])])
    if rank == 1:
        threading.Timer(1.0, lambda: os.symlink(home / "c", "late")).start()
    tell(lambda: trainer.load("late").path)
    checkpoint._LATE = 0.5
    tell(lambda: trainer.load("unseen").path)
    tell(lambda: trainer.load(Checkpoint.load(home / "c" / f"step_0000000{1 + rank}")).path)
    tell(lambda: trainer.load(home / "c" / "step_00000003").path)
    tell(lambda: trainer.save("apart", Progress(7)))
    tell(lambda: trainer.save(home / "none" / "file", Progress(7)))
    tell(lambda: trainer.save(home / "held", Progress(7)))
    trainer.session.states.write("w2", np.full(9, 7, np.float32))
    tell(lambda: trainer.save("late", Progress(7)))
    tell(lambda: trainer.keep("late", Progress(7), 2))
    tell(lambda: trainer.load("late").path)
(home / f"told{rank}.json").write_text(json.dumps(told))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A step over two ranks and checkpoints of steps 1 to 4, of which the last two are damaged; a
    folder for each rank to work in."""
    step = write_step(MLP, tmp_path, optimizer="adam")
    shard(step, "zero2 2")[0].rename(tmp_path / "step.par")
    with ThreadTrainer(tmp_path / "step.par") as trainer:
        for number in (1, 2, 3, 4):
            trainer.session.states.write("w2", np.full(9, number, np.float32))
            trainer.save(tmp_path / "c", Progress(number))
    file = tmp_path / "c" / "step_00000003" / "rank_0001.bin"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    (tmp_path / "c" / "step_00000004" / "rank_0001.bin").write_bytes(b"x")
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
    return tmp_path


def under_mpirun(*command: str) -> subprocess.CompletedProcess[str]:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return subprocess.run(
        [mpirun, *options, *command],
        cwd=Path(__file__).parent,  # not the checkout, which Python would import from
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.usefixtures("medium")
def test_all_processes_do_the_same(home: Path) -> None:
    """Also where a folder appears late on one host, never, or is another one there."""
    for rank, names in ((0, ("late", "unseen")), (1, ())):
        for name in names:
            (home / f"host{rank}" / name).symlink_to(home / "c")
    (home / "none").write_text("")
    with FolderLock(home / "held"):
        done = under_mpirun(sys.executable, "-c", SCRIPT, str(home))
    assert done.returncode == 0, done.stderr
    said = [(home / f"told{rank}.json").read_text() for rank in range(2)]
    assert said[0] == said[1].replace("host1", "host0")
    told = json.loads(said[0])
    texts: list[str] = [text for text, _ in told]
    assert [value for _, value in told] == [2.0] * 7 + [7.0] * 3
    remedy = "which rank 0 sees; give --checkpoint a folder that all hosts share"
    assert texts[0] == "late/step_00000002"
    assert texts[1].startswith("ModelError: rank 1: cannot read unseen/step_00000003/rank_0000.bin")
    assert texts[1].endswith(remedy)
    assert "step_00000001 was given to rank 0, but " in texts[2]
    assert "rank_0001.bin has changed since it was written" in texts[3]
    assert texts[4].startswith("ModelError: rank 1: it does not see apart/.onnxpar.lock, ")
    assert texts[4].endswith(remedy)
    assert texts[5].startswith(f"OnnxparError: cannot write {home / 'none' / 'file'}: not a dir")
    assert f"{home / 'held'} is in use: process {os.getpid()} on host" in texts[6]
    assert texts[7:] == ["None", "None", "late/step_00000007"]
    warned = [line for line in done.stderr.splitlines() if line.startswith("onnxpar: warning")]
    assert sum("; late/step_00000002 is loaded instead" in line for line in warned) == 2
    assert sorted(path.name for path in (home / "c").iterdir()) == [
        "step_00000002",
        "step_00000003",
        "step_00000004",
        "step_00000007",
    ]
    saved = Checkpoint.load(home / "c")
    assert saved.progress.step == 7 and len(saved.files) == 4
    assert not (home / "host0" / "apart").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_says_who_holds_the_folder(home: Path) -> None:
    """In one line; nothing is written."""
    np.savez(home / "train.npz", x=np.zeros((8, 6), np.float32), labels=np.zeros(8, np.int64))
    more = ["--lr", "0.1", "--checkpoint", str(home / "c"), "--log-dir", str(home / "log")]
    command = ["train", str(home / "step.par"), "--data", str(home / "train.npz"), *more]
    with FolderLock(home / "c"):
        done = under_mpirun(sys.executable, "-m", "onnxpar", *command)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("onnxpar: ")]
    assert lines == [
        f"onnxpar: error: {home / 'c'} is in use: process {os.getpid()} on host "
        f"{os.uname().nodename} has locked .onnxpar.lock there; wait until that process ends, or "
        "choose another folder"
    ]
    assert "Traceback" not in done.stderr
    assert not (home / "log" / "rank.0").exists()


def test_the_others_do_as_the_first() -> None:
    """What it makes, or the error that it raises; they do not even ask."""
    sent: list[bytes] = []

    def exchange(payload: bytes) -> list[bytes]:
        sent.append(payload)
        return [sent[0], payload]

    def fail(*given: Any) -> None:
        raise InputError("no")

    first, second = (Together(rank, 2, exchange) for rank in range(2))
    assert first.first(lambda: [1, "a"]) == [1, "a"] == second.first(fail)
    sent.clear()
    for one, make in ((first, fail), (second, lambda: 1)):
        with pytest.raises(InputError, match="no"):
            one.first(make)


@pytest.mark.parametrize("kind", ["__loader__", "annotations", "OpenSizesError", "nothing", 3])
def test_an_error_that_another_process_names_is_one_of_ours(kind: Any) -> None:
    told = json.dumps({"error": "no", "kind": kind}).encode()
    with pytest.raises(OnnxparError, match=r"^no$") as caught:
        Together(1, 2, lambda _: [told]).first(lambda: 1)
    assert type(caught.value) is OnnxparError


@pytest.mark.parametrize("rank,told", [(0, b"onnxpar: warning: one is damaged\n"), (1, b".")])
def test_a_warning_reaches_the_terminal_once(
    rank: int, told: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.pipe()
    launched = Launched(rank, 2, 2, "file:/tmp")
    monkeypatch.setattr(redirect, "_terminal", [(launched, theirs)])
    warn("one is damaged")
    os.write(theirs, b".")
    assert os.read(ours, 1000).removesuffix(b".") == told.removesuffix(b".")
    os.close(ours)
    os.close(theirs)
