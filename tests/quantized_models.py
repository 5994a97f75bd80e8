"""Models that store their weights as integers, and what onnxruntime makes of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

Array = npt.NDArray[Any]
FLOAT, INT4, INT8, UINT8 = (
    TensorProto.FLOAT,
    TensorProto.INT4,
    TensorProto.INT8,
    TensorProto.UINT8,
)


class Builder:
    """Adds nodes and stored tensors to a model."""

    def __init__(self, signed: bool = False) -> None:
        self.signed = signed
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []

    def add(self, op: str, inputs: list[str], **attrs: Any) -> str:
        """A node with one result."""
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [f"{name}.out"], name, **attrs))
        return f"{name}.out"

    def keep(self, values: Any, dtype: int = FLOAT) -> str:
        """An initializer."""
        array = np.asarray(values)
        name = f"stored_{len(self.stored)}"
        flat = array.ravel().tolist()
        self.stored.append(helper.make_tensor(name, dtype, array.shape, flat))
        return name

    def blocks(self, rows: int, columns: int, block: int = 16, axis: int = 0) -> str:
        """A float weight made of int4 in blocks along an axis."""
        shape = [rows, columns]
        shape[axis] //= block
        codes = self.keep(self.random.integers(-8, 8, (rows, columns)), INT4)
        scales = self.keep(self.random.uniform(0.5, 1.5, shape) * 0.2 / np.sqrt(rows))
        return self.add("DequantizeLinear", [codes, scales], axis=axis, block_size=block)

    def channels(self, rows: int, columns: int, dtype: int = INT8) -> str:
        """A float weight made of int8 with a scale for each column."""
        codes = self.keep(self.random.integers(-100, 100, (rows, columns)), dtype)
        scales = self.keep(self.random.uniform(0.5, 1.5, columns) * 0.02 / np.sqrt(rows))
        points = self.keep(np.zeros(columns, int), dtype)
        return self.add("DequantizeLinear", [codes, scales, points], axis=1)

    def rounded(self, x: str, scale: float = 0.03, point: int = 128) -> str:
        """What is left of a tensor that is quantized with one scale."""
        by = [
            self.keep(scale),
            self.keep(point - 128 * self.signed, INT8 if self.signed else UINT8),
        ]
        return self.add("DequantizeLinear", [self.add("QuantizeLinear", [x, *by]), *by])

    def model(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> onnx.ModelProto:
        """The model; ports are given as shapes, of float32, or as (dtype, shape)."""

        def port(name: str, at: Any) -> onnx.ValueInfoProto:
            dtype, shape = at if isinstance(at, tuple) else (FLOAT, at)
            return helper.make_tensor_value_info(name, dtype, shape)

        self.nodes += [helper.make_node("Identity", [v], [k]) for k, (v, _) in outputs.items()]
        graph = helper.make_graph(
            self.nodes,
            "quantized",
            [port(*each) for each in inputs.items()],
            [port(name, at) for name, (_, at) in outputs.items()],
            self.stored,
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
        made.ir_version = 10
        onnx.checker.check_model(made, full_check=True)
        return made


Made = tuple[str, list[int | str]]
"""A result of a builder, and its shape."""


def int4_mlp(batch: int | str = 1, width: int = 96, inner: int = 192) -> onnx.ModelProto:
    """Two products with weights of int4 in blocks of 16, as genai's `use_qdq` has them."""
    build = Builder()
    hidden = build.add("MatMul", ["x", build.blocks(width, inner)])
    gated = build.add("Mul", [hidden, build.add("Sigmoid", [hidden])])
    y = build.add("Add", ["x", build.add("MatMul", [gated, build.blocks(inner, width)])])
    return build.model({"x": [batch, 4, width]}, {"y": (y, [batch, 4, width])})


def int4_gemm(batch: int | str = 1, width: int = 16, inner: int = 256) -> onnx.ModelProto:
    """Two products of Gemm, the first with a weight of a single block of rows."""
    build = Builder()
    hidden = build.add("Relu", [build.add("Gemm", ["x", build.blocks(width, inner)])])
    y = build.add("Gemm", [hidden, build.blocks(inner, width)])
    return build.model({"x": [batch, width]}, {"y": (y, [batch, width])})


