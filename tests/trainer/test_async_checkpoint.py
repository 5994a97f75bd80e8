"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.bundles import pids, wait_until
from trainer.disk import Disk, Killed
from training.steps import MLP, ThreadTrainer, newest, same, shard, states, write_step
from training.test_lazy import MODEL as LOOKUPS

from onnxpar.base.digests import DigestWriter
from onnxpar.base.errors import InputError, OnnxparError, RankError
from onnxpar.runtime.states.snapshot import marker
from onnxpar.trainer import pending_checkpoint
from onnxpar.trainer.checkpoint import Checkpoint, Progress, checkpoints, damage
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Record, Run, records
from onnxpar.trainer.pending_checkpoint import PendingCheckpoint
from onnxpar.trainer.together import ALONE
from onnxpar.trainer.trainer import Trainer
from onnxpar.trainer.write_checkpoint import discard

WAIT = 60.0


@pytest.fixture(scope="module")
def par(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step over two ranks that share what the optimizer keeps."""
    step = write_step(MLP, tmp_path_factory.mktemp("step"), optimizer="adam", clip_norm=1.0)
    return shard(step, "zero2 2")[0]


@pytest.fixture(scope="module")
def with_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step whose table is on the host, each rank having some rows."""
    text = LOOKUPS.replace("BATCH", "8")
    step = write_step(text, tmp_path_factory.mktemp("table"), "mse", "adam", lazy=["w"])
    rows = {"tensors": {"w": ["tp", None], "w.*": ["tp", None]}, "place": {"w": "host"}}
    return shard(step, "tp=2", strategy=rows)[0]


@pytest.fixture
def trainer(par: Path) -> Iterator[ThreadTrainer]:
    with ThreadTrainer(par) as trainer:
        yield trainer


def data_of(trainer: ThreadTrainer) -> Data:
    draw = np.random.default_rng(9)
    x = draw.standard_normal((40, 6)).astype(np.float32)
    ids, more = (draw.integers(0, 40, (40, n)) for n in (2, 3))
    target = draw.standard_normal((40, 4)).astype(np.float32)
    arrays = {"x": x, "labels": draw.integers(0, 5, 40), "ids": ids, "more": more, "target": target}
    return Data.of(arrays, trainer.data, trainer.spec.batch)


def train(trainer: ThreadTrainer, run: Run) -> list[Record]:
    return list(records(trainer, data_of(trainer), run))


def files(folder: Path) -> dict[str, bytes]:
    """What is in a folder, but for the lock."""
    found = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != ".onnxpar.lock")
    return {str(f.relative_to(folder)): f.read_bytes() for f in found}


