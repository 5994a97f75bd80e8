"""onnxpar train and the folder of its checkpoints: two at once, a full disk, no folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from runtime.bundles import is_alive, wait_until
from training.steps import MLP, newest, shard, write_step

from onnxpar.base.folder_lock import NAME, FolderLock
from onnxpar.cli.command_line import main
from onnxpar.trainer.checkpoint import Checkpoint, checkpoints, damage
from onnxpar.trainer.together import ALONE

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step for two ranks, and 5 batches of samples."""
    folder = tmp_path_factory.mktemp("folder")
    step = write_step(MLP, folder, optimizer="adam")
    shard(step, "zero2 2")[0].rename(folder / "step.par")
    draw = np.random.default_rng(3)
    x = draw.standard_normal((40, 6)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, labels=draw.integers(0, 5, 40))
    return folder


def arguments(made: Path, checkpoint: Path, logs: Path, *more: str) -> list[str]:
    files = [str(made / "step.par"), "--data", str(made / "train.npz"), "--lr", "0.01"]
    return ["train", *files, "--checkpoint", str(checkpoint), "--log-dir", str(logs), *more]


@pytest.mark.slow
def test_two_trainings_at_once(
    made: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """One goes on, the other says which one does; when that is killed, the next one goes on."""
    logs = [tmp_path / f"log{number}" for number in range(2)]
    for log in logs:
        command = arguments(made, tmp_path / "c", log, "--every", "1", "--epochs", "10000")
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "onnxpar", *command],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    assert wait_until(lambda: any(one.poll() is not None for one in started), 60)
    second = next(at for at, one in enumerate(started) if one.poll() is not None)
    winner = started[1 - second]
    _, error = started[second].communicate(timeout=60)
    assert started[second].returncode == 2
    assert error == (
        f"onnxpar: error: {tmp_path / 'c'} is in use: process {winner.pid} on host "
        f"{os.uname().nodename} has locked {NAME} there; wait until that process ends, or choose "
        "another folder\n"
    )
    assert not logs[second].exists()
    assert wait_until(lambda: len(checkpoints(tmp_path / "c")) > 3, 60), winner.poll()
    tasks = Path(f"/proc/{winner.pid}/task").glob("*/children")
    ranks = [int(child) for task in tasks for child in task.read_text().split()]
    winner.kill()
    winner.wait()
    assert len(ranks) == 2 and wait_until(lambda: not any(map(is_alive, ranks)), 20)
    assert (tmp_path / "c" / NAME).exists()
    reached = newest(tmp_path / "c")
    assert reached is not None
    epochs = str(int(reached.name[5:]) // 5 + 1)
    more = ("--resume", "--keep", "1", "--epochs", epochs)
    assert main(arguments(made, tmp_path / "c", tmp_path / "log", *more)) == 0
    assert [path.name for path in (tmp_path / "c").iterdir()] == [f"step_{5 * int(epochs):08d}"]


def one_line(capsys: Capture) -> str:
    said = capsys.readouterr().err
    assert said.startswith("onnxpar: error: ") and said.count("\n") == 1, said
    return said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts file systems of some bytes in memory."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "onnxpar-test", str(place)]
        if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only root may mount a file system")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(made: Path, small_disk: Callable[[str], Path], capsys: Capture) -> None:
    """Ends the run; the checkpoints before stay whole, and with more room it goes on."""
    disk = small_disk("size=200k")
    logs = disk.parent / "log"
    assert main(arguments(made, disk / "c", logs, "--every", "1", "--epochs", "4")) == 2
    error = one_line(capsys)
    assert str(disk / "c") in error and "no space left on device; free some space there" in error
    left = checkpoints(disk / "c")
    assert len(left) > 2 and not any(damage(path, ALONE) for path in left.values())
    assert {path.name for path in (disk / "c").iterdir()} == {p.name for p in left.values()}
    again = ("--every", "1", "--epochs", "4", "--resume")
    assert main(arguments(made, disk / "c", logs, *again)) == 2
    assert "no space left on device" in one_line(capsys)
    assert {path.name for path in (disk / "c").iterdir()} == {p.name for p in left.values()}
    for path in list(left.values())[:2]:
        shutil.rmtree(path)
    assert main(arguments(made, disk / "c", logs, *again, "--keep", "1")) == 0
    assert Checkpoint.load(disk / "c").progress.step == 20


def test_a_disk_that_cannot_be_written_to(
    made: Path, small_disk: Callable[[str], Path], capsys: Capture
) -> None:
    disk = small_disk("ro,size=100k")
    assert main(arguments(made, disk / "c", disk.parent / "log")) == 2
    assert f"cannot write {disk / 'c'}: read-only file system; choose another" in one_line(capsys)
    assert not (disk.parent / "log").exists()


@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nothing", "held"])
def test_no_folder_for_checkpoints(kind: str, made: Path, tmp_path: Path, capsys: Capture) -> None:
    """Nothing is written, not even logs."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    places = {"a file": "file", "below a file": "file/c", "a link to nothing": "link"}
    place = tmp_path / places.get(kind, "c")
    before = sorted(path.name for path in tmp_path.iterdir())
    if kind == "held":
        with FolderLock(place):
            assert main(arguments(made, place, tmp_path / "log")) == 2
        assert re.search(r"c is in use: process \d+ on host ", one_line(capsys))
    else:
        assert main(arguments(made, place, tmp_path / "log")) == 2
        text = f"cannot write {place}: not a directory; a file is where a folder is needed"
        assert text in one_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_link_to_a_folder(made: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    more = ("--every", "2", "--keep", "1")
    assert main(arguments(made, tmp_path / "link", tmp_path / "log", *more)) == 0
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step_00000005"]
    assert main(arguments(made, tmp_path / "link", tmp_path / "log", "--resume", *more)) == 0
