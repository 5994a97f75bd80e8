"""Cases that break sharding compilers: each against the unsplit model under onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxpar
from onnxpar.report.compare import compare
from onnxpar.runtime.session.threads import ThreadSession

Shape = Sequence[int]
RANDOM = np.random.default_rng(7)


def weight(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.standard_normal(shape).astype(np.float32)


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Shape]],
    outputs: Mapping[str, tuple[int, Shape]],
    weights: Mapping[str, np.ndarray[Any, Any]],
    opset: int = 18,
) -> Path:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, t, list(s)) for n, (t, s) in inputs.items()],
        [helper.make_tensor_value_info(n, t, list(s)) for n, (t, s) in outputs.items()],
        [numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=min(10, 8)
    )
    onnx.save(model, path)
    return path


def agree(model: Path, feeds: Mapping[str, Any], **options: Any) -> onnxpar.Plan:
    """Shards, runs on threads, compares every output; returns the plan."""
    par = model.with_suffix(".par")
    plan = onnxpar.shard(model, par, check_layouts=True, **options)
    with ThreadSession(par) as session:
        report = compare(model, session, feeds)
    assert report.ok, report.text()
    return plan


def kinds(plan: onnxpar.Plan) -> list[str]:
    return [c.kind for c in plan.collectives]


FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = weight(8, 16)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_input_needed_in_two_layouts_is_fed_whole(tmp_path: Path, ranks: int) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "rows"),
        helper.make_node("MatMul", ["x", "v"], ["b"], "inner"),
    ]
    model = write(
        tmp_path / "m.onnx",
        nodes,
        {"x": (FLOAT, (8, 16))},
        {"a": (FLOAT, (8, 12)), "b": (FLOAT, (8, 12))},
        {"w": weight(16, 12), "v": weight(16, 12)},
    )
    strategy = {
        "shard": {"rows": [["tp", None], [None, None]], "inner": [[None, "tp"], ["tp", None]]}
    }
    plan = agree(model, {"x": X}, mesh=f"tp={ranks}", strategy=strategy)
    assert plan.inputs[0].layout is not None and plan.inputs[0].layout.is_whole
    assert kinds(plan) == ["AllReduce"]


def test_one_weight_under_two_layouts(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "columns"),
        helper.make_node("MatMul", ["y", "w"], ["z"], "inner"),
    ]
    model = write(
        tmp_path / "m.onnx",
        nodes,
        {"x": (FLOAT, (8, 16))},
        {"z": (FLOAT, (8, 16))},
        {"w": weight(16, 16)},
    )
    strategy = {"shard": {"columns": [[1, 1], [1, 2]], "inner": [[1, 2], [2, 1]]}}
    plan = agree(model, {"x": X}, devices=2, strategy=strategy)
    assert sorted(w.layout_text for w in plan.weights) == ["[-, tp]", "[tp, -]"]
    assert kinds(plan) == ["AllReduce"]


def test_an_output_that_is_also_consumed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "mm"),
        helper.make_node("Relu", ["y"], ["z"], "relu"),
    ]
    outputs = {"y": (FLOAT, (8, 12)), "z": (FLOAT, (8, 12))}
    model = write(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, (8, 16))}, outputs, {"w": weight(16, 12)}
    )
    plan = agree(model, {"x": X}, devices=2, strategy={"shard": {"mm": [[1, 2], [2, 1]]}})
    assert kinds(plan) == ["AllReduce"]


def test_an_input_passed_straight_through(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["same"], "id"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "mm"),
    ]
    outputs = {"same": (FLOAT, (8, 16)), "y": (FLOAT, (8, 12))}
    model = write(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, (8, 16))}, outputs, {"w": weight(16, 12)}
    )
    plan = agree(model, {"x": X}, devices=2, strategy={"shard": {"mm": [[2, 1], [1, 1]]}})
    assert kinds(plan) == []


def test_a_constant_output(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], "shape"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "mm"),
    ]
    outputs = {"s": (INT, (2,)), "y": (FLOAT, (8, 12))}
    model = write(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, (8, 16))}, outputs, {"w": weight(16, 12)}
    )
    agree(model, {"x": X}, devices=2, strategy={"shard": {"mm": [[2, 1], [1, 1]]}})


@pytest.mark.parametrize("split", [[[2, 1], [1, 1]], [[1, 2], [2, 1]], [[1, 1], [1, 2]]])
def test_a_bias_counts_once(tmp_path: Path, split: list[list[int]]) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], "gemm", alpha=0.5, beta=2.0)]
    weights = {"w": weight(16, 12), "b": weight(12)}
    model = write(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, (8, 16))}, {"y": (FLOAT, (8, 12))}, weights
    )
    agree(model, {"x": X}, devices=2, strategy={"shard": {"gemm": split}})


def test_a_computed_bias_counts_once(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], "gemm")]
    inputs = {"x": (FLOAT, (8, 16)), "b": (FLOAT, (12,))}
    model = write(
        tmp_path / "m.onnx", nodes, inputs, {"y": (FLOAT, (8, 12))}, {"w": weight(16, 12)}
    )
    strategy = {"shard": {"gemm": [[1, 2], [2, 1]]}}
    agree(model, {"x": X, "b": weight(12)}, devices=2, strategy=strategy)


def test_two_sums_that_meet_are_reduced_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "one"),
        helper.make_node("MatMul", ["x", "v"], ["b"], "two"),
        helper.make_node("Add", ["r", "a"], ["c"], "residual"),
        helper.make_node("Add", ["c", "b"], ["d"], "join"),
        helper.make_node("Relu", ["d"], ["y"], "relu"),
    ]
    weights = {"w": weight(16, 16), "v": weight(16, 16)}
    inputs = {"x": (FLOAT, (8, 16)), "r": (FLOAT, (8, 16))}
    model = write(tmp_path / "m.onnx", nodes, inputs, {"y": (FLOAT, (8, 16))}, weights)
    rows = [[1, 3], [3, 1]]
    feeds = {"x": X, "r": weight(8, 16)}
    plan = agree(model, feeds, devices=3, strategy={"shard": {"one": rows, "two": rows}})
    assert kinds(plan) == ["AllReduce"]


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("split", [[[1, 1], [1, 2]], [[2, 1], [1, 1]], [[1, 2], [2, 1]]])
def test_random_subgraphs_read_split_tensors_whole(
    tmp_path: Path, branch: bool, split: list[list[int]]
) -> None:
    def body(name: str, nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
        result = helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, [8, 12])
        return helper.make_graph(nodes, name, [], [result])

    noise = helper.make_node("RandomUniformLike", ["y"], ["n"])
    then = body("then", [noise, helper.make_node("Sub", ["n", "n"], ["t"])])
    other = body("else", [helper.make_node("Softmax", ["y"], ["e"], axis=-1)])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "mm"),
        helper.make_node("If", ["c"], ["z"], "if", then_branch=then, else_branch=other),
    ]
    inputs = {"x": (FLOAT, (8, 16)), "c": (BOOL, ())}
    model = write(
        tmp_path / "m.onnx", nodes, inputs, {"z": (FLOAT, (8, 12))}, {"w": weight(16, 12)}
    )
    plan = agree(
        model, {"x": X, "c": np.array(branch)}, devices=2, strategy={"shard": {"mm": split}}
    )
    assert [w.op for w in plan.whole] == ["If"]
    assert kinds(plan)[-1] == "Broadcast"


def test_random_values_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["n"], "draw"),
        helper.make_node("MatMul", ["n", "w"], ["y"], "split"),
        helper.make_node("MatMul", ["n", "w"], ["z"], "whole"),
        helper.make_node("Sub", ["y", "z"], ["zero"], "difference"),
    ]
    model = write(
        tmp_path / "m.onnx",
        nodes,
        {"x": (FLOAT, (8, 16))},
        {"zero": (FLOAT, (8, 12))},
        {"w": weight(16, 12)},
    )
    par = tmp_path / "m.par"
    strategy = {"shard": {"split": [[1, 3], [3, 1]]}}
    plan = onnxpar.shard(model, par, devices=3, strategy=strategy, check_layouts=True)
    assert kinds(plan)[0] == "Broadcast"
    with ThreadSession(par) as session:
        (zero,) = session.run(None, {"x": X})
    assert np.abs(zero).max() <= 1e-5


@pytest.mark.parametrize("past", [1, 5])
@pytest.mark.parametrize("new", [1, 3])
def test_state_pairs_share_one_layout(tmp_path: Path, past: int, new: int) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["k"], "key"),
        helper.make_node("Concat", ["past", "k"], ["present"], "grow", axis=1),
        helper.make_node("ReduceSum", ["present", "axes"], ["y"], "use", keepdims=0),
    ]
    model = write(
        tmp_path / "m.onnx",
        nodes,
        {"x": (FLOAT, (4, new, 8)), "past": (FLOAT, (4, past, 6))},
        {"present": (FLOAT, (4, past + new, 6)), "y": (FLOAT, (4, 6))},
        {"w": weight(8, 6), "axes": np.array([1])},
    )
    feeds = {"x": weight(4, new, 8), "past": weight(4, past, 6)}
    strategy = {"shard": {"key": [[1, 1, 1], [1, 2]]}}
    plan = agree(model, feeds, devices=2, strategy=strategy)
    assert plan.states == [("past", "present")]
    ports = {p.name: p.layout.text(plan.mesh) for p in plan.inputs + plan.outputs if p.layout}
    assert ports["past"] == ports["present"] == "[-, -, tp]"
    assert kinds(plan) == []


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "mm"),
        helper.make_node("Mul", ["y", "s"], ["z"], "scale"),
        helper.make_node("Concat", ["z", "none"], ["c"], "append", axis=0),
    ]
    inputs = {"x": (FLOAT, (8, 16)), "s": (FLOAT, ()), "none": (FLOAT, (0, 12))}
    model = write(
        tmp_path / "m.onnx", nodes, inputs, {"c": (FLOAT, (8, 12))}, {"w": weight(16, 12)}
    )
    feeds = {"x": X, "s": np.float32(3), "none": np.zeros((0, 12), np.float32)}
    for split in ([[2, 1], [1, 1]], [[1, 2], [2, 1]], [[1, 1], [1, 2]]):
        agree(model, feeds, devices=2, strategy={"shard": {"mm": split}})


def test_sub_axes_that_do_not_divide_go_through_the_whole(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "two"),
        helper.make_node("MatMul", ["y", "v"], ["z"], "three"),
    ]
    weights = {"w": weight(16, 12), "v": weight(12, 9)}
    model = write(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, (8, 16))}, {"z": (FLOAT, (8, 9))}, weights
    )
    strategy = {"shard": {"two": [[2, 1], [1, 3]], "three": [[3, 1], [1, 2]]}}
    agree(model, {"x": X}, devices=6, strategy=strategy)


@pytest.mark.parametrize("index", [7, -8])
def test_an_index_beyond_a_split_table_is_refused(tmp_path: Path, index: int) -> None:
    nodes = [helper.make_node("Gather", ["t", "i"], ["y"], "lookup")]
    model = write(
        tmp_path / "m.onnx",
        nodes,
        {"i": (INT, (4,))},
        {"y": (FLOAT, (4, 5))},
        {"t": weight(7, 5)},
    )
    strategy = {"tensors": {"t": ["tp", None]}}
    agree(model, {"i": np.array([6, -7, 0, -1])}, devices=2, strategy=strategy)
    with (
        ThreadSession(model.with_suffix(".par")) as session,
        pytest.raises(onnxpar.InputError, match=rf"'i': index {index} at \[2\] is out of range"),
    ):
        session.run(None, {"i": np.array([0, 1, index, 2])})


def parsed(path: Path, text: str) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{text}')
    onnx.save(model, path)
    return path


def test_a_result_of_which_data_decides_a_size_is_assembled_from_parts(tmp_path: Path) -> None:
    text = "g (float[4, 6] x, bool[6] c) => (float[4, n] y) { y = Compress<axis = 1>(x, c) }"
    model = parsed(tmp_path / "m.onnx", text)
    feeds = {"x": weight(4, 6), "c": np.array([True, False, True, True, False, False])}
    plan = agree(model, feeds, mesh="x=2", strategy={"tensors": {"x": ["x", None]}})
    assert plan.outputs[0].shape == (4, None)
    assert plan.to_json()["outputs"][0]["layout_text"] == "[x, -]"
    assert not kinds(plan)


@pytest.mark.parametrize("predicate", (True, False))
def test_a_weight_is_read_by_a_branch_and_around_it(tmp_path: Path, predicate: bool) -> None:
    text = """g (float[4, 6] x, bool p) => (float[4, 6] y)
    <float[6] w = {1, 2, 3, 4, 5, 6}> {
        z = Mul(x, w)
        y = If(p) <
            then_branch = a () => (float[4, 6] a) { a = Add(z, w) },
            else_branch = b () => (float[4, 6] b) { b = Sub(z, w) }
        >
    }"""
    model = parsed(tmp_path / "m.onnx", text)
    feeds = {"x": weight(4, 6), "p": np.array(predicate)}
    agree(model, feeds, mesh="x=2", strategy={"tensors": {"x": ["x", None]}})


def test_a_lowered_op_reads_no_external_weights(tmp_path: Path) -> None:
    """Scale and bias of a split normalization lie in a file, far from the working folder."""
    nodes = [helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["y"], "norm")]
    weights = {"scale": weight(512), "bias": weight(512)}
    shapes = {"x": (FLOAT, (4, 512))}, {"y": (FLOAT, (4, 512))}
    model = write(tmp_path / "inline.onnx", nodes, *shapes, weights)
    proto = onnx.load(model)
    outside = tmp_path / "m.onnx"
    onnx.save(proto, outside, save_as_external_data=True, location="m.data", size_threshold=0)
    plan = agree(
        outside, {"x": weight(4, 512)}, devices=2, strategy={"shard": {"norm": [[1, 2], [2], [2]]}}
    )
    assert set(kinds(plan)) == {"AllReduce"}


def test_a_bias_of_zeros_stored_once_joins_no_dimensions(tmp_path: Path) -> None:
    """A residual block whose equal biases an exporter has stored as one."""

    def block(biases: Sequence[str]) -> onnxpar.Plan:
        nodes = []
        at = "x"
        for i, bias in enumerate(biases):
            nodes.append(helper.make_node("MatMul", [at, f"w{i}"], [f"p{i}"], f"mm{i}"))
            nodes.append(helper.make_node("Add", [f"p{i}", bias], [f"b{i}"], f"add{i}"))
            at = f"b{i}"
            if i == 0:
                nodes.append(helper.make_node("Relu", [at], ["r"]))
                at = "r"
        nodes.append(helper.make_node("Add", ["x", at], ["y"], "residual"))
        weights = {f"w{i}": weight(16, 16) for i in range(len(biases))}
        weights |= {bias: np.zeros(16, np.float32) for bias in set(biases)}
        name = tmp_path / f"{'_'.join(biases)}.onnx"
        model = write(name, nodes, {"x": (FLOAT, (8, 16))}, {"y": (FLOAT, (8, 16))}, weights)
        return agree(model, {"x": X}, devices=2, preset="tensor-parallel")

    assert kinds(block(["zero", "zero"])) == kinds(block(["one", "other"])) == ["AllReduce"]
