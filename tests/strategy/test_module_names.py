"""Entries of strategies name modules as torch does, in files of either exporter."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from committed import MODELS

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.load.load import load
from onnxpar.training import grad

QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize("export", ["dynamo.static", "legacy.static", "dynamo.dynamic"])
@pytest.mark.parametrize(
    "name", ["*/layer.1/attention/self/query", "*/layer.1/attention/self/query/MatMul", "*" + QUERY]
)
def test_a_layer(export: str, name: str) -> None:
    """By its module, its node, or its weight."""
    dims = {"batch": 4, "seq": 16} if "dynamic" in export else None
    entry = [["rows", None, None], [None, "columns"]]
    plan = onnxpar.plan(
        MODELS / f"bert.{export}.onnx",
        mesh="rows=2,columns=2",
        strategy={"shard": {name: entry}},
        dims=dims,
    )
    (weight,) = [w for w in plan.weights if w.name.endswith(QUERY)]
    assert weight.layout_text == "[-, columns]" and weight.shape == (48, 48)


def test_names_of_the_file(tmp_path: Path) -> None:
    """They are as good, for those who look into the file."""
    entry = {"shard": {"node_MatMul_103": [["rows", None, None], [None, None]]}}
    plan = onnxpar.plan(MODELS / "bert.dynamo.static.onnx", mesh="rows=2", strategy=entry)
    assert plan.inputs[0].layout
    with pytest.raises(StrategyError, match=r"'node_MatMul_1030' matches no node; .*MatMul"):
        entry = {"shard": {"node_MatMul_1030": [["rows", None, None], [None, None]]}}
        onnxpar.plan(MODELS / "bert.dynamo.static.onnx", mesh="rows=2", strategy=entry)


@pytest.mark.parametrize("export", ["dynamo.static", "legacy.static"])
def test_tensors_by_names_of_the_file(export: str) -> None:
    """Weights and results whose names the loader changed."""
    path = MODELS / f"bert.{export}.onnx"
    called = load(path).called.in_file
    tensors = {t.name: t for t in load(path).graph.tensors().values()}
    renamed = {new: old for new, old in called.items() if new in tensors and tensors[new].shape}
    query = (QUERY, "layer.1/attention/self/query/MatMul_output")
    names = [name for name in renamed if any(part in name for part in query)]
    assert names
    for name in names:
        split = [None] * (len(tensors[name].shape) - 1)
        both = [
            onnxpar.plan(
                path, mesh="rows=2", configuration="none", strategy={"tensors": {key: [*split, 2]}}
            )
            for key in (name, renamed[name])
        ]
        assert both[0].to_json() == both[1].to_json()
        assert both[0].collectives or any("rows" in w.layout_text for w in both[0].weights)


def test_a_training_step_keeps_the_names(tmp_path: Path) -> None:
    """It is read again after its nodes and tensors were named, also those that are computed again;
    what it says of them, such as its gradients, stays true."""
    step = tmp_path / "step.onnx"
    how = {"loss": "softmax-cross-entropy", "optimizer": "sgd", "recompute_nodes": ["*/mlp/*"]}
    grad(MODELS / "gpt2.dynamo.static.onnx", step, **how)
    written, read = onnx.load(step), load(step)
    names = {node.name for node in written.graph.node}
    assert {n.name for n in read.graph.nodes if n.name.startswith("/")} <= names
    made = {name for node in written.graph.node for name in node.output}
    results = {t.name for node in read.graph.nodes for t in node.outputs}
    assert {name for name in results if name.startswith("/")} <= made
    assert read.step is not None and results >= set(read.step.gradients.values())


def test_annotations_go_by_the_names_of_the_file(tmp_path: Path) -> None:
    entry = {"shard": {"*/layer.1/attention/self/query": [[None, None, None], [None, "tp"]]}}
    model, annotated = MODELS / "bert.dynamo.static.onnx", tmp_path / "annotated.onnx"
    wanted = onnxpar.annotate(model, annotated, mesh="tp=2", strategy=entry)
    onnx.checker.check_model(annotated)
    names = {
        spec.tensor_name
        for node in onnx.load(annotated).graph.node
        for config in node.device_configurations
        for spec in config.sharding_spec
    }
    assert "val_108" in names and QUERY not in names
    again = onnxpar.plan(annotated)
    assert again.weights == wanted.weights


def test_a_module_that_is_called_several_times(tmp_path: Path) -> None:
    """Its name means all of its calls, that of a node one."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    m (float[8, 6] x, float[8, 6] u) => (float[8, 4] y, float[8, 4] v)
        <float[6, 4] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3}>
    { y = MatMul(x, w) v = MatMul(u, w) }"""
    proto = onnx.parser.parse_model(text)
    for node, name in zip(proto.graph.node, ("/fc/MatMul", "/fc/MatMul_1"), strict=True):
        node.name = name
    onnx.save(proto, tmp_path / "m.onnx")

    def layouts(name: str) -> list[str]:
        strategy = {"shard": {name: [["rows", None], [None, None]]}}
        plan = onnxpar.plan(tmp_path / "m.onnx", mesh="rows=2", strategy=strategy)
        return [port.layout.text(plan.mesh) for port in plan.outputs if port.layout]

    assert layouts("*/fc") == layouts("/fc/MatMul*") == ["[rows, -]", "[rows, -]"]
    assert layouts("/fc/MatMul_1") == ["[-, -]", "[rows, -]"]
