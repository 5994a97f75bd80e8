"""The rewrites that make a training step: times, dumps, and the name of one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from training.steps import MLP, write_model

import onnxpar
from onnxpar.base.errors import ModelError, PassError
from onnxpar.cli.command_line import main
from onnxpar.graph.rewriting import Rewrite
from onnxpar.load.load import AS_WRITTEN, NORMALIZING
from onnxpar.training import grad, step
from onnxpar.training.backward import BACKWARD
from onnxpar.training.rewrite import add_output
from onnxpar.training.step import UPDATE
from onnxpar.training.step_state import StepState

HOW: dict[str, Any] = {"loss": "mse", "optimizer": "adam", "clip_norm": 1.0, "accumulate": 2}
NOT_DONE = {
    *("lower-precision", "sample-classes", "recompute", "read-averages"),
    *("divide-by-scale", "adapt-scale", "output-gradients"),
}
"""The rewrites for options that HOW lacks."""


def test_each_rewrite_is_timed(tmp_path: Path) -> None:
    times = onnxpar.PassTimes()
    model = write_model(MLP, tmp_path)
    grad(model, tmp_path / "step.onnx", time_passes=times, **HOW)
    names = [rewrite.name for rewrite in (*BACKWARD, *UPDATE) if rewrite.name not in NOT_DONE]
    loading = {"load", *(rewrite.name for rewrite in (*AS_WRITTEN, *NORMALIZING))}
    assert [name for name in times.rows if name not in loading] == [*names, "write the graph"]
    assert {row.runs for row in times.rows.values()} == {1}


def test_each_rewrite_that_changes_something_is_dumped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, dump = write_model(MLP, tmp_path), tmp_path / "dump"
    flags = ["--loss", "mse", "--optimizer", "adam", "--clip-norm", "1", "--accumulate", "2"]
    more = ["--dump", str(dump), "--time-passes"]
    for name, added in (("a", more), ("b", [])):
        assert main(["grad", str(model), *flags, *added, "-o", f"{tmp_path / name}.onnx"]) == 0
        assert ("merge-equal" in capsys.readouterr().err) == bool(added)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert [file.name for file in (dump / "00-load").iterdir()]
    texts = {file.name[3:-8]: file.read_text() for file in sorted((dump / "01-step").iterdir())}
    order = [rewrite.name for rewrite in (*BACKWARD, *UPDATE) if rewrite.name in texts]
    assert [*texts] == order and {"add-loss", "add-gradients", "accumulate"} <= texts.keys()
    assert "MatMul" not in texts["add-loss"] and "Scan" not in texts["add-gradients"]
    assert "Scan" in texts["accumulate"] and "Sqrt" in texts["update-parameters"]
    operators = [node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node]
    *_, last = texts.values()
    assert all(last.count(f"{op} ") + last.count(f"{op}<") for op in operators)


def test_a_rewrite_that_fails_is_named_and_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(to: StepState) -> None:
        add_output(to.graph, to.loss, "half_done")
        raise TypeError("no")

    monkeypatch.setattr(step, "UPDATE", [*UPDATE[:2], Rewrite("broken", fail)])
    text = r"model.onnx: the rewrite broken of the training step failed: TypeError: no"
    with pytest.raises(PassError, match=text):
        grad(write_model(MLP, tmp_path), tmp_path / "step.onnx", dump=tmp_path / "dump", **HOW)
    (left,) = (tmp_path / "dump" / "01-step").glob("*-broken.onnxtxt")
    assert "half_done" in left.read_text() and not (tmp_path / "step.onnx").exists()


def test_names_are_checked_after_each_rewrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(to: StepState) -> None:
        add_output(to.graph, to.loss, str(to.loss.tensor.name))

    times = onnxpar.PassTimes()
    monkeypatch.setattr(step, "UPDATE", [*UPDATE[:2], Rewrite("twice", twice), *UPDATE[2:]])
    with pytest.raises(ModelError, match="the training step adds another tensor of this name"):
        grad(write_model(MLP, tmp_path), tmp_path / "step.onnx", time_passes=times, **HOW)
    assert [*times.rows][-1] == "twice"
