"""`onnxpar check`: what it is fed, what it compares by, and what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxpar.cli import main
from onnxpar.lower_reshard import ReshardBuilder

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
two (float[8,16] x, float[8,16] z) => (float[8,4] y) {
  s = Add(x, z)  [product] y = MatMul(s, w) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = (x + z) @ w."""
    proto = onnx.parser.parse_model(MODEL)
    weight = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "two.onnx"
    onnx.save(proto, path)
    return path


def feeds(folder: Path, *names: str) -> str:
    arrays = {name: np.ones((8, 16), np.float32) for name in names}
    np.savez(folder / "in.npz", **arrays)
    return str(folder / "in.npz")


def test_unknown_names_are_errors(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for names in (("q",), ("x", "q"), ("x", "z", "q")):
        assert (
            main(["check", str(model), "--devices", "2", "--inputs", feeds(tmp_path, *names)]) == 2
        )
        assert "has 'q', but the inputs are x, z" in capsys.readouterr().err


def test_made_up_inputs_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", str(model), "--devices", "2", "--inputs"]
    assert main([*arguments, feeds(tmp_path, "z")]) == 0
    assert "made up: x float32 [8, 16]\n" in capsys.readouterr().out
    assert main([*arguments, feeds(tmp_path, "x", "z")]) == 0
    assert "made up" not in capsys.readouterr().out


def test_the_times_of_both(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(model), "--devices", "2", "--rtol", "1e-4", "--atol", "1e-4"]) == 0
    out = capsys.readouterr().out
    assert " ms unsplit, " in out and " ms on 2 ranks" in out


def test_a_tolerance_decides(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that doubles every element passes where that much may differ, and only there."""

    def doubled(self: ReshardBuilder, x: object, y: object) -> None:
        self._add("Add", [x, x], y)

    monkeypatch.setattr(ReshardBuilder, "_AllReduce", doubled)
    strategy = model.with_suffix(".yaml")
    strategy.write_text("shard: {product: [[1, 2], [2, 1]]}")
    common = ["check", str(model), "--devices", "2", "--strategy", str(strategy)]
    assert main(common) == 1
    assert main([*common, "--rtol", "1e-3"]) == 1
    assert main([*common, "--atol", "1e3"]) == 0
