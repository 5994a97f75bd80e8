"""Lemmas: how the parts of operands that ranks hold decide the part of the result.

A lemma speaks of one op. Its conditions are checked on the positions themselves: dimensions of
operands that an op pairs must have the same positions on each rank; a dimension that an op needs
whole must be whole; a sum over a dimension that ranks split is a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.equivalence.held import Held, Partial
from onnxpar.equivalence.program import RANDOM, Node, Program, Shape, default
from onnxpar.equivalence.ranks import RankNode, Ranks
from onnxpar.equivalence.spans import Families, Family, places_of

MOST_MEANS = 1 << 22
"""The most elements of a mean over several dimensions of which ranks have parts."""


class NotShown(Exception):
    """The conditions of a lemma do not hold; the text says which."""


@dataclass(frozen=True)
class Result:
    """What a node's result `index` is on ranks; `shape` is that of the model's tensor."""

    index: int
    dims: tuple[Family, ...]
    shape: Shape
    partial: tuple[Partial, ...] = ()


@dataclass(frozen=True)
class Case:
    """A node of the model, a node of ranks with the same op, and what the operands are.

    held    for each operand, what it is on ranks; None for an operand that is left out
    shapes  of the model's operands
    """

    node: Node
    local: RankNode
    held: Sequence[Held | None]
    shapes: Sequence[Shape]
    model: Program
    ranks: Ranks
    families: Families

    def attr(self, name: str) -> Any:
        """An attribute of the model's node, or its default."""
        return default(self.node, name, self.model.opsets)

    def same_attrs(self, *but: str) -> None:
        """Raises NotShown unless all ranks have the model's attributes, except `but`."""
        names = {*self.node.attrs, *(n for node in self.local.nodes for n in node.attrs)}
        for name in sorted(names - {*but}):
            own = self.attr(name)
            for rank, value in enumerate(self.local.attrs(name, self.ranks.programs)):
                if not _equal(own, value):
                    raise NotShown(
                        f"{name} is {value!r:.40} on rank {rank}, {own!r:.40} in the model"
                    )

    def operand(self, index: int) -> Held:
        """An operand that must be there."""
        held = self.held[index] if index < len(self.held) else None
        if held is None:
            raise NotShown(f"operand {index} is missing")
        return held

    def constant(self, index: int) -> Array | None:
        """The value of the model's constant operand; None if it is left out. NotShown if it is not
        constant, or if a rank has another."""
        if index >= len(self.node.inputs) or not self.node.inputs[index]:
            if index < len(self.local.first.inputs) and self.local.first.inputs[index]:
                raise NotShown(f"operand {index} is left out in the model")
            return None
        own = self.model.constants.get(self.node.inputs[index])
        if own is None:
            raise NotShown(f"operand {index} is not a constant")
        for value in self.of_ranks(index):
            if not _equal(own, value):
                raise NotShown(f"operand {index} has another value on a rank")
        return own

    def of_ranks(self, index: int) -> list[Array]:
        """The values of a constant operand on ranks; NotShown if it is none."""
        inputs = self.local.first.inputs
        values = self.ranks.constants(inputs[index]) if index < len(inputs) else None
        if values is None:
            raise NotShown(f"operand {index} is not a constant on ranks")
        return values

    def of_model(self, index: int) -> Array | None:
        """The value of the model's constant operand; None if it is left out."""
        if index >= len(self.node.inputs) or not self.node.inputs[index]:
            return None
        value = self.model.constants.get(self.node.inputs[index])
        if value is None:
            raise NotShown(f"operand {index} is not a constant")
        return value

    def is_zero(self, index: int) -> bool:
        """True for a constant operand of zeros, which may be added any number of times."""
        with suppress(ModelError):  # its file need not be there
            value = self.model.constants.get(self.node.inputs[index])
            return value is not None and not value.any()
        return False

    def whole(self, held: Held, axis: int, shape: Shape) -> Family:
        """The family of a dimension that must be whole."""
        family = held.dims[axis]
        if not family.is_whole(shape[axis]):
            raise NotShown(f"dimension {axis} of {held.term!r} must be whole on each rank")
        return family


