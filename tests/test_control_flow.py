"""If, Loop and Scan whose bodies are split like the graph around them, against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit
from onnx import TensorProto, helper, numpy_helper

from onnxpar import pipeline
from onnxpar.layout import Factor, Layout
from onnxpar.mesh import Axis
from onnxpar.model import load
from onnxpar.pass_list import parse_passes
from onnxpar.passes.pass_ import PassContext
from onnxpar.plan import Plan
from onnxpar.verify import verify

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Array = np.ndarray[Any, Any]
Port = tuple[str, int, Sequence[int] | None]
RANDOM = np.random.default_rng(11)


def values(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32) / 2


def graph(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    weights: Mapping[str, Array] | None = None,
) -> onnx.GraphProto:
    stored = [numpy_helper.from_array(w, n) for n, w in (weights or {}).items()]
    given, made = ([helper.make_tensor_value_info(*p) for p in some] for some in (inputs, outputs))
    return helper.make_graph(list(nodes), name, given, made, stored)


def save(path: Path, main: onnx.GraphProto) -> Path:
    model = helper.make_model(main, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def agree(
    model: Path, feeds: Sequence[Mapping[str, Array]], layout: str, strategy: Any = None
) -> Plan:
    """Shards once, and compares the outputs of each run."""
    par = model.with_suffix(".par")
    plan = pipeline.shard(model, par, options(layout, strategy=strategy))
    for feed in feeds:
        wanted = run_unsplit(model, feed)
        check_outputs(run_ranks(par, feed), wanted, [p.name for p in plan.outputs])
    return plan


def kinds(plan: Plan) -> list[str]:
    return [c.kind for c in plan.collectives]


def axes_of(plan: Plan, weight: str) -> str:
    return next(w.layout for w in plan.weights if w.name == weight)


node = helper.make_node


COLUMNS, ROWS = [[None, None], [None, "tp"]], [[None, "tp"], ["tp", None]]
"""How a product is split by what it makes, and by what it sums over."""


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


def loop(body: onnx.GraphProto, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    return node("Loop", inputs, outputs, "loop", body=body)


def cell(hidden: int, batch: int, stop: bool) -> onnx.GraphProto:
    """h = tanh(h W + x U), each of which is also handed out; stops where h grows small."""
    nodes = [
        node("MatMul", ["h", "w"], ["hw"], "recur"),
        node("MatMul", ["x", "u"], ["xu"], "feed"),
        node("Add", ["hw", "xu"], ["sum"]),
        node("Tanh", ["sum"], ["h_next"]),
        node("ReduceSum", ["h_next"], ["total"], keepdims=0),
        node("Abs", ["total"], ["size"]),
        node("Greater", ["size", "limit"], ["more"]),
        node("Identity", ["more" if stop else "go"], ["go_on"]),
    ]
    given: list[Port] = [("i", INT, []), ("go", BOOL, []), ("h", FLOAT, [batch, hidden])]
    made: list[Port] = [("go_on", BOOL, []), ("h_next", FLOAT, [batch, hidden])]
    made += [("total", FLOAT, [])]
    return graph("cell", nodes, given, made, {"w": values(hidden, hidden), "u": values(8, hidden)})


def recurrent(path: Path, hidden: int = 10, batch: int = 6, stop: bool = False) -> Path:
    body = cell(hidden, batch, stop)
    main = graph(
        "g",
        [loop(body, ["n", "keep", "h0"], ["h_last", "totals"])],
        [
            ("x", FLOAT, [batch, 8]),
            ("h0", FLOAT, [batch, hidden]),
            ("n", INT, []),
            ("keep", BOOL, []),
            ("limit", FLOAT, []),
        ],
        [("h_last", FLOAT, [batch, hidden]), ("totals", FLOAT, [None])],  # type: ignore[list-item]
    )
    return save(path, main)


def turns(*counts: int, hidden: int = 10, batch: int = 6, limit: float = 0.0) -> list[Any]:
    fed = {"x": values(batch, 8), "h0": values(batch, hidden), "keep": np.array(True)}
    return [{**fed, "n": np.array(n), "limit": np.array(limit, np.float32)} for n in counts]


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
    feeds += turns(9, limit=float(np.sort(np.abs(totals))[4]))
    plan = agree(model, feeds, f"tp={ranks}", strategy)
    assert sorted(kinds(plan)) == ["AllGather", "AllReduce"]
    assert not plan.whole


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


def lstm(path: Path, time: int, batch: int, hidden: int, backwards: bool = False) -> Path:
    """A sequence [batch, time, 6] goes through an LSTM's cell along its second axis."""
    gates = [
        node("MatMul", ["x", "wx"], ["gx"], "input"),
        node("MatMul", ["h", "wh"], ["gh"], "recur"),
        node("Add", ["gx", "gh"], ["sum"]),
        node("Add", ["sum", "bias"], ["gates"]),
        node("Split", ["gates"], ["i", "o", "f", "c"], axis=1, num_outputs=4),
    ]
    gates += [node("Sigmoid", [g], [f"{g}s"]) for g in "iof"]
    gates += [
        node("Tanh", ["c"], ["cs"]),
        node("Mul", ["fs", "s"], ["kept"]),
        node("Mul", ["is", "cs"], ["new"]),
        node("Add", ["kept", "new"], ["s_next"]),
        node("Tanh", ["s_next"], ["st"]),
        node("Mul", ["os", "st"], ["h_next"]),
        node("Identity", ["h_next"], ["y"]),
    ]
    state = [batch, hidden]
    weights = {
        "wx": values(6, 4 * hidden),
        "wh": values(hidden, 4 * hidden),
        "bias": values(4 * hidden),
    }
    body = graph(
        "lstm",
        gates,
        [("h", FLOAT, state), ("s", FLOAT, state), ("x", FLOAT, [batch, 6])],
        [("h_next", FLOAT, state), ("s_next", FLOAT, state), ("y", FLOAT, state)],
        weights,
    )
    scan = node(
        "Scan",
        ["h0", "s0", "xs"],
        ["h1", "s1", "ys"],
        "scan",
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_output_axes=[-2],
        scan_input_directions=[int(backwards)],
        scan_output_directions=[int(backwards)],
    )
    main = graph(
        "g",
        [scan, node("MatMul", ["ys", "out"], ["z"], "project")],
        [("xs", FLOAT, [batch, time, 6]), ("h0", FLOAT, state), ("s0", FLOAT, state)],
        [("z", FLOAT, [batch, time, 3]), ("h1", FLOAT, state), ("s1", FLOAT, state)],
        {"out": values(hidden, 3)},
    )
    return save(path, main)


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


