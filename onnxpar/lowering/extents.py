"""The extents of a rank's shards of open sizes: where a shard starts, and its size. A rank computes
them in each run."""

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
    """The start or the size of a rank's shard of an open size, which several mesh axes may split.

    size       the whole size, as a polynomial of symbols
    axes       the mesh axes that split it
    at         the rank's coordinates along the axes
    is_start   True: the start of the shard; False: its size
    is_filled  True if an empty shard counts as one element, a stand-in
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
        """Returns the start or size in a run in which the whole has `size` elements."""
        sizes = self.parts.sizes(size) if self.parts else default_parts(size, self.axes)
        at = self.place
        start, length = sum(sizes[:at]), sizes[at]
        if self.is_filled and size and not length:
            start, length = min(start, size - 1), 1
        return start if self.is_start else length


@dataclass(frozen=True)
class SplitSize:
    """An open size that mesh axes split.

    sizes  its value at each binding (sizes of all symbols at which the model is lowered)
    size   its polynomial of symbols
    axes   the mesh axes that split it
    parts  the proportion in which ranks share it; None: equally
    """

    sizes: tuple[int, ...]
    size: Polynomial
    axes: Axes
    parts: Proportion | None


@dataclass(frozen=True)
class OpenArray:
    """An integer tensor that a rank computes in each run: its elements are polynomials of symbols,
    and of starts and sizes of the rank's shards."""

    elements: tuple[Polynomial, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def part_values(parts: Mapping[str, Extent], bindings: Sequence[Binding]) -> dict[str, list[int]]:
    """Returns the values of each extent (start or size of a shard) at all bindings (values of all
    symbols), by name."""
    return {
        name: [part.value(part.size.at(binding)) for binding in bindings]
        for name, part in parts.items()
    }
