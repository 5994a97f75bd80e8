"""What a user gets wrong is an InputError or a ModelError before any rank hears of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from runtime.bundles import Tensor, k_split, write_par

import onnxpar
from onnxpar.base.errors import InputError, ModelError
from onnxpar.compiler.plan import write_plan
from onnxpar.runtime.session.bundle import FORMAT, Bundle
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.runtime.session.threads import ThreadSession

pytestmark = pytest.mark.processes

WRONG_FEEDS = [
    ({}, "input 'x' is not fed; give float32 [4, 7]"),
    ({"x": "good", "z": 1}, "no input is named 'z'; the inputs are x"),
    (
        {"x": np.zeros((4, 7))},
        "input 'x' was given float64 [4, 7], but expects float32 [4, 7]; "
        "convert it with .astype('float32')",
    ),
    (
        {"x": np.zeros((4, 2), np.float32)},
        "input 'x' was given float32 [4, 2], but expects float32 [4, 7]; "
        "give the shape of the unsplit model's input",
    ),
    ({"x": np.zeros(28, np.float32)}, "float32 [28], but expects float32 [4, 7]"),
    (
        {"x": [[1.0, "a"]]},
        "input 'x' was given a list that cannot be converted to float32 [4, 7]: could",
    ),
    (
        {"x": [[1.0], [1.0, 2.0]]},
        "input 'x' was given a list that cannot be converted to float32 [4, 7]",
    ),
    ({"x": [[1.0]]}, "input 'x' was given float32 [1, 1], but expects float32 [4, 7]"),
    ({"x": "text"}, "input 'x' was given str128 [], but expects float32 [4, 7]"),
]


@pytest.mark.parametrize(("feeds", "message"), WRONG_FEEDS)
def test_wrong_feeds(feeds: dict[str, Any], message: str, par: Path, x: np.ndarray) -> None:
    feeds = (
        {name: x if value == "good" else value for name, value in feeds.items()}
        if ("z" in feeds)
        else feeds
    )
    with ThreadSession(par) as session:
        with pytest.raises(InputError) as caught:
            session.run(None, feeds)
        assert message in str(caught.value)
        session.run(None, {"x": x})


def test_wrong_feeds_leave_processes_alone(par: Path, x: np.ndarray) -> None:
    with InferenceSession(par) as session:
        with pytest.raises(InputError):
            session.run(None, {})
        session.run(None, {"x": x})


def test_unknown_outputs(par: Path, x: np.ndarray) -> None:
    with (
        ThreadSession(par) as session,
        pytest.raises(InputError, match="no output is named 'q'; the outputs are y, d"),
    ):
        session.run(["q"], {"x": x})


def test_sizes_that_data_decides_take_any_value(tmp_path: Path) -> None:
    par = write_par(tmp_path, "tp=2", [Tensor("x", None)], [Tensor("x", None)], lambda rank: [])
    plan = json.loads((par / "plan.json").read_text())
    plan["inputs"][0]["shape"] = [None, 3]
    write_plan(par, plan)
    with ThreadSession(par) as session:
        for size in (1, 4):
            value = np.ones((size, 3), np.float32)
            np.testing.assert_array_equal(session.run(None, {"x": value})[0], value)
        with pytest.raises(InputError, match=r"float32 \[3, 4\], but expects float32 \[\?, 3\]"):
            session.run(None, {"x": np.ones((3, 4), np.float32)})


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no folder .*; `onnxpar shard` writes it"):
        InferenceSession(tmp_path / "nowhere.par")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, f"has format 99, but this onnxpar reads {FORMAT}"),
        ({"mesh": 7}, "plan.json is damaged: TypeError"),
        ({"outputs": [{}]}, "plan.json is damaged: KeyError: 'name'"),
        (
            {"states": [{"input": "x", "output": "nope"}]},
            "state pairs name 'nope', which is neither an input",
        ),
        (
            {"inputs": [{"name": "x", "dtype": "str", "shape": None}]},
            "'x': str tensors are not supported",
        ),
    ],
)
def test_broken_plans(change: dict[str, Any], message: str, par: Path) -> None:
    plan = json.loads((par / "plan.json").read_text())
    write_plan(par, {**plan, **change})
    with pytest.raises(ModelError, match=message):
        Bundle.load(par)


def test_a_plan_that_is_no_json(par: Path) -> None:
    (par / "plan.json").write_text("{")
    with pytest.raises(ModelError, match=r"plan\.json is not JSON"):
        Bundle.load(par)


def test_a_missing_rank(tmp_path: Path) -> None:
    par = k_split(tmp_path / "model.par", ranks=3)
    (par / "rank_0002.onnx").unlink()
    for kind in (InferenceSession, ThreadSession):
        with pytest.raises(ModelError, match=r"lacks rank_0002\.onnx: it has no files of rank 2 "):
            kind(par)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.int32, np.bool_, np.float16])
def test_lists_become_what_onnxruntime_makes_of_them(dtype: Any, tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["n"])
    y = helper.make_tensor_value_info("y", x.type.tensor_type.elem_type, ["n"])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnxpar.shard(model, tmp_path / "m.par", devices=2, preset="data-parallel")
    whole = ort.InferenceSession(model.SerializeToString())
    with ThreadSession(tmp_path / "m.par") as session:
        for given in ([1.5, 2.5, 0], [1, 0], [True, False], [np.float32(3)], []):
            (wanted,) = whole.run(None, {"x": given})
            (found,) = session.run(None, {"x": given})
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)
