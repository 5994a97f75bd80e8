"""How weights in files are read and compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data, load_external_data_for_tensor

import onnxpar
from onnxpar.base.errors import ModelError
from onnxpar.equivalence.stored import WeightFiles


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product with a weight of 12 MB in a file, which is more than one block."""
    path = tmp_path_factory.mktemp("wide") / "wide.onnx"
    weight = np.random.default_rng(0).standard_normal((3000, 1000), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "wide",
        [helper.make_tensor_value_info("x", 1, [4, 3000])],
        [helper.make_tensor_value_info("y", 1, [4, 1000])],
        [numpy_helper.from_array(weight, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    convert_model_to_external_data(proto, location="wide.data", size_threshold=0)
    onnx.save(proto, path)
    return path


def flip(folder: Path, rank: int, at: float) -> None:
    """Changes a byte of a rank's weights, at this share of the file."""
    path = folder / f"rank_{rank:04d}.weights"
    with path.open("r+b") as file:
        file.seek(int(at * (path.stat().st_size - 4)) // 4 * 4 + 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x41]))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("at", [0, 0.4999, 1])
def test_each_byte_is_compared(model: Path, axis: int, at: float, tmp_path: Path) -> None:
    par = tmp_path / "wide.par"
    tensors = {"w": ["tp", None] if axis == 0 else [None, "tp"]}
    onnxpar.shard(model, par, strategy={"mesh": {"tp": 3}, "tensors": tensors})
    result = onnxpar.verify(model, par)
    assert result.ok and result.compared == 12_000_000
    flip(par, 1, at)
    result = onnxpar.verify(model, par)
    assert not result.ok and result.failures[0].tensor == "y"


def test_a_sample_and_none(model: Path, tmp_path: Path) -> None:
    """A sample has the first row, but not each; none needs no file."""
    par = tmp_path / "wide.par"
    onnxpar.shard(model, par, strategy={"mesh": {"tp": 2}, "tensors": {"w": [None, "tp"]}})
    assert "a sample of rows" in onnxpar.verify(model, par, weights="sample").text()
    flip(par, 1, 0)
    assert onnxpar.verify(model, par, weights="sample").ok is False
    for path in par.glob("*.weights"):
        path.unlink()
    result = onnxpar.verify(model, par, weights="none")
    assert result.ok and result.compared == 0
    assert "weights in files were not compared" in result.text()
    with pytest.raises(ModelError, match="w cannot be read"):
        onnxpar.verify(model, par)


@pytest.mark.parametrize("kind", ["FLOAT", "BFLOAT16", "INT4", "UINT4", "FLOAT8E4M3FN", "BOOL"])
def test_elements_of_all_sizes_are_read(kind: str, tmp_path: Path) -> None:
    """Against onnx's own reader; from a place in the file that fits no element."""
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind))
    values = np.random.default_rng(1).integers(0, 2, (5, 3)).astype(dtype)
    tensor = numpy_helper.from_array(values, "w")
    data = tensor.raw_data
    (tmp_path / "data").write_bytes(b"###" + data + b"###")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "data"), ("offset", 3), ("length", len(data))):
        tensor.external_data.add(key=key, value=str(value))
    read = WeightFiles().read(tensor, tmp_path)
    load_external_data_for_tensor(tensor, str(tmp_path))
    assert read.tobytes() == numpy_helper.to_array(tensor).tobytes()
    assert read.shape == (5, 3) and read.dtype == dtype


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("location", "../data", "in another folder"), ("offset", "-1", "cannot be read"),
     ("offset", "x", "cannot be read"), ("length", "99", None), ("offset", "99", "cannot be read")],
)  # fmt: skip
def test_a_wrong_place_is_refused(key: str, value: str, text: str | None, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(60))
    where = {"location": "data", "offset": "0", "length": "60"} | {key: value}
    tensor = TensorProto(name="w", data_type=1, dims=[5, 3], data_location=TensorProto.EXTERNAL)
    for name, entry in where.items():
        tensor.external_data.add(key=name, value=entry)
    if text is None:
        assert WeightFiles().read(tensor, tmp_path).shape == (5, 3)
    else:
        with pytest.raises(ModelError, match=text):
            WeightFiles().read(tensor, tmp_path)
