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
    """A mesh axis, or a sub-axis of one: `tp`, or `tp:(2)4`, the sub-axis of size 4 that follows
    one of size 2 (OpenXLA Shardy's notation).

    pre  the product of the sizes of the sub-axes before this one; 1 for an undivided axis
    at   if set (`tp@2`), the axis does not divide a dimension: ranks at this coordinate of the axis
         hold the whole dimension, and all other ranks hold nothing
    """

    name: str
    size: int
    pre: int = 1
    at: int | None = None

    def overlaps(self, other: Axis) -> bool:
        """True if both are (sub-axes of) one mesh axis and share a part of it; no tensor may be
        split over both."""
        if self.name != other.name:
            return False
        return max(self.pre, other.pre) < min(self.pre * self.size, other.pre * other.size)


Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid with named axes and sizes; ranks are numbered in row-major order.

    >>> Mesh.parse("dp=2,tp=4").size
    8
    """

    shape: tuple[tuple[str, int], ...]

    @staticmethod
    def parse(text: str) -> Mesh:
        """Returns the mesh of a text such as `dp=2,tp=4`. Errors: StrategyError that names an entry
        that is not NAME=SIZE."""
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
        """Returns the mesh that a caller passed as a Mesh, as text or as None (stays None). Errors:
        StrategyError."""
        return Mesh.parse(mesh) if isinstance(mesh, str) else mesh

    @staticmethod
    def of(axes: Iterable[tuple[str, int]]) -> Mesh:
        """Returns the mesh of (name, size) pairs. Errors: StrategyError for a repeated name or a
        size below 1."""
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
        """The size of each axis, by name."""
        return dict(self.shape)

    def axis(self, name: str) -> Axis:
        """Returns the undivided axis with this name. Errors: StrategyError if the mesh has none."""
        if name not in self.sizes:
            raise StrategyError(f"mesh {self} has no axis {name!r}")
        return Axis(name, self.sizes[name])

    def flat(self, pre: int, size: int) -> Axes:
        """Takes all ranks as one row-major axis, and returns the axes and sub-axes of this mesh
        that make up the sub-axis `(pre)size` of it. With dp=2,tp=4, `flat(2, 2)` is `tp:(1)2`.

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
        """Returns the row-major position of a rank (or of each rank of an array) along these axes:
        which shard it holds of a dimension that they split."""
        at = 0 * rank
        for axis in axes:
            at = at * axis.size + (rank // self._stride(axis)) % axis.size
        return at

    def group(self, axes: Sequence[Axis], rank: int) -> tuple[int, ...]:
        """Returns the ranks that have the coordinates of `rank` on all axes but these, in row-major
        order: the group of a collective over `axes`."""
        ranks = [rank]
        for axis in axes:
            stride = self._stride(axis)
            here = (rank // stride) % axis.size
            ranks = [r + (i - here) * stride for r in ranks for i in range(axis.size)]
        return tuple(ranks)

    def _stride(self, axis: Axis) -> int:
        """The difference between the numbers of two ranks that are neighbours along an axis."""
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
    """Returns the number of shards into which these axes split a dimension: the product of their
    sizes."""
    return math.prod(axis.size for axis in axes)


def in_mesh_order(axes: Axes) -> Axes:
    """Returns axes sorted by name, and sub-axes of one axis from major to minor."""
    return tuple(sorted(axes, key=lambda a: (a.name, a.pre)))


def plain(axes: Iterable[Axis]) -> Axes:
    """Returns the axes without `at`: `tp@2` becomes `tp`. Collectives run over whole axes."""
    return tuple(axis if axis.at is None else replace(axis, at=None) for axis in axes)


def merge_axes(axes: Axes) -> Axes:
    """Joins adjacent sub-axes of one axis, and drops axes of size 1: `tp:(1)2, tp:(2)2` becomes
    `tp` of size 4, and `tp:(1)2@1, tp:(2)2@0` becomes `tp@2`."""
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
