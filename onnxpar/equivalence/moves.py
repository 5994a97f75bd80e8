"""Ops that move elements, proved by exact arithmetic on positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.lemma import Case, Lemma, NotShown, Result, merged, place_of
from onnxpar.equivalence.program import Node, Shape, default
from onnxpar.equivalence.runs import Runs
from onnxpar.equivalence.spans import Family, places_of

MOST_WAYS = 6
"""The most ways in which a rank's copies of one element stand for a dimension."""


def transpose(case: Case) -> list[Result]:
    """Transpose."""
    held, shape = case.operand(0), case.shapes[0]
    turned = list(range(len(shape)))[::-1]
    perm = default(case.node, "perm", case.model.opsets) or turned
    for node in case.local.nodes:
        if list(node.attrs.get("perm") or turned) != list(perm):
            raise NotShown("a rank has another perm")
    dims = tuple(held.dims[axis] for axis in perm)
    return [Result(0, dims, tuple(shape[axis] for axis in perm), held.partial)]


def reshape(case: Case) -> list[Result]:
    """Reshape, Flatten, Squeeze and Unsqueeze: the elements of a rank stay in their order."""
    held, shape = case.operand(0), case.shapes[0]
    out = _shape_after(case, None, list(shape))
    local_out = [
        _shape_after(case, rank, [family.sizes[rank] for family in held.dims])
        for rank in range(case.ranks.size)
    ]
    dims = _regroup(case, held.dims, tuple(shape), tuple(out), local_out)
    return [Result(0, tuple(dims), tuple(out), held.partial)]


def _shape_after(case: Case, rank: int | None, own: list[int]) -> list[int]:
    """The shape of the result on a rank, or in the model, of an operand with the shape `own`."""
    node = case.node if rank is None else case.local.nodes[rank]
    second = None
    if len(node.inputs) > 1:
        second = case.of_model(1) if rank is None else case.of_ranks(1)[rank]
    return shape_after(node, own, second)


def shape_after(node: Node, own: Sequence[int], second: Array | None) -> list[int]:
    """The shape of the result of a Reshape, Flatten, Squeeze or Unsqueeze of an operand with the
    shape `own`; `second` is the second operand. NotShown if there is none."""
    if node.op == "Reshape":
        wanted = [int(n) for n in (node.attrs.get("shape", ()) if second is None else second)]
        keeps_zero = bool(node.attrs.get("allowzero"))
        sizes = [
            own[i] if n == 0 and not keeps_zero and i < len(own) else n
            for i, n in enumerate(wanted)
        ]
        if -1 in sizes:
            rest = math.prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = math.prod(own) // rest if rest else 0
        if math.prod(sizes) != math.prod(own):
            raise NotShown(f"{list(own)} is reshaped to {sizes}")
        return sizes
    if node.op == "Flatten":
        axis = int(node.attrs.get("axis", 1))
        axis += len(own) if axis < 0 else 0
        return [math.prod(own[:axis]), math.prod(own[axis:])]
    axes = node.attrs.get("axes")
    if axes is None and second is not None:
        axes = second.tolist()
    if node.op == "Unsqueeze" and axes is not None:
        total = len(own) + len(axes)
        places = {place_of(int(a), total) for a in axes}
        sizes_left = iter(own)
        return [1 if i in places else next(sizes_left) for i in range(total)]
    ones = {i for i, n in enumerate(own) if n == 1}
    places = {place_of(int(a), len(own)) for a in axes} if axes else ones
    if not places <= ones:
        raise NotShown("a dimension is squeezed that is not one")
    return [n for i, n in enumerate(own) if i not in places]


def _regroup(
    case: Case, dims: Sequence[Family], shape: Shape, out: Shape, local_out: Sequence[Sequence[int]]
) -> list[Family]:
    """The families of a reshaped tensor: groups of dimensions with the same number of elements are
    reshaped each by itself."""
    results: list[Family] = []
    for (a, b), (c, d) in _groups(shape, out):
        if b - a == 1 and d - c == 1:
            family = dims[a]
            if any(local_out[r][c] != n for r, n in enumerate(family.sizes)):
                raise NotShown(f"a rank reshapes dimension {c} to another size")
            results.append(family)
            continue
        spans: list[list[Array]] = [[] for _ in range(c, d)]
        memo: dict[tuple[object, ...], list[Array]] = {}
        for rank in range(case.ranks.size):
            inner = [dims[i].spans[rank] for i in range(a, b)]
            sizes = tuple(local_out[rank][c:d])
            key = (*map(id, inner), sizes)
            if key not in memo:
                memo[key] = _reshape_spans(inner, shape[a:b], out[c:d], sizes, rank)
            for target, span in zip(spans, memo[key], strict=True):
                target.append(span)
        results += [case.families.of(each) for each in spans]
    return results


