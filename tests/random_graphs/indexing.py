"""Random lookups, scatters and normalizations."""

from __future__ import annotations

import math

import numpy as np
from random_graphs.builder import Builder, NotHere, Value, makes


def positions(b: Builder, shape: tuple[int, ...], size: int) -> Value | str:
    """Indices below a size: fed or stored ones, a constant, or a run that counts up."""
    if b.coin():
        return b.fresh(shape, "int", 0, size)
    source = np.random.default_rng([b.seed, len(b.weights)])
    if len(shape) == 1 and shape[0] <= size and b.coin():
        start = b.number(0, size - shape[0])
        return b.constant(np.arange(start, start + shape[0]))
    low = -size if b.coin() else 0
    return b.constant(source.integers(low, size, shape))


@makes("Gather")
def gather(b: Builder, op: str) -> object:
    """Rows of any axis, by scalars, vectors or matrices of indices."""
    x = b.pick(b.choose(["float", "int", "double"]))
    axis = b.number(0, len(x.shape) - 1)
    shape = b.choose([(3,), (), (2, 2), (4,), (1,)])
    return b.add(op, [x, positions(b, shape, x.shape[axis])], x.bound, kind=x.kind, axis=axis)


@makes("GatherElements")
def gather_elements(b: Builder, op: str) -> object:
    """Along one axis."""
    x = b.pick()
    axis = b.number(0, len(x.shape) - 1)
    shape = list(x.shape)
    shape[axis] = b.choose([2, 1, 3])
    index = positions(b, tuple(shape), x.shape[axis])
    return b.add(op, [x, index], x.bound, kind=x.kind, axis=axis)


@makes("GatherND")
def gather_nd(b: Builder, op: str) -> object:
    """Rows of the first axis, or elements of the first two."""
    x = b.pick(rank=(1, 4))
    depth = b.number(1, min(2, len(x.shape)))
    index = positions(b, (3, depth), min(x.shape[:depth]))
    return b.add(op, [x, index], x.bound, kind=x.kind)


@makes("ScatterElements")
def scatter_elements(b: Builder, op: str) -> object:
    """Distinct positions of one axis, or a sum over equal ones."""
    x = b.pick()
    axis = b.number(0, len(x.shape) - 1)
    shape = list(x.shape)
    shape[axis] = 1 if b.coin() else x.shape[axis]
    index = np.zeros(shape, np.int64) + np.arange(shape[axis]).reshape(
        [-1 if i == axis else 1 for i in range(len(shape))]
    )
    reduction = b.choose(["none", "add"])
    updates = b.fresh(tuple(shape))
    bound = x.bound + updates.bound
    return b.add(op, [x, b.constant(index), updates], bound, axis=axis, reduction=reduction)


@makes("ScatterND")
def scatter_nd(b: Builder, op: str) -> object:
    """Two rows of the first axis."""
    x = b.pick(where=lambda v: v.shape[0] > 1)
    updates = b.fresh((2, *x.shape[1:]))
    index = b.constant(np.array([[x.shape[0] - 1], [0]]))
    return b.add(op, [x, index, updates], x.bound + updates.bound)


@makes("OneHot")
def one_hot(b: Builder, op: str) -> object:
    """Of integers that need not be in range."""
    x = b.pick("int", rank=(1, 3))
    depth = b.constant(np.int64(b.choose([3, 4])))
    values = b.constant(np.array([0, 1], np.float32))
    return b.add(op, [x, depth, values], 1.0, kind="float", axis=b.choose([-1, 0]))


@makes("Softmax LogSoftmax")
def softmax(b: Builder, op: str) -> object:
    """Along any axis."""
    x = b.pick()
    bound = 1.0 if op == "Softmax" else 2 * x.bound + 3
    return b.add(op, [x], bound, gain=2.0, rounds=True, axis=b.number(0, len(x.shape) - 1))


@makes("Hardmax")
def hardmax(b: Builder, op: str) -> object:
    """The first of the largest, of exact values."""
    x = b.pick(exact=True)
    return b.add(op, [x], 1.0, axis=b.number(0, len(x.shape) - 1))


@makes("LayerNormalization RMSNormalization")
def layer_normalization(b: Builder, op: str) -> object:
    """From some axis on; epsilon is large, so that a constant row does not magnify rounding."""
    x = b.pick(bound=50.0)
    axis = b.number(0, len(x.shape) - 1)
    operands = [x, b.fresh(x.shape[axis:])]
    if op == "LayerNormalization" and b.coin():
        operands.append(b.fresh(x.shape[axis:]))
    size = math.sqrt(math.prod(x.shape[axis:]))
    return b.add(op, operands, 3 * size + 3, gain=10 * size, rounds=True, axis=axis, epsilon=0.5)


@makes("BatchNormalization")
def batch_normalization(b: Builder, op: str) -> object:
    """In inference."""
    x = b.pick(rank=(2, 4), bound=500.0)
    channels = (x.shape[1],)
    scale, bias, mean = (b.fresh(channels) for _ in range(3))
    variance = b.fresh(channels, low=1, high=4)
    return b.add(op, [x, scale, bias, mean, variance], 3 * x.bound + 12, gain=3.0, rounds=True)


@makes("InstanceNormalization")
def instance_normalization(b: Builder, op: str) -> object:
    """Over space."""
    x = b.pick(rank=(3, 4), bound=50.0)
    scale, bias = (b.fresh((x.shape[1],)) for _ in range(2))
    size = math.sqrt(math.prod(x.shape[2:]))
    return b.add(op, [x, scale, bias], 3 * size + 3, gain=10 * size, rounds=True, epsilon=0.5)


@makes("GroupNormalization")
def group_normalization(b: Builder, op: str) -> object:
    """Two groups, or one for each channel."""
    x = b.pick(rank=(3, 4), bound=50.0, where=lambda v: v.shape[1] % 2 == 0)
    scale, bias = (b.fresh((x.shape[1],)) for _ in range(2))
    size = math.sqrt(math.prod(x.shape[1:]))
    groups = b.choose([2, x.shape[1]])
    return b.add(
        op,
        [x, scale, bias],
        3 * size + 3,
        gain=10 * size,
        rounds=True,
        epsilon=0.5,
        num_groups=groups,
    )


@makes("LpNormalization")
def lp_normalization(b: Builder, op: str) -> object:
    """Of values that are not all zero: an exact value and one beside it."""
    x = b.pick(bound=50.0, exact=True)
    axis = b.number(0, len(x.shape) - 1)
    (x,) = b.add("Abs", [x], x.bound)
    (x,) = b.add("Add", [x, b.constant(np.float32(1))], x.bound + 1)
    return b.add(op, [x], 1.0, rounds=True, axis=axis, p=b.choose([1, 2]))


@makes("LRN")
def lrn(b: Builder, op: str) -> object:
    """Across channels."""
    x = b.pick(rank=4, bound=50.0)
    return b.add(op, [x], x.bound, gain=4.0, rounds=True, size=3)


@makes("Resize")
def resize(b: Builder, op: str) -> object:
    """Twice as large, by the nearest."""
    x = b.pick(rank=4)
    if math.prod(x.shape) > 150:
        raise NotHere
    scales = b.constant(np.array([1, 1, 2, 2], np.float32))
    return b.add(
        op,
        [x, "", scales],
        x.bound,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )
