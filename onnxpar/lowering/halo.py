"""Moves elements between neighbouring shards of a dimension: the halos of windows, and shifted
slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.layout.layout import dim_axes
from onnxpar.layout.mesh import Axes
from onnxpar.lowering.rank_view import NodeView

if TYPE_CHECKING:
    from onnxpar.lowering.lowering_builder import LoweringBuilder

Interval = tuple[int, int]


def fetch(
    builder: LoweringBuilder,
    view: NodeView,
    x: gs.Tensor,
    factor: str,
    axis: int,
    wanted: Callable[[Any], Interval],
) -> gs.Tensor:
    """Returns the elements of `x` that each rank wants along dimension `axis`: implements
    `Lowering.fetch`.

    view    the node's shards
    factor  the index variable of the op's rule that runs along the dimension; shards are contiguous
    wanted  returns (start, end), the global positions that a rank wants, from its view

    If every rank needs elements of its direct neighbours only, neighbours exchange halos. Otherwise
    an all-to-all sends each element to all ranks that need it.
    """
    axes = dim_axes(view.factors[factor])
    members = view.mesh.group(axes, 0)
    held = [view.on(m).interval(factor) for m in members]
    want = [wanted(view.on(m)) for m in members]
    before = [max(0, h[0] - w[0]) for h, w in zip(held, want, strict=True)]
    after = [max(0, w[1] - h[1]) for h, w in zip(held, want, strict=True)]
    sizes = [0, *(h[1] - h[0] for h in held), 0]
    reach = zip(before, after, sizes, sizes[2:], strict=False)
    near = all(b <= previous and a <= following for b, a, previous, following in reach)
    if not near:
        return _redistribute(builder, view, x, axis, axes, held, want)
    if any(before) or any(after):
        shape = builder.shape(x)
        shape[axis] += before[0] + after[0]
        x = builder.collective(
            "NeighborExchange", x, axes, shape, axis=axis, before=before, after=after
        )
    if all(w[0] <= h[0] and w[1] >= h[1] for h, w in zip(held, want, strict=True)):
        return x

    def bound(end: int) -> Callable[[Any], Any]:
        def at(local: Any) -> Any:
            i = local.member(factor)
            return np.array([want[i][end] - held[i][0] + before[i]], np.int64)

        return at

    starts, ends = builder.per_rank(bound(0)), builder.per_rank(bound(1))
    return builder.add("Slice", [x, starts, ends, np.array([axis], np.int64)])


def _redistribute(
    builder: LoweringBuilder,
    view: NodeView,
    x: gs.Tensor,
    axis: int,
    axes: Axes,
    held: list[Interval],
    want: list[Interval],
) -> gs.Tensor:
    """Returns the elements of `x` in each rank's interval in `want`, by an all-to-all from the
    ranks that hold them (`held`). Both are intervals of dimension `axis`, one for each member of
    the group along `axes`."""
    mesh = view.mesh

    def overlap(owner: int, reader: int) -> range:
        return range(max(held[owner][0], want[reader][0]), min(held[owner][1], want[reader][1]))

    def order(rank: int) -> Any:
        me = mesh.coordinate(axes, rank)
        at = [i - held[me][0] for d in range(len(held)) for i in overlap(me, d)]
        return np.array(at, np.int64)

    def split_sizes(rank: int) -> list[int]:
        me = mesh.coordinate(axes, rank)
        return [len(overlap(me, d)) for d in range(len(held))]

    def concat_sizes(rank: int) -> list[int]:
        me = mesh.coordinate(axes, rank)
        return [len(overlap(s, me)) for s in range(len(held))]

    rows = builder.add("Gather", [x, builder.by_rank(order)], axis=axis)
    shape = builder.shape(rows)
    shape[axis] = want[0][1] - want[0][0]
    return builder.collective(
        "AllToAll",
        rows,
        axes,
        shape,
        split_axis=axis,
        concat_axis=axis,
        split_sizes=split_sizes,
        concat_sizes=concat_sizes,
    )