def place_of(axis: int, rank: int) -> int:
    """The dimension that an axis names, which may be negative. NotShown if a tensor of `rank`
    dimensions has none: a remainder would hide it."""
    if not -rank <= axis < rank:
        raise NotShown(f"a tensor of {rank} dimensions has no axis {axis}")
    return axis % rank


Lemma = Callable[[Case], list[Result]]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if a is None or b is None:
            return False
        x, y = np.asarray(a), np.asarray(b)
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    return bool(a == b)


def merged(partials: Iterable[Sequence[Partial]]) -> tuple[Partial, ...]:
    """The parts of a sum of several values: ranks with the whole sum have the whole of each."""
    return tuple(dict.fromkeys(p for each in partials for p in each))


def no_partial(*held: Held | None) -> None:
    """Raises NotShown if an operand is a part of a sum."""
    for each in held:
        if each is not None and each.partial:
            raise NotShown(f"{each.term!r} is a partial {each.partial[0].op} on ranks")


def only_sums(*held: Held | None) -> None:
    """Raises NotShown if an operand is a part of another reduction than a sum."""
    for each in held:
        if each is not None and any(part.op != "sum" for part in each.partial):
            raise NotShown(f"{each.term!r} is a partial {each.partial[0].op} on ranks")


def broadcast(case: Case, indices: Sequence[int]) -> tuple[tuple[Family, ...], Shape]:
    """The families and the shape of the result of an elementwise op on these operands."""
    operands = [(case.operand(i), case.shapes[i]) for i in indices]
    rank = max(len(shape) for _, shape in operands)
    shape = [1] * rank
    for _, own in operands:
        for axis, size in enumerate(own, rank - len(own)):
            if shape[axis] == 1:
                shape[axis] = size
    dims = [_broadcast_dim(operands, axis - rank, size) for axis, size in enumerate(shape)]
    return tuple(dims), tuple(shape)


def _broadcast_dim(operands: Sequence[tuple[Held, Shape]], axis: int, size: int) -> Family:
    """The family of a dimension of a result, counted from the last. Operands of this size must hold
    the same positions; operands of size 1 must hold one on each rank. If all have size 1, a rank
    without an element of one of them has none of the result."""
    own = [(held, held.dims[axis], shape[axis]) for held, shape in operands if len(shape) >= -axis]
    split = [(held, family) for held, family, extent in own if extent == size]
    (first, family), *others = split
    for held, other in others:
        if size == 1 and _is_within(other, family):
            family = other
        elif other is not family and not (size == 1 and _is_within(family, other)):
            raise NotShown(
                f"{first.term!r} and {held.term!r} hold other positions of dimension {axis}"
            )
    for held, other, extent in own:
        single = all(n == 1 or m == 0 == n for n, m in zip(other.sizes, family.sizes, strict=True))
        if extent != size and not single:
            raise NotShown(f"a rank does not hold dimension {axis} of {held.term!r}")
    return family


def _is_within(family: Family, other: Family) -> bool:
    """True if ranks hold the element of a dimension of size 1 only where they hold it in another
    family."""
    return all(n <= m <= 1 for n, m in zip(family.sizes, other.sizes, strict=True))


def elementwise(linear: Sequence[int] = (), all_linear: bool = False) -> Lemma:
    """The lemma of an elementwise op. It is linear in each of the operands `linear`, or if
    `all_linear`, in all of them together."""

    def show(case: Case) -> list[Result]:
        case.same_attrs()
        count = len(case.held)
        dims, shape = broadcast(case, range(count))
        partial = [h.partial if h is not None else () for h in case.held]
        parts = [i for i, each in enumerate(partial) if each]
        if parts and all_linear:
            if any(not each and not case.is_zero(i) for i, each in enumerate(partial)):
                raise NotShown("a value that is whole would be counted once for each rank")
        elif parts and not (len(parts) == 1 and parts[0] in linear):
            no_partial(*case.held)
        only_sums(*case.held)
        return [Result(0, dims, shape, merged(partial))]

    return show


