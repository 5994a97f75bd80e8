"""The device mesh: named axes, their sub-axes, and the ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxpar.errors import StrategyError

MOST_RANKS = 1 << 20
"""Lists of ranks stay small enough to be kept."""


def check_ranks(count: int) -> None:
    """Errors: StrategyError for a number of ranks that nothing can be planned for."""
    if not 1 <= count <= MOST_RANKS:
        raise StrategyError(f"--devices {count}: at least 1 rank, and at most {MOST_RANKS:,}")


@dataclass(frozen=True)
class Axis:
    """A mesh axis or a part of one: `tp`, or `tp:(2)4`, the 4 after a leading 2.

    `pre` is the product of the parts before it, so that the whole axis has pre 1 and its full size.
    The notation is OpenXLA Shardy's.
    """

    name: str
    size: int
    pre: int = 1

    def overlaps(self, other: Axis) -> bool:
        """Whether the two share coordinates, so that no tensor may use both."""
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
        """Reads `dp=2,tp=4`. Errors: StrategyError, naming the entry that is not NAME=SIZE."""
        axes = []
        for entry in text.split(","):
            name, _, size = (part.strip() for part in entry.partition("="))
            if not name.isidentifier() or not size.isdigit():
                raise StrategyError(f"mesh {text!r}: {entry!r} is not NAME=SIZE; write dp=2,tp=4")
            axes.append((name, int(size)))
        return Mesh.of(axes)

    @staticmethod
    def of(axes: Iterable[tuple[str, int]]) -> Mesh:
        """A mesh of (name, size) pairs. Errors: StrategyError for a repeated name or a size < 1."""
        shape = tuple(axes)
        names = [name for name, _ in shape]
        for name, size in shape:
            if not name:
                raise StrategyError("mesh: an axis has an empty name; give it one, such as dp")
            if names.count(name) > 1:
                raise StrategyError(
                    f"mesh: axis {name!r} stands twice; give each axis its own name"
                )
            if size < 1:
                raise StrategyError(f"mesh: axis {name!r} has size {size}; sizes start at 1")
        check_ranks(math.prod(size for _, size in shape))
        return Mesh(shape)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.shape)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size by axis name."""
        return dict(self.shape)

    def axis(self, name: str) -> Axis:
        """The whole axis of that name. Errors: StrategyError, listing the axes there are."""
        if name not in self.sizes:
            raise StrategyError(f"mesh {self} has no axis {name!r}")
        return Axis(name, self.sizes[name])

    def flat(self, pre: int, size: int) -> Axes:
        """The (sub-)axes that a flat, row-major view of all ranks splits as `(pre)size`.

        MindSpore's tuples count parts, not axes; its device matrix is such a view.
        Errors: StrategyError where the cut does not fall on factors of the axes.
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
                f"{size} more parts do not fit the mesh {self}; choose its sizes so"
            )
        return tuple(out)

    def coordinate(self, axes: Sequence[Axis], rank: int) -> int:
        """The row-major position of a rank within axes."""
        at = 0
        for axis in axes:
            stride = self._strides[axis.name] * (self.sizes[axis.name] // (axis.pre * axis.size))
            at = at * axis.size + (rank // stride) % axis.size
        return at

    def group(self, axes: Sequence[Axis], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along axes only, in their row-major order."""
        ranks = [rank]
        for axis in axes:
            stride = self._strides[axis.name] * (self.sizes[axis.name] // (axis.pre * axis.size))
            own = (rank // stride) % axis.size
            ranks = [r + (i - own) * stride for r in ranks for i in range(axis.size)]
        return tuple(ranks)

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for name, size in reversed(self.shape):
            strides[name] = stride
            stride *= size
        return strides

    def text(self, axis: Axis) -> str:
        """`tp` for a whole axis, `tp:(2)4` for a part."""
        whole = axis.pre == 1 and axis.size == self.sizes[axis.name]
        return axis.name if whole else f"{axis.name}:({axis.pre}){axis.size}"

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.shape)


def parts_over(axes: Iterable[Axis]) -> int:
    """Into how many parts these axes split."""
    return math.prod(axis.size for axis in axes)


def in_mesh_order(axes: Axes) -> Axes:
    """Axes by name, the parts of one axis from the major to the minor."""
    return tuple(sorted(axes, key=lambda a: (a.name, a.pre)))


def merge_axes(axes: Axes) -> Axes:
    """Joins neighbouring parts of one axis: `tp:(1)2, tp:(2)2` is `tp`, for tp of 4."""
    if not axes:
        return axes
    out: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        last = out[-1] if out else None
        if last and last.name == axis.name and last.pre * last.size == axis.pre:
            out[-1] = Axis(last.name, last.size * axis.size, last.pre)
        else:
            out.append(axis)
    return tuple(out)
