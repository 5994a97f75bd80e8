"""The first values of states, in files of their own, must be the model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import options
from onnx import TensorProto, numpy_helper
from training.steps import MLP, write_step

import onnxpar
from onnxpar.planner import sharder


def another(tensor: TensorProto) -> None:
    value = numpy_helper.to_array(tensor).copy()
    value.reshape(-1)[0] += np.asarray(1, value.dtype)
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def gone(tensor: TensorProto) -> None:
    tensor.name = "gone"


@pytest.mark.parametrize("layout", ["data-parallel 2", "zero3 2"])
def test_first_values(layout: str, tmp_path: Path) -> None:
    step = write_step(MLP, tmp_path, optimizer="adamw")
    par = tmp_path / "model.par"
    sharder.shard(step, par, options(layout))
    assert onnxpar.verify(step, par).ok
    file = par / "rank_0001.states.onnx"
    before = file.read_bytes()
    changes: dict[str, Callable[[TensorProto], None]] = {
        "another value": another,
        "no first value": gone,
    }
    for text, change in changes.items():
        model = onnx.load(file)
        change(model.graph.initializer[0])
        onnx.save(model, file)
        result = onnxpar.verify(step, par)
        assert not result.ok and text in result.text()
        file.write_bytes(before)
