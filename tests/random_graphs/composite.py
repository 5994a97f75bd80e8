"""Random ops that are whole computations: attention, recurrence, losses, quantized products."""

from __future__ import annotations

import math

import numpy as np
from random_graphs.builder import Builder, NotHere, Value, makes


@makes("Attention")
def attention(b: Builder, op: str) -> object:
    """Grouped heads, as four dimensions or as three."""
    heads, shared, size = b.choose([(4, 2, 3), (4, 4, 2), (6, 3, 2), (5, 1, 2), (2, 2, 4)])
    batch, seq, past = b.choose([2, 1, 3]), b.choose([3, 4]), b.choose([3, 5])
    if b.coin():
        shapes = [(batch, h, s, size) for h, s in ((heads, seq), (shared, past), (shared, past))]
        operands = [b.fresh(shape) for shape in shapes]
        return b.add(op, operands, 3.0, gain=30.0, rounds=True)
    shapes3 = [(batch, s, h * size) for h, s in ((heads, seq), (shared, past), (shared, past))]
    operands = [b.fresh(shape) for shape in shapes3]
    attrs = {"q_num_heads": heads, "kv_num_heads": shared}
    return b.add(op, operands, 3.0, gain=30.0, rounds=True, **attrs)


@makes("RotaryEmbedding")
def rotary(b: Builder, op: str) -> object:
    """With a table of cosines and sines per position."""
    batch, heads, seq, size = b.choose([2, 1]), b.choose([4, 3]), b.choose([3, 4]), 4
    x = b.fresh((batch, heads, seq, size))
    cos, sin = (b.fresh((8, size // 2)) for _ in range(2))
    ids = b.fresh((batch, seq), "int", 0, 8)
    return b.add(op, [x, cos, sin, ids], 18.0, gain=6.0, kind="float")


@makes("LSTM GRU RNN")
def recurrence(b: Builder, op: str) -> object:
    """One direction, the last state dropped."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    x = b.pick(rank=3, bound=20.0)
    hidden = b.choose([2, 3])
    width = x.shape[-1]
    operands = [x, b.fresh((1, gates * hidden, width)), b.fresh((1, gates * hidden, hidden))]
    if not x.is_exact:
        raise NotHere  # errors grow from step to step
    weight = 3.0  # the largest of fresh values
    steps = sum((weight * hidden) ** k for k in range(x.shape[0]))  # each amplifies what is before
    return b.add(op, operands, 1.0, rounds=True, times=steps, hidden_size=hidden)


@makes("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss")
def loss(b: Builder, op: str) -> object:
    """Per sample, summed, or a mean."""
    batch, classes = b.choose([4, 3, 6]), b.choose([3, 5])
    scores = b.fresh((batch, classes, 2))
    labels = b.fresh((batch, 2), "int", 0, classes)
    reduction = b.choose(["none", "sum", "mean"])
    bound = 10.0 * batch * 2
    return b.add(op, [scores, labels], bound, rounds=True, kind="float", reduction=reduction)


@makes("QuantizeLinear")
def quantize(b: Builder, op: str) -> object:
    """There and back, by powers of two, per tensor or per channel."""
    x = b.pick(rank=(2, 4), bound=60.0, exact=True)
    axis = b.number(0, len(x.shape) - 1)
    shape = (x.shape[axis],) if b.coin() else ()
    scale = b.constant(np.full(shape, 0.5, np.float32))
    zero = b.constant(np.full(shape, 3, np.int8))
    (q,) = b.add(op, [x, scale, zero], 128.0, kind="int8", axis=axis)
    return b.add(
        "DequantizeLinear", [q, scale, zero], x.bound, kind="float", rounds=True, axis=axis
    )


@makes("DequantizeLinear")
def dequantize(b: Builder, op: str) -> object:
    """Of quantized numbers that are fed or stored."""
    x = b.fresh(b.shape(2, 3), "int8", -8, 8)
    scale = b.constant(np.float32(0.25))
    return b.add(op, [x, scale], 2.0, kind="float", rounds=True)


@makes("MatMulInteger")
def integer_product(b: Builder, op: str) -> object:
    """Of quantized numbers with zero points."""
    m, k, n = b.choose([4, 3]), b.choose([6, 4, 5]), b.choose([4, 2])
    x, y = b.fresh((m, k), "uint8", 0, 8), b.fresh((k, n), "uint8", 0, 8)
    points = [b.constant(np.array(2, np.uint8)) for _ in range(b.number(0, 2))]
    (z,) = b.add(op, [x, y, *points], 64.0 * k, kind="int32")
    return b.add("Cast", [z], z.bound, kind="float", to=1)


@makes("MeanVarianceNormalization")
def mean_variance(b: Builder, op: str) -> object:
    """Over one axis; of a small share of it, for it has no epsilon to speak of."""
    x = b.fresh(b.choose([(2, 3, 4, 5), (3, 4, 2, 2)]))
    axes = [0, 2, 3] if b.coin() else [2, 3]
    size = math.sqrt(math.prod(x.shape))
    return b.add(op, [x], size, gain=10.0, rounds=True, axes=axes)


@makes("EyeLike")
def eye(b: Builder, op: str) -> object:
    """Ones at global positions."""
    x = b.pick(rank=2)
    (eye_,) = b.add(op, [Value(x.name, x.shape, x.kind, 1.0)], 1.0)
    return b.add("Add", [x, eye_], x.bound + 1)


@makes("Range")
def range_(b: Builder, op: str) -> object:
    """Positions along the last dimension, from its Shape, added."""
    x = b.pick("int")
    if x.shape[-1] < 2:
        raise NotHere
    (shape,) = b.add("Shape", [Value(x.name, x.shape, x.kind, 8.0)], 8.0, kind="int", start=-1)
    b.values.remove(shape)
    (size,) = b.add("Squeeze", [shape], 8.0)
    if size in b.values:
        b.values.remove(size)
    zero, one = b.constant(np.int64(0)), b.constant(np.int64(1))
    positions = Value(f"t{len(b.nodes)}_0", x.shape[-1:], "int", 8.0)
    b.note(op, [zero, size.name, one], positions)
    return b.add("Add", [x, positions], x.bound + 8)
