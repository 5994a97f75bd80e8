"""Whenever a run ends while it saves, a whole checkpoint is left."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer.disk import Disk, Killed
from training.steps import MLP, ThreadTrainer, shard, write_step

from onnxpar.base import new_folder
from onnxpar.base.digests import DigestWriter
from onnxpar.runtime.session.threads import ThreadRanks
from onnxpar.trainer.checkpoint import Checkpoint, Progress, checkpoints, damage
from onnxpar.trainer.together import ALONE
from onnxpar.trainer.write_checkpoint import remove

Patch = pytest.MonkeyPatch


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[ThreadTrainer]:
    step = write_step(MLP, tmp_path, optimizer="adam")
    with ThreadTrainer(shard(step, "zero2 2")[0]) as trainer:
        yield trainer


def settle(trainer: ThreadTrainer) -> None:
    """Returns when all ranks have ended what they were in."""
    ranks = trainer.session._ranks
    assert isinstance(ranks, ThreadRanks)
    both = threading.Barrier(trainer.session.ranks)
    list(ranks._pool.map(lambda _: both.wait(60), range(both.parties)))


def counted(trainer: ThreadTrainer, number: int) -> None:
    """States that differ from those of other numbers."""
    value = trainer.session.states.read("w2")
    trainer.session.states.write("w2", np.full_like(value, number))


def number_of(path: Path) -> float:
    return float(Checkpoint.load(path).states.read("w2")[0])


def spoil(path: Path) -> None:
    with (path / "rank_0001.bin").open("r+b") as file:
        file.write(b"spoilt")


def make_old(trainer: ThreadTrainer, folder: Path, steps: dict[int, int], spoilt: int) -> None:
    """Checkpoints that were there before, of these numbers by step."""
    for step, number in steps.items():
        counted(trainer, number)
        trainer.save(folder, Progress(step))
    if spoilt:
        spoil(folder / Progress(spoilt).name)


def renew(folder: Path, source: Path) -> None:
    """The checkpoints of `source`, and whatever the lock of the folder is."""
    for left in [*folder.glob("*step*")]:
        shutil.rmtree(left)
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=lambda *_: [".onnxpar.lock"])


CASES: dict[str, tuple[dict[int, int], int]] = {
    "another one": ({4: 1}, 0),
    "in the place of the only one": ({5: 1}, 0),
    "in the place of one that is damaged": ({4: 1, 5: 2}, 5),
    "of three": ({3: 1, 4: 2, 5: 3}, 0),
}
"""The numbers of those that there are, by step, and the step of one that is damaged."""
REPLACED = ("in the place of the only one", "in the place of one that is damaged")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "can_swap"), [(case, True) for case in CASES] + [(case, False) for case in REPLACED]
)
def test_a_kill_at_any_file_operation(
    case: str,
    can_swap: bool,
    trainer: ThreadTrainer,
    disk: Disk,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """Of a save and the removal of others: what was whole stays, or the new one is there, whole."""
    if not can_swap:
        monkeypatch.setattr(new_folder, "_exchange", lambda one, two: False)
    steps, spoilt = CASES[case]
    make_old(trainer, tmp_path / "old", steps, spoilt)
    newest_whole = max(number for step, number in steps.items() if step != spoilt)
    folder = tmp_path / "c"
    trainer.hold(folder)
    counted(trainer, 9)
    killed, found = 0, set[float]()
    while True:
        renew(folder, tmp_path / "old")
        disk.start(folder, killed)
        try:
            trainer.save(folder, Progress(5))
            trainer.keep(folder, Progress(5), 1)
            break
        except Killed:
            killed += 1
        finally:
            settle(trainer)
            disk.stop()
        for path in checkpoints(folder).values():
            assert not damage(path, ALONE) or (steps.get(5) and spoilt and "5" in path.name), killed
        found.add(number_of(folder))
        assert found <= {newest_whole, 9}, killed
        disk.start(folder, 15)
        with pytest.raises(Killed):  # the next run, too, before it has saved anything
            trainer.save(folder, Progress(6))
        settle(trainer)
        disk.stop()
        assert number_of(folder) in found, killed
        trainer.save(folder, Progress(6))
        assert not list(folder.glob(".step*")) and number_of(folder) == 9
    print(f"{case}, {'swapped' if can_swap else 'renamed'}: killed at {killed} file operations")
    assert killed > 25 and found == {newest_whole, 9}
    assert [path.name for path in folder.glob("*step*")] == ["step_00000005"]
    assert number_of(folder) == 9


@pytest.mark.parametrize("can_swap", [True, False])
def test_nothing_is_removed_before_the_new_one_is_on_disk(
    can_swap: bool, trainer: ThreadTrainer, disk: Disk, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As if the power failed: what is not synced may be lost, names as well as contents."""
    if not can_swap:
        monkeypatch.setattr(new_folder, "_exchange", lambda one, two: False)
    folder = tmp_path / "deep" / "c"
    disk.start(tmp_path)
    make_old(trainer, folder, {4: 1, 5: 2}, 0)
    told = disk.told
    assert told.index(("fsync", str(tmp_path))) < told.index(("os.mkdir", str(folder)))
    disk.start(tmp_path)
    trainer.save(folder, Progress(5))
    trainer.keep(folder, Progress(5), 1)
    told = disk.told
    (named,) = (
        at
        for at, (what, *names) in enumerate(told)
        if names[-1] == str(folder / "step_00000005") and names[0].endswith(".unfinished")
    )
    written = told[named][1]
    files = {names[0] for what, *names in told if what == "open" and names[0].startswith(written)}
    assert len(files) == 5
    for file in files:
        last = max(at for at, one in enumerate(told) if one in (("write", file), ("open", file)))
        assert ("fsync", file) in told[last:named], file
    made = max(told.index(("open", file)) for file in files)
    assert ("fsync", written) in told[made:named]
    removed = [
        at
        for at, (what, *names) in enumerate(told)
        if what in ("os.remove", "os.rmdir")
        or (what == "os.rename" and names[0] == str(folder / "step_00000004"))
    ]
    assert len(removed) > 10
    assert ("fsync", str(folder)) in told[named : min(removed)]


