"""What bodies of If, Loop and Scan may be like: names, sizes, types, opsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
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
    node,
    recurrent,
    save,
    turns,
    values,
)
from onnx import helper, numpy_helper

from onnxpar.load.load import load


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


def growing(
    path: Path, nodes: list[onnx.NodeProto], *counts: int
) -> tuple[Path, list[dict[str, Any]]]:
    """A Loop of which a turn makes `more` of `all`, and feeds for these numbers of turns."""
    body = graph(
        "grow",
        [*nodes, node("Identity", ["c"], ["d"])],
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
    fed = {"x": values(5, 6), "a0": values(5, 2)}
    return save(path, main), [{**fed, "n": np.array(n)} for n in counts]


def test_what_grows_from_turn_to_turn_is_whole_in_that_dimension(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["row"], "make"),
        node("Concat", ["all", "row"], ["more"], axis=1),
    ]
    model, feeds = growing(tmp_path / "m.onnx", nodes, 0, 2)
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_take_what_has_grown_since_the_last_turn(tmp_path: Path, ranks: int) -> None:
    nodes = [
        node("Concat", ["all", "x"], ["joined"], axis=1),
        node("Softmax", ["joined"], ["soft"], axis=0),
        node("Tanh", ["soft"], ["more"]),
    ]
    model, feeds = growing(tmp_path / "m.onnx", nodes, 1, 4, 0)
    plan = agree(model, feeds, f"tp={ranks}", {"tensors": {"a0": ["tp", None]}})
    assert kinds(plan) == ["AllReduce", "AllReduce"] and not plan.whole


def test_a_body_that_runs_whole_captures_a_weight(tmp_path: Path) -> None:
    """All bodies do while sizes are open."""
    shape: Any = ["batch", 6]
    then = graph("then", [node("MatMul", ["x", "w"], ["t"])], [], [("t", FLOAT, shape)])
    other = graph("else", [node("Add", ["y", "y"], ["e"])], [], [("e", FLOAT, shape)])
    main = graph(
        "g",
        [
            node("MatMul", ["x", "w"], ["y"], "mm"),
            node("If", ["c"], ["z"], "choose", then_branch=then, else_branch=other),
        ],
        [("x", FLOAT, ["batch", 8]), ("c", BOOL, [])],  # type: ignore[list-item]
        [("y", FLOAT, shape), ("z", FLOAT, shape)],
        {"w": values(8, 6)},
    )
    model = save(tmp_path / "m.onnx", main)
    feeds = [{"x": values(6, 8), "c": np.array(c)} for c in (True, False)]
    agree(model, feeds, "data-parallel 3")
    plan = agree(model, feeds, "tp=2", {"shard": {"mm": COLUMNS}})
    assert axes_of(plan, "w") == "[-, tp]"
