"""onnxpar train: processes that train, are killed, and go on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.bundles import is_alive, wait_until
from training.steps import MLP, newest, shard, write_model, write_step

from onnxpar.cli.command_line import main
from onnxpar.runtime.ranks.log import Log
from onnxpar.trainer.checkpoint import Checkpoint, checkpoints, damage
from onnxpar.trainer.loop import Record
from onnxpar.trainer.merge import merge
from onnxpar.trainer.metrics_files import JsonLines, row_of
from onnxpar.trainer.together import ALONE

RATE = ["--lr", "0.02", "--schedule", "cosine", "--warmup", "3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step for two ranks, `step.par`, and 60 samples for batches of 8."""
    folder = tmp_path_factory.mktemp("train")
    step = write_step(MLP, folder, optimizer="adam", clip_norm=1.0)
    shard(step, "zero2 2")[0].rename(folder / "step.par")
    draw = np.random.default_rng(3)
    x = draw.standard_normal((60, 6)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, labels=draw.integers(0, 5, 60))
    np.savez(folder / "short.npz", x=x[:7], labels=np.zeros(7, np.int64))
    return folder


def arguments(made: Path, out: Path, *more: str, epochs: int = 2) -> list[str]:
    files = [str(made / "step.par"), "--data", str(made / "train.npz")]
    folders = ["--checkpoint", str(out / "c"), "--log-dir", str(out / "log")]
    return ["train", *files, *RATE, "--epochs", str(epochs), *folders, *more]


def command(made: Path, out: Path, *more: str, epochs: int = 2) -> list[str]:
    return [sys.executable, "-m", "onnxpar", *arguments(made, out, *more, epochs=epochs)]


