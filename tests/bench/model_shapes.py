"""Models in their real sizes without their weights: what a search sees of them is shapes alone. The
weights are holes in a sparse file, or random where a model is to run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from bench import llama_shape
from onnx import TensorProto, helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class Shapes(llama_shape.Builder):
    """A model that is written down layer by layer."""

    def __init__(self, path: Path, sparse: bool = True) -> None:
        super().__init__(path.with_suffix(".data"), sparse)
        self.path = path
        self.inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[int], dtype: int = FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def linear(self, x: str, name: str, wide: int, narrow: int) -> str:
        """x [..., wide] @ w [wide, narrow] + b."""
        made = self.add("MatMul", x, self.weight(f"{name}.w", wide, narrow))
        return self.add("Add", made, self.weight(f"{name}.b", narrow))

    def norm(self, x: str, name: str, width: int) -> str:
        scale, bias = self.weight(f"{name}.w", width), self.weight(f"{name}.b", width)
        return self.add("LayerNormalization", x, scale, bias, axis=-1)

    def heads(self, x: str, shape: Sequence[int], perm: Sequence[int]) -> str:
        """[batch, seq, width] as heads."""
        cut = self.constant(f"cut_{x}", shape)
        return self.add("Transpose", self.add("Reshape", x, cut), perm=perm)

    def attend(
        self, q: str, k: str, v: str, batch: int, seq: int, heads: int, width: int, mask: str
    ) -> str:
        """Attention between q, k and v [batch, seq, width]."""
        shape = [batch, seq, heads, width // heads]
        q, v = (self.heads(x, shape, [0, 2, 1, 3]) for x in (q, v))
        k = self.heads(k, shape, [0, 2, 3, 1])
        scale = self.constant(f"scale_{q}", (width // heads) ** -0.5, np.float32)
        scores = self.add("Add", self.add("Mul", self.add("MatMul", q, k), scale), mask)
        out = self.add("MatMul", self.add("Softmax", scores, axis=-1), v)
        out = self.add("Transpose", out, perm=[0, 2, 1, 3])
        return self.add("Reshape", out, self.constant(f"join_{out}", [batch, seq, width]))

    def gelu(self, x: str) -> str:
        return self.add("Gelu", x, approximate="tanh")

    def save(self, result: str, name: str = "model") -> Path:
        """Writes the model; shapes of results are inferred when it is loaded."""
        self.data.close()
        out = helper.make_tensor_value_info(result, FLOAT, None)
        graph = helper.make_graph(self.nodes, name, self.inputs, [out], self.weights)
        opset = [helper.make_opsetid("", 20)]
        self.path.write_bytes(
            helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString()
        )
        return self.path


def gpt2(
    path: Path,
    batch: int,
    seq: int,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
) -> Path:
    """Fused q, k and v, embedding and head tied. The defaults are the smallest GPT-2."""
    b = Shapes(path)
    table = b.weight("wte", vocab, width)
    x = b.add("Gather", table, b.input("input_ids", [batch, seq], INT64))
    x = b.add("Add", x, b.weight("wpe", seq, width))
    mask = b.weight("mask", seq, seq)
    for i in range(layers):
        h = b.linear(b.norm(x, f"norm1.{i}", width), f"qkv.{i}", width, 3 * width)
        parts = [f"{part}.{i}" for part in "qkv"]
        b.nodes.append(helper.make_node("Split", [h], parts, f"split.{i}", axis=2, num_outputs=3))
        h = b.attend(*parts, batch, seq, heads, width, mask)
        x = b.add("Add", x, b.linear(h, f"o.{i}", width, width))
        h = b.linear(b.norm(x, f"norm2.{i}", width), f"up.{i}", width, 4 * width)
        x = b.add("Add", x, b.linear(b.gelu(h), f"down.{i}", 4 * width, width))
    head = b.add("Transpose", table, perm=[1, 0])
    return b.save(b.add("MatMul", b.norm(x, "norm", width), head))


def llama(path: Path, batch: int, seq: int, *, layers: int = 4, kv_heads: int = 8) -> Path:
    """The layers of Llama 3 8B: 32 heads in groups, a gated feed-forward."""
    sizes = {"hidden": 4096, "heads": 32, "kv_heads": kv_heads, "ffn": 14336, "vocab": 128256}
    llama_shape.write(path, layers=layers, batch=batch, seq=seq, sparse=True, **sizes)
    return path


def bert(
    path: Path,
    batch: int,
    seq: int,
    *,
    layers: int = 4,
    width: int = 1024,
    heads: int = 16,
    sparse: bool = True,
) -> Path:
    """Layers of BERT large, normalised behind, with a padding mask, and a classifier."""
    b = Shapes(path, sparse)
    ids = b.input("input_ids", [batch, seq], INT64)
    kinds = b.input("token_type_ids", [batch, seq], INT64)
    x = b.add("Gather", b.weight("words", 30522, width), ids)
    x = b.add("Add", x, b.add("Gather", b.weight("kinds", 2, width), kinds))
    x = b.norm(b.add("Add", x, b.weight("places", seq, width)), "norm", width)
    keep = b.add("Unsqueeze", b.input("mask", [batch, seq]), b.constant("axes", [1, 2]))
    mask = b.add("Log", keep)
    for i in range(layers):
        q, k, v = (b.linear(x, f"{part}.{i}", width, width) for part in "qkv")
        h = b.linear(b.attend(q, k, v, batch, seq, heads, width, mask), f"o.{i}", width, width)
        x = b.norm(b.add("Add", x, h), f"norm1.{i}", width)
        h = b.linear(x, f"up.{i}", width, 4 * width)
        h = b.linear(b.gelu(h), f"down.{i}", 4 * width, width)
        x = b.norm(b.add("Add", x, h), f"norm2.{i}", width)
    first = b.add("Gather", x, b.constant("first", 0), axis=1)
    pooled = b.add("Tanh", b.linear(first, "pooler", width, width))
    return b.save(b.linear(pooled, "classifier", width, 2))


def gshard(
    path: Path,
    batch: int,
    seq: int,
    *,
    layers: int = 3,
    width: int = 1024,
    heads: int = 16,
    experts: int = 64,
) -> Path:
    """Each sequence deals its tokens to experts, two for each token, at most so many to an expert
    (Lepikhin et al., "GShard", 2020); as torch exports it."""
    b = Shapes(path)
    x = b.add("Gather", b.weight("words", 32000, width), b.input("ids", [batch, seq], INT64))
    mask = b.weight("mask", seq, seq)
    for i in range(layers):
        h = b.norm(x, f"norm1.{i}", width)
        q, k, v = (b.linear(h, f"{part}.{i}", width, width) for part in "qkv")
        h = b.attend(q, k, v, batch, seq, heads, width, mask)
        x = b.add("Add", x, b.linear(h, f"o.{i}", width, width))
        h = b.norm(x, f"norm2.{i}", width)
        gates = b.add("MatMul", h, b.weight(f"gate.{i}", width, experts))
        room = max(2 * seq // experts, 1)
        combine = _combine(b, i, b.add("Softmax", gates, axis=-1), experts, room)
        zero = b.constant(f"zero.{i}", 0.0, np.float32)
        dispatch = b.add("Cast", b.add("Greater", combine, zero), to=FLOAT)
        inside = b.add("Einsum", dispatch, h, equation="gsec,gsm->egcm")
        first = b.weight(f"wi.{i}.w", experts, width, 4 * width)
        second = b.weight(f"wo.{i}.w", experts, 4 * width, width)
        hidden = b.gelu(b.add("Einsum", inside, first, equation="egcm,emh->egch"))
        made = b.add("Einsum", hidden, second, equation="egch,ehm->egcm")
        x = b.add("Add", x, b.add("Einsum", combine, made, equation="gsec,egcm->gsm"))
    return b.save(b.add("MatMul", b.norm(x, "norm", width), b.weight("head", width, 32000)))


def _combine(b: Shapes, layer: int, gates: str, experts: int, room: int) -> str:
    """What each token [batch, seq] takes of each place of each expert."""
    one = b.constant(f"one.{layer}", 1.0, np.float32)
    last = b.constant(f"last.{layer}", [-1])
    values = b.constant(f"values.{layer}", [0, 1], np.float32)
    seq_axis = b.constant(f"axis.{layer}", 1)
    limit = b.constant(f"limit.{layer}", room, np.float32)
    depth = b.constant(f"experts.{layer}", experts)
    places = b.constant(f"places.{layer}", room)
    found, taken, before = [], None, None
    for _ in range(2):
        left = gates if taken is None else b.add("Mul", gates, b.add("Sub", one, taken))
        best = b.add("ArgMax", left, axis=-1, keepdims=0)
        chosen = b.add("OneHot", best, depth, values, axis=-1)
        place = b.add("Sub", b.add("CumSum", chosen, seq_axis), chosen)
        if before is not None:
            place = b.add("Add", place, before)
        first = b.constant(f"sum_{chosen}", [1])
        taken, before = chosen, b.add("ReduceSum", chosen, first, keepdims=1)
        fits = b.add("Mul", chosen, b.add("Cast", b.add("Less", place, limit), to=FLOAT))
        weight = b.add("Unsqueeze", b.add("Mul", gates, fits), last)
        number = b.add("ReduceSum", b.add("Mul", place, fits), last, keepdims=0)
        at = b.add("OneHot", b.add("Cast", number, to=INT64), places, values, axis=-1)
        at = b.add("Unsqueeze", at, b.constant(f"expert_{at}", [2]))
        found.append(b.add("Mul", weight, at))
    return b.add("Add", *found)


def mixtral(path: Path, batch: int, seq: int, *, layers: int = 3, experts: int = 8) -> Path:
    """Experts' weights are gathered for each token, as transformers exports small batches."""
    width, heads, hidden = 2048, 16, 4096
    b = Shapes(path)
    x = b.add("Gather", b.weight("words", 32000, width), b.input("ids", [batch, seq], INT64))
    mask = b.weight("mask", seq, seq)
    tokens = batch * seq
    for i in range(layers):
        h = b.norm(x, f"norm1.{i}", width)
        q, k, v = (b.add("MatMul", h, b.weight(f"{part}.{i}", width, width)) for part in "qkv")
        h = b.attend(q, k, v, batch, seq, heads, width, mask)
        x = b.add("Add", x, b.add("MatMul", h, b.weight(f"o.{i}", width, width)))
        h = b.norm(x, f"norm2.{i}", width)
        h = b.add("Reshape", h, b.constant(f"tokens.{i}", [tokens, width]))
        gates = b.add("MatMul", h, b.weight(f"gate.{i}", width, experts))
        names = [f"weights.{i}", f"chosen.{i}"]
        inputs = [b.add("Softmax", gates, axis=-1), b.constant(f"two.{i}", [2])]
        b.nodes.append(helper.make_node("TopK", inputs, names, f"topk.{i}", axis=-1))
        flat = b.constant(f"flat.{i}", [2 * tokens])
        which = b.add("Reshape", names[1], flat)
        twice = b.add("Unsqueeze", h, b.constant(f"pair.{i}", [1]))
        twice = b.add("Expand", twice, b.constant(f"pairs.{i}", [tokens, 2, width]))
        column = b.constant(f"column.{i}", [2 * tokens, width, 1])
        inside = b.add("Reshape", twice, column)
        up = b.add("Gather", b.weight(f"up.{i}", experts, hidden, width), which)
        down = b.add("Gather", b.weight(f"down.{i}", experts, width, hidden), which)
        made = b.add("MatMul", down, b.gelu(b.add("MatMul", up, inside)))
        made = b.add("Reshape", made, b.constant(f"back.{i}", [tokens, 2, width]))
        share = b.add("Unsqueeze", names[0], b.constant(f"share.{i}", [2]))
        made = b.add("ReduceSum", b.add("Mul", made, share), b.constant(f"of.{i}", [1]), keepdims=0)
        made = b.add("Reshape", made, b.constant(f"again.{i}", [batch, seq, width]))
        x = b.add("Add", x, made)
    return b.save(b.add("MatMul", b.norm(x, "norm", width), b.weight("head", width, 32000)))


