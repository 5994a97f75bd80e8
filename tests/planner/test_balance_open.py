"""Unequal devices share open sizes in proportion to their speed, at all sizes of one session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import TIMEOUT, check_outputs, run_unsplit
from committed import MODELS, dims_of
from graph.test_open_sizes import feeds_at
from planner.unequal import options, topology
from small_models import HEAD, write_text

from onnxpar.compiler.plan import Plan
from onnxpar.layout.shares import Proportion
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.report.compare_trace import PlannedNodes
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

SIZES = [
    {"batch": batch, "seq": seq}
    for batch, seq in [(4, 12), (5, 7), (1, 5), (2, 3), (3, 1), (9, 11)]
]


def agree(model: Path, par: Path, plan: Plan, sizes: Iterable[Mapping[str, int]]) -> None:
    """Asserts that one session gives the results of the unsplit model at all these sizes."""
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for each in sizes:
            feeds = feeds_at(plan, each)
            wanted = run_unsplit(model, feeds)
            check_outputs(session.run(None, feeds), wanted, [p.name for p in plan.outputs])


def kinds(plan: Plan) -> Counter[str]:
    return Counter(entry.kind for entry in plan.collectives)


def layout_texts(plan: Plan) -> dict[str, str]:
    ports = [*plan.inputs, *plan.outputs]
    return {p.name: p.layout.text(plan.mesh) for p in ports if p.layout is not None}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "mesh", "preset", "speeds", "wanted"),
    [
        ("gpt2", "dp=2", "data-parallel", (3, 1), {"logits": "[dp{3:1}, -, -]"}),
        ("bert", "dp=5", "data-parallel", (5, 1, 2, 3, 2), {"logits": "[dp{5:1:2:3:2}, -]"}),
        ("gpt2", "tp=2", "tensor-parallel", (3, 1), {"logits": "[-, -, tp{384,128}]"}),
        ("llama", "tp=3", None, (3, 1, 2), {"logits": "[-, tp{3:1:2}, -]"}),
        ("gpt2", "cp=3", "context-parallel", (3, 1, 2), {"logits": "[-, cp{3:1:2}, -]"}),
        ("llama", "dp=2,tp=2", "hybrid", (1, 5, 2, 2), {"input_ids": "[dp{3:2}, -]"}),
        ("llama_decode", "dp=3", "data-parallel", (3, 1, 2), {}),
        ("resnet", "dp=2,tp=2", "hybrid", (6, 2, 3, 1), {"pixel_values": "[dp{2:1}, tp, -, -]"}),
    ],
)
def test_models_agree_with_the_unsplit_one(
    name: str,
    mesh: str,
    preset: str | None,
    speeds: tuple[float, ...],
    wanted: dict[str, str],
    tmp_path: Path,
) -> None:
    model, par = MODELS / f"{name}.dynamo.dynamic.onnx", tmp_path / "m.par"
    plan = sharder.shard(model, par, options(mesh, preset, topology(*speeds)))
    assert layout_texts(plan).items() >= wanted.items()
    assert not any("--balance" in note for note in plan.notes)
    agree(model, par, plan, [dims_of(model.name, {**each, "past": 3}) for each in SIZES])


def requested(layouts: str, mesh: str, speeds: tuple[float, ...]) -> Options:
    """Options for tensors with these layouts: `x tp,- y -,tp`."""
    words = layouts.split()
    tensors = dict(zip(words[::2], [w.split(",") for w in words[1::2]], strict=True))
    how = options(mesh, None, topology(*speeds))
    return replace(how, search=None, strategy=Strategy.of({"tensors": tensors}))


TWO = [
    {"n": n, "m": m} for n, m in [(7, 5), (1, 2), (4, 4), (16, 3), (2, 1), (0, 3), (3, 0), (33, 18)]
]
PAIR = "m (float[n,m] x) => (float[n,m] y) { a = Relu(x)  y = Neg(a) }"
PRODUCT = "m (float[n,k] x, float[k,m] z) => (float[n,m] y) { a = MatMul(x, z)  y = Neg(a) }"
SOFTMAX = "m (float[n,m] x) => (float[n,m] y) { y = Softmax<axis=0>(x) }"
MERGED = """m (float[n,m,4] x) => (float[q,4] y) <int64[2] s = {-1,4}>
{ a = Relu(x)  y = Reshape(a, s) }"""
RUNS = """m (float[n,8] x) => (float[n,3] v, int64[n,3] i, float[n,8] c)
<int64[1] k = {3}, int64 z = {0}> { v, i = TopK(x, k)  c = CumSum(x, z) }"""
STRIDES = """m (float[1,2,n,m] x, float[3,2,3,3] w) => (float[1,3,p,q] y)
{ a = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w)  y = Relu(a) }"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "mesh", "speeds", "layouts", "wanted"),
    [
        (PAIR, "tp=3", (3, 1, 2), "x tp,- y -,tp", {"AllToAll": 1}),
        (PAIR, "a=2,b=2", (6, 2, 3, 1), "x a,b y a.b,-", {"AllToAll": 1}),
        (PAIR, "a=2,b=2", (6, 2, 3, 1), "x a.b,- y a,b", {"AllToAll": 1}),
        # the shards over a.b are those over b.a if the devices at 1 and 2 are equal
        (PAIR, "a=2,b=2", (3, 1, 1, 3), "x a.b,- y b.a,-", {"CollectivePermute": 1}),
        (PAIR, "a=2,b=2", (6, 2, 3, 1), "x a.b,- y b.a,-", {"AllGather": 1}),
        (PAIR, "tp=5", (5, 1, 2, 3, 2), "x tp,- y -,-", {"AllGather": 1}),
        (PRODUCT, "tp=3", (3, 1, 2), "x -,tp z tp,- y tp,-", {"ReduceScatter": 1}),
        (PRODUCT, "a=2,b=2", (6, 2, 3, 1), "x a,b z b,- y a,b", {"ReduceScatter": 1}),
        (SOFTMAX, "tp=3", (3, 1, 2), "x tp,- y tp,-", {"AllReduce": 2}),
        (MERGED, "tp=3", (3, 1, 2), "x tp,-,-", {}),
        (MERGED, "tp=2", (3, 1), "x -,tp,-", {}),
        (RUNS, "tp=3", (3, 1, 2), "x tp,-", {"AllGather": 1}),
        (STRIDES, "tp=3", (3, 1, 2), "x -,-,tp,- y -,-,tp,-", {"HaloExchange": 1}),
    ],
)
def test_collectives_and_ops(
    text: str,
    mesh: str,
    speeds: tuple[float, ...],
    layouts: str,
    wanted: dict[str, int],
    tmp_path: Path,
) -> None:
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    plan = sharder.shard(model, tmp_path / "m.par", requested(layouts, mesh, speeds))
    assert kinds(plan) == wanted
    assert ":" in layout_texts(plan)["x"]
    sizes = [{**each, "k": 2 * each["m"] + 1} for each in TWO]
    if text in (SOFTMAX, STRIDES):
        sizes = [each for each in sizes if each["n"] and each["m"]]
    agree(model, tmp_path / "m.par", plan, sizes)


