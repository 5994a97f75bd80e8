"""Models of the newest opset and IR version that the installed onnx and onnxruntime load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
import pytest
from agreement import check_agrees, check_outputs, options, run_ranks
from committed import MODELS
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from opsets import since

from onnxpar.base.errors import ModelError
from onnxpar.graph.checker import newest_ir, newest_opset
from onnxpar.load.load import load
from onnxpar.planner import sharder

RNG = np.random.default_rng(5)
IR_OF_27 = 13


def weight(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return (RNG.standard_normal(shape) / 4).astype(np.float32)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tensor-parallel 2", "data-parallel 2", "3"])
def test_an_export_that_was_converted(layout: str, tmp_path: Path) -> None:
    model = onnx.load(MODELS / "llama.dynamo.static.onnx")
    converted = onnx.version_converter.convert_version(model, newest_opset())
    converted.ir_version = newest_ir()
    onnx.save(converted, tmp_path / "m.onnx")
    plan = check_agrees(tmp_path / "m.onnx", tmp_path, options(layout))
    assert plan.weights


@pytest.mark.parametrize(("opset", "ir"), [(1, 0), (0, 1)])
def test_what_is_newer_is_refused(opset: int, ir: int, tmp_path: Path) -> None:
    model = onnx.load(MODELS / "llama.dynamo.static.onnx")
    model.ir_version = newest_ir() + ir
    model.opset_import[0].version = newest_opset() + opset
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=rf"load up to opset {newest_opset()}, IR {newest_ir()}"):
        load(tmp_path / "m.onnx")


def gated_delta_net() -> onnx.ModelProto:
    """The mixer of a Qwen3.5: projections, a causal convolution, and linear attention."""
    heads, width, batch, steps = 4, 6, 2, 12
    inner = heads * width
    weights = {
        **{n: weight(16, inner) for n in ("wq", "wk", "wv")},
        "wg": weight(16, heads),
        "wb": weight(16, heads),
        "conv": weight(inner, 1, 4),
        "wo": weight(inner, 16),
    }
    nodes = [
        *(helper.make_node("MatMul", ["x", f"w{n}"], [n], f"mm_{n}") for n in "qkvgb"),
        helper.make_node("Transpose", ["v"], ["vt"], perm=[0, 2, 1]),
        helper.make_node(
            "CausalConvWithState", ["vt", "conv"], ["c", "c_state"], activation="silu"
        ),
        helper.make_node("Transpose", ["c"], ["vc"], perm=[0, 2, 1]),
        helper.make_node("Abs", ["g"], ["ga"]),
        helper.make_node("Neg", ["ga"], ["decay"]),
        helper.make_node("Sigmoid", ["b"], ["beta"]),
        helper.make_node(
            "LinearAttention",
            ["q", "k", "vc", "", "decay", "beta"],
            ["a", "a_state"],
            q_num_heads=heads,
            kv_num_heads=heads,
            update_rule="gated_delta",
        ),
        helper.make_node("MatMul", ["a", "wo"], ["y"], "mm_o"),
    ]
    shapes = {"y": [batch, steps, 16], "c_state": [batch, inner, 3]}
    shapes["a_state"] = [batch, heads, width, width]
    graph = helper.make_graph(
        nodes,
        "mixer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, steps, 16])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 27)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_OF_27)


SEQUENCE = {"mesh": {"sp": 3}, "shard": {"CausalConvWithState*": [[None, None, "sp"]]}}


@pytest.mark.matrix
@since(27)
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("tensor-parallel 2", None),
        ("tensor-parallel 4", None),
        ("data-parallel 2", None),
        ("sp=3", SEQUENCE),
        ("4", None),
    ],
)
def test_linear_attention(layout: str, strategy: dict[str, object] | None, tmp_path: Path) -> None:
    """Compared with onnxruntime, and that with ONNX's reference evaluator."""
    path = tmp_path / "m.onnx"
    onnx.save(gated_delta_net(), path)
    plan = check_agrees(path, tmp_path, options(layout, strategy=strategy))
    assert not [w for w in plan.whole if w.op == "CausalConvWithState"]
    if strategy is not None:  # the positions before and the last ones come from other ranks
        inside = [c.kind for c in plan.collectives if c.tensor.startswith("in CausalConv")]
        assert len(inside) == 2
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 12, 16)).astype(np.float32)}
    wanted = ReferenceEvaluator(onnx.load(path)).run(None, feeds)
    got = run_ranks(tmp_path / "model.par", feeds)
    check_outputs(got, [np.asarray(w) for w in wanted], [p.name for p in plan.outputs])


@since(27)
def test_heads_are_split(tmp_path: Path) -> None:
    onnx.save(gated_delta_net(), tmp_path / "m.onnx")
    plan, _ = sharder.plan(tmp_path / "m.onnx", options("tensor-parallel 2"))
    found = {w.name: w.layout_text for w in plan.weights}
    assert found["wq"] == "[-, tp]" and found["conv"] == "[tp, -, -]"
    assert [c.kind for c in plan.collectives] == ["AllReduce"]