def test_sibling_branches_may_repeat_names(tmp_path: Path) -> None:
    """The same names in both branches, and in a Loop inside each, which captures a split tensor."""

    def branch(op: str) -> onnx.GraphProto:
        turn = graph(
            "turn",
            [
                node("MatMul", ["h", "w"], ["m"], f"mm{op}"),
                node("Add", ["m", "y"], ["a"]),
                node(op, ["a"], ["r"]),
                node("Identity", ["c"], ["d"]),
            ],
            [("i", INT, []), ("c", BOOL, []), ("h", FLOAT, [4, 6])],
            [("d", BOOL, []), ("r", FLOAT, [4, 6]), ("r", FLOAT, [4, 6])],
            {"w": values(6, 6)},
        )
        inner = node("Loop", ["n", "", "y"], ["m", "rows"], body=turn)
        nodes = [inner, node("ReduceMean", ["rows", "w"], ["a"], keepdims=0)]
        nodes.append(node("Sub", ["a", "m"], ["r"]))
        return graph("b", nodes, [], [("r", FLOAT, [4, 6])], {"w": np.array([0])})

    main = graph(
        "g",
        [
            node("MatMul", ["x", "w"], ["y"], "first"),
            node("If", ["p"], ["z"], then_branch=branch("Tanh"), else_branch=branch("Sigmoid")),
            node("MatMul", ["z", "w"], ["q"], "last"),
        ],
        [("x", FLOAT, [4, 6]), ("p", BOOL, []), ("n", INT, [])],
        [("q", FLOAT, [4, 6])],
        {"w": values(6, 6)},
    )
    model = save(tmp_path / "m.onnx", main)
    feed = {"x": values(4, 6), "n": np.array(3)}
    feeds = [{**feed, "p": np.array(p)} for p in (True, False)]
    strategy = {
        "shard": {"first": COLUMNS, "mmTanh": COLUMNS, "mmSigmoid": ROWS, "last": ROWS},
    }
    for ranks in (2, 3):
        plan = agree(model, feeds, f"tp={ranks}", strategy)
        assert not plan.whole
        assert sorted(kinds(plan)) == ["AllGather", "AllReduce", "ReduceScatter"]
    plan = agree(model, feeds, "data-parallel 3")
    assert not plan.whole and not plan.collectives


