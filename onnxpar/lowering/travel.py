"""Moves shards between ranks inside a lowered op: around a ring, or to the ranks that need the
elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.layout.mesh import Axes, Mesh

if TYPE_CHECKING:
    from onnxpar.lowering.lowering_builder import LoweringBuilder


def shift(
    builder: LoweringBuilder, x: gs.Tensor, axes: Axes, axis: int, sizes: Sequence[int]
) -> gs.Tensor:
    """Returns the `x` of the previous rank in a ring along the mesh axes `axes`: implements
    `Lowering.shift`. `sizes` are the sizes of the ranks' `x` along dimension `axis`."""
    count, rank = len(sizes), len(builder.shape(x))
    shapes = [size if i == axis % rank else -1 for size in sizes for i in range(rank)]
    shape = builder.shape(x)
    shape[axis] = sizes[-1]
    sources = [(i - 1) % count for i in range(count)]
    return builder.collective("CollectivePermute", x, axes, shape, sources=sources, shapes=shapes)


def exchange(
    builder: LoweringBuilder,
    mesh: Mesh,
    x: gs.Tensor,
    axes: Axes,
    axis: int,
    held: Sequence[Array],
    wanted: Sequence[Array],
) -> gs.Tensor:
    """Returns the elements of `x` that a rank needs, by one all-to-all: implements
    `Lowering.exchange`.

    axes    the mesh axes of the group
    axis    the dimension of `x` along which elements move
    held    the positions that each member of the group has in its `x`
    wanted  the positions that each member needs
    """
    count = len(held)
    sent = [[np.isin(wanted[d], held[s]) for d in range(count)] for s in range(count)]

    def order(rank: int) -> Array:
        me = mesh.coordinate(axes, rank)
        rows = [wanted[d][sent[me][d]] for d in range(count)]
        places = np.argsort(held[me])
        return places[np.searchsorted(held[me], np.concatenate(rows), sorter=places)]

    def split_sizes(rank: int) -> list[int]:
        me = mesh.coordinate(axes, rank)
        return [int(sent[me][d].sum()) for d in range(count)]

    def concat_sizes(rank: int) -> list[int]:
        me = mesh.coordinate(axes, rank)
        return [int(sent[s][me].sum()) for s in range(count)]

    def back(rank: int) -> Array:
        me = mesh.coordinate(axes, rank)
        return np.argsort(np.concatenate([np.flatnonzero(sent[s][me]) for s in range(count)]))

    rows = builder.add("Gather", [x, builder.by_rank(order)], axis=axis)
    shape = builder.shape(rows)
    shape[axis] = len(wanted[0])
    sizes = {"split_sizes": split_sizes, "concat_sizes": concat_sizes}
    y = builder.collective(
        "AllToAll", rows, axes, shape, split_axis=axis, concat_axis=axis, **sizes
    )
    return builder.add("Gather", [y, builder.by_rank(back)], axis=axis)
