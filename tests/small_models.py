"""Small models as ONNX text, each with a way to split it that needs some part of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from agreement import check_agrees, options
from onnx import numpy_helper

from onnxpar.compiler.plan import Plan

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'


@dataclass(frozen=True)
class Small:
    """A model and how it is split; inputs of which the name starts with `w` become weights."""

    text: str
    layout: str
    shard: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    # 9 hidden units over 2 ranks: columns, then rows, and a bias that counts once
    "mlp": Small(
        """mlp (float[5,6] x, float[6,9] w1, float[9] w2, float[9,6] w3, float[6] w4)
        => (float[5,6] y) { h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }""",
        "tp=2",
        {"Gemm_h": [[1, 1], [1, 2]]},
    ),
    # a pending sum that a nonlinear op reads
    "gate": Small(
        """gate (float[4,6] x, float[6,4] w) => (float[4,4] y)
        { h = MatMul(x, w)  y = Relu(h) }""",
        "tp=2",
        {"MatMul_h": [[None, "tp"], ["tp", None]]},
    ),
    # two sums that meet, and what is whole beside them
    "residual": Small(
        """residual (float[4,6] x, float[6,4] w1, float[6,4] w2, float[4,4] z) => (float[4,4] y)
        { a = MatMul(x, w1)  b = MatMul(x, w2)  c = Add(a, z)  y = Add(c, b) }""",
        "dp=2,tp=2",
        {"MatMul_a": [["dp", "tp"], ["tp", None]], "MatMul_b": [["dp", "tp"], ["tp", None]]},
    ),
    # a reduce-scatter over groups of 2, rows already split
    "scatter": Small(
        """scatter (float[5,6] x, float[6,8] w) => (float[5,8] y)
        { h = MatMul(x, w)  y = Relu(h) }""",
        "a=2,b=2",
        {"MatMul_h": [["a", "b"], ["b", None]], "Relu_y": [[["a", "b"], None]]},
    ),
    # rows to columns, both uneven
    "swap": Small(
        "swap (float[5,7] x) => (float[5,7] y) { h = Relu(x)  y = Sigmoid(h) }",
        "tp=3",
        {"Relu_h": [["tp", None]], "Sigmoid_y": [[None, "tp"]]},
    ),
    # the shards of a grid change ranks, uneven ones among them
    "axes change places": Small(
        "places (float[5,7] x) => (float[5,7] y) { h = Relu(x)  y = Sigmoid(h) }",
        "a=2,b=2,c=2",
        {"Relu_h": [[["a", "c"], "b"]], "Sigmoid_y": [[["b", "c"], "a"]]},
    ),
    # columns to whole
    "gather": Small(
        """gather (float[4,7] x) => (float[4,7] y) <int64[4] n = {7, 3, 6, 1}>
        { h = Relu(x)  y = ReverseSequence<batch_axis = 0, time_axis = 1>(h, n) }""",
        "tp=2",
        {"Relu_h": [[None, "tp"]]},
    ),
    # whole to columns
    "slice": Small(
        """slice (float[4,7] x) => (float[4,7] y) <int64[4] n = {7, 3, 6, 1}>
        { h = ReverseSequence<batch_axis = 0, time_axis = 1>(x, n)  y = Relu(h) }""",
        "tp=3",
        {"Relu_y": [[None, "tp"]], "ReverseSequence_h": [[None, None]]},
    ),
    "table": Small(
        """table (int64[6] i, float[7,2] w) => (float[6,2] y) { h = Gather(w, i)  y = Relu(h) }""",
        "tp=3",
        {"Gather_h": [["tp", None]]},
    ),
    # 5 heads over 2
    "heads": Small(
        """heads (float[2,3,15] x, float[15,15] w1, float[15,15] w2, float[15,15] w3)
        => (float[2,3,15] y)
        <int64[4] cut = {0, 0, 5, 3}, int64[3] join = {0, 0, -1}>
        { a = MatMul(x, w1)  b = Reshape(a, cut)  q = Transpose<perm = [0, 2, 1, 3]>(b)
          c = MatMul(x, w2)  d = Reshape(c, cut)  k = Transpose<perm = [0, 2, 3, 1]>(d)
          s = MatMul(q, k)  p = Softmax(s)  o = MatMul(p, q)
          t = Transpose<perm = [0, 2, 1, 3]>(o)  r = Reshape(t, join)  y = MatMul(r, w3) }""",
        "tensor-parallel 2",
    ),
    # q, k and v in one weight
    "fused": Small(
        """fused (float[2,6] x, float[6,10] w) => (float[2,5] y)
        { h = MatMul(x, w)  a, b = Split<axis = 1, num_outputs = 2>(h)  y = Mul(a, b) }""",
        "tp=2",
        {"Mul_y": [[None, "tp"], [None, "tp"]]},
    ),
    "mean": Small(
        """mean (float[5,4] x) => (float[4] y)
        <int64[1] axes = {0}> { h = Relu(x)  y = ReduceMean<keepdims = 0>(h, axes) }""",
        "tp=2",
        {"Relu_h": [["tp", None]]},
    ),
    # a maximum of negative numbers
    "peak": Small(
        """peak (float[5,4] x) => (float[4] y)
        <int64[1] axes = {0}, float eight = {8.0}>
        { h = Sub(x, eight)  y = ReduceMax<keepdims = 0>(h, axes) }""",
        "tp=2",
        {"Sub_h": [["tp", None]]},
    ),
    "groups": Small(
        """groups (float[1,8,5,5] x, float[8,2,3,3] w) => (float[1,8,3,3] y)
        { h = Relu(x)  y = Conv<group = 4>(h, w) }""",
        "tp=2",
        {"Relu_h": [[None, "tp", None, None]]},
    ),
    "turned": Small(
        """turned (float[4,4,2] x) => (float[4,2,4] y)
        { h = Relu(x)  t = Transpose<perm = [1, 2, 0]>(h)  y = Sigmoid(t) }""",
        "tp=2",
        {"Relu_h": [["tp", None, None]]},
    ),
    # two layouts of one tensor
    "readers": Small(
        """readers (float[6,6] x) => (float[6,6] y, float[6,6] z)
        <int64[6] n = {6, 3, 6, 1, 2, 5}>
        { h = Relu(x)  y = Sigmoid(h)
          z = ReverseSequence<batch_axis = 0, time_axis = 1>(h, n) }""",
        "tp=2",
        {"Relu_h": [[None, "tp"]], "Sigmoid_y": [["tp", None]]},
    ),
    # a square matrix: a gather along the wrong axis has a shape that fits
    "square": Small(
        """square (float[4,4] x) => (float[4,4] y) <int64[4] n = {4, 3, 2, 1}>
        { h = Relu(x)  y = ReverseSequence<batch_axis = 0, time_axis = 1>(h, n) }""",
        "tp=2",
        {"Relu_h": [[None, "tp"]]},
    ),
    # segments of unlike sizes, both split
    "segments": Small(
        """segments (float[2,10] x) => (float[2,4] y, float[2,6] z)
        <int64[2] sizes = {4, 6}>
        { h = Relu(x)  a, b = Split<axis = 1>(h, sizes)  y = Sigmoid(a)  z = Sigmoid(b) }""",
        "tp=2",
        {"Sigmoid_y": [[None, "tp"]], "Sigmoid_z": [[None, "tp"]]},
    ),
    "cut": Small(
        """cut (float[2,12] x) => (float[2,3,4] y)
        <int64[3] target = {2, 3, 4}> { h = Relu(x)  y = Reshape(h, target) }""",
        "tp=3",
        {"Relu_h": [[None, "tp"]]},
    ),
    # independent collectives
    "deadlock": Small(
        """deadlock (float[4,6] x, float[6,4] w1, float[6,4] w2) => (float[4,4] y, float[4,4] z)
        { a = MatMul(x, w1)  y = Relu(a)  b = MatMul(x, w2)  z = Relu(b) }""",
        "tp=2",
        {"MatMul_a": [[None, "tp"], ["tp", None]]},
    ),
    # a nonlinear op between two sums that could meet
    "bent": Small(
        """bent (float[4,6] x, float[6,4] w1, float[6,4] w2) => (float[4,4] y)
        { a = MatMul(x, w1)  b = MatMul(x, w2)  r = Relu(a)  y = Add(r, b) }""",
        "tp=2",
        {"MatMul_a": [[None, "tp"], ["tp", None]]},
    ),
    "scattered segments": Small(
        """scattered (float[4,6] x, float[6,8] w) => (float[4,4] y)
        { h = MatMul(x, w)  a, b = Split<axis = 1, num_outputs = 2>(h)  y = Mul(a, b) }""",
        "tp=2",
        {"MatMul_h": [[None, "tp"], ["tp", None]], "Mul_y": [[None, "tp"], [None, "tp"]]},
    ),
    "gathered segments": Small(
        """gathered (float[3,4] x, float[3,6] z) => (float[3,10] y) <int64[3] n = {9, 3, 10}>
        { a = Relu(x)  b = Relu(z)  c = Concat<axis = 1>(a, b)
          y = ReverseSequence<batch_axis = 0, time_axis = 1>(c, n) }""",
        "tp=2",
        {"Relu_a": [[None, "tp"]], "Relu_b": [[None, "tp"]], "Concat_c": [[None, "tp"]] * 2},
    ),
    "concat": Small(
        """concat (float[3,4] x, float[3,6] z) => (float[3,10] y)
        { a = Relu(x)  b = Relu(z)  c = Concat<axis = 1>(a, b)  y = Sigmoid(c) }""",
        "tp=2",
        {"Relu_a": [[None, "tp"]], "Relu_b": [[None, "tp"]]},
    ),
}


def write_small(name: str, folder: Path) -> Path:
    """Saves a model of MODELS, its weights drawn by their names."""
    return write_text(HEAD + MODELS[name].text, folder / f"{name}.onnx")


def write_text(text: str, path: Path, letters: str = "w") -> Path:
    """Saves a model from its text. Inputs that begin with one of the letters become weights, drawn
    by their names."""
    model = onnx.parser.parse_model(text)
    for port in [i for i in model.graph.input if i.name[0] in letters]:
        shape = [d.dim_value for d in port.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
        value = np.random.default_rng([*port.name.encode()]).standard_normal(shape)
        model.graph.initializer.append(numpy_helper.from_array(value.astype(dtype), port.name))
        model.graph.input.remove(port)
    onnx.save(model, path)
    return path


def check_small(name: str, folder: Path) -> Plan:
    """Shards and runs a model of MODELS; an AssertionError where it computes something else."""
    small = MODELS[name]
    strategy = {"shard": small.shard} if small.shard else None
    how = options(small.layout, strategy=strategy)
    return check_agrees(write_small(name, folder), folder, how)
