"""An index out of range fails where the unsplit model fails, and nowhere else, however it is split.

A rank that looked at its own part alone would give zeros instead, which are a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.base.errors import InputError, OnnxparError, RunError
from onnxpar.runtime.session.threads import ThreadSession

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
MODELS: dict[str, tuple[str, int]] = {
    "Gather": ("(float[8,4] t, int64[4,2] i) => (float[4,2,4] y) { [n] y = Gather(t, i) }", 8),
    "Gather along 1": (
        "(float[4,8] t, int64[4] i) => (float[4,4] y) { [n] y = Gather<axis=1>(t, i) }",
        8,
    ),
    "uneven": ("(float[7,4] t, int64[4,2] i) => (float[4,2,4] y) { [n] y = Gather(t, i) }", 7),
    "GatherElements": (
        "(float[8,4] t, int64[4,4] i) => (float[4,4] y) { [n] y = GatherElements<axis=0>(t, i) }",
        8,
    ),
    "GatherND": ("(float[8,4] t, int64[4,1] i) => (float[4,4] y) { [n] y = GatherND(t, i) }", 8),
    "ScatterND": (
        "(float[8,4] t, int64[4,1] i, float[4,4] u) => (float[8,4] y)"
        " { [n] y = ScatterND(t, i, u) }",
        8,
    ),
    "ScatterElements": (
        "(float[8,4] t, int64[4,4] i, float[4,4] u) => (float[8,4] y)"
        " { [n] y = ScatterElements<axis=0>(t, i, u) }",
        8,
    ),
    "computed": (
        "(float[8,4] t, int64[4] i) => (float[4,4] y) { j = Add(i, i) [n] y = Gather(t, j) }",
        4,
    ),
}


def quiet() -> ort.SessionOptions:
    """Without onnxruntime's own words on the errors that are provoked."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def strategies(shapes: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Those that split one dimension of one operand of the node n."""
    for i, shape in enumerate(shapes):
        for d in range(len(shape)):
            axes = [[None] * len(each) for each in shapes]
            axes[i][d] = "tp"  # type: ignore[call-overload]
            yield {"mesh": {"tp": 2}, "shard": {"n": axes}}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_out_of_range(name: str, tmp_path: Path) -> None:
    text, rows = MODELS[name]
    model = onnx.parser.parse_model(f"{HEAD} g {text}")
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    random = np.random.default_rng(0)
    shapes = {
        port.name: [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        for port in model.graph.input
    }
    feeds = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    first = np.arange(shapes["i"][0]).reshape([-1] + [1] * (len(shapes["i"]) - 1))
    feeds["i"] = np.broadcast_to(first, shapes["i"]) % rows
    unsplit = ort.InferenceSession(path, quiet(), providers=["CPUExecutionProvider"])
    bad = [{**feeds, "i": feeds["i"].copy()} for _ in range(4)]
    values = (rows, -rows - 1, 1000, -1000)
    for each, value in zip(bad, values, strict=True):
        each["i"][(-1,) * each["i"].ndim] = value
        with pytest.raises(Exception, match=r"(?i)out of|invalid"):
            unsplit.run(None, each)
    negative = {**feeds, "i": feeds["i"] - rows}
    tried = 0
    for strategy in strategies([shapes.get(n, [4]) for n in model.graph.node[-1].input]):
        try:
            onnxpar.shard(path, tmp_path / "m.par", strategy=strategy)
        except OnnxparError:
            continue  # that dimension is not split
        tried += 1
        with ThreadSession(tmp_path / "m.par", quiet()) as session:
            for each, value in zip(bad, values, strict=True):
                with pytest.raises((InputError, RunError), match=r"out of|invalid ind") as caught:
                    session.run(None, each)
                told = re.search(r"(?:index|indice|idx) ?=? ?(-?\d+)", str(caught.value))
                if told:  # it is the model's index, not one into a part
                    assert int(told[1]) == (2 * value if name == "computed" else value)
            for each in (feeds, negative):
                wanted = unsplit.run(None, each)[0]
                np.testing.assert_allclose(session.run(None, each)[0], wanted, rtol=1e-6)
    assert tried > 1
