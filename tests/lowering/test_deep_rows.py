"""Experts may take the columns of a row apart, and put them together again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit
from lowering.mixtures import exchanging, feeds_of, mixture
from onnx import TensorProto, helper

from onnxpar.graph.typical import Typical
from onnxpar.planner import sharder

IDS = {"chosen": [[0, 1], [2, 0], [1, 2], [1, 0], [2, 2], [0, 2]], "no expert": [[3, 3]] * 6}
APART = "deep = Reshape (p, apart)"
LINES = {
    "last dimension": {
        "g": "p = Mul (h, s) apart = Constant <value_ints = [0, 0, 5, 1]> ()"
        f" {APART} axis = Constant <value_ints = [3]> ()"
        " g = ReduceSum <keepdims = 0> (deep, axis)"
    },
    "from the end": {
        "g": "p = Mul (h, s) apart = Constant <value_ints = [0, 0, 1, 5]> ()"
        f" {APART} axis = Constant <value_ints = [-2]> ()"
        " g = ReduceSum <keepdims = 0> (deep, axis)"
    },
    "no sizes but columns": {
        "g": "p = Mul (h, s) deep = Unsqueeze (p, two) t = Tanh (deep)"
        " flat = Constant <value_ints = [0, -1, 5]> () g = Reshape (t, flat)"
    },
    "behind experts": {
        "n": "p = Tanh (m) apart = Constant <value_ints = [0, 0, 3, 1]> ()"
        f" {APART} t = Tanh (deep) flat = Constant <value_ints = [0, 0, -1]> ()"
        " n = Reshape (t, flat)"
    },
    "short target": {
        "c": "mean = ReduceMean <axes = [2]> (b) size = Constant <value_ints = [3]> ()"
        " wide = Expand (mean, size) c = Add (b, wide)"
    },
    "kept dimension": {
        "y": "all = ReduceSum <keepdims = 1> (d, zero) y = Squeeze (all, zero)"
    },
}  # fmt: skip


@pytest.mark.matrix(4)
@pytest.mark.parametrize("rows", [6, "rows"])
@pytest.mark.parametrize("layout", ["expert-parallel 2", "data-parallel 3", "expert-parallel 3"])
@pytest.mark.parametrize("case", LINES)
def test_ranks_agree(case: str, layout: str, rows: int | str, tmp_path: Path) -> None:
    """With some of the experts, ranks exchange rows."""
    path = tmp_path / "model.onnx"
    onnx.save(mixture(3, 2, rows, lines=LINES[case]), path)
    typical = Typical.from_argument({"rows": 64}) if rows == "rows" else Typical()
    how = replace(exchanging(layout), typical=typical)
    plan = sharder.shard(path, tmp_path / "model.par", how)
    assert len(plan.mixtures) == 1
    for ids in IDS.values():
        feeds = feeds_of(ids)
        check_outputs(run_ranks(tmp_path / "model.par", feeds), run_unsplit(path, feeds), ["y"])


def test_names_that_end_like_the_copy_of_a_node(tmp_path: Path) -> None:
    """h@1 is not what the second expert computes in place of h."""
    model = mixture(3, 2, 6)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["h@1" if name == "g" else name for name in names]
    model.graph.output.append(helper.make_tensor_value_info("h@1", TensorProto.FLOAT, [3, 6, 5]))
    path, feeds = tmp_path / "model.onnx", feeds_of(IDS["chosen"])
    onnx.save(model, path)
    sharder.shard(path, tmp_path / "model.par", options("data-parallel 2"))
    got = run_ranks(tmp_path / "model.par", feeds)
    check_outputs(got, run_unsplit(path, feeds), ["y", "h@1"])