def test_a_removal_that_ends_half_way(trainer: ThreadTrainer, disk: Disk, tmp_path: Path) -> None:
    """Leaves no name of a checkpoint."""
    make_old(trainer, tmp_path / "old", {4: 1, 5: 2}, 0)
    folder = tmp_path / "c"
    killed = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "old", folder)
        disk.start(folder, killed)
        try:
            remove([folder / "step_00000004"])
            break
        except Killed:
            killed += 1
        finally:
            disk.stop()
        names = [path.name for path in checkpoints(folder).values()]
        assert names == (["step_00000004"] if killed == 1 else []) + ["step_00000005"]
        assert all(not damage(folder / name, ALONE) for name in names)
    print(f"killed at {killed} file operations")
    assert killed > 5


@pytest.mark.matrix
@pytest.mark.parametrize("refused", ["begin", "states", "finish"])
def test_a_failure_leaves_nothing(
    refused: str, trainer: ThreadTrainer, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Of the new checkpoint; and the trainer goes on."""
    make_old(trainer, tmp_path, {4: 1}, 0)
    before = sorted(path.name for path in tmp_path.iterdir())
    where = "session.states" if refused == "states" else refused

    def fail(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        target: dict[str, Callable[[], None]] = {
            "begin": lambda: patch.setattr(Path, "mkdir", fail),
            "states": lambda: patch.setattr(DigestWriter, "write", fail),
            "finish": lambda: patch.setattr("onnxpar.trainer.write_checkpoint.sealed", fail),
        }
        target[refused]()
        with pytest.raises(Exception, match=r"[nN]o space left on device; free some space"):
            trainer.save(tmp_path, Progress(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == before, where
    trainer.save(tmp_path, Progress(5))
    assert Checkpoint.load(tmp_path).progress.step == 5
