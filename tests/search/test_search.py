"""What the search chooses computes what the unsplit model does, and takes what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from agreement import check_agrees
from bench import llama_shape
from committed import MODELS, STATIC

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.passes.decide.propagate_layouts import PropagateLayouts
from onnxpar.passes.lower.insert_collectives import InsertCollectives
from onnxpar.planner import sharder
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.planner.run_passes import run_passes
from onnxpar.search.objective import Objective
from onnxpar.search.patience import Patience
from onnxpar.search.predict import predict
from onnxpar.search.search import solve

CHEAP = Topology.of(
    {
        "levels": [{"name": "host", "size": 16, "latency": 1e-7, "bandwidth": 1e10}],
        "device": {"flops": 1e9, "memory_bandwidth": 1e9, "launch": 1e-8},
    }
)
"""Talking costs so little that small models are worth splitting in every way."""


def searched(mesh: str, topology: Topology | None = CHEAP) -> Options:
    return Options(mesh=Mesh.parse(mesh), search="auto", topology=topology, check_layouts=True)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("model", STATIC)
def test_static(model: str, mesh: str, tmp_path: Path) -> None:
    check_agrees(MODELS / model, tmp_path, searched(mesh))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("model", STATIC)
def test_the_compiler_makes_what_is_predicted(model: str, mesh: str) -> None:
    how = searched(mesh)
    loaded = load_model(MODELS / model, how)
    ctx = make_context(loaded, how)
    found = solve(loaded.graph, ctx.sharding, loaded.states)
    ctx.annotations = [found.annotations]
    run_passes(loaded, ctx, [PropagateLayouts(), InsertCollectives()])
    produced = predict(loaded.graph, ctx.sharding).total
    assert produced == pytest.approx(found.seconds, rel=0.01)


NEAR = {
    "levels": [{"name": "host", "latency": 5e-6, "bandwidth": 2e9}],
    "device": {"flops": 2e10, "memory_bandwidth": 1e10, "launch": 1e-6},
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_megatrons_two_all_reduces_in_a_layer(ranks: int, tmp_path: Path) -> None:
    """Nobody names them: of one token, reading the weights is what takes the time."""
    model = tmp_path / "decode.onnx"
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 512}
    llama_shape.write(model, layers=3, batch=1, seq=1, **sizes)
    produced = onnxpar.plan(model, devices=ranks, search="auto", topology=NEAR)
    in_layers = [c for c in produced.collectives if c.tensor.startswith("MatMul")]
    assert [c.kind for c in in_layers] == ["AllReduce"] * 6
    split = [w for w in produced.weights if w.bytes > 1 << 16 and w.bytes_per_rank < w.bytes]
    assert len(split) == 3 * 7 + 1  # and the head


def test_a_large_batch_is_split(tmp_path: Path) -> None:
    model = tmp_path / "batch.onnx"
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 64}
    llama_shape.write(model, layers=3, batch=64, seq=8, **sizes)
    produced = onnxpar.plan(model, devices=8, search="auto", topology=NEAR)
    layout = produced.inputs[0].layout
    assert not produced.collectives and layout is not None
    assert layout.local_shape(produced.mesh, 0) == (8, 8)


def test_what_is_asked_for_is_kept(tmp_path: Path) -> None:
    model = tmp_path / "batch.onnx"
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 64}
    llama_shape.write(model, layers=3, batch=64, seq=8, **sizes)
    nodes = [n.name for n in onnx.load(model, load_external_data=False).graph.node]
    product = next(name for name in nodes if name.startswith("MatMul"))
    requested = {"shard": {product: [[None, None, None], [None, "tp"]]}}
    produced = onnxpar.plan(model, mesh="tp=2", search="auto", topology=NEAR, strategy=requested)
    assert {w.name: w.layout_text for w in produced.weights}["q.0"] == "[-, tp]"
    free = onnxpar.plan(model, mesh="tp=2", search="auto", topology=NEAR)
    assert {w.name: w.layout_text for w in free.weights}["q.0"] == "[-, -]"


@pytest.mark.slow
@pytest.mark.parametrize("past", [1, 7])
def test_caches_that_grow(past: int, tmp_path: Path) -> None:
    """Also from one element, which has no leaf that could be split."""
    how = replace(searched("dp=2,tp=2"), dims={"batch": 4, "past": past})
    check_agrees(MODELS / "llama_decode.dynamo.dynamic.onnx", tmp_path, how)


def test_a_cache_whose_layout_is_asked_for() -> None:
    requested = {"tensors": {"past_key_0": [None, "tp", None, None]}}
    model = MODELS / "llama_decode.dynamo.static.onnx"
    produced = onnxpar.plan(
        model, mesh="tp=2", search="auto", strategy=requested, check_layouts=True
    )
    layouts = {p.name: p.layout.text(produced.mesh) for p in produced.inputs if p.layout}
    assert layouts["past_key_0"] == "[-, tp, -, -]"


@pytest.mark.slow
def test_small_models_are_not_worth_talking() -> None:
    """By default a collective takes as long as ten of these nodes."""
    for model in ("gpt2.dynamo.static.onnx", "dlrm.dynamo.static.onnx"):
        produced, _ = sharder.plan(MODELS / model, Options(devices=4, search="auto"))
        assert produced.mesh.size == 4 and not produced.collectives


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(devices=2, search="auto", preset="hybrid"), "--search auto and --preset hybrid"),
        (Options(devices=2, search="best"), "--search 'best': give one of auto, data-parallel"),
        (Options(devices=2, search="exhaustive"), "--search exhaustive: .* combinations of"),
        (Options(search="auto"), "how many ranks"),
    ],
)
def test_what_cannot_be_searched(options: Options, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        sharder.plan(MODELS / "gpt2.dynamo.static.onnx", options)


def test_each_stage_is_told() -> None:
    """So that a terminal is not silent; the line goes at the end."""
    told: list[str] = []
    options = Options(devices=4, objective=Objective(patience=Patience(tell=told.append)))
    sharder.plan(MODELS / "dlrm.dynamo.dynamic.onnx", options)
    stages = ["reading the model", "analysing the model", "mesh dp=2,tp=2", "mesh tp=4"]
    assert told == [*stages, "repeating the plan at other sizes", ""]
