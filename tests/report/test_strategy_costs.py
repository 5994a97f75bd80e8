"""The strategies of a node with their costs: by formulas, and by plans that follow each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_models import HEAD, write_text

import onnxpar
import onnxpar.training
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main

MODELS = Path(__file__).parents[2] / "models"
MLP = """m (float[8,16] x, float[16,32] w1, float[32,16] w2) => (float[8,16] y)
{ h = MatMul(x, w1)  r = Relu(h)  y = MatMul(r, w2) }"""
LATENCY, LINK, FLOPS, MEMORY = 1e-3, 1e6, 1e6, 1e9
TOPOLOGY = {
    "levels": [{"name": "host", "latency": "1 ms", "bandwidth": "1 MB/s"}],
    "device": {"flops": "1 MFLOP/s", "memory_bandwidth": "1 GB/s", "launch": "0 s", "row": "0 s"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_text(HEAD + MLP, tmp_path / "m.onnx")


@pytest.fixture
def step(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "step.onnx"
    onnxpar.training.grad(model, path, loss="mse", optimizer="sgd")
    return path


def named(found: Any, node: str) -> Any:
    """The only node of this name."""
    (only,) = (each for each in found.nodes if each.node == node)
    return only


def test_a_product_costs_what_the_formulas_say(model: Path) -> None:
    """m k, k n -> m n over tp=2: 2mkn / shards operations, a ring's bytes, 4 bytes an element."""
    found = onnxpar.node_costs(
        model, "MatMul_h", mesh="tp=2", topology=TOPOLOGY, preset="data-parallel"
    )
    (node,) = found.nodes
    assert (node.op, node.rule) == ("MatMul", "m k, k n -> m n {sum: k}") and node.complete
    rows = {row.layouts: row for row in node.strategies}
    m, k, n = 8, 16, 32
    wanted = {
        "[-, -], [-, -] -> [-, -]": (1, 0, k * n, m * k + m * n),
        "[tp, -], [-, -] -> [tp, -]": (2, 0, k * n, (m * k + m * n) // 2),
        "[-, -], [-, tp] -> [-, tp]": (2, 0, k * n // 2, m * k + m * n // 2),
        "[-, tp], [tp, -] -> [-, -] sum(tp)": (2, 4 * m * n, k * n // 2, m * k // 2 + m * n),
    }
    assert rows.keys() == wanted.keys()
    for layouts, (shards, reduced, weights, activations) in wanted.items():
        cost = rows[layouts].cost
        assert cost.compute == pytest.approx(2 * m * k * n / shards / FLOPS, rel=1e-12)
        assert cost.inside.seconds == cost.gradients.seconds == 0
        assert cost.result.bytes == 2 * reduced // 2
        wait = LATENCY + reduced / LINK if reduced else 0
        assert cost.result.seconds == pytest.approx(wait, rel=1e-12)
        assert (cost.weights, cost.activations) == (4 * weights, 4 * activations)
    assert [row.cost.seconds for row in node.strategies] == sorted(
        row.cost.seconds for row in node.strategies
    )


@pytest.mark.parametrize("axes,count", [("dp=2,tp=2", 16), ("dp=2,sp=2,tp=2", 64), ("tp=4", 4)])
def test_each_axis_splits_each_dimension_or_none(model: Path, axes: str, count: int) -> None:
    found = onnxpar.node_costs(model, "w1", mesh=axes, preset="data-parallel")
    assert len(named(found, "MatMul_h").strategies) == count
    assert sum(row.chosen for row in found.nodes[0].strategies) == 1


@pytest.mark.slow
def test_a_plan_that_follows_a_strategy_communicates_what_the_row_says(step: Path) -> None:
    found = named(onnxpar.node_costs(step, "w1", mesh="dp=2,tp=2"), "MatMul_h")
    assert len(found.strategies) == 16
    seen = set()
    for row in found.strategies:
        entry = {
            "shard": {"MatMul_h": [yaml.safe_load(text) for text in row.inputs]},
            "tensors": {"h": yaml.safe_load(row.outputs[0].split(" sum")[0])},
        }
        alone: dict[str, Any] = {"mesh": "dp=2,tp=2", "fusion": "none", "search": "propagation"}
        plan = onnxpar.plan(step, strategy=entry, **alone)
        (weight,) = (p for p in plan.inputs if p.name == "w1")
        assert weight.layout is not None and weight.layout.text(plan.mesh) == row.inputs[1]
        sent = [c.bytes for c in plan.collectives if c.tensor.startswith("MatMul_h.grad/")]
        assert sum(sent) == row.cost.gradients.bytes
        assert sum(c.bytes for c in plan.collectives if c.tensor == "h") == row.cost.result.bytes
        again = named(onnxpar.node_costs(step, "MatMul_h", strategy=entry, **alone), "MatMul_h")
        assert [r.layouts for r in again.strategies if r.chosen] == [row.layouts]
        seen.add((row.cost.gradients.bytes, row.cost.result.bytes))
    assert len(seen) > 5


def test_nodes_of_the_backward_pass_have_no_gradients(step: Path) -> None:
    found = onnxpar.node_costs(step, "*", mesh="dp=2", preset="data-parallel")
    by_node = {n.node: {row.cost.gradients.bytes for row in n.strategies} for n in found.nodes}
    assert [name for name, sent in by_node.items() if sent != {0}] == ["MatMul_h", "MatMul_y"]


def test_passed_sums_and_communication_inside(tmp_path: Path) -> None:
    text = """m (float[8,16] x, float[16,32] w, float[8,32] b) => (float[8,32] y)
    { h = MatMul(x, w)  t = Add(h, b)  y = Softmax(t) }"""
    path = write_text(HEAD + text, tmp_path / "m.onnx")
    ask = {"shard": {"MatMul_h": {"k": "tp"}}}
    how: dict[str, Any] = {"mesh": "tp=2", "strategy": ask, "search": "propagation"}
    found = onnxpar.node_costs(path, "*", **how)
    softmax = {row.layouts: row.cost for row in named(found, "Softmax_y").strategies}
    assert softmax["[-, tp] -> [-, tp]"].inside.seconds > 0
    assert softmax["[-, tp] -> [-, tp]"].inside.bytes is None
    assert softmax["[tp, -] -> [tp, -]"].inside.seconds == 0
    add = named(found, "Add_t").strategies
    passed = [row for row in add if "sum(tp)" in row.outputs[0]]
    assert passed and all(row.cost.result.seconds == 0 for row in passed)
    assert sum(row.chosen for row in add) == 1


def test_text_and_json_are_those_of_the_call(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model.parent / "s.yaml"
    file.write_text("mesh: {tp: 2}\nshard: {w1: {n: tp}, w2: {k: tp}}")
    found = onnxpar.node_costs(model, "MatMul_*", strategy=file)
    args = ["plan", str(model), "--strategy", str(file)]
    assert main([*args, "--costs", "MatMul_*"]) == 0
    out = capsys.readouterr().out
    assert out == f"{found}\n"
    chosen = [line for line in out.splitlines() if line.startswith("*")]
    assert [line.split("B  ")[-1] for line in chosen] == [
        "[-, -], [-, tp] -> [-, tp]",
        "[-, tp], [tp, -] -> [-, -] sum(tp)",
    ]
    assert main([*args, "--costs", "MatMul_*", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(found.to_json()))
    rows = told["nodes"][0]["strategies"]
    assert {tuple(map(tuple, row["shards"])) for row in rows} == {
        ((1, 1), (1, 1)),
        ((2, 1), (1, 1)),
        ((1, 1), (1, 2)),
        ((1, 2), (2, 1)),
    }
    total = rows[0]["compute"] + rows[0]["communication"]["total"]
    assert rows[0]["total"] == pytest.approx(total)


@pytest.mark.slow
def test_open_sizes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    path = MODELS / "gpt2.dynamo.dynamic.onnx"
    args = ["plan", str(path), "--devices", "2", "--typical", "batch=4,seq=16"]
    assert main([*args, "--costs", "node_layer_norm"]) == 0
    out = capsys.readouterr().out
    assert "sizes are open: costs are for batch=4" in out and "LayerNormalization" in out
    assert sum(line.startswith("*") for line in out.splitlines()) == 1


def test_a_list_that_is_cut_short_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxpar.report import strategy_costs

    monkeypatch.setattr(strategy_costs, "MOST_STRATEGIES", 8)
    found = onnxpar.node_costs(model, "MatMul_h", mesh="dp=2,tp=2", preset="data-parallel")
    assert not found.nodes[0].complete and len(found.nodes[0].strategies) <= 8
    assert "too many to list all" in str(found)


def test_what_cannot_be_listed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StrategyError, match="--costs: 'nope' matches no node; there are"):
        onnxpar.node_costs(model, "nope", devices=2)
    with pytest.raises(StrategyError, match="split by hand"):
        onnxpar.node_costs(model, "*", devices=2, preset="manual")
    base = ["plan", str(model), "--devices", "2", "--costs", "*"]
    for more in (["--candidates"], ["--compare", "t.json"], ["--html", "x.html"], ["--dump", "d"]):
        assert main([*base, *more]) == 2
        error = capsys.readouterr().err
        assert "--costs" in error and "leave one of them out" in error
