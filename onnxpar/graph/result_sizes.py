"""Closed forms of result sizes for ops whose result sizes depend on values of operands, such as
Slice and Pad. They follow from the definitions of the ops, not from samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from onnx import NodeProto, helper

from onnxpar.graph.size_arithmetic import (
    ONE,
    ZERO,
    Forms,
    NotFollowed,
    number_of,
    scaled,
    steps,
)
from onnxpar.layout.symbols import Polynomial, is_less, maximum, minimum, quotient, rounded_up

Sizes = Sequence[Polynomial | None]
"""The sizes of a tensor in closed form, with None for an unknown size."""
Divide = Callable[[Polynomial, Polynomial], Polynomial | None]
"""Returns the quotient of two sizes in closed form; None if it is no integer at some sizes."""
HUGE = 2**31 - 1
"""Exporters write this or a greater number for "to the end"; no dimension is as large."""


@dataclass(frozen=True)
class Operands:
    """A node, and what is known of its operands.

    sizes    of each operand; None if even the number of dimensions is unknown
    values   the elements of each operand in closed form; None if there is none
    opset    the version of ONNX's own ops
    divide   see `Divide`
    is_size  True for a closed form that is the size of some tensor, and so never negative
    """

    node: NodeProto
    sizes: Sequence[Sizes | None]
    values: Sequence[Forms | None]
    opset: int
    divide: Divide
    is_size: Callable[[Polynomial], bool]

    @property
    def attributes(self) -> dict[str, Any]:
        """The values of the node's attributes, by name."""
        return {a.name: helper.get_attribute_value(a) for a in self.node.attribute}

    def has(self, i: int) -> bool:
        """True if operand number `i` is not left out."""
        return i < len(self.node.input) and bool(self.node.input[i])

    def shape(self, i: int = 0) -> Sizes:
        """Returns the sizes of operand number `i`. Errors: NotFollowed if they are unknown."""
        sizes = self.sizes[i]
        if sizes is None:
            raise NotFollowed
        return sizes

    def value(self, i: int) -> list[Polynomial]:
        """Returns the elements of operand number `i`, flat. Errors: NotFollowed if they are
        unknown."""
        forms = self.values[i]
        if forms is None:
            raise NotFollowed
        return list(forms.reshape(-1))

    def axes(self, i: int, rank: int, count: int) -> list[int]:
        """Returns the axes that operand number `i` lists, all non-negative, for a tensor of `rank`
        dimensions; if the operand is left out, the first `count` axes."""
        numbers = [int(number_of(v)) for v in self.value(i)] if self.has(i) else range(count)
        return [axis % rank for axis in numbers]


def result_sizes(operands: Operands) -> list[Sizes] | None:
    """Returns the sizes of each result of a node in closed form; None for an op whose result sizes
    do not depend on values. Errors: NotFollowed if they have no closed form."""
    find = _SIZES.get(operands.node.op_type)
    if find is None or operands.node.domain not in ("", "ai.onnx"):
        return None
    return find(operands)


def positions(operands: Operands) -> Iterator[Polynomial]:
    """Yields, in closed form, the positions in an operand at which a Slice starts, or that a Gather
    reads, where these follow from values. Errors: NotFollowed."""
    if operands.node.op_type == "Slice":
        for axis, start, _, step in _slices(operands):
            size = operands.shape()[axis]
            if size is not None:
                yield _first(size, start, step)
    elif operands.node.op_type == "Gather":
        sizes = operands.shape()
        size = sizes[operands.attributes.get("axis", 0) % len(sizes)]
        if size is not None:
            yield from (_from_the_end(index, size) for index in operands.value(1))


def _slice(o: Operands) -> list[Sizes]:
    sizes = list(o.shape())
    for axis, start, end, step in _slices(o):
        size = sizes[axis]
        sizes[axis] = None if size is None else _sliced(size, start, end, step)
    return [sizes]


def _slices(o: Operands) -> Iterator[tuple[int, Polynomial, Polynomial, int]]:
    """Yields (axis, start, end, step) of each dimension that a Slice cuts."""
    starts, ends = o.value(1), o.value(2)
    axes = o.axes(3, len(o.shape()), len(starts))
    strides = [int(number_of(v)) for v in o.value(4)] if o.has(4) else [1] * len(starts)
    yield from zip(axes, starts, ends, strides, strict=True)


def _sliced(size: Polynomial, start: Polynomial, end: Polynomial, step: int) -> Polynomial:
    low, last = (Polynomial.constant(-1), size - ONE) if step < 0 else (ZERO, size)
    stop = _clamped(_from_the_end(end, size), low, last)
    return steps(_first(size, start, step), stop, Fraction(step))


def _first(size: Polynomial, start: Polynomial, step: int) -> Polynomial:
    """Returns the position of the first element of a slice, clamped to the dimension."""
    last = size - ONE if step < 0 else size
    return _clamped(_from_the_end(start, size), ZERO, last)


def _from_the_end(index: Polynomial, size: Polynomial) -> Polynomial:
    """Returns an index, which may be negative to count from the end, as counted from the
    beginning."""
    if index.is_natural:
        return index
    if index.number is not None:
        return Polynomial.constant(-1) if index.number < -HUGE else index + size
    return index + size * is_less(index, ZERO)


