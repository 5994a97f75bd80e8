"""What a strategy asks for is what the plan does: MindSpore's tuples, axis names, sizes by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from agreement import check_agrees, options
from small_models import write_text

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.compiler.plan import Plan
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.strategy.strategy import Strategy

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'

TWO_MATMULS = """two (float[8,16] x, float[16,12] w, float[12,20] v) => (float[8,20] z)
{ [mm1] y = MatMul(x, w)  [mm2] z = MatMul(y, v) }"""
MATMUL_RELU = """relu (float[16,32] x, float[32,16] w) => (float[16,16] z)
{ [mm] y = MatMul(x, w)  [relu] z = Relu(y) }"""
GEMM = """gemm (float[10,7] x, float[7,9] w, float[9] v) => (float[10,9] z)
{ [fc] y = Gemm(x, w, v)  [act] z = Tanh(y) }"""


def write(text: str, folder: Path) -> Path:
    return write_text(HEAD + text, folder / "model.onnx", "wv")


def check(text: str, folder: Path, mesh: str, strategy: Mapping[str, Any]) -> Plan:
    """Shards as the strategy says, runs, compares; returns the plan."""
    return check_agrees(write(text, folder), folder, options(mesh, strategy=strategy))


def test_mindspore_two_matmuls_cost_one_all_gather(tmp_path: Path) -> None:
    """Z = (X W) V of MindSpore's design page, in Python's tuples."""
    strategy = {"shard": {"mm1": ((4, 1), (1, 1)), "mm2": ((1, 1), (1, 4))}}
    how = Options(devices=4, strategy=Strategy.of(strategy), check_layouts=True)
    plan = check_agrees(write(TWO_MATMULS, tmp_path), tmp_path, how)
    assert [(c.kind, c.tensor, len(c.group)) for c in plan.collectives] == [("AllGather", "y", 4)]
    assert [w.bytes_per_rank for w in plan.weights] == [16 * 12 * 4, 12 * 5 * 4]
    assert layouts(plan) == ["[tp, -]", "[-, tp]"]


def test_mindspore_matmul_and_relu_cost_one_reduce_scatter(tmp_path: Path) -> None:
    """Of MindSpore's tutorial: groups of 4, of 8 ranks."""
    strategy = {"shard": {"mm": ((2, 4), (4, 1)), "relu": ((8, 1),)}}
    how = Options(devices=8, strategy=Strategy.of(strategy), check_layouts=True)
    plan = check_agrees(write(MATMUL_RELU, tmp_path), tmp_path, how)
    (only,) = plan.collectives
    assert (only.kind, only.group, only.groups) == ("ReduceScatter", (0, 1, 2, 3), 2)
    assert only.before.endswith("sum(tp:(2)4)")


def test_rows_to_columns_cost_one_all_to_all(tmp_path: Path) -> None:
    text = "swap (float[6,7] x) => (float[6,7] z) { [a] y = Relu(x)  [b] z = Exp(y) }"
    plan = check(text, tmp_path, "tp=2", {"shard": {"a": [[2, 1]], "b": [[1, 2]]}})
    assert [c.kind for c in plan.collectives] == ["AllToAll"]


