"""The graph after every pass, as text, for small models: the files are the specification."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
from lowering.mixtures import SLOW
from opsets import since
from pass_texts import GOLDEN, Example, compare_golden, joined, texts_after

from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import load
from onnxpar.passes.write.split_ranks import SplitRanks
from onnxpar.planner.context import make_context
from onnxpar.planner.default_passes import DEFAULT_PASSES
from onnxpar.planner.options import Options
from onnxpar.planner.pass_registry import OWN
from onnxpar.strategy.strategy import Strategy

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
OPTIONAL = (
    "compress-collectives",
    "fuse-all-reduces",
    "compact-experts",
    "split-programs",
    "place-tables",
    "gate-recomputation",
    "fuse-elementwise",
)
ALL = ",".join(p.name for p in DEFAULT_PASSES if p.name not in OPTIONAL)


def ones(count: int) -> str:
    """The values of a weight."""
    return "{" + ", ".join(["1"] * count) + "}"


CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "column-row": (
        f"""mlp (float[4,6] x) => (float[4,6] y)
        <float[6,8] w = {ones(48)}, float[8] b = {ones(8)}, float[8,6] v = {ones(48)},
        float[6] c = {ones(6)}>
        {{ h = Gemm(x, w, b)  r = Relu(h)  y = Gemm(r, v, c) }}""",
        "tp=2",
        {"shard": {"Gemm_h": [[1, 1], [1, 2]]}},
        ALL,
    ),
    "row-to-column": (
        """swap (float[4,6] x) => (float[4,6] y) { h = Relu(x)  y = Exp(h) }""",
        "tp=2",
        {"shard": {"Relu_h": [["tp", None]], "Exp_y": [[None, "tp"]]}},
        ALL,
    ),
    "scatter": (
        """sum (float[4,6] x, float[6,8] w) => (float[4,8] y) { h = MatMul(x, w)  y = Relu(h) }""",
        "a=2,b=2",
        {"shard": {"MatMul_h": [["a", "b"], ["b", None]], "Relu_y": [[["a", "b"], None]]}},
        ALL,
    ),
    "table": (
        """lookup (int64[4] i, float[7,2] t) => (float[4,2] y) { y = Gather(t, i) }""",
        "tp=3",
        {"tensors": {"t": ["tp", None]}},
        ALL,
    ),
    "fused-qkv": (
        """qkv (float[2,3,12] x) => (float[2,3,4] y)
        <int64[3] n = {4, 4, 4}>
        { q, k, v = Split<axis = 2>(x, n)  a = Add(q, k)  y = Mul(a, v) }""",
        "tp=2",
        {"shard": {"Mul_y": [[None, None, "tp"], [None, None, "tp"]]}},
        ALL,
    ),
    "heads": (
        """heads (float[2,5,12] x, float[12,12] w) => (float[2,3,5,4] t)
        <int64[4] s = {2, 5, 3, 4}>
        { h = MatMul(x, w)  r = Reshape(h, s)  t = Transpose<perm = [0, 2, 1, 3]>(r) }""",
        "tp=2",
        {"tensors": {"t": [None, "tp", None, None]}},
        ALL,
    ),
    "loop": (
        f"""recurrent (float[4,6] x, int64 n) => (float[4,6] y)
        <float[6,6] w = {ones(36)}>
        {{ y = Loop<body = cell (int64 i, bool c, float[4,6] h) => (bool d, float[4,6] t)
            {{ d = Identity(c)  m = MatMul(h, w)  t = Tanh(m) }}>(n, , x) }}""",
        "tp=2",
        {"shard": {"MatMul_m": [[None, "tp"], ["tp", None]]}},
        ALL,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text, mesh, strategy, passes = CASES[name]
    path = tmp_path / f"{name}.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    model = load(path)
    options = Options(mesh=Mesh.parse(mesh), strategy=Strategy.of(strategy))
    shown = texts_after(passes, model, make_context(model, options))
    compare_golden(name, "\n".join(shown[1:]), request)


PARTICULAR: dict[str, tuple[Example, Sequence[str]]] = {
    # rounds: what the user asks for, also of the nodes derived from it; then the preset
    "annotations": (
        Example(
            "total (float[4,2] x, float[2,3] w) => (float y)"
            "{ h = MatMul(x, w)  y = ReduceSum<keepdims = 0>(h) }",
            {
                "mesh": "dp=2,tp=2",
                "preset": "zero2",
                "strategy": {"shard": {"MatMul_h": [[None, "tp"], ["tp", None]]}},
            },
            {"loss": "y", "optimizer": "momentum"},
        ),
        ["annotate-strategy"],
    ),
    # the preset names the nodes of the experts
    "experts": (
        Example(
            """experts (float[4,3,6] x, float[4,6,8] w1, float[4,8,6] w2) => (float[4,3,6] y)
            { h = MatMul(x, w1)  r = Relu(h)  y = MatMul(r, w2) }""",
            {"mesh": "tp=2", "preset": "expert-parallel"},
        ),
        ["annotate-strategy", "propagate-layouts"],
    ),
    # the sums of y and z are sent together; that of u waits for y
    "fused": (
        Example(
            """sums (float[4,6] x, float[6,4] w1, float[6,2] w2, float[4,2] w3)
            => (float[4,4] y, float[4,2] z, float[4,2] u)
            { y = MatMul(x, w1)  z = MatMul(x, w2)  r = Exp(y)  u = MatMul(r, w3) }""",
            {
                "mesh": "tp=2",
                "fusion": "size",
                "strategy": {"shard": {f"MatMul_{y}": [[None, "tp"], ["tp", None]] for y in "yzu"}},
            },
        ),
        ["insert-collectives", "fuse-all-reduces"],
    ),
    # the sum of y is complete when d is; that of z is not read
    "overlapped": (
        Example(
            """branches (float[4,6] x, float[6,3] w1, float[4,2] b, float[2,3] w2)
            => (float[4,3] z, float[4,3] u)
            { y = MatMul(x, w1)  c = Exp(b)  d = MatMul(c, w2)  z = Max(y, d)
              u = MatMul(x, w1) }""",
            {"mesh": "tp=2", "overlap": "on", "strategy": {"tensors": {"x": [None, "tp"]}}},
        ),
        ["localize-ops", "overlap-collectives", "order-collectives"],
    ),
    # both graphs need the forward pass and its sum; the gradient stays in the step alone
    "evaluation": (
        Example(
            """sums (float[4,2] x, float[2,1] w) => (float y)
            { h = MatMul(x, w)  y = ReduceSum<keepdims = 0>(h) }""",
            {"mesh": "dp=2", "preset": "data-parallel"},
            {"loss": "y", "optimizer": "sgd"},
        ),
        ["localize-ops", "split-programs", "order-collectives"],
    ),
    # the table is split by rows; each rank writes those that it holds
    "host": (
        Example(
            """lookup (int64[3] i) => (float[3,1] y)
            <float[7,1] w = {1, 2, 3, 4, 5, 6, 7}> { y = Gather(w, i) }""",
            {
                "mesh": "tp=2",
                "strategy": {"tensors": {"w*": ["tp", None]}, "place": {"w": "host"}},
            },
            {"loss": "mse", "optimizer": "adagrad", "params": ["w"], "lazy": ["w"]},
        ),
        ["split-programs", "place-tables", "order-collectives"],
    ),
    # three experts over two ranks, which compute the rows that are chosen; columns of their own
    "chosen-rows": (
        Example(
            """mixture (float[4,2] x, bool[3,4,1] c, float[3,4,1] r) => (float[4,2] y)
            <float z = {0}, int64[1] i = {0}, float[3,2,2] w1 = {1,2,3,4,5,6,7,8,9,1,2,3},
             float[3,2,2] w2 = {1,2,3,4,5,6,7,8,9,1,2,3}>
            { a = Where(c, x, z)  h = MatMul(a, w1)  s = Sigmoid(h)  g = Mul(h, s)
              v = Transpose<perm = [0, 2, 1]>(w2)  b = MatMul(g, v)  k = Mul(b, r)
              d = Where(c, k, z)  y = ReduceSum<keepdims = 0>(d, i) }""",
            {"mesh": "ep=2", "preset": "expert-parallel"},
        ),
        ["localize-ops", "compact-experts"],
    ),
    # the ranks of four rows send those that were chosen to the ranks of three experts
    "exchanged-rows": (
        Example(
            """mixture (float[4,2] x, int64[1,4,1] i, float[4,1] r) => (float[4,2] y)
            <float z = {0}, int64[1] d = {0}, int64[3,1,1] n = {0, 1, 2},
             float[3,2,2] w1 = {1,2,3,4,5,6,7,8,9,1,2,3}>
            { c = Equal(i, n)  a = Where(c, x, z)  b = MatMul(a, w1)  k = Mul(b, r)
              e = Where(c, k, z)  y = ReduceSum<keepdims = 0>(e, d) }""",
            {"mesh": "ep=2", "preset": "expert-parallel", "topology": SLOW},
        ),
        ["insert-collectives", "compact-experts"],
    ),
    # two blocks: the second waits for the gradient that the first hands it
    "gates": (
        Example(
            """blocks (float[4,2] x, float[4,2] w) => (float y)
            { p = Mul(x, w)  q = Exp(p)  r = Exp(q)  s = Exp(r)  t = Exp(s)
              y = ReduceSumSquare<keepdims = 0>(t) }""",
            {"mesh": "dp=2", "preset": "data-parallel"},
            {"loss": "y", "optimizer": "none", "recompute": True},
        ),
        ["order-collectives", "gate-recomputation"],
    ),
    # one loop for each update, right behind its gradient; the product takes in its scale, and the
    # loop of q and s does not wait for the sum that t needs
    "elementwise": (
        Example(
            """layer (float[4,2] x, float[2,2] w, float[2] wb) => (float[4,2] y)
            <float c = {3}>
            { m = MatMul(x, w)  p = Mul(m, c)  h = Add(p, wb)
              q = Mul(h, x)  s = Neg(q)  t = Sub(s, x)  y = Exp(t) }""",
            {"mesh": "dp=2", "preset": "data-parallel"},
            {"loss": "mse", "optimizer": "momentum", "momentum": 0.5},
        ),
        ["gate-recomputation", "fuse-elementwise"],
    ),
    # columns, then rows, as the program of each rank; batches over dp
    "by-hand": (
        Example(
            """program (float[4,6] x, float[6,8] w1, float[8,6] w2) => (float[4,6] y)
            { h = MatMul(x, w1)  r = Relu(h)  p = MatMul(r, w2)
              y = onnxpar.AllReduce<axes = ["tp"]>(p) }""",
            {
                "mesh": "dp=2,tp=2",
                "preset": "manual",
                "strategy": {
                    "tensors": {
                        "x": ["dp", None],
                        "y": ["dp", None],
                        "w1": [None, "tp"],
                        "w2": ["tp", None],
                    }
                },
            },
        ),
        ["", "keep-collectives", "order-collectives"],
    ),
    # keys travel forward; keys and their gradients backward
    "ring": (
        Example(
            """<ir_version: 10, opset_import: ["" : 23]>
            layer (float[1,4,2] x, float[2,2] w) => (float[1,4,2] y)
            { h = MatMul(x, w)  y = Attention<q_num_heads = 1, kv_num_heads = 1>(h, h, h) }""",
            {"mesh": "cp=2", "preset": "ring-attention"},
            {"loss": "mse", "optimizer": "none"},
        ),
        ["fuse-attention", "localize-ops"],
    ),
    # 7 rows over 3 ranks: their shards, and the rows at which they start, differ
    "ranks": (
        Example(
            """lookup (int64[4] i) => (float[4,1] y)
            <float[7,1] t = {1, 2, 3, 4, 5, 6, 7}> { y = Gather(t, i) }""",
            {"mesh": "tp=3", "strategy": {"tensors": {"t": ["tp", None]}}},
        ),
        ["gate-recomputation", "split-ranks"],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=since(23)) if n == "ring" else n for n in PARTICULAR]
)
def test_golden_of_particular_passes(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    example, passes = PARTICULAR[name]
    texts = example.texts(tmp_path)
    shown = [f"// after {step or 'load'}\n{joined(texts[step])}" for step in passes]
    compare_golden(name, "\n".join(shown), request)


def test_every_pass_has_golden_text() -> None:
    text = "".join(file.read_text() for file in sorted(GOLDEN.glob("*.onnxtxt")))
    shown = set(re.findall(r"^// after (\S+)$", text, re.MULTILINE))
    assert {*OWN, SplitRanks.name} <= shown
