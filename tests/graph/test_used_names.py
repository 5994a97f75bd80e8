"""The compiler's names give way to those of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import GraphProto, helper, numpy_helper
from tiny_models import agree, write

import onnxpar
from onnxpar.base.names import Names
from onnxpar.graph.checker import newest_opset
from onnxpar.graph.stored import nodes_of
from onnxpar.load.load import load
from onnxpar.training import grad

RANDOM = np.random.default_rng(3)
HEADER = '<ir_version: 10, opset_import: ["" : 21]> m '
COLUMNS: Mapping[str, Any] = {"mesh": {"tp": 2}, "tensors": {"x": [None, "tp"]}}


def floats(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


def parsed(text: str, weights: Mapping[str, Any]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(HEADER + text)
    proto.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return proto


def tensor_names(graph: GraphProto) -> set[str]:
    """All names of tensors, at any depth."""
    nodes = [name for node in nodes_of(graph) for name in (*node.input, *node.output)]
    return {*nodes, *(t.name for t in (*graph.input, *graph.output, *graph.initializer))} - {""}


def made_names(path: Path, ranks: Path, **options: Any) -> list[str]:
    """The names in the files of the ranks that the model does not have."""
    onnxpar.shard(path, ranks, **options)
    files = [onnx.load(f, load_external_data=False) for f in sorted(ranks.glob("rank_*.onnx"))]
    made: set[str] = set().union(*(tensor_names(f.graph) for f in files))
    return sorted(made - tensor_names(onnx.load(path).graph))


def with_own(proto: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """The model with further tensors of these names: in turn a result, a weight and an input."""
    own = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = own.graph
    for i, name in enumerate(names):
        if i % 3 == 0:
            graph.node.append(helper.make_node("Neg", ["more"], [name]))
        elif i % 3 == 1:
            graph.initializer.append(numpy_helper.from_array(floats(4, 6), name))
        else:
            graph.input.append(helper.make_tensor_value_info(name, 1, [4, 6]))
    graph.input.append(helper.make_tensor_value_info("more", 1, [4, 6]))
    graph.node.append(helper.make_node("Sum", ["more", *names], ["others"]))
    graph.output.append(helper.make_tensor_value_info("others", 1, [4, 6]))
    return own


MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "a collective": ("(float[5,7] x) => (float[5,3] y) { y = MatMul (x, w) }", {"w": floats(7, 3)}),
    "a lowered op": ("(float[5,7] x) => (float[5,7] y) { y = Softmax <axis = 1> (x) }", {}),
    "several results": (
        "(float[5,7] x) => (float[5,3] y, int64[5,3] z) { y, z = TopK <axis = 1> (x, k) }",
        {"k": np.array([3])},
    ),
    "a shared vector": (
        "(float[5,8] x) => (float[5,8] y) { a = Add (x, b) y = Mul (a, b) }",
        {"b": floats(8)},
    ),
    "a sequence": (
        "(float[5,7] x) => (float[2,7] y) { s = SplitToSequence <axis = 0> (x, by) "
        "y = SequenceAt (s, i) }",
        {"by": np.array([2, 3]), "i": np.array(0)},
    ),
    "a scan along other axes": (
        "(float[5,3,7] v, float[5,7] x) => (float[5,7] s, float[5,7,3] y) { s, y = Scan "
        "<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1], body = b "
        "(float[5,7] st, float[5,7] e) => (float[5,7] st2, float[5,7] o) { st2 = Add (st, e) "
        "o = Softmax <axis = 1> (st2) }> (x, v) }",
        {},
    ),
    "a quantized unit": (
        "(float[5,7] x) => (float[5,7] y) { c = Relu (x) q = QuantizeLinear (c, s) "
        "y = DequantizeLinear (q, s) }",
        {"s": np.float32(0.3)},
    ),
}


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_tensors_may_have_the_names_that_an_earlier_run_made(
    name: str, turn: int, tmp_path: Path
) -> None:
    proto = parsed(*MODELS[name])
    made = made_names(write(proto, tmp_path), tmp_path / "m.par", strategy=COLUMNS)
    own = made[turn:] + made[:turn]
    renamed = with_own(proto, own)
    feeds = {
        port.name: floats(*(d.dim_value for d in port.type.tensor_type.shape.dim))
        for port in renamed.graph.input
    }
    agree(renamed, tmp_path, feeds, strategy=COLUMNS)


@pytest.mark.parametrize(
    ("made", "body"),
    [
        ("h::Gemm1", 'h = com.microsoft.FusedGemm <activation = "Relu"> (x, w)'),
        ("h::sigmoid", "v = Neg (x) h = SwiGLU (x, v)"),
        ("h::swish", "v = Neg (x) h = SwiGLU (x, v)"),
    ],
)
def test_rewrites_of_the_loader_leave_other_names_alone(
    made: str, body: str, tmp_path: Path
) -> None:
    text = f'(float[5,8] x) => (float[5,8] y, float[5,8] z) {{ "{made}" = Exp (x) {body} '
    text += f'y = Neg (h) z = Relu ("{made}") }}'
    opset = 28 if "SwiGLU" in body else 21
    if opset > newest_opset():
        pytest.skip(f"opset {opset} is not installed")
    proto = parsed(text, {"w": floats(8, 8)})
    proto.opset_import[0].version = opset
    proto.opset_import.add(domain="com.microsoft", version=1)
    graph = load(write(proto, tmp_path)).graph
    assert [n.op for n in graph.nodes if n.outputs[0].name == made] == ["Exp"]
    assert len({t.name for n in graph.nodes for t in n.outputs}) == len(graph.nodes)


def test_a_weight_in_two_layouts_leaves_other_names_alone(tmp_path: Path) -> None:
    proto = parsed(
        "(float[5,8] x, float[5,8] v) => (float[5,8] y, float[5,8] z, float[5,8] q) "
        '{ y = MatMul (x, w) z = MatMul (v, w) q = MatMul (v, "w@1") }',
        {"w": floats(8, 8), "w@1": floats(8, 8)},
    )
    for node in proto.graph.node:
        node.name = f"make_{node.output[0]}"
    shard = {"make_y": [[1, 2], [2, 1]], "make_z": [[1, 1], [1, 2]]}
    strategy = {"mesh": {"tp": 2}, "shard": shard}
    agree(proto, tmp_path, {"x": floats(5, 8), "v": floats(5, 8)}, strategy=strategy)


def test_a_weight_may_be_gathered_and_stored_in_another_layout(tmp_path: Path) -> None:
    proto = parsed(
        "(float[5,7] x) => (uint8[5,7] y, float[5,7] z) { y = QuantizeLinear <axis = 1, "
        "block_size = 3> (x, s, zp) z = DequantizeLinear <axis = 1, block_size = 3> (y, s, zp) }",
        {"s": np.abs(floats(5, 3)) + 0.1, "zp": RANDOM.integers(0, 9, (5, 3)).astype(np.uint8)},
    )
    strategy = {"mesh": {"tp": 2}, "tensors": {"s": [None, "tp"]}}
    agree(proto, tmp_path, {"x": floats(5, 7)}, strategy=strategy)


@pytest.mark.parametrize("name", ["onnxpar.sizes", "onnxpar.sizes.Mul3"])
def test_names_of_sizes_are_refused_where_sizes_are_open(name: str, tmp_path: Path) -> None:
    body = f'"{name}" = Relu (x) y = Neg ("{name}")'
    proto = parsed(f"(float[B,8] x) => (float[B,8] y) {{ {body} }}", {})
    path = write(proto, tmp_path)
    with pytest.raises(onnxpar.ModelError, match=r"name begins with 'onnxpar\.sizes'"):
        onnxpar.shard(path, tmp_path / "m.par", devices=2, preset="data-parallel")
    agree(proto, tmp_path, {"x": floats(6, 8)}, dims={"B": 6})


@pytest.mark.parametrize("name", ["Tanh_b.grad/Mul.5", "loss/constant.3", "update/w/Mul.1"])
def test_names_of_a_training_step_are_refused(name: str, tmp_path: Path) -> None:
    text = f'{{ a = MatMul (x, w) "{name}" = Neg (a) b = Tanh ("{name}") y = Mul (b, b) }}'
    path = write(parsed(f"(float[5,7] x) => (float[5,3] y) {text}", {"w": floats(7, 3)}), tmp_path)
    with pytest.raises(onnxpar.ModelError, match=f"tensor '{re.escape(name)}': .*rename"):
        grad(path, tmp_path / "step.onnx", loss="mse", optimizer="sgd")


def test_free_names() -> None:
    names = Names(["a", "a_", "b::c", "d/e"])
    assert [names.free(n) for n in "abde"] == ["a__", "b_", "d", "e"]
    assert [names.root(n, "/") for n in "abde"] == ["a", "b", "d_", "e"]


def test_branches_may_have_equal_names(tmp_path: Path) -> None:
    text = """(float[5,7] x, bool c) => (float[5,7] y) { y = If (c) <
        then_branch = g () => (float[5,7] b) { a = Neg (x) b = Exp (a) },
        else_branch = h () => (float[5,7] b) { a = Abs (x) b = Sqrt (a) }> }"""
    feeds = {"x": floats(5, 7), "c": np.array(True)}
    agree(parsed(text, {}), tmp_path, feeds, strategy=COLUMNS)
