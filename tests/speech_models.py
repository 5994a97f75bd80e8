"""A small text-to-speech model whose number of frames depends on its weights, and its quantized
forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    quantize_dynamic,
    quantize_static,
)

Array = npt.NDArray[Any]
WIDTH, HEADS, WORDS = 32, 4, 40


class _Builder:
    """Adds nodes and weights to a model."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> Any:
        """A node; returns the name of its result, or a list of several."""
        name = f"{op}_{len(self.nodes)}"
        made = [f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), made, name, **attrs))
        return made[0] if outputs == 1 else made

    def keep(self, value: Any, dtype: Any = np.float32) -> str:
        """A constant."""
        name = f"constant_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int, fan: int = 1) -> str:
        """A random weight."""
        return self.keep(self.random.standard_normal(shape) / np.sqrt(fan))

    def linear(self, x: str, inner: int, outer: int) -> str:
        """A product with a weight, and a bias."""
        product = self.add("MatMul", x, self.weight(inner, outer, fan=inner))
        return str(self.add("Add", product, self.weight(outer, fan=16)))

    def norm(self, x: str) -> str:
        """A LayerNormalization."""
        ones = self.keep(np.ones(WIDTH))
        return str(self.add("LayerNormalization", x, ones, self.weight(WIDTH, fan=16), axis=-1))

    def convolution(self, x: str, inner: int, outer: int) -> str:
        """A convolution over time of [batch, time, channels]."""
        turned = self.add("Transpose", x, perm=[0, 2, 1])
        kernel, bias = self.weight(outer, inner, 5, fan=5 * inner), self.weight(outer, fan=16)
        made = self.add("Conv", turned, kernel, bias, kernel_shape=[5], pads=[2, 2])
        return str(self.add("Transpose", made, perm=[0, 2, 1]))

    def heads(self, x: str, perm: list[int]) -> str:
        """[batch, time, channels] as heads."""
        shape = self.keep([0, 0, HEADS, WIDTH // HEADS], np.int64)
        return str(self.add("Transpose", self.add("Reshape", x, shape), perm=perm))

    def layer(self, x: str) -> str:
        """A layer of a transformer with convolutions in place of products behind its attention."""
        q, v = (self.heads(self.linear(x, WIDTH, WIDTH), [0, 2, 1, 3]) for _ in range(2))
        k = self.heads(self.linear(x, WIDTH, WIDTH), [0, 2, 3, 1])
        scores = self.add("Mul", self.add("MatMul", q, k), self.keep((WIDTH / HEADS) ** -0.5))
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), v)
        back = self.add("Transpose", mixed, perm=[0, 2, 1, 3])
        flat = self.add("Reshape", back, self.keep([0, 0, WIDTH], np.int64))
        x = self.norm(self.add("Add", x, self.linear(flat, WIDTH, WIDTH)))
        inner = self.add("Relu", self.convolution(x, WIDTH, 2 * WIDTH))
        return self.norm(self.add("Add", x, self.convolution(inner, 2 * WIDTH, WIDTH)))

    def lstm(self, x: str) -> str:
        """An LSTM both ways over [1, time, channels]."""
        half = WIDTH // 2
        turned = self.add("Transpose", x, perm=[1, 0, 2])
        weights = [
            self.weight(2, 4 * half, WIDTH, fan=WIDTH),
            self.weight(2, 4 * half, half, fan=half),
            self.weight(2, 8 * half, fan=64),
        ]
        made = self.add(
            "LSTM", turned, *weights, hidden_size=half, direction="bidirectional"
        )  # [time, 2, 1, half]
        back = self.add("Transpose", made, perm=[2, 0, 1, 3])
        return str(self.add("Reshape", back, self.keep([0, 0, WIDTH], np.int64)))

    def frames(self, x: str, scores: str) -> str:
        """Repeats each row of x [1, time, channels] for as many frames as its score says: the frame
        f shows the row behind as many rows as end at or before f."""
        lengths = self.add("Ceil", self.add("Softplus", scores))  # [1, time, 1]
        flat = self.add("Reshape", lengths, self.keep([-1], np.int64))
        whole = self.add("Cast", flat, to=TensorProto.INT64)
        ends = self.add("CumSum", whole, self.keep(0, np.int64))
        total = self.add("ReduceMax", ends, keepdims=0)
        zero, one = (self.keep(i, np.int64) for i in (0, 1))
        frame = self.add("Unsqueeze", self.add("Range", zero, total, one), self.keep([1], np.int64))
        done = self.add("Cast", self.add("LessOrEqual", ends, frame), to=TensorProto.INT64)
        row = self.add("ReduceSum", done, self.keep([1], np.int64), keepdims=0)
        return str(self.add("Gather", x, row, axis=1))


def text_to_speech(layers: int = 3) -> onnx.ModelProto:
    """Ids of [1, text] become a wave [1, frames, 8]: a transformer, a predictor of durations, a
    regulator of lengths, an LSTM and a decoder of convolutions."""
    build = _Builder()
    x = build.add("Gather", build.weight(WORDS, WIDTH), "ids")
    for _ in range(layers):
        x = build.layer(x)
    hidden = build.norm(build.add("Relu", build.convolution(x, WIDTH, WIDTH)))
    scores = build.add("Mul", build.linear(hidden, WIDTH, 1), build.keep(3.0))
    x = build.lstm(build.frames(x, scores))
    x = build.add("Tanh", build.convolution(x, WIDTH, 2 * WIDTH))
    wave = build.convolution(x, 2 * WIDTH, 8)
    build.nodes.append(helper.make_node("Tanh", [wave], ["wave"]))
    graph = helper.make_graph(
        build.nodes,
        "speech",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "text"])],
        [helper.make_tensor_value_info("wave", TensorProto.FLOAT, [1, "frames", 8])],
        build.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


class _Texts(CalibrationDataReader):
    """A few random texts to calibrate with."""

    def __init__(self) -> None:
        self.feeds = iter([text(11, seed) for seed in range(3)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.feeds, None)


def text(length: int, seed: int) -> dict[str, Array]:
    """A random text."""
    return {"ids": np.random.default_rng(seed).integers(0, WORDS, (1, length))}


def write_speech(form: str, folder: Path) -> Path:
    """Writes the model in one of three forms: `plain`, `dynamic` (int8, with ranges that are found
    in each run) or `qdq` (int8, with ranges that were found before)."""
    plain, path = folder / "plain.onnx", folder / f"{form}.onnx"
    onnx.save(text_to_speech(), plain)
    if form == "dynamic":
        quantize_dynamic(plain, path)
    elif form == "qdq":
        quantize_static(plain, path, _Texts(), QuantFormat.QDQ)
    return path
