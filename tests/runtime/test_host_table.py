"""The files of tables on the host: the memory that ranks take, and the errors of files."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from large_table import FEEDS, LIMIT, ROWS, WIDTH, needs_proc, peaks, write_model

import onnxpar
from onnxpar.base.errors import InputError, ModelError, RankError
from onnxpar.runtime.states.host_table import HostTable
from onnxpar.trainer.checkpoint import Progress
from onnxpar.trainer.trainer import Trainer

PRESETS = {2: "table-parallel", 1: "data-parallel"}
Patch = pytest.MonkeyPatch


def write_step(folder: Path, ranks: int = 2) -> Path:
    """Shards a step whose table and optimizer state are 614 MB, on the host."""
    step = folder / "step.onnx"
    if not step.exists():
        how: dict[str, Any] = {"loss": "mse", "optimizer": "adagrad", "lazy": ["w"]}
        onnxpar.training.grad(write_model(folder), step, **how)
    par = folder / f"{ranks}.par"
    onnxpar.shard(step, par, devices=ranks, preset=PRESETS[ranks], place={"w": "host"})
    return par


MERGE = """
from pathlib import Path
from onnxpar.trainer.merge import merge
merge("c", "m.onnx", "merged.onnx")
print(Path("/proc/self/status").read_text())
"""


def merged_in(folder: Path) -> float:
    """Merges the checkpoint into the model; returns the memory that this took, in MB."""
    command = [sys.executable, "-c", MERGE]
    status = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) / 1e3 if peak else float("inf")


@pytest.mark.slow
@needs_proc
def test_training_takes_little_memory(tmp_path: Path) -> None:
    """Also to save the table, to read it into a file, and to load it on another number of ranks."""
    feeds = {**FEEDS, "target": np.zeros((4, WIDTH), np.float32)}
    losses = []
    with Trainer(write_step(tmp_path), table_cache="8MB") as trainer:
        losses += [trainer.step(feeds, 0.1)["loss"] for _ in range(2)]
        trainer.save(tmp_path / "c", Progress(2))
        assert max(peaks()) < LIMIT
        out = np.memmap(tmp_path / "w", np.float32, "w+", shape=(ROWS, WIDTH))
        assert trainer.session.states.read("w", out=out) is out
        assert max(peaks()) < LIMIT
        losses.append(trainer.step(feeds, 0.1)["loss"])
    assert losses[0] > losses[1] > losses[2] and out[7, 0] not in (0, 1) and out[4, 0] == 0
    assert merged_in(tmp_path) < LIMIT
    found = np.memmap(tmp_path / "merged.onnx.data", np.float32, "r", shape=(ROWS, WIDTH))
    np.testing.assert_array_equal(found[:8], out[:8])
    np.testing.assert_array_equal(found[-1], out[-1])
    with Trainer(write_step(tmp_path, 1), table_cache="8MB") as trainer:
        trainer.load(tmp_path / "c")
        assert trainer.step(feeds, 0.1)["loss"] == pytest.approx(losses[2], rel=1e-5)
        assert max(peaks()) < LIMIT
        assert not [name for name in os.listdir(tmp_path / "1.par") if name.startswith("tmp")]


def table(folder: Path, shape: tuple[int, ...] = (100, 4)) -> HostTable:
    return HostTable(folder, "w", np.dtype(np.float32), shape)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_a_table(number: int, tmp_path: Path, monkeypatch: Patch) -> None:
    """Is found out before the first step, not by a signal at some write."""

    def full(*given: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = r"cannot make the file of 1,600 bytes for 'w' in .*; free some space there"
    with pytest.raises(InputError, match=message):
        table(tmp_path)


@pytest.mark.slow
def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: Patch) -> None:
    par = write_step(tmp_path, 1)
    with pytest.raises(InputError, match=r"none is not a folder, .*--table-dir"):
        Trainer(par, table_dir=tmp_path / "none")
    monkeypatch.setattr(os, "access", lambda *given: False)
    with pytest.raises(InputError, match=r"1.par cannot be written, .*--table-dir"):
        Trainer(par)
    monkeypatch.undo()
    for size, message in (("much", "--table-cache: 'much' is not a size"), ("-1B", "give 0 or")):
        with pytest.raises(InputError, match=message):
            Trainer(par, table_cache=size)


@pytest.mark.slow
def test_a_file_that_is_gone(tmp_path: Path) -> None:
    """After the session started, or before."""
    par = write_step(tmp_path, 1)
    (file,) = par.glob("*.weights")
    feeds = {"ids": np.zeros((4, 3), np.int64), "target": np.zeros((4, WIDTH), np.float32)}
    with Trainer(par) as trainer:
        file.rename(tmp_path / "gone")
        with pytest.raises(RankError, match=r"cannot read 'w' from .*weights: no such file"):
            trainer.step(feeds, 0.1)
        (tmp_path / "gone").rename(file)
        trainer.step(feeds, 0.1)
    file.unlink()
    with pytest.raises(ModelError, match=f"lacks {file.name}"):
        Trainer(par)


def test_files_vanish(tmp_path: Path) -> None:
    """They have no names, so that a kill leaves none."""
    found = table(tmp_path)
    found.array[:] = 3
    assert not list(tmp_path.iterdir())
    assert (np.concatenate(list(found.blocks())) == 3).all()


def test_copies_between_file_systems(tmp_path: Path, monkeypatch: Patch) -> None:
    """Where the kernel does not copy."""
    wanted = np.random.default_rng(0).standard_normal((100, 4)).astype(np.float32)
    (tmp_path / "source").write_bytes(b"12345678" + wanted.tobytes())

    def refused(*given: int) -> int:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    for number in range(2):
        if number:
            monkeypatch.setattr(os, "copy_file_range", refused)
            monkeypatch.setattr("onnxpar.runtime.states.host_table.BLOCK", 100)
        found = table(tmp_path)
        found.copy_from(tmp_path / "source", 8)
        np.testing.assert_array_equal(found.array, wanted)
        with pytest.raises(ModelError, match="it ends after 1,608 bytes"):
            table(tmp_path).copy_from(tmp_path / "source", 16)


def test_tables_without_elements(tmp_path: Path) -> None:
    for shape in ((0, 4), (4, 0)):
        found = table(tmp_path, shape)
        assert found.array.shape == shape and tuple(found.value.shape()) == shape
        assert [block.shape for block in found.blocks()] in ([], [shape])
        found.copy(np.zeros(shape, np.float32))
