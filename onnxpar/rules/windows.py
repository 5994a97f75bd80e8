"""Windows over space: which spatial dimensions of an op are split, and what each shard reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.ir.tensors import Size, tensor_shape
from onnxpar.rules.rule import Local, Lowering

KERNEL = "the weights of one window"
WINDOW = "windows need neighbouring elements"
IN_PADDING = "some windows read only padding"
NEGATIVE = "its padding is negative"
SINGLE = "a single window covers it"
Interval = tuple[int, int]
_PADS_ARE_INPUT = 11
"""The first opset in which nodes may compute the pads of a Pad."""


@dataclass(frozen=True)
class Window:
    """Windows over one dimension of `size` elements with `pads` before and after.

    A window has `width` elements, `dilation` apart; the next window begins `stride` later.
    `has_fixed_pads` if the pads are the same for any size; `exceeds` if the last window may reach
    beyond the padding.
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
        """The range that the windows of these results read, padding included."""
        return self._read(out)

    @property
    def is_plain(self) -> bool:
        """True if no window reads padding."""
        return not any(self.pads) and not self.exceeds

    def follows_size(self, can_pad: bool) -> bool:
        """True if the range that its windows read depends on the size alone, and each window reads
        an element."""
        fits = self.pads[0] < self.span and self.pads[1] < self.span
        return type(self) is Window and self.has_fixed_pads and fits and (can_pad or self.is_plain)

    def covers(self, out: int) -> bool:
        """True if a single window covers the whole dimension."""
        return out == 1 < self.size == self.width and self.dilation == 1 and not any(self.pads)

    def held(self, out: Interval) -> Interval:
        """The range that the windows of these results read, without padding, extended to where the
        next window would begin."""
        first, end = self._read(out)
        return max(first, 0), min(max(end, first + (out[1] - out[0]) * self.stride), self.size)

    def padding(self, out: Interval) -> Interval:
        """The padding that they read before and after."""
        first, end = self._read(out)
        return max(-first, 0), min(max(end - self.size, 0), self.pads[1])

    def _read(self, out: Interval) -> Interval:
        first = out[0] * self.stride - self.pads[0]
        return first, first + (out[1] - 1 - out[0]) * self.stride + self.span


