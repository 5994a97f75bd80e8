"""Rows that an export sorts by expert stay at their places, unless a node reads them in between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnxpar.load.load import load
from onnxpar.planner import sharder

MODEL = Path(__file__).parents[2] / "models" / "experts" / "qwen3_moe.grouped_mm.hf.onnx"
FEEDS = {"input_ids": np.arange(48).reshape(4, 12), "attention_mask": np.ones((4, 12), np.int64)}


def sorts(path: Path) -> bool:
    """True if the loader leaves nodes that gather rows in another order."""
    ops = [node.op for node in load(path).graph.nodes if node.op == "GatherND"]
    return bool(ops)


def weighted(model: ModelProto) -> NodeProto:
    """The node that multiplies the sorted results by their weights."""
    inverse = next(n for n in model.graph.node if n.op_type == "ScatterND")
    made = {name: node for node in model.graph.node for name in node.output}
    read = {name: node for node in model.graph.node for name in node.input}
    return made[read[read[inverse.output[0]].output[0]].input[0]]


def between(model: ModelProto, *made: NodeProto) -> None:
    """Puts nodes from `weighted` to `changed` between the weighted rows and their readers."""
    node = weighted(model)
    at = list(model.graph.node).index(node) + 1
    for reader in model.graph.node[at:]:
        reader.input[:] = ["changed" if n == node.output[0] else n for n in reader.input]
    node.output[0] = "weighted"
    for new in reversed(made):
        model.graph.node.insert(at, new)


def store(model: ModelProto, name: str, value: object) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))


def add_up(model: ModelProto) -> None:
    """Each row depends on those before it."""
    store(model, "axis", 0)
    between(model, helper.make_node("CumSum", ["weighted", "axis"], ["changed"], "add_up"))


def scale(model: ModelProto) -> None:
    """Each place has a factor of its own."""
    factors = np.linspace(1, 2, 96, dtype=np.float32).reshape(-1, 1)
    model.graph.initializer.append(numpy_helper.from_array(factors, "factors"))
    between(model, helper.make_node("Mul", ["weighted", "factors"], ["changed"], "scale"))


def show(model: ModelProto) -> None:
    """Rows in their order are an output."""
    between(model, helper.make_node("Identity", ["weighted"], ["changed"], "show"))
    port = helper.make_tensor_value_info("weighted", onnx.TensorProto.FLOAT, [96, 16])
    model.graph.output.append(port)


def go_elsewhere(model: ModelProto) -> None:
    """Rows go to other places than those from which they came."""
    name = next(n for n in model.graph.node if n.op_type == "ScatterND").input[2]
    (stored,) = (t for t in model.graph.initializer if t.name == name)
    stored.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(stored)[::-1].copy(), name))


def convert(model: ModelProto) -> None:
    """A node that computes each row by itself."""
    between(
        model,
        helper.make_node("Cast", ["weighted"], ["wide"], "widen", to=onnx.TensorProto.DOUBLE),
        helper.make_node("Cast", ["wide"], ["changed"], "narrow", to=onnx.TensorProto.FLOAT),
    )


CHANGES = [convert, scale, show, go_elsewhere]


@pytest.mark.parametrize(
    "change", [None, add_up, *(pytest.param(c, marks=pytest.mark.slow) for c in CHANGES)]
)
def test_rows(change: object, tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", onnx.load(MODEL)
    if callable(change):
        change(model)
    onnx.save(model, path)
    assert sorts(path) is (change not in (None, convert))
    wanted = run_unsplit(path, FEEDS)
    for layout in ("data-parallel 1", "data-parallel 3", "expert-parallel 2"):
        folder = tmp_path / layout
        plan = sharder.shard(path, folder, options(layout))
        check_outputs(run_ranks(folder, FEEDS), wanted, [port.name for port in plan.outputs])
