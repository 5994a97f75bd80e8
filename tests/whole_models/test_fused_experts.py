"""onnxruntime's own mixtures of experts in whole models, whose weights the kernels pack: split by
every preset, they agree with the unsplit model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit
from onnx import helper, numpy_helper

from onnxpar.planner import sharder

EXPERTS, HIDDEN, COLUMNS = 4, 32, 64


class Mixtures:
    """Two layers, each a product, a router and a mixture of experts."""

    def __init__(self, op: str, dtype: Any = np.float32, **attrs: Any) -> None:
        self.random = np.random.default_rng(0)
        self.dtype = np.dtype(dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        x = "x"
        for layer in range(2):
            x = self._layer(op, x, f"layer{layer}", dict(attrs))
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        ports = [helper.make_tensor_value_info(n, kind, ["n", 5, HIDDEN]) for n in ("x", x)]
        graph = helper.make_graph(self.nodes, "mixtures", ports[:1], ports[1:], self.stored)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        self.model = helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _layer(self, op: str, x: str, name: str, attrs: dict[str, Any]) -> str:
        flat = self._keep(f"{name}.flat", np.array([-1, HIDDEN]))
        matrix = self._floats(f"{name}.matrix", HIDDEN, HIDDEN)
        router = self._floats(f"{name}.router", HIDDEN, EXPERTS)
        attrs = {"k": 2, "activation_type": "silu", **attrs}
        rows = COLUMNS
        if attrs.get("swiglu_fusion"):
            attrs["activation_type"], rows = "swiglu", 2 * COLUMNS
        points = attrs.pop("points", False)
        if op == "MoE":
            first = self._floats(f"{name}.first", EXPERTS, rows, HIDDEN)
            second = self._floats(f"{name}.second", EXPERTS, HIDDEN, COLUMNS)
            weights = [[first], [second]]
        else:
            block, bits = attrs.get("block_size", 0), attrs.get("expert_weight_bits", 4)
            weights = [
                self._packed(f"{name}.first", rows, HIDDEN, block, bits),
                self._packed(f"{name}.second", HIDDEN, COLUMNS, block, bits),
            ]
        biases = [self._floats(f"{name}.bias{n}", EXPERTS, n) for n in (rows, HIDDEN)]
        first, second = ([*w[:2], b] for w, b in zip(weights, biases, strict=True))
        more = ["", "", "", weights[0][2], weights[1][2]] if points else []
        self._add("MatMul", [x, matrix], f"{name}.a")
        self._add("Reshape", [f"{name}.a", flat], f"{name}.rows")
        self._add("MatMul", [f"{name}.rows", router], f"{name}.scores")
        operands = [f"{name}.a", f"{name}.scores", *first, *second, *more]
        self._add(op, operands, f"{name}.mixture", domain="com.microsoft", **attrs)
        self._add("Add", [x, f"{name}.mixture"], f"{name}.y")
        return f"{name}.y"

    def _packed(self, name: str, rows: int, columns: int, block: int, bits: int) -> list[str]:
        """Integers, their scales and zero points."""
        scaled = (EXPERTS, rows, columns // block) if block else (EXPERTS, rows)
        points = (*scaled[:-1], scaled[-1] * bits // 8)
        scale = self.random.uniform(0.02, 0.06, scaled) * (0.1 if bits == 8 else 1)
        return [
            self._codes(f"{name}.codes", EXPERTS, rows, columns * bits // 8),
            self._keep(f"{name}.scales", scale.astype(self.dtype)),
            self._codes(f"{name}.points", *points),
        ]

    def _codes(self, name: str, *shape: int) -> str:
        return self._keep(name, self.random.integers(0, 256, shape).astype(np.uint8))

    def _floats(self, name: str, *shape: int) -> str:
        values = self.random.standard_normal(shape) / np.sqrt(shape[-1])
        return self._keep(name, values.astype(self.dtype))

    def _keep(self, name: str, values: np.ndarray) -> str:
        self.stored.append(numpy_helper.from_array(values, name))
        return name

    def _add(self, op: str, inputs: list[str], output: str, **attrs: Any) -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], f"{output}.{op}", **attrs))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "floats": ("MoE", {}),
    "floats-gated": ("MoE", {"swiglu_fusion": 1, "normalize_routing_weights": 1}),
    "4-rows": ("QMoE", {"points": True}),
    "4-blocks": ("QMoE", {"block_size": 16, "points": True}),
    "4-gated": ("QMoE", {"block_size": 16, "swiglu_fusion": 1}),
    "4-levels": ("QMoE", {"block_size": 16, "points": True, "accuracy_level": 4}),
    "8-rows": ("QMoE", {"expert_weight_bits": 8}),
    "8-blocks": ("QMoE", {"expert_weight_bits": 8, "block_size": 16, "points": True}),
    "halves": ("QMoE", {"block_size": 16, "swiglu_fusion": 1, "dtype": np.float16}),
}


def check(
    name: str, layout: str, folder: Path, batch: int = 3, dims: dict[str, int | str] | None = None
) -> sharder.Plan:
    """Shards a model, and compares it with the unsplit one; returns the plan."""
    op, attrs = MODELS[name]
    made = Mixtures(op, **attrs)
    path = folder / "model.onnx"
    onnx.save(made.model, path)
    plan = sharder.shard(path, folder / "model.par", options(layout, dims=dims))
    shape = (batch, 5, HIDDEN)
    feeds = {"x": np.random.default_rng(1).standard_normal(shape).astype(made.dtype)}
    got = run_ranks(folder / "model.par", feeds)
    check_outputs(got, run_unsplit(path, feeds), [port.name for port in plan.outputs])
    return plan


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["expert-parallel 2", "tensor-parallel 2"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_agree_with_the_unsplit_model(name: str, layout: str, tmp_path: Path) -> None:
    check(name, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", ["expert-parallel ep=2,tp=2", "expert-parallel 3", "expert-parallel 5", "3"]
)
@pytest.mark.parametrize("name", ["floats-gated", "8-blocks"])
def test_other_meshes(name: str, layout: str, tmp_path: Path) -> None:
    """Also with more ranks than experts, and with fewer sequences than ranks."""
    check(name, layout, tmp_path, batch=1)


@pytest.mark.parametrize("name", ["floats", "4-blocks"])
def test_ranks_hold_and_compute_their_experts_alone(name: str, tmp_path: Path) -> None:
    plan = check(name, "expert-parallel 2", tmp_path, batch=2, dims={"n": 2})
    kinds = Counter(c.kind for c in plan.collectives)
    assert kinds == {"AllGather": 4, "ReduceScatter": 2}
    mixtures = [w for w in plan.weights if "first" in w.name or "second" in w.name]
    assert mixtures and all(w.bytes_per_rank * 2 == w.bytes for w in mixtures)
    assert plan.flops["per_rank"] * 2 == plan.flops["model"]
    assert any(note.startswith("each row of a mixture has 2 of 4 experts ") for note in plan.notes)