def test_what_grows_from_turn_to_turn_is_whole_in_that_dimension(tmp_path: Path) -> None:
    body = graph(
        "grow",
        [
            node("MatMul", ["x", "w"], ["row"], "make"),
            node("Concat", ["all", "row"], ["more"], axis=1),
            node("Identity", ["c"], ["d"]),
        ],
        [("i", INT, []), ("c", BOOL, []), ("all", FLOAT, None)],
        [("d", BOOL, []), ("more", FLOAT, None)],
        {"w": values(6, 4)},
    )
    main = graph(
        "g",
        [loop(body, ["n", "", "a0"], ["a1"]), node("Relu", ["a1"], ["y"])],
        [("x", FLOAT, [5, 6]), ("a0", FLOAT, [5, 2]), ("n", INT, [])],
        [("y", FLOAT, [5, None])],  # type: ignore[list-item]
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(5, 6), "a0": values(5, 2), "n": np.array(n)} for n in (0, 2)]
    for layout in ("data-parallel 2", "data-parallel 3", "tensor-parallel 2"):
        plan = agree(model, feeds, layout)
        assert plan.inputs[1].layout is not None
        assert plan.inputs[1].layout.is_whole == (layout == "tensor-parallel 2")


def test_a_constant_number_of_turns_is_a_size(tmp_path: Path) -> None:
    body = graph(
        "body",
        [node("MatMul", ["h", "w"], ["g"], "mm"), node("Identity", ["c"], ["d"])],
        [("i", INT, []), ("c", BOOL, []), ("h", FLOAT, [4, 6])],
        [("d", BOOL, []), ("g", FLOAT, [4, 6]), ("g", FLOAT, [4, 6])],
        {"w": values(6, 6)},
    )
    main = graph(
        "g",
        [loop(body, ["n", "", "x"], ["y", "ys"])],
        [("x", FLOAT, [4, 6])],
        [("y", FLOAT, [4, 6]), ("ys", FLOAT, [3, 4, 6])],
        {"n": np.array(3)},
    )
    model = save(tmp_path / "m.onnx", main)
    plan = agree(model, [{"x": values(4, 6)}], "data-parallel 2")
    assert [p.layout.text(plan.mesh) for p in plan.outputs if p.layout] == ["[dp, -]", "[-, dp, -]"]


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


def test_branches_that_make_other_shapes(tmp_path: Path) -> None:
    then = graph("then", [node("MatMul", ["x", "w"], ["t"], "mm")], [], [("t", FLOAT, [6, 8])])
    other = graph("else", [node("Concat", ["x", "x"], ["e"], axis=1)], [], [("e", FLOAT, [6, 16])])
    choose = node("If", ["c"], ["z"], then_branch=then, else_branch=other)
    main = graph(
        "g",
        [choose, node("Relu", ["z"], ["r"])],
        [("x", FLOAT, [6, 8]), ("c", BOOL, [])],
        [("r", FLOAT, [6, None])],  # type: ignore[list-item]
        {"w": values(8, 8)},
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(6, 8), "c": np.array(c)} for c in (True, False)]
    for layout in ("data-parallel 2", "data-parallel 3", "tensor-parallel 2"):
        agree(model, feeds, layout)


