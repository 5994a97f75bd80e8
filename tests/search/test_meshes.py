"""Which meshes the search tries, what their axes are called, and what is asked for without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from committed import MODELS
from onnx import TensorProto, helper, numpy_helper
from search.recording import Recording

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.search.meshes import requested_axes
from onnxpar.strategy.strategy import Strategy

FAST = {"flops": 1e9, "memory_bandwidth": 1e9, "launch": 1e-8}
ONE = {"levels": [{"name": "host", "latency": 1e-7, "bandwidth": 1e10}], "device": FAST}
"""Talking costs so little that small models are worth splitting in every way."""
TWO = {
    "levels": [
        {"name": "host", "size": 2, "latency": 1e-7, "bandwidth": 1e10},
        {"name": "rack", "latency": 1e-6, "bandwidth": 1e9},
    ],
    "device": FAST,
}
"""Between hosts of two ranks it costs ten times as much."""


def computing_much(topology: Mapping[str, Any]) -> dict[str, Any]:
    """The same with slow ranks, so that everything is split as far as it can be."""
    return {**topology, "device": {**FAST, "flops": 1e6}}


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    ports: Mapping[str, tuple[Sequence[int], int]],
    weights: Mapping[str, Sequence[int]],
) -> Path:
    """A model whose last port is its output."""
    produced = [helper.make_tensor_value_info(n, kind, shape) for n, (shape, kind) in ports.items()]
    stored = [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in weights.items()]
    graph = helper.make_graph(list(nodes), "g", produced[:-1], produced[-1:], stored)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def matmuls(folder: Path, rows: int, wide: int = 256) -> Path:
    """Rows by two matrices."""
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], "up"),
        helper.make_node("MatMul", ["h", "down"], ["y"], "down"),
    ]
    ports = {"x": ([rows, 64], TensorProto.FLOAT), "y": ([rows, 64], TensorProto.FLOAT)}
    return write(folder / "m.onnx", nodes, ports, {"up": [64, wide], "down": [wide, 64]})


def test_both_orders_of_axes_are_tried_where_ranks_differ(tmp_path: Path) -> None:
    path = matmuls(tmp_path, 4)
    shares = replace(Topology.of(ONE), shares=(0.2, *[0.8 / 7] * 7))
    one, two = Recording(path, 8, Topology.of(ONE)), Recording(path, 8, Topology.of(TWO))
    for tried in (one, two):
        best = tried.best()
        assert best.seconds == min(tried.found.values())
    assert (4, 2) not in one.found
    assert set(two.found) >= {(2, 4), (4, 2)}
    assert two.found[2, 4] != two.found[4, 2]
    unequal = Recording(path, 8, shares)
    unequal.best()
    assert set(unequal.found) >= {(2, 4), (4, 2)}
    inside = Recording(path, 2, Topology.of(TWO))
    inside.best()
    assert set(inside.found) == {(2,)}


def test_what_talks_most_stays_inside(tmp_path: Path) -> None:
    """The batch needs no collective, what is added up over tp does."""
    produced = onnxpar.plan(matmuls(tmp_path, 4), devices=8, topology=computing_much(TWO))
    assert produced.mesh.shape[-1] == ("tp", 2)
    assert {c.group for c in produced.collectives} == {(0, 1)}


@pytest.mark.slow
def test_axes_are_called_what_they_split(tmp_path: Path) -> None:
    tall = onnxpar.plan(matmuls(tmp_path, 512), devices=4, search="auto", topology=ONE)
    assert str(tall.mesh) == "dp=4"
    wide = onnxpar.plan(matmuls(tmp_path, 1), devices=4, search="auto", topology=ONE)
    assert str(wide.mesh) == "tp=4"
    both = onnxpar.plan(matmuls(tmp_path, 2), devices=8, topology=computing_much(ONE))
    assert str(both.mesh) == "dp=2,tp=4"
    text = onnxpar.plan(MODELS / "gpt2.dynamo.static.onnx", devices=8, search="auto")
    assert str(text.mesh) == "dp=4,sp=2"


def test_experts_have_an_axis(tmp_path: Path) -> None:
    """8 experts, each with 2 places of a batch of one."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "experts")]
    ports = {"x": ([1, 8, 2, 64], TensorProto.FLOAT), "y": ([1, 8, 2, 64], TensorProto.FLOAT)}
    path = write(tmp_path / "m.onnx", nodes, ports, {"w": [8, 64, 64]})
    produced = onnxpar.plan(path, devices=4, search="auto", topology=ONE)
    assert str(produced.mesh) == "ep=4"
    assert produced.weights[0].layout_text == "[ep, -, -]"


