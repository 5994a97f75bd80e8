"""The layouts in the metadata of written models, which viewers such as Netron show; they change
nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from small_models import HEAD, write_text

import onnxpar

TEXT = """m (float[8,6] x, float[6,4] w1, float[4,6] w2) => (float[8,6] y)
{ a = MatMul(x, w1) b = Relu(a) c = MatMul(b, w2) y = Relu(c) }"""
COLUMNS = {"strategy": {"mesh": {"tp": 2}, "shard": {"MatMul_a": [[1, 1], [1, 2]]}}}
ROWS = {"strategy": {"mesh": {"dp": 2}, "tensors": {"x": ["dp", None]}}}


def layouts(graph: onnx.GraphProto) -> dict[str, str]:
    """What metadata say, by op and first result of a node and by port."""
    holders = [(f"{n.op_type} {n.output[0]}", n) for n in graph.node]
    holders += [(port.name, port) for port in (*graph.input, *graph.output)]
    return {
        name: entry.value
        for name, holder in holders
        for entry in holder.metadata_props
        if entry.key == "onnxpar.layout"
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_text(HEAD + TEXT, tmp_path / "m.onnx")


def test_a_rank_says_its_layouts(model: Path, tmp_path: Path) -> None:
    onnxpar.shard(model, tmp_path / "m.par", **COLUMNS)
    for rank in range(2):
        found = layouts(onnx.load(tmp_path / f"m.par/rank_000{rank}.onnx").graph)
        assert found == {
            "MatMul a": "w1 [-, tp] -> a [-, tp]",
            "Relu b": "a [-, tp] -> b [-, tp]",
            "MatMul c": "b [-, tp], w2 [tp, -] -> c [-, -] sum(tp)",
            "AllReduce c@1": "c [-, -] sum(tp) -> whole",
        }
    onnxpar.shard(model, tmp_path / "m.par", **ROWS)
    found = layouts(onnx.load(tmp_path / "m.par/rank_0000.onnx").graph)
    assert (found["x"], found["y"]) == ("[dp, -]", "[dp, -]")
    assert found["MatMul a"] == "x [dp, -] -> a [dp, -]"


def test_results_are_the_same_without(model: Path, tmp_path: Path) -> None:
    onnxpar.shard(model, tmp_path / "m.par", **ROWS)
    file = tmp_path / "m.par/rank_0000.onnx"
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    bare = onnx.load(file, load_external_data=False)
    assert layouts(bare.graph)
    for holder in (*bare.graph.node, *bare.graph.input, *bare.graph.output):
        del holder.metadata_props[:]
    onnx.save(bare, tmp_path / "m.par/bare.onnx")
    results = [
        onnxruntime.InferenceSession(path).run(None, {"x": x})[0]
        for path in (file, tmp_path / "m.par/bare.onnx")
    ]
    assert results[0].tobytes() == results[1].tobytes()
    assert onnxpar.check(model, **COLUMNS).ok


def test_an_annotated_model_says_them(model: Path, tmp_path: Path) -> None:
    file, again = tmp_path / "annotated.onnx", tmp_path / "again.onnx"
    plan = onnxpar.annotate(model, file, **COLUMNS)
    found = layouts(onnx.load(file).graph)
    assert found == {
        "MatMul a": "w1 [-, tp] -> a [-, tp]",
        "Relu b": "a [-, tp] -> b [-, tp]",
        "MatMul c": "b [-, tp], w2 [tp, -] -> c [-, -] sum(tp)",
    }
    read = onnxpar.plan(file, devices=2)
    assert (read.weights, read.collectives) == (plan.weights, plan.collectives)
    whole: dict[str, Any] = {"configuration": "none", **ROWS}
    onnxpar.annotate(file, again, **whole)
    assert layouts(onnx.load(again).graph)["MatMul a"] == "x [dp, -] -> a [dp, -]"


def test_older_layouts_are_replaced(model: Path, tmp_path: Path) -> None:
    onnxpar.annotate(model, tmp_path / "annotated.onnx", **COLUMNS)
    whole: dict[str, Any] = {"configuration": "none", **ROWS}
    onnxpar.shard(tmp_path / "annotated.onnx", tmp_path / "m.par", **whole)
    proto = onnx.load(tmp_path / "m.par/rank_0000.onnx")
    assert layouts(proto.graph)["MatMul a"] == "x [dp, -] -> a [dp, -]"
    for node in proto.graph.node:
        keys = [entry.key for entry in node.metadata_props]
        assert keys.count("onnxpar.layout") == 1


def test_a_dump_says_them(model: Path, tmp_path: Path) -> None:
    onnxpar.plan(model, **COLUMNS, dump=tmp_path / "dump")
    found = {
        number: layouts(onnx.load(next((tmp_path / "dump").glob(f"{number:02d}-*.onnx"))).graph)
        for number in (1, 2, 3)
    }
    assert found[1] == {}
    assert found[2]["MatMul c"] == "b [-, tp], w2 [tp, -] -> whole"
    assert found[3]["MatMul c"] == "b [-, tp], w2 [tp, -] -> c [-, -] sum(tp)"
    dump = tmp_path / "dump/02-propagate-layouts.onnx"
    onnxpar.opt(dump, "insert-collectives", output=tmp_path / "o.onnx")
    assert layouts(onnx.load(tmp_path / "o.onnx").graph) == found[3]
