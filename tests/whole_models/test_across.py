"""Small models whose ops are split along the very axis that they work across, on real ranks.

None of them may gather what is split: the collectives say what the ranks exchange instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import check_agrees, check_outputs, options, run_ranks, run_unsplit
from small_models import write_text

from onnxpar.planner import sharder


@dataclass(frozen=True)
class Split:
    """A model, how it is split, and the collectives that this takes."""

    text: str
    mesh: str
    shard: Mapping[str, Any]
    collectives: str
    opset: int = 18


COLUMNS = {"Relu_h": [[None, "tp"]]}
MODELS = {
    "layer norm": Split(
        """m (float[3,7] x, float[7] w1, float[7] w2)
        => (float[3,7] y, float[3,1] mean, float[3,1] d)
        { h = Relu(x)  y, mean, d = LayerNormalization(h, w1, w2) }""",
        "tp=3",
        COLUMNS,
        "AllReduce AllReduce",
    ),
    "layer norm over two dimensions": Split(
        """m (float[3,4,6] x, float[4,6] w1) => (float[3,4,6] y)
        { h = Relu(x)  y = LayerNormalization<axis = 1>(h, w1) }""",
        "a=2,b=2",
        {"Relu_h": [[None, "a", "b"]]},
        "AllReduce AllReduce",
    ),
    "halves": Split(
        """m (float16[3,7] x, float16[7] w1) => (float16[3,7] y, float16[3,1] z)
        <int64[1] one = {1}>
        { h = Relu(x)  y = RMSNormalization(h, w1)  z = ReduceLogSumExp(h, one) }""",
        "tp=2",
        COLUMNS,
        "AllReduce AllReduce AllReduce",
        23,
    ),
    "batch norm in training": Split(
        """m (float[5,3,7] x, float[3] w1, float[3] w2, float[3] w3, float[3] w4)
        => (float[5,3,7] y, float[3] mean, float[3] variance)
        { h = Relu(x)  v = Mul(w4, w4)
          y, mean, variance = BatchNormalization<training_mode = 1>(h, w1, w2, w3, v) }""",
        "dp=2,tp=2",
        {"Relu_h": [["dp", None, "tp"]]},
        "AllReduce AllReduce",
    ),
    "group norm": Split(
        """m (float[2,6,5] x, float[6] w1, float[6] w2) => (float[2,6,5] y)
        { h = Relu(x)  y = GroupNormalization<num_groups = 2>(h, w1, w2) }""",
        "tp=4",
        {"Relu_h": [[None, None, "tp"]]},
        "AllReduce AllReduce",
        21,
    ),
    "neighbouring channels": Split(
        """m (float[1,7,2,2] x) => (float[1,7,2,2] y)
        { h = Relu(x)  y = LRN<size = 5, alpha = 0.5>(h) }""",
        "tp=3",
        {"Relu_h": [[None, "tp", None, None]]},
        "NeighborExchange",
    ),
    "the likeliest of a split vocabulary": Split(
        """m (float[3,4] x, float[4,11] w1) => (int64[3,1] y, float[3,5] best, int64[3,5] at)
        <int64[1] k = {5}>
        { h = MatMul(x, w1)  y = ArgMax<axis = 1>(h)  best, at = TopK(h, k) }""",
        "tp=4",
        {"MatMul_h": [[None, None], [None, "tp"]]},
        "AllGather AllGather AllReduce AllReduce",
    ),
    "running sums": Split(
        """m (float[3,10] x) => (float[3,10] y, float[3,10] z) <int64 axis = {1}>
        { h = Relu(x)  y = CumSum<exclusive = 1>(h, axis)  z = CumSum<reverse = 1>(h, axis) }""",
        "tp=4",
        COLUMNS,
        "AllGather AllGather",
    ),
    "split classes": Split(
        """m (float[4,3] x, float[3,7] w1, float[7] w2) => (float y, float[4,7] z)
        <int64[4] labels = {6, 0, 2, 3}>
        { h = MatMul(x, w1)  c = Mul(w2, w2)
          y, z = SoftmaxCrossEntropyLoss<ignore_index = 2>(h, labels, c) }""",
        "dp=2,tp=2",
        {"MatMul_h": [["dp", None], [None, "tp"]]},
        "AllReduce AllReduce AllReduce AllReduce",
    ),
    "keys and values in parts": Split(
        """m (float[2,4,5,6] q, float[2,2,5,6] x, float[2,2,5,8] v) => (float[2,4,5,8] y)
        { h = Relu(x)  y = Attention<is_causal = 1>(q, h, v) }""",
        "tp=3",
        {"Relu_h": [[None, None, "tp", None]]},
        "AllReduce AllReduce",
        23,
    ),
    "queries in parts": Split(
        """m (float[2,5,24] x, float[2,5,12] k, float[2,5,16] v) => (float[2,5,32] y)
        { h = Relu(x)
          y = Attention<is_causal = 1, q_num_heads = 4, kv_num_heads = 2>(h, k, v) }""",
        "tp=2",
        {"Relu_h": [[None, "tp", None]]},
        "",
        23,
    ),
    "two directions": Split(
        """m (float[3,4,5] x, float[2,12,5] w1, float[2,12,4] w2)
        => (float[3,2,4,4] y)
        { h = GRU<hidden_size = 4, direction = "bidirectional">(x, w1, w2)  y = Relu(h) }""",
        "tp=2",
        {"Relu_y": [[None, "tp", None, None]]},
        "",
    ),
    "rows that are written": Split(
        """m (float[7,3] x, float[4,3] u) => (float[7,3] y, float[7,3] z)
        <int64[4,3] at = {0, 1, 2, 6, 5, 4, 3, -1, 0, 1, 2, 3}, int64[4,1] rows = {6, 0, -3, 2}>
        { h = Relu(x)  y = ScatterElements<axis = 0, reduction = "add">(h, at, u)
          z = ScatterND(h, rows, u) }""",
        "tp=3",
        {"Relu_h": [["tp", None]]},
        "",
    ),
    "columns by hand": Split(
        """m (float[5,7] x, int64[4] i) => (float[5,4] y, bool[5,4] z)
        { h = Relu(x)  y = Gather<axis = 1>(h, i)
          p = Cast<to = 9>(h)  z = Gather<axis = 1>(p, i) }""",
        "tp=3",
        {"Relu_h": [[None, {"tp": [4, 1, 2]}]], "Cast_p": [[None, {"tp": [4, 1, 2]}]]},
        "AllReduce AllReduce",
    ),
    "positions": Split(
        """m (float[5,7] x, int64[5] i) => (float[5,7] y, float[5,7] z)
        <int64 depth = {7}, float[2] values = {-1.0, 3.0}>
        { h = Relu(x)  t = Trilu(h)  e = EyeLike<k = 1>(h)  y = Add(t, e)
          o = OneHot(i, depth, values)  z = Relu(o) }""",
        "tp=2",
        {"Relu_h": [["tp", None]], "Relu_z": [[None, "tp"]]},
        "",
    ),
    "draws with a seed": Split(
        """m (float[5,6] x) => (float[5,6] y, bool[5,6] mask, float[5,6] z)
        <float ratio = {0.4}, bool on = {1}>
        { h = Relu(x)  n = RandomNormalLike<seed = 5.0>(h)  s = Add(h, n)
          u = RandomUniform<seed = 6.0, shape = [5, 6]>()  t = Mul(s, u)
          y, mask = Dropout<seed = 7>(t, ratio, on)  z = Dropout<seed = 8>(t, ratio, on) }""",
        "tp=3",
        COLUMNS,
        "",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_an_op_split_across_its_axis(name: str, tmp_path: Path) -> None:
    split = MODELS[name]
    head = f'<ir_version: 10, opset_import: ["" : {split.opset}]>\n'
    model = write_text(head + split.text, tmp_path / "model.onnx")
    how = options(split.mesh, strategy={"shard": split.shard})
    plan = check_agrees(model, tmp_path, how)
    assert sorted(c.kind for c in plan.collectives) == split.collectives.split()


OPEN = {
    "statistics": Split(
        """m (float[2,3,n] x, float[3] w1, float[3] w2) => (float[2,3,n] y, float[2,3,1] z)
        <int64[1] last = {2}>
        { h = Relu(x)  y = InstanceNormalization(h, w1, w2)  z = ReduceMean(h, last) }""",
        "tp=2",
        {"Relu_h": [[None, None, "tp"]]},
        "AllReduce AllReduce AllReduce",
    ),
    "keys": Split(
        """m (float[2,4,n,6] q, float[2,2,n,6] x, float[2,2,n,8] v) => (float[2,4,n,8] y)
        { h = Relu(x)  y = Attention<is_causal = 1>(q, h, v) }""",
        "tp=2",
        {"Relu_h": [[None, None, "tp", None]]},
        "AllReduce AllReduce",
        23,
    ),
    "positions": Split(
        """m (float[3,n] x) => (int64[3,1] y, float[3,n] z, float[3,n] d)
        <float ratio = {0.4}, bool on = {1}>
        { h = Relu(x)  y = ArgMax<axis = 1>(h)  z = Hardmax(h)
          d = Dropout<seed = 3>(h, ratio, on) }""",
        "tp=2",
        COLUMNS,
        "AllReduce AllReduce AllReduce AllReduce",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", OPEN)
def test_sizes_may_stay_open(name: str, tmp_path: Path) -> None:
    split = OPEN[name]
    head = f'<ir_version: 10, opset_import: ["" : {split.opset}]>\n'
    model = write_text(head + split.text, tmp_path / "model.onnx")
    par = tmp_path / "model.par"
    plan = sharder.shard(model, par, options(split.mesh, strategy={"shard": split.shard}))
    assert sorted(c.kind for c in plan.collectives) == split.collectives.split()
    for size in (4, 9):
        rng = np.random.default_rng(size)
        feeds = {
            p.name: rng.standard_normal([size if isinstance(s, str) else s for s in dims]).astype(
                np.float32
            )
            for p in plan.inputs
            for dims in [_declared(model, p.name)]
        }
        names = [p.name for p in plan.outputs]
        check_outputs(run_ranks(par, feeds), run_unsplit(model, feeds), names)


def _declared(model: Path, name: str) -> list[int | str]:
    """The dimensions of an input as the model declares them."""
    port = next(i for i in onnx.load(model).graph.input if i.name == name)
    return [d.dim_param or d.dim_value for d in port.type.tensor_type.shape.dim]
