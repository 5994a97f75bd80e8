"""Finds what a constant of ranks holds of one of the model's by its content alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import islice, product

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.stored import WeightFiles

MOST_BLOCKS = 4096
"""The most blocks of a constant that are tried."""
_Rows = dict[bytes, list[int]]


class Contents:
    """Digests of the rows of the model's constants, along each dimension that ranks cut."""

    def __init__(self, files: WeightFiles) -> None:
        self.files = files
        self._rows: dict[tuple[str, int], _Rows] = {}

    def find(self, term: str, whole: Array, own: Array) -> list[Array] | None:
        """The positions of each dimension of `whole`, the constant `term`, at which it has the
        bytes of `own`; None if there are none. Where rows are equal, the first that follow one
        another are taken. Of several dimensions that are cut, equal blocks are tried."""
        if own.ndim != whole.ndim or own.dtype != whole.dtype or own.dtype == object:
            return None
        if any(n > m for n, m in zip(own.shape, whole.shape, strict=True)):
            return None
        spans = [np.arange(n) for n in own.shape]
        cut = [a for a, (n, m) in enumerate(zip(own.shape, whole.shape, strict=True)) if n != m]
        if not own.size or not cut:
            return spans if self.files.is_same(own, whole, spans) else None
        if len(cut) > 1:
            return self._block(whole, own, spans, cut)
        (axis,) = cut
        key = term, axis
        if key not in self._rows:
            self._rows[key] = {}
            for i, row in enumerate(_digests(whole, axis)):
                self._rows[key].setdefault(row, []).append(i)
        span, last = [], -1
        for row in _digests(own, axis):
            places = self._rows[key].get(row)
            if places is None:
                return None
            last = next((p for p in places if p > last), places[0])
            span.append(last)
        spans[axis] = np.array(span, np.int64)
        return spans

    def _block(
        self, whole: Array, own: Array, spans: Sequence[Array], cut: Sequence[int]
    ) -> list[Array] | None:
        starts = [range(0, whole.shape[a] - own.shape[a] + 1, own.shape[a] or 1) for a in cut]
        first = own.reshape(-1)[:1].tobytes()
        for offsets in islice(product(*starts), MOST_BLOCKS):
            at = dict(zip(cut, offsets, strict=True))
            if whole[tuple(at.get(a, 0) for a in range(own.ndim))].tobytes() == first:
                found = [span + at.get(a, 0) for a, span in enumerate(spans)]
                if self.files.is_same(own, whole, found):
                    return found
        return None


def _digests(array: Array, axis: int) -> list[bytes]:
    """A digest of each row along a dimension."""
    rows = np.moveaxis(array, axis, 0)
    if math.prod(rows.shape[1:]) * array.itemsize <= 16:
        return [row.tobytes() for row in rows]
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
