"""Runs with tables on the host that are killed, and go on from their last checkpoint to the bits
that they would have had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from runtime.bundles import is_alive, wait_until
from trainer.test_train_command import children, left, metrics, same, steps_done
from training.steps import newest, shard, write_step
from training.test_lazy import MODEL

from onnxpar.cli.command_line import main

pytestmark = pytest.mark.usefixtures("medium")

EPOCHS = 12
LAYOUTS = {
    "rows": ("tp=2", {"tensors": {"w": ["tp", None], "w.*": ["tp", None]}}),
    "whole": ("tp=2", {"tensors": {"w": [None, "tp@1"]}}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step for two ranks in each layout, and 40 samples for batches of 8."""
    folder = tmp_path_factory.mktemp("train")
    step = write_step(MODEL.replace("BATCH", "8"), folder, "mse", "adam", lazy=["w"])
    for name, (mesh, strategy) in LAYOUTS.items():
        par, _ = shard(step, mesh, strategy={**strategy, "place": {"w": "host"}})
        par.rename(folder / f"{name}.par")
    draw = np.random.default_rng(3)
    ids, more = (draw.integers(0, 40, (40, n)) for n in (2, 3))
    target = draw.standard_normal((40, 4)).astype(np.float32)
    np.savez(folder / "train.npz", ids=ids, more=more, target=target)
    return folder


def arguments(made: Path, out: Path, *more: str, layout: str = "rows") -> list[str]:
    files = [str(made / f"{layout}.par"), "--data", str(made / "train.npz"), "--lr", "0.02"]
    folders = ["--checkpoint", str(out / "c"), "--log-dir", str(out / "log")]
    return ["train", *files, *folders, "--epochs", str(EPOCHS), *more]


@pytest.fixture(scope="module")
def undisturbed(made: Path) -> dict[str, Path]:
    """What a run in each layout leaves that nothing disturbs, over one medium for runs over all."""
    for layout in LAYOUTS:
        assert main(arguments(made, made / layout, layout=layout)) == 0
    return {layout: made / layout for layout in LAYOUTS}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.parametrize(
    ("victim", "layout", "how"),
    [(-1, "rows", []), (1, "whole", []), (0, "rows", ["--async-checkpoint"])],
)
def test_a_killed_run_goes_on(
    victim: int,
    layout: str,
    how: list[str],
    made: Path,
    undisturbed: dict[str, Path],
    tmp_path: Path,
    started: list[subprocess.Popen[str]],
) -> None:
    """The command or a rank is killed several times, in the middle of steps, of checkpoints, or of
    their loading."""
    par = sorted(path.name for path in (made / f"{layout}.par").iterdir())
    for after in (0.0, 0.009):
        wanted = steps_done(tmp_path) + 6
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "onnxpar"),
                *arguments(made, tmp_path, "--every", "3", "--resume", *how, layout=layout),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        started.append(run)
        assert wait_until(lambda wanted=wanted: steps_done(tmp_path) > wanted, 60), run.poll()
        ranks = children(run.pid)
        time.sleep(after)
        os.kill(run.pid if victim < 0 else ranks[victim], signal.SIGKILL)
        run.communicate(timeout=60)
        assert wait_until(lambda ranks=ranks: not any(map(is_alive, ranks)), 20)
    reached = newest(tmp_path / "c")
    assert reached is not None and reached.name < "step_00000055"
    assert sorted(path.name for path in (made / f"{layout}.par").iterdir()) == par
    assert main(arguments(made, tmp_path, "--every", "50", "--resume", layout=layout)) == 0
    same(left(tmp_path), left(undisturbed[layout]))
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 5 * EPOCHS + 1))
