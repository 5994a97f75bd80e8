"""The windows of an op along one dimension: which elements they read, and which padding."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[int, int]
"""First, and last plus one."""


@dataclass(frozen=True)
class Window:
    """The windows of an op along one dimension of `size` elements, with `pads` elements of padding
    before and after.

    A window has `width` elements, `dilation` apart; the next window begins `stride` later.
    `has_fixed_pads` is True if the pads are the same for any size, and `exceeds` if the last window
    may reach beyond the padding. Results and elements are given as intervals: first, and last plus
    one.
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
        """The interval that the windows of the results `out` read, including padding: it may begin
        below 0 or end beyond the size."""
        return self._read(out)

    @property
    def is_plain(self) -> bool:
        """True if no window reads padding."""
        return not any(self.pads) and not self.exceeds

    def follows_size(self, can_pad: bool) -> bool:
        """True if an open size alone determines which elements windows read, and each window reads
        at least one element. `can_pad` if a node can add the padding."""
        fits = self.pads[0] < self.span and self.pads[1] < self.span
        return type(self) is Window and self.has_fixed_pads and fits and (can_pad or self.is_plain)

    def covers(self, out: int) -> bool:
        """True if a single window covers exactly the whole dimension; `out` is the number of
        results."""
        return out == 1 < self.size == self.width and self.dilation == 1 and not any(self.pads)

    def held(self, out: Interval) -> Interval:
        """The interval of elements that the windows of the results `out` read, without padding, but
        extended to where the next window would begin."""
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
    """The windows of ConvTranspose along one dimension: the op adds each of `size` elements, times
    the weights of a window, to `width` results."""

    def held(self, out: Interval) -> Interval:
        """The interval of elements that the op adds to the results `out`; one other element if it
        adds none to them."""
        start, stop = out[0] + self.pads[0], out[1] + self.pads[0]
        first = min(-(-(start - self.span + 1) // self.stride), start // self.stride)
        first = min(max(first, 0), self.size - 1)
        return first, min(max((stop - 1) // self.stride, first), self.size - 1) + 1

    def padding(self, out: Interval) -> Interval:
        """The numbers of results that must be cropped before and after `out`, if the op runs on the
        `held` elements."""
        begin, end, made = self._made(out)
        return begin, max(made - end, 0)

    def growth(self, out: Interval) -> int:
        """The number of results at the end of `out` to which no `held` element adds."""
        _, end, made = self._made(out)
        return max(end - made, 0)

    def _made(self, out: Interval) -> tuple[int, int, int]:
        first, end = self.held(out)
        origin = first * self.stride - self.pads[0]
        return out[0] - origin, out[1] - origin, (end - first - 1) * self.stride + self.span