def layouts(plan: Plan) -> list[str]:
    """The layouts of all inputs and outputs."""
    ports = [*plan.inputs, *plan.outputs]
    return [p.layout.text(plan.mesh) for p in ports if p.layout is not None]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "entry", "found"),
    [
        ("a=2,b=3", [["a", None], [None, "b"]], ["[a, -]", "[a, b]"]),
        ("a=2,b=3", [[["a", "b"], None], [None, None]], ["[a.b, -]", "[a.b, -]"]),
        ("a=2,b=3", [[["b", "a"], None], [None, None]], ["[b.a, -]", "[b.a, -]"]),
        ("a=2,b=3", [[2, 1], [1, 3]], ["[a, -]", "[a, b]"]),
        ("a=2,b=3", [[6, 1], [1, 1]], ["[a.b, -]", "[a.b, -]"]),
        ("a=4", [[2, 1], [1, 2]], ["[a:(1)2, -]", "[a:(1)2, a:(2)2]"]),
        ("a=3", [[None, "a"], ["a", None]], ["[-, a]", "[-, -]"]),
        ("a=2", [[{"a": [9, 1]}, None], [None, None]], ["[a{9,1}, -]", "[a{9,1}, -]"]),
        ("a=2", [[None, None], [None, {"a": [2, 7]}]], ["[-, -]", "[-, a{2,7}]"]),
        ("a=2", [[None, {"a": [1, 6]}], [None, None]], ["[-, a{1,6}]", "[-, -]"]),
        ("a=2", [["a{9,1}", "-"], ["-", "-"]], ["[a{9,1}, -]", "[a{9,1}, -]"]),
        ("a=4", [["a:(1)2", None], [None, "a:(2)2"]], ["[a:(1)2, -]", "[a:(1)2, a:(2)2]"]),
        ("a=2,b=4", [["a.b:(2)2", None], None], ["[a.b:(2)2, -]", "[a.b:(2)2, -]"]),
        ("a=2", {"n": "a"}, ["[-, -]", "[-, a]"]),
        ("a=2,b=2", {"m": ["a", "b"]}, ["[a.b, -]", "[a.b, -]"]),
    ],
)
def test_entries_of_a_node(mesh: str, entry: Any, found: list[str], tmp_path: Path) -> None:
    plan = check(GEMM, tmp_path, mesh, {"shard": {"fc": entry}})
    assert layouts(plan) == found


def test_sizes_by_hand_are_the_ranks_sizes(tmp_path: Path) -> None:
    plan = check(GEMM, tmp_path, "tp=3", {"tensors": {"z": [None, {"tp": [2, 6, 1]}]}})
    layout = plan.outputs[0].layout
    assert layout is not None
    assert [layout.local_shape(plan.mesh, r) for r in range(3)] == [(10, 2), (10, 6), (10, 1)]
    assert {w.name: w.bytes_per_rank for w in plan.weights} == {"w": 7 * 6 * 4, "v": 6 * 4}


def test_a_node_whose_weight_is_gathered_says_so(tmp_path: Path) -> None:
    text = "mm (float[8,6] x, float[6,4] w) => (float[8,4] y) { [mm] y = MatMul(x, w) }"
    strategy = {"shard": {"mm": [[1, 1], [1, 1]]}, "tensors": {"w": ["tp", None]}}
    plan = check(text, tmp_path, "tp=2", strategy)
    assert [c.kind for c in plan.collectives] == ["AllGather"]
    ((node, reason, size),) = [(w.node, w.reason, w.bytes) for w in plan.whole]
    assert (node, size) == ("mm", 6 * 4 * 4) and reason.endswith("so its operands are gathered")


def test_a_tensor_keeps_the_layout_asked_for(tmp_path: Path) -> None:
    strategy = {"tensors": {"x": [None, "tp"], "y": ["tp", None], "z": [None, "tp"]}}
    plan = check(GEMM, tmp_path, "tp=2", strategy)
    assert [(c.kind, c.after) for c in plan.collectives] == [
        ("ReduceScatter", "[tp, -]"),
        ("AllToAll", "[-, tp]"),
    ]
    assert layouts(plan) == ["[-, tp]", "[-, tp]"]


def test_globs_match_nodes_and_tensors(tmp_path: Path) -> None:
    strategy = {"shard": {"mm*": [["tp", None], [None, None]]}, "tensors": {"[z]": ["tp", None]}}
    plan = check(TWO_MATMULS, tmp_path, "tp=2", strategy)
    assert plan.collectives == []
    assert layouts(plan) == ["[tp, -]", "[tp, -]"]


HEADS = """heads (float[4,6] x, float[6,24] w) => (float[4,2,3,4] z)
{ [mm] y = MatMul(x, w) shape = Constant <value = int64[4] {4, 2, 3, 4}> ()
  [heads] z = Reshape(y, shape) }"""


