"""Windows of convolutions and pools over space: which spatial dimensions may be split, and which
elements a rank reads for its shard of the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, tensor_shape
from onnxpar.rules.rule import Local, Lowering
from onnxpar.rules.window import Interval, Spread, Window

KERNEL = "the weights of one window"
_SUMMED = ("Conv", "ConvInteger", "QLinearConv", "MaxPool", "AveragePool")
"""Ops whose rules reduce a dimension that a single window covers."""
WINDOW = "windows need neighbouring elements"
IN_PADDING = "some windows read only padding"
NEGATIVE = "its padding is negative"
SINGLE = "a single window covers it"


@dataclass(frozen=True)
class Windows:
    """The spatial dimensions of an op with windows, as texts of a rule.

    before   the dimensions of the operand, e.g. ["h0", "h1"]
    after    the dimensions of the result, e.g. ["y0", "h1"]
    whole    factors that must not be split, with the reason
    tied     the windows of each dimension whose `h` and `y` are split over the same axes: a rank
             fetches the elements that the windows of its results read
    pads     the padding of each dimension
    growth   for ConvTranspose: the results of each dimension that get no contribution
    covered  dimensions that a single window covers whole, `h` before and `1` after: the op sums
             over them, or takes their maximum

    A dimension with windows of one element has the same factor before and after. Nothing is fetched
    if windows lie side by side and the shards of both dimensions match.
    """

    before: list[str]
    after: list[str]
    whole: dict[str, str]
    tied: dict[int, Window]
    pads: list[tuple[int, int]] = field(default_factory=list)
    growth: list[int] = field(default_factory=list)
    covered: list[int] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a rule with which the dimensions of `tied` may be split."""
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
        """The factors of the operand's dimensions in `tied`."""
        return [f"h{i}" for i in self.tied]

    def give_up(self, reason: str) -> None:
        """Makes all dimensions of `tied` stay whole, for this reason."""
        self.whole.update((f, reason) for i in self.tied for f in (f"h{i}", f"y{i}"))
        self.tied.clear()

    def keep_covered(self) -> None:
        """Makes the dimensions that a single window covers whole unsplit, for ops that cannot
        reduce over ranks."""
        for i in self.covered:
            self.after[i] = f"y{i}"
            self.whole.update(dict.fromkeys((f"h{i}", f"y{i}"), SINGLE))
        self.covered.clear()

    def split(self, local: Local) -> list[int]:
        """Returns the dimensions of `tied` that are split; the first spatial dimension is 0."""
        return [i for i in self.tied if local.is_split(f"h{i}")]

    def fetch(
        self, builder: Lowering, x: gs.Tensor, first: int = 2, but: Collection[int] = ()
    ) -> gs.Tensor:
        """Returns the elements of `x` that the windows of the rank's results read, from the ranks
        that hold them.

        first  the first spatial dimension of `x`
        but    spatial dimensions, counted from 0, along which nothing is fetched
        """
        for i in self.split(builder.local):
            if i not in but:
                x = builder.fetch(x, f"h{i}", first + i, self._held(i))
        return x

    def read(
        self, builder: Lowering, x: gs.Tensor, blank: Any, first: int = 2
    ) -> tuple[gs.Tensor, list[int]]:
        """Like `fetch`, also for dimensions of open size, where the range to fetch is computed in
        each run. Returns (the elements, the spatial dimensions along which the elements include
        padding).

        blank  the value that can stand in `x` in place of padding: an array, the index of an
               operand, or None if there is no such value
        """
        value = builder.input(blank) if isinstance(blank, int) else blank
        padded = self._computed_in_a_run(builder, value)
        x = self.fetch(builder, x, first, padded)
        for i in padded:
            x = self._fetch_padded(builder, x, i, first, value)
        return x, padded

    def _computed_in_a_run(self, builder: Lowering, blank: Any) -> list[int]:
        """Returns the split dimensions of open size for which nodes can compute, in each run, the
        elements that a rank reads: dimensions without padding, or all if `blank` can stand for
        padding."""
        split = [i for i in self.split(builder.local) if builder.is_open(f"h{i}")]
        can_pad = blank is not None
        return [i for i in split if self.tied[i].follows_size(can_pad)]

    def _fetch_padded(
        self, builder: Lowering, x: gs.Tensor, i: int, first: int, blank: Any
    ) -> gs.Tensor:
        """Returns the elements of `x` that the windows of the rank's results read along spatial
        dimension `i`, of open size, including padding."""
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
        """Returns a function from a rank's view to the interval that the rank reads in dimension
        `i`."""
        return lambda local: self.tied[i].held(local.interval(f"y{i}"))

    def attributes(self, node: gs.Node, padded: Collection[int] = ()) -> dict[str, Any]:
        """Returns the attributes of a rank's node that reads the result of `fetch` or `read`: pads
        are explicit, and 0 along the dimensions `padded`, which include them already."""
        gone = {"auto_pad", "output_shape", "output_padding", "pads"} if self.tied else ()
        attrs: dict[str, Any] = {k: v for k, v in node.attrs.items() if k not in gone}
        if self.covered:
            attrs.pop("kernel_shape", None)
            if node.op.endswith("Pool"):  # others infer it from the rank's shard of the weight
                attrs["kernel_shape"] = partial(self.kernel, list(node.attrs["kernel_shape"]))
        if not self.tied:
            return attrs
        attrs["pads"] = partial(self._pads, padded)
        if "ceil_mode" in attrs:
            attrs["ceil_mode"] = partial(self._rounds_up, padded)
        if node.op == "ConvTranspose":
            attrs["output_padding"] = self._growths
        return attrs

    def kernel(self, kernel: Sequence[int], local: Local) -> list[int]:
        """Returns the sizes of a window on a rank: a dimension that a single window covers has the
        size of the rank's shard, at least 1. `kernel` are the sizes for the unsplit op."""
        covered = {i: max(local.size(f"h{i}"), 1) for i in self.covered}
        return [covered.get(i, width) for i, width in enumerate(kernel)]

    def _pads(self, padded: Collection[int], local: Local) -> list[int]:
        """The attribute `pads` of a rank's node."""
        pads = list(self.pads)
        for i in self.split(local):
            is_done = i in padded
            pads[i] = (0, 0) if is_done else self.tied[i].padding(local.interval(f"y{i}"))
        return [p[0] for p in pads] + [p[1] for p in pads]

    def _rounds_up(self, padded: Collection[int], local: Local) -> int:
        """Returns the attribute `ceil_mode` of a rank's node: 1 if its windows reach beyond the
        padding; else 0, because rounding up could add a window in ONNX's shape inference."""
        rounds_up = False
        for i in self.tied:
            window = self.tied[i]
            if i not in self.split(local):
                rounds_up |= window.exceeds
            elif i not in padded:
                out = local.interval(f"y{i}")
                rounds_up |= window.reach(out)[1] > window.size + window.padding(out)[1]
        return int(rounds_up)

    def _growths(self, local: Local) -> list[int]:
        """The attribute `output_padding` of a rank's ConvTranspose."""
        growth = list(self.growth)
        for i in self.split(local):
            window = self.tied[i]
            assert isinstance(window, Spread)
            growth[i] = window.growth(local.interval(f"y{i}"))
        return growth


