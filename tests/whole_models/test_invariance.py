"""A plan does not depend on names, nor on how an exporter wrote the same computation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpar

MODELS = Path(__file__).parents[2] / "models"
REAL = [
    "gpt2.dynamo",
    "gpt2.legacy",
    "llama.dynamo",
    "bert.legacy",
    "falcon.dynamo",
    "resnet.legacy",
]
LAYOUTS: list[dict[str, Any]] = [
    {"devices": 4, "preset": "tensor-parallel"},
    {"devices": 3, "preset": "tensor-parallel"},
    {"mesh": "dp=2,tp=2", "preset": "hybrid"},
]

Canonical = tuple[list[tuple[str, int, int]], int]


def canonical(model: Path, options: Mapping[str, Any]) -> Canonical:
    """The collectives in order (kind, group, bytes), and the bytes of large weights per rank."""
    plan = onnxpar.plan(model, check_layouts=True, **options)
    collectives = [(c.kind, len(c.group), c.bytes) for c in plan.collectives]
    return collectives, sum(w.bytes_per_rank for w in plan.weights if w.bytes > 4096)


def rename(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same model under random names, of nodes, tensors, inputs and outputs."""
    source = random.Random(seed)
    names: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        return names.setdefault(name, f"t{source.getrandbits(48):x}")

    out = onnx.ModelProto()
    out.CopyFrom(model)
    for node in out.graph.node:
        node.name = f"n{source.getrandbits(48):x}"
        node.input[:] = [new(n) for n in node.input]
        node.output[:] = [new(n) for n in node.output]
    for port in [*out.graph.input, *out.graph.output, *out.graph.initializer]:
        port.name = new(port.name)
    del out.graph.value_info[:]
    return out


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", REAL)
def test_names_do_not_matter(name: str, tmp_path: Path) -> None:
    model = MODELS / f"{name}.static.onnx"
    renamed = tmp_path / "renamed.onnx"
    onnx.save(rename(onnx.load(model), seed=1), renamed)
    for options in LAYOUTS:
        assert canonical(renamed, options) == canonical(model, options)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", REAL)
def test_the_basic_optimizer_does_not_matter(name: str, tmp_path: Path) -> None:
    model = MODELS / f"{name}.static.onnx"
    optimized = tmp_path / "optimized.onnx"
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(optimized)
    options.log_severity_level = 3
    ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    assert len(onnx.load(optimized).graph.node) <= len(onnx.load(model).graph.node)
    for layout in LAYOUTS:
        before, after = canonical(model, layout), canonical(optimized, layout)
        assert Counter(before[0]) == Counter(after[0])


HEADS, DEPTH, WIDTH, INNER, BATCH, SEQ = 8, 6, 48, 160, 4, 5


class Block:
    """One attention block with MLP, written in one of several ways that mean the same."""

    def __init__(self, *, fused: bool, transposed: bool, gemm: bool) -> None:
        self.fused, self.transposed, self.gemm = fused, transposed, gemm
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray[Any, Any]] = {}
        self.random = np.random.default_rng(3)

    def add(self, op: str, inputs: list[str], results: int = 1, **attrs: Any) -> list[str]:
        names = [f"{op}{len(self.nodes)}_{i}" for i in range(results)]
        self.nodes.append(helper.make_node(op, inputs, names, names[0], **attrs))
        return names

    def constant(self, name: str, value: Any) -> str:
        self.weights[name] = np.asarray(value)
        return name

    def linear(self, x: str, name: str, weight: Any, bias: Any) -> str:
        """x W + b, x of shape (batch, seq, k)."""
        b = self.constant(f"{name}.bias", bias)
        if self.transposed:
            w = self.add("Transpose", [self.constant(name, weight.T.copy())], perm=[1, 0])[0]
        else:
            w = self.constant(name, weight)
        if not self.gemm:
            return self.add("Add", [self.add("MatMul", [x, w])[0], b])[0]
        flat = self.constant(f"{name}.flat", np.array([BATCH * SEQ, weight.shape[0]]))
        back = self.constant(f"{name}.back", np.array([BATCH, SEQ, weight.shape[1]]))
        y = self.add("Gemm", [self.add("Reshape", [x, flat])[0], w, b])[0]
        return self.add("Reshape", [y, back])[0]

    def drawn(self, *shape: int) -> np.ndarray[Any, Any]:
        return self.random.standard_normal(shape).astype(np.float32) / np.float32(shape[0] ** 0.5)

    def qkv(self, x: str) -> list[str]:
        weights = [self.drawn(WIDTH, WIDTH) for _ in range(3)]
        biases = [self.drawn(WIDTH) for _ in range(3)]
        if not self.fused:
            return [self.linear(x, f"w{i}", weights[i], biases[i]) for i in range(3)]
        joined = self.linear(x, "qkv", np.concatenate(weights, 1), np.concatenate(biases))
        sizes = self.constant("sizes", np.array([WIDTH] * 3))
        return self.add("Split", [joined, sizes], results=3, axis=2)

    def build(self, path: Path) -> Path:
        heads = self.constant("heads", np.array([BATCH, SEQ, HEADS, DEPTH]))
        merged = self.constant("merged", np.array([BATCH, SEQ, WIDTH]))
        perms = [[0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]]
        q, k, v = (
            self.add("Transpose", [self.add("Reshape", [t, heads])[0]], perm=p)[0]
            for t, p in zip(self.qkv("x"), perms, strict=True)
        )
        scores = self.add("Softmax", self.add("MatMul", [q, k]), axis=-1)[0]
        mixed = self.add("Transpose", self.add("MatMul", [scores, v]), perm=[0, 2, 1, 3])[0]
        mixed = self.add("Reshape", [mixed, merged])[0]
        out = self.linear(mixed, "o", self.drawn(WIDTH, WIDTH), self.drawn(WIDTH))
        h = self.add("Add", ["x", out])[0]
        up = self.add("Relu", [self.linear(h, "up", self.drawn(WIDTH, INNER), self.drawn(INNER))])[
            0
        ]
        down = self.linear(up, "down", self.drawn(INNER, WIDTH), self.drawn(WIDTH))
        self.nodes.append(helper.make_node("Add", [h, down], ["y"], "last"))
        shape = [BATCH, SEQ, WIDTH]
        graph = helper.make_graph(
            self.nodes,
            "block",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(w, n) for n, w in self.weights.items()],
        )
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8),
            path,
        )
        return path


WAYS = [
    {"fused": fused, "transposed": transposed, "gemm": gemm}
    for fused in (False, True)
    for transposed in (False, True)
    for gemm in (False, True)
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_how_it_is_written_does_not_matter(options: dict[str, Any], tmp_path: Path) -> None:
    plain, *others = [Block(**way).build(tmp_path / f"{i}.onnx") for i, way in enumerate(WAYS)]
    expected = canonical(plain, options)
    assert [kind for kind, _, _ in expected[0]] == ["AllReduce", "AllReduce"]
    for way, model in zip(WAYS[1:], others, strict=True):
        assert canonical(model, options) == expected, way


def test_the_ways_compute_the_same(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((BATCH, SEQ, WIDTH)).astype(np.float32)
    results = []
    for i, way in enumerate(WAYS):
        model = Block(**way).build(tmp_path / f"{i}.onnx")
        results.append(ort.InferenceSession(str(model)).run(None, {"x": x})[0])
    for result in results[1:]:
        assert np.abs(result - results[0]).max() <= 1e-5 * np.abs(results[0]).max()
