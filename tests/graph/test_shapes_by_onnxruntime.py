"""Shapes of ops that only onnxruntime knows, and what its optimizer writes, are understood."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_agrees, options, run_ranks, run_unsplit
from onnx import TensorProto, helper

from onnxpar.graph.shapes_by_onnxruntime import RuntimeShapes
from onnxpar.load.load import load
from onnxpar.planner import sharder

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
F, I32 = TensorProto.FLOAT, TensorProto.INT32


def ask(
    op: str, operands: list[tuple[int, list[int | str]]], **attrs: object
) -> list[list[object]]:
    """The shapes of an op's results; those after a `;` in its name are of domain ''."""
    asked = RuntimeShapes([helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], 8)
    outputs = [f"y{i}" for i in range(int(attrs.pop("outputs", 1)))]  # type: ignore[call-overload]
    domain = "" if op == "SimplifiedLayerNormalization" else "com.microsoft"
    names = [f"x{i}" for i in range(len(operands))]
    node = helper.make_node(op, names, outputs, domain=domain, **attrs)
    types = {n: helper.make_tensor_type_proto(*o) for n, o in zip(names, operands, strict=True)}
    found = asked.infer(node, types, {})
    return [
        [d.dim_param or d.dim_value or None for d in found[o].tensor_type.shape.dim]
        for o in outputs
        if o in found
    ]


CACHE = (F, [2, 2, 4, 8])
GQA = [*[(F, [2, 1, w]) for w in (32, 16, 16)], CACHE, CACHE, (I32, [2]), (I32, [])]


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "wanted"),
    [
        (
            "FusedConv",
            [(F, [2, 3, 8, 8]), (F, [6, 3, 3, 3])],
            {"activation": "Relu"},
            [[2, 6, 6, 6]],
        ),
        ("FusedConv", [(F, ["n", 3, 8, 8]), (F, [6, 3, 3, 3])], {}, [["n", 6, 6, 6]]),
        (
            "SimplifiedLayerNormalization",
            [(F, [2, "seq", 8]), (F, [8])],
            {"outputs": 2},
            [[2, "seq", 8], [2, "seq", 1]],
        ),
        ("Inverse", [(F, [2, 3, 3])], {}, [[2, 3, 3]]),
        ("NhwcConv", [(F, [2, 8, 8, 3]), (F, [6, 3, 3, 3])], {}, []),
        (
            "GroupQueryAttention",
            GQA,
            {"num_heads": 4, "kv_num_heads": 2, "outputs": 3},
            [[2, 1, 32], [2, 2, None, 8], [2, 2, None, 8]],
        ),
    ],
)
def test_shapes(
    op: str,
    operands: list[tuple[int, list[int | str]]],
    attrs: Mapping[str, object],
    wanted: object,
) -> None:
    assert ask(op, operands, **attrs) == wanted


def test_one_run_tells_what_inference_does_not() -> None:
    table, places = (F, [2, 4, 6]), (TensorProto.INT64, [3, 1])
    assert ask("UnfoldTensor", [table], size=2, step=2) == [[2, 4, 3, 2]]
    assert ask("NGramRepeatBlock", [places, (F, [3, 5])], ngram_size=2) == [[3, 5]]


OF_VALUES = {
    "float[n] t": "r = Reshape(x, flat) t, i, c = com.microsoft.Unique(r)",
    "int32[2,n] t": "t = com.microsoft.DynamicTimeWarping(x)",
    "string[4,n] t": """t = com.microsoft.Tokenizer<mark = 0, pad_value = "-",
        separators = [" "], mincharnum = 1>(words)""",
}


@pytest.mark.parametrize("result", OF_VALUES)
def test_sizes_that_depend_on_values_of_any_type(result: str, tmp_path: Path) -> None:
    text = f"""g (float[5,4] x, string[4] words) => ({result}, int64 y, float[5,4] z)
    <int64[1] flat = {{-1}}> {{ {OF_VALUES[result]} s = Size(t) y = Neg(s) z = Relu(x) }}"""
    path, par = tmp_path / "m.onnx", tmp_path / "m.par"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    sharder.shard(path, par, options("tp=2", strategy={"tensors": {"x": ["tp", None]}}))
    rows = [[1, 2, 1, 5], [3, 5, 1, 2], [2, 2, 5, 3], [5, 1, 4, 2], [4, 3, 1, 1]]
    feeds = {"x": np.float32(rows), "words": np.array(["a b c", "d", "", "e f"], object)}
    for found, wanted in zip(run_ranks(par, feeds), run_unsplit(path, feeds), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_an_op_of_the_runtime_in_the_standard_domain(tmp_path: Path) -> None:
    text = """g (float[4,6] x, float[6] w) => (float[4,6] y)
    { h = SimplifiedLayerNormalization<axis = -1, epsilon = 0.00001>(x, w)  y = Relu(h) }"""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    assert load(path).graph.tensors()["h"].shape == [4, 6]
    check_agrees(path, tmp_path, options("data-parallel 3"))


def test_constants_that_the_runtime_names_itself(tmp_path: Path) -> None:
    """Its optimizer adds `gemm_input_shape` though a file that it wrote has one already."""
    text = """g (float[4,3,6] x, float[6,5] v, float[5] b) => (float[4,3,5] y)
    <int64[2] gemm_input_shape = {12, 6}, int64[3] gemm_output_shape = {4, 3, 5}>
    { f = Reshape(x, gemm_input_shape)  g = Gemm(f, v, b)  y = Reshape(g, gemm_output_shape) }"""
    path = tmp_path / "m.onnx"
    model = onnx.parser.parse_model(HEAD + text)
    onnx.save(model, path)
    names = {t.name for t in load(path).graph.tensors().values()}
    assert not {"gemm_input_shape", "gemm_output_shape"} & names
    check_agrees(path, tmp_path, options("data-parallel 2"))


def test_quantized_weights_are_not_folded(tmp_path: Path) -> None:
    """The runtime computes with integers where it sees DequantizeLinear beside an op."""
    text = """g (float[4,6] x) => (float[4,6] y)
    <int32[6] q = {1, -2, 3, 40, 5, 6}, float s = {0.5}, int32 z = {0}>
    { b = DequantizeLinear(q, s, z)  y = Add(x, b) }"""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(HEAD.replace("17", "20") + text), path)
    assert [n.op for n in load(path).graph.nodes] == ["DequantizeLinear", "Add"]
    check_agrees(path, tmp_path, options("tensor-parallel 2"))