def test_a_branch_may_be_a_constant_or_what_it_captures(tmp_path: Path) -> None:
    value = numpy_helper.from_array(values(6, 8))
    then = graph("then", [node("Constant", [], ["t"], value=value)], [], [("t", FLOAT, [6, 8])])
    other = graph("else", [node("Identity", ["x"], ["e"])], [], [("e", FLOAT, [6, 8])])
    choose = node("If", ["c"], ["z"], then_branch=then, else_branch=other)
    main = graph(
        "g",
        [choose, node("MatMul", ["z", "w"], ["r"], "mm")],
        [("x", FLOAT, [6, 8]), ("c", BOOL, [])],
        [("r", FLOAT, [6, 8])],
        {"w": values(8, 8)},
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(6, 8), "c": np.array(c)} for c in (True, False)]
    assert not agree(model, feeds, "data-parallel 3").collectives
    plan = agree(model, feeds, "tp=3", {"shard": {"mm": ROWS}})
    assert kinds(plan) == ["AllReduce"] and not plan.whole


def test_a_loop_may_carry_a_sequence(tmp_path: Path) -> None:
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None))
    nodes = [
        node("MatMul", ["h", "w"], ["g"], "mm"),
        node("SequenceInsert", ["s", "g"], ["s2"]),
        node("Identity", ["c"], ["d"]),
    ]
    given: list[Port] = [("i", INT, []), ("c", BOOL, []), ("h", FLOAT, [4, 6])]
    made: list[Port] = [("d", BOOL, []), ("g", FLOAT, [4, 6])]
    body = graph("body", nodes, given, made, {"w": values(6, 6)})
    body.input.append(helper.make_value_info("s", sequence))
    body.output.append(helper.make_value_info("s2", sequence))
    main = graph(
        "g",
        [
            node("SequenceEmpty", [], ["s0"], dtype=FLOAT),
            loop(body, ["n", "", "x", "s0"], ["y", "s1"]),
            node("ConcatFromSequence", ["s1"], ["z"], axis=0),
        ],
        [("x", FLOAT, [4, 6]), ("n", INT, [])],
        [("y", FLOAT, [4, 6]), ("z", FLOAT, [None, None])],  # type: ignore[list-item]
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(4, 6), "n": np.array(3)}]
    plan = agree(model, feeds, "tp=2", {"shard": {"mm": ROWS}})
    assert axes_of(plan, "w") == "[tp, -]"
    agree(model, feeds, "data-parallel 2")


@pytest.mark.parametrize("opset", [9, 11])
def test_bodies_of_older_opsets(tmp_path: Path, opset: int) -> None:
    then = [
        node("Softmax", ["y"], ["s"], axis=1),
        node("Unsqueeze", ["s"], ["u"], axes=[0]),
        node("Squeeze", ["u"], ["t"], axes=[0]),
    ]
    other = [node("ReduceMean", ["y"], ["q"], axes=[2]), node("Sub", ["y", "q"], ["e"])]
    choose = node(
        "If",
        ["c"],
        ["z"],
        then_branch=graph("then", then, [], [("t", FLOAT, [3, 4, 6])]),
        else_branch=graph("else", other, [], [("e", FLOAT, [3, 4, 6])]),
    )
    main = graph(
        "g",
        [node("MatMul", ["x", "w"], ["y"], "mm"), choose],
        [("x", FLOAT, [3, 4, 8]), ("c", BOOL, [])],
        [("z", FLOAT, [3, 4, 6])],
        {"w": values(8, 6)},
    )
    model = tmp_path / "m.onnx"
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(main, opset_imports=opsets, ir_version=6), model)
    feeds = [{"x": values(3, 4, 8), "c": np.array(c)} for c in (True, False)]
    plan = agree(model, feeds, "tp=3", {"shard": {"mm": [[None] * 3, [None, "tp"]]}})
    assert kinds(plan) == ["AllReduce"] * 3 and not plan.whole


def test_bodies_stay_whole_while_sizes_are_open(tmp_path: Path) -> None:
    model = recurrent(tmp_path / "m.onnx")
    proto = onnx.load(str(model))
    for port in [*proto.graph.input[:2], proto.graph.output[0]]:
        port.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(proto, model)
    plan = agree(model, [*turns(3), *turns(2, batch=5)], "data-parallel 2")
    assert not plan.collectives


