"""Decoders of two layers that keep keys and values, each by another op, and how they are fed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes  # noqa: F401
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
Shape = Sequence[int | str]
VOCABULARY, LAYERS, ROWS = 48, 2, 64
MICROSOFT = "com.microsoft"
ELEMENTS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
}


@dataclass(frozen=True)
class Decoder:
    """A decoder to build. `cache` names the function in CACHES that adds attention; `weights` is
    float32, float16 or int4, of which activations are float32; `length` is that of a cache of fixed
    length, 0 where it grows."""

    cache: str
    weights: str = "float32"
    heads: int = 4
    shared: int = 2
    width: int = 16
    length: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        return self.heads * self.width

    @property
    def dtype(self) -> str:
        return "float16" if self.weights == "float16" else "float32"

    def __str__(self) -> str:
        return "-".join([self.cache, self.weights, *map(str, self.options.values())])


class Builder:
    """Collects the nodes of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.seq: int | str = 1 if decoder.options.get("one") else "seq"
        self.random = np.random.default_rng(7)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, Array] = {}
        self.inputs: dict[str, tuple[str, Shape]] = {}
        self.outputs: dict[str, tuple[str, Shape]] = {}

    def input(self, name: str, dtype: str, shape: Shape) -> str:
        self.inputs[name] = dtype, shape
        return name

    def output(self, name: str, dtype: str, shape: Shape) -> str:
        self.outputs[name] = dtype, shape
        return name

    def constant(self, array: Any, dtype: str = "int64") -> str:
        name = f"c{len(self.stored)}"
        self.stored[name] = np.asarray(array).astype(dtype)
        return name

    def weight(self, *shape: int, dtype: str | None = None) -> str:
        values = self.random.standard_normal(shape) * (0.7 / np.sqrt(shape[0]))
        return self.constant(values, dtype or self.decoder.dtype)

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str] = (), **attrs: Any) -> str:
        results = list(outputs) or [f"{op}_{len(self.nodes)}"]
        made = helper.make_node(op, inputs, results, name=f"{op}_{len(self.nodes)}", **attrs)
        self.nodes.append(made)
        return results[0]

    def product(self, x: str, rows: int, columns: int) -> str:
        """x times a weight, which int4 has in blocks of 16."""
        if self.decoder.weights != "int4":
            return self.add("MatMul", [x, self.weight(rows, columns)])
        if self.decoder.options.get("paired"):
            return self._paired(x, rows, columns)
        codes = self.random.integers(0, 256, (columns, rows // 16, 8))
        scales = self.random.uniform(0.5, 1.5, (columns, rows // 16)) * 0.2 / np.sqrt(rows)
        points = self.random.integers(112, 144, (columns, -(-rows // 32)))
        operands = [x, self.constant(codes, "uint8"), self.constant(scales, "float32")]
        if self.decoder.options.get("points", True):
            operands.append(self.constant(points, "uint8"))
        return self.add(
            "MatMulNBits",
            operands,
            domain=MICROSOFT,
            K=rows,
            N=columns,
            bits=4,
            block_size=16,
            accuracy_level=self.decoder.options.get("level", 4),
        )

    def _paired(self, x: str, rows: int, columns: int) -> str:
        """The same as a weight of int4 and what onnxruntime makes MatMulNBits of."""
        codes = self.random.integers(-8, 8, (rows, columns))
        scales = self.random.uniform(0.5, 1.5, (rows // 16, columns)) * 0.2 / np.sqrt(rows)
        stored = [self.constant(codes, "int4"), self.constant(scales, "float32")]
        weight = self.add("DequantizeLinear", stored, axis=0, block_size=16)
        return self.add("MatMul", [x, weight])

    def model(self) -> onnx.ModelProto:
        opset = self.decoder.options.get("opset", 21)

        def infos(ports: dict[str, tuple[str, Shape]]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(n, ELEMENTS[t], s) for n, (t, s) in ports.items()]

        graph = helper.make_graph(
            self.nodes,
            "decoder",
            infos(self.inputs),
            infos(self.outputs),
            [numpy_helper.from_array(array, name) for name, array in self.stored.items()],
        )
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def build(decoder: Decoder) -> onnx.ModelProto:
    """ids [batch, seq] -> logits [batch, seq, VOCABULARY], with a pair of caches for each layer."""
    b = Builder(decoder)
    ids = b.input("input_ids", "int64", ["batch", b.seq])
    x = b.add("Gather", [b.weight(VOCABULARY, decoder.hidden), ids])
    for layer in range(LAYERS):
        y = CACHES[decoder.cache](b, layer, x)
        x = b.add("Add", [x, b.product(y, decoder.hidden, decoder.hidden)])
    b.output("logits", decoder.dtype, ["batch", b.seq, VOCABULARY])
    b.add("MatMul", [x, b.weight(decoder.hidden, VOCABULARY)], ["logits"])
    return b.model()


def _rotary(b: Builder) -> list[str]:
    angles = np.outer(np.arange(ROWS), 0.7 ** np.arange(b.decoder.width // 2))
    if "cos" not in b.stored:
        b.stored["cos"] = np.cos(angles).astype(b.decoder.dtype)
        b.stored["sin"] = np.sin(angles).astype(b.decoder.dtype)
    return ["cos", "sin"]


def _lengths(b: Builder) -> tuple[str, str]:
    """seqlens_k and total_sequence_length, as onnxruntime-genai makes them of a mask, or fed."""
    how = b.decoder.options.get("lengths", "mask")
    if how != "mask":
        shape: Shape = ["batch", 1] if how == "column" else ["batch"]
        return b.input("seqlens_k", "int32", shape), b.input("total_sequence_length", "int32", [])
    mask = b.input("attention_mask", "int64", ["batch", "total"])
    if "lens" not in {o for n in b.nodes for o in n.output}:
        sums = b.add("ReduceSum", [mask, b.constant([1])], keepdims=0)
        b.add("Cast", [b.add("Sub", [sums, b.constant([1])])], ["lens"], to=TensorProto.INT32)
        size = b.add("Gather", [b.add("Shape", [mask]), b.constant(1)], axis=0)
        b.add("Cast", [size], ["total_length"], to=TensorProto.INT32)
    return "lens", "total_length"


def _ports(
    b: Builder, layer: int, names: Sequence[str], before: Shape, after: Shape
) -> tuple[list[str], list[str]]:
    past = [b.input(f"past_key_values.{layer}.{n}", b.decoder.dtype, before) for n in names]
    return past, [b.output(f"present.{layer}.{n}", b.decoder.dtype, after) for n in names]


def _caches(b: Builder, layer: int, heads: int, width: int | str) -> tuple[list[str], list[str]]:
    """Ports [batch, heads, length, width] of keys and values."""
    length = b.decoder.length
    past, total = (length, length) if length else ("past", "total")
    names = ("key", "value")
    before, after = ["batch", heads, past, width], ["batch", heads, total, width]
    return _ports(b, layer, names, before, after)


def _grouped(b: Builder, layer: int, x: str) -> str:
    d = b.decoder
    own, shared = d.heads * d.width, d.shared * d.width
    if d.options.get("packed", True):
        q, k, v = b.product(x, d.hidden, own + 2 * shared), "", ""
    else:
        q, k, v = (b.product(x, d.hidden, n) for n in (own, shared, shared))
    past, present = _caches(b, layer, d.shared, d.options.get("named", d.width))
    lengths = _lengths(b)
    operands = [q, k, v, *past, *lengths, *_rotary(b)]
    if d.options.get("positions"):
        operands.append(b.input("position_ids", "int64", ["batch", b.seq]))
    result = f"attended_{layer}"
    window = d.options.get("window")
    attrs = {"local_window_size": window} if window else {}
    if window == d.length:  # the oldest positions make room for new ones
        attrs["sliding_window_cache"] = 1
    return b.add(
        "GroupQueryAttention",
        operands,
        [result, *present],
        domain=MICROSOFT,
        num_heads=d.heads,
        kv_num_heads=d.shared,
        do_rotary=1,
        **attrs,
    )


def _heads(b: Builder, x: str, heads: int, form: str = "bnsd") -> str:
    """A projection of x to heads, [batch, seq, heads, width] or with heads before positions."""
    d = b.decoder
    flat = b.product(x, d.hidden, heads * d.width)
    apart = b.add("Reshape", [flat, b.constant([0, 0, heads, d.width])])
    return b.add("Transpose", [apart], perm=[0, 2, 1, 3]) if form == "bnsd" else apart


def _flat(b: Builder, x: str) -> str:
    """[batch, heads, seq, width] as [batch, seq, hidden]."""
    order = b.add("Transpose", [x], perm=[0, 2, 1, 3])
    return b.add("Reshape", [order, b.constant([0, 0, -1])])


def _multi_head(b: Builder, layer: int, x: str) -> str:
    d = b.decoder
    past, present = _caches(b, layer, d.heads, d.options.get("named", d.width))
    operands = [b.product(x, d.hidden, d.hidden) for _ in range(3)]
    return b.add(
        "MultiHeadAttention",
        [*operands, "", "", "", *past],
        [f"attended_{layer}", *present],
        domain=MICROSOFT,
        num_heads=d.heads,
        unidirectional=1,
    )


def _stacked(b: Builder, layer: int, x: str) -> str:
    """onnxruntime's Attention, whose cache has keys and values in one tensor."""
    d = b.decoder
    shape: list[int | str] = ["batch", d.heads]
    before, after = [2, *shape, "past", d.width], [2, *shape, "total", d.width]
    past, present = _ports(b, layer, ["both"], before, after)
    weights = [b.weight(d.hidden, 3 * d.hidden), b.weight(3 * d.hidden)]
    return b.add(
        "Attention",
        [x, *weights, "", *past],
        [f"attended_{layer}", *present],
        domain=MICROSOFT,
        num_heads=d.heads,
        unidirectional=1,
    )


def _masked(b: Builder, layer: int, x: str) -> str:
    """One token at a time, into a cache of fixed length."""
    d = b.decoder
    past, present = _caches(b, layer, d.heads, d.width)
    operands = [b.product(x, d.hidden, d.hidden) for _ in range(3)]
    length = b.input("past_sequence_length", "int32", [1])
    return b.add(
        "DecoderMaskedMultiHeadAttention",
        [*operands, "", "", *past, length],
        [f"attended_{layer}", *present],
        domain=MICROSOFT,
        num_heads=d.heads,
        past_present_share_buffer=1,
    )


def _standard(b: Builder, layer: int, x: str) -> str:
    """ONNX's Attention, of three dimensions or of four."""
    d = b.decoder
    past, present = _caches(b, layer, d.shared, d.width)
    flat = d.options.get("flat", True)
    counts = (d.heads, d.shared, d.shared)
    make = (lambda n: b.product(x, d.hidden, n * d.width)) if flat else (lambda n: _heads(b, x, n))
    attrs = {"q_num_heads": d.heads, "kv_num_heads": d.shared} if flat else {}
    operands = [*map(make, counts), "", *past]
    results = [f"attended_{layer}", *present]
    y = b.add("Attention", operands, results, is_causal=1, **attrs)
    return y if flat else _flat(b, y)


def _scores(b: Builder, q: str, keys: str, values: str, visible: str) -> str:
    """Attention in plain ops; `visible` is 0 where a key is hidden."""
    d = b.decoder
    scale = b.constant(d.width**-0.5, d.dtype)
    turned = b.add("Transpose", [keys], perm=[0, 1, 3, 2])
    scores = b.add("Mul", [b.add("MatMul", [q, turned]), scale])
    hidden = b.constant(-1e4, d.dtype)
    shown = b.add("Softmax", [b.add("Where", [visible, scores, hidden])], axis=-1)
    return _flat(b, b.add("MatMul", [shown, values]))


def _visible(b: Builder, past: str, axis: int) -> str:
    """[seq, keys]: which keys a query sees, by positions: those that are fed, or, where the cache
    grows, those after it."""
    d, zero, one = b.decoder, b.constant(0), b.constant(1)
    if d.length:
        at = b.input("positions", "int64", [b.seq])
        keys = b.constant(np.arange(d.length))
    else:
        before = b.add("Gather", [b.add("Shape", [past]), b.constant(axis)])
        seq = b.add("Gather", [b.add("Shape", ["input_ids"]), one])
        total = b.add("Add", [before, seq])
        at, keys = (b.add("Range", [start, total, one]) for start in (before, zero))
    return b.add("LessOrEqual", [keys, b.add("Unsqueeze", [at, b.constant([1])])])


def _plain(b: Builder, layer: int, x: str) -> str:
    """Concat, or a write in place, by one of many spellings."""
    d, how = b.decoder, b.decoder.options["spelling"]
    q, *new = (_heads(b, x, d.heads) for _ in range(3))
    if how in ("rows first", "behind a transpose"):  # [batch, length, heads, width]
        shape: list[int | str] = [d.heads, d.width]
        before, after = ["batch", "past", *shape], ["batch", "total", *shape]
        past, present = _ports(b, layer, ["key", "value"], before, after)
    else:
        past, present = _caches(b, layer, d.heads, d.width)
    spelled = [_SPELLINGS[how](b, *each) for each in zip(past, new, present, strict=True)]
    axis = 1 if how in ("rows first", "behind a transpose") else 2
    return _scores(b, q, *spelled, _visible(b, past[0], axis))


def _concat(b: Builder, past: str, new: str, present: str) -> str:
    return b.add("Concat", [past, new], [present], axis=2)


def _concat_copied(b: Builder, past: str, new: str, present: str) -> str:
    """As dynamo writes it: copies before, between and after."""
    same = b.add("Identity", [b.add("Cast", [past], to=ELEMENTS[b.decoder.dtype])])
    joined = b.add("Concat", [same, new], axis=-2)
    b.add("Identity", [joined], [present])
    return joined


def _concat_rows(b: Builder, past: str, new: str, present: str) -> str:
    """The cache has positions before heads."""
    rows = b.add("Transpose", [new], perm=[0, 2, 1, 3])
    joined = b.add("Concat", [past, rows], [present], axis=1)
    return b.add("Transpose", [joined], perm=[0, 2, 1, 3])


def _concat_turned(b: Builder, past: str, new: str, present: str) -> str:
    """The same, joined with heads before positions."""
    joined = b.add("Concat", [b.add("Transpose", [past], perm=[0, 2, 1, 3]), new], axis=2)
    b.add("Transpose", [joined], [present], perm=[0, 2, 1, 3])
    return joined


def _scattered(b: Builder, past: str, new: str, present: str) -> str:
    """ScatterND writes positions of a cache that has them first."""
    turned = b.add("Transpose", [past], perm=[2, 0, 1, 3])
    rows = b.add("Transpose", [new], perm=[2, 0, 1, 3])
    at = b.input("positions", "int64", [b.seq])
    joined = b.add("ScatterND", [turned, b.add("Unsqueeze", [at, b.constant([1])]), rows])
    return b.add("Transpose", [joined], [present], perm=[1, 2, 0, 3])


def _scattered_elements(b: Builder, past: str, new: str, present: str) -> str:
    at = b.input("positions", "int64", [b.seq])
    places = b.add("Unsqueeze", [at, b.constant([0, 1, 3])])
    every = b.add("Expand", [places, b.add("Shape", [new])])
    return b.add("ScatterElements", [past, every, new], [present], axis=2)


def _tensor_scatter(b: Builder, past: str, new: str, present: str) -> str:
    at = b.input("write_at", "int64", ["batch"])
    return b.add("TensorScatter", [past, new, at], [present], axis=-2)


def _chosen(b: Builder, past: str, new: str, present: str) -> str:
    """Where writes one token, at a position by comparison."""
    at = b.input("positions", "int64", [b.seq])
    here = b.add("Equal", [b.constant(np.arange(b.decoder.length)), at])
    column = b.add("Unsqueeze", [here, b.constant([0, 1, 3])])
    return b.add("Where", [column, new, past], [present])


_SPELLINGS: dict[str, Callable[[Builder, str, str, str], str]] = {
    "concat": _concat,
    "copies": _concat_copied,
    "rows first": _concat_rows,
    "behind a transpose": _concat_turned,
    "ScatterND": _scattered,
    "ScatterElements": _scattered_elements,
    "TensorScatter": _tensor_scatter,
    "Where": _chosen,
}

CACHES: dict[str, Callable[[Builder, int, str], str]] = {
    "GroupQueryAttention": _grouped,
    "MultiHeadAttention": _multi_head,
    "com.microsoft.Attention": _stacked,
    "DecoderMaskedMultiHeadAttention": _masked,
    "Attention": _standard,
    "plain": _plain,
}


def feeds_of(decoder: Decoder, model: onnx.ModelProto, ids: Array, before: int) -> dict[str, Array]:
    """What a step is fed beside its caches; `before` are the tokens that these hold."""
    batch, seq = ids.shape
    total = before + seq
    every = {
        "input_ids": ids,
        "attention_mask": np.ones((batch, total), np.int64),
        "seqlens_k": np.full(batch, total - 1, np.int32),
        "total_sequence_length": np.array(total, np.int32),
        "position_ids": np.tile(np.arange(before, total), (batch, 1)),
        "past_sequence_length": np.array([before], np.int32),
        "write_at": np.full(batch, before, np.int64),
        "positions": np.arange(before, total),
    }
    if decoder.options.get("lengths") == "column":
        every["seqlens_k"] = every["seqlens_k"][:, None]
    return {i.name: every[i.name] for i in model.graph.input if i.name in every}


def empty_caches(decoder: Decoder, model: onnx.ModelProto, batch: int) -> dict[str, Array]:
    """The caches before the first token: none, or zeros of the fixed length."""
    found = {}
    for port in model.graph.input:
        if port.name.startswith("past_key_values"):
            dims = port.type.tensor_type.shape.dim
            sizes = {"batch": batch, "past": 0, "head_width": decoder.width}
            shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in dims]
            found[port.name] = np.zeros(shape, decoder.dtype)
    return found


def pairs_of(model: onnx.ModelProto) -> dict[str, str]:
    """The caches' inputs and outputs."""
    names = [i.name for i in model.graph.input if i.name.startswith("past_key_values")]
    return {n: n.replace("past_key_values", "present") for n in names}


def with_options(decoder: Decoder, **options: Any) -> Decoder:
    """The same with more options."""
    return replace(decoder, options={**decoder.options, **options})
