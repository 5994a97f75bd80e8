"""Random matrix products, reductions and what else sums over a dimension."""

from __future__ import annotations

import math

import numpy as np
from random_graphs.builder import Builder, NotHere, Value, makes


@makes("MatMul")
def matmul(b: Builder, op: str) -> object:
    """With broadcast batches, vectors, and products of two computed values."""
    x = b.pick(b.choose(["float", "double"]), rank=(1, 4), bound=300.0)
    k = x.shape[-1]

    turned = {node.output[0] for node in b.nodes if node.op_type == "Transpose"}

    def fits(v: Value) -> bool:
        if not v.shape or ((len(v.shape) == 1 or len(x.shape) == 1) and turned & {v.name, x.name}):
            return False  # onnxruntime 1.31 fuses a Transpose into a product with a vector wrongly
        rows = v.shape[-2] if len(v.shape) > 1 else v.shape[0]
        batch, other = x.shape[:-2][::-1], v.shape[:-2][::-1]
        same = all(s == t or 1 in (s, t) for s, t in zip(batch, other, strict=False))
        return rows == k and same and k * v.bound * x.bound < 4000

    there = [v for v in reversed(b.values) if v.kind == x.kind and fits(v)]
    if there and b.coin():
        y = b.choose(there)
    else:
        shape: tuple[int, ...] = (k, b.choose([2, 3, 4, 5, 6, 8]))
        if len(x.shape) > 2 and b.coin():
            shape = (*x.shape[b.number(0, len(x.shape) - 2) : -2], *shape)
        y = b.fresh(shape if x.name in turned or b.number(0, 5) else (k,), x.kind)
    return b.add(op, [x, y], k * x.bound * y.bound, gain=k * max(x.bound, y.bound))


@makes("Gemm")
def gemm(b: Builder, op: str) -> object:
    """Transposed or not, with and without a bias."""
    x = b.pick(rank=2, bound=300.0)
    trans_a, trans_b = b.number(0, 1), b.number(0, 1)
    k, m = x.shape if trans_a else x.shape[::-1]
    n = b.choose([2, 3, 4, 6])
    operands = [x, b.fresh((n, k) if trans_b else (k, n))]
    if b.number(0, 2):
        operands.append(b.fresh(b.choose([(n,), (m, n), (1, n), (m, 1), ()])))
    bound = 3 * k * x.bound + 3
    return b.add(op, operands, bound, gain=3.0 * k, transA=trans_a, transB=trans_b)


EQUATIONS = {
    "abc,cd->abd": 3,
    "abc,abc->ac": 3,
    "abc,cbd->ad": 3,
    "abc,bd->adc": 3,
    "ab,bc->ca": 2,
    "ab,ab->": 2,
    "ab->b": 2,
    "ab,cb": 2,
}


@makes("Einsum")
def einsum(b: Builder, op: str) -> object:
    """Products and sums over any letters."""
    equation = b.choose([e for e in EQUATIONS])
    x = b.pick(rank=EQUATIONS[equation], bound=100.0)
    first, _, second = equation.partition("->")[0].partition(",")
    sizes = dict(zip(first, x.shape, strict=True))
    operands = [x]
    if second:
        operands.append(b.fresh(tuple(sizes.setdefault(c, 3) for c in second)))
    terms = math.prod(sizes.values())
    return b.add(op, operands, 3 * terms * x.bound, gain=3.0 * terms, equation=equation)


EXACT = {"ReduceSum": 1, "ReduceL1": 1, "ReduceSumSquare": 2, "ReduceMax": 1, "ReduceMin": 1}


def axes_of(b: Builder, x: Value) -> list[int]:
    """One axis, or two."""
    first = b.number(0, len(x.shape) - 1)
    second = b.number(0, len(x.shape) - 1)
    return sorted({first, second}) if b.coin() else [first]


@makes(" ".join(EXACT))
def reduce_exactly(b: Builder, op: str) -> object:
    """Sums and extremes."""
    x = b.pick(bound=60.0 if op == "ReduceSumSquare" else 4000.0)
    axes = axes_of(b, x)
    terms = math.prod(x.shape[a] for a in axes)
    bound = terms * x.bound ** EXACT[op]
    gain = terms * (2 * x.bound if EXACT[op] == 2 else 1.0)
    return b.add(op, [x, b.int64(*axes)], bound, gain=gain, keepdims=b.number(0, 1))


@makes("ReduceMean ReduceL2")
def reduce_roughly(b: Builder, op: str) -> object:
    """A mean, or a root."""
    x = b.pick()
    axes = axes_of(b, x)
    root = math.sqrt(math.prod(x.shape[a] for a in axes))
    if op == "ReduceL2" and not x.is_exact:
        raise NotHere  # a root of next to nothing
    return b.add(
        op, [x, b.int64(*axes)], root * x.bound, gain=root, rounds=True, keepdims=b.number(0, 1)
    )


