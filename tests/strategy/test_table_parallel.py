"""Tables dealt out over ranks: each whole on one, with one all-to-all for all lookups and one for
their gradients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import TIMEOUT, check_agrees, check_outputs, options, run_unsplit
from committed import MODELS
from small_models import HEAD, write_text
from training.steps import CROSS_ENTROPY, ThreadTrainer, batches, plan_of, same, shard, states

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.report.compare_training import compare_training
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.table_parallel import deal
from onnxpar.trainer.checkpoint import Progress
from onnxpar.training import grad

DLRM = MODELS / "dlrm.legacy.training.onnx"
TABLE = r"(network\.)?tables\.\d\.weight"
ROWS = [211, 101, 53, 31, 13]
"""Rows of the tables of DLRM, each of 16 columns; a batch has 4 samples."""


def held(plan: Plan) -> dict[str, str]:
    """The text of the layout of each table."""
    ports = {p.name: p.layout.text(plan.mesh) for p in plan.inputs if p.layout is not None}
    found = {w.name: w.layout_text for w in plan.weights} | ports
    return {name: text for name, text in found.items() if re.fullmatch(TABLE, name)}


def at_sizes(model: Path, how: Options, par: Path, every: Sequence[Mapping[str, int]]) -> Plan:
    """An AssertionError where ranks compute something else than the unsplit model at some sizes."""
    plan = sharder.shard(model, par, how)
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for sizes in every:
            shapes = [
                tuple(sizes.get(d, d) if isinstance(d, str) else d for d in p.shape or ())
                for p in session.get_inputs()
            ]
            specs = [(p.name, p.dtype, s) for p, s in zip(plan.inputs, shapes, strict=True)]
            feeds = make_feeds(specs, plan.ranges)
            names = [p.name for p in plan.outputs]
            check_outputs(session.run(None, feeds), run_unsplit(model, feeds), names)
    return plan


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("dlrm.legacy.training.onnx", 2),
        ("dlrm.dynamo.static.onnx", 3),
        ("dlrm.legacy.static.onnx", 4),
        ("dlrm.dynamo.static.onnx", 8),
        ("dlrm.dynamo.dynamic.onnx", 3),
        ("dlrm.legacy.dynamic.onnx", 4),
    ],
)
def test_inference(model: str, ranks: int, tmp_path: Path) -> None:
    """Each rank sends sums over rows of its own tables once, also while the batch is open."""
    how = options(f"table-parallel {ranks}")
    if "dynamic" in model:
        plan = at_sizes(MODELS / model, how, tmp_path / "m.par", [{"batch": 5}, {"batch": 1}])
    else:
        plan = check_agrees(MODELS / model, tmp_path, how)
    assert [c.kind for c in plan.collectives] == ["AllToAll"]
    if "dynamic" not in model:
        sent = 5 * 4 * 16 * 4 * (ranks - 1) / ranks**2  # a mean over ranks of unequal shards
        assert sent <= plan.collectives[0].bytes <= 2 * sent


def test_balance(tmp_path: Path) -> None:
    plan, _ = sharder.plan(DLRM, options("table-parallel 3"))
    at = {name: text for name, text in held(plan).items()}
    assert {text for text in at.values()} == {"[-, dp@0]", "[-, dp@1]", "[-, dp@2]"}
    total = sum(ROWS) * 16 * 4
    others = sum(w.bytes for w in plan.weights) - total
    assert plan.memory["weights_per_rank"] == max(ROWS) * 16 * 4 + others
    for ranks in (2, 3, 4, 7):
        shares = [(rows, used) for rows in (900, 500, 500, 90, 9) for used in (1, 30, 8)]
        loads = np.zeros((ranks, 2))
        for share, rank in zip(shares, deal(shares, ranks), strict=True):
            loads[rank] += share
        most = np.maximum(loads.sum(0) / ranks, np.max(shares, 0))
        assert (loads.max(0) <= 1.5 * most).all(), loads


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "optimizer", "lazy"),
    [
        ("table-parallel 2", "sgd", False),
        ("table-parallel 2", "adam", True),
        ("table-parallel 3", "adam", False),
        ("table-parallel 3", "sgd", True),
        ("table-parallel 4", "adagrad", False),
        ("table-parallel 4", "adagrad", True),
    ],
)
def test_training(layout: str, optimizer: str, lazy: bool, tmp_path: Path) -> None:
    more = {"lazy": ["*.tables.*"]} if lazy else {}
    step = tmp_path / "step.onnx"
    grad(DLRM, step, loss="bce", optimizer=optimizer, **more)
    par, plan = shard(step, layout)
    kinds = [c.kind for c in plan.collectives]
    assert kinds.count("AllToAll") == 2 and {*kinds} == {"AllToAll", "AllReduce"}
    ranks = plan.mesh.size
    sent = [c.bytes for c in plan.collectives if c.kind == "AllToAll"]
    assert max(sent) <= 2 * 5 * 4 * 16 * 4 * (ranks - 1) / ranks**2
    assert all("@" in text for text in held(plan).values())
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, list(batches(plan, 3)), 0.05)
    assert report.ok, report.text()


@pytest.mark.slow
def test_accumulation(tmp_path: Path) -> None:
    """Rows travel in each iteration, and never whole gradients of tables."""
    step = tmp_path / "step.onnx"
    grad(DLRM, step, loss="bce", optimizer="adam", accumulate=2)
    par, plan = shard(step, "table-parallel 3")
    tables = 2 * sum(ROWS) * 16 * 4 * 2 / 3  # bytes that a rank sends to all-reduce their gradients
    network = sum(c.bytes for c in plan_of(step, "data-parallel 3").collectives) - tables
    assert sum(c.bytes for c in plan.collectives) < network + 0.2 * tables
    assert all("@" in text for text in held(plan).values())
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, list(batches(plan, 2)), 0.05)
    assert report.ok, report.text()


@pytest.mark.slow
def test_more_ranks_than_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "step.onnx"
    grad(DLRM, step, loss="bce", optimizer="adagrad", clip_norm=0.1)
    assert main(["plan", str(step), "--devices", "7", "--preset", "table-parallel"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "dp@" in line[:4]]
    assert [(row[0], row[1]) for row in rows[5:]] == [("dp@5", "0"), ("dp@6", "0")]
    par, plan = shard(step, "table-parallel 7")
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, list(batches(plan, 2)), 0.05)
    assert report.ok, report.text()


def test_two_axes(tmp_path: Path) -> None:
    """A table is at one coordinate of each."""
    plan = check_agrees(DLRM, tmp_path, options("table-parallel dp=2,tp=2"))
    assert {*held(plan).values()} == {f"[-, dp@{i}.tp@{j}]" for i in (0, 1) for j in (0, 1)}


@pytest.mark.slow
def test_resuming_over_other_ranks(tmp_path: Path) -> None:
    """States have the names and shapes of the tables, so any mesh reads them."""
    step = tmp_path / "step.onnx"
    grad(DLRM, step, loss="bce", optimizer="adagrad")
    par, plan = shard(step, "table-parallel 3")
    feeds = list(batches(plan, 4))
    with ThreadTrainer(par) as trainer:
        for batch in feeds[:2]:
            trainer.step(batch, 0.05)
        trainer.save(tmp_path, Progress(2))
        for batch in feeds[2:]:
            trainer.step(batch, 0.05)
        expected = states(trainer)
    with ThreadTrainer(par) as trainer:
        trainer.load(tmp_path / Progress(2).name)
        for batch in feeds[2:]:
            trainer.step(batch, 0.05)
        same(states(trainer), expected)
    other, _ = shard(step, "data-parallel 2")
    with ThreadTrainer(other) as trainer:
        trainer.load(tmp_path / Progress(2).name)
        for batch in feeds[2:]:
            trainer.step(batch, 0.05)
        for name, value in states(trainer).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


WIDTHS = """widths (float[6,4] x, int64[6,3] ids, int64[6,2] few, float[6,2] scale, float[6] one,
    float[30,8] w1, float[20,4] w2, float[9,1] w3, float[4,8] w4, float[13,5] w5)
