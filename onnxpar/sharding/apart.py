"""Finds pairs of leaves of a tensor or node that may be split over the same mesh axis: leaves in
different segments of a concatenation (Q and K in a fused QKV weight), or leaves that no tensor has
in common. Any other two leaves need different axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from onnxpar.layout.layout import Concat, Dim, Factor
from onnxpar.layout.layout import leaves as leaves_of
from onnxpar.sharding.factors import Links, Pairs, TensorFactors


def apart_in_dims(dims: Sequence[Dim], counts: Sequence[int]) -> Pairs:
    """Returns the pairs of a tensor's leaves (parts of dimensions) that lie in different segments
    of one dimension. Leaves are numbered through all dimensions `dims`; `counts` has the number of
    leaves of each dimension."""
    apart: set[tuple[int, int]] = set()
    at = 0
    for dim, count in zip(dims, counts, strict=True):
        apart |= _apart(dim, at)
        at += count
    return frozenset(apart)


def _apart(dim: Dim, at: int) -> set[tuple[int, int]]:
    """Returns the pairs of a dimension's leaves (parts of dimensions) that lie in different
    segments of a concatenation. The first leaf of the dimension has the number `at`."""
    if isinstance(dim, Factor):
        return set()
    pairs: set[tuple[int, int]] = set()
    spans = []
    for child in dim.children:
        count = sum(leaf.size > 1 for leaf in leaves_of(child))
        pairs |= _apart(child, at)
        spans.append(range(at, at + count))
        at += count
    if isinstance(dim, Concat):
        pairs |= {(i, j) for a in spans for b in spans if a is not b for i in a for j in b}
    return pairs


def apart_in_op(
    operands: Iterable[tuple[str, Links]], tensors: Mapping[str, TensorFactors]
) -> Pairs:
    """Returns the pairs of a node's leaves (parts of dimensions) that may be split over the same
    axis: at least one tensor has the two leaves in different segments, and no tensor has them
    otherwise.

    operands  the names of the node's operands and results, each with its links: the node's leaf for
              each leaf of the tensor
    """
    operands = list(operands)
    if not any(name in tensors and tensors[name].apart for name, _ in operands):
        return frozenset()
    apart: set[tuple[int, int]] = set()
    together: set[tuple[int, int]] = set()
    for name, links in operands:
        pairs = tensors[name].apart if name in tensors else frozenset[tuple[int, int]]()
        for i, a in enumerate(links):
            for j, b in enumerate(links):
                if i != j and a is not None and b is not None:
                    (apart if (i, j) in pairs else together).add((a, b))
    return frozenset(apart - together)


def never_together(count: int, operands: Iterable[tuple[str, Links]]) -> Pairs:
    """Returns the pairs of a node's `count` leaves (parts of dimensions) that no operand or result
    has in common: values on different paths through a body. `operands` is that of `apart_in_op`."""
    pairs = {(i, j) for i in range(count) for j in range(count) if i != j}
    return frozenset(pairs.difference(*(product(links, links) for _, links in operands)))