@makes("ReduceProd")
def reduce_prod(b: Builder, op: str) -> object:
    """Of few factors."""
    x = b.pick(bound=6.0, exact=True)
    axis = b.number(0, len(x.shape) - 1)
    return b.add(op, [x, b.int64(axis)], x.bound ** x.shape[axis], keepdims=b.number(0, 1))


@makes("ReduceLogSumExp ReduceLogSum")
def reduce_log(b: Builder, op: str) -> object:
    """Of positive terms."""
    x = b.pick(bound=20.0)
    axis = b.number(0, len(x.shape) - 1)
    if op == "ReduceLogSum":
        (x,) = b.add("Abs", [x], x.bound)
        (x,) = b.add("Add", [x, b.constant(np.float32(1))], x.bound + 1)
    gain = float(x.shape[axis])
    return b.add(op, [x, b.int64(axis)], x.bound + 8, gain=gain, rounds=True, keepdims=1)


@makes("ArgMax ArgMin")
def arg_extremum(b: Builder, op: str) -> object:
    """Positions, of exact values."""
    x = b.pick(exact=True)
    axis = b.number(0, len(x.shape) - 1)
    return b.add(op, [x], 8.0, kind="int", axis=axis, keepdims=b.number(0, 1))


@makes("TopK")
def top_k(b: Builder, op: str) -> object:
    """The values alone, and their positions cast to numbers."""
    x = b.pick(exact=True)
    axis = b.number(0, len(x.shape) - 1)
    k = b.number(1, x.shape[axis])
    values, positions = b.add(op, [x, b.int64(k)], x.bound, outputs=2, axis=axis)
    b.values.remove(positions)
    b.values.append(Value(positions.name, positions.shape, "int", 8.0))
    return values


@makes("CumSum")
def cumulate(b: Builder, op: str) -> object:
    """Along one axis."""
    x = b.pick(bound=500.0)
    axis = b.number(0, len(x.shape) - 1)
    size = x.shape[axis]
    return b.add(op, [x, b.constant(np.int64(axis))], size * x.bound, gain=float(size))


def image(b: Builder, low: int = 1) -> Value:
    """A batch of images."""
    there = [v for v in b.values if v.kind == "float" and len(v.shape) == 4 and v.bound < 60]
    there = [v for v in there if min(v.shape[2:]) >= low]
    if there and b.coin():
        return b.choose(there)
    channels = b.choose([2, 4, 6, 3])
    return b.fresh((b.choose([1, 2, 3]), channels, b.choose([4, 6, 5]), b.choose([4, 3])))


@makes("Conv")
def conv(b: Builder, op: str) -> object:
    """Groups, strides, pads, patches and pointwise kernels."""
    x = image(b)
    channels = x.shape[1]
    group = b.choose([1, *[g for g in (2, channels) if channels % g == 0]])
    out = group * b.choose([2, 1, 3])
    width = b.choose([w for w in (1, 3, 2) if w <= min(x.shape[2:])])
    stride = b.choose([1, width, 2])
    pad = b.choose([0, width // 2])
    operands = [x, b.fresh((out, channels // group, width, width))]
    if b.coin():
        operands.append(b.fresh((out,)))
    terms = channels // group * width * width
    return b.add(
        op,
        operands,
        3 * terms * x.bound + 3,
        gain=3.0 * terms,
        group=group,
        strides=[stride] * 2,
        pads=[pad] * 4,
    )


@makes("ConvTranspose")
def conv_transpose(b: Builder, op: str) -> object:
    """Upsampling by blocks of 2."""
    x = image(b)
    channels = x.shape[1]
    group = b.choose([1, 2]) if channels % 2 == 0 else 1
    operands = [x, b.fresh((channels, 2, 2, 2))]
    if b.coin():
        operands.append(b.fresh((2 * group,)))
    stride = b.choose([2, 1])
    terms = channels // group * 4
    return b.add(
        op, operands, 3 * terms * x.bound + 3, gain=3.0 * terms, group=group, strides=[stride] * 2
    )


@makes("MaxPool AveragePool LpPool")
def pool(b: Builder, op: str) -> object:
    """Windows side by side, or not."""
    x = image(b, low=2)
    stride = b.choose([2, 1])
    gain = {"MaxPool": 1.0, "AveragePool": 1.0, "LpPool": 2.0}[op]
    if op == "LpPool" and not x.is_exact:
        raise NotHere
    return b.add(
        op,
        [x],
        gain * x.bound,
        gain=gain,
        rounds=op != "MaxPool",
        kernel_shape=[2, 2],
        strides=[stride] * 2,
    )


@makes("GlobalAveragePool GlobalMaxPool")
def global_pool(b: Builder, op: str) -> object:
    """Over all of space."""
    x = image(b)
    return b.add(op, [x], x.bound, rounds=op == "GlobalAveragePool")
