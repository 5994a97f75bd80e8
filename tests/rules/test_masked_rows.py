"""Queries of which the mask gives all keys the least number, or minus infinity: what they attend to
depends on the opset, and on ranks it is what it is in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

LEAST = np.finfo(np.float32).min
WAYS = {
    "queries": {"q": [None, "x", None]},
    "keys": {"k": [None, "x", None]},
    "both": {"q": [None, "x", None], "k": [None, "x", None]},
    "ring": None,
}


def write(opset: int, more: str, length: int | str, folder: Path) -> Path:
    text = f"""<ir_version: 11, opset_import: ["" : {opset}]>
    m (float[2,{length},8] q, float[2,9,8] k, float[2,9,8] v, float[{length},9] mask)
    => (float[2,{length},8] y)
    {{ y = Attention <q_num_heads = 2, kv_num_heads = 2{more}> (q, k, v, mask) }}"""
    path = folder / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("more", ["", ", is_causal = 1"])
@pytest.mark.parametrize("opset", [23, 24, 25])
def test_rows_that_the_mask_hides(
    opset: int, more: str, way: str, ranks: int, tmp_path: Path
) -> None:
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("this onnx does not have the opset")
    path, par = write(opset, more, 9, tmp_path), tmp_path / "m.par"
    tensors = WAYS[way]
    how = {"strategy": {"mesh": {"x": ranks}, "tensors": tensors}} if tensors else {}
    if not tensors:
        how = {"devices": ranks, "preset": "ring-attention"}
    onnxpar.shard(path, par, for_any_host=True, **how)
    random = np.random.default_rng(ranks)
    mask = np.where(random.random((9, 9)) < 0.4, LEAST, 0).astype(np.float32)
    mask[2], mask[4], mask[5] = LEAST, -np.inf, 0
    feeds = {name: random.standard_normal((2, 9, 8), np.float32) for name in "qkv"} | {"mask": mask}
    (wanted,) = ort.InferenceSession(str(path)).run(None, feeds)
    with ThreadSession(par, timeout=60) as session:
        (got,) = session.run(None, feeds)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 4, 7, 20])
def test_queries_before_the_first_key(length: int, tmp_path: Path) -> None:
    """Of a cache with fewer keys than there are queries."""
    if onnx.defs.onnx_opset_version() < 25:
        pytest.skip("this onnx does not have opset 25")
    text = """<ir_version: 11, opset_import: ["" : 25]>
    m (float[2,3,N,8] q, float[2,3,8,8] k, float[2,3,8,8] v, float[1,8] mask, int64[2] lengths)
    => (float[2,3,N,8] y)
    { y = Attention <is_causal = 1, left_window_size = 2> (q, k, v, mask, , , lengths) }"""
    path, par = tmp_path / "m.onnx", tmp_path / "m.par"
    onnx.save(onnx.parser.parse_model(text), path)
    split = {"mesh": {"x": 3}, "tensors": {"q": [None, None, "x", None]}}
    onnxpar.shard(path, par, strategy=split, for_any_host=True)
    random = np.random.default_rng(length)
    feeds = {n: random.standard_normal((2, 3, 8, 8), np.float32) for n in "kv"}
    feeds |= {"q": random.standard_normal((2, 3, length, 8), np.float32)}
    feeds |= {"mask": np.zeros((1, 8), np.float32), "lengths": np.array([6, 3])}
    (wanted,) = ort.InferenceSession(str(path)).run(None, feeds)
    with ThreadSession(par, timeout=60) as session:
        (got,) = session.run(None, feeds)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opset", [23, 24, 25])
def test_rows_of_the_least_number_of_16_bits(opset: int, way: str, tmp_path: Path) -> None:
    """It hides keys also where ranks add it to scores in 32 bits."""
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip("this onnx does not have the opset")
    path, par = write(opset, "", 9, tmp_path), tmp_path / "m.par"
    text = onnx.printer.to_text(onnx.load(path)).replace("float[", "float16[")
    onnx.save(onnx.parser.parse_model(text), path)
    tensors = WAYS[way]
    how = {"strategy": {"mesh": {"x": 3}, "tensors": tensors}} if tensors else {}
    onnxpar.shard(
        path, par, for_any_host=True, **(how or {"devices": 3, "preset": "ring-attention"})
    )
    random = np.random.default_rng(0)
    least = np.finfo(np.float16).min
    mask = np.where(random.random((9, 9)) < 0.4, least, 0).astype(np.float16)
    mask[2], mask[4] = least, -np.inf
    drawn = {name: random.standard_normal((2, 9, 8)).astype(np.float16) for name in "qkv"}
    feeds = drawn | {"mask": mask}
    (wanted,) = ort.InferenceSession(str(path)).run(None, feeds)
    with ThreadSession(par, timeout=60) as session:
        (got,) = session.run(None, feeds)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=4e-3)
