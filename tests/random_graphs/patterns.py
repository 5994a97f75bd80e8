"""Random pieces of graphs that single ops seldom add up to: sums that meet, heads of attention."""

from __future__ import annotations

import math
from collections.abc import Callable

from random_graphs.builder import Builder, NotHere, Value

Pattern = Callable[[Builder], object]


def sum_of_parts(b: Builder, x: Value) -> Value:
    """A product with a fresh matrix: pending where the last dimension of x is split."""
    k = x.shape[-1]
    if k < 2:
        raise NotHere
    y = b.fresh((k, 4))
    b.hints.append((x.name, len(x.shape) - 1))
    return b.add("MatMul", [x, y], k * x.bound * y.bound, gain=3.0 * k)[0]


def keeping(b: Builder, x: Value) -> Value:
    """A linear op that a pending sum may pass, and that keeps the shape."""
    op = b.choose(["Neg", "Mul", "Div", "Add", "Cast", "Identity"])
    if op in ("Mul", "Div", "Add"):
        y = b.fresh(x.shape[-1:], low=1)
        return b.add(op, [x, y], x.bound * 3, gain=3.0, rounds=op == "Div")[0]
    if op == "Cast":
        (x,) = b.add(op, [x], x.bound, kind="double", to=11)
        return b.add(op, [x], x.bound, kind="float", to=1)[0]
    return b.add(op, [x], x.bound)[0]


def changing(b: Builder, x: Value) -> object:
    """One that changes the shape."""
    op = b.choose(["Transpose", "Reshape", "Slice", "Expand", "ReduceSum", "Gather", "Split"])
    if op == "Transpose":
        return b.add(op, [x], x.bound, perm=list(range(len(x.shape)))[::-1])
    if op == "ReduceSum":
        return b.add(op, [x, b.int64(0)], x.shape[0] * x.bound, gain=float(x.shape[0]), keepdims=0)
    if op == "Split":
        if x.shape[-1] != 4:
            raise NotHere
        return b.add(op, [x, b.int64(1, 3)], x.bound, outputs=2, axis=-1)
    if op == "Gather":
        if x.shape[-1] < 3:
            raise NotHere
        return b.add(op, [x, b.int64(0, 2, 1)], x.bound, axis=len(x.shape) - 1)
    if op == "Slice":
        return b.add(op, [x, b.int64(0), b.int64(2), b.int64(-1)], x.bound)
    return b.add(op, [x, b.int64(*([-1] if op == "Reshape" else [2, *x.shape]))], x.bound)


def softly(b: Builder, x: Value) -> object:
    """One that is not linear."""
    if b.coin():
        return b.add("Relu", [x], x.bound)
    return b.add("Tanh", [x], 1.0, rounds=True)


def sums_that_meet(b: Builder) -> object:
    """Two pending sums, or one and a whole value, joined and worked on."""
    x = b.pick(rank=(2, 3), bound=40.0)
    terms = [sum_of_parts(b, x), sum_of_parts(b, x if b.coin() else b.fresh(x.shape))]
    if b.coin():
        terms.insert(b.number(0, 2), b.fresh(terms[0].shape))
    for _ in range(b.number(0, 2)):
        terms[0] = keeping(b, terms[0])
    bound = sum(t.bound for t in terms)
    join = b.choose(["Add", "Sub", "Sum", "Concat", "Where"])
    if join == "Concat":
        made = b.add(join, terms, bound, axis=0)
    elif join == "Sum":
        made = b.add(join, terms, bound)
    elif join == "Where":
        mask = b.fresh(terms[0].shape[-1:], "bool")
        made = b.add(join, [mask, *terms[:2]], bound, kind="float")
    else:
        made = b.add(join, terms[:2], bound)
    if b.coin():
        return changing(b, made[0])
    return keeping(b, made[0])


def heads(b: Builder) -> object:
    """A projection that falls into heads, and a product within each head."""
    x = b.pick(rank=3, bound=20.0)
    batch, seq, width = x.shape
    count, size = b.choose([2, 3, 5, 4]), b.choose([2, 3])
    if math.prod((batch, seq, count, size)) > 400:
        raise NotHere
    parts: list[Value] = []
    for _ in range(2):
        w = b.fresh((width, count * size), low=-1, high=2)
        (p,) = b.add("MatMul", [x, w], width * x.bound, gain=float(width))
        (p,) = b.add("Reshape", [p, b.int64(0, 0, count, size)], p.bound)
        b.hints.append((p.name, 2))
        (p,) = b.add("Transpose", [p], p.bound, perm=[0, 2, 1, 3])
        parts.append(p)
    q, k = parts
    (k,) = b.add("Transpose", [k], k.bound, perm=[0, 1, 3, 2])
    bound = size * q.bound * k.bound
    (scores,) = b.add("MatMul", [q, k], bound, gain=size * max(q.bound, k.bound))
    (scores,) = b.add("Softmax", [scores], 1.0, gain=2.0, rounds=True)
    (out,) = b.add("MatMul", [scores, q], seq * q.bound, gain=float(seq * q.bound))
    (out,) = b.add("Transpose", [out], out.bound, perm=[0, 2, 1, 3])
    (out,) = b.add("Reshape", [out, b.int64(0, 0, -1)], out.bound)
    w = b.fresh((count * size, width), low=-1, high=2)
    return b.add("MatMul", [out, w], 12 * out.bound, gain=12.0)


def fused_projections(b: Builder) -> object:
    """One product, split into segments that are used apart and joined again."""
    x = b.pick(rank=(2, 3), bound=40.0)
    sizes = b.choose([(4, 4, 4), (6, 3), (8, 2, 2), (5, 5)])
    w = b.fresh((x.shape[-1], sum(sizes)))
    (y,) = b.add("MatMul", [x, w], 3 * x.shape[-1] * x.bound, gain=3.0 * x.shape[-1])
    parts = b.add("Split", [y, b.int64(*sizes)], y.bound, outputs=len(sizes), axis=-1)
    b.hints.append((b.choose(parts).name, len(x.shape) - 1))
    order = parts[::-1] if b.coin() else parts
    return b.add("Concat", order, y.bound, axis=-1)


def merged_rows(b: Builder) -> object:
    """Two dimensions are merged, worked on, and cut again."""
    x = b.pick(rank=(3, 4), bound=100.0)
    at = b.number(0, len(x.shape) - 2)
    merged = (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
    (y,) = b.add("Reshape", [x, b.int64(*merged)], x.bound)
    b.hints += [(x.name, at), (x.name, at + 1)]
    z = b.fresh(y.shape)
    (y,) = b.add(b.choose(["Add", "Mul"]), [y, z], 3 * y.bound, gain=3.0)
    return b.add("Reshape", [y, b.int64(*x.shape)], y.bound)


PATTERNS: tuple[Pattern, ...] = (
    sums_that_meet,
    sums_that_meet,
    merged_rows,
    heads,
    fused_projections,
)
