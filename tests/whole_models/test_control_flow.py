"""If, Loop and Scan whose bodies are split like the graph around them, against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from agreement import options, run_unsplit
from bodies import (
    BOOL,
    COLUMNS,
    FLOAT,
    INT,
    ROWS,
    Port,
    agree,
    axes_of,
    graph,
    kinds,
    loop,
    lstm,
    node,
    recurrent,
    save,
    turns,
    values,
)

from onnxpar.compiler.check_layouts import check_layouts
from onnxpar.compiler.pass_ import PassContext
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axis
from onnxpar.planner import planner, sharder
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.default_passes import passes_of
from onnxpar.planner.pass_registry import parse_passes
from onnxpar.planner.run_passes import run_passes


def test_collectives_run_in_the_branch_that_is_taken(tmp_path: Path) -> None:
    then = graph(
        "then",
        [
            node("MatMul", ["x", "w"], ["h"], "up"),
            node("Relu", ["h"], ["r"]),
            node("MatMul", ["r", "v"], ["t"], "down"),
        ],
        [],
        [("t", FLOAT, [6, 8])],
        {"w": values(8, 32), "v": values(32, 8)},
    )
    other = graph("else", [node("Tanh", ["x"], ["e"])], [], [("e", FLOAT, [6, 8])])
    main = graph(
        "g",
        [
            node("If", ["c"], ["y"], "choose", then_branch=then, else_branch=other),
            node("MatMul", ["y", "u"], ["z"], "last"),
        ],
        [("x", FLOAT, [6, 8]), ("c", BOOL, [])],
        [("z", FLOAT, [6, 5])],
        {"u": values(8, 5)},
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(6, 8), "c": np.array(c)} for c in (True, False)]
    strategy = {"shard": {"up": COLUMNS, "down": ROWS}}
    for ranks in (2, 3):
        plan = agree(model, feeds, f"tp={ranks}", strategy)
        assert kinds(plan) == ["AllReduce"]
        assert [w.node for w in plan.whole] == ["last"]
        assert axes_of(plan, "w") == "[-, tp]" and axes_of(plan, "v") == "[tp, -]"


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loop_reduces_in_each_turn(tmp_path: Path, ranks: int) -> None:
    model = recurrent(tmp_path / "m.onnx")
    strategy = {"shard": {"recur": ROWS, "feed": [[None, None], [None, "tp"]]}}
    plan = agree(model, turns(3, 0, 1), f"tp={ranks}", strategy)
    assert sorted(kinds(plan)) == ["AllReduce", "ReduceScatter"]
    assert not plan.whole
    assert axes_of(plan, "w") == "[tp, -]" and axes_of(plan, "u") == "[-, tp]"
    assert [p.layout.text(plan.mesh) for p in plan.inputs[1:2] if p.layout] == ["[-, tp]"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loop_that_stops_early_stops_on_all_ranks(tmp_path: Path, ranks: int) -> None:
    model = recurrent(tmp_path / "m.onnx", stop=True)
    strategy = {"shard": {"recur": COLUMNS, "feed": COLUMNS}}
    feeds = turns(9)
    totals = run_unsplit(model, feeds[0])[1]
    assert len(totals) == 9
    sums = np.sort(np.abs(totals))
    widest = int(np.argmax(np.diff(sums)))  # rounding must not decide the turn
    feeds += [{**feeds[0], "limit": np.array(sums[widest : widest + 2].mean(), np.float32)}]
    plan = agree(model, feeds, f"tp={ranks}", strategy)
    assert sorted(kinds(plan)) == ["AllGather", "AllReduce"]
    assert not plan.whole


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout", ["data-parallel 2", "data-parallel 3", "tensor-parallel 3", "hybrid dp=2,tp=2"]
)
def test_presets_split_what_a_loop_carries(tmp_path: Path, layout: str) -> None:
    model = recurrent(tmp_path / "m.onnx", hidden=50)
    plan = agree(model, turns(3, hidden=50), layout)
    assert all(w.reason.startswith("no split") for w in plan.whole)
    assert (axes_of(plan, "w") == "[-, -]") == ("data" in layout)
    carried = next(p.layout for p in plan.inputs if p.name == "h0")
    assert carried is not None and not carried.is_whole


@pytest.mark.matrix
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("layout", ["dp=2", "dp=3", "tp=2", "tp=3", "dp=2,tp=2"])
def test_a_scan_over_a_sequence(tmp_path: Path, layout: str, backwards: bool) -> None:
    model = lstm(tmp_path / "m.onnx", 4, 5, 12, backwards)
    feeds = [{"xs": values(5, 4, 6), "h0": values(5, 12), "s0": values(5, 12)}]
    strategy: dict[str, Any] = {"tensors": {}}
    if "dp" in layout:
        strategy["tensors"] |= {"xs": ["dp", None, None], "h0": ["dp", None], "s0": ["dp", None]}
    if "tp" in layout:
        strategy["tensors"] |= {"wh": [None, "tp"], "wx": [None, "tp"]}
    plan = agree(model, feeds, layout, strategy)
    assert not plan.whole
    assert all(c.kind == "AllGather" for c in plan.collectives[:-1])
    assert bool(plan.collectives) == ("tp" in layout)


def test_the_steps_of_a_scan_stay_together(tmp_path: Path) -> None:
    model = lstm(tmp_path / "m.onnx", 6, 5, 12)
    feeds = [{"xs": values(5, 6, 6), "h0": values(5, 12), "s0": values(5, 12)}]
    plan = agree(model, feeds, "tp=3", {"tensors": {"xs": [None, "tp", None]}})
    assert kinds(plan) == ["AllGather"]
    reasons = {w.op: w.reason for w in plan.whole}
    assert reasons["Scan"] == "its steps run one after the other"
    project = [[None, "tp", None], [None, None]]
    agree(model, feeds, "tp=3", {"shard": {"project": project}})


def test_a_captured_sum_is_reduced_once_before_the_loop(tmp_path: Path) -> None:
    body = graph(
        "body",
        [
            node("ReduceSum", ["y", "rows"], ["r"]),
            node("Add", ["h", "r"], ["g"]),
            node("Identity", ["c"], ["d"]),
        ],
        [("i", INT, []), ("c", BOOL, []), ("h", FLOAT, [1, 99])],
        [("d", BOOL, []), ("g", FLOAT, [1, 99])],
        {"rows": np.array([0])},
    )
    main = graph(
        "g",
        [node("MatMul", ["x", "w"], ["y"], "mm"), loop(body, ["n", "", "h0"], ["h1"])],
        [("x", FLOAT, [500, 6]), ("h0", FLOAT, [1, 99]), ("n", INT, [])],
        [("h1", FLOAT, [1, 99])],
        {"w": values(6, 99)},
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(500, 6), "h0": values(1, 99), "n": np.array(n)} for n in (0, 4)]
    plan = agree(model, feeds, "tp=3", {"shard": {"mm": ROWS}})
    assert [(c.kind, c.tensor) for c in plan.collectives] == [("AllReduce", "y")]
    par = onnx.load(str(model.with_suffix(".par") / "rank_0001.onnx"))
    assert "AllReduce" in [n.op_type for n in par.graph.node]


def test_annotations_keep_what_bodies_do(tmp_path: Path) -> None:
    model = recurrent(tmp_path / "m.onnx", hidden=50)
    noted = tmp_path / "noted.onnx"
    wanted = sharder.annotate(model, noted, options("tensor-parallel 2"))
    plan = agree(noted, turns(3, hidden=50), "2")
    assert kinds(plan) == kinds(wanted) != []
    assert axes_of(plan, "w") == axes_of(wanted, "w")


def test_what_a_branch_captures_is_not_fused_with_what_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = {
        f"{name}_branch": graph(name, [node(op, ["y"], [name])], [], [(name, FLOAT, [4, 6])])
        for name, op in (("then", "Tanh"), ("else", "Sigmoid"))
    }
    main = graph(
        "g",
        [
            node("MatMul", ["x", "w"], ["y"], "first"),
            node("If", ["c"], ["z"], **branches),
            node("MatMul", ["z", "w"], ["r"], "second"),
        ],
        [("x", FLOAT, [4, 6]), ("c", BOOL, [])],
        [("r", FLOAT, [4, 6])],
        {"w": values(6, 6)},
    )
    model = save(tmp_path / "m.onnx", main)
    names = "annotate-strategy,propagate-layouts,insert-collectives"
    names += ",fuse-all-reduces{bucket-bytes=1000}"
    passes = parse_passes(f"{names},localize-ops,order-collectives")
    monkeypatch.setattr(planner, "passes_of", lambda how, model: passes)
    feeds = [{"x": values(4, 6), "c": np.array(c)} for c in (True, False)]
    strategy = {"shard": {"first": ROWS, "second": ROWS}, "tensors": {"y": [None, None]}}
    assert kinds(agree(model, feeds, "tp=2", strategy)) == ["AllReduce", "AllReduce"]


def placed(model: Path, strategy: Any, behind: str) -> tuple[gs.Graph, PassContext]:
    """The graph behind a pass of the default ones."""
    how = options("tp=2", strategy=strategy)
    loaded = load_model(model, how)
    ctx = make_context(loaded, how)
    passes = passes_of(how, loaded)
    last = next(i for i, p in enumerate(passes) if p.name == behind)
    run_passes(loaded, ctx, passes[: last + 1], check=True)
    return loaded.graph, ctx


def test_a_body_that_loses_the_token_is_noticed(tmp_path: Path) -> None:
    strategy = {"shard": {"recur": ROWS, "feed": [[None, None], [None, "tp"]]}}
    graph, ctx = placed(recurrent(tmp_path / "m.onnx"), strategy, "order-collectives")
    body = next(n for n in graph.nodes if n.op == "Loop").attrs["body"]
    check_layouts(graph, ctx)
    body.outputs[2] = body.inputs[3]
    with pytest.raises(AssertionError, match="does not carry the token"):
        check_layouts(graph, ctx)


def test_a_sum_that_is_pending_in_a_loop_is_noticed(tmp_path: Path) -> None:
    body = graph(
        "body",
        [node("Add", ["h", "h"], ["g"], "twice"), node("Identity", ["c"], ["d"])],
        [("i", INT, []), ("c", BOOL, []), ("h", FLOAT, [4, 6])],
        [("d", BOOL, []), ("g", FLOAT, [4, 6])],
    )
    given: list[Port] = [("x", FLOAT, [4, 6]), ("n", INT, [])]
    made: list[Port] = [("y", FLOAT, [4, 6])]
    model = save(tmp_path / "m.onnx", graph("g", [loop(body, ["n", "", "x"], ["y"])], given, made))
    main, ctx = placed(model, {"tensors": {"x": [None, None]}}, "insert-collectives")
    check_layouts(main, ctx)
    for name in ("x", "h", "g", "y"):
        ctx.layouts[name] = Layout((Factor(4), Factor(6)), (Axis("tp", 2),))
    with pytest.raises(AssertionError, match="is partial where it enters or leaves a body"):
        check_layouts(main, ctx)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "strategy,expected",
    [
        ({"shard": {"loop": [[], [], ["tp", None]]}}, ["AllReduce"]),
        ({"tensors": {"h": [None, "tp"]}}, ["ReduceScatter", "AllReduce"]),
        (
            {"tensors": {"h": [None, None], "h0": ["tp", None], "h_last": [None, "tp"]}},
            ["AllGather", "AllReduce", "AllToAll"],
        ),
        (
            {"tensors": {"h_next": ["tp", None], "h": [None, "tp"]}},
            ["AllToAll", "ReduceScatter", "AllReduce"],
        ),
    ],
)
def test_strategies_reach_into_bodies(
    tmp_path: Path, strategy: Mapping[str, Any], expected: list[str]
) -> None:
    plan = agree(recurrent(tmp_path / "m.onnx"), turns(3, 0), "tp=3", strategy)
    assert kinds(plan) == expected and not plan.whole
