"""Ranks that start before the session that takes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runtime.bundles import is_alive, k_split, pids, wait_until, weight_of_k_split

from onnxpar.cli import main
from onnxpar.runtime.ranks import started_ranks
from onnxpar.runtime.ranks.started_ranks import StartedRanks, started_early
from onnxpar.runtime.session.session import InferenceSession


def early() -> list[int]:
    """The processes of ranks that no session has taken."""
    return [rank.process.pid for each in started_ranks._early for rank in each.ranks]


@pytest.mark.slow
def test_a_session_takes_them(tmp_path: Path) -> None:
    par, x = k_split(tmp_path), np.ones((4, 7), np.float32)
    with started_early(2):
        started = early()
        with InferenceSession(par) as session:
            assert pids(session) == started
            (y,) = session.run(["y"], {"x": x})
            np.testing.assert_allclose(y, x @ weight_of_k_split(), rtol=1e-5, atol=1e-5)
        with InferenceSession(par) as another:
            assert not {*pids(another)} & {*started}
    assert not any(map(is_alive, started))


@pytest.mark.slow
def test_a_session_of_another_size_does_not(tmp_path: Path) -> None:
    par = k_split(tmp_path)
    with started_early(3):
        started = early()
        with InferenceSession(par) as session:
            assert len(pids(session)) == 2
            assert not {*pids(session)} & {*started}
        assert all(map(is_alive, started))
    assert not any(map(is_alive, started))


@pytest.mark.slow
def test_a_session_with_a_log_does_not(tmp_path: Path) -> None:
    par = k_split(tmp_path)
    with started_early(2), InferenceSession(par, log_dir=tmp_path / "log") as session:
        assert not {*pids(session)} & {*early()}


def test_a_command_that_fails_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file of inputs is missing, which it finds after the start of the ranks."""
    par, start = k_split(tmp_path), StartedRanks.start
    seen: list[int] = []

    def noted(size: int, log_dir: None) -> StartedRanks:
        ranks = start(size, log_dir)
        seen.extend(rank.process.pid for rank in ranks.ranks)
        return ranks

    monkeypatch.setattr(StartedRanks, "start", noted)
    assert main(["run", str(par), "--inputs", str(tmp_path / "nothing.npz")]) == 2
    assert len(seen) == 2
    assert not any(map(is_alive, seen))


def test_they_end_with_the_command(tmp_path: Path) -> None:
    """Even if it is killed."""
    script = """
import os, signal, sys
from onnxpar.runtime.ranks import started_ranks
with started_ranks.started_early(2):
    print(*(rank.process.pid for rank in started_ranks._early[0].ranks), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    started = [int(pid) for pid in done.stdout.split()]
    assert len(started) == 2, done.stderr
    assert wait_until(lambda: not any(map(is_alive, started)))


def test_neither_they_nor_the_command_import_onnx() -> None:
    """It takes as long to import as NumPy. Imports leave garbage collection and the environment as
    they were."""
    script = """
import gc, os, sys
from onnxpar.base.quick_imports import quick_imports
with quick_imports():
    import onnxpar.runtime.ranks.rank_loop
    import onnxpar.cli.run_model
print(*{"onnx", "scipy", "tqdm"} & {*sys.modules})
print(gc.isenabled(), "OPENBLAS_NUM_THREADS" in os.environ)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "\nTrue False\n", done.stderr