def test_channels_are_no_experts(tmp_path: Path) -> None:
    """Each has a filter of its own."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "depthwise", group=64, pads=[1, 1, 1, 1])]
    ports = {"x": ([1, 64, 2, 2], TensorProto.FLOAT), "y": ([1, 64, 2, 2], TensorProto.FLOAT)}
    path = write(tmp_path / "m.onnx", nodes, ports, {"w": [64, 1, 3, 3]})
    produced = onnxpar.plan(path, devices=4, search="auto", topology=ONE)
    assert str(produced.mesh) == "tp=4"
    assert produced.weights[0].layout_text == "[tp, -, -, -]"
    with pytest.raises(StrategyError, match="no weight with a matrix for each expert"):
        onnxpar.plan(path, devices=4, preset="expert-parallel")


@pytest.mark.slow
def test_a_third_axis_where_two_do_not_reach() -> None:
    """4 samples of 16 places: of 16 ranks for a sample, some split the width instead."""
    text = Recording(MODELS / "bert_encoder.dynamo.static.onnx", 64, Topology.default())
    best = text.best()
    assert len(best.mesh.shape) == 3 and set(best.mesh.sizes) == {"dp", "sp", "tp"}
    assert best.seconds < 0.99 * min(text.found.values())


@pytest.mark.slow
def test_a_third_axis_where_two_are_as_fast_as_one() -> None:
    text = Recording(MODELS / "bert.legacy.static.onnx", 64, Topology.default())
    best = text.best()
    assert text.found[64,] == pytest.approx(min(text.found.values()))
    assert len(best.mesh.shape) == 3
    assert best.seconds < 0.95 * min(text.found.values())


def test_axes_of_a_strategy_without_a_mesh(tmp_path: Path) -> None:
    path = matmuls(tmp_path, 8)
    requested = {"shard": {"up": [["rows", None], [None, "columns"]]}}
    produced = onnxpar.plan(
        path, devices=8, search="auto", topology=ONE, strategy=requested, check_layouts=True
    )
    assert set(produced.mesh.sizes) == {"rows", "columns"} and produced.mesh.size == 8
    layouts = {p.name: p.layout.text(produced.mesh) for p in produced.inputs if p.layout}
    assert layouts["x"] == "[rows, -]"
    one = {"shard": {"up": [None, [None, "columns"]]}}
    produced = onnxpar.plan(
        path, devices=8, search="auto", topology=ONE, strategy=one, check_layouts=True
    )
    assert "columns" in produced.mesh.sizes
    assert {w.name: w.layout_text for w in produced.weights}["up"] == "[-, columns]"


def test_a_mesh_is_chosen_on_which_the_strategy_works(tmp_path: Path) -> None:
    """4 rows are too few for an axis of 8."""
    requested = {"shard": {"up": [["rows", None], None]}}
    produced = onnxpar.plan(
        matmuls(tmp_path, 4), devices=8, search="auto", topology=ONE, strategy=requested
    )
    assert produced.mesh.sizes["rows"] in (2, 4)


@pytest.mark.slow
def test_a_mesh_on_which_a_node_has_no_split_is_passed_over() -> None:
    """The columns of a product can be split over 2 ranks as the strategy asks, but not over 8."""
    path = MODELS / "llama.legacy.static.onnx"
    requested = {"shard": {"*/q_proj/*": [None, [None, "heads"]]}}
    assert onnxpar.plan(path, devices=8, search="auto", strategy=requested).mesh.sizes["heads"] == 2
    with pytest.raises(StrategyError, match=r"q_proj/MatMul' cannot be split over heads=8"):
        onnxpar.plan(path, mesh="heads=8", search="auto", strategy=requested)


def test_strategies_that_no_mesh_meets(tmp_path: Path) -> None:
    path = matmuls(tmp_path, 4)
    three = {"shard": {"up": [["a", "b"], ["b", "c"]]}}
    with pytest.raises(StrategyError, match="no mesh of 2 ranks has the axes a, b, c"):
        onnxpar.plan(path, devices=2, search="auto", strategy=three)
    five = {"shard": {"up": [[5, 1], None]}}
    with pytest.raises(StrategyError, match=r"no mesh of 2 ranks satisfies .* on tp=2: .*5 shards"):
        onnxpar.plan(path, devices=2, search="auto", strategy=five)


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (["dp", None, 4, "-"], ["dp"]),
        ([["dp", "tp"], "ep.sp"], ["dp", "tp", "ep", "sp"]),
        (["2*tp:(1)2*16", "a+b{9,1}", {"c": [1, 2]}], ["tp", "a", "b", "c"]),
    ],
)
def test_axes_that_entries_name(entry: Any, names: list[str]) -> None:
    assert requested_axes(Strategy.of({"tensors": {"t": entry}})) == tuple(names)
    assert requested_axes(Strategy.of({"shard": {"n": [None, entry]}})) == tuple(names)
    assert requested_axes(Strategy.of({"shard": {"n": {"k": names}}})) == tuple(names)


def test_devices_or_a_mesh_alone_are_searched(tmp_path: Path) -> None:
    path = matmuls(tmp_path, 4)
    for options in (Options(devices=4), Options(mesh=Mesh.parse("a=2,b=2"))):
        produced, _ = sharder.plan(path, options)
        assert produced.preset == "auto"
    requested = Strategy.of({"shard": {"up": [[2, 1], [1, 1]]}})
    assert sharder.plan(path, Options(devices=2, strategy=requested))[0].preset is None
    assert sharder.plan(path, Options(devices=2, search="propagation"))[0].preset is None