def cast(case: Case) -> list[Result]:
    """Cast, also in place of the model's types of computing: linear between floats."""
    case.same_attrs()
    held = case.operand(0)
    floats = (1, 10, 11, 16)
    kinds = case.model.types.get(case.node.inputs[0]), case.attr("to")
    if held.partial and not all(kind in floats for kind in kinds):
        no_partial(held)
    return [Result(0, held.dims, tuple(case.shapes[0]), held.partial)]


def cast_like(case: Case) -> list[Result]:
    """CastLike: of the second operand, only the type matters."""
    case.same_attrs()
    case.operand(1)
    held = case.operand(0)
    no_partial(held)
    return [Result(0, held.dims, tuple(case.shapes[0]))]


def where(case: Case) -> list[Result]:
    """Where, linear in both values together."""
    case.same_attrs()
    dims, shape = broadcast(case, range(3))
    condition, x, y = (case.operand(i) for i in range(3))
    no_partial(condition)
    if bool(x.partial) != bool(y.partial) and not case.is_zero(2 if x.partial else 1):
        no_partial(x, y)
    return [Result(0, dims, shape, merged([x.partial, y.partial]))]


def contraction(
    case: Case, a: Held, b: Held, sizes: tuple[int, int], axes: tuple[int, int],
    dims: Sequence[Family],
) -> tuple[Partial, ...]:  # fmt: skip
    """What a sum over a dimension of both operands is: axes are those of the dimension. Both must
    hold the same positions of it."""
    left, right = a.dims[axes[0]], b.dims[axes[1]]
    if left is not right:
        raise NotShown("both operands must hold the same positions of the dimension that is summed")
    if a.partial and b.partial:
        no_partial(a, b)
    only_sums(a, b)
    inner = merged([a.partial, b.partial])
    if left.is_whole(sizes[0]):
        return inner
    if inner:
        no_partial(a, b)
    return (Partial("sum", left, sizes[0]),)


def matmul(case: Case) -> list[Result]:
    """MatMul: the last dimension of the first operand meets the last but one of the second."""
    case.same_attrs()
    a, b = case.operand(0), case.operand(1)
    x, y = case.shapes[0], case.shapes[1]
    if not x or not y:
        raise NotShown("an operand is a scalar")
    axes = len(x) - 1, max(len(y) - 2, 0)
    rank = max(len(x), len(y), 2)
    dims: list[Family] = []
    shape: list[int] = []
    for axis in range(-rank, -2):
        batch = [(h, s) for h, s in ((a, x), (b, y)) if len(s) >= -axis]
        size = max(s[axis] for _, s in batch) if all(s[axis] for _, s in batch) else 0
        dims.append(_broadcast_dim(batch, axis, size))
        shape.append(size)
    if len(x) > 1:
        dims.append(a.dims[-2])
        shape.append(x[-2])
    if len(y) > 1:
        dims.append(b.dims[-1])
        shape.append(y[-1])
    partial = contraction(case, a, b, (x[axes[0]], y[axes[1]]), axes, dims)
    return [Result(0, tuple(dims), tuple(shape), partial)]


def gemm(case: Case) -> list[Result]:
    """Gemm: a product, and a third operand that is added."""
    case.same_attrs()
    a, b = case.operand(0), case.operand(1)
    x, y = case.shapes[0], case.shapes[1]
    ka, kb = int(not case.attr("transA")), int(bool(case.attr("transB")))
    dims = (a.dims[1 - ka], b.dims[1 - kb])
    shape = (x[1 - ka], y[1 - kb])
    partial = contraction(case, a, b, (x[ka], y[kb]), (ka, kb), dims)
    if len(case.held) > 2 and case.held[2] is not None:
        c = case.held[2]
        only_sums(c)
        if bool(c.partial) != bool(partial) and not (partial and case.is_zero(2)):
            raise NotShown(f"{c.term!r} would be added once for each rank")
        for axis, family in zip(range(-len(c.dims), 0), c.dims, strict=True):
            wide = case.shapes[2][axis] == shape[axis]
            if (wide and family is not dims[axis]) or (not wide and set(family.sizes) != {1}):
                raise NotShown(f"{c.term!r} holds other positions of dimension {axis}")
        partial = merged([partial, c.partial])
    return [Result(0, dims, shape, partial)]


