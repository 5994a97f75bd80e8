"""Rows: the runs of contiguous elements in which a part of a tensor is cut out or put in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxpar.layout.layout import Dim, Factor, Product, dim_axes, estimated_size, normalize
from onnxpar.layout.mesh import Mesh


def rows_within(dim: Dim, mesh: Mesh) -> int:
    """Into how many rows a split of a dimension cuts it: one, where ranks hold a run of it; of a
    merged dimension as many as there are of its outer factors; of segments each element, as they
    are picked one by one."""
    dim = normalize(dim)
    if isinstance(dim, Factor):
        return 1
    if isinstance(dim, Product):
        split = [i for i, child in enumerate(dim.children) if dim_axes(child)]
        return math.prod(
            estimated_size(c, mesh, 0) for c in dim.children[: split[-1] if split else 0]
        )
    return estimated_size(dim, mesh, 0)


def rows_moved(before: Sequence[Dim], after: Sequence[Dim], mesh: Mesh) -> int:
    """Rows of a tensor that one step takes from one layout to another, where a rank has most."""
    rows, outer = 0, 1
    for b, a in zip(before, after, strict=True):
        if b != a:
            rows += outer * max(rows_within(b, mesh), rows_within(a, mesh))
        outer *= max(estimated_size(b, mesh, 0), estimated_size(a, mesh, 0))
    return rows
