"""Maps from the positions of a result's dimension to the positions of an operand's dimension from
which they are copied: strided slices, mirrored padding, nearest neighbours. Both dimensions are
split over the same axes; a rank fetches the range from the first to the last element that its shard
of the result needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.rules.rule import Local, Lowering


@dataclass(frozen=True, eq=False)
class IndexMap:
    """Which elements of an operand's dimension a result's dimension needs: a slice with step 2 has
    the index [0, 2, 4, ...].

    before  the factor of the operand's dimension
    after   the factor of the result's dimension
    index   for each position of the result, the position in the operand, or a row of positions
    """

    before: str
    after: str
    index: Array

    def is_split(self, local: Local) -> bool:
        """True if both dimensions are split; they always are together."""
        return local.is_split(self.before)

    def fetch(self, builder: Lowering, x: gs.Tensor, axis: int) -> gs.Tensor:
        """Returns the elements of `x` that the rank's shard of the result needs along dimension
        `axis`, fetched from the ranks that hold them; `x` itself if the dimension is not split."""
        if not self.is_split(builder.local):
            return x
        return builder.fetch(x, self.before, axis, self.held)

    def held(self, local: Local) -> tuple[int, int]:
        """Returns the range (first, last + 1) of global positions that the rank's shard of the
        result needs."""
        needed = self.index[local.positions(self.after)]
        return int(needed.min()), int(needed.max()) + 1

    def rows(self, local: Local) -> Array:
        """Returns the positions within the fetched range, for each element of the rank's shard of
        the result."""
        needed = self.index[local.positions(self.after)]
        origin = self.held(local)[0] if self.is_split(local) else 0
        return np.asarray(needed - origin, np.int64)

    def take(self, builder: Lowering, x: gs.Tensor, axis: int) -> gs.Tensor:
        """Returns the rank's shard of the result: the elements that it needs along dimension
        `axis`, fetched and gathered from the operand `x`. The map must have one index for each
        position."""
        x = self.fetch(builder, x, axis)
        if self.is_split(builder.local) and (np.diff(self.index) == 1).all():
            return x
        return builder.add("Gather", [x, builder.per_rank(self.rows)], axis=axis)


def tied_fields(maps: dict[int, IndexMap]) -> dict[str, Any]:
    """Returns the fields of a `Rule` with which the dimensions of these maps may be split. `maps`
    has the map of each such dimension."""
    pairs = tuple((m.before, m.after) for m in maps.values())
    both = frozenset(f for pair in pairs for f in pair)
    before = frozenset(m.before for m in maps.values())
    return {"co_sharded": pairs, "contiguous": both, "lowered": both, "communicating": before}