def lower_windows(
    windows: Windows, image: int = 0, first: int = 2, blank: Any = None, **attrs: Any
) -> Callable[[Lowering], None]:
    """Returns a lowering to the same op on the elements that the windows of the rank's results
    read.

    image  the index of the operand with the spatial dimensions, which begin at dimension `first`
    blank  the value that can stand in the image in place of padding, as in `Windows.read`
    attrs  attributes in place of the node's
    """

    def lower(builder: Lowering) -> None:
        node = builder.local.node
        inputs = [builder.input(i) for i in range(len(node.inputs))]
        inputs[image], padded = windows.read(builder, inputs[image], blank, first)
        node_attrs = {**windows.attributes(node, padded), **attrs}
        builder.finish(node.op, inputs, domain=node.domain, **node_attrs)

    return lower


def _number(value: Any) -> Any:
    """`value` as an int64 array with one element."""
    return np.asarray(value, np.int64).reshape(1)


def _within(builder: Lowering, at: gs.Tensor, size: gs.Tensor) -> gs.Tensor:
    """Returns the position `at`, clamped to [0, size]."""
    zero = np.zeros(1, np.int64)
    at = builder.add("Where", [builder.add("Less", [at, zero]), zero, at])
    return builder.add("Where", [builder.add("Less", [size, at]), size, at])