@pytest.mark.parametrize(
    ("strategy", "weight", "result"),
    [
        ({"shard": {"mm": [None, [None, "tp*3*4"]]}}, "[-, tp]", "[-, tp, -, -]"),
        ({"shard": {"mm": {"n": "(2*3)*tp"}}}, "[-, 6*tp]", "[-, -, -, tp]"),
        ({"shard": {"w": [[None, None], [None, "2*tp*4"]]}}, "[-, 2*tp{8,4}]", "[-, -, tp, -]"),
        ({"tensors": {"w": [None, "2*-*tp"]}}, "[-, 6*tp]", "[-, -, -, tp]"),
        ({"tensors": {"w": [None, "2*3*tp{1,3}"]}}, "[-, 6*tp{1,3}]", "[-, -, -, tp{1,3}]"),
    ],
)
def test_a_dimension_in_pieces(
    strategy: Mapping[str, Any], weight: str, result: str, tmp_path: Path
) -> None:
    plan = check(HEADS, tmp_path, "tp=2", strategy)
    assert {w.name: w.layout_text for w in plan.weights}["w"] == weight
    assert layouts(plan)[1] == result


def test_nodes_are_known_by_what_they_read(tmp_path: Path) -> None:
    strategy = {"shard": {"[wv]": [None, [None, "tp"]]}}
    plan = check(TWO_MATMULS, tmp_path, "tp=2", strategy)
    assert [w.layout_text for w in plan.weights] == ["[-, tp]", "[-, tp]"]
    assert [c.kind for c in plan.collectives] == ["AllGather"]


@pytest.mark.parametrize("mesh", ["a=2,b=1", "b=1"])
@pytest.mark.parametrize("entry", [{"x": ["b", None]}, {"h": [None, "b", None]}, {"y": ["b", 1]}])
def test_an_axis_of_one_rank_splits_nothing(
    mesh: str, entry: Mapping[str, Any], tmp_path: Path
) -> None:
    """Neither a dimension of one element, nor one that Reshape reads as smaller factors."""
    text = """one (float[1,6] x, float[6,5] w) => (float[1,5] y)
        <int64[3] n = {1, 6, 1}, int64[1] a = {2}>
        { h = Reshape(x, n)  t = Tanh(h)  u = Squeeze(t, a)  y = MatMul(u, w) }"""
    check(text, tmp_path, mesh, {"tensors": entry})


def test_what_stays_open_is_data_parallel(tmp_path: Path) -> None:
    strategy = {"tensors": {"w": [None, "tp"]}}
    plan = check(GEMM, tmp_path, "dp=2,tp=3", strategy)
    assert plan.collectives == []
    assert layouts(plan) == ["[dp, -]", "[dp, tp]"]