def dlrm(path: Path, batch: int, lookups: int = 20, *, tables: int = 26, width: int = 128) -> Path:
    """Features and sums over rows of tables of different heights, and products of all pairs of
    those."""
    b = Shapes(path)
    x = b.input("dense", [batch, 13])
    for i, (wide, narrow) in enumerate(((13, 512), (512, 256), (256, width))):
        x = b.add("Relu", b.linear(x, f"bottom.{i}", wide, narrow))
    one, vectors = b.constant("one", [1]), []
    for i in range(tables):
        ids = b.input(f"ids.{i}", [batch, lookups], INT64)
        rows = b.add("Gather", b.weight(f"table.{i}", 1_000_000 // (i + 1), width), ids)
        vectors.append(b.add("Unsqueeze", b.add("ReduceSum", rows, one, keepdims=0), one))
    together = b.add("Concat", b.add("Unsqueeze", x, one), *vectors, axis=1)
    pairs = b.add("MatMul", together, b.add("Transpose", together, perm=[0, 2, 1]))
    count = (tables + 1) ** 2
    pairs = b.add("Reshape", pairs, b.constant("all_pairs", [batch, count]))
    rows_, columns = np.tril_indices(tables + 1, -1)
    below = b.constant("below", rows_ * (tables + 1) + columns)
    x = b.add("Concat", x, b.add("Gather", pairs, below, axis=1), axis=1)
    sizes = (width + len(rows_), 1024, 512)
    for i, (wide, narrow) in enumerate(pairwise(sizes)):
        x = b.add("Relu", b.linear(x, f"top.{i}", wide, narrow))
    return b.save(b.add("Sigmoid", b.linear(x, "click", 512, 1)))


def resnet(path: Path, batch: int) -> Path:
    """ResNet-50 as it is exported for inference: batch-norm is part of the convolutions."""
    b = Shapes(path)

    def conv(x: str, name: str, made: int, read: int, size: int, stride: int = 1) -> str:
        weights = b.weight(f"{name}.w", made, read, size, size), b.weight(f"{name}.b", made)
        return b.add("Conv", x, *weights, strides=[stride] * 2, pads=[size // 2] * 4)

    x = b.add("Relu", conv(b.input("image", [batch, 3, 224, 224]), "stem", 64, 3, 7, 2))
    x = b.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    read = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name, stride = f"{stage}.{block}", 2 if stage and not block else 1
            h = b.add("Relu", conv(x, f"{name}.a", width, read, 1))
            h = b.add("Relu", conv(h, f"{name}.b", width, width, 3, stride))
            h = conv(h, f"{name}.c", 4 * width, width, 1)
            x = x if block else conv(x, f"{name}.d", 4 * width, read, 1, stride)
            x, read = b.add("Relu", b.add("Add", h, x)), 4 * width
    x = b.add("Flatten", b.add("GlobalAveragePool", x))
    return b.save(b.linear(x, "classifier", 2048, 1000))
