"""Random ops that move elements: reshapes, transposes, segments, repetitions."""

from __future__ import annotations

import math

import numpy as np
from random_graphs.builder import MOST_ELEMENTS, Builder, NotHere, Shape, Value, makes

KINDS = ("float", "double", "int", "bool")


def any_kind(b: Builder, low: int = 1, high: int = 4) -> Value:
    """A value of any kind."""
    return b.pick(b.choose(KINDS), rank=(low, high))


def factors(size: int) -> list[tuple[int, int]]:
    """Ways to write a size as a product of two, neither of them 1."""
    return [(a, size // a) for a in range(2, size) if size % a == 0]


def merge_and_cut(b: Builder, shape: Shape) -> Shape:
    """The shape with neighbours merged or a dimension cut in two."""
    options: list[Shape] = []
    for i in range(len(shape) - 1):
        options.append((*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]))
    for i, size in enumerate(shape):
        options += [(*shape[:i], p, q, *shape[i + 1 :]) for p, q in factors(size)]
    return b.choose(options) if options else shape


@makes("Reshape")
def reshape(b: Builder, op: str) -> object:
    """Merges, cuts, or both at once; targets may hold -1 and 0."""
    x = any_kind(b, 1, 5)
    shape = x.shape
    for _ in range(b.number(1, 3)):
        shape = merge_and_cut(b, shape)
    target = list(shape)
    if b.coin():
        target[b.number(0, len(target) - 1)] = -1
    elif len(shape) <= len(x.shape):
        target = [0 if s == x.shape[i] else s for i, s in enumerate(shape)]
    return b.add(op, [x, b.int64(*target)], x.bound)


@makes("Flatten")
def flatten(b: Builder, op: str) -> object:
    """To a matrix."""
    x = any_kind(b)
    return b.add(op, [x], x.bound, axis=b.number(0, len(x.shape)))


@makes("Unsqueeze")
def unsqueeze(b: Builder, op: str) -> object:
    """A dimension of one element anywhere."""
    x = any_kind(b)
    return b.add(op, [x, b.int64(b.number(0, len(x.shape)))], x.bound)


@makes("Squeeze")
def squeeze(b: Builder, op: str) -> object:
    """One dimension of one element, or all."""
    kind = b.choose(KINDS)
    x = b.pick(kind, where=lambda v: 1 in v.shape and len(v.shape) > 1)
    ones = [i for i, s in enumerate(x.shape) if s == 1]
    if b.coin() and len(ones) < len(x.shape):
        return b.add(op, [x], x.bound)
    return b.add(op, [x, b.int64(b.choose(ones))], x.bound)


@makes("Transpose")
def transpose(b: Builder, op: str) -> object:
    """Any order of dimensions."""
    x = any_kind(b, 2, 5)
    order = list(range(len(x.shape)))
    for _ in range(b.number(1, 2)):
        i, j = b.number(0, len(order) - 1), b.number(0, len(order) - 1)
        order[i], order[j] = order[j], order[i]
    return b.add(op, [x], x.bound, perm=order)


@makes("Expand")
def expand(b: Builder, op: str) -> object:
    """Ones grow, new dimensions come in front."""
    x = any_kind(b, 1, 3)
    room = MOST_ELEMENTS // math.prod(x.shape)
    target = [b.choose([2, 3, 4]) if s == 1 else s for s in x.shape]
    if b.coin() and room >= 4:
        target.insert(0, b.choose([2, 3, 4]))
    return b.add(op, [x, b.int64(*target)], x.bound)


@makes("Tile")
def tile(b: Builder, op: str) -> object:
    """One dimension is repeated."""
    x = any_kind(b)
    repeats = [1] * len(x.shape)
    repeats[b.number(0, len(repeats) - 1)] = b.choose([2, 3])
    return b.add(op, [x, b.int64(*repeats)], x.bound)


@makes("Concat")
def concat(b: Builder, op: str) -> object:
    """Two or three segments, the same value twice too."""
    x = any_kind(b)
    axis = b.number(0, len(x.shape) - 1)

    def fits(v: Value) -> bool:
        same = [s == t for i, (s, t) in enumerate(zip(v.shape, x.shape, strict=True)) if i != axis]
        return all(same)

    parts = [x]
    for _ in range(b.number(1, 2)):
        there = [
            v for v in b.values if v.kind == x.kind and len(v.shape) == len(x.shape) and fits(v)
        ]
        if b.number(0, 3):
            parts.append(b.choose(there))
        else:
            size = b.choose([1, 2, 3, 4])
            parts.append(b.fresh((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.kind))
    bound = max(p.bound for p in parts)
    return b.add(op, parts, bound, gain=1.0, axis=axis - (len(x.shape) if b.coin() else 0))


@makes("Split")
def split(b: Builder, op: str) -> object:
    """Into equal parts or into given ones."""
    kind = b.choose(KINDS)
    x = b.pick(kind, where=lambda v: max(v.shape) > 1)
    axis = b.choose([i for i, s in enumerate(x.shape) if s > 1])
    size = x.shape[axis]
    if b.coin():
        count = b.choose([n for n in (2, 3, 4) if n <= size])
        if (count - 1) * -(-size // count) >= size:
            raise NotHere
        return b.add(op, [x], x.bound, outputs=count, axis=axis, num_outputs=count)
    first = b.number(1, size - 1)
    return b.add(op, [x, b.int64(first, size - first)], x.bound, outputs=2, axis=axis)


@makes("Slice")
def slice_(b: Builder, op: str) -> object:
    """A run, a strided run, or one backwards."""
    kind = b.choose(KINDS)
    x = b.pick(kind, where=lambda v: max(v.shape) > 1)
    axis = b.choose([i for i, s in enumerate(x.shape) if s > 1])
    size = x.shape[axis]
    start = b.number(0, size - 1)
    end = b.number(start + 1, size)
    step = b.choose([1, 1, 2, -1])
    if step < 0:
        start, end = end - 1, (start - 1 if start else -size - 1)
    elif b.coin():
        start, end = start - size, end if b.coin() else 2**40
    bounds = [b.int64(start), b.int64(end), b.int64(axis), b.int64(step)]
    return b.add(op, [x, *bounds], x.bound)


@makes("Pad")
def pad(b: Builder, op: str) -> object:
    """With zeros, or the edge, in one dimension."""
    x = b.pick(b.choose(["float", "double"]))
    axis = b.number(0, len(x.shape) - 1)
    pads = [0] * (2 * len(x.shape))
    pads[axis], pads[axis + len(x.shape)] = b.number(0, 2), b.number(0, 2)
    mode = b.choose(["constant", "edge"])
    return b.add(op, [x, b.int64(*pads)], x.bound, mode=mode)


@makes("DepthToSpace")
def depth_to_space(b: Builder, op: str) -> object:
    """Blocks of 2."""
    x = b.pick(rank=4, where=lambda v: v.shape[1] % 4 == 0)
    return b.add(op, [x], x.bound, blocksize=2, mode=b.choose(["DCR", "CRD"]))


@makes("SpaceToDepth")
def space_to_depth(b: Builder, op: str) -> object:
    """Blocks of 2."""
    x = b.pick(rank=4, where=lambda v: v.shape[2] % 2 == v.shape[3] % 2 == 0)
    return b.add(op, [x], x.bound, blocksize=2)


@makes("ConstantOfShape")
def constant_of_shape(b: Builder, op: str) -> object:
    """Zeros of another value's shape, and that value added."""
    x = b.pick()
    if math.prod(x.shape) < 2:
        raise NotHere
    (shape,) = b.add("Shape", [Value(x.name, x.shape, x.kind, 0.0)], 8.0, kind="int")
    b.values.remove(shape)
    zeros = Value(f"t{len(b.nodes)}_0", x.shape, "float", 1.0)
    b.note(op, [shape.name], zeros)
    return b.add("Add", [x, zeros], x.bound + 1)


@makes("Trilu")
def trilu(b: Builder, op: str) -> object:
    """Upper or lower triangles."""
    x = b.pick(rank=(2, 4))
    return b.add(op, [x], x.bound, upper=int(b.coin()))


@makes("ReverseSequence")
def reverse_sequence(b: Builder, op: str) -> object:
    """Each batch to its own length."""
    x = b.pick(rank=(2, 4))
    lengths = np.arange(x.shape[1], dtype=np.int64) % x.shape[0] + 1
    return b.add(op, [x, b.constant(lengths)], x.bound, time_axis=0, batch_axis=1)
