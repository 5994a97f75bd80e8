"""Ranges of integer inputs, by what reads them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import onnxpar

HEAD = '<ir_version: 8, opset_import: ["" : 17]> m '
ONE_HOT = "(int32[4] x) => (float[4,5] y) "
MODELS = {
    "compared with a list": (
        f"{ONE_HOT}<int32[1,5] all = {{2, 3, 4, 5, 6}}, int64[2] shape = {{4, 1}}>"
        " { column = Reshape(x, shape) hot = Equal(column, all) y = Cast<to = 1>(hot) }",
        (2, 7),
    ),
    "the list first": (
        f"{ONE_HOT}<int32[1,5] all = {{0, 1, 2, 3, 4}}, int64[2] shape = {{4, 1}}>"
        " { column = Reshape(x, shape) hot = Equal(all, column) y = Cast<to = 1>(hot) }",
        (0, 5),
    ),
    "one-hot": (
        f"{ONE_HOT}<int32 depth = {{5}}, float[2] values = {{0, 1}}>"
        " { y = OneHot(x, depth, values) }",
        (0, 5),
    ),
    "compared with one number": (
        "(int32[4] x) => (bool[4] y) <int32 pad = {7}> { y = Equal(x, pad) }",
        (0, 2),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_one_hot_encoding_takes(name: str, tmp_path: Path) -> None:
    text, wanted = MODELS[name]
    onnx.save(onnx.parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    assert onnxpar.plan(tmp_path / "m.onnx", devices=2).ranges == {"x": wanted}