def reduce(kind: str, is_linear: bool) -> Lemma:
    """The lemma of a reduction; `kind` is the reduction of parts of it: sum, max, min, prod or
    mean, or the empty text if there is none."""

    def show(case: Case) -> list[Result]:
        case.same_attrs("axes")
        held, shape = case.operand(0), case.shapes[0]
        axes = _axes(case, len(shape))
        keeps = bool(case.attr("keepdims"))
        if not is_linear:
            no_partial(held)
        only_sums(held)
        partial = held.partial
        dims: list[Family] = []
        sizes: list[int] = []
        split: list[tuple[Family, int]] = []
        for axis, (family, size) in enumerate(zip(held.dims, shape, strict=True)):
            if axis not in axes:
                dims.append(family)
                sizes.append(size)
                continue
            if not family.is_whole(size):
                if not kind or partial:
                    raise NotShown(f"dimension {axis} of {held.term!r} must be whole")
                if kind in ("max", "min", "mean") and 0 in family.sizes:
                    raise NotShown(f"a rank has no element of the {kind}")
                split.append((family, size))
            if keeps:
                dims.append(case.families.whole(1))
                sizes.append(1)
        if split:
            partial = (Partial(kind, *_together(case, held, split, kind)),)
        return [Result(0, tuple(dims), tuple(sizes), partial)]

    return show


def _together(
    case: Case, held: Held, split: Sequence[tuple[Family, int]], kind: str
) -> tuple[Family, int]:
    """What ranks hold of several dimensions together, and of how many: of one, its positions; of
    more, places of pieces that each rank holds wholly or not at all; of a mean, in which they count
    by their sizes, places of positions."""
    if len(split) == 1:
        return split[0]
    if any(len(np.unique(s)) != len(s) for family, _ in split for s in family.spans):
        raise NotShown(f"a rank holds a position of {held.term!r} twice")
    pieces = [family.pieces(size) for family, size in split]
    if kind == "mean":
        pieces = [([*family.spans], size) for family, size in split]
        if math.prod(size for _, size in split) > MOST_MEANS:
            raise NotShown(f"a mean of too many elements of {held.term!r}")
    counts = [count for _, count in pieces]
    spans = zip(*(own for own, _ in pieces), strict=True)
    family = case.families.of(places_of(own, counts).reshape(-1) for own in spans)
    return family, math.prod(counts)


def _axes(case: Case, rank: int) -> set[int]:
    """The dimensions of a reduction, by attribute or operand."""
    own = default(case.node, "axes", case.model.opsets)
    if own is None:
        value = case.of_model(1)
        own = None if value is None else value.tolist()
    for i in range(case.ranks.size):
        node = case.local.nodes[i]
        other = node.attrs.get("axes")
        if other is None and len(node.inputs) > 1:
            other = case.of_ranks(1)[i].tolist()
        places = [sorted(place_of(a, rank) for a in each or ()) for each in (other, own)]
        if places[0] != places[1]:
            raise NotShown(f"rank {i} reduces other dimensions")
    if not own:
        return set() if case.attr("noop_with_empty_axes") else set(range(rank))
    return {int(axis) % rank for axis in own}


def along(axes: Callable[[Case, int], Sequence[int]], outputs: int = 1) -> Lemma:
    """The lemma of an op that needs some dimensions of its first operand whole, and treats all
    others alike; results have the shape of the operand."""

    def show(case: Case) -> list[Result]:
        case.same_attrs()
        no_partial(*case.held)
        held, shape = case.operand(0), case.shapes[0]
        for axis in axes(case, len(shape)):
            case.whole(held, axis % len(shape), shape)
        return [Result(i, held.dims, tuple(shape)) for i in range(outputs)]

    return show


def _axis(case: Case, rank: int) -> Sequence[int]:
    """The attribute `axis`; Softmax before opset 13 works on all dimensions from it."""
    axis = int(case.attr("axis") if case.attr("axis") is not None else -1)
    softmax = case.node.op in ("Softmax", "LogSoftmax", "Hardmax")
    if softmax and case.model.opsets.get("", 1) < 13:
        return range(axis % rank, rank)
    return [axis]