=> (float[6,5] y)
{ axis = Constant<value_ints=[1]>()  last = Constant<value_ints=[2]>()
  column = Constant<value_ints=[0]>()  end = Constant<value_ints=[1]>()
  first = Slice(ids, column, end, axis)  cast = Cast<to=6>(first)
  a = Gather(w1, ids)  s = ReduceMean<keepdims=0>(a, axis)
  b = Gather(w2, few)  f = Unsqueeze(scale, last)  fb = Mul(b, f)
  t = ReduceSum<keepdims=0>(fb, axis)
  c = Gather(w3, cast)  u = Squeeze(c, last)
  h = MatMul(x, w4)  g = Add(h, s)  all = Concat<axis=1>(g, t, u)  y = MatMul(all, w5) }"""
"""Tables of other widths (one of a single column, which stays whole), other numbers of rows per
sample, weighted rows, and ids from which another table's are cut."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_other_lookups(ranks: int, tmp_path: Path) -> None:
    path = write_text(HEAD + WIDTHS, tmp_path / "m.onnx")
    plan = check_agrees(path, tmp_path, options(f"table-parallel {ranks}"))
    at = {w.name: w.layout_text for w in plan.weights}
    assert at["w1"] == "[-, dp@0]" and at["w2"] == "[-, dp@1]" and at["w3"] == "[-, -]"
    assert [c.kind for c in plan.collectives] == ["AllToAll"]  # of 8 and of 4 columns together
    assert sum(c.bytes for c in plan.collectives) < 6 * 12 * 4
    step = tmp_path / "step.onnx"
    grad(path, step, loss=CROSS_ENTROPY, optimizer="adam", weight_decay=0.01)
    par, plan = shard(step, f"table-parallel {ranks}")
    few = [{n: v % 9 if n == "ids" else v for n, v in each.items()} for each in batches(plan, 2)]
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, few, 0.05)
    assert report.ok, report.text()


TIED = """tied (int64[4,3] ids, float[30,8] w, float[3,8] w2, int64[3] positions)
=> (float[4,3,30] y)
{ a = Gather(w, ids)  p = Gather(w2, positions)  h = Add(a, p)
  y = Einsum<equation="bsd,vd->bsv">(h, w) }"""