def cuts(par: Path, rank: int = 0) -> list[onnx.NodeProto]:
    """The collectives of a rank that take the sizes of shards as an operand."""
    nodes = onnx.load(par / f"rank_{rank:04d}.onnx").graph.node
    return [n for n in nodes if n.op_type in ("ReduceScatter", "AllToAll") and len(n.input) == 3]


def test_only_unequal_shards_need_an_operand(tmp_path: Path) -> None:
    model = write_text(HEAD + PAIR, tmp_path / "m.onnx")
    how = requested("x tp,- y -,tp", "tp=3", (3, 1, 2))
    for balance in (False, True):
        par = tmp_path / f"{balance}.par"
        sharder.shard(model, par, replace(how, balance=balance))
        assert [len(cuts(par, rank)) for rank in range(3)] == [balance] * 3


def test_each_rank_holds_and_sends_its_proportion(tmp_path: Path) -> None:
    """The ports of plan.json are formulas. In the all-to-all, rank 0 has the largest shard: 6 of 12
    rows, of which it keeps a third."""
    model = write_text(HEAD + PAIR, tmp_path / "m.onnx")
    how = requested("x tp,- y -,tp", "tp=3", (3, 1, 2))
    runs = PlannedNodes([({"n": 12, "m": 6}, 1.0)])
    plan = sharder.shard(model, tmp_path / "m.par", how, observer=runs)
    (sent,) = plan.sent_at_runs.values()
    assert sent == 6 * 6 * 4 * 2 // 3
    port = Bundle.load(tmp_path / "m.par").inputs["x"]
    for n in (0, 1, 2, 3, 7, 12, 1000):
        layout = port.layout_at({"n": n, "m": 6})
        assert layout is not None
        held = [layout.local_shape(plan.mesh, rank) for rank in range(3)]
        assert held == [(size, 6) for size in Proportion((3, 1, 2)).sizes(n)]


STEP = """step (float[n,6] x, float[n,5] t, float[6,5] p) => (float l, float[6,5] p_next)
<float rate = {0.1}, int64 first = {0}>
{
  y = MatMul(x, p)  e = Sub(y, t)  s = Mul(e, e)  l = ReduceMean<keepdims=0>(s)
  xt = Transpose<perm=[1,0]>(x)  g = MatMul(xt, e)
  shape = Shape(x)  count = Gather(shape, first)  n = Cast<to=1>(count)  r = Div(rate, n)
  d = Mul(g, r)  p_next = Sub(p, d)
}"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "speeds", "parameter"),
    [
        ("dp=2", (3, 1), "-,-"),
        ("dp=3", (3, 1, 2), "dp,-"),
        ("dp=5", (5, 1, 2, 3, 2), "-,dp"),
    ],
)
def test_a_training_step_with_an_open_batch(
    mesh: str, speeds: tuple[float, ...], parameter: str, tmp_path: Path
) -> None:
    """Batches of several sizes in one session, the last of which is smaller than the mesh."""
    model = write_text(HEAD + STEP, tmp_path / "m.onnx", "!")
    how = requested(f"x dp,- t dp,- p {parameter}", mesh, speeds)
    plan = sharder.shard(model, tmp_path / "m.par", replace(how, states=[("p", "p_next")]))
    assert ":" in layout_texts(plan)["x"]
    source = np.random.default_rng(0)
    weights = source.standard_normal((6, 5), np.float32)
    with ThreadSession(tmp_path / "m.par", timeout=TIMEOUT) as session:
        first: dict[str, Any] = {"p": weights}
        for count in (8, 7, 3, 11, 2, 1):
            x, t = (source.standard_normal((count, k), np.float32) for k in (6, 5))
            loss, weights = run_unsplit(model, {"x": x, "t": t, "p": weights})
            (found,) = session.run(["l"], {"x": x, "t": t, **first}, keep_states=True)
            np.testing.assert_allclose(found, loss, rtol=1e-5)
            first = {}
        np.testing.assert_allclose(session.states.read("p"), weights, rtol=1e-5, atol=1e-6)
