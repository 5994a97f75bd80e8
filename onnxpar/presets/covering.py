"""Which leaves of a dimension split every element of it."""

from __future__ import annotations

from collections.abc import Iterator

from onnxpar.layout.layout import Concat, Dim, Factor, leaves


def covering(dim: Dim, first: int, parts: int) -> Iterator[int]:
    """Leaves of a dimension that split every element of it into so many parts, of which `first` is
    the number of the first; nothing where some segment is too short."""
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
