"""Slices of weights in files: what each rank's file holds, and what is shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (lets np.dtype know int4 and the like)
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxpar.base.write_digested import DigestedFolder
from onnxpar.layout.layout import Concat, Factor, Layout, Product
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.lowering.weights import CHUNK, WeightStore, read_blocks

MESH = Mesh((("a", 2), ("b", 3)))
A, B = (MESH.axis("a"),), (MESH.axis("b"),)
Array = np.ndarray[Any, Any]


def external(folder: Path, array: Array, offset: int = 4096) -> TensorProto:
    """The array in a file of its own, behind `offset` bytes of something else."""
    data = onnx.numpy_helper.from_array(array).raw_data  # which packs small elements
    (folder / "model.data").write_bytes(b"\7" * offset + data)
    tensor = TensorProto(name="w", dims=array.shape)
    tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "model.data"), ("offset", offset), ("length", len(data))):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def layouts() -> Iterator[tuple[str, tuple[int, ...], Layout]]:
    """(name, shape, layout): rows, columns, both, inner factors, segments, uneven, partial."""
    yield "rows", (700, 33), Layout((Factor(700, A), Factor(33)))
    yield "uneven rows", (701, 33), Layout((Factor(701, B), Factor(33)))
    yield "columns", (65, 700), Layout((Factor(65), Factor(700, B)))
    yield "both", (70, 90), Layout((Factor(70, A), Factor(90, B)))
    yield "one by two", (71, 9), Layout((Factor(71, A + B), Factor(9)))
    inner = Product((Factor(3), Factor(20, B), Factor(4)))
    yield "inner", (50, 240), Layout((Factor(50), inner))
    yield "inner rows", (240, 50), Layout((inner, Factor(50)))
    segments = Concat((Factor(40, B), Factor(10), Factor(10)))
    yield "segments", (60, 31), Layout((segments, Factor(31)))
    yield "experts", (4, 30, 50), Layout((Factor(4), Factor(30, A), Factor(50, B)))
    yield "partial", (40, 30), Layout((Factor(40, B), Factor(30)), A)
    yield "whole", (40, 30), Layout((Factor(40), Factor(30)))
    yield "by hand", (10, 300), Layout((Factor(10, B, (7, 1, 2)), Factor(300)))


CASES = list(layouts())


def random(shape: tuple[int, ...], dtype: str) -> Array:
    """Numbers that the type can hold."""
    low, high = {"int4": (-8, 8), "uint2": (0, 4), "float4_e2m1fn": (-4, 4)}.get(dtype, (-99, 99))
    return np.random.default_rng(0).integers(low, high, shape).astype("i1").astype(np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float32"])
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 3), (13,)])
def test_blocks_and_parts_that_end_inside_of_bytes(
    shape: tuple[int, ...], chunk: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxpar.lowering.weights.CHUNK", chunk * np.dtype(dtype).itemsize)
    monkeypatch.setattr("onnxpar.lowering.weights.INLINE", 0)
    array = random(shape, dtype)
    out = tmp_path / "out"
    out.mkdir()
    weight = external(tmp_path, array, 3)
    store = WeightStore(DigestedFolder(out), tmp_path, MESH)
    for axis in range(len(shape)):
        layout = Layout(tuple(Factor(n, B if i == axis else ()) for i, n in enumerate(shape)))
        for rank, proto in enumerate(store.cut("w", weight, layout)):
            np.testing.assert_array_equal(stored(proto, out), layout.take(array, MESH, rank))


def stored(tensor: TensorProto, folder: Path) -> Array:
    """The array of an initializer, read as a runtime would."""
    if tensor.data_location == TensorProto.EXTERNAL:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
    return onnx.numpy_helper.to_array(tensor)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4", "uint2", "float4_e2m1fn"])
@pytest.mark.parametrize("name,shape,layout", CASES, ids=[c[0] for c in CASES])
def test_each_rank_gets_its_part(
    name: str, shape: tuple[int, ...], layout: Layout, dtype: str, tmp_path: Path
) -> None:
    array = random(shape, dtype)
    out = tmp_path / "out"
    out.mkdir()
    store = WeightStore(DigestedFolder(out), tmp_path, MESH)
    for weight in (external(tmp_path, array), onnx.numpy_helper.from_array(array, "w")):
        protos = store.cut("w", weight, layout)
        for rank, proto in enumerate(protos):
            expected = layout.take(array, MESH, rank)
            np.testing.assert_array_equal(stored(proto, out), expected)


def test_a_weight_larger_than_a_block_is_read_in_pieces(tmp_path: Path) -> None:
    array = np.arange(3 * 5 * (CHUNK // 8 + 7), dtype=np.float32).reshape(3, 5, -1)
    weight = external(tmp_path, array)
    assert max(block.nbytes for _, _, block in read_blocks(weight, tmp_path)) <= CHUNK
    layout = Layout((Factor(3), Factor(5, A), Factor(array.shape[2], B)))
    out = tmp_path / "out"
    out.mkdir()
    for rank, proto in enumerate(
        WeightStore(DigestedFolder(out), tmp_path, MESH).cut("w", weight, layout)
    ):
        np.testing.assert_array_equal(stored(proto, out), layout.take(array, MESH, rank))


def test_equal_parts_are_written_once(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((600, 400)).astype(np.float32)
    weight = external(tmp_path, array)
    out = tmp_path / "out"
    out.mkdir()
    store = WeightStore(DigestedFolder(out), tmp_path, MESH)
    whole = store.cut("w", weight, Layout((Factor(600), Factor(400))))
    rows = store.cut("v", weight, Layout((Factor(600, A), Factor(400))))
    places = [{e.key: e.value for e in t.external_data}["location"] for t in whole]
    assert set(places) == {"shared.weights"}
    places = [{e.key: e.value for e in t.external_data}["location"] for t in rows]
    assert places == ["shared_0000.weights"] * 3 + ["shared_0001.weights"] * 3
    assert sum(f.stat().st_size for f in out.iterdir()) == 2 * array.nbytes


def test_sub_axes_cut_too(tmp_path: Path) -> None:
    mesh = Mesh((("tp", 4),))
    array = np.arange(2 * 6 * 200, dtype=np.float32).reshape(12, 200)
    layout = Layout((Product((Factor(2, (Axis("tp", 2),)), Factor(6))), Factor(200)))
    out = tmp_path / "out"
    out.mkdir()
    protos = WeightStore(DigestedFolder(out), tmp_path, mesh).cut(
        "w", external(tmp_path, array), layout
    )
    for rank, proto in enumerate(protos):
        np.testing.assert_array_equal(stored(proto, out), array[6 * (rank // 2) :][:6])
