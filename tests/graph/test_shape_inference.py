"""Shapes are inferred through what nodes compute, and what is constant is folded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from agreement import check_agrees, options
from onnx import numpy_helper

from onnxpar.graph.infer_model import infer
from onnxpar.load.load import load
from onnxpar.load.loading import LoadRequest

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def inferred(text: str) -> tuple[list[str], dict[str, tuple[int | str, ...]]]:
    """The ops that are left, and the shape of every tensor that they make."""
    model = onnx.parser.parse_model(HEAD + text)
    infer(model)
    ports = [*model.graph.value_info, *model.graph.output]
    shapes = {
        p.name: tuple(d.dim_param or d.dim_value for d in p.type.tensor_type.shape.dim)
        for p in ports
    }
    return [node.op_type for node in model.graph.node], shapes


def test_targets_computed_from_shapes_are_constants() -> None:
    ops, shapes = inferred(
        """g (float[4,6,8] x) => (float[a,b] y)
        <int64[1] zero = {0}, int64[1] rest = {-1}>
        { s = Shape(x)  n = Gather(s, zero)  t = Concat<axis = 0>(n, rest)  y = Reshape(x, t) }"""
    )
    assert ops == ["Reshape"]
    assert shapes == {"y": (4, 48)}


@pytest.mark.parametrize(
    ("given", "bins"), [("", 9), ("<onesided = 1>", 9), ("<onesided = 0>", 16)]
)
def test_an_attribute_that_is_not_written(given: str, bins: int) -> None:
    """By default, STFT computes one half of the frequencies of a real signal."""
    _, shapes = inferred(
        f"""g (float[2,64,1] x, float[16] w) => (float[a,b,c,d] y) <int64 step = {{8}}>
        {{ y = STFT{given}(x, step, w) }}"""
    )
    assert shapes == {"y": (2, 7, bins, 2)}


def test_declared_shapes_are_not_trusted() -> None:
    ops, shapes = inferred(
        """g (float[4,6] x) => (float[9,9] y) <float[1,1,1] h> { h = Relu(x)  y = Exp(h) }"""
    )
    assert ops == ["Relu", "Exp"]
    assert shapes == {"h": (4, 6), "y": (4, 6)}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("y = Range(zero, six, two)", [0, 2, 4]),
        ("y = Squeeze(c)", [3, 1, 2]),
        ("y = Cast<to = 7>(f)", [1, -2]),
        ("y = NonZero(c)", [[0, 1, 2]]),
        ("y = Size(x)", 24),
        ("y = Shape<start = 1>(x)", [6]),
    ],
)
def test_folding(line: str, wanted: object) -> None:
    model = onnx.parser.parse_model(
        HEAD
        + f"""g (float[4,6] x) => (int64[n] y, float[4,6] z)
        <int64 zero = {{0}}, int64 six = {{6}}, int64 two = {{2}}, int64[3] c = {{3, 1, 2}},
        float[2] f = {{1.5, -2.5}}> {{ {line}  z = Relu(x) }}"""
    )
    infer(model)
    assert [n.op_type for n in model.graph.node] == ["Relu"]
    (value,) = [numpy_helper.to_array(w) for w in model.graph.initializer if w.name == "y"]
    np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize("op", ["Cos", "Sin", "Tanh", "Exp", "Erf", "Sqrt", "Softmax"])
def test_floats_are_folded_to_the_bits_of_onnxruntime(op: str) -> None:
    """Which are not always those of NumPy."""
    values = np.arange(-400, 400)
    folded, kept = (
        onnx.parser.parse_model(
            HEAD + f"g ({own}) => (float[800] y) {{ f = Cast<to = 1>(c)  y = {op}(f) }}"
        )
        for own in ("", "int64[800] c")
    )
    folded.graph.initializer.append(numpy_helper.from_array(values, "c"))
    infer(folded)
    (found,) = [numpy_helper.to_array(w) for w in folded.graph.initializer if w.name == "y"]
    session = ort.InferenceSession(kept.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(found, session.run(None, {"c": values})[0])


@pytest.mark.parametrize("op", ["RandomNormal<shape = [2, 2]>()", "Dropout(f)"])
def test_what_differs_from_run_to_run_is_not_folded(op: str) -> None:
    ops, _ = inferred(f"g () => (float[n] y) <float[2] f = {{1.0, 2.0}}> {{ y = {op} }}")
    assert ops == [op.partition("<")[0].partition("(")[0]]


def test_a_large_result_is_computed_in_each_run() -> None:
    ops, shapes = inferred(
        """g () => (int64[n, m] y)
        <int64[2] shape = {512, 512}, int64 one = {1}> { y = Expand(one, shape) }"""
    )
    assert ops == ["Expand"] and shapes == {"y": (512, 512)}


def test_constants_are_worth_what_the_runtime_makes_of_them(tmp_path: Path) -> None:
    """onnx's reference counts the channels of LRN by the size of the batch."""
    values = ", ".join(str(v % 7 - 3) for v in range(2 * 6 * 2 * 2))
    text = f"""g (float[2,6,2,2] x) => (float[2,6,2,2] y)
    <float[2,6,2,2] c = {{{values}}}> {{ h = LRN<size = 3, alpha = 0.5>(c)  y = Add(x, h) }}"""
    path = tmp_path / "lrn.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    check_agrees(path, tmp_path, options("data-parallel 2"))


def test_symbols_take_the_sizes_given(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    text = "g (float[batch, 6] x) => (float[batch, 6] y) { y = Relu(x) }"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    model = load(path, LoadRequest(dims={"batch": 5}))
    assert [list(t.shape) for t in [*model.graph.inputs, *model.graph.outputs]] == [[5, 6], [5, 6]]


@pytest.mark.parametrize(("rank", "left"), [("4", ["Relu"]), ("4, 6", ["Neg"])])
def test_a_branch_that_is_always_taken_is_inlined(rank: str, left: list[str]) -> None:
    ops, shapes = inferred(
        f"""g (float[{rank}] x) => (float[{rank}] y)
        <int64[1] one = {{1}}> {{
            s = Shape(x)  d = Shape(s)  p = Equal(d, one)
            y = If(p) <
                then_branch = a () => (float[{rank}] a) {{ a = Relu(x) }},
                else_branch = b () => (float[{rank}] b)
                <float[1] w = {{2}}> {{ n = Neg(x)  b = Identity(n) }}
            >
        }}"""
    )
    assert [op for op in ops if op != "Identity"] == left
    assert shapes["y"] == tuple(int(s) for s in rank.split(","))


def test_a_branch_that_data_decides_stays() -> None:
    ops, _ = inferred(
        """g (float[4] x, bool p) => (float[4] y) {
            y = If(p) <
                then_branch = a () => (float[4] a) { a = Relu(x) },
                else_branch = b () => (float[4] b) { b = Neg(x) }
            >
        }"""
    )
    assert ops == ["If"]