def _groups(shape: Shape, out: Shape) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields ranges of dimensions of both shapes that have the same number of elements, as short as
    possible. Dimensions of one element go with the group before them."""
    i = j = 0
    while i < len(shape) or j < len(out):
        a, c = i, j
        left = right = 1
        if i < len(shape):
            left, i = shape[i], i + 1
        if j < len(out):
            right, j = out[j], j + 1
        while left != right:
            if (left < right and i < len(shape)) or j >= len(out):
                left, i = left * shape[i], i + 1
            else:
                right, j = right * out[j], j + 1
        if (i == len(shape)) != (j == len(out)):  # only dimensions of one element are left
            while i < len(shape) and all(n == 1 for n in shape[i:]):
                i += 1
            while j < len(out) and all(n == 1 for n in out[j:]):
                j += 1
        yield (a, i), (c, j)


def _reshape_spans(
    inner: Sequence[Array], shape: Shape, out: Shape, sizes: tuple[int, ...], rank: int
) -> list[Array]:
    """The positions of each dimension of a rank's result."""
    count = math.prod(map(len, inner))
    if math.prod(sizes) != count:
        raise NotShown(f"rank {rank} reshapes {count} elements to {list(sizes)}")
    spans = Runs.at(inner, shape, 0).reshape(sizes).spans(out, 0)
    if spans is None:
        raise NotShown(f"what rank {rank} holds is no part of the reshaped dimensions")
    return spans


def expand(case: Case) -> list[Result]:
    """Expand: a rank repeats one element as often as it holds positions of the result."""
    held, shape = case.operand(0), case.shapes[0]
    wide = case.of_model(1)
    if wide is None:
        raise NotShown("an Expand has no shape")
    out = tuple(int(n) for n in np.broadcast_shapes(tuple(shape), tuple(wide.tolist())))
    given = case.of_ranks(1)
    rank = len(out)
    own = (1,) * (rank - len(shape)) + tuple(shape)
    families = [case.families.whole(1)] * (rank - len(shape)) + list(held.dims)
    choices: list[list[Family]] = []
    for axis, (size, target) in enumerate(zip(own, out, strict=True)):
        sizes = []
        for r in range(case.ranks.size):
            wanted = given[r].tolist()
            at = axis - (rank - len(wanted))
            n, count = (wanted[at] if at >= 0 else 1), families[axis].sizes[r]
            if n != count and n != 1 and count != 1:
                raise NotShown(f"rank {r} cannot expand {count} to {n}")
            sizes.append(count if n == 1 else n)
        if size == target:
            if tuple(sizes) != families[axis].sizes:
                raise NotShown(f"a rank repeats dimension {axis}")
            choices.append([families[axis]])
        else:
            local = tuple(sizes)
            known = case.families.known(target, local)
            ways = [*known, *case.families.filled(target, local)][:MOST_WAYS]
            if axis:
                major = families[axis - 1], own[axis - 1]
                ways += [f for f in _digits(case, *major, target, sizes) if f not in ways]
            choices.append(ways)
    return [Result(0, dims, tuple(out), held.partial) for dims in product(*choices)]


def _digits(
    case: Case, major: Family, size: int, target: int, sizes: Sequence[int]
) -> Iterator[Family]:
    """Yields families of a dimension of `target` positions which, together with the dimension
    before it, make a known family of both merged: heads of keys that some heads of queries share.
    """
    counts = tuple(n * m for n, m in zip(major.sizes, sizes, strict=True))
    for merged_dims in islice(case.families.known(size * target, counts), MOST_WAYS):
        spans = []
        for before, both, count in zip(major.spans, merged_dims.spans, sizes, strict=True):
            table = both.reshape(len(before), count)
            spans.append(table[0] % target if len(before) else np.arange(count))
            if not np.array_equal(table, before[:, None] * target + spans[-1]):
                break
        else:
            yield case.families.of(spans)


