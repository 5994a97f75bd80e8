"""Weights of a checkpoint as safetensors files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from training.models import CONV
from training.steps import DOUBLE, MLP, ThreadTrainer, shard, states, write_step

from onnxpar.cli.command_line import main
from onnxpar.trainer.checkpoint import Checkpoint, Progress

read = pytest.importorskip("safetensors.numpy").load_file


def saved(text: str, folder: Path, layout: str) -> dict[str, np.ndarray]:
    """Writes a checkpoint; returns what it has."""
    step = write_step(text, folder, optimizer="adam", batch_norm="global" if text is CONV else None)
    with ThreadTrainer(shard(step, layout)[0]) as trainer:
        trainer.save(folder / "run", Progress(2))
        return states(trainer)


@pytest.mark.parametrize(
    ("text", "layout", "names"),
    [
        (MLP, "zero2 3", {"w1", "w2", "w3", "w4"}),
        (DOUBLE, "tensor-parallel 2", {"w1", "w2", "w3", "w4"}),
        (CONV, "data-parallel 2", {"mean", "variance"}),
    ],
)
def test_one_file(text: str, layout: str, names: set[str], tmp_path: Path) -> None:
    wanted = saved(text, tmp_path, layout)
    assert main(["checkpoint", "weights", str(tmp_path / "run"), "-o", str(tmp_path / "w")]) == 0
    assert [file.name for file in (tmp_path / "w").iterdir()] == ["model.safetensors"]
    found = read(tmp_path / "w" / "model.safetensors")
    assert names <= found.keys() and not any("exp_avg" in name for name in found)
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype
        np.testing.assert_array_equal(value, wanted[name], name)


def test_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = saved(MLP, tmp_path, "zero1 2")
    into = ["-o", str(tmp_path / "w"), "--max-shard-size", "230"]
    for _ in range(2):  # the second time in place of the first folder
        assert main(["checkpoint", "weights", str(tmp_path / "run"), *into]) == 0
    assert capsys.readouterr().out.startswith(f"4 weights of {tmp_path / 'run'} are in")
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (6 * 9 + 9 + 9 * 5 + 5)
    assert index["metadata"]["checkpoint"] == Checkpoint.load(tmp_path / "run").digest
    assert index["weight_map"].keys() == {"w1", "w2", "w3", "w4"}
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for file in files:
        data = (tmp_path / "w" / file).read_bytes()
        assert hashlib.sha256(data).hexdigest() == index["metadata"]["sha256"][file]
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(read(tmp_path / "w" / file)[name], wanted[name], name)


def test_what_is_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(MLP, tmp_path, "zero1 2")
    for place, text in (("run", "has other files, such as"), ("no/where", "no such folder")):
        command = ["checkpoint", "weights", str(tmp_path / "run"), "-o", str(tmp_path / place)]
        assert main(command) == 2
        assert text in capsys.readouterr().err
    assert Checkpoint.load(tmp_path / "run").progress.step == 2