_CHANGED = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), 13),
    "BatchNormalization": 14,
    "GroupNormalization": 21,
    "Resize": 11,
    "Scan": 9,
    "Upsample": 9,
}
"""Ops that mean something else from an opset on, with the same attributes and operands."""


def check_opsets(case: Case) -> None:
    """Raises NotShown if the op means something else in the opset of a rank."""
    version = _CHANGED.get(case.node.op, 0) if case.node.domain == "" else 0
    programs = (case.model, *case.ranks.programs)
    if version and len({p.opsets.get("", 1) < version for p in programs}) > 1:
        raise NotShown(f"{case.node.op} means something else in the opset of a rank")


def arg(case: Case) -> list[Result]:
    """ArgMax and ArgMin: the dimension is whole."""
    case.same_attrs()
    held, shape = case.operand(0), case.shapes[0]
    no_partial(held)
    axis = int(case.attr("axis") or 0) % len(shape)
    case.whole(held, axis, shape)
    one = (case.families.whole(1),) if case.attr("keepdims") else ()
    dims = (*held.dims[:axis], *one, *held.dims[axis + 1 :])
    return [Result(0, dims, (*shape[:axis], *[1] * len(one), *shape[axis + 1 :]))]


def top_k(case: Case) -> list[Result]:
    """TopK: the dimension is whole, and so are both results."""
    case.same_attrs()
    held, shape = case.operand(0), case.shapes[0]
    no_partial(held)
    axis = int(case.attr("axis")) % len(shape)
    case.whole(held, axis, shape)
    count = case.constant(1)
    if count is None:
        raise NotShown("a TopK has no number")
    size = int(count.reshape(-1)[0])
    dims = (*held.dims[:axis], case.families.whole(size), *held.dims[axis + 1 :])
    return [Result(i, dims, (*shape[:axis], size, *shape[axis + 1 :])) for i in range(2)]


def cumulative(case: Case) -> list[Result]:
    """CumSum: the dimension is whole; a sum of sums is the sum."""
    case.same_attrs()
    held, shape = case.operand(0), case.shapes[0]
    only_sums(held)
    axis = case.constant(1)
    if axis is None:
        raise NotShown("a CumSum has no axis")
    case.whole(held, int(axis.reshape(-1)[0]) % len(shape), shape)
    return [Result(0, held.dims, tuple(shape), held.partial)]


def along_elements(case: Case) -> list[Result]:
    """GatherElements and ScatterElements: one dimension is whole; of the others, all operands hold
    the same positions."""
    case.same_attrs()
    no_partial(*case.held)
    axis = int(case.attr("axis") or 0) % len(case.shapes[0])
    data, result = case.operand(0), case.operand(0)
    if case.node.op == "GatherElements":
        result = case.operand(1)
    for index in range(len(case.held)):
        held, shape = case.operand(index), case.shapes[index]
        case.whole(held, axis, shape)
        for i, family in enumerate(held.dims):
            same_size = shape[i] == case.shapes[0][i]
            if i != axis and (not same_size or family is not data.dims[i]):
                raise NotShown(f"{held.term!r} holds other positions of dimension {i}")
    shape = case.shapes[1 if case.node.op == "GatherElements" else 0]
    return [Result(0, result.dims, tuple(shape))]


def tensor_scatter(case: Case) -> list[Result]:
    """TensorScatter: the dimension that is written is whole; of the others, the old and the new
    elements have the same positions."""
    case.same_attrs()
    no_partial(*case.held)
    old, new, shape = case.operand(0), case.operand(1), case.shapes[0]
    axis = int(case.attr("axis")) % len(shape)
    case.whole(old, axis, shape)
    case.whole(new, axis, case.shapes[1])
    for i, (first, second) in enumerate(zip(old.dims, new.dims, strict=True)):
        if i != axis and first is not second:
            raise NotShown(f"{new.term!r} holds other positions of dimension {i}")
    has_lengths = len(case.held) > 2 and case.held[2] is not None
    if has_lengths and case.operand(2).dims[0] is not old.dims[0]:
        raise NotShown(f"{case.operand(2).term!r} is of other samples")
    return [Result(0, old.dims, tuple(shape))]