class Slow:
    """Lets no rank write before `go`; `begun` is set once one wants to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        write = DigestWriter.write

        def late(writer: DigestWriter, data: bytes | memoryview) -> None:
            self.begun.set()
            assert self.go.wait(WAIT)
            write(writer, data)

        monkeypatch.setattr(DigestWriter, "write", late)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(monkeypatch)
    yield made
    made.go.set()


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 1])
def test_the_same_bytes_as_of_a_run_that_waits(par: Path, tmp_path: Path, keep: int) -> None:
    """Of each checkpoint, and the same losses and states."""
    told, left = [], []
    for is_async in (False, True):
        folder = tmp_path / f"{is_async}"
        run = Run(2, 0.02, checkpoint=folder, every=3, keep=keep, async_checkpoint=is_async)
        with ThreadTrainer(par) as trainer:
            told.append([(r.total, r.values) for r in train(trainer, run)])
            left.append(states(trainer))
            assert trainer.checkpoint == folder / "step_00000010"
    assert told[0] == told[1]
    same(left[0], left[1])
    names = {name.split("/")[0] for name in files(tmp_path / "True")}
    assert names == {f"step_{n:08d}" for n in ((10,) if keep else (3, 6, 9, 10))}
    assert files(tmp_path / "True") == files(tmp_path / "False")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["par", "with_table"])
def test_training_goes_on_while_a_checkpoint_is_written(
    step: str, request: pytest.FixtureRequest, tmp_path: Path, slow: Slow
) -> None:
    """It gets its name when it is written, and has the states of its own step."""
    par = request.getfixturevalue(step)
    run = Run(2, 0.02, checkpoint=tmp_path, every=3, async_checkpoint=True)
    with ThreadTrainer(par) as trainer:
        steps = records(trainer, data_of(trainer), run)
        taken = [next(steps).total for _ in range(3)]
        third = states(trainer)
        taken += [next(steps).total for _ in range(3)]
        assert taken == [1, 2, 3, 4, 5, 6] and slow.begun.wait(WAIT)
        assert newest(tmp_path) is None
        slow.go.set()
        next(steps)  # the next one is due, and waits for this one
        assert newest(tmp_path) in (tmp_path / "step_00000003", tmp_path / "step_00000006")
    found = Checkpoint.load(tmp_path / "step_00000003")
    same({name: found.states.read(name) for name in third}, third)


@pytest.mark.slow
def test_the_next_one_waits_and_says_so(
    trainer: ThreadTrainer, tmp_path: Path, slow: Slow, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.async_save(tmp_path, Progress(3))
    timer = threading.Timer(1.2, slow.go.set)
    timer.start()
    trainer.async_save(tmp_path, Progress(4))
    assert slow.go.is_set()
    line = f"onnxpar: waiting for {tmp_path / 'step_00000003'}, which is still being written\n"
    assert capsys.readouterr().err == line
    assert trainer.finish_save() == Progress(4) and trainer.finish_save() is None
    assert list(checkpoints(tmp_path)) == [3, 4]


def test_one_that_waits_comes_after_one_that_does_not(
    trainer: ThreadTrainer, tmp_path: Path
) -> None:
    trainer.async_save(tmp_path, Progress(3))
    trainer.save(tmp_path, Progress(4))
    assert list(checkpoints(tmp_path)) == [3, 4]
    assert not list(tmp_path.glob(".step*"))


def fail(*given: Any) -> None:
    raise OSError(28, "No space left on device")


PLACES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a rank": lambda patch: patch.setattr(DigestWriter, "write", fail),
    "the record": lambda patch: patch.setattr("onnxpar.trainer.write_checkpoint.sealed", fail),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_is_told_at_the_next_one(
    place: str, trainer: ThreadTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or at the end; nothing is left of it, and the one before stays."""
    trainer.save(tmp_path, Progress(3))
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        PLACES[place](patch)
        trainer.async_save(tmp_path, Progress(4))
        with pytest.raises(OnnxparError, match=r"[nN]o space left on device; free some space"):
            trainer.async_save(tmp_path, Progress(5))
        assert files(tmp_path) == before and not list(tmp_path.glob(".step*"))
        run = Run(1, 0.02, checkpoint=tmp_path / "run", async_checkpoint=True)
        with pytest.raises(OnnxparError, match=r"[nN]o space left"):
            train(trainer, run)
    trainer.async_save(tmp_path, Progress(5))
    assert trainer.finish_save() == Progress(5)
    assert list(checkpoints(tmp_path)) == [3, 5]