def _clamped(index: Polynomial, low: Polynomial, high: Polynomial) -> Polynomial:
    if index.number is not None and index.number >= HUGE:
        return high
    return minimum(maximum(index, low), high)


def _pad(o: Operands) -> list[Sizes]:
    sizes = list(o.shape())
    pads = o.value(1)
    axes = o.axes(3, len(sizes), len(sizes))
    if len(pads) < 2 * len(axes) or len(axes) > len(sizes):  # not valid
        raise NotFollowed
    for i, axis in enumerate(axes):
        size = sizes[axis]
        sizes[axis] = None if size is None else size + pads[i] + pads[i + len(axes)]
    return [sizes]


def _reshape(o: Operands) -> list[Sizes]:
    target = o.value(1)
    zero_is_zero = bool(o.attributes.get("allowzero", 0))
    out: list[Polynomial | None] = []
    own = o.sizes[0]
    for i, size in enumerate(target):
        if size == ZERO and not zero_is_zero:
            out.append(own[i] if own is not None and i < len(own) else None)
        elif size.number is None and not size.is_natural and not o.is_size(size):
            raise NotFollowed  # at some sizes, it may be -1
        else:
            out.append(size)
    rest = [i for i, size in enumerate(target) if size == Polynomial.constant(-1)]
    if not rest:
        return [out]
    others, sizes = [s for i, s in enumerate(out) if i != rest[0]], o.shape()
    if None in sizes or None in others:
        out[rest[0]] = None
    else:
        out[rest[0]] = o.divide(product(sizes), product(others))
    return [out]


def product(sizes: Sequence[Polynomial | None]) -> Polynomial:
    """Returns the product of sizes, all of which must be known."""
    total = ONE
    for size in sizes:
        assert size is not None
        total = total * size
    return total


def _expand(o: Operands) -> list[Sizes]:
    own, target = o.shape(), o.value(1)
    rank = max(len(own), len(target))
    own = [*[ONE] * (rank - len(own)), *own]
    target = [*[ONE] * (rank - len(target)), *target]
    return [[_broadcast(a, b) for a, b in zip(own, target, strict=True)]]


def _broadcast(a: Polynomial | None, b: Polynomial) -> Polynomial | None:
    if b == ONE:
        return a
    if a in (ONE, b):
        return b
    if b.number is not None and b.number > 1:  # the model is not valid for any other size but 1
        return b
    if a is not None and a.number is not None and a.number > 1:
        return a
    raise NotFollowed


def _tile(o: Operands) -> list[Sizes]:
    pairs = zip(o.shape(), o.value(1), strict=True)
    return [[None if a is None else a * b for a, b in pairs]]


def _range(o: Operands) -> list[Sizes]:
    start, limit, delta = (o.value(i)[0] for i in range(3))
    return [[steps(start, limit, number_of(delta))]]


def _filled(o: Operands) -> list[Sizes]:
    return [o.value(0)]


def _resize(o: Operands) -> list[Sizes]:
    sizes, attributes = list(o.shape()), o.attributes
    axes = [a % len(sizes) for a in attributes.get("axes", range(len(sizes)))]
    if o.has(3):
        if attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            raise NotFollowed
        for axis, size in zip(axes, o.value(3), strict=True):
            sizes[axis] = size
        return [sizes]
    for axis, scale in zip(axes, o.value(2), strict=True):
        size = sizes[axis]
        if size is not None:
            sizes[axis] = quotient(scaled(size, number_of(scale)), 1)
    return [sizes]


def _cropped(o: Operands) -> list[Sizes]:
    sizes, target = list(o.shape()), o.value(1)
    axes = [a % len(sizes) for a in o.attributes.get("axes", range(len(sizes)))]
    for axis, size in zip(axes, target, strict=True):
        sizes[axis] = size
    return [sizes]


def _split(o: Operands) -> list[Sizes]:
    sizes, attributes = list(o.shape()), o.attributes
    axis = attributes.get("axis", 0) % len(sizes)
    size, count = sizes[axis], len(o.node.output)
    if o.has(1):
        parts: list[Polynomial | None] = list(o.value(1))
    elif size is None:
        parts = [None] * count
    else:
        chunk = rounded_up(size, count)
        parts = [chunk] * (count - 1) + [size - chunk * Polynomial.constant(count - 1)]
    return [[*sizes[:axis], part, *sizes[axis + 1 :]] for part in parts]


def _top_k(o: Operands) -> list[Sizes]:
    sizes = list(o.shape())
    axis = o.attributes.get("axis", -1) % len(sizes)
    sizes[axis] = o.value(1)[0]
    return [sizes, sizes]


def _one_hot(o: Operands) -> list[Sizes]:
    sizes = list(o.shape())
    axis = o.attributes.get("axis", -1) % (len(sizes) + 1)
    return [[*sizes[:axis], o.value(1)[0], *sizes[axis:]]]


_SIZES: Mapping[str, Callable[[Operands], list[Sizes]]] = {
    "CenterCropPad": _cropped,
    "ConstantOfShape": _filled,
    "Expand": _expand,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Split": _split,
    "Tile": _tile,
    "TopK": _top_k,
}