def windows(node: gs.Node, kernel: Sequence[Size], first: int = 2, image: int = 0) -> Windows:
    """Returns the windows of a convolution or pool over the dimensions of operand `image` from
    `first` on; `kernel` has the width of a window in each dimension."""
    result = Windows([], [], {}, {})
    shapes = [tensor_shape(t) or () for t in (node.inputs[image], node.outputs[0])]
    for i, width in enumerate(kernel):
        size, out = (shape[first + i] for shape in shapes)
        _add_dimension(result, node.op, i, width, size, out, _Geometry(node, i, len(kernel)))
    if None in [*shapes[0][first:], *shapes[1][first:]]:
        result.give_up(WINDOW)  # padding cannot be made explicit
    if any(p < 0 for pads in result.pads for p in pads):
        result.give_up(NEGATIVE)
    return result


def one_window(size: Size, out: Size, width: int, stride: int) -> Windows:
    """Returns the windows of an op over one dimension of `size` elements, without padding, e.g. the
    frames of an STFT: `out` windows of `width` elements, `stride` apart."""
    result = Windows([], [], {}, {})
    _place(result, 0, Window(size or 0, width, stride, 1, (0, 0)), out)
    return result


class _Geometry:
    """The attributes of a node's windows along spatial dimension `i` of `rank`: strides, dilations,
    pads."""

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
        """Returns the numbers of padding elements before and after a dimension with `size` elements
        and `out` results, also if `auto_pad` implies them."""
        span = (width - 1) * self.dilation + 1
        if op == "ConvTranspose":
            total = max((size - 1) * self.stride + span + self.grown - out, 0)
            spelled = self.auto in ("NOTSET", "VALID") and not self.by_shape
        else:
            is_pool = op.endswith("Pool")  # onnxruntime's pools ignore the dilation here
            reach = width if is_pool else span
            total = (-(-size // self.stride) - 1) * self.stride + reach - size
            total = total if is_pool else max(total, 0)
            spelled = self.auto in ("NOTSET", "VALID")
        if spelled:
            return self.pads if self.auto == "NOTSET" else (0, 0)
        first = int((total if self.auto == "SAME_UPPER" else total + 1) / 2)  # rounds towards zero
        return first, total - first


def _add_dimension(
    result: Windows, op: str, i: int, width: Size, size: Size, out: Size, geometry: _Geometry
) -> None:
    """Adds spatial dimension `i` to `result`.

    width     the elements of a window
    size      the elements of the dimension
    out       the results
    geometry  strides, dilations and pads of the node in this dimension
    """
    stride, pads, growth = geometry.stride, geometry.pads, geometry.grown
    window = None
    if size and out and width is not None:
        pads = geometry.padding(op, width, size, out)
        kind = Spread if op == "ConvTranspose" else Window
        flags = geometry.has_fixed_pads, geometry.exceeds
        window = kind(size, width, stride, geometry.dilation, pads, *flags)
        if isinstance(window, Spread):  # an output_shape may lie beyond what the windows reach
            growth = max(growth, out + sum(pads) - (size - 1) * stride - window.span)
    _place(result, i, window, out, op in _SUMMED)
    result.pads.append(pads)
    result.growth.append(growth)


def _place(
    result: Windows, i: int, window: Window | None, out: Size, is_summed: bool = False
) -> None:
    """Adds spatial dimension `i`, with `out` results, to `result`.

    window     its windows; None if its size is unknown
    is_summed  True if the op's rule reduces a dimension that one window covers
    """
    before, after = f"h{i}", f"y{i}"
    if window is None or not window.size or not out:
        result.whole.update(dict.fromkeys((before, after), WINDOW))
    elif window.width == window.stride == 1 and not any(window.pads) and window.size == out:
        after = before
    elif is_summed and window.covers(out):
        result.covered.append(i)
        after = "1"
    elif reason := _refusal(window, out):
        result.whole.update(dict.fromkeys((before, after), reason))
    else:
        result.tied[i] = window
    result.before.append(before)
    result.after.append(after)


def _refusal(window: Window, out: int) -> str | None:
    """Returns the reason why a dimension with `out` results cannot be split; None if it can."""
    if 1 in (window.size, out):
        return SINGLE
    if isinstance(window, Spread):
        return None
    is_void = window.span <= window.pads[0] or window.held((out - 1, out))[0] >= window.size
    return IN_PADDING if is_void else None
