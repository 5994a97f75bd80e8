"""Rows that are added to zeros in one dimension."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxpar.graph.origin import origin_of
from onnxpar.lowering.flat_scatters import flatten_scatters

DRAW = np.random.default_rng(5)
AT = np.array([3, 0, -1, 3, 6, 3])


def scatter(
    zeros: list[int], rows: list[int], at: list[int], dtype: str = "int64", **attributes: object
) -> onnx.ModelProto:
    """Adds `rows` to `zeros` at the positions i, reshaped to `at` and expanded."""
    shapes = {"zeros": zeros, "rows": rows, "at": at}
    inputs = [
        helper.make_tensor_value_info("i", getattr(TensorProto, dtype.upper()), [rows[0]]),
        helper.make_tensor_value_info("r", TensorProto.FLOAT, rows),
    ]
    nodes = [
        helper.make_node("ConstantOfShape", ["zeros"], ["z"], "zero"),
        helper.make_node("Reshape", ["i", "at"], ["/n"], "narrow"),
        helper.make_node("Expand", ["/n", "rows"], ["w"], "wide"),
        helper.make_node("ScatterElements", ["z", "w", "r"], ["y"], "scatter", **attributes),
    ]
    stored = [numpy_helper.from_array(np.array(s, np.int64), n) for n, s in shapes.items()]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, zeros)
    graph = helper.make_graph(nodes, "g", inputs, [out], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(model: onnx.ModelProto, at: np.ndarray, rows: list[int]) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    values = np.random.default_rng(6).standard_normal(rows, np.float32)
    return np.asarray(session.run(None, {"i": at, "r": values})[0])


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("columns", [[4], [2, 3], [1]])
def test_rows_of_a_table(columns: list[int], dtype: str) -> None:
    model = scatter([7, *columns], [6, *columns], [6, *[1] * len(columns)], dtype, reduction="add")
    want = run(model, AT.astype(dtype), [6, *columns])
    flatten_scatters(model.graph)
    names = {node.name for node in model.graph.node}
    assert names.isdisjoint({"zero", "wide"}), "nodes that nobody reads"
    assert "scatter::ScatterElements" in {name.rstrip("0123456789") for name in names}
    assert {origin_of(node) for node in model.graph.node} == {"scatter", "narrow"}
    np.testing.assert_array_equal(run(model, AT.astype(dtype), [6, *columns]), want)


@pytest.mark.parametrize(
    ("shapes", "attributes"),
    [
        (([7, 4], [6, 4], [6, 1]), {}),
        (([7, 4], [6, 4], [6, 1]), {"reduction": "max"}),
        (([7, 9], [6, 4], [6, 1]), {"reduction": "add"}),
        (([7, 6], [6, 6], [1, 6]), {"reduction": "add"}),
        (([6, 6], [6, 6], [6, 1]), {"reduction": "add", "axis": 1}),
        (([7], [6], [6]), {"reduction": "add"}),
    ],
    ids=["replaces", "max", "parts of rows", "columns", "another axis", "one dimension"],
)
def test_others_stay(shapes: tuple[list[int], ...], attributes: dict[str, object]) -> None:
    model = scatter(*shapes, **attributes)
    before = model.SerializeToString()
    flatten_scatters(model.graph)
    assert model.SerializeToString() == before