def test_a_rank_that_writes_while_all_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that has not failed yet."""
    folder, rmdir, late = tmp_path / "left", os.rmdir, iter(["rank_0001.written"])
    folder.mkdir()

    def writing(*given: Any, **more: Any) -> None:
        for name in late:
            (folder / name).write_text("{}")
        rmdir(*given, **more)

    monkeypatch.setattr(os, "rmdir", writing)
    discard(folder)
    assert not folder.exists()


def test_it_needs_a_folder() -> None:
    with pytest.raises(InputError, match="--async-checkpoint: the folder of checkpoints is not"):
        Run(1, 0.02, async_checkpoint=True)


def test_a_disk_that_hangs(
    trainer: ThreadTrainer, tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_checkpoint, "STALLED", 0.3)
    trainer.async_save(tmp_path, Progress(3))
    with pytest.raises(OnnxparError, match=r"rank 0 has not finished its files, and no rank has"):
        trainer.finish_save()
    assert newest(tmp_path) is None


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_dies_before_it_has_written(
    par: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends the wait long before a disk that hangs does."""
    monkeypatch.setattr(PendingCheckpoint, "_look", lambda _: 0)
    with Trainer(par) as trainer:
        trainer.async_save(tmp_path, Progress(3))
        os.kill(pids(trainer.session)[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"^a check of .*: rank 1 was killed by SIGKILL"):
            trainer.finish_save()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_time", [True, False])
def test_a_trainer_that_closes(
    has_time: bool, par: Path, tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lets a checkpoint be completed, or leaves nothing of it."""
    if has_time:
        slow.go.set()
    else:
        monkeypatch.setattr("onnxpar.trainer.trainer._CLOSING", 0.1)
    with ThreadTrainer(par) as trainer:
        trainer.async_save(tmp_path, Progress(3))
    slow.go.set()
    assert [p.name for p in tmp_path.iterdir()] == (["step_00000003"] if has_time else [])


def test_a_checkpoint_that_all_ranks_have_written_outlives_them(
    par: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a rank dies just before the checkpoint gets its name."""
    look = PendingCheckpoint._look

    def late(self: PendingCheckpoint) -> int:
        return look(self) if self._is_abandoned.is_set() else 0

    monkeypatch.setattr(PendingCheckpoint, "_look", late)
    with ThreadTrainer(par) as trainer:
        trainer.async_save(tmp_path, Progress(3))
        (written,) = tmp_path.glob(".step*")
        assert wait_until(lambda: all((written / marker(r)).exists() for r in range(2)), WAIT)
        trainer.session.close()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000003"]
    assert not damage(tmp_path / "step_00000003", ALONE)


CASES: dict[str, dict[int, int]] = {
    "another one": {4: 1},
    "in the place of the only one": {5: 1},
    "of three": {3: 1, 4: 2, 5: 3},
}
"""The numbers of those that there are, by step."""


def counted(trainer: ThreadTrainer, number: int) -> None:
    """States that differ from those of other numbers."""
    value = trainer.session.states.read("w2")
    trainer.session.states.write("w2", np.full_like(value, number))


def number_of(path: Path) -> float:
    return float(Checkpoint.load(path).states.read("w2")[0])


def save_all(trainer: ThreadTrainer, folder: Path, disk: Disk) -> None:
    """What the loop does for a checkpoint, and at the end; the main thread is killed with the
    others."""
    trainer.async_save(folder, Progress(5))
    assert trainer._pending is not None
    while not (has_ended := trainer._pending.wait(0.001)) and disk.left > 0:
        pass
    if not has_ended or disk.left <= 0:
        raise Killed
    trainer.finish_save()
    trainer.keep(folder, Progress(5), 1)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_kill_at_any_file_operation(
    case: str, trainer: ThreadTrainer, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any thread: what was whole stays, or the new one is there, whole."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    for step, number in CASES[case].items():
        counted(trainer, number)
        trainer.save(tmp_path / "old", Progress(step))
    folder = tmp_path / "c"
    trainer.hold(folder)
    counted(trainer, 9)
    newest_before, found, killed = max(CASES[case].values()), set[float](), 0
    while True:
        for left in [*folder.glob("*step*")]:
            shutil.rmtree(left)
        shutil.copytree(
            tmp_path / "old", folder, dirs_exist_ok=True, ignore=lambda *_: [".onnxpar.lock"]
        )
        disk.start(folder, killed)
        try:
            save_all(trainer, folder, disk)
            break
        except Killed:
            killed += 1
        finally:
            end(trainer)
            disk.stop()
        for path in checkpoints(folder).values():
            assert not damage(path, ALONE), killed
        found.add(number_of(folder))
        assert found <= {newest_before, 9}, killed
    print(f"{case}: killed at {killed} file operations")
    assert killed > 30 and found == {newest_before, 9}
    assert [path.name for path in folder.glob("*step*")] == ["step_00000005"]
    assert number_of(folder) == 9


def end(trainer: ThreadTrainer) -> None:
    """Returns when no thread writes any more; then the trainer can save again."""
    if trainer._pending is not None:
        trainer._pending.abandon(0)
    for thread in threading.enumerate():
        if thread.name == "onnxpar-checkpoint":
            thread.join(WAIT)
    trainer._pending = trainer._unfinished = None


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [True, False])
def test_another_process_reads_the_folder_at_any_time(
    is_async: bool, par: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another host may: it finds a whole checkpoint, none older than before, and no damage."""
    found: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            if newest(tmp_path) is not None:
                found.append(Checkpoint.load(tmp_path).progress.step)

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadTrainer(par) as trainer:
        run = Run(8, 0.02, checkpoint=tmp_path, every=1, keep=1, async_checkpoint=is_async)
        train(trainer, run)
    assert wait_until(lambda: not found or found[-1] == 40, WAIT)
    is_over.set()
    reader.join(WAIT)
    assert len(found) > 10 and found == sorted(found) and found[-1] == 40
    assert capsys.readouterr().err == ""