def dropout(case: Case) -> list[Result]:
    """Dropout outside of training: the operand."""
    mode = case.of_model(2) if len(case.node.inputs) > 2 else None
    local = case.of_ranks(2) if len(case.local.first.inputs) > 2 else []
    if (mode is not None and mode.any()) or any(value.any() for value in local):
        raise NotShown("a Dropout draws")
    held = case.operand(0)
    return [Result(0, held.dims, tuple(case.shapes[0]), held.partial)]


def layer_norm(case: Case) -> list[Result]:
    """LayerNormalization and its like: the last dimensions are whole, also of scale and bias."""
    case.same_attrs()
    no_partial(*case.held)
    held, shape = case.operand(0), case.shapes[0]
    axis = int(case.attr("axis") if case.attr("axis") is not None else -1) % len(shape)
    for each in range(axis, len(shape)):
        case.whole(held, each, shape)
    for other, own in zip(case.held[1:], case.shapes[1:], strict=True):
        if other is not None and not other.is_whole(tuple(own)):
            raise NotShown(f"{other.term!r} must be whole on each rank")
    one = case.families.whole(1)
    statistics = tuple(f if i < axis else one for i, f in enumerate(held.dims))
    sizes = tuple(n if i < axis else 1 for i, n in enumerate(shape))
    results = [Result(0, held.dims, tuple(shape))]
    return results + [Result(i, statistics, sizes) for i in range(1, len(case.node.outputs))]


def gather(case: Case) -> list[Result]:
    """Gather: the dimension of rows is whole, the others and those of the indices are free."""
    case.same_attrs()
    data, indices = case.operand(0), case.operand(1)
    no_partial(indices)
    shape = case.shapes[0]
    axis = int(case.attr("axis") or 0) % len(shape)
    case.whole(data, axis, shape)
    dims = (*data.dims[:axis], *indices.dims, *data.dims[axis + 1 :])
    sizes = (*shape[:axis], *case.shapes[1], *shape[axis + 1 :])
    return [Result(0, dims, sizes, data.partial)]


def conv(case: Case) -> list[Result]:
    """Conv: samples are free, channels meet, and what is behind them is whole."""
    groups = int(case.attr("group"))
    case.same_attrs("group", "kernel_shape")
    x, w = case.operand(0), case.operand(1)
    no_partial(w)
    only_sums(x)
    shapes = case.shapes
    for rank, kernel in enumerate(case.local.attrs("kernel_shape", case.ranks.programs)):
        if kernel and list(kernel) != list(shapes[1][2:]):
            raise NotShown(f"kernel_shape is {kernel} on rank {rank}, and not that of its weight")
    for axis in range(2, len(shapes[0])):
        case.whole(x, axis, shapes[0])
        case.whole(w, axis, shapes[1])
    own = case.local.attrs("group", case.ranks.programs)
    partial: tuple[Partial, ...] = x.partial
    if groups == 1:
        if any(n != 1 for n in own):
            raise NotShown("a rank has other groups")
        sizes = shapes[0][1], shapes[1][1]
        partial = contraction(case, x, w, sizes, (1, 1), ())
    else:
        case.whole(w, 1, shapes[1])
        _groups(case, x, w, groups, [int(n) for n in own])
    return _with_bias(case, x.dims[0], w.dims[0], partial)


def conv_transpose(case: Case) -> list[Result]:
    """ConvTranspose without groups: samples are free, channels meet, and what is behind them is
    whole."""
    if int(case.attr("group") or 1) != 1:
        raise NotShown("there are groups of channels")
    case.same_attrs()
    x, w = case.operand(0), case.operand(1)
    no_partial(w)
    for axis in range(2, len(case.shapes[0])):
        case.whole(x, axis, case.shapes[0])
        case.whole(w, axis, case.shapes[1])
    sizes = case.shapes[0][1], case.shapes[1][0]
    partial = contraction(case, x, w, sizes, (1, 0), ())
    return _with_bias(case, x.dims[0], w.dims[1], partial)


