"""Recognizes, by its values, a tensor that is a constant of the network and not a parameter: masks,
tables of sines and cosines, frequencies, grids of integers."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxpar.graph.lazy_values import stored_proto
from onnxpar.lowering.weights import read_blocks

Array = npt.NDArray[Any]

_HIDES = -1e4
"""A tensor with an element this low is a mask."""
_VANISHES = -20.0
"""A tensor of zeros and one other value that is at most this is a mask."""
_ROWS = 8
"""The number of rows of a table that are examined."""
_MOST = 1 << 22
"""The number of elements up to which a tensor is examined completely."""


def first_values(constant: gs.Constant, folder: Path) -> Array:
    """Returns the first rows of a stored tensor in float64, without dimensions of size 1: all rows,
    unless the tensor is large. `folder` has the model's files."""
    proto = stored_proto(constant)
    if proto is None:
        values = np.asarray(constant.values)
    elif not np.prod(proto.dims, dtype=np.int64):
        return np.zeros(0)
    else:
        _, _, values = next(read_blocks(proto, folder))
    values = values.squeeze()
    if values.size > _MOST:
        values = values[: max(_ROWS, _MOST * len(values) // values.size)]
    return values.astype(np.float64)


def zero_rows(constant: gs.Constant, folder: Path) -> list[int]:
    """Returns the indices of the rows of a stored table that are all zeros."""
    proto = stored_proto(constant)
    blocks = [((), 0, constant.values)] if proto is None else read_blocks(proto, folder)
    rows = []
    for lead, start, block in blocks:
        if not lead:
            counts = np.count_nonzero(block.reshape(len(block), -1), axis=1)
            rows += [start + int(row) for row in np.flatnonzero(counts == 0)]
    return rows


def is_mask(values: Array) -> bool:
    """True if the values are a mask: they have a large negative number, or are zeros and one
    negative number whose exponential vanishes."""
    if not values.size:
        return False
    least = np.nanmin(values)
    return bool(least <= _HIDES or (least <= _VANISHES and np.isin(values, (0, least)).all()))


def is_choice(values: Array) -> bool:
    """True if the first values are all 0 or 1, and both occur: a mask of choices."""
    return {*np.unique(values[:1000])} == {0, 1}


def is_filled(values: Array) -> bool:
    """True if all values are equal."""
    return bool(values.size and (values == values.flat[0]).all())


def is_sinusoid(values: Array) -> bool:
    """True if the rows or the columns are sines and cosines of evenly spaced angles.

    In such a series, the sum of an element's two neighbours is a fixed multiple of the element:
    sin(a - f) + sin(a + f) = 2 cos(f) sin(a). Scaled, phase-shifted and interleaved tables have
    this property, too.
    """
    if is_filled(values):
        return False
    return _has_waves(values) or (values.ndim == 2 and _has_waves(values.T))


def _has_waves(values: Array) -> bool:
    """True if the rows are such series: see `is_sinusoid`."""
    if values.ndim < 2 or len(values) < 3:
        return False
    rows = values[:_ROWS].reshape(min(_ROWS, len(values)), -1)
    if not np.isfinite(rows).all():
        return False
    if len(rows) < 5:
        return _is_first_rows(rows)
    inner, both = rows[1:-1], rows[:-2] + rows[2:]
    scale = np.abs(rows).max()
    weight = (inner * inner).sum(0)
    factor = np.clip((inner * both).sum(0) / np.where(weight == 0, 1, weight), -2, 2)
    moves = np.abs(rows - rows[0]).max(0) > 1e-6 * scale
    off = np.abs(both - factor * inner).max()
    return bool(scale and off < 2e-3 * scale and 8 * moves.sum() >= len(moves))


def _is_first_rows(rows: Array) -> bool:
    """True if the first three rows are the sines and cosines of 0, f and 2 f."""
    if not np.isin(rows[0], (0, 1)).all() or not rows[1].any():
        return False
    a, b = rows[1], rows[2]
    is_cosine = np.abs(b - (2 * a * a - 1)) < 1e-3
    is_sine = np.abs(b * b - 4 * a * a * (1 - a * a)) < 1e-3
    return bool((np.abs(a) <= 1.0001).all() and np.where(rows[0] == 1, is_cosine, is_sine).all())


def are_frequencies(values: Array, of_angles: bool) -> bool:
    """True if the values are a geometric sequence. If they are factors of angles (`of_angles`), a
    monotone sequence whose maximum is 1 is enough, like the scaled frequencies of rotary
    embeddings."""
    if values.ndim != 1 or values.size < 2 or not (values > 0).all():
        return False
    ratios = values[1:] / values[:-1]
    if not ((ratios < 1).all() or (ratios > 1).all()):
        return False
    if of_angles and abs(values.max() - 1) < 1e-3:
        return True
    return values.size > 3 and bool(np.ptp(ratios) < 2e-3 * ratios[0])


def are_whole(values: Array) -> bool:
    """True if the values are multiples of one half, with at least three different values: a grid,
    or positions."""
    with np.errstate(invalid="ignore"):
        halves = values * 2
        return bool((halves == np.rint(halves)).all() and len(np.unique(values[:1000])) > 2)


def is_scale_factor(value: float) -> bool:
    """True if a number is the irrational square root of a multiple of 8, or the reciprocal of such
    a root: networks scale embeddings and scores by the root of their width."""
    square = value * value
    if value <= 0 or not square:
        return False
    larger = max(square, 1 / square)
    count = round(larger)
    is_root = count % 8 == 0 and 0 < count < 1 << 15 and abs(larger - count) < 1e-6 * larger
    return is_root and round(count**0.5) ** 2 != count


def repeats_rows(values: Array) -> bool:
    """True if the values repeat slices of at least four numbers, and are not all equal: an expanded
    vector, or rows that a lookup took from a table."""
    axes = range(values.ndim)
    for count in range(1, values.ndim):
        for by in combinations(axes, count):
            slices = values.transpose(*by, *(i for i in axes if i not in by))
            slices = slices.reshape(math.prod(values.shape[i] for i in by), -1)
            if slices.shape[1] >= 4 and len(np.unique(slices, axis=0)) < len(slices):
                return bool((values != values.flat[0]).any())
    return False
