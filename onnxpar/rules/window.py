"""The windows of an op along one dimension: the elements and the padding that they read."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[int, int]
"""(first, last + 1), global positions."""


@dataclass(frozen=True)
class Window:
    """The windows of a convolution or pool along one dimension.

    size            the global number of elements
    width           the elements of a window
    stride          the distance from one window's first element to the next window's
    dilation        the distance between elements of a window
    pads            the numbers of padding elements before and after
    has_fixed_pads  True if the pads are the same for any size
    exceeds         True if the last window may reach beyond the padding

    Methods take intervals of results (one result for each window) and return intervals of elements.
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
        may begin below 0 or end beyond the size. With width 3, stride 1 and pads (1, 1), results
        [0, 4) read [-1, 5)."""
        return self._read(out)

    @property
    def is_plain(self) -> bool:
        """True if no window reads padding."""
        return not any(self.pads) and not self.exceeds

    def follows_size(self, can_pad: bool) -> bool:
        """True if a graph can compute in each run, from a size that is open, which elements windows
        read, and each window reads at least one element. `can_pad` is True if a node can add the
        padding."""
        fits = self.pads[0] < self.span and self.pads[1] < self.span
        return type(self) is Window and self.has_fixed_pads and fits and (can_pad or self.is_plain)

    def covers(self, out: int) -> bool:
        """True if a single window is exactly the whole dimension; `out` is the number of
        results."""
        return out == 1 < self.size == self.width and self.dilation == 1 and not any(self.pads)

    def held(self, out: Interval) -> Interval:
        """Returns the interval of elements that the windows of the results `out` read, without
        padding, and extended to the start of the next window."""
        first, end = self._read(out)
        return max(first, 0), min(max(end, first + (out[1] - out[0]) * self.stride), self.size)

    def padding(self, out: Interval) -> Interval:
        """Returns how many padding elements the windows of the results `out` read before and after
        the elements."""
        first, end = self._read(out)
        return max(-first, 0), min(max(end - self.size, 0), self.pads[1])

    def _read(self, out: Interval) -> Interval:
        """The interval of `reach`."""
        first = out[0] * self.stride - self.pads[0]
        return first, first + (out[1] - 1 - out[0]) * self.stride + self.span


@dataclass(frozen=True)
class Spread(Window):
    """The windows of ConvTranspose along one dimension: the op multiplies each of `size` elements
    by the weights of a window, and adds the products to `width` results. Here, `pads` are results
    that are cropped."""

    def held(self, out: Interval) -> Interval:
        """Returns the interval of elements that contribute to the results `out`; if there are none,
        one other element."""
        start, stop = out[0] + self.pads[0], out[1] + self.pads[0]
        first = min(-(-(start - self.span + 1) // self.stride), start // self.stride)
        first = min(max(first, 0), self.size - 1)
        return first, min(max((stop - 1) // self.stride, first), self.size - 1) + 1

    def padding(self, out: Interval) -> Interval:
        """Returns how many results to crop before and after `out`, if the op runs on the elements
        of `held`."""
        begin, end, count = self._extent(out)
        return begin, max(count - end, 0)

    def growth(self, out: Interval) -> int:
        """Returns how many results at the end of `out` get no contribution from the elements of
        `held`."""
        _, end, count = self._extent(out)
        return max(end - count, 0)

    def _extent(self, out: Interval) -> tuple[int, int, int]:
        """Returns (start, end) of `out` among the results to which the elements of `held`
        contribute, and the number of these results."""
        first, end = self.held(out)
        origin = first * self.stride - self.pads[0]
        return out[0] - origin, out[1] - origin, (end - first - 1) * self.stride + self.span