def _with_bias(
    case: Case, samples: Family, channels: Family, partial: tuple[Partial, ...]
) -> list[Result]:
    """The result of a convolution, whose third operand has a number for each channel of it."""
    out = case.model.shapes.get(case.node.outputs[0])
    if out is None:
        raise NotShown("the shape of the result is unknown")
    if len(case.held) > 2 and case.held[2] is not None:
        bias = case.held[2]
        only_sums(bias)
        if bias.dims[0] is not channels:
            raise NotShown(f"{bias.term!r} holds other channels")
        if bool(bias.partial) != bool(partial) and not (partial and case.is_zero(2)):
            raise NotShown(f"{bias.term!r} would be added once for each rank")
        partial = merged([partial, bias.partial])
    space = [case.families.whole(n) for n in out[2:]]
    return [Result(0, (samples, channels, *space), out, partial)]


def resize(case: Case) -> list[Result]:
    """Resize: dimensions that keep their size are free, all others are whole."""
    case.same_attrs()
    held, shape = case.operand(0), case.shapes[0]
    if case.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise NotShown("a Resize crops")
    only_sums(held)
    out = case.model.shapes.get(case.node.outputs[0])
    if out is None:
        raise NotShown("the shape of the result is unknown")
    for axis, (size, wanted) in enumerate(zip(shape, out, strict=True)):
        if size != wanted:
            case.whole(held, axis, shape)
    dims = tuple(
        f if n == m else case.families.whole(m)
        for f, n, m in zip(held.dims, shape, out, strict=True)
    )
    for index in (2, 3):
        _same_scales(case, index, held, shape)
    return [Result(0, dims, out, held.partial)]


def _same_scales(case: Case, index: int, held: Held, shape: Shape) -> None:
    """Ranks must scale each dimension as the model does: operand 2 has factors, operand 3 sizes."""
    own = case.of_model(index)
    if own is None or not own.size:
        inputs = case.local.first.inputs
        given = case.of_ranks(index) if index < len(inputs) and inputs[index] else []
        if any(value.size for value in given):
            raise NotShown("a rank scales in another way")
        return
    axes = case.attr("axes") or range(len(shape))
    places = [int(axis) % len(shape) for axis in axes]
    for rank, value in enumerate(case.of_ranks(index)):
        for place, wanted, got in zip(places, own.tolist(), value.tolist(), strict=True):
            keeps = index == 3 and wanted == shape[place]
            if got != (held.dims[place].sizes[rank] if keeps else wanted):
                raise NotShown(f"rank {rank} scales dimension {place} in another way")


def _groups(case: Case, x: Held, w: Held, groups: int, own: Sequence[int]) -> None:
    """Each rank must have whole groups of channels, the same of both operands."""
    fan_in, fan_out = case.shapes[0][1] // groups, case.shapes[1][0] // groups
    for rank, count in enumerate(own):
        ins, outs = x.dims[1].spans[rank], w.dims[0].spans[rank]
        held = ins[::fan_in] // fan_in if fan_in else ins
        wanted_in = (held[:, None] * fan_in + np.arange(fan_in)).reshape(-1)
        wanted_out = (held[:, None] * fan_out + np.arange(fan_out)).reshape(-1)
        fits = np.array_equal(ins, wanted_in) and np.array_equal(outs, wanted_out)
        if not fits or (count != len(held) and len(held)):
            raise NotShown(f"rank {rank} has parts of groups of channels")


def by_channel(outputs: int = 1) -> Lemma:
    """The lemma of an op that treats samples and channels alike, and needs what is behind them
    whole; the operands behind the first have a value for each channel."""

    def show(case: Case) -> list[Result]:
        case.same_attrs()
        no_partial(*case.held)
        x, shape = case.operand(0), case.shapes[0]
        if case.node.op != "BatchNormalization":
            for axis in range(2, len(shape)):
                case.whole(x, axis, shape)
        elif case.attr("training_mode") or len(case.node.outputs) > 1:
            raise NotShown("a BatchNormalization computes its statistics")
        for other in case.held[1:]:
            if other is not None and other.dims and other.dims[0] is not x.dims[1]:
                raise NotShown(f"{other.term!r} holds other channels")
        out = case.model.shapes.get(case.node.outputs[0])
        if out is None:
            raise NotShown("the shape of the result is unknown")
        same = [f if n == m else case.families.whole(m)
                for f, n, m in zip(x.dims, shape, out, strict=True)]  # fmt: skip
        return [Result(0, tuple(same), out)]

    return show


