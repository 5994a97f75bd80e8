"""Reference implementations of convolutions, pools and similar ops in the dtype of their operands,
for tests of gradients. ONNX's own reference lacks these ops, has bugs in them, or computes them in
float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx.reference.op_run import OpRun

Array = npt.NDArray[Any]
Slices = tuple[Any, ...]


class Taps:
    """The windows of a convolution or pool over the spatial dimensions. Along each dimension,
    element k of window i is at `i * stride + k * dilation - before`, where `before` is the
    padding."""

    def __init__(self, kernel: Sequence[int], attrs: Mapping[str, Any]) -> None:
        rank = len(kernel)
        self.kernel = kernel
        self.strides: list[int] = attrs.get("strides") or [1] * rank
        self.dilations: list[int] = attrs.get("dilations") or [1] * rank
        pads = attrs.get("pads") or [0] * (2 * rank)
        auto = attrs.get("auto_pad") or "NOTSET"
        self.auto = "" if auto == "NOTSET" else auto
        self.before = [0] * rank if self.auto else list(pads[:rank])
        self.after = [0] * rank if self.auto else list(pads[rank:])

    @property
    def spans(self) -> list[int]:
        """The size of a window along each dimension, with dilation."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    def divide(self, totals: Sequence[int]) -> None:
        """Divides these totals of padding, one for each dimension, between start and end. If a
        total is odd, the larger half is at the end for SAME_UPPER, else at the start."""
        self.before = [t // 2 if self.auto == "SAME_UPPER" else -(-t // 2) for t in totals]
        self.after = [t - b for t, b in zip(totals, self.before, strict=True)]

    def over(self, sizes: Sequence[int], reaches: Sequence[int], by_ceil: Any = 0) -> list[int]:
        """Returns the number of windows along each dimension of an image with these sizes. Sets
        automatic padding first; `reaches` are the window sizes that it assumes. `by_ceil` rounds
        the number up."""
        if self.auto.startswith("SAME"):
            every = zip(sizes, self.strides, reaches, strict=True)
            self.divide([max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in every])
        found = []
        for n, s, span, low, high in zip(
            sizes, self.strides, self.spans, self.before, self.after, strict=True
        ):
            room = n + low + high - span
            out = (-(-room // s) if by_ceil else room // s) + 1
            found.append(out - 1 if by_ceil and (out - 1) * s >= n + low else out)
        return found

    def reach(self, out: Sequence[int]) -> list[int]:
        """Returns the number of elements that `out` windows cover together, along each
        dimension."""
        return [(n - 1) * s + w for n, s, w in zip(out, self.strides, self.spans, strict=True)]

    def each(self, out: Sequence[int]) -> Iterator[tuple[Slices, Slices]]:
        """Yields each element of the kernel, as an index, with the slices of the image that pick
        this element of all `out` windows."""
        for tap in np.ndindex(*self.kernel):
            element: Slices = (..., *tap)
            starts = [k * d for k, d in zip(tap, self.dilations, strict=True)]
            every = zip(starts, out, self.strides, strict=True)
            yield element, (..., *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in every))

    def padded(self, x: Array, out: Sequence[int], fill: float = 0) -> Array:
        """Returns the image `x` with its padding (`fill`), and with zeros at the end as far as
        `out` windows reach."""
        lead = [(0, 0)] * (x.ndim - len(out))
        pads = [*lead, *zip(self.before, self.after, strict=True)]
        x = np.pad(x, pads, constant_values=fill)
        after = [max(r - n, 0) for r, n in zip(self.reach(out), x.shape[-len(out) :], strict=True)]
        return np.pad(x, [*lead, *((0, a) for a in after)])

    def total(self, x: Array, out: Sequence[int], fill: float = 0) -> Array:
        """Returns the sum over each window of the image `x`, padded with `fill`; `out` is the
        number of windows along each dimension."""
        wide = self.padded(x, out, fill)
        return sum((wide[at] for _, at in self.each(out)), np.zeros((), x.dtype))


def _grouped(x: Array, group: int, axis: int) -> Array:
    """Divides dimension `axis` of an array into (group, channels of the group)."""
    return x.reshape(*x.shape[:axis], group, x.shape[axis] // group, *x.shape[axis + 1 :])


def _joined(y: Array, bias: Array | None) -> Array:
    """Joins dimensions 1 and 2 (group, channel) of an array, and adds the bias of each channel."""
    y = y.reshape(y.shape[0], y.shape[1] * y.shape[2], *y.shape[3:])
    return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))


class Conv(OpRun):
    """A convolution."""

    def _run(self, x: Array, w: Array, bias: Array | None = None, **attrs: Any) -> tuple[Array]:
        taps = Taps(w.shape[2:], attrs)
        out = taps.over(x.shape[2:], taps.spans)
        wide = taps.padded(_grouped(x, attrs["group"], 1), out)
        weight = _grouped(w, attrs["group"], 0)
        y = np.zeros((x.shape[0], *weight.shape[:2], *out), x.dtype)
        for tap, at in taps.each(out):
            y += np.einsum("ngc...,goc->ngo...", wide[at], weight[tap])
        return (_joined(y, bias),)


class ConvTranspose(OpRun):
    """The transpose of a convolution."""

    def _run(self, x: Array, w: Array, bias: Array | None = None, **attrs: Any) -> tuple[Array]:
        taps = Taps(w.shape[2:], attrs)
        out = x.shape[2:]
        grown = attrs.get("output_padding") or [0] * len(out)
        made = [r + g for r, g in zip(taps.reach(out), grown, strict=True)]
        asked = attrs.get("output_shape")
        if not asked and taps.auto.startswith("SAME"):
            asked = [n * s for n, s in zip(out, taps.strides, strict=True)]
        if asked:
            taps.divide([max(m - a, 0) for m, a in zip(made, asked, strict=True)])
        else:
            pads = zip(made, taps.before, taps.after, strict=True)
            asked = [m - low - high for m, low, high in pads]
        narrow, weight = _grouped(x, attrs["group"], 1), _grouped(w, attrs["group"], 0)
        size = [b + max(m, a) for b, m, a in zip(taps.before, made, asked, strict=True)]
        y = np.zeros((x.shape[0], attrs["group"], w.shape[1], *size), x.dtype)
        for tap, at in taps.each(out):
            y[at] += np.einsum("ngc...,gco->ngo...", narrow, weight[tap])
        ends = zip(taps.before, asked, strict=True)
        kept: Slices = (..., *(slice(b, b + a) for b, a in ends))
        return (_joined(y[kept], bias),)


class AveragePool(OpRun):
    """The mean over each window, including padding if `count_include_pad`."""

    def _run(self, x: Array, **attrs: Any) -> tuple[Array]:
        taps = Taps(attrs["kernel_shape"], attrs)
        out = taps.over(x.shape[2:], taps.kernel, attrs["ceil_mode"])
        counted = taps.total(np.ones_like(x), out, attrs["count_include_pad"])
        return (taps.total(x, out) / counted,)


class LpPool(OpRun):
    """The norm over each window."""

    def _run(self, x: Array, **attrs: Any) -> tuple[Array]:
        taps = Taps(attrs["kernel_shape"], attrs)
        out = taps.over(x.shape[2:], taps.kernel, attrs["ceil_mode"])
        return (taps.total(np.abs(x) ** attrs["p"], out) ** (1 / attrs["p"]),)


class GlobalLpPool(OpRun):
    """The norm over the spatial dimensions."""

    def _run(self, x: Array, p: int) -> tuple[Array]:
        total = (np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True)
        return (total ** (1 / p),)


class GlobalMaxPool(OpRun):
    """The maximum over the spatial dimensions."""

    def _run(self, x: Array) -> tuple[Array]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class LRN(OpRun):
    """Each channel, divided by a power of the sum of squares over neighbouring channels."""

    def _run(self, x: Array, alpha: float, beta: float, bias: float, size: int) -> tuple[Array]:
        before = (size - 1) // 2
        wide = np.pad(x * x, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)])
        around = sum(wide[:, k : k + x.shape[1]] for k in range(size))
        return (x / (bias + alpha / size * around) ** beta,)


class MeanVarianceNormalization(OpRun):
    """The operand minus its mean over axes, divided by its standard deviation."""

    def _run(self, x: Array, axes: Sequence[int]) -> tuple[Array]:
        over = tuple(axes)
        return ((x - x.mean(over, keepdims=True)) / x.std(over, keepdims=True),)


REFERENCE_OPS: list[type[OpRun]] = [
    Conv,
    ConvTranspose,
    AveragePool,
    LpPool,
    GlobalLpPool,
    GlobalMaxPool,
    LRN,
    MeanVarianceNormalization,
]
