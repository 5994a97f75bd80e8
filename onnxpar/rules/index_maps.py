"""Dimensions whose results are chosen elements of another: strided slices, mirrored padding,
nearest neighbours. Both are tied, and a rank fetches what lies between the first and the last
element that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.rules.rule import Local, Lowering


@dataclass(frozen=True, eq=False)
class IndexMap:
    """For each value of factor `after` the values of factor `before` that it needs, a row each."""

    before: str
    after: str
    index: Array

    def is_split(self, local: Local) -> bool:
        """Whether ranks hold parts of the dimensions."""
        return local.is_split(self.before)

    def fetch(self, builder: Lowering, x: gs.Tensor, axis: int) -> gs.Tensor:
        """All that the rank's results need of dimension `axis` of `x`; x itself where it is
        whole."""
        if not self.is_split(builder.local):
            return x
        return builder.fetch(x, self.before, axis, self.held)

    def held(self, local: Local) -> tuple[int, int]:
        """From the first needed element to behind the last."""
        needed = self.index[local.positions(self.after)]
        return int(needed.min()), int(needed.max()) + 1

    def rows(self, local: Local) -> Array:
        """Where in what was fetched the needed elements are."""
        needed = self.index[local.positions(self.after)]
        origin = self.held(local)[0] if self.is_split(local) else 0
        return np.asarray(needed - origin, np.int64)

    def take(self, builder: Lowering, x: gs.Tensor, axis: int) -> gs.Tensor:
        """The chosen elements, of a map with one for each value."""
        x = self.fetch(builder, x, axis)
        if self.is_split(builder.local) and (np.diff(self.index) == 1).all():
            return x
        return builder.add("Gather", [x, builder.per_rank(self.rows)], axis=axis)


def tied_fields(maps: dict[int, IndexMap]) -> dict[str, Any]:
    """The fields of a rule that let the dimensions of these maps be split."""
    pairs = tuple((m.before, m.after) for m in maps.values())
    both = frozenset(f for pair in pairs for f in pair)
    across = frozenset(m.before for m in maps.values())
    return {"co_sharded": pairs, "contiguous": both, "lowered": both, "communicating": across}
