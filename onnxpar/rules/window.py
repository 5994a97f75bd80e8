"""The windows of an op along one dimension: the elements and the padding that they read."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[int, int]
"""(first, last + 1)."""


@dataclass(frozen=True)
class Window:
    """The windows of an op along one dimension of `size` elements, with `pads` elements of padding
    before and after.

    A window has `width` elements, `dilation` apart; the next window begins `stride` elements later.
    `has_fixed_pads` is True if the pads are the same for any size; `exceeds` is True if the last
    window may reach beyond the padding. Methods take and return intervals of results and elements.
    """

    size: int
    width: int
    stride: int
    dilation: int
    pads: tuple[int, int]
    has_fixed_pads: bool = True
    exceeds: bool = False

    @property
    def span(self) -> int:
        """The extent of a window: from its first element to its last, inclusive."""
        return (self.width - 1) * self.dilation + 1

    def reach(self, out: Interval) -> Interval:
        """Returns the interval that the windows of the results `out` read, including padding: it
        may begin below 0 or end beyond the size."""
        return self._read(out)

    @property
    def is_plain(self) -> bool:
        """True if no window reads padding."""
        return not any(self.pads) and not self.exceeds

    def follows_size(self, can_pad: bool) -> bool:
        """True if, in a run with another size, the size alone tells which elements windows read,
        and each window reads at least one element. `can_pad` is True if a node can add the
        padding."""
        fits = self.pads[0] < self.span and self.pads[1] < self.span
        return type(self) is Window and self.has_fixed_pads and fits and (can_pad or self.is_plain)

    def covers(self, out: int) -> bool:
        """True if a single window covers exactly the whole dimension; `out` is the number of
        results."""
        return out == 1 < self.size == self.width and self.dilation == 1 and not any(self.pads)

    def held(self, out: Interval) -> Interval:
        """The interval of elements that the windows of the results `out` read, without padding, and
        extended to the start of the next window."""
        first, end = self._read(out)
        return max(first, 0), min(max(end, first + (out[1] - out[0]) * self.stride), self.size)

    def padding(self, out: Interval) -> Interval:
        """The number of padding elements that the windows of the results `out` read before and
        after the elements."""
        first, end = self._read(out)
        return max(-first, 0), min(max(end - self.size, 0), self.pads[1])

    def _read(self, out: Interval) -> Interval:
        first = out[0] * self.stride - self.pads[0]
        return first, first + (out[1] - 1 - out[0]) * self.stride + self.span


@dataclass(frozen=True)
class Spread(Window):
    """The windows of ConvTranspose along one dimension: the op multiplies each of `size` elements
    by the weights of a window, and adds the products to `width` results."""

    def held(self, out: Interval) -> Interval:
        """The interval of elements that the op adds to the results `out`; if there are none, one
        other element."""
        start, stop = out[0] + self.pads[0], out[1] + self.pads[0]
        first = min(-(-(start - self.span + 1) // self.stride), start // self.stride)
        first = min(max(first, 0), self.size - 1)
        return first, min(max((stop - 1) // self.stride, first), self.size - 1) + 1

    def padding(self, out: Interval) -> Interval:
        """The numbers of results to crop before and after `out`, if the op runs on the `held`
        elements."""
        begin, end, count = self._extent(out)
        return begin, max(count - end, 0)

    def growth(self, out: Interval) -> int:
        """The number of results at the end of `out` to which no `held` element adds."""
        _, end, count = self._extent(out)
        return max(end - count, 0)

    def _extent(self, out: Interval) -> tuple[int, int, int]:
        """Returns the start and end of `out` among the results to which the `held` elements add,
        and the number of these results."""
        first, end = self.held(out)
        origin = first * self.stride - self.pads[0]
        return out[0] - origin, out[1] - origin, (end - first - 1) * self.stride + self.span
