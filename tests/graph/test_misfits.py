"""A node that onnxruntime refuses is refused by name, before anything is planned or written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.base.errors import ModelError

HEAD = '<ir_version: 8, opset_import: ["" : 17]> misfit '
COMPLEX = """(float[{n},8] x) => (float[{n},4] y) {{
    h = MatMul (x, w)
    [turn] c = Cast <to = 15> (h)
    [by] s = Mul (c, c)
    y = Cast <to = 1> (s)
}}"""
SIZES = """(float[{n},8] x) => (float[{n},4] y) {{
    h = MatMul (x, w)
    [odd] y = Mul (h, b)
}}"""
TYPES = """(float[{n},8] x, int64[4] i) => (float[{n},4] y) {{
    h = MatMul (x, w)
    [odd] y = Add (h, i)
}}"""


def saved(text: str, folder: Path, size: str) -> Path:
    model = onnx.parser.parse_model(HEAD + text.format(n=size))
    for name, shape in (("w", (8, 4)), ("b", (5,))):
        array = np.ones(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize("size", ["2", "n"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (COMPLEX, r"Cast 'turn' cannot run on float32\[.*4\].*complex128.*export"),
        (SIZES, r"Mul 'odd' cannot run on float32\[.*4\], float32\[5\].*export"),
        (TYPES, r"Add 'odd' cannot run on float32\[.*4\], int64\[4\].*export"),
    ],
    ids=["complex", "sizes", "types"],
)
def test_refused_by_name(text: str, words: str, size: str, tmp_path: Path) -> None:
    model = saved(text, tmp_path, size)
    with pytest.raises(Exception, match=r"Type|dimension|complex"):
        ort.InferenceSession(str(model))
    for call in (
        lambda: onnxpar.plan(model, devices=2),
        lambda: onnxpar.shard(model, tmp_path / "m.par", devices=2),
        lambda: (
            onnxpar.training.grad(
                model, tmp_path / "step.onnx", loss="mse", optimizer="sgd", dims={"n": 2}
            )
            if size == "n"
            else onnxpar.training.grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd")
        ),
    ):
        with pytest.raises(ModelError, match=words):
            call()
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_sizes_that_fit_at_some_lengths_only(tmp_path: Path) -> None:
    """Both tables are cut to the length, which must not pass for their own lengths."""
    text = """(float[n,4] x) => (float[n,4] y) {
        s = Shape <end = 1> (x)
        zero = Constant <value_ints = [0]> ()
        a = Slice (short, zero, s)
        b = Slice (long, zero, s)
        [sum] t = Add (a, b)
        y = Add (x, t)
    }"""
    model = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    for name, rows in (("short", 16), ("long", 32)):
        array = rng.standard_normal((rows, 4)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "m.onnx")
    onnxpar.plan(tmp_path / "m.onnx", devices=2)


def test_gradients_name_the_node_that_makes_data_dependent_sizes(tmp_path: Path) -> None:
    text = """(float[2,8] x) => (float[k,4] y) {
        h = MatMul (x, w)
        [which] at = NonZero (x)
        row = Constant <value = int64[1] {0}> ()
        rows = Gather (at, row)
        flat = Squeeze (rows)
        g = Gather (h, flat)
        y = Relu (g)
    }"""
    model = saved(text.replace("{", "{{").replace("}", "}}"), tmp_path, "2")
    with pytest.raises(ModelError, match=r"NonZero 'which' makes data-dependent sizes.*--frozen"):
        onnxpar.training.grad(model, tmp_path / "step.onnx", loss="mse", optimizer="sgd")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
