"""Adasum: adds gradients so that the common part of similar gradients counts once.

The sum of two gradients a and b is (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b: the plain sum
if they are orthogonal, the mean if they are equal. Of more gradients, Adasum combines pairs, then
pairs of pairs (Maleki et al., arXiv:2006.02924).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.process_sets import Members
from onnxpar.runtime.ranks import collectives

_LEAST = math.sqrt(sys.float_info.min)
"""A gradient with a smaller squared norm does not reduce the other."""


def check_ranks(size: int, what: str) -> None:
    """Errors: InputError unless `size`, the number of ranks, is a power of 2. `what` names the call
    in the error."""
    if size & (size - 1):
        raise InputError(
            f"{what}: Adasum combines pairs of ranks, so their number must be a power of 2, but it "
            f"is {size}"
        )


def adasum(
    members: Members, x: Array, sizes: Sequence[int], name: str = "", details: str = ""
) -> Array:
    """Returns the Adasum over the ranks of the flat array `x`, with the shape of `x`.

    sizes  the elements of each gradient in `x`: [3, 5] is a gradient of 3 elements and one of 5,
           and each is combined by itself

    In each of log2(ranks) rounds, pairs of ranks exchange all of `x`. Scalar products are added in
    float64.
    """
    if members.size == 1:
        return x.copy()
    distance = 1
    while distance < members.size:
        partner = members.rank ^ distance
        pair = sorted((members.rank, partner))
        called = f"{name}, Adasum over {2 * distance} ranks"
        both, _ = collectives.all_gather(members.subset(pair), x, called, details)
        x = _combined(both[: len(x)], both[len(x) :], sizes)
        distance *= 2
    return x


def _combined(a: Array, b: Array, sizes: Sequence[int]) -> Array:
    """Returns the Adasum of two flat arrays, gradient by gradient; `sizes` are the elements of each
    gradient in `a` and in `b`."""
    result = np.empty_like(a)
    ends = np.cumsum([0, *sizes])
    for start, end in itertools.pairwise(ends):
        left, right = (each[start:end].astype(np.float64) for each in (a, b))
        dot, of_left, of_right = left @ right, left @ left, right @ right
        left *= 1 - dot / of_left / 2 if of_left >= _LEAST else 1
        right *= 1 - dot / of_right / 2 if of_right >= _LEAST else 1
        result[start:end] = left + right
    return result