def left(folder: Path) -> dict[str, Any]:
    """All that the newest checkpoint of a run holds."""
    found = Checkpoint.load(folder / "c")
    values = {s.input: found.states.read(s.input) for s in found.slots}
    return {"step": found.progress.step, **values}


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def metrics(out: Path) -> list[dict[str, float]]:
    lines = (out / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def at_once(made: Path) -> Path:
    """What a run of two epochs leaves that nothing disturbs."""
    out = made / "at-once"
    assert main(arguments(made, out)) == 0
    return out


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_run_prints_and_leaves(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at_once: Path
) -> None:
    assert main(arguments(made, tmp_path, "--every", "4", "--batch", "8")) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 17))  # the last batch of an epoch has 4
    for line, row in zip(lines, rows, strict=False):
        step = (row["step"] - 1) % 8 + 1
        where = f"step {row['step']} of the run"
        assert line == f"epoch: {row['epoch']} step: {step}, loss is {row['loss']:.6g} ({where})"
    assert set(rows[0]) >= {"epoch", "step", "learning_rate", "loss", "gradient_norm", "seconds"}
    assert rows[0]["learning_rate"] == pytest.approx(0.02 / 3)
    assert lines[-1] == f"the last checkpoint is {tmp_path / 'c' / 'step_00000016'}"
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names == [f"step_{n:08d}" for n in (4, 8, 12, 16)]
    picture = (tmp_path / "log" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    assert (tmp_path / "log" / "rank.1" / "stderr.log").exists()
    same(left(tmp_path), left(at_once))  # twice the same command, and checkpoints change nothing


@pytest.mark.slow
def test_steps_after_a_checkpoint_are_told_once(made: Path, at_once: Path, tmp_path: Path) -> None:
    assert main(arguments(made, tmp_path, "--every", "4")) == 0
    for done in (12, 16):
        shutil.rmtree(tmp_path / "c" / f"step_{done:08d}")
    with (tmp_path / "log" / "metrics.jsonl").open("a") as sink:
        sink.write('{"epoch": 9, "st')  # as a killed run may leave it
    assert main(arguments(made, tmp_path, "--resume")) == 0
    told = [(row["step"], row["loss"]) for row in metrics(tmp_path)]
    assert told == [(row["step"], row["loss"]) for row in metrics(at_once)]
    same(left(tmp_path), left(at_once))


def test_a_checkpoint_becomes_a_model(made: Path, at_once: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained.onnx"
    files = [str(at_once / "c"), str(made / "model.onnx"), "-o", str(trained)]
    assert main(["checkpoint", "merge", *files]) == 0
    merge(at_once / "c", made / "model.onnx", tmp_path / "again.onnx")
    assert trained.read_bytes() == (tmp_path / "again.onnx").read_bytes()
    assert main(["checkpoint", "merge", str(tmp_path), *files[1:]]) == 2


def children(pid: int) -> list[int]:
    """The ranks of a process, which a thread of it has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def start(
    running: list[subprocess.Popen[str]], made: Path, out: Path, *more: str, epochs: int
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command(made, out, *more, epochs=epochs),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out,
    )
    running.append(process)
    return process


def steps_done(out: Path) -> int:
    file = out / "log" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


LONG = 20
"""Epochs of a run that is killed."""


@pytest.fixture(scope="module")
def undisturbed(made: Path) -> Path:
    """What such a run leaves that nothing disturbs."""
    out = made / "undisturbed"
    assert main(arguments(made, out, epochs=LONG)) == 0
    return out


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--async-checkpoint"]])
def test_a_killed_run_goes_on(
    how: list[str],
    medium: str,
    made: Path,
    undisturbed: Path,
    tmp_path: Path,
    started: list[subprocess.Popen[str]],
) -> None:
    """From its last whole checkpoint, to the bits that it would have had: killed wherever it is
    then, most of the time while it writes one."""
    run = start(started, made, tmp_path, "--every", "1", *how, epochs=LONG)
    assert wait_until(lambda: steps_done(tmp_path) > 20, 60), run.poll()
    ranks = children(run.pid)
    time.sleep({"shared-memory": 0.0, "gloo": 0.013}[medium])
    run.kill()
    run.wait()
    assert len(ranks) >= 2 and wait_until(lambda: not any(map(is_alive, ranks)), 20)
    reached = newest(tmp_path / "c")
    least = "step_00000010" if how else "step_00000020"  # one may be in flight
    assert reached is not None and least <= reached.name < "step_00000160"
    assert all(not damage(path, ALONE) for path in checkpoints(tmp_path / "c").values())
    assert main(arguments(made, tmp_path, "--every", "50", "--resume", *how, epochs=LONG)) == 0
    same(left(tmp_path), left(undisturbed))
    assert not list((tmp_path / "c").glob(".*"))
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 8 * LONG + 1))
    pairs = zip(metrics(tmp_path), metrics(undisturbed), strict=True)
    assert all(a["loss"] == b["loss"] for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ending"),
    [
        (["--every", "5"], "the last checkpoint is {}; continue from it with --resume"),
        ([], "there is no checkpoint yet: the first is saved at the end; give --every N to save "),
    ],
)
def test_an_interrupted_run_says_where_its_last_checkpoint_is(
    more: Sequence[str],
    ending: str,
    made: Path,
    tmp_path: Path,
    started: list[subprocess.Popen[str]],
) -> None:
    run = start(started, made, tmp_path, *more, epochs=2000)
    assert wait_until(lambda: steps_done(tmp_path) > 8, 60), run.poll()
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert error.startswith(f"onnxpar: interrupted; {ending.format(newest(tmp_path / 'c'))}")


@pytest.mark.processes
def test_a_terminated_run_saves_a_checkpoint(
    made: Path, tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    """Also where a scheduler sends the signal to all processes of a job."""
    run = start(started, made, tmp_path, epochs=2000)
    assert wait_until(lambda: steps_done(tmp_path) > 8, 60), run.poll()
    for process in (*children(run.pid), run.pid):
        os.kill(process, signal.SIGTERM)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 143
    last = newest(tmp_path / "c")
    assert last is not None and steps_done(tmp_path) == Checkpoint.load(last).progress.step
    assert error == (
        f"onnxpar: terminated; the last checkpoint is {last}; continue from it with --resume\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("how", [[], ["--async-checkpoint"]])
def test_a_killed_rank_ends_the_run(
    how: list[str],
    made: Path,
    undisturbed: Path,
    tmp_path: Path,
    started: list[subprocess.Popen[str]],
) -> None:
    """With exit status 2 and its number; and the run goes on from its last checkpoint."""
    run = start(started, made, tmp_path, "--every", "1", *how, epochs=LONG)
    assert wait_until(lambda: steps_done(tmp_path) > 10, 60), run.poll()
    ranks = children(run.pid)
    os.kill(ranks[1], signal.SIGKILL)
    _, error = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "was killed" in error and "rank" in error and "Traceback" not in error
    last = f"the last checkpoint is {newest(tmp_path / 'c')}; continue from it with --resume"
    assert f"(signal 9); {last}" in error
    assert wait_until(lambda: not any(map(is_alive, ranks)), 20)
    assert main(arguments(made, tmp_path, "--resume", epochs=LONG)) == 0
    same(left(tmp_path), left(undisturbed))


@pytest.mark.slow
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("how", [[], ["--async-checkpoint"]])
def test_under_mpirun(how: list[str], made: Path, at_once: Path, tmp_path: Path) -> None:
    """Each process is a rank; the first tells what all did. What they leave is the same."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [mpirun, *options, *command(made, tmp_path, "--every", "5", *how)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("epoch: ") for line in lines) == 16
    assert lines[-1].endswith("step_00000016")
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 17))
    same(left(tmp_path), left(at_once))
    for rank in range(2):
        assert (tmp_path / "log" / f"rank.{rank}" / "stderr.log").exists()
        assert log_of(tmp_path, rank) == [line for line in lines if line.startswith("epoch: ")]


