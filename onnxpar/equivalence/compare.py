"""Compares parts of constants with the model's, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.program import Shape


def same_bytes(own: Array, whole: Array, spans: Sequence[Array]) -> bool:
    """True if an array has the bytes of another at these positions."""
    if own.dtype != whole.dtype:
        return False
    part = whole[_index(spans, whole.shape)] if spans else whole
    if own.shape != part.shape:
        return False
    return bool(np.array_equal(_raw(own), _raw(part)))


def _raw(array: Array) -> Array:
    if array.dtype == object:
        return array
    return (
        np.ascontiguousarray(array).view(np.uint8)
        if array.ndim
        else np.frombuffer(array.tobytes(), np.uint8)
    )


def _index(spans: Sequence[Array], shape: Shape) -> tuple[Array | slice, ...]:
    """An index of the elements at these positions: slices where positions are contiguous."""
    slices = []
    for span in spans:
        if len(span) and not (np.diff(span) == 1).all():
            return np.ix_(*spans)
        slices.append(slice(int(span[0]), int(span[-1]) + 1) if len(span) else slice(0, 0))
    return tuple(slices)
