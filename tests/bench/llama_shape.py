"""A Llama-shaped ONNX model of any size with external data, written without holding its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Builder:
    """Collects nodes and streams weights to one external file; `sparse`: zeros that take no
    room."""

    def __init__(self, data: Path, sparse: bool = False) -> None:
        self.data = data.open("wb")
        self.sparse = sparse
        self.location = data.name
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)

    def weight(self, name: str, *shape: int) -> str:
        """A random weight scaled by its fan-in, in blocks of 4 MB."""
        size = int(np.prod(shape))
        offset = -(-self.data.tell() // 4096) * 4096
        self.data.seek(offset)
        block = self.block * np.float32(shape[0] ** -0.5 if len(shape) > 1 else 1)
        for start in range(0, 0 if self.sparse else size, block.size):
            self.data.write(block[: min(block.size, size - start)].tobytes())
        if self.sparse:
            self.data.seek(self.data.truncate(offset + size * 4))
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.location), ("offset", offset), ("length", size * 4)):
            tensor.external_data.add(key=key, value=str(value))
        self.weights.append(tensor)
        return name

    def constant(self, name: str, value: Any, dtype: type = np.int64) -> str:
        """A small constant in the graph."""
        self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        """A node with one result, whose name it returns."""
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attrs))
        return name


def write(
    path: Path,
    *,
    layers: int = 22,
    hidden: int = 2048,
    heads: int = 32,
    kv_heads: int = 4,
    ffn: int = 5632,
    vocab: int = 32000,
    batch: int = 1,
    seq: int = 16,
    sparse: bool = False,
) -> int:
    """Writes `path` and `path.data`; returns the bytes of the weights. The defaults are TinyLlama's
    1.1 billion parameters, 4.4 GB; of `sparse` ones, which are zeros, none are written."""
    b = Builder(path.with_suffix(".onnx.data"), sparse)
    depth = hidden // heads
    x = b.add("Gather", b.weight("embed", vocab, hidden), "input_ids")
    two, eps = b.constant("two", 2.0, np.float32), b.constant("eps", 1e-5, np.float32)
    last = b.constant("last", [-1])
    q_shape = b.constant("q_shape", [batch, seq, kv_heads, heads // kv_heads, depth])
    kv_shape = b.constant("kv_shape", [batch, seq, kv_heads, 1, depth])
    flat = b.constant("flat", [batch, seq, hidden])
    scale = b.constant("scale", depth**-0.5, np.float32)

    def norm(x: str, name: str) -> str:
        mean = b.add("ReduceMean", b.add("Pow", x, two), last)
        x = b.add("Div", x, b.add("Sqrt", b.add("Add", mean, eps)))
        return b.add("Mul", x, b.weight(name, hidden))

    for i in range(layers):
        h = norm(x, f"norm1.{i}")
        q = b.add("Reshape", b.add("MatMul", h, b.weight(f"q.{i}", hidden, hidden)), q_shape)
        k = b.add(
            "Reshape", b.add("MatMul", h, b.weight(f"k.{i}", hidden, kv_heads * depth)), kv_shape
        )
        v = b.add(
            "Reshape", b.add("MatMul", h, b.weight(f"v.{i}", hidden, kv_heads * depth)), kv_shape
        )
        q = b.add("Transpose", q, perm=[0, 2, 3, 1, 4])
        k = b.add("Transpose", k, perm=[0, 2, 3, 4, 1])
        v = b.add("Transpose", v, perm=[0, 2, 3, 1, 4])
        scores = b.add("Softmax", b.add("Mul", b.add("MatMul", q, k), scale), axis=-1)
        out = b.add("Transpose", b.add("MatMul", scores, v), perm=[0, 3, 1, 2, 4])
        out = b.add("Reshape", out, flat)
        x = b.add("Add", x, b.add("MatMul", out, b.weight(f"o.{i}", hidden, hidden)))
        h = norm(x, f"norm2.{i}")
        gate = b.add("MatMul", h, b.weight(f"gate.{i}", hidden, ffn))
        gate = b.add("Mul", gate, b.add("Sigmoid", gate))
        up = b.add("Mul", gate, b.add("MatMul", h, b.weight(f"up.{i}", hidden, ffn)))
        x = b.add("Add", x, b.add("MatMul", up, b.weight(f"down.{i}", ffn, hidden)))
    b.nodes.append(
        helper.make_node(
            "MatMul", [norm(x, "norm"), b.weight("head", hidden, vocab)], ["logits"], "head"
        )
    )
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [batch, seq])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, seq, vocab])
    graph = helper.make_graph(b.nodes, "llama", [ids], [logits], b.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    size = b.data.tell()
    b.data.close()
    return size
