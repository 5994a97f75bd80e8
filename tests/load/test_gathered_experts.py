"""A matrix for each row, gathered by its number: experts only where the model chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxpar
from onnxpar.base.errors import OnnxparError, StrategyError

COUNT, WIDTH = 5, 6


def written(path: Path, ports: str, choice: str, logits: int = COUNT) -> Path:
    """A model that multiplies each row by the matrix of number `ids`."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        m ({ports}) => (float[4,{WIDTH}] y) {{
            {choice}
            one = Constant<value_ints=[1]>()
            g = Gather<axis=0>(table, ids) u = Unsqueeze(x, one)
            h = MatMul(u, g) y = Squeeze(h, one)
        }}"""
    )
    draw = np.random.default_rng(0)
    for name, shape in (("table", (COUNT, WIDTH, WIDTH)), ("gate", (WIDTH, logits))):
        if name == "table" or "gate" in choice:
            values = draw.normal(size=shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(model, path)
    return path


def rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(4, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("preset", ["data-parallel", "tensor-parallel", "auto"])
def test_rows_of_an_input_are_gathered(tmp_path: Path, preset: str, ranks: int) -> None:
    ports = f"float[4,{WIDTH}] x, int64[4] ids"
    model = written(tmp_path / "m.onnx", ports, "")
    whole = ort.InferenceSession(model)
    onnxpar.shard(model, tmp_path / "m.par", devices=ranks, preset=preset)
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        for seed, ids in enumerate([[0, 1, 2, 4], [-1, -5, 3, 3]]):
            feeds = {"x": rows(seed), "ids": np.array(ids)}
            (wanted,) = whole.run(None, feeds)
            np.testing.assert_allclose(session.run(None, feeds)[0], wanted, rtol=1e-5, atol=1e-6)
        with pytest.raises(OnnxparError, match="index 7 at"):
            session.run(None, {"x": rows(0), "ids": np.array([0, 1, 7, 4])})


def test_they_are_no_experts(tmp_path: Path) -> None:
    model = written(tmp_path / "m.onnx", f"float[4,{WIDTH}] x, int64[4] ids", "")
    with pytest.raises(StrategyError, match="no weight with a matrix for each expert"):
        onnxpar.shard(model, tmp_path / "m.par", devices=2, preset="expert-parallel")


ARG_MAX = "l = MatMul(x, gate) n = ArgMax<axis=1, keepdims=0>(l)"
CHOICES = {
    "from the end": (COUNT, f"{ARG_MAX} c = Constant<value=int64 {{5}}>() ids = Sub(n, c)"),
    "too many": (COUNT + 2, f"{ARG_MAX} ids = Identity(n)"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("choice", CHOICES)
def test_numbers_that_are_chosen_are_those_of_a_gather(
    tmp_path: Path, choice: str, ranks: int
) -> None:
    """Numbers from the end are taken, and numbers of no expert are refused, as by Gather."""
    logits, text = CHOICES[choice]
    model = written(tmp_path / "m.onnx", f"float[4,{WIDTH}] x", text, logits)
    whole = ort.InferenceSession(model)
    onnxpar.shard(model, tmp_path / "m.par", devices=ranks, preset="expert-parallel")
    refused = 0
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        for seed in range(12):
            feeds = {"x": rows(seed)}
            try:
                (wanted,) = whole.run(None, feeds)
            except Exception:
                refused += 1
                with pytest.raises(OnnxparError, match="out of data bounds"):
                    session.run(None, feeds)
            else:
                found = session.run(None, feeds)[0]
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert (0 < refused < 12) == (choice == "too many")
