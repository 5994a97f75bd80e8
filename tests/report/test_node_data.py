"""Node data for Google's Model Explorer: its form, its ids, and what it tells of a split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from small_models import HEAD, write_text

import onnxpar
from onnxpar.base.errors import OnnxparError
from onnxpar.cli.command_line import main
from onnxpar.planner.convert_options import options_of
from onnxpar.report.explain import explain

MODELS = Path(__file__).parents[2] / "models"
FILES = {"layouts", "collectives", "milliseconds", "sent_bytes", "weight_bytes"}
TEXT = """m (float[8,6] x, float[6,4] w1, float[4,6] w2, float[6,6] w3) => (float[8,6] y)
{ a = MatMul(x, w1) b = Relu(a) c = MatMul(b, w2) d = MatMul(c, w3) y = Relu(d) }"""
SPLIT: dict[str, Any] = {"strategy": {"mesh": {"tp": 2}, "shard": {"MatMul_a": [[1, 1], [1, 2]]}}}


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """By file, what it has of its only graph, after a check of the form that Model Explorer's
    `node_data_builder` gives: ModelNodeData, GraphNodeData, NodeDataResult, GradientItem."""
    found = {}
    for file in folder.iterdir():
        ((graph, data),) = json.loads(file.read_text()).items()
        assert graph and data.keys() <= {"name", "results", "gradient"}
        assert data["name"] == file.stem
        for result in data["results"].values():
            assert {"value"} <= result.keys() <= {"value", "bgColor"}
            assert isinstance(result["value"], (str, int, float))
        stops = data.get("gradient", [{"stop": 0}, {"stop": 1}])
        assert [stop["stop"] for stop in stops] == [0, 1]
        found[file.stem] = data["results"]
    return found


def test_values_of_each_node(tmp_path: Path) -> None:
    proto = onnx.load(write_text(HEAD + TEXT, tmp_path / "m.onnx"))
    for node in proto.graph.node:
        node.name = "" if node.output[0] == "d" else f"{node.op_type}_{node.output[0]}"
    onnx.save(proto, tmp_path / "m.onnx")
    onnxpar.plan(tmp_path / "m.onnx", **SPLIT, node_data=tmp_path / "data")
    found = written(tmp_path / "data")
    assert found.keys() == FILES
    values = {name: {k: r["value"] for k, r in data.items()} for name, data in found.items()}
    layouts = values["layouts"]
    assert layouts["MatMul_a"] == "[-, -], [-, tp] -> [-, tp]"
    assert layouts["MatMul_c"] == "[-, tp], [tp, -] -> [-, -] sum(tp)"
    assert layouts["[value] w2"] == "[tp, -]" and layouts["[value] x"] == "[-, -]"
    assert values["collectives"] == {"<node_3>": "AllReduce"}
    assert values["sent_bytes"]["<node_3>"] > 0 == values["sent_bytes"]["MatMul_c"]
    assert values["weight_bytes"]["MatMul_c"] == values["weight_bytes"]["[value] w2"] == 4 * 12
    assert values["weight_bytes"]["<node_3>"] == 4 * 36
    seconds = explain(tmp_path / "m.onnx", options_of(SPLIT)).steps[0].predicted.total
    assert values["milliseconds"]["MatMul_a"] == pytest.approx(seconds * 1e3, abs=1e-6)
    colours = {key: result.get("bgColor") for key, result in found["layouts"].items()}
    assert colours["MatMul_a"] == colours["Relu_b"] != colours["MatMul_c"]
    assert colours["<node_3>"] is None


@pytest.mark.parametrize("name", ["gpt2.dynamo", "dlrm.legacy", "mixtral.dynamo"])
def test_ids_are_those_of_the_file(tmp_path: Path, name: str) -> None:
    """Also where the loader gives other names to nodes, or makes constants of them."""
    model = MODELS / f"{name}.static.onnx"
    args = ["--devices", "2", "--preset", "tensor-parallel", "--for-any-host"]
    assert main(["plan", str(model), *args, "--node-data", str(tmp_path / "data"), "-q"]) == 0
    graph = onnx.load(model, load_external_data=False).graph
    nodes = {node.name for node in graph.node}
    ids = nodes | {f"[value] {t.name}" for t in (*graph.input, *graph.initializer)}
    found = written(tmp_path / "data")
    assert all(results.keys() <= ids for results in found.values())
    assert len(nodes & found["layouts"].keys()) > 0.8 * len(nodes)
    assert json.loads((tmp_path / "data/layouts.json").read_text()).keys() == {graph.name}


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    model = write_text(HEAD + TEXT, tmp_path / "m.onnx")
    (tmp_path / "data").write_text("")
    with pytest.raises(OnnxparError, match="data"):
        onnxpar.plan(model, **SPLIT, node_data=tmp_path / "data")