def test_annotations_keep_what_bodies_do(tmp_path: Path) -> None:
    model = recurrent(tmp_path / "m.onnx", hidden=50)
    noted = tmp_path / "noted.onnx"
    wanted = pipeline.annotate(model, noted, options("tensor-parallel 2"))
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
    names = "annotate-strategy,propagate-layouts,insert-collectives{bucket-bytes=1000}"
    passes = parse_passes(f"{names},localize-ops,order-collectives")
    monkeypatch.setattr(pipeline, "passes_of", lambda how: passes)
    feeds = [{"x": values(4, 6), "c": np.array(c)} for c in (True, False)]
    strategy = {"shard": {"first": ROWS, "second": ROWS}, "tensors": {"y": [None, None]}}
    assert kinds(agree(model, feeds, "tp=2", strategy)) == ["AllReduce", "AllReduce"]


def placed(model: Path, strategy: Any, last: int) -> tuple[gs.Graph, PassContext]:
    """The graph behind the first passes."""
    how = options("tp=2", strategy=strategy)
    loaded = pipeline.load_model(model, how)
    ctx = pipeline.make_context(loaded, how)
    pipeline.run_passes(loaded, ctx, pipeline.passes_of(how)[:last], check=True)
    return loaded.graph, ctx


def test_a_body_that_loses_the_token_is_noticed(tmp_path: Path) -> None:
    strategy = {"shard": {"recur": ROWS, "feed": [[None, None], [None, "tp"]]}}
    graph, ctx = placed(recurrent(tmp_path / "m.onnx"), strategy, 5)
    body = next(n for n in graph.nodes if n.op == "Loop").attrs["body"]
    verify(graph, ctx)
    body.outputs[2] = body.inputs[3]
    with pytest.raises(AssertionError, match="does not carry the token"):
        verify(graph, ctx)


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
    main, ctx = placed(model, {"tensors": {"x": [None, None]}}, 3)
    verify(main, ctx)
    for name in ("x", "h", "g", "y"):
        ctx.layouts[name] = Layout((Factor(4), Factor(6)), (Axis("tp", 2),))
    with pytest.raises(AssertionError, match="is pending where it enters or leaves a body"):
        verify(main, ctx)


def test_declared_types_hold_in_bodies_for_ops_that_nobody_knows(tmp_path: Path) -> None:
    nodes = [helper.make_node("Odd", ["x"], ["o"], domain="odd"), node("Relu", ["o"], ["t"])]
    then = graph("then", nodes, [], [("t", FLOAT, None)])
    then.value_info.append(helper.make_tensor_value_info("o", FLOAT, [4, 6]))
    other = graph("else", [node("Relu", ["x"], ["e"])], [], [("e", FLOAT, [4, 6])])
    choose = node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    ports = [("x", FLOAT, [4, 6]), ("c", BOOL, [])], [("y", FLOAT, [4, 6])]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("odd", 1)]
    model = helper.make_model(graph("g", [choose], *ports), opset_imports=opsets, ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    (loaded,) = load(tmp_path / "m.onnx").graph.nodes
    assert list(loaded.attrs["then_branch"].outputs[0].shape) == [4, 6]
    assert list(loaded.outputs[0].shape) == [4, 6]


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


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_take_what_has_grown_since_the_last_turn(tmp_path: Path, ranks: int) -> None:
    body = graph(
        "grow",
        [
            node("Concat", ["all", "x"], ["more"], axis=1),
            node("Softmax", ["more"], ["soft"], axis=0),
            node("Tanh", ["soft"], ["next"]),
            node("Identity", ["c"], ["d"]),
        ],
        [("i", INT, []), ("c", BOOL, []), ("all", FLOAT, None)],
        [("d", BOOL, []), ("next", FLOAT, None)],
    )
    main = graph(
        "g",
        [loop(body, ["n", "", "a0"], ["a1"]), node("Relu", ["a1"], ["y"])],
        [("x", FLOAT, [5, 6]), ("a0", FLOAT, [5, 2]), ("n", INT, [])],
        [("y", FLOAT, [5, None])],  # type: ignore[list-item]
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(5, 6), "a0": values(5, 2), "n": np.array(n)} for n in (1, 4, 0)]
    plan = agree(model, feeds, f"tp={ranks}", {"tensors": {"a0": ["tp", None]}})
    assert kinds(plan) == ["AllReduce", "AllReduce", "AllGather"] and not plan.whole
