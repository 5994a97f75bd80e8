"""Finds leaves that together split every element of a dimension: one leaf of a product of factors,
one leaf of each segment of a concatenation."""

from __future__ import annotations

from collections.abc import Iterator

from onnxpar.layout.layout import Concat, Dim, Factor
from onnxpar.sharding.factors import TensorFactors


def covering_leaves(factors: TensorFactors, parts: int) -> Iterator[list[int]]:
    """Yields a list of leaves (indices into the tensor's leaves) for each dimension that `parts`
    ranks can split completely. Together, the leaves (parts of dimensions) of a list split every
    element of the dimension."""
    numbers = iter(range(len(factors.leaves)))
    yield from filter(None, [_covering_of(dim, numbers, parts) for dim in factors.dims])


def _covering_of(dim: Dim, numbers: Iterator[int], parts: int) -> list[int]:
    """Returns the covering leaves (parts of dimensions) of one dimension; an empty list if a
    segment has fewer elements than `parts`. `numbers` yields the indices of the dimension's leaves,
    in order."""
    if isinstance(dim, Factor):
        number = [next(numbers)] if dim.size > 1 else []
        return number if dim.size >= parts else []
    inner = [(child.size, _covering_of(child, numbers, parts)) for child in dim.children]
    if isinstance(dim, Concat):
        is_whole = all(chosen for size, chosen in inner if size)
        return [i for _, chosen in inner for i in chosen] if is_whole else []
    fitting = [(size % parts, -size, chosen) for size, chosen in inner if chosen]
    return min(fitting, default=(0, 0, []))[2]
