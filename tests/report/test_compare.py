"""The sharded model against the unsplit one."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, save
from runtime.bundles import weight_of_k_split

from onnxpar.base.errors import InputError, ModelError
from onnxpar.report.compare import Closeness, Report, compare, compare_arrays
from onnxpar.runtime.session.threads import ThreadSession

NAN, INF = np.nan, np.inf


def unsplit(scale: float = 1.0) -> ModelProto:
    """The model of `k_split`, its weight times a scale."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Add", ["x", "x"], ["d"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", 7])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("d", TensorProto.FLOAT, None),
        ],
        [numpy_helper.from_array(weight_of_k_split() * np.float32(scale), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_numbers_that_must_be_equal_may_be_none() -> None:
    quarter = np.dtype(ml_dtypes.float8_e4m3fn)
    reference = np.array([NAN, 1, 2]).astype(quarter)
    assert compare_arrays("y", reference.copy(), reference).ok
    for other in ([1, NAN, 2], [NAN, 1, 3], [NAN, NAN, 2]):
        assert not compare_arrays("y", np.array(other).astype(quarter), reference).ok


def test_a_good_model(par: Path, tmp_path: Path, x: np.ndarray) -> None:
    save(unsplit(), tmp_path / "model.onnx")
    report = compare(tmp_path / "model.onnx", par, {"x": x})
    assert report.ok
    assert [row.name for row in report.rows] == ["y", "d"]
    assert report.rows[1].error == 0
    assert report.text().endswith(f"all outputs agree; the worst is y: {report.worst.error:.1e}")
    header, row, *_ = report.text().splitlines()
    assert header.index("dtype") == row.index("float32"), "a name may be shorter than its title"


def test_a_wrong_model(par: Path, x: np.ndarray) -> None:
    with ThreadSession(par) as session:
        report = compare(unsplit(1.001).SerializeToString(), session, {"x": x})
        assert not report.ok
        assert report.worst.name == "y"
        assert 5e-4 < report.worst.error < 2e-3
        assert "the outputs differ; the worst is y" in report.text()
        assert compare(unsplit(1.001).SerializeToString(), session, {"x": x}, {"float32": 1e-2}).ok


def test_models_and_feeds_that_do_not_work(par: Path, tmp_path: Path, x: np.ndarray) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        compare(tmp_path / "nowhere.onnx", par, {"x": x})
    with pytest.raises(InputError, match="input 'x' is not fed; give float32"):
        compare(unsplit().SerializeToString(), par, {})


def test_close_is_element_by_element() -> None:
    reference = np.array([1.0, 1000.0], np.float32)
    given = np.array([1.005, 1000.0], np.float32)
    assert compare_arrays("y", given, reference).ok  # beside the largest element, it is little
    for close in (Closeness(1e-3), Closeness(1e-3, 1e-3), Closeness(atol=4e-3)):
        row = compare_arrays("y", given, reference, close=close)
        allowed = np.allclose(given, reference, close.rtol, close.atol)
        assert row.ok == allowed and not row.ok
    row = compare_arrays("y", given, reference, close=Closeness(4e-3, 2e-3))
    assert row.ok and row.error == pytest.approx(0.005 / 0.006, rel=1e-3)
    assert not compare_arrays("i", np.array([3]), np.array([4]), close=Closeness(0.1)).ok
    assert compare_arrays("i", np.array([3]), np.array([4]), close=Closeness(0.5)).ok
    zero = np.zeros(2, np.float32)
    assert not compare_arrays("z", zero + np.float32(1e-9), zero, close=Closeness(1.0)).ok
    assert not compare_arrays("n", zero, np.array([0, NAN], np.float32), close=Closeness(1.0)).ok


CASES = [
    ("float32", [1, 2, 100], [1, 2, 100.0005], True),
    ("float32", [1, 2, 100], [1, 2, 100.01], False),
    ("float64", [1.0], [1 + 1e-13], True),
    ("float64", [1.0], [1 + 1e-11], False),
    ("float16", [1.0, 0], [1.004, 0], True),
    ("float16", [1.0, 0], [1.01, 0], False),
    ("bfloat16", [1.0], [1.03], True),
    ("bfloat16", [1.0], [1.06], False),
    ("int64", [1, 2], [1, 2], True),
    ("int64", [1, 2], [1, 3], False),
    ("bool", [True], [False], False),
    ("float32", [1, NAN], [1, NAN], True),
    ("float32", [1, NAN], [NAN, 1], False),
    ("float32", [1, NAN], [1, 1], False),
    ("float32", [1, 2], [1, NAN], False),
    ("float32", [1, INF], [1, INF], True),
    ("float32", [1, INF], [1, -INF], False),
    ("float32", [1, INF], [1, 5], False),
    ("float32", [1, 5], [1, INF], False),
    ("float32", [NAN], [NAN], True),
    ("float32", [], [], True),
    ("int64", [], [], True),
    ("float32", [0, 0], [0, 0], True),
    ("float32", [0, 0], [0, 1e-30], False),
]


def test_the_worst_is_what_must_be_equal_and_is_not() -> None:
    rows = (
        compare_arrays("i", np.array([1, 2]), np.array([1, 1])),
        compare_arrays("y", np.full(3, 1.5, np.float32), np.ones(3, np.float32)),
    )
    assert Report(rows).worst.name == "i"


@pytest.mark.parametrize(("dtype", "reference", "given", "ok"), CASES)
def test_arrays(dtype: str, reference: list, given: list, ok: bool) -> None:
    row = compare_arrays("t", np.array(given, dtype), np.array(reference, dtype))
    assert row.ok is ok


def test_what_no_error_measures() -> None:
    reference = np.ones((2, 3), np.float32)
    faults = {
        "its shape is [3, 2]": np.ones((3, 2), np.float32),
        "its dtype is float64": np.ones((2, 3)),
        "the sharded model does not have it": None,
    }
    for fault, given in faults.items():
        row = compare_arrays("t", given, reference)
        assert not row.ok
        assert row.fault == fault


def test_tables_fit() -> None:
    long = "a.very.long.name.that.some.exporter.made.of.the.path.of.modules/output_0"
    rows = [
        compare_arrays(long, np.ones((2,) * 12), np.ones((2,) * 12)),
        compare_arrays("nan", np.array([NAN]), np.array([1.0])),
        compare_arrays("y", np.full(3, 1.5, np.float32), np.ones(3, np.float32)),
        compare_arrays("i", np.array([1, 2]), np.array([1, 1])),
    ]
    text = Report(tuple(rows)).text()
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "...e.of.the.path.of.modules/output_0  float64   [2, 2, 2, 2, 2...]   0.0e+00" in text
    assert text.splitlines()[-1] == (
        "the outputs differ; the worst is nan: NaN in different places"
    )
