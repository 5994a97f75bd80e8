"""Samples are not too weak: faults that change little of a result on usual values are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxpar
from onnxpar.equivalence.stored import same_numbers

STRATEGY = {"mesh": {"tp": 2}, "tensors": {"x": [None, "tp"]}}


def normalization(folder: Path) -> Path:
    """A LayerNormalization with its statistics as outputs."""
    text = """<ir_version: 9, opset_import: ["": 20]>
    g (float[4, 48] x, float[48] w) => (float[4, 48] y, float[4, 1] m, float[4, 1] s)
    { y, m, s = LayerNormalization <epsilon = 1e-5> (x, w) }"""
    path = folder / "model.onnx"
    onnx.save(parser.parse_model(text), path)
    return path


@pytest.mark.parametrize("value", [None, 48.0, 1e-5])
def test_each_number_is_told(value: float | None, tmp_path: Path) -> None:
    """Ranks normalize a dimension that is split: the number of its elements, with which a mean of
    zero is zero, too, and the epsilon, which is far smaller than a variance."""
    model, par = normalization(tmp_path), tmp_path / "model.par"
    onnxpar.shard(model, par, strategy=STRATEGY)
    changed = 0
    for path in sorted(par.glob("rank_*.onnx")):
        proto = onnx.load(path)
        for tensor in proto.graph.initializer:
            own = numpy_helper.to_array(tensor)
            if value is not None and own.size == 1 and np.isclose(own, value, atol=0).all():
                wrong = np.asarray(own * 1.25, own.dtype)
                tensor.CopyFrom(numpy_helper.from_array(wrong, tensor.name))
                changed += 1
        onnx.save(proto, path)
    result = onnxpar.verify(model, par)
    assert result.ok == (value is None), result.text()
    assert bool(changed) == (value is not None)


def test_computed_constants() -> None:
    """The last bits of a sine may differ; zeros beside the ends of floats may not."""
    x = np.linspace(0, 50, 64, dtype=np.float32)
    exact = np.sin(x.astype(np.float64)).astype(np.float32)
    nearly = np.nextafter(exact, np.float32(2))
    spans = [np.arange(64)]
    assert same_numbers(nearly, exact, spans)
    assert same_numbers(nearly[7:9], exact, [np.arange(7, 9)])
    assert not same_numbers(exact + np.float32(1e-5), exact, spans)
    frequencies = np.float32(1e6) ** (-np.linspace(0, 1, 32, dtype=np.float32))
    wrong = np.where(np.arange(32) == 31, frequencies * np.float32(1.1), frequencies)
    assert not same_numbers(wrong, frequencies, [np.arange(32)])
    mask = np.array([0.0, np.finfo(np.float32).min], np.float32)
    assert not same_numbers(mask + np.array([1, 0], np.float32), mask, [np.arange(2)])