def int4_shared(batch: int | str = 1, width: int = 512) -> onnx.ModelProto:
    """Two layers of one weight, of which the first is best split by columns, the other by rows."""
    build = Builder()
    weight = build.blocks(width, width)
    hidden = build.add("Tanh", [build.add("MatMul", ["x", weight])])
    y = build.add("MatMul", [hidden, weight])
    return build.model({"x": [batch, width]}, {"y": (y, [batch, width])})


def int4_table(batch: int | str = 1, words: int = 1024, width: int = 32) -> onnx.ModelProto:
    """One stored table for the embedding and for the head."""
    build = Builder()
    table = build.blocks(words, width, axis=1)
    x = build.add("Tanh", [build.add("Gather", [table, "ids"])])
    turned = build.add("Transpose", [table], perm=[1, 0])
    logits = build.add("MatMul", [x, turned])
    return build.model(
        {"ids": (TensorProto.INT64, [batch, 4])}, {"logits": (logits, [batch, 4, words])}
    )


def qdq_mlp(
    batch: int | str = 1, width: int = 48, inner: int = 96, op: str = "MatMul", signed: bool = False
) -> onnx.ModelProto:
    """Two layers with activations and weights of int8, QuantizeLinear and DequantizeLinear around
    each product, and a Relu that the first of them makes superfluous."""
    build = Builder(signed)
    x = build.rounded("x")
    hidden = build.add("Relu", [build.add(op, [x, build.channels(width, inner)])])
    hidden = build.rounded(hidden, 0.01, 0)
    y = build.add(op, [hidden, build.channels(inner, width)])
    lead = [batch, 4] if op == "MatMul" else [batch]
    return build.model({"x": [*lead, width]}, {"y": (build.rounded(y, 0.005), [*lead, width])})


def qdq_residual(batch: int | str = 1, width: int = 192, signed: bool = False) -> onnx.ModelProto:
    """A tensor of int8 that three nodes read, of which one adds what the others have made."""
    build = Builder(signed)
    x = build.rounded("x")
    gate = build.rounded(build.add("MatMul", [x, build.channels(width, width)]), 0.01)
    up = build.rounded(build.add("MatMul", [x, build.channels(width, width)]), 0.01)
    both = build.rounded(build.add("Mul", [gate, up]), 0.001)
    down = build.rounded(build.add("MatMul", [both, build.channels(width, width)]), 0.001)
    y = build.rounded(build.add("Add", [x, down]))
    return build.model({"x": [batch, 4, width]}, {"y": (y, [batch, 4, width])})


def qdq_convolutions(batch: int | str = 1, size: int = 12, signed: bool = False) -> onnx.ModelProto:
    """Two convolutions and a sum over an image, of int8."""
    build = Builder(signed)

    def convolve(x: str, columns: int) -> str:
        codes = build.keep(build.random.integers(-100, 100, (columns, 8, 3, 3)), INT8)
        by = [build.keep(np.full(columns, 0.001)), build.keep(np.zeros(columns, int), INT8)]
        weight = build.add("DequantizeLinear", [codes, *by], axis=0)
        return build.add("Conv", [x, weight], pads=[1, 1, 1, 1])

    x = build.rounded("x")
    hidden = build.rounded(build.add("Relu", [convolve(x, 16)]), 0.01, 0)
    back = build.add("Transpose", [hidden], perm=[0, 1, 3, 2])
    again = build.rounded(
        build.add("MaxPool", [build.rounded(back, 0.01, 0)], kernel_shape=[2, 2], strides=[2, 2]),
        0.01,
        0,
    )
    y = build.rounded(build.add("GlobalAveragePool", [again]), 0.01, 0)
    return build.model({"x": [batch, 8, size, size]}, {"y": (y, [batch, 16, 1, 1])})


FUSED = {
    "MatMulNBits",
    "GatherBlockQuantized",
    "QLinearMatMul",
    "QGemm",
    "QLinearConv",
    "QLinearAdd",
    "QLinearMul",
    "QLinearGlobalAveragePool",
    "MatMulIntegerToFloat",
}
"""Ops that onnxruntime makes of DequantizeLinear, QuantizeLinear and the nodes between them."""


def quantized_ops(file: Path) -> Counter[str]:
    """How many nodes of these ops an optimized model has."""
    nodes = onnx.load(file, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes if node.op_type in FUSED)


def optimizing(file: Path) -> ort.SessionOptions:
    """Session options with which onnxruntime writes what it runs to a file."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(file)
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return options
