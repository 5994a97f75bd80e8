"""The device mesh: the ranks as a grid with named axes, which may be divided into sub-axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from onnxpar.base.arrays import Array
from onnxpar.base.errors import StrategyError

Rank = TypeVar("Rank", int, Array)
MOST_RANKS = 1 << 20
"""Most ranks of a mesh: lists of all ranks must fit into memory."""


def check_ranks(count: int) -> None:
    """Checks a number of ranks. Errors: StrategyError if it is below 1 or above MOST_RANKS."""
    if not 1 <= count <= MOST_RANKS:
        raise StrategyError(f"--devices {count}: give a number from 1 to {MOST_RANKS:,}")


@dataclass(frozen=True)
class Axis:
    """A mesh axis or a sub-axis: `tp`, or `tp:(2)4`, the sub-axis of size 4 after one of size 2.

    `pre` is the product of the sizes of the preceding sub-axes; an undivided axis has `pre` 1 and
    its full size. The notation is OpenXLA Shardy's. An axis with `at`, such as `tp@2`, does not
    divide a dimension: ranks at this coordinate of the axis hold the whole dimension, and all other
    ranks hold nothing.
    """

    name: str
    size: int
    pre: int = 1
    at: int | None = None

    def overlaps(self, other: Axis) -> bool:
        """True if both contain a common factor of one mesh axis; then no tensor may use both."""
        if self.name != other.name:
            return False
        return max(self.pre, other.pre) < min(self.pre * self.size, other.pre * other.size)


Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes; a rank is a row-major position in them.

    >>> Mesh.parse("dp=2,tp=4").size
    8
    """

    shape: tuple[tuple[str, int], ...]

    @staticmethod
    def parse(text: str) -> Mesh:
        """Parses `dp=2,tp=4`. Errors: StrategyError that names an entry that is not NAME=SIZE."""
        axes = []
        for entry in text.split(","):
            name, _, size = (part.strip() for part in entry.partition("="))
            if not name.isidentifier() or not size.isdigit():
                raise StrategyError(
                    f"mesh {text!r}: {entry!r} is not NAME=SIZE; write it like dp=2,tp=4"
                )
            axes.append((name, int(size)))
        return Mesh.of(axes)

    @staticmethod
    def from_argument(mesh: Mesh | str | None) -> Mesh | None:
        """Returns the mesh that a caller gives, also as text. Errors: StrategyError."""
        return Mesh.parse(mesh) if isinstance(mesh, str) else mesh

    @staticmethod
    def of(axes: Iterable[tuple[str, int]]) -> Mesh:
        """A mesh of (name, size) pairs. Errors: StrategyError for a repeated name or a size < 1."""
        shape = tuple(axes)
        names = [name for name, _ in shape]
        for name, size in shape:
            if not name:
                raise StrategyError(
                    "an axis of the mesh has an empty name; give it one, such as dp"
                )
            if names.count(name) > 1:
                raise StrategyError(
                    f"two axes of the mesh have the name {name!r}; give each axis its own name"
                )
            if size < 1:
                raise StrategyError(
                    f"axis {name!r} of the mesh has size {size}; give it a size of at least 1"
                )
        mesh = Mesh(shape)
        if mesh.size > MOST_RANKS:
            raise StrategyError(f"mesh {mesh} has {mesh.size:,} ranks; give at most {MOST_RANKS:,}")
        return mesh

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.shape)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size by axis name."""
        return dict(self.shape)

    def axis(self, name: str) -> Axis:
        """The undivided axis with this name. Errors: StrategyError, with the mesh, if there is
        none."""
        if name not in self.sizes:
            raise StrategyError(f"mesh {self} has no axis {name!r}")
        return Axis(name, self.sizes[name])

    def flat(self, pre: int, size: int) -> Axes:
        """The axes and sub-axes that together form the sub-axis `(pre)size` of one row-major axis
        of all ranks.

        For MindSpore's strategies, which give numbers of shards instead of axes. Errors:
        StrategyError if `pre` and `size` do not fit the sizes of the axes.
        """
        out: list[Axis] = []
        for name, n in self.shape:
            if pre % n == 0:
                pre //= n
                continue
            if n % pre or size == 1:
                break
            room = n // pre
            take = math.gcd(room, size)
            out.append(Axis(name, take, pre))
            size //= take
            if take < room:
                break
            pre = 1
        if size != 1:
            raise StrategyError(
                f"the mesh {self} has no axes left for a split into {size} more shards; choose "
                "numbers of shards that are products of the sizes of its axes"
            )
        return tuple(out)

    def coordinate(self, axes: Sequence[Axis], rank: Rank) -> Rank:
        """The row-major position of a rank, or of each rank in an array, along these axes."""
        at = 0 * rank
        for axis in axes:
            at = at * axis.size + (rank // self._stride(axis)) % axis.size
        return at

    def group(self, axes: Sequence[Axis], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along axes, in row-major order."""
        ranks = [rank]
        for axis in axes:
            stride = self._stride(axis)
            here = (rank // stride) % axis.size
            ranks = [r + (i - here) * stride for r in ranks for i in range(axis.size)]
        return tuple(ranks)

    def _stride(self, axis: Axis) -> int:
        """The difference between ranks that are neighbours along an axis."""
        return self._strides[axis.name] * (self.sizes[axis.name] // (axis.pre * axis.size))

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for name, size in reversed(self.shape):
            strides[name] = stride
            stride *= size
        return strides

    def text(self, axis: Axis) -> str:
        """The text of an axis: `tp` if it is undivided, `tp:(2)4` for a sub-axis, `tp@2` for an
        axis with `at`."""
        whole = axis.pre == 1 and axis.size == self.sizes[axis.name]
        text = axis.name if whole else f"{axis.name}:({axis.pre}){axis.size}"
        return text if axis.at is None else f"{text}@{axis.at}"

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.shape)


def parts_over(axes: Iterable[Axis]) -> int:
    """Number of shards into which these axes split a dimension."""
    return math.prod(axis.size for axis in axes)


def in_mesh_order(axes: Axes) -> Axes:
    """Axes sorted by name, sub-axes of one axis from major to minor."""
    return tuple(sorted(axes, key=lambda a: (a.name, a.pre)))


def plain(axes: Iterable[Axis]) -> Axes:
    """The axes without `at`, as in collectives."""
    return tuple(axis if axis.at is None else replace(axis, at=None) for axis in axes)


def merge_axes(axes: Axes) -> Axes:
    """Joins adjacent sub-axes of one axis: `tp:(1)2, tp:(2)2` becomes `tp` of size 4, and
    `tp:(1)2@1, tp:(2)2@0` becomes `tp@2`. Drops axes of size 1."""
    if not axes or (len(axes) == 1 and axes[0].size > 1):
        return tuple(axes)
    out: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        last = out[-1] if out else None
        if last and last.name == axis.name and last.pre * last.size == axis.pre:
            joined = Axis(last.name, last.size * axis.size, last.pre)
            if last.at is None and axis.at is None:
                out[-1] = joined
                continue
            if last.at is not None and axis.at is not None:
                out[-1] = replace(joined, at=last.at * axis.size + axis.at)
                continue
        out.append(axis)
    return tuple(out)