def slice_(case: Case) -> list[Result]:
    """Slice, on each rank of what it holds."""
    held, shape = case.operand(0), case.shapes[0]
    own = _slices(case, None, shape)
    dims, sizes = list(held.dims), list(shape)
    for axis, positions in own.items():
        place = {int(p): i for i, p in enumerate(positions)}
        sizes[axis] = len(positions)
        dims[axis] = case.families.of(
            _placed(_sliced(case, rank, axis, held.dims[axis].spans[rank], shape), place, rank)
            for rank in range(case.ranks.size)
        )
    for rank in range(case.ranks.size):
        local = tuple(f.sizes[rank] for f in held.dims)
        for axis in _slices(case, rank, local):
            if axis not in own:
                kept = _sliced(case, rank, axis, held.dims[axis].spans[rank], shape)
                if len(kept) != local[axis]:
                    raise NotShown(f"rank {rank} slices dimension {axis}")
    return [Result(0, tuple(dims), tuple(sizes), held.partial)]


def _sliced(case: Case, rank: int, axis: int, span: Array, shape: Shape) -> Array:
    """The positions of a dimension that are left after a rank's Slice."""
    held = case.operand(0)
    local = tuple(f.sizes[rank] for f in held.dims)
    chosen = _slices(case, rank, local).get(axis)
    return span if chosen is None else span[chosen]


def _slices(case: Case, rank: int | None, shape: Shape) -> dict[int, Array]:
    """The positions that a Slice takes of each dimension: that of a rank, or of the model."""
    if rank is None:
        node, values = case.node, [case.of_model(i) for i in range(1, 5)]
    else:
        node = case.local.nodes[rank]
        inputs = node.inputs
        values = [
            case.of_ranks(i)[rank] if i < len(inputs) and inputs[i] else None for i in range(1, 5)
        ]
    if "starts" in node.attrs:
        values = [
            np.array(node.attrs[k]) if k in node.attrs else None for k in ("starts", "ends", "axes")
        ]
        values.append(None)
    return slice_positions(values, shape)


def slice_positions(values: Sequence[Array | None], shape: Shape) -> dict[int, Array]:
    """The positions that a Slice takes of each dimension; `values` are its starts, ends, axes and
    steps."""
    starts, ends, axes, steps = values
    if starts is None or ends is None:
        raise NotShown("a Slice has no bounds")
    count = len(starts)
    places = list(range(count)) if axes is None else axes.tolist()
    strides = [1] * count if steps is None else steps.tolist()
    found = {}
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), places, strides, strict=True):
        size = shape[place_of(axis, len(shape))]
        stop = end if step > 0 or end >= -size else None
        start, stop = (
            max(min(start, size), -size - 1),
            stop if stop is None else max(min(stop, size), -size - 1),
        )
        if start == -size - 1:
            start = 0 if step > 0 else -size - 1
        if stop == -size - 1 and step > 0:
            stop = 0
        found[axis % len(shape)] = np.arange(size)[slice(start, stop, step)]
    return found


def _placed(kept: Array, place: Mapping[int, int], rank: int) -> Array:
    """The places of positions in the result."""
    try:
        return np.array([place[int(p)] for p in kept], np.int64)
    except KeyError:
        raise NotShown(
            f"rank {rank} keeps positions that the model's slice does not have"
        ) from None


def split(case: Case) -> list[Result]:
    """Split: each result of a rank must be in the model's."""
    held, shape = case.operand(0), case.shapes[0]
    axis = int(case.attr("axis") or 0) % len(shape)
    for value in case.local.attrs("axis", case.ranks.programs):
        if place_of(int(value or 0), len(shape)) != axis:
            raise NotShown("a rank splits another dimension")
    count = len(case.node.outputs)
    model = _split_sizes(case, None, shape[axis], count)
    starts = np.cumsum([0, *model])
    spans: list[list[Array]] = [[] for _ in range(count)]
    for rank in range(case.ranks.size):
        span = held.dims[axis].spans[rank]
        ends = np.cumsum([0, *_split_sizes(case, rank, len(span), count)])
        for i in range(count):
            part = span[ends[i] : ends[i + 1]] - starts[i]
            if len(part) and not (part.min() >= 0 and part.max() < model[i]):
                raise NotShown(f"result {i} of rank {rank} holds positions of another result")
            spans[i].append(part)
    return [
        Result(
            i, (*held.dims[:axis], case.families.of(spans[i]), *held.dims[axis + 1 :]),
            (*shape[:axis], model[i], *shape[axis + 1 :]), held.partial,
        )
        for i in range(count)
    ]  # fmt: skip