@dataclass(frozen=True)
class Spread(Window):
    """As Window, for an op that adds each of `size` elements, times the window, to its results
    (ConvTranspose)."""

    def held(self, out: Interval) -> Interval:
        """The range of elements that add to these results; if none does, one other element."""
        start, stop = out[0] + self.pads[0], out[1] + self.pads[0]
        first = min(-(-(start - self.span + 1) // self.stride), start // self.stride)
        first = min(max(first, 0), self.size - 1)
        return first, min(max((stop - 1) // self.stride, first), self.size - 1) + 1

    def padding(self, out: Interval) -> Interval:
        """The number of results of those elements that are cropped before and after."""
        begin, end, made = self._made(out)
        return begin, max(made - end, 0)

    def growth(self, out: Interval) -> int:
        """The number of results after the last one to which those elements add."""
        _, end, made = self._made(out)
        return max(end - made, 0)

    def _made(self, out: Interval) -> tuple[int, int, int]:
        first, end = self.held(out)
        origin = first * self.stride - self.pads[0]
        return out[0] - origin, out[1] - origin, (end - first - 1) * self.stride + self.span


@dataclass(frozen=True)
class Windows:
    """The spatial dimensions before and after an op, as rule text.

    A window of one element passes its dimension through. A window that covers the dimension is a
    product with the whole window (`h` before, `1` after; listed in `covered`). Any other dimension
    is `h` before and `y` after, co-sharded: a rank fetches the elements that the windows of its
    results read. That costs nothing if windows lie side by side and the shards of both line up.
    """

    before: list[str]
    after: list[str]
    whole: dict[str, str]
    tied: dict[int, Window]
    pads: list[tuple[int, int]] = field(default_factory=list)
    growth: list[int] = field(default_factory=list)
    covered: list[int] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """The fields of a rule that allow co-sharded dimensions to be split."""
        pairs = tuple((f"h{i}", f"y{i}") for i in self.tied)
        both = frozenset(f for pair in pairs for f in pair)
        return {
            "co_sharded": pairs,
            "contiguous": both,
            "lowered": both,
            "communicating": frozenset(self.inner),
        }

    @property
    def inner(self) -> list[str]:
        """The co-sharded dimensions before the op."""
        return [f"h{i}" for i in self.tied]

    def give_up(self, reason: str) -> None:
        """Makes all co-sharded dimensions whole, for a reason."""
        self.whole.update((f, reason) for i in self.tied for f in (f"h{i}", f"y{i}"))
        self.tied.clear()

    def split(self, local: Local) -> list[int]:
        """The co-sharded dimensions that are split."""
        return [i for i in self.tied if local.is_split(f"h{i}")]

    def fetch(
        self, builder: Lowering, x: gs.Tensor, first: int = 2, but: Collection[int] = ()
    ) -> gs.Tensor:
        """The elements of `x` that the rank's results read. `first` is the first spatial dimension
        of `x`; spatial dimensions in `but`, counted from 0, are not fetched."""
        for i in self.split(builder.local):
            if i not in but:
                x = builder.fetch(x, f"h{i}", first + i, self._held(i))
        return x

    def read(
        self, builder: Lowering, x: gs.Tensor, blank: Any, first: int = 2
    ) -> tuple[gs.Tensor, list[int]]:
        """The elements of `x` that the rank's results read, and the dimensions along which these
        include the padding: those of open size, if padding may be elements of value `blank` (an
        array, or the index of an operand)."""
        value = builder.input(blank) if isinstance(blank, int) else blank
        padded = self._computed_in_a_run(builder, value)
        x = self.fetch(builder, x, first, padded)
        for i in padded:
            x = self._fetch_padded(builder, x, i, first, value)
        return x, padded

    def _computed_in_a_run(self, builder: Lowering, blank: Any) -> list[int]:
        """The split dimensions of open size for which nodes can compute in each run what a rank
        reads: those without padding, or where padding may be elements of value `blank`."""
        split = [i for i in self.split(builder.local) if builder.is_open(f"h{i}")]
        can_pad = blank is not None and builder.opset >= _PADS_ARE_INPUT
        return [i for i in split if self.tied[i].follows_size(can_pad)]

    def _fetch_padded(
        self, builder: Lowering, x: gs.Tensor, i: int, first: int, blank: Any
    ) -> gs.Tensor:
        """The elements that the rank's results read along one dimension of open size, with its
        padding."""
        window, before, after = self.tied[i], f"h{i}", f"y{i}"
        axis = first + i
        start = builder.per_rank(lambda local: _number(local.interval(after)[0]))
        count = builder.per_rank(lambda local: _number(np.diff(local.interval(after))))
        size = builder.per_rank(lambda _: _number(window.size))
        begin = builder.add("Mul", [start, _number(window.stride)])
        begin = builder.add("Sub", [begin, _number(window.pads[0])])
        length = builder.add("Mul", [count, _number(window.stride)])
        length = builder.add("Add", [length, _number(window.span - window.stride)])
        end = builder.add("Add", [begin, length])
        low, high = _within(builder, begin, size), _within(builder, end, size)
        reach = window.reach(builder.local.interval(after))
        held = min(reach[1], window.size) - max(reach[0], 0)
        bounds = builder.add("Concat", [low, high], axis=0)
        x = builder.fetch_between(x, before, axis, bounds, held)
        if window.is_plain:
            return x
        shape = builder.shape(x)
        none = [np.zeros(n, np.int64) for n in (axis, len(shape) - 1, len(shape) - 1 - axis)]
        ends = builder.add("Sub", [low, begin]), builder.add("Sub", [end, high])
        pads = builder.add("Concat", [none[0], ends[0], none[1], ends[1], none[2]], axis=0)
        shape[axis] = reach[1] - reach[0]
        return builder.make("Pad", [x, pads, blank], (x.dtype, shape))

    def _held(self, i: int) -> Callable[[Local], Interval]:
        return lambda local: self.tied[i].held(local.interval(f"y{i}"))

    def attributes(self, node: gs.Node, padded: Collection[int] = ()) -> dict[str, Any]:
        """The node's attributes for an operand from `fetch`: explicit pads, which are 0 along
        dimensions that are `padded` already."""
        gone = {"auto_pad", "output_shape", "output_padding", "pads"}
        if self.covered:
            gone.add("kernel_shape")
        attrs: dict[str, Any] = {k: v for k, v in node.attrs.items() if k not in gone}
        attrs["pads"] = partial(self._pads, padded)
        if node.op == "ConvTranspose":
            attrs["output_padding"] = self._growths
        return attrs

    def _pads(self, padded: Collection[int], local: Local) -> list[int]:
        pads = list(self.pads)
        for i in self.split(local):
            is_done = i in padded
            pads[i] = (0, 0) if is_done else self.tied[i].padding(local.interval(f"y{i}"))
        return [p[0] for p in pads] + [p[1] for p in pads]

    def _growths(self, local: Local) -> list[int]:
        growth = list(self.growth)
        for i in self.split(local):
            window = self.tied[i]
            assert isinstance(window, Spread)
            growth[i] = window.growth(local.interval(f"y{i}"))
        return growth


def lower_windows(
    windows: Windows, image: int = 0, first: int = 2, blank: Any = None, **attrs: Any
) -> Callable[[Lowering], None]:
    """Lowers the op to itself, on the elements that the rank's windows read.

    Spatial dimensions of operand `image` begin at `first`; if `blank` is given, padding may be
    elements of that value (`Windows.read`).
    """

    def lower(builder: Lowering) -> None:
        node = builder.local.node
        inputs = [builder.input(i) for i in range(len(node.inputs))]
        inputs[image], padded = windows.read(builder, inputs[image], blank, first)
        builder.finish(node.op, inputs, **{**windows.attributes(node, padded), **attrs})

    return lower


def _number(value: Any) -> Any:
    return np.asarray(value, np.int64).reshape(1)


def _within(builder: Lowering, at: gs.Tensor, size: gs.Tensor) -> gs.Tensor:
    """A position clamped to the dimension, [0, size]."""
    zero = np.zeros(1, np.int64)
    at = builder.add("Where", [builder.add("Less", [at, zero]), zero, at])
    return builder.add("Where", [builder.add("Less", [size, at]), size, at])


def windows(node: gs.Node, kernel: Sequence[Size], first: int = 2, image: int = 0) -> Windows:
    """The windows of a convolution or pool with that kernel, over dimensions from `first` on."""
    found = Windows([], [], {}, {})
    shapes = [tensor_shape(t) or () for t in (node.inputs[image], node.outputs[0])]
    for i, width in enumerate(kernel):
        size, out = (shape[first + i] for shape in shapes)
        _add_dimension(found, node.op, i, width, size, out, _Geometry(node, i, len(kernel)))
    if None in [*shapes[0][first:], *shapes[1][first:]]:
        found.give_up(WINDOW)  # padding cannot be made explicit
    if any(p < 0 for pads in found.pads for p in pads):
        found.give_up(NEGATIVE)
    return found


class _Geometry:
    """The attributes of a window along one dimension."""

    def __init__(self, node: gs.Node, i: int, rank: int) -> None:
        attrs: Mapping[str, Any] = node.attrs
        self.stride = int((attrs.get("strides") or [1] * rank)[i])
        self.dilation = int((attrs.get("dilations") or [1] * rank)[i])
        self.grown = int((attrs.get("output_padding") or [0] * rank)[i])
        pads = attrs.get("pads") or [0] * (2 * rank)
        self.auto = attrs.get("auto_pad", "NOTSET")
        self.pads = (int(pads[i]), int(pads[rank + i]))
        self.by_shape = bool(attrs.get("output_shape"))
        self.has_fixed_pads = self.auto in ("NOTSET", "VALID") or self.stride == 1
        self.exceeds = bool(attrs.get("ceil_mode"))

    def padding(self, op: str, width: int, size: int, out: int) -> tuple[int, int]:
        """The explicit padding before and after."""
        span = (width - 1) * self.dilation + 1
        if op == "ConvTranspose":
            total = max((size - 1) * self.stride + span + self.grown - out, 0)
            spelled = self.auto in ("NOTSET", "VALID") and not self.by_shape
        else:
            is_pool = op.endswith("Pool")  # onnxruntime's ignore the dilation here
            reach = width if is_pool else span
            total = (-(-size // self.stride) - 1) * self.stride + reach - size
            total = total if is_pool else max(total, 0)
            spelled = self.auto in ("NOTSET", "VALID")
        if spelled:
            return self.pads if self.auto == "NOTSET" else (0, 0)
        first = int((total if self.auto == "SAME_UPPER" else total + 1) / 2)  # towards zero
        return first, total - first


def _add_dimension(
    found: Windows, op: str, i: int, width: Size, size: Size, out: Size, geometry: _Geometry
) -> None:
    before, after = f"h{i}", f"y{i}"
    stride, pads, growth = geometry.stride, geometry.pads, geometry.grown
    if size is None or out is None or width is None or 0 in (size, out):
        found.whole.update(dict.fromkeys((before, after), WINDOW))
    else:
        pads = geometry.padding(op, width, size, out)
        kind = Spread if op == "ConvTranspose" else Window
        flags = geometry.has_fixed_pads, geometry.exceeds
        window = kind(size, width, stride, geometry.dilation, pads, *flags)
        if isinstance(window, Spread):  # an output_shape may lie beyond what the windows reach
            growth = max(growth, out + sum(pads) - (size - 1) * stride - window.span)
        if width == stride == 1 and not any(pads) and size == out:
            after = before
        elif op in ("Conv", "ConvInteger", "QLinearConv") and window.covers(out):
            found.covered.append(i)
            after = "1"
        elif reason := _refusal(window, out):
            found.whole.update(dict.fromkeys((before, after), reason))
        else:
            found.tied[i] = window
    found.before.append(before)
    found.after.append(after)
    found.pads.append(pads)
    found.growth.append(growth)


def _refusal(window: Window, out: int) -> str | None:
    """Why the dimension cannot be split; None if it can."""
    if 1 in (window.size, out):
        return SINGLE
    if isinstance(window, Spread):
        return None
    is_void = window.span <= window.pads[0] or window.held((out - 1, out))[0] >= window.size
    return IN_PADDING if is_void else None
