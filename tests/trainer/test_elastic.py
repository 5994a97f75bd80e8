"""Runs that live on when ranks die; most ranks here are threads whose deaths are told."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.bundles import is_alive, wait_until
from trainer.test_train_command import children, left, metrics
from training.steps import MLP, ThreadTrainer, newest, same, states, write_step

import onnxpar
from onnxpar.base.errors import InputError, RankError, RunError
from onnxpar.cli.command_line import main
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.trainer.checkpoint import checkpoints
from onnxpar.trainer.data import Data
from onnxpar.trainer.elastic import Elastic, Generations, generation_logs
from onnxpar.trainer.loop import Record, Run, records
from onnxpar.trainer.rates import Schedule

EVERY, EPOCHS = 3, 3
Deaths = Mapping[int, tuple[int, ...]]
"""By the number of a step that all generations count: the ranks that die in it."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step for three ranks, and 60 samples for batches of 8."""
    folder = tmp_path_factory.mktemp("train")
    step = write_step(MLP, folder, optimizer="adam", clip_norm=1.0)
    onnxpar.shard(step, folder / "step.par", devices=3, preset="zero2")
    draw = np.random.default_rng(3)
    x = draw.standard_normal((60, 6)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, labels=draw.integers(0, 5, 60))
    return folder


class Mortal(ThreadTrainer):
    """A trainer whose ranks die at some steps."""

    deaths: dict[int, Exception]
    taken: int
    sizes: list[int]
    batches: list[bytes]
    logs: list[object]

    def __init__(self, par: Path, held: object = None, log_dir: object = None) -> None:
        Mortal.sizes.append(Bundle.load(par).mesh.size)
        Mortal.logs.append(log_dir)
        self._die()
        super().__init__(par)

    def step(self, batch: Any, rate: float, seed: int = 0) -> dict[str, float]:
        self._die()
        Mortal.batches.append(batch["labels"].tobytes())
        return super().step(batch, rate, seed)

    def _die(self) -> None:
        """Counts a start or a step."""
        Mortal.taken += 1
        if Mortal.taken in Mortal.deaths:
            raise Mortal.deaths.pop(Mortal.taken)


def death(*lost: int) -> RankError:
    error = RankError(f"a run of step.par: rank {lost} was killed\n  rank 9: notes that")
    error.lost = lost
    return error


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> type[Mortal]:
    """Trainers of generations; `deaths` is to be set."""
    monkeypatch.setattr("onnxpar.trainer.elastic.Trainer", Mortal)
    Mortal.deaths, Mortal.taken = {}, 0
    Mortal.sizes, Mortal.batches, Mortal.logs = [], [], []
    return Mortal


def data_of(made: Path, trainer: Any) -> Data:
    return Data.of(made / "train.npz", trainer.data, trainer.spec.batch)


def run_of(out: Path, resume: bool = False) -> Run:
    return Run(EPOCHS, 0.02, Schedule("cosine", 3), checkpoint=out, every=EVERY, resume=resume)


def train(made: Path, out: Path, elastic: Elastic | None) -> tuple[list[Record], dict[str, Any]]:
    """Trains; returns the records, and the states at the end."""
    with Generations(made / "step.par", run_of(out), elastic) as generations:
        told = list(generations.records(data_of(made, generations.trainer)))
        return told, states(generations.trainer)


def by_hand(
    made: Path, out: Path, start: Path, upto: int, ranks: int
) -> tuple[list[Record], dict[str, Any]]:
    """What a user does: shards the step for fewer ranks, and resumes from a checkpoint, if any."""
    par = out / f"by-hand-{ranks}.par"
    out.mkdir(exist_ok=True)
    onnxpar.shard(made / "step.onnx", par, devices=ranks, preset="zero2")
    for step, path in checkpoints(start).items():
        if step <= upto:
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)
    with ThreadTrainer(par) as trainer:
        run = Run(EPOCHS, 0.02, Schedule("cosine", 3), checkpoint=out, every=EVERY, resume=True)
        return list(records(trainer, data_of(made, trainer), run)), states(trainer)


def losses(told: list[Record]) -> dict[int, float]:
    return {record.total: record.values["loss"] for record in told}


@pytest.mark.slow
@pytest.mark.processes
def test_fewer_ranks_go_on_to_the_bits_of_a_resume_by_hand(
    made: Path, tmp_path: Path, mortal: type[Mortal], capsys: pytest.CaptureFixture[str]
) -> None:
    """In step 8, after the checkpoint of step 6, on the same batches."""
    mortal.deaths = {1 + 8: death(1)}
    told, ended = train(made, tmp_path / "run", Elastic(min_ranks=2, max_restarts=0))
    assert mortal.sizes == [3, 2]
    assert [r.total for r in told] == [*range(1, 8), *range(7, 22)]
    wanted, at_end = by_hand(made, tmp_path / "hand", tmp_path / "run", 6, 2)
    same(ended, at_end)
    assert [r.total for r in wanted] == list(range(7, 22))
    assert losses(told[7:]) == losses(wanted)
    batches = mortal.batches
    assert batches[7] == batches[6] and len(set(batches)) == 21
    error = capsys.readouterr().err
    line = "onnxpar: a run of step.par: rank (1,) was killed; --max-restarts 0 is used up, so 2 "
    assert error.startswith(f"{line}ranks go on, from {tmp_path / 'run' / 'step_00000006'}\n")
    assert f"sharding {made / 'step.onnx'} for 2 ranks\n" in error


