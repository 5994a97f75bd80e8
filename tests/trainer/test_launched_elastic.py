"""Elastic runs under a launcher that outlives the ranks; here, hosts are names."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.bundles import is_alive
from trainer.test_elastic import command, losses, made, run_of, steps_of
from trainer.test_train_command import left, metrics
from training.steps import MLP, ThreadTrainer, newest, same, states, write_step

import onnxpar
from onnxpar.base.errors import StoppedError
from onnxpar.cli.command_line import main
from onnxpar.runtime.launch.membership import Generation, Membership, slots_of
from onnxpar.runtime.launch.supervision import Supervisor
from onnxpar.trainer.data import Data
from onnxpar.trainer.elastic import generation_logs
from onnxpar.trainer.loop import records

__all__ = ["made"]
EPOCHS = 60


class Launcher:
    """Starts the command as each rank; `look` is called with it again and again."""

    def __init__(self, made: Path, out: Path, look: Callable[[Launcher], None], *how: str) -> None:
        self.made, self.out, self.how, self._look = made, out, how, look
        self.generation = Generation(0, ())
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.told: list[str] = []
        self.sizes: list[int] = []
        self.members = Membership(slots_of({"a": 2, "b": 1}), 1, 0)

    def run(self) -> int:
        """Runs generations to the end."""
        try:
            return Supervisor(
                self.members,
                self._launch,
                look=lambda members: self._look(self),
                tell=self.told.append,
                grace=120.0,
            ).run()
        finally:
            for process in self.processes.values():
                process.kill()
                process.communicate(timeout=60)

    @property
    def steps(self) -> int:
        """The steps that the generation has taken."""
        return steps_of(generation_logs(self.out / "log", self.generation.number))

    @contextmanager
    def _launch(self, generation: Generation) -> Iterator[Sequence[subprocess.Popen[str]]]:
        self.generation = generation
        self.sizes.append(len(generation.slots))
        variables = {
            "ONNXPAR_BIND": "127.0.0.1",
            "ONNXPAR_STORE": f"file:{self.out}/store-{generation.number}",
            "ONNXPAR_GENERATION": str(generation.number),
            "ONNXPAR_WORLD_SIZE": str(len(generation.slots)),
        }
        more = ["--epochs", str(EPOCHS), "--every", "5", "--elastic", *self.how]
        for rank, slot in enumerate(generation.slots):
            self.processes[str(slot)] = subprocess.Popen(
                command(self.made, self.out, *more),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=self.out,
                env={**os.environ, **variables, "ONNXPAR_RANK": str(rank)},
            )
        yield [self.processes[str(slot)] for slot in generation.slots]


def first_step(out: Path, generation: int) -> int:
    """The first step that a generation took."""
    log = generation_logs(out / "log", generation) / "rank.0" / "stdout.log"
    found = re.search(r"\(step (\d+) of the run\)", log.read_text())
    assert found is not None
    return int(found[1])


def resumed_by_hand(made: Path, out: Path, start: Path, ranks: int) -> Path:
    """What a run on one host leaves that resumes from a checkpoint, over so many ranks."""
    hand = out / f"hand-{ranks}"
    shutil.copytree(start, hand / "c" / start.name)
    shutil.copy(made / "train.npz", hand)
    model = [
        str(made / "step.onnx"),
        "--devices",
        str(ranks),
        "--preset",
        "zero2",
        "--for-any-host",
    ]
    assert main(["shard", *model, "-o", str(hand / "step.par")]) == 0
    how = ["--epochs", str(EPOCHS), "--every", "100", "--resume"]
    assert main(command(hand, hand, *how)[3:]) == 0
    return hand


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
def test_a_host_dies_and_returns(made: Path, tmp_path: Path) -> None:
    """The others go on, make room when it returns, and the end has the bits of resumes by hand."""

    def look(launcher: Launcher) -> None:
        number, b = launcher.generation.number, launcher.processes.get("b:0")
        if number == 0 and launcher.steps >= 12 and b is not None and is_alive(b.pid):
            os.kill(b.pid, signal.SIGKILL)
        if number == 1 and launcher.steps >= 12:
            launcher.members.join(slots_of({"b": 1}))

    launcher = Launcher(made, tmp_path, look)
    assert launcher.run() == 0, launcher.told
    assert launcher.sizes == [3, 2, 3]
    assert launcher.told == [
        "generation 0 has ended: the rank of slot b:0 died; 2 slots go on",
        "generation 1 has ended: b:0 joins; 3 slots go on",
    ]
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 8 * EPOCHS + 1))
    second, third = first_step(tmp_path, 1), first_step(tmp_path, 2)
    assert (second - 1) % 5 == 0 and third - second >= 12
    found = {row["step"]: row["loss"] for row in metrics(tmp_path)}
    for start, end, ranks in ((second, third, 2), (third, 8 * EPOCHS + 1, 3)):
        path = tmp_path / "c" / f"step_{start - 1:08d}"
        hand = resumed_by_hand(made, tmp_path, path, ranks)
        wanted = {row["step"]: row["loss"] for row in metrics(hand)}
        steps = range(start, end)
        assert [found[step] for step in steps] == [wanted[step] for step in steps]
    same(left(tmp_path), left(tmp_path / "hand-3"))


@pytest.mark.slow
def test_ranks_without_a_plan_for_all_are_left_over(tmp_path: Path) -> None:
    """Over 4 ranks and over 2, halves can be had; three are started."""
    step = write_step(MLP, tmp_path, optimizer="sgd")
    halves = {"shard": {"Gemm_h": [[2, 1], [1, 1], [1]]}}
    onnxpar.shard(step, tmp_path / "step.par", devices=4, strategy=halves)
    x = np.ones((16, 6), np.float32)
    np.savez(tmp_path / "train.npz", x=x, labels=np.zeros(16, np.int64))
    launcher = Launcher(tmp_path, tmp_path, lambda launcher: None)
    assert launcher.run() == 0 and launcher.told == []
    text = f"rank 2 is not needed: {tmp_path}/c/ranks_0002.par is for 2 ranks\n"
    log = (tmp_path / "log" / "rank.2" / "stderr.log").read_text()
    assert log == f"onnxpar: {text}"


@pytest.mark.slow
def test_too_few_processes(made: Path, tmp_path: Path) -> None:
    """End the run with a message, on all of them."""
    launcher = Launcher(made, tmp_path, lambda launcher: None, "--min-ranks", "4")
    assert launcher.run() == 2
    log = (tmp_path / "log" / "rank.0" / "stderr.log").read_text()
    assert log == "onnxpar: error: 3 processes were started, fewer than --min-ranks 4\n"


def test_a_run_that_is_asked_to_end_saves_first(made: Path, tmp_path: Path) -> None:
    """Between its checkpoints, too, and goes on to the same bits."""

    def take(out: Path, must_stop: Callable[[], bool] | None, resume: bool) -> tuple[Any, Any]:
        taken = []
        with ThreadTrainer(made / "step.par") as trainer:
            run = run_of(out, resume=resume)
            data = Data.of(made / "train.npz", trainer.data, trainer.spec.batch)
            try:
                for record in records(trainer, data, run, None, must_stop):
                    taken.append(record)
            except StoppedError as end:
                last = f"the last checkpoint is {newest(out)}; continue from it with --resume"
                assert str(end) == f"the run was asked to end; {last}"
            return taken, states(trainer)

    asked = iter([False] * 4 + [True])
    first, _ = take(tmp_path / "a", lambda: next(asked), False)
    assert [record.total for record in first] == [1, 2, 3, 4, 5]
    assert newest(tmp_path / "a") == tmp_path / "a" / "step_00000005"
    rest, ended = take(tmp_path / "a", lambda: False, True)
    whole, wanted = take(tmp_path / "b", None, False)
    same(ended, wanted)
    assert losses([*first, *rest]) == losses(whole)


@pytest.mark.slow
def test_sigterm_in_a_single_process_still_ends_it_at_once(made: Path, tmp_path: Path) -> None:
    """Without a launcher, nobody starts the next generation."""
    more = ["--epochs", "2000", "--every", "50", "--elastic"]
    process = subprocess.Popen(
        command(made, tmp_path, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(9):
        process.stdout.readline()
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143 and error.startswith("onnxpar: terminated; the last check")