def whole(case: Case) -> list[Result]:
    """Any op without state: where all operands are whole on each rank, results are."""
    case.same_attrs()
    if case.node.domain == "" and case.node.op in RANDOM and case.attr("seed") is None:
        raise NotShown(f"a {case.node.op} without a seed draws other values on each rank")
    for index, (held, shape) in enumerate(zip(case.held, case.shapes, strict=True)):
        if held is None:
            case.constant(index)
        elif not held.is_whole(tuple(shape)):
            raise NotShown(f"{held.term!r} must be whole on each rank")
    results = []
    for index, name in enumerate(case.node.outputs):
        is_tensor = case.model.types.get(name) != 0
        out = case.model.shapes.get(name) if is_tensor else ()
        if name and out is None:
            raise NotShown(f"the shape of {name!r} is unknown")
        if name and out is not None:
            results.append(Result(index, tuple(map(case.families.whole, out)), out))
    return results


_UNARY = """
Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu
HardSigmoid HardSwish IsInf IsNaN LeakyRelu Log Mish Not Reciprocal Relu Round Selu Shrink
Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu
"""
_BINARY = """
And BitShift BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Max Min
Mod Or Pow PRelu Xor Clip
"""
"""Elementwise ops that are not linear."""
POINTWISE = frozenset(
    [
        *_UNARY.split(),
        *_BINARY.split(),
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "Identity",
        "Cast",
        "Where",
    ]
)
"""Elementwise ops of ONNX."""
LEMMAS: Mapping[tuple[str, str], Lemma] = {
    **{("", op): elementwise() for op in (*_UNARY.split(), *_BINARY.split())},
    **{("", op): elementwise(linear=(0,)) for op in ("Neg", "Identity")},
    ("", "Dropout"): dropout,
    ("", "ArgMax"): arg,
    ("", "ArgMin"): arg,
    ("", "TopK"): top_k,
    ("", "CumSum"): cumulative,
    ("", "GatherElements"): along_elements,
    ("", "ScatterElements"): along_elements,
    ("", "TensorScatter"): tensor_scatter,
    ("", "Add"): elementwise(all_linear=True),
    ("", "Sub"): elementwise(all_linear=True),
    ("", "Sum"): elementwise(all_linear=True),
    ("", "Mean"): elementwise(all_linear=True),
    ("", "Mul"): elementwise(linear=(0, 1)),
    ("", "Div"): elementwise(linear=(0,)),
    ("", "Cast"): cast,
    ("", "CastLike"): cast_like,
    ("", "Where"): where,
    ("", "MatMul"): matmul,
    ("", "Gemm"): gemm,
    ("", "Conv"): conv,
    ("", "ConvTranspose"): conv_transpose,
    ("", "Resize"): resize,
    ("", "Gather"): gather,
    ("", "ReduceSum"): reduce("sum", True),
    ("", "ReduceMean"): reduce("mean", True),
    ("", "ReduceMax"): reduce("max", False),
    ("", "ReduceMin"): reduce("min", False),
    ("", "ReduceProd"): reduce("prod", False),
    ("", "ReduceSumSquare"): reduce("sum", False),
    ("", "ReduceL1"): reduce("sum", False),
    ("", "ReduceL2"): reduce("", False),
    ("", "ReduceLogSumExp"): reduce("", False),
    ("", "Softmax"): along(_axis),
    ("", "LogSoftmax"): along(_axis),
    ("", "Hardmax"): along(_axis),
    ("", "LpNormalization"): along(_axis),
    ("", "LayerNormalization"): layer_norm,
    ("", "RMSNormalization"): layer_norm,
    ("", "BatchNormalization"): by_channel(),
    ("", "InstanceNormalization"): by_channel(),
    **{
        ("", op): by_channel()
        for op in ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
    },
}
"""The lemmas, by domain and op."""