def test_a_file_and_its_mesh(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("mesh: {dp: 1, tp: 2}\nshard:\n  fc: [[null, null], [null, tp]]\n")
    strategy = Strategy.read(path)
    assert strategy.mesh == Mesh.of([("dp", 1), ("tp", 2)])
    plan, _ = sharder.plan(write(GEMM, tmp_path), Options(strategy=strategy, check_layouts=True))
    assert plan.mesh.size == 2 and layouts(plan) == ["[-, -]", "[-, tp]"]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"shard": {"fcc": [[1, 1]]}}, ["'fcc'", "no node", "'fc'"]),
        ({"tensors": {"q": [1]}}, ["'q'", "no tensor"]),
        ({"shard": {"fc": [["up", 1], [1, 1]]}}, ["'up'", "mesh tp=2"]),
        ({"shard": {"fc": [[1, 1], [1, 16]]}}, ["Gemm 'fc'", "16 shards", "--devices"]),
        ({"shard": {"fc": [[1, 1, 1], [1, 1]]}}, ["Gemm 'fc'", "2 dimensions"]),
        ({"shard": {"fc": [[1, 1]] * 4}}, ["Gemm 'fc'", "3 inputs", "lists 4"]),
        ({"shard": {"fc": "rows"}}, ["Gemm 'fc'", "a list of dimensions"]),
        ({"shard": {"fc": [[{"tp": [4, 4]}, 1]]}}, ["Gemm 'fc'", "[4, 4]", "add up to 10"]),
        ({"shard": {"fc": [[{"tp": [5, 4, 1]}, 1]]}}, ["Gemm 'fc'", "2 numbers"]),
        ({"shard": {"fc": [[{"tp": [11, -1]}, 1]]}}, ["Gemm 'fc'", "is not a split"]),
        ({"shard": {"fc": [[0, 1]]}}, ["Gemm 'fc'"]),
        ({"shard": {"fc": [[1, "tp"], [1, "tp"]]}}, ["Gemm 'fc'", "use each axis once"]),
        ({"tensors": {"x": [1]}}, ["'x'", "2 dimensions"]),
        ({"tensors": {"x": ["tp*5", 1]}}, ["'x'", "'tp*5' does not match", "consists of 10"]),
        ({"tensors": {"x": ["tp*!", 1]}}, ["'x'", "'tp*!'", "read from '!' on"]),
        ({"tensors": {"x": ["tp:(1)3", 1]}}, ["'x'", "not a sub-axis of tp=2"]),
        ({"tensors": {"x": ["t p", 1]}}, ["'x'", "'t p' is not an axis"]),
        ({"shard": {"fc": {"q": "tp"}}}, ["Gemm 'fc'", "no factor 'q'", "m k, k n"]),
        ({"shard": {"fc": {"m": "tp", "n": "tp"}}}, ["Gemm 'fc'", "use each axis once"]),
        (
            {"shard": {"fc": [[1, 1]]}, "sharding": {}},
            ["'sharding'", "use mesh, shard, tensors, place, groups"],
        ),
    ],
)
def test_errors_name_the_place_and_the_remedy(
    strategy: Mapping[str, Any], words: list[str], tmp_path: Path
) -> None:
    model = write(GEMM, tmp_path)
    with pytest.raises(StrategyError) as error:
        sharder.plan(model, options("tp=2", strategy=strategy))
    assert all(word in str(error.value) for word in words), error.value


SHAPED = {
    "axes": ("<int64[2] c = {0, 1}>", "y = ReduceMean(x, c)"),
    "axes of truth values": (
        "<int64[2] c = {0, 1}>",
        "l = Greater(x, x)  m = ReduceMax(l, c)  y = Cast<to = 1>(m)",
    ),
    "shape": ("<int64[2] c = {6, 4}>", "y = Reshape(x, c)"),
    "pads": ("<int64[4] c = {1, 1, 1, 1}>", "y = Pad(x, c)"),
    "repeats": ("<int64[2] c = {2, 2}>", "y = Tile(x, c)"),
    "starts": ("<int64[2] c = {1, 1}, int64[2] e = {3, 3}>", "y = Slice(x, c, e)"),
    "lengths": ("<int64[2] c = {1, 3}>", "y, z = Split<axis = 0>(x, c)"),
    "scales": ("<float[2] c = {2.0, 2.0}>", "y = Resize(x, , c)"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", SHAPED)
def test_a_constant_that_gives_a_shape_may_be_split(name: str, tmp_path: Path) -> None:
    stored, body = SHAPED[name]
    path = write_text(
        f'<ir_version: 9, opset_import: ["" : 20]> g (float[4,6] x) => (float[a,b] y) {stored} '
        f"{{ {body} }}",
        tmp_path / "m.onnx",
    )
    assert onnxpar.check(path, mesh="dp=2", strategy={"tensors": {"c": ["dp"]}}).ok


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([[1, 2], [2, 3]], "input 1 dimension 1: 3 shards, and 2 by the items before, need 6 rank"),
        ([[3, 1]], r"input 0 dimension 0: 3 shards, but 4 ranks \(mesh tp=4\) do not divide"),
        ([[0, 1]], "0 is no number of shards; write 1"),
    ],
)
def test_numbers_of_shards_are_those_that_were_written(entry: Any, message: str) -> None:
    """And the error names the entry, if the node has another name."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    m (float[8, 6] x, float[6, 6] w) => (float[8, 6] y) { y = MatMul(x, w) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.node[0].name = "mm1"
    for name, start in (("mm1", "MatMul 'mm1'"), ("mm*", "entry 'mm.': MatMul 'mm1'")):
        with pytest.raises(StrategyError, match=f"^{start}: .*{message}"):
            onnxpar.plan(proto, devices=4, strategy={"shard": {name: entry}})