"""A table that is also a matrix, and one with the same ids for all samples."""


def test_without_tables(tmp_path: Path) -> None:
    tied = write_text(HEAD + TIED, tmp_path / "m.onnx")
    for model in (tied, MODELS / "resnet.legacy.static.onnx"):
        with pytest.raises(StrategyError, match="table-parallel: the model has no table whose"):
            onnxpar.plan(model, devices=2, preset="table-parallel")


STRATEGY: dict[str, Any] = {
    "mesh": {"dp": 2, "tp": 3},
    "tensors": {"x": ["dp", None], "w1": [None, "tp@1"], "h": ["tp@2.dp", None]},
}


def test_a_strategy_names_a_coordinate(tmp_path: Path) -> None:
    text = """mlp (float[5,6] x, float[6,9] w1, float[9,6] w2) => (float[5,6] y)
    { h = MatMul(x, w1)  r = Relu(h)  y = MatMul(r, w2) }"""
    path = write_text(HEAD + text, tmp_path / "m.onnx")
    how = options("dp=2,tp=3", strategy=STRATEGY)
    plan = check_agrees(path, tmp_path, how)
    assert next(w.layout_text for w in plan.weights if w.name == "w1") == "[-, tp@1]"
    saved = tmp_path / "saved.yaml"
    onnxpar.plan(path, strategy=STRATEGY, save_strategy=saved)
    assert "tp@1" in saved.read_text() and "tp@2.dp" in saved.read_text()
    again = onnxpar.plan(path, strategy=saved)
    assert [w.layout_text for w in again.weights] == [w.layout_text for w in plan.weights]
    wrong = {**STRATEGY, "tensors": {"w1": [None, "tp@3"]}}
    with pytest.raises(StrategyError, match="'tp@3' is not a coordinate of tp, which has 3"):
        onnxpar.plan(path, strategy=wrong)


@pytest.mark.parametrize("at", ["tp@1", "tp:(1)2@0.tp:(2)2@1", "dp.tp@3"])
def test_an_open_batch_at_a_coordinate(at: str, tmp_path: Path) -> None:
    """Nodes compute sizes of shards in each run."""
    text = """mlp (float[N,6] x, float[6,8] w1) => (float[N,8] y)
    { h = MatMul(x, w1)  y = Relu(h) }"""
    path = write_text(HEAD + text, tmp_path / "m.onnx")
    how = options("dp=2,tp=4", strategy={"tensors": {"x": [at, None]}})
    at_sizes(path, how, tmp_path / "m.par", [{"N": 3}, {"N": 8}, {"N": 1}])


def test_annotations_keep_coordinates(tmp_path: Path) -> None:
    """ONNX's own annotations cannot tell them, so they are in the metadata."""
    annotated = tmp_path / "annotated.onnx"
    plan = onnxpar.annotate(DLRM, annotated, devices=3, preset="table-parallel")
    again = onnxpar.plan(annotated)
    assert held(again) == held(plan) and "dp@2" in str(held(again))
    onnx.checker.check_model(onnx.load(annotated))


@pytest.mark.slow
def test_the_search_deals_tables(tmp_path: Path) -> None:
    """Eight tables, of which a step updates few rows, before products that need the whole batch:
    columns of tables would take an all-to-all for each."""
    names = [f"t{i}" for i in range(8)]
    ids = ", ".join(f"int64[512,4] {n}" for n in names)
    weights = ", ".join(f"float[20000,16] w{n}" for n in names)
    lookups = "  ".join(
        f"g{n} = Gather(w{n}, {n})  s{n} = ReduceSum<keepdims=0>(g{n}, axis)" for n in names
    )
    text = f"""recommender (float[512,4] x, {ids}, {weights}, float[4,16] wb, float[144,256] w1,
    float[256,256] w2, float[256,1] w3) => (float[512,1] y)
    {{ axis = Constant<value_ints=[1]>()  b = MatMul(x, wb)  {lookups}
    all = Concat<axis=1>(b, {", ".join(f"s{n}" for n in names)})  h = MatMul(all, w1)  r = Relu(h)
    i = MatMul(r, w2)  q = Relu(i)  y = MatMul(q, w3) }}"""
    path = write_text(HEAD + text, tmp_path / "m.onnx")
    step = tmp_path / "step.onnx"
    grad(path, step, loss="mse", optimizer="adagrad", lazy=["wt*"])
    found = onnxpar.plan(step, mesh="dp=4")
    layouts = [
        p.layout.text(found.mesh) for p in found.inputs if p.name.startswith("wt") and p.layout
    ]
    assert {*layouts} == {f"[-, dp@{i}]" for i in range(4)}
    assert found.predicted is not None and found.proof is not None
    gap = found.proof.seconds - found.proof.bound  # what the search says it may be from the best
    for preset in ("table-parallel", "data-parallel", "tensor-parallel"):
        other = plan_of(step, f"{preset} 4").predicted
        assert other is not None and found.predicted.total <= other.total + gap