@pytest.mark.slow
def test_ranks_that_are_started_again_go_on_as_if_nothing_had_happened(
    made: Path, tmp_path: Path, mortal: type[Mortal], capsys: pytest.CaptureFixture[str]
) -> None:
    at_once, wanted = train(made, tmp_path / "once", None)
    mortal.taken, mortal.sizes = 0, []
    mortal.deaths = {1 + 8: death(1), 1 + 8 + 1 + 9: death(0, 2)}
    told, ended = train(made, tmp_path / "run", Elastic(min_ranks=3, max_restarts=2))
    assert mortal.sizes == [3, 3, 3]
    same(ended, wanted)
    assert losses(told) == losses(at_once)
    assert [line for line in capsys.readouterr().err.splitlines() if "restart" in line] == [
        f"onnxpar: a run of step.par: rank {who} was killed; restart {n} of 2, from "
        f"{tmp_path / 'run' / f'step_{step:08d}'}"
        for n, who, step in ((1, "(1,)", 6), (2, "(0, 2)", 12))
    ]


CASES: dict[str, tuple[dict[int, Exception], int, list[int], int]] = {
    "before the first checkpoint": ({1 + 2: death(0)}, 0, [3, 2], 0),
    "at the start": ({1: death(2)}, 0, [3, 2], 0),
    "at a start again": ({1 + 8: death(2), 1 + 8 + 1: death(1)}, 1, [3, 3, 2], 6),
    "two at once": ({1 + 8: death(0, 1)}, 0, [3, 1], 6),
    "one after the other": ({1 + 8: death(0), 1 + 8 + 1 + 6: death(0)}, 0, [3, 2, 1], 9),
}
"""The deaths, the restarts, the ranks of the generations, and the step of the checkpoint from which
the last generation goes on."""


@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_deaths(case: str, made: Path, tmp_path: Path, mortal: type[Mortal]) -> None:
    deaths, restarts, sizes, last = CASES[case]
    mortal.deaths = dict(deaths)
    told, ended = train(made, tmp_path / "run", Elastic(max_restarts=restarts))
    assert mortal.sizes == sizes and not mortal.deaths
    assert {record.total for record in told} == set(range(1, 22))
    wanted, at_end = by_hand(made, tmp_path / "hand", tmp_path / "run", last, sizes[-1])
    same(ended, at_end)
    again = losses(wanted)
    assert {total: loss for total, loss in losses(told).items() if total in again} == again


def test_too_few_ranks_are_left(made: Path, tmp_path: Path, mortal: type[Mortal]) -> None:
    mortal.deaths = {1 + 8: death(1, 2)}
    with pytest.raises(RankError, match=r"killed; ranks left: 1, fewer than --min-ranks 2\n  rank"):
        train(made, tmp_path / "run", Elastic(min_ranks=2, max_restarts=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [RankError("ranks disagree"), RunError("an index is out of range")]
)
def test_errors_without_a_death_end_the_run(
    error: RankError, made: Path, tmp_path: Path, mortal: type[Mortal]
) -> None:
    """Another generation would have them, too."""
    mortal.deaths = {1 + 8: error}
    with pytest.raises(RankError, match=str(error)):
        train(made, tmp_path / "run", Elastic())
    assert mortal.sizes == [3]


def test_deaths_end_a_run_that_is_not_elastic(
    made: Path, tmp_path: Path, mortal: type[Mortal]
) -> None:
    mortal.deaths = {1 + 8: death(1)}
    with pytest.raises(RankError, match="was killed"):
        train(made, tmp_path / "run", None)
    assert mortal.sizes == [3]


@pytest.mark.processes
def test_each_generation_has_its_logs(made: Path, tmp_path: Path, mortal: type[Mortal]) -> None:
    mortal.deaths = {1 + 8: death(1)}
    run, elastic = run_of(tmp_path / "run"), Elastic(max_restarts=1, min_ranks=3)
    options = {"log_dir": tmp_path / "log"}
    with Generations(made / "step.par", run, elastic, **options) as generations:
        list(generations.records(data_of(made, generations.trainer)))
    assert mortal.logs == [tmp_path / "log", tmp_path / "log" / "generation.1"]


Options = Callable[[], object]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ranks": 2}, "--min-ranks is for runs with --elastic; give that too"),
        ({"max_restarts": 0}, "--max-restarts is for runs with --elastic"),
        ({"step": "step.onnx"}, "--step is for runs with --elastic"),
        ({"elastic": True, "min_ranks": 4}, "--min-ranks 4: must be from 1 to 3, the number of"),
        ({"elastic": True, "min_ranks": 0}, "--min-ranks 0: must be from 1 to 3"),
        ({"elastic": True, "max_restarts": -1}, "--max-restarts -1: must be at least 0"),
        ({"elastic": True, "every": 0}, "--elastic: a run goes on from its last checkpoint; give"),
        ({"elastic": True, "step": "none.onnx"}, "none.onnx is not there, of which "),
        ({"elastic": True, "profile": "OUT/t.json"}, "--profile is for the ranks of one generati"),
    ],
)
def test_options_that_do_not_go_together(
    options: dict[str, Any], message: str, made: Path, tmp_path: Path, mortal: type[Mortal]
) -> None:
    given: dict[str, Any] = {"checkpoint": tmp_path / "run", "every": 3, **options}
    if "profile" in given:
        given["profile"] = tmp_path / "t.json"
    with pytest.raises(InputError, match=message):
        onnxpar.training.train(made / "step.par", made / "train.npz", lr=0.02, **given)
    assert mortal.sizes == []


