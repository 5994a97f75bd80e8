"""Sums over ranks in which each rank sends two bits per element and keeps the remainder.

Each element is sent as -threshold, 0 or threshold; the difference from the true value is added to
the element in the next call. The arithmetic is that of `--compression 2bit` in the graph
(`onnxpar.lowering.threshold_codes`), so both give the same steps for the same gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.hvd.fusion import agree, layout_of
from onnxpar.hvd.process_sets import Members
from onnxpar.lowering.compression import THRESHOLD, TWO_BIT
from onnxpar.runtime.ranks import collectives

PER_BYTE = 4


class TwoBit:
    """Sums named float32 and float64 arrays over ranks in multiples of `threshold`, and keeps the
    remainders that this rank has not sent yet, by name."""

    def __init__(self, threshold: float = THRESHOLD) -> None:
        if not 0 < threshold < np.inf:
            raise InputError(f"threshold={threshold!r} must be a positive number")
        self.threshold = threshold
        self.remainders: dict[str, Array] = {}

    def sum(
        self, members: Members, names: Sequence[str], arrays: Sequence[Array], what: str
    ) -> list[Array]:
        """Returns the sums of arrays over the members, in their order. If an array of any rank has
        an element that is not finite, all sums of its dtype are NaN, and the remainders stay as
        they were.

        Errors: InputError for other dtypes, and, on every rank, if names, dtypes or shapes differ
        between ranks.
        """
        for name, array in zip(names, arrays, strict=True):
            if array.dtype.name not in ("float32", "float64"):
                raise InputError(
                    f"{what}: {TWO_BIT} compression needs float32 or float64, but {name!r} is "
                    f"{array.dtype}"
                )
        layout = layout_of(names, arrays)
        text = "\n".join([f"{TWO_BIT} with threshold {self.threshold}", *map(str, layout)])
        digest = agree(members, text, what)
        results: dict[int, Array] = {}
        for dtype in sorted({array.dtype.name for array in arrays}):
            chosen = [i for i, array in enumerate(arrays) if array.dtype.name == dtype]
            rows = [arrays[i].reshape(-1) for i in chosen]
            kept = [self._kept(names[i], arrays[i]).reshape(-1) for i in chosen]
            called = f"{what}, {TWO_BIT} {dtype}"
            summed, rest = self._sum(
                members, np.concatenate(rows), np.concatenate(kept), called, f"layout={digest}"
            )
            ends = np.cumsum([arrays[i].size for i in chosen])[:-1]
            pieces = zip(chosen, np.split(summed, ends), np.split(rest, ends), strict=True)
            for index, part, remainder in pieces:
                results[index] = part.reshape(arrays[index].shape)
                self.remainders[names[index]] = remainder.reshape(arrays[index].shape)
        return [results[index] for index in range(len(arrays))]

    def _kept(self, name: str, array: Array) -> Array:
        """Returns the remainder of the array of this name; zeros if there is none of this shape and
        dtype."""
        kept = self.remainders.get(name)
        if kept is None or kept.shape != array.shape or kept.dtype != array.dtype:
            return np.zeros_like(array)
        return kept

    def encode(self, name: str, array: Array) -> Array:
        """Returns the bytes to send for an array, and keeps its remainder. The bytes are the codes,
        four per byte, and then a flag: 1 if an element is not finite, else 0. With the flag 1, the
        remainder stays as it was."""
        row, kept = array.reshape(-1), self._kept(name, array)
        sign, rest = self._quantized(row, kept.reshape(-1))
        finite = bool(np.isfinite(rest).all())
        self.remainders[name] = rest.reshape(array.shape) if finite else kept
        return np.append(packed(sign), np.uint8(not finite))

    def decode(self, codes: Array, length: int, dtype: np.dtype[Any]) -> Array:
        """Returns the sum of arrays of `length` elements, which `encode` turned into the rows of
        `codes`: NaN everywhere if any array had an element that is not finite."""
        if codes[:, -1].any():
            return np.full(length, np.nan, dtype)
        count = np.zeros(length, np.int32)
        for each in codes:
            count += unpacked(each[:-1], length)
        total: Array = count.astype(dtype) * dtype.type(self.threshold)
        return total

    def _sum(
        self, members: Members, row: Array, kept: Array, name: str, details: str
    ) -> tuple[Array, Array]:
        """Returns the sum of a flat array over the members, and this rank's new remainder.

        kept           the old remainder
        name, details  name of the collective, and a text that must be equal on all ranks
        """
        sign, rest = self._quantized(row, kept)
        spoiled = not bool(np.isfinite(rest).all())
        payload = np.append(packed(sign), np.uint8(spoiled))
        rows, _ = collectives.all_gather(members.world, payload, name, details)
        codes = rows.reshape(members.size, -1)
        return self.decode(codes, len(row), row.dtype), kept if codes[:, -1].any() else rest

    def _quantized(self, row: Array, kept: Array) -> tuple[Array, Array]:
        """Returns -1, 0 or 1 for each element of `row + kept`, by the threshold, and the new
        remainder."""
        unit = row.dtype.type(self.threshold)
        total = row + kept
        sign = (total >= unit).astype(np.int8) - (total <= -unit).astype(np.int8)
        return sign, total - sign.astype(row.dtype) * unit


def packed(sign: Array) -> Array:
    """Returns bytes of four codes each for the numbers -1, 0 and 1, whose codes are 0, 1 and 2.
    Byte i of n has the numbers i, i + n, i + 2 n and i + 3 n."""
    codes = np.ones(-(-len(sign) // PER_BYTE) * PER_BYTE, np.uint8)
    codes[: len(sign)] = sign + 1
    quarters = codes.reshape(PER_BYTE, -1)
    joined: Array = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    return joined


def unpacked(codes: Array, length: int) -> Array:
    """Returns the first `length` numbers -1, 0 and 1 (int8) that `packed` has turned into bytes."""
    quarters = [codes >> shift & 3 for shift in (0, 2, 4, 6)]
    return np.concatenate(quarters)[:length].astype(np.int8) - np.int8(1)
