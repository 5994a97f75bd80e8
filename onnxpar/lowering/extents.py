"""Starts and sizes of a rank's shards of open sizes; a rank computes them in each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.layout.layout import default_parts
from onnxpar.layout.mesh import Axes
from onnxpar.layout.shares import Proportion
from onnxpar.layout.symbols import Binding, Polynomial


@dataclass(frozen=True)
class Extent:
    """The start (`is_start`) or the size of a rank's shard of an open size that is split over
    several axes.

    at         the rank's coordinates along the axes
    is_filled  True if an empty shard has one element, a stand-in
    parts      the proportion in which ranks share the size; None: equally
    """

    size: Polynomial
    axes: Axes
    at: tuple[int, ...]
    is_start: bool
    is_filled: bool = False
    parts: Proportion | None = None

    @property
    def place(self) -> int:
        """The rank's index along the axes, in row-major order."""
        return int(np.ravel_multi_index(self.at, [axis.size for axis in self.axes]))

    def value(self, size: int) -> int:
        """Returns the start or size of the shard at a run in which the whole has `size`
        elements."""
        sizes = self.parts.sizes(size) if self.parts else default_parts(size, self.axes)
        at = self.place
        start, length = sum(sizes[:at]), sizes[at]
        if self.is_filled and size and not length:
            start, length = min(start, size - 1), 1
        return start if self.is_start else length


@dataclass(frozen=True)
class SplitSize:
    """A split open size: its value at each binding (`sizes`), its polynomial (`size`), the axes
    that split it, and the proportion in which ranks share it (`parts`)."""

    sizes: tuple[int, ...]
    size: Polynomial
    axes: Axes
    parts: Proportion | None


@dataclass(frozen=True)
class OpenArray:
    """An integer tensor whose elements are polynomials of symbols and extents of shards."""

    elements: tuple[Polynomial, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def part_values(parts: Mapping[str, Extent], bindings: Sequence[Binding]) -> dict[str, list[int]]:
    """Returns the value of each extent at every binding, by name."""
    return {
        name: [part.value(part.size.at(binding)) for binding in bindings]
        for name, part in parts.items()
    }
