"""Maps from the positions of a result's dimension to the positions of an operand's dimension from
which they are copied: strided slices, mirrored padding, nearest neighbours. The two dimensions are
co-sharded; a rank fetches the range from the first to the last element that its results need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.rules.rule import Local, Lowering


@dataclass(frozen=True, eq=False)
class IndexMap:
    """A map from each position along the result's factor `after` to the positions along the
    operand's factor `before` that the result needs: an element, or a row, of `index`."""

    before: str
    after: str
    index: Array

    def is_split(self, local: Local) -> bool:
        """True if the two dimensions are split."""
        return local.is_split(self.before)

    def fetch(self, builder: Lowering, x: gs.Tensor, axis: int) -> gs.Tensor:
        """Fetches the elements of `x` that the rank's results need along dimension `axis`, from the
        ranks that hold them; returns `x` itself if the dimension is not split."""
        if not self.is_split(builder.local):
            return x
        return builder.fetch(x, self.before, axis, self.held)

    def held(self, local: Local) -> tuple[int, int]:
        """The range of elements that the rank's results need, (first, last + 1), global indices."""
        needed = self.index[local.positions(self.after)]
        return int(needed.min()), int(needed.max()) + 1

    def rows(self, local: Local) -> Array:
        """The positions of the needed elements in the fetched range."""
        needed = self.index[local.positions(self.after)]
        origin = self.held(local)[0] if self.is_split(local) else 0
        return np.asarray(needed - origin, np.int64)

    def take(self, builder: Lowering, x: gs.Tensor, axis: int) -> gs.Tensor:
        """The rank's results along dimension `axis`, taken from `x`. The map must have one index
        for each result."""
        x = self.fetch(builder, x, axis)
        if self.is_split(builder.local) and (np.diff(self.index) == 1).all():
            return x
        return builder.add("Gather", [x, builder.per_rank(self.rows)], axis=axis)


def tied_fields(maps: dict[int, IndexMap]) -> dict[str, Any]:
    """Returns the fields of a rule that allow to split the dimensions of these maps, which are by
    dimension."""
    pairs = tuple((m.before, m.after) for m in maps.values())
    both = frozenset(f for pair in pairs for f in pair)
    before = frozenset(m.before for m in maps.values())
    return {"co_sharded": pairs, "contiguous": both, "lowered": both, "communicating": before}
