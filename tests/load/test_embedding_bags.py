"""The loops that PyTorch's exporters write for nn.EmbeddingBag become lookups and sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from committed import MODELS
from onnx import numpy_helper

import onnxpar
from onnxpar.load.load import load

BAGS = MODELS / "bags"
Feeds = dict[str, np.ndarray[Any, Any]]
FORMS = [
    *(f"{name}.{exporter}" for name in ("equal", "offsets") for exporter in ("legacy", "dynamo")),
    *("padded.dynamo", "uneven.dynamo"),
]
EVEN = ("equal", "padded")
PADDED = 2
"""The id that does not count, in some of the tables."""
ROWS = {"a": 23, "b": 17, "c": 11}


def feeds_of(form: str, seed: int = 0, starts: tuple[int, ...] = (0, 3, 3, 7)) -> Feeds:
    """Ids of all rows, some counted from the end."""
    draw = np.random.default_rng(seed)
    shape = (4, 3) if form.startswith(EVEN) else (10,)
    ids = {n: draw.integers(-rows, rows, shape) for n, rows in ROWS.items()}
    weights = {"weights": draw.standard_normal(shape).astype(np.float32)}
    if form.startswith(("padded", "uneven")):
        weights = {}
        for name, rows in ROWS.items():
            ones = draw.choice([PADDED, PADDED - rows], shape)
            ids[name] = np.where(draw.random(shape) < 0.4, ones, ids[name])
            ids[name][:3] = PADDED  # a bag without rows, or several
    if form.startswith(EVEN):
        return {**ids, **weights}
    return {"a": ids["a"], "b": ids["b"], "starts": np.array(starts), **weights}


def unsplit(path: Path, feeds: Feeds) -> Any:
    return ort.InferenceSession(path).run(None, feeds)[0]


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_no_loop_is_left(form: str) -> None:
    """And the sizes behind it are known."""
    graph = load(BAGS / f"{form}.onnx").graph
    ops = [n.op for n in graph.nodes]
    assert not {"Loop", "If", "SequenceEmpty", "ConcatFromSequence"} & {*ops}
    assert list(graph.outputs[0].shape) == [4, 2]
    reductions = {"ReduceSum", "ReduceMean", "ReduceMax"}
    added = ops.count("ScatterElements")
    wanted: dict[str, tuple[set[str], int]] = {
        "equal": (reductions, 0),
        "offsets": (set(), 4),
        "padded": (reductions - {"ReduceMean"}, 0),
        "uneven": (set(), 5),  # also for the numbers of rows that count
    }
    assert (reductions & {*ops}, added) == wanted[form.partition(".")[0]]


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, {"preset": "data-parallel"}),
        (2, {"preset": "table-parallel"}),
        (3, {"preset": "table-parallel"}),
        (5, {"preset": "table-parallel"}),
        (2, {"search": "auto"}),
        (3, {"strategy": {"tensors": {"tables.*.weight": ["tp", None]}}}),
        (5, {"strategy": {"tensors": {"tables.*.weight": [None, "tp"]}}}),
    ],
)
def test_ranks_agree_with_the_loop(
    ranks: int, how: dict[str, Any], form: str, tmp_path: Path
) -> None:
    path = BAGS / f"{form}.onnx"
    mesh: dict[str, Any] = {"mesh": f"tp={ranks}"} if "strategy" in how else {"devices": ranks}
    plan = onnxpar.shard(path, tmp_path / "m.par", **mesh, **how)
    if how.get("preset") == "table-parallel":
        tables = [w for w in plan.weights if w.name.startswith("tables.")]
        assert all("@" in w.layout_text for w in tables), tables
    starts = [(0, 3, 3, 7), (0, 0, 0, 0), (0, 10, 10, 10), (0, 1, 2, 3)]
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        for seed, each in enumerate(starts):
            feeds = feeds_of(form, seed, each)
            (y,) = session.run(None, feeds)
            np.testing.assert_allclose(y, unsplit(path, feeds), rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
def test_training(form: str, tmp_path: Path) -> None:
    """A step of lazily trained tables, on several ranks and on one."""
    how: dict[str, Any] = {"loss": "mse", "optimizer": "adagrad", "lazy": ["tables*"]}
    onnxpar.training.grad(BAGS / f"{form}.onnx", tmp_path / "step.onnx", **how)
    step = load(tmp_path / "step.onnx").step
    assert step is not None
    assert {s.of for s in step.parameters} == {
        *(f"tables.{i}.weight" for i in range(3 if form.startswith(EVEN) else 2)),
        *("top.weight", "top.bias"),
    }
    feeds = feeds_of(form) | {"target": np.ones((4, 2), np.float32)}
    report = onnxpar.check(
        tmp_path / "step.onnx", feeds, devices=2, preset="table-parallel", train=True, steps=3
    )
    assert report.ok, report.text()


def changed(op: str, of_counter: bool) -> onnx.ModelProto:
    """A model whose loops read another bag, or other rows: nodes of this type read from 0."""
    model = onnx.load(BAGS / "equal.legacy.onnx")
    for loop in [n for n in model.graph.node if n.op_type == "Loop"]:
        body = next(a.g for a in loop.attribute if a.name == "body")
        for node in [n for n in body.node if n.op_type == op]:
            if not of_counter or node.input[1] == body.input[0].name:
                zero = np.array(0) if of_counter else np.array([0])
                name = f"{node.name}/zero"
                model.graph.initializer.append(numpy_helper.from_array(zero, name))
                node.input[1] = name
    return model


@pytest.mark.parametrize(("op", "of_counter"), [("Gather", True), ("Slice", False)])
def test_other_loops_stay(op: str, of_counter: bool, tmp_path: Path) -> None:
    onnx.save(changed(op, of_counter), tmp_path / "m.onnx")
    assert "Loop" in [n.op for n in load(tmp_path / "m.onnx").graph.nodes]
    feeds = feeds_of("equal.legacy")
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, preset="data-parallel")
    with onnxpar.InferenceSession(tmp_path / "m.par") as session:
        (y,) = session.run(None, feeds)
    np.testing.assert_allclose(y, unsplit(tmp_path / "m.onnx", feeds), rtol=2e-6, atol=2e-6)
