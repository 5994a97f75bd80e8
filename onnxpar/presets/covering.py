"""Leaves that split every element of a dimension."""

from __future__ import annotations

from collections.abc import Iterator

from onnxpar.layout.layout import Concat, Dim, Factor, leaves


def covering(dim: Dim, first: int, parts: int) -> Iterator[int]:
    """Yields the leaves that together split every element of a dimension into `parts`, as indices
    that start at `first` for the dimension's first leaf; none if some segment is too short."""
    if isinstance(dim, Factor):
        yield from [first] if dim.size >= max(parts, 2) else []
        return
    found = []
    for child in dim.children:
        found.append((child.size, list(covering(child, first, parts))))
        first += sum(leaf.size > 1 for leaf in leaves(child))
    if isinstance(dim, Concat):
        if all(chosen for size, chosen in found if size):
            yield from (i for _, chosen in found for i in chosen)
        return
    fitting = [(size % parts, -size, chosen) for size, chosen in found if chosen]
    yield from min(fitting, default=(0, 0, []))[2]
