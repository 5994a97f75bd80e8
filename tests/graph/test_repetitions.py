"""What stands in a loop counts as often as it runs, for the search and for what it predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from bodies import BOOL, FLOAT, INT, graph, node, save, values

from onnxpar.graph.repetitions import repetitions
from onnxpar.layout.mesh import Mesh
from onnxpar.passes.decide.propagate_layouts import PropagateLayouts
from onnxpar.passes.lower.insert_collectives import InsertCollectives
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.planner.run_passes import run_passes
from onnxpar.search.predict import predict
from onnxpar.search.search import solve

X = ("x", FLOAT, [8, 64])


def loop(iterations: int, path: Path) -> Path:
    """A product in each turn, on a weight that it shares."""
    body = graph(
        "body",
        [
            node("Identity", ["go"], ["on"], name="on"),
            node("MatMul", ["x", "w"], ["h"], name="product"),
            node("Tanh", ["h"], ["y"], name="tanh"),
        ],
        [("i", INT, []), ("go", BOOL, []), X],
        [("on", BOOL, []), ("y", FLOAT, [8, 64])],
    )
    main = graph(
        "g",
        [node("Loop", ["count", "", "start"], ["end"], name="loop", body=body)],
        [("start", FLOAT, [8, 64])],
        [("end", FLOAT, [8, 64])],
        {"w": values(64, 64), "count": np.array(iterations)},
    )
    return save(path, main)


def scan(iterations: int, path: Path) -> Path:
    """The same with a sequence, of which each turn adds an element."""
    body = graph(
        "body",
        [
            node("MatMul", ["x", "w"], ["h"], name="product"),
            node("Add", ["h", "item"], ["y"], name="add"),
        ],
        [X, ("item", FLOAT, [8, 64])],
        [("y", FLOAT, [8, 64])],
        {"w": values(64, 64)},
    )
    main = graph(
        "g",
        [node("Scan", ["start", "items"], ["end"], name="scan", body=body, num_scan_inputs=1)],
        [("start", FLOAT, [8, 64]), ("items", FLOAT, [iterations, 8, 64])],
        [("end", FLOAT, [8, 64])],
    )
    return save(path, main)


@pytest.mark.parametrize("make", [loop, scan])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_as_often_as_it_runs(make: object, mesh: str, tmp_path: Path) -> None:
    found = {}
    for iterations in (2, 200):
        how = Options(mesh=Mesh.parse(mesh))
        loaded = load_model(make(iterations, tmp_path / f"{iterations}.onnx"), how)  # type: ignore[operator]
        assert repetitions(loaded.graph.nodes)["product"] == iterations
        ctx = make_context(loaded, how)
        best = solve(loaded.graph, ctx.sharding, loaded.states)
        ctx.annotations = [best.annotations]
        run_passes(loaded, ctx, [PropagateLayouts(), InsertCollectives()])
        assert predict(loaded.graph, ctx.sharding).total == pytest.approx(best.seconds, rel=1e-6)
        found[iterations] = best.seconds
    assert found[200] > 50 * found[2]


def test_what_only_a_run_can_tell(tmp_path: Path) -> None:
    proto = onnx.load(loop(5, tmp_path / "m.onnx"))
    del proto.graph.initializer[1]
    proto.graph.input.append(onnx.helper.make_tensor_value_info("count", INT, []))
    onnx.save(proto, tmp_path / "open.onnx")
    loaded = load_model(tmp_path / "open.onnx", Options(devices=2))
    assert repetitions(loaded.graph.nodes)["product"] == 1
