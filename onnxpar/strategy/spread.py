"""Distributes the axes that shall split a dimension over the dimension's factors and segments."""

from __future__ import annotations

from collections.abc import Sequence

from onnxpar.layout.layout import Concat, Dim, Factor, leaves
from onnxpar.layout.mesh import Axes, Axis, parts_over


def spread_dim(dim: Dim, axes: Axes, blocked: frozenset[int] = frozenset()) -> list[Axes] | None:
    """Returns the axes for each splittable leaf (a part of a dimension) of a dimension, so that
    together they split the dimension over all `axes`. None if all leaves are blocked.

    Of the factors of a product, the first that the axes divide evenly takes them; else the first
    that is large enough; else the largest, where some shards are then empty. In a concatenation,
    each segment that can be split takes them. Leaves in `blocked` (indices) stay whole.
    """
    spread = _spread_over(dim, axes, blocked)
    if spread is not None or not axes:
        return spread
    if dim.size <= 1:
        return []
    at = [i for i, leaf in enumerate(_splittable(dim)) if i not in blocked]
    if not at:
        return None
    if isinstance(dim, Concat):
        return [axes if i in at else () for i in range(leaf_count(dim))]
    largest = max(at, key=lambda i: _splittable(dim)[i].size)
    return [axes if i == largest else () for i in range(leaf_count(dim))]


def _splittable(dim: Dim) -> list[Factor]:
    """Returns the leaves (parts of dimensions) of a dimension with two or more elements."""
    return [leaf for leaf in leaves(dim) if leaf.size > 1]


def _spread_over(dim: Dim, axes: Axes, blocked: frozenset[int]) -> list[Axes] | None:
    """Like `spread_dim`, but without empty shards: None if no leaf (a part of a dimension) is large
    enough."""
    if isinstance(dim, Factor):
        if not axes:
            return [()] if dim.size > 1 else []
        fits = dim.size > 1 and parts_over(axes) <= dim.size and 0 not in blocked
        return [axes] if fits else None
    empty = [[()] * leaf_count(c) for c in dim.children]
    starts = [sum(map(len, empty[:i])) for i in range(len(empty))]
    inner = [
        frozenset(j - s for j in blocked if s <= j < s + len(e))
        for s, e in zip(starts, empty, strict=True)
    ]
    if not axes:
        return [a for e in empty for a in e]
    if isinstance(dim, Concat):
        split = [_spread_over(c, axes, b) for c, b in zip(dim.children, inner, strict=True)]
        if all(s is None for s in split):
            return None
        return [a for s, e in zip(split, empty, strict=True) for a in (e if s is None else s)]
    n = parts_over(axes)
    ranked = [i for i, c in enumerate(dim.children) if c.size % n == 0]
    ranked += [i for i, c in enumerate(dim.children) if c.size >= n and i not in ranked]
    for i in ranked:
        inside = _spread_over(dim.children[i], axes, inner[i])
        if inside is not None:
            return [a for j, e in enumerate(empty) for a in (inside if i == j else e)]
    nestable = all(isinstance(c, Factor) for c in dim.children) and not blocked
    return nest([c.size for c in dim.children], axes) if nestable else None


def leaf_count(dim: Dim) -> int:
    """Returns the number of leaves (parts of dimensions) of a dimension with two or more
    elements."""
    return len(_splittable(dim))


def nest(sizes: Sequence[int], axes: Axes) -> list[Axes] | None:
    """Distributes axes over consecutive factors that share them: 2 groups of 4 heads over tp=8
    take tp:(1)2 and tp:(2)4. Returns the axes of each factor; None if the factors cannot use all
    axes."""
    out: list[Axes] = []
    rest = list(axes)
    for size in sizes:
        own_axes: list[Axis] = []
        while rest and size % rest[0].size == 0:
            size //= rest[0].size
            own_axes.append(rest.pop(0))
        if rest and size > 1 and rest[0].size % size == 0:
            axis = rest.pop(0)
            own_axes.append(Axis(axis.name, size, axis.pre))
            rest.insert(0, Axis(axis.name, axis.size // size, axis.pre * size))
        out.append(tuple(own_axes))
    return None if rest else out