def log_of(folder: Path, rank: int) -> list[str]:
    """The lines that a rank's log has."""
    text = (folder / "log" / f"rank.{rank}" / "stdout.log").read_text()
    return text.splitlines()


@pytest.mark.processes
def test_the_log_of_each_rank_has_the_losses(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As MindSpore's tutorials show; and those of an evaluation, and after what the rank prints."""
    assert main(arguments(made, tmp_path, "--eval", str(made / "train.npz"))) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("epoch: ")]
    assert len(lines) == 2 * (8 + 1) and lines[8].startswith("epoch: 1 evaluation: loss is ")
    rows = [f"{row['loss']:.6g}" for row in metrics(tmp_path)]
    assert [re.split("loss is | [(]", x)[1] for x in lines if "step: " in x] == rows
    for rank in range(2):
        assert log_of(tmp_path, rank) == lines


def test_rows_of_metrics_are_json(tmp_path: Path) -> None:
    """Also where a number is not finite."""
    values = {"loss": 0.5, "gradient_norm": math.inf}
    record = Record(1, 1, 1, 0.1, 0.2, values, {"loss": math.nan, "accuracy": 0.5})
    JsonLines(tmp_path / "metrics.jsonl").add(row_of(record))
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert row["gradient_norm"] is None and row["eval_loss"] is None and row["loss"] == 0.5


