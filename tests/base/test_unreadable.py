"""Messages for files that are missing: they name a similar file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxpar.api import inspect, make_plan
from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.base.unreadable import cannot_read, missing
from onnxpar.cost.topology import Topology
from onnxpar.strategy.strategy import Strategy


def test_a_similar_file(tmp_path: Path) -> None:
    (tmp_path / "gpt2.onnx").touch()
    (tmp_path / "strategy.yaml").touch()
    (tmp_path / "gpt2.par").mkdir()
    with pytest.raises(
        ModelError, match=r"there is no file .*gpt.onnx; did you mean .*/gpt2.onnx\?"
    ):
        make_plan(tmp_path / "gpt.onnx", devices=2)
    with pytest.raises(StrategyError, match=r"did you mean .*/strategy.yaml\?"):
        Strategy.read(tmp_path / "stratgey.yaml")
    with pytest.raises(
        ModelError, match=r"there is no folder .*gpt3.par; did you mean .*gpt2.par\?"
    ):
        inspect(tmp_path / "gpt3.par")


def test_no_similar_file(tmp_path: Path) -> None:
    (tmp_path / "gpt2.onnx").touch()
    assert missing(tmp_path / "bert.npz") == f"there is no file {tmp_path / 'bert.npz'}"
    assert missing("nowhere/bert.npz").endswith("; there is no folder nowhere")
    text = cannot_read("x.npz", PermissionError(13, "Permission denied"), "give a .npz file")
    assert text == "cannot read x.npz: permission denied; give a .npz file"


def test_a_folder_as_a_model(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"is a folder, and .* give an .onnx file, .*a.onnx"):
        make_plan(tmp_path, devices=2)
    (tmp_path / "plan.json").touch()
    with pytest.raises(ModelError, match="is a sharded model; give"):
        make_plan(tmp_path, devices=2)


@pytest.mark.parametrize("read", [Strategy.read, Topology.read])
def test_a_model_instead_of_a_yaml_file(read: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x08\x12\xa2\xff")
    with pytest.raises(StrategyError, match=r"model\.onnx: not a text file; give a YAML file"):
        read(tmp_path / "model.onnx")


def test_strategy_files_are_in_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_bytes("tensors: {größe: [dp]}".encode())
    read = f"Strategy.read({str(tmp_path / 's.yaml')!r})"
    script = f"from onnxpar.strategy.strategy import Strategy; {read}"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script], env=plain, check=True)