def command(made: Path, out: Path, *more: str) -> list[str]:
    files = [str(made / "step.par"), "--data", str(made / "train.npz"), "--lr", "0.02"]
    folders = ["--checkpoint", str(out / "c"), "--log-dir", str(out / "log")]
    return [sys.executable, "-m", "onnxpar", "train", *files, *folders, *more]


def steps_of(logs: Path) -> int:
    """How many steps a generation has logged."""
    log = logs / "rank.0" / "stdout.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def killed(
    made: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs the command, kills ranks of each generation as soon as it has taken some steps, and
    waits for the end."""

    def run(victims: list[tuple[int, ...]], *more: str) -> tuple[int, str]:
        given = command(made, tmp_path, *more)
        process = subprocess.Popen(
            given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        started.append(process)
        for generation, ranks in enumerate(victims):
            logs = generation_logs(tmp_path / "log", generation)
            assert wait_until(lambda logs=logs: steps_of(logs) >= 12, 120), process.poll()
            alive = [pid for pid in children(process.pid) if is_alive(pid)]
            for rank in ranks:
                os.kill(alive[rank], signal.SIGKILL)
            assert wait_until(lambda alive=alive: not any(map(is_alive, alive)), 120)
        _, error = process.communicate(timeout=240)
        return process.returncode, error

    yield run


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("medium")
def test_processes_that_are_killed(
    made: Path, tmp_path: Path, killed: Callable[..., tuple[int, str]]
) -> None:
    """One rank is started again; then, of three, one is given up. The end has the bits of a resume
    by hand from the checkpoint that the command names."""
    how = ["--every", "5", "--epochs", "30", "--async-checkpoint"]
    elastic = ["--elastic", "--min-ranks", "2", "--max-restarts", "1"]
    status, error = killed([(1,), (0,)], *how, *elastic)
    assert status == 0, error
    first, second = re.findall(r"onnxpar: .*: rank (\d .*) from .*/(step_\d+)\n", error)
    assert first[0] == "1 was killed by SIGKILL (signal 9); restart 1 of 1,"
    assert second[0].startswith("0 was killed by SIGKILL (signal 9); --max-restarts 1 is used up, ")
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 8 * 30 + 1))
    hand = tmp_path / "hand"
    shutil.copytree(tmp_path / "c" / second[1], hand / "c" / second[1])
    model = [str(made / "step.onnx"), "--devices", "2", "--preset", "zero2", "--for-any-host"]
    assert main(["shard", *model, "-o", str(hand / "step.par")]) == 0
    shutil.copy(made / "train.npz", hand)
    assert main([*command(hand, hand, *how, "--resume")[3:]]) == 0
    same(left(tmp_path), left(hand))
    tail = metrics(tmp_path)[-len(metrics(hand)) :]
    assert [row["loss"] for row in tail] == [row["loss"] for row in metrics(hand)]
    logs = sorted(path.name for path in (tmp_path / "log").glob("generation.*"))
    assert logs == ["generation.1", "generation.2"]


@pytest.mark.slow
@pytest.mark.processes
def test_processes_that_are_all_killed_at_once(
    made: Path, tmp_path: Path, killed: Callable[..., tuple[int, str]]
) -> None:
    """Are all started again; without restarts, the run ends and says where it can go on."""
    how = ["--every", "5", "--epochs", "20", "--elastic"]
    status, error = killed([(0, 1, 2)], *how)
    assert status == 0, error
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 8 * 20 + 1))
    shutil.rmtree(tmp_path / "c")
    shutil.rmtree(tmp_path / "log")
    status, error = killed([(0, 1, 2)], *how, "--max-restarts", "0")
    assert status == 2
    text = (
        rf"ranks left: 0, fewer than --min-ranks 1; the last checkpoint is {newest(tmp_path / 'c')}"
    )
    assert text in error and "Traceback" not in error
