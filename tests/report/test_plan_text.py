"""What a plan prints: true numbers, reasons that hold, and no long list of lines that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import options
from onnx import TensorProto, helper, numpy_helper

from onnxpar.base.errors import StrategyError
from onnxpar.planner import sharder
from onnxpar.planner.pass_registry import parse_passes
from onnxpar.report import plan_text
from onnxpar.report.plan_text import grouped, plan_lines, table

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, Any], **stored: Any
) -> onnx.ModelProto:
    """A model whose ports are float32 of these shapes, or whole values."""
    ports = [
        [helper.make_tensor_value_info(name, *at) for name, at in each.items()]
        for each in (inputs, outputs)
    ]
    weights = [numpy_helper.from_array(np.asarray(v, np.float32), k) for k, v in stored.items()]
    graph = helper.make_graph(list(nodes), "g", *ports, weights)
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def branching(size: int | str) -> onnx.ModelProto:
    """An If of which each branch stores a weight of 64 x 64; its bodies stay closed while a size is
    open."""

    def branch(name: str) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.ones((64, 64), np.float32), name)
        nodes = [
            helper.make_node("Constant", [], ["w"], value=weight),
            helper.make_node("MatMul", ["x", "w"], [f"{name}.y"]),
        ]
        result = helper.make_tensor_value_info(f"{name}.y", FLOAT, [size, 64])
        return helper.make_graph(nodes, name, [], [result])

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    inputs = {"x": (FLOAT, [size, 64]), "c": (TensorProto.BOOL, [])}
    return model([node], inputs, {"y": (FLOAT, [size, 64])})


def layers(count: int) -> onnx.ModelProto:
    """As many products, which nothing splits but a strategy."""
    names = ["x", *(f"h{i}" for i in range(count - 1)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], f"mm{i}")
        for i in range(count)
    ]
    shape = {"x": (FLOAT, [1, 40])}
    weights = {f"w{i}": np.ones((40, 40)) for i in range(count)}
    return model(nodes, shape, {"y": (FLOAT, [1, 40])}, **weights)


def text_of(proto: onnx.ModelProto, folder: Path, how: str) -> str:
    onnx.save(proto, folder / "m.onnx")
    plan, _ = sharder.plan(folder / "m.onnx", options(how))
    return "\n".join(plan_lines(plan.to_json()))


@pytest.mark.parametrize("size", [2, "n"])
def test_weights_in_bodies_count(size: int | str, tmp_path: Path) -> None:
    text = text_of(branching(size), tmp_path, "2")
    assert "weights: 32.8 kB in total" in text
    if size == "n":
        where = "they are in bodies of If, Loop or Scan, which onnxpar does not split"
        assert f"32.768 kB; {where}" in " ".join(text.split())
        assert "--memory-limit" not in text


def test_the_hint_of_other_sizes_has_the_names_of_the_model(tmp_path: Path) -> None:
    hint = "costs are for n=1; set others with --typical n=8"
    assert hint in text_of(branching("n"), tmp_path, "2")


@pytest.mark.parametrize("how", ["2", "tensor-parallel 2", "data-parallel 2"])
def test_only_a_search_says_that_no_split_is_worth_it(how: str, tmp_path: Path) -> None:
    strategy = {"shard": {"mm0": [[1, 1], [1, 1]]}}
    onnx.save(layers(5), tmp_path / "m.onnx")
    given = options(how, strategy=strategy if how == "2" else None)
    whole = sharder.plan(tmp_path / "m.onnx", given)[0].whole
    by_hand = sharder.plan(tmp_path / "m.onnx", options("tp=2", strategy=strategy))[0].whole
    wrong = "splitting it would save less time than the collectives cost"
    assert by_hand and not [w for w in by_hand if w.reason == wrong]
    assert how == "2" or not [w for w in whole if w.reason == wrong]


def test_nodes_that_stay_whole_for_one_reason_are_one_line(tmp_path: Path) -> None:
    text = text_of(layers(5), tmp_path, "data-parallel 2")
    assert "5 nodes run whole on every rank" in text
    assert (
        "mm0 and 4 more  MatMul         0  neither the strategy nor propagation splits it" in text
    )


def test_many_weights_that_are_alike_are_one_line(tmp_path: Path) -> None:
    assert "w0 and 24 more" in text_of(layers(25), tmp_path, "data-parallel 2")
    assert "w19 " in text_of(layers(20), tmp_path, "data-parallel 2")


def test_rows_that_differ_stay_apart() -> None:
    rows = [("a", 1), ("b", 1), ("c", 2)]
    assert grouped(rows, 2) == [("a and 1 more", 1), ("c", 2)]
    assert grouped(rows, 3) == rows


@pytest.mark.parametrize("text", ["x{", "propagate-layouts{", "propagate-layouts{}x", ",,", "}"])
def test_a_list_of_passes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(StrategyError, match="write names with commas between them"):
        parse_passes(text)


def test_a_long_reason_is_wrapped_rather_than_the_name_cut() -> None:
    name, reason = "/encoder/layer.3/attention/self/query/MatMul", "none " * 20
    lines = list(
        table([(name, "MatMul", 12, reason)], ("node", "op", "gathered", "why"), wraps=True)
    )
    assert lines[1].startswith(f"{name}  MatMul        12  none none")
    assert all(len(line) <= 100 for line in lines)
    assert " ".join(line[len(lines[0]) - 3 :].strip() for line in lines[1:]) == reason.strip()


@pytest.mark.parametrize(
    ("total", "said"),
    [
        (1.0, "2 ranks are no faster"),
        (1.004, "2 ranks are no faster"),
        (0.997, "2 ranks are no faster"),
        (0.5, "2 ranks are 2.00 times as fast"),
        (1.02, "2 ranks are 1.02 times as slow"),
        (4.0, "2 ranks are 4.00 times as slow"),
    ],
)
def test_times_that_are_predicted(total: float, said: str) -> None:
    predicted = {"total": total, "compute": total, "communication": 0.0, "one_rank": 1.0}
    *_, line = plan_text._predicted_lines(predicted, 2, differ=False)
    assert line == f"unsplit: 1000.000 ms; {said}"