PYTHON = """
import sys
import onnxpar.training
from onnxpar.trainer.trainer import Trainer

if __name__ == "__main__":
    par, data, folder = sys.argv[1:]
    found = onnxpar.training.train(par, data, lr=0.02, epochs=1, log_dir=folder + "/log")
    with open(folder + "/losses", "w") as sink:
        sink.writelines(f"{each.values['loss']:.6g}\\n" for each in found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], ["mpirun", "--allow-run-as-root", "-n", "2"]])
def test_the_logs_of_a_run_in_python_have_the_losses(
    launcher: list[str], made: Path, tmp_path: Path
) -> None:
    if launcher and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    (tmp_path / "own.py").write_text(PYTHON)
    files = [str(made / "step.par"), str(made / "train.npz"), str(tmp_path)]
    oversubscribed = [*launcher, "--oversubscribe"] if launcher else []
    run = [*oversubscribed, sys.executable, str(tmp_path / "own.py"), *files]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = (tmp_path / "losses").read_text().split()
    assert len(losses) == 8
    for rank in range(2):
        lines = [f"epoch: 1 step: {i}, loss is {loss}" for i, loss in enumerate(losses, 1)]
        numbered = [f"{line} (step {i} of the run)" for i, line in enumerate(lines, 1)]
        assert log_of(tmp_path, rank) == numbered


def test_what_a_rank_prints_and_what_is_written_do_not_overwrite(tmp_path: Path) -> None:
    with Log.open(tmp_path, 0).stdout as file:
        log = Log(file, file, tmp_path)
        for word in ("one", "three"):
            subprocess.run(["echo", word], stdout=file, check=True)
            log.write("two\n")
    assert (tmp_path / "rank.0" / "stdout.log").read_text().split() == [
        "one",
        "two",
        "three",
        "two",
    ]


def test_only_the_newest_checkpoints_are_kept(made: Path, at_once: Path, tmp_path: Path) -> None:
    assert main(arguments(made, tmp_path, "--every", "4", "--keep", "2")) == 0
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names == ["step_00000012", "step_00000016"]
    same(left(tmp_path), left(at_once))


def test_a_loss_that_is_no_number_ends_the_run(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a checkpoint is written of what it left; what is told up to there stays."""
    held = dict(np.load(made / "train.npz"))
    held["x"][33] = np.nan  # in the fifth batch of eight, where the order is the file's
    np.savez(tmp_path / "bad.npz", **held)
    more = ["--data", str(tmp_path / "bad.npz"), "--no-shuffle", "--every", "1"]
    assert main(arguments(made, tmp_path, *more)) == 2
    error = capsys.readouterr().err
    assert "onnxpar: error: epoch 1, step 5: the loss is nan, and nothing was updated;" in error
    assert newest(tmp_path / "c") == tmp_path / "c" / "step_00000004"
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch", "9"], "--batch 9: this step was written for batches of 8 samples"),
        (["--warmup", "20"], "--warmup 20: the run has 16 steps; give a number from 0 to 16"),
        (["--lr", "-1"], "--lr -1.0: the learning rate must be finite, and 0 or more"),
        (["--epochs", "0"], "--epochs 0: must be at least 1"),
        (["--keep", "-1"], "--keep -1: give the number of checkpoints to keep"),
        (["--data", "none.npz"], "there is no file none.npz"),
    ],
)
def test_bad_arguments(
    more: Sequence[str],
    message: str,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(made, tmp_path, *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("onnxpar: error: ")
    assert not (tmp_path / "c").exists() and not (tmp_path / "log" / "metrics.jsonl").exists()


def test_what_is_in_the_way(made: Path, at_once: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of an earlier run, or of one of another seed; nothing is overwritten."""
    before = metrics(at_once)
    for more, message in (
        ([], "belongs to an earlier run; continue that run with --resume"),
        (
            ["--resume", "--seed", "1"],
            "belongs to another run: --seed 0, now 1; give what that run had, or --allow",
        ),
    ):
        assert main(arguments(made, at_once, *more)) == 2
        assert message in capsys.readouterr().err
    assert metrics(at_once) == before
    assert main(arguments(made, at_once, "--resume")) == 0
    done = f"nothing to do: {at_once / 'c'} has finished epoch 2 of --epochs 2; raise --epochs"
    assert capsys.readouterr().err == f"onnxpar: warning: {done}\n"
    assert metrics(at_once) == before


def test_what_is_no_step(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(MLP, tmp_path)
    par = shard(path, "data-parallel 2")[0]
    files = [str(par), "--data", str(made / "train.npz"), "--log-dir", str(tmp_path / "log")]
    assert main(["train", *files, "--lr", "0.1"]) == 2
    assert "is not a training step; write one with `onnxpar grad`" in capsys.readouterr().err
    assert main(["train", str(tmp_path), *files[1:], "--lr", "0.1"]) == 2
    assert "is not a sharded model" in capsys.readouterr().err


@pytest.mark.slow
def test_check_train(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On what is given, again and again, or on random batches; 2 for what cannot be."""
    step = str(made / "step.onnx")
    how = ["check", step, "--train", "--devices", "2", "--preset", "zero3", "--steps", "12"]
    assert main([*how, "--inputs", str(made / "train.npz")]) == 0
    shown = capsys.readouterr().out
    assert "12 steps over 2 ranks compared with one rank:" in shown and "loss, later steps" in shown
    assert main([*how[:-1], "0"]) == 2
    assert "--steps 0: must be at least 1" in capsys.readouterr().err
    assert main(["check", str(made / "model.onnx"), "--train", "--devices", "2"]) == 2
    assert "is not a training step" in capsys.readouterr().err