def _split_sizes(case: Case, rank: int | None, size: int, count: int) -> list[int]:
    node = case.node if rank is None else case.local.nodes[rank]
    if "split" in node.attrs:
        sizes = [int(n) for n in node.attrs["split"]]
    elif len(node.inputs) > 1:
        value = case.of_model(1) if rank is None else case.of_ranks(1)[rank]
        sizes = [] if value is None else value.tolist()
    else:
        each = -(-size // count)
        sizes = [min(each, max(size - i * each, 0)) for i in range(count)]
    if sum(sizes) != size:
        raise NotShown(f"a Split of {size} has the sizes {sizes}")
    return sizes


def concat(case: Case) -> list[Result]:
    """Concat: what a rank holds of each operand, one behind the other."""
    shapes = case.shapes
    axis = int(case.attr("axis") or 0) % len(shapes[0])
    for value in case.local.attrs("axis", case.ranks.programs):
        if place_of(int(value or 0), len(shapes[0])) != axis:
            raise NotShown("a rank joins another dimension")
    held = [case.operand(i) for i in range(len(shapes))]
    first = held[0]
    for other in held[1:]:
        if any(
            f is not g
            for i, (f, g) in enumerate(zip(first.dims, other.dims, strict=True))
            if i != axis
        ):
            raise NotShown(f"{first.term!r} and {other.term!r} hold other positions")
        if bool(other.partial) != bool(first.partial):
            raise NotShown(f"{first.term!r} or {other.term!r} is a partial sum, the other is none")
    offsets = np.cumsum([0, *(shape[axis] for shape in shapes)])
    spans = [
        np.concatenate([h.dims[axis].spans[rank] + o for h, o in zip(held, offsets, strict=False)])
        for rank in range(case.ranks.size)
    ]
    dims = (*first.dims[:axis], case.families.of(spans), *first.dims[axis + 1 :])
    sizes = (*shapes[0][:axis], int(offsets[-1]), *shapes[0][axis + 1 :])
    return [Result(0, dims, sizes, merged([h.partial for h in held]))]


def pad(case: Case) -> list[Result]:
    """Pad: dimensions that are padded are whole."""
    case.same_attrs()
    held, shape = case.operand(0), case.shapes[0]
    for index in range(1, 4):
        case.constant(index)
    pads, axes = case.of_model(1), case.of_model(3)
    if pads is None:
        raise NotShown("a Pad has no amounts")
    places = range(len(shape)) if axes is None else [int(a) % len(shape) for a in axes]
    half = len(pads) // 2
    dims, sizes = list(held.dims), list(shape)
    for i, axis in enumerate(places):
        more = int(pads[i]) + int(pads[half + i])
        if pads[i] or pads[half + i]:
            case.whole(held, axis, shape)
            sizes[axis] += more
            dims[axis] = case.families.whole(sizes[axis])
    value = case.of_model(2)
    if held.partial and value is not None and np.asarray(value).any():
        raise NotShown(f"{held.term!r} is a partial sum, and would be padded once for each rank")
    return [Result(0, tuple(dims), tuple(sizes), held.partial)]


def tile(case: Case) -> list[Result]:
    """Tile: dimensions that repeat are whole."""
    held, shape = case.operand(0), case.shapes[0]
    repeats = case.constant(1)
    if repeats is None:
        raise NotShown("a Tile has no repeats")
    dims, sizes = list(held.dims), list(shape)
    for axis, count in enumerate(repeats.tolist()):
        if count != 1:
            case.whole(held, axis, shape)
            sizes[axis] *= count
            dims[axis] = case.families.whole(sizes[axis])
    return [Result(0, tuple(dims), tuple(sizes), held.partial)]


def gather_positions(case: Case) -> list[Result]:
    """Gather with constant indices: a rank takes positions of what it holds."""
    held, shape = case.operand(0), case.shapes[0]
    axis = int(case.attr("axis") or 0) % len(shape)
    own, local = case.of_model(1), case.of_ranks(1)
    if own is None:
        raise NotShown("there are no indices")
    if own.ndim > 1 or len(np.unique(own % shape[axis])) < own.size:
        return gather_places(case)
    given = case.local.attrs("axis", case.ranks.programs)
    if any(place_of(int(a or 0), len(shape)) != axis for a in given):
        raise NotShown("a rank gathers along another dimension")
    wanted = (own.reshape(-1) % shape[axis]).tolist()
    place = {p: i for i, p in enumerate(wanted)}
    spans = []
    for rank in range(case.ranks.size):
        span = held.dims[axis].spans[rank]
        indices = local[rank].reshape(-1)
        if local[rank].ndim != own.ndim or (
            len(indices) and not (-len(span) <= indices.min() <= indices.max() < len(span))
        ):
            raise NotShown(f"rank {rank} gathers positions that it does not hold")
        spans.append(_placed(span[indices], place, rank))
    between = () if own.ndim == 0 else (case.families.of(spans),)
    if own.ndim == 0 and any(span.tolist() != [0] for span in spans):
        raise NotShown("a rank gathers another position")
    dims = (*held.dims[:axis], *between, *held.dims[axis + 1 :])
    sizes = (*shape[:axis], *own.shape, *shape[axis + 1 :])
    return [Result(0, dims, sizes, held.partial)]


def gather_places(case: Case) -> list[Result]:
    """Gather, GatherND and GatherElements with constant indices: the places in the operand from
    which a rank takes its elements are those of some positions of the result."""
    held, shape = case.operand(0), case.shapes[0]
    own, local = case.of_model(1), case.of_ranks(1)
    if own is None or max(math.prod(shape), own.size) > MOST_PLACES:
        raise NotShown("there are no indices, or too many")
    wanted = _taken(case.node, case.model.opsets, places_of(map(np.arange, shape), shape), own)
    taken = []
    for rank, (node, program) in enumerate(zip(case.local.nodes, case.ranks.programs, strict=True)):
        places = places_of([family.spans[rank] for family in held.dims], shape)
        try:
            taken.append(_taken(node, program.opsets, places, local[rank]))
        except (IndexError, ValueError):
            raise NotShown(f"rank {rank} takes elements that it does not hold") from None
    if any(each.ndim != wanted.ndim for each in taken):
        raise NotShown("the results have other dimensions")
    choices = [
        case.families.known(size, tuple(each.shape[axis] for each in taken))[:MOST_WAYS]
        for axis, size in enumerate(wanted.shape)
    ]
    results = []
    for dims in product(*choices):
        spans = [[family.spans[rank] for family in dims] for rank in range(case.ranks.size)]
        pairs = zip(taken, spans, strict=True)
        if all(np.array_equal(each, wanted[np.ix_(*at)] if at else wanted) for each, at in pairs):
            results.append(Result(0, dims, wanted.shape, held.partial))
    if not results:
        raise NotShown("ranks take elements from other places")
    return results


def _taken(node: Node, opsets: Mapping[str, int], places: Array, indices: Array) -> Array:
    """The places that a node takes, of these."""
    axis = int(default(node, "axis", opsets) or 0) % places.ndim
    batch = int(default(node, "batch_dims", opsets) or 0)
    is_tuple = node.op == "GatherND"
    sizes = np.array(places.shape[batch:][: indices.shape[-1]] if is_tuple else places.shape[axis])
    if not ((-sizes <= indices) & (indices < sizes)).all():
        raise NotShown("an index is out of bounds")
    if node.op == "Gather":
        return np.take(places, indices, axis)
    if node.op == "GatherElements":
        kept = [slice(None if i == axis else n) for i, n in enumerate(indices.shape)]
        return np.take_along_axis(places[tuple(kept)], indices, axis)
    before = places.shape[:batch]
    if indices.shape[:batch] != before:
        raise NotShown("the indices have other batches")
    flat = places.reshape(math.prod(before), *places.shape[batch:])
    tuples = indices.reshape(math.prod(before), *indices.shape[batch:])
    parts = [one[tuple(np.moveaxis(at, -1, 0))] for one, at in zip(flat, tuples, strict=True)]
    after = places.shape[batch + indices.shape[-1] :]
    return np.array(parts, np.int64).reshape(*before, *indices.shape[batch:-1], *after)


MOST_PLACES = 1 << 24
"""The most elements whose places are computed one by one."""
RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
"""Ops that keep all elements in their order."""
MOVES: Mapping[str, Lemma] = {
    "Transpose": transpose,
    "Reshape": reshape,
    "Flatten": reshape,
    "Squeeze": reshape,
    "Unsqueeze": reshape,
    "Expand": expand,
    "Slice": slice_,
    "Split": split,
    "Concat": concat,
    "Pad": pad,
    "Tile": tile,
    "Gather": gather_positions,
    "GatherND": gather_places,
    "GatherElements": gather_places,
}
"""The ops of ONNX that move elements."""
