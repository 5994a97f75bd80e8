"""Gated activations without a kernel are written as the ops that define them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import options, relative_error, run_ranks
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from opsets import since
from training.steps import batches, run_unsplit

from onnxpar.load.spell_out import spell_out
from onnxpar.planner import sharder
from onnxpar.training import grad

RNG = np.random.default_rng(3)
WEIGHTS = {
    "gate": RNG.normal(size=(6, 8)).astype(np.float32),
    "up": RNG.normal(size=(6, 8)).astype(np.float32),
    "down": RNG.normal(size=(8, 5)).astype(np.float32),
}


def block(opset: int, op: str = "SwiGLU", **attrs: Any) -> onnx.ModelProto:
    """The gated block of a Llama."""
    activation = [helper.make_node(op, ["a", "b"], ["h"], "act", **attrs)]
    if op == "Swish":
        activation = [
            helper.make_node(op, ["a"], ["s"], "act", **attrs),
            helper.make_node("Mul", ["s", "b"], ["h"], "mul"),
        ]
    nodes = [
        helper.make_node("MatMul", ["x", "gate"], ["a"], "mm_gate"),
        helper.make_node("MatMul", ["x", "up"], ["b"], "mm_up"),
        *activation,
        helper.make_node("MatMul", ["h", "down"], ["y"], "mm_down"),
    ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [4, 6]), ("y", [4, 5]))
    ]
    weights = [numpy_helper.from_array(value, name) for name, value in WEIGHTS.items()]
    graph = helper.make_graph(nodes, "block", ports[:1], ports[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


CASES = [
    pytest.param("SwiGLU", 28, {}, marks=since(28)),
    pytest.param("SwiGLU", 28, {"alpha": 1.7}, marks=since(28)),
    pytest.param("Swish", 24, {"alpha": 1.7}, marks=since(24)),
    pytest.param("Swish", 26, {"alpha": 0.5}, marks=since(26)),
]


@pytest.mark.parametrize(("op", "opset", "attrs"), CASES)
def test_ranks_compute_what_onnx_defines(
    op: str, opset: int, attrs: dict[str, Any], tmp_path: Path
) -> None:
    """Compared with ONNX's reference evaluator, as onnxruntime may run neither op."""
    model = block(opset, op, **attrs)
    onnx.save(model, tmp_path / "m.onnx")
    plan = sharder.shard(tmp_path / "m.onnx", tmp_path / "m.par", options("tensor-parallel 2"))
    assert [c.kind for c in plan.collectives] == ["AllReduce"]
    feeds = {"x": np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)}
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    (got,) = run_ranks(tmp_path / "m.par", feeds)
    assert relative_error(got, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.DOUBLE])
@since(28)
def test_in_other_types_and_in_bodies(dtype: int) -> None:
    """The spelled form is an ordinary model, also within a branch."""
    x, y = (helper.make_tensor_value_info(n, dtype, [3, 4]) for n in ("x", "y"))
    inner = helper.make_graph(
        [helper.make_node("SwiGLU", ["x", "x"], ["t"], alpha=1.5)],
        "then",
        [],
        [helper.make_tensor_value_info("t", dtype, [3, 4])],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["e"])],
        "else",
        [],
        [helper.make_tensor_value_info("e", dtype, [3, 4])],
    )
    cond = numpy_helper.from_array(np.array(True), "c")
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=other)
    graph = helper.make_graph([node], "g", [x], [y], [cond])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=10)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    feeds = {"x": np.linspace(-3, 3, 12).reshape(3, 4).astype(kind)}
    (wanted,) = ReferenceEvaluator(model).run(None, feeds)
    spell_out(model)
    onnx.checker.check_model(model)
    assert {n.op_type for n in inner.node} == {"SwiGLU"}  # a copy was changed
    (got,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(got, wanted, rtol=2e-3 if kind == np.float16 else 1e-6)


@since(28)
def test_its_gradient(tmp_path: Path) -> None:
    """A training step of the block equals that of a block whose author wrote Sigmoid and Mul."""
    by_hand = block(28)
    made = [
        helper.make_node("Sigmoid", ["a"], ["s"]),
        helper.make_node("Mul", ["a", "s"], ["g"]),
        helper.make_node("Mul", ["g", "b"], ["h"]),
    ]
    nodes = [*by_hand.graph.node[:2], *made, by_hand.graph.node[3]]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del by_hand.graph.node[:]
    by_hand.graph.node.extend(kept)
    found = []
    for name, model in (("swiglu", block(28)), ("by-hand", by_hand)):
        onnx.save(model, tmp_path / f"{name}.onnx")
        step = tmp_path / f"{name}.step.onnx"
        grad(tmp_path / f"{name}.onnx", step, loss="mse", optimizer="sgd")
        plan, _ = sharder.plan(step, options("tensor-parallel 1"))
        feeds = list(batches(plan, 2))
        outputs, _ = run_unsplit(step, feeds, [0.1, 0.1])
        found.append(outputs)
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            np.testing.assert_allclose(value, other[key], rtol=1e-6, err_msg=key)
