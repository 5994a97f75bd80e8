"""Windows of convolutions and pools, and the three convolutions that their gradients consist of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from onnxpar.rules.windows import windows
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Vjp


@dataclass(frozen=True)
class Windows:
    """Windows of a convolution or pool on a wide image; each window corresponds to an element of a
    narrow image. The wide image is the operand of a Conv, or the result of a ConvTranspose.

    Element k of window i is the wide image's element `i * stride + k * dilation - before`, and the
    last window reaches `after` elements past the end. A negative `before` or `after` means that no
    window covers that end of the image; `before` is negative only in pools.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @property
    def padding(self) -> list[int]:
        """The attribute `pads`: the number of elements outside the wide image that windows read, at
        each end."""
        return [max(p, 0) for p in self.before + self.after]

    @property
    def is_identity(self) -> bool:
        """True if window i consists of element i alone, provided that both images have the same
        size and strides are 1."""
        return prod(self.kernel) == 1 and not any(self.before + self.after)

    def attributes(self, group: int) -> dict[str, object]:
        """Returns the attributes of a convolution with these windows, without `pads`."""
        return {"strides": self.strides, "dilations": self.dilations, "group": group}


def windows_of(v: Vjp, kernel: Sequence[int]) -> Windows:
    """Returns the windows of the sizes `kernel` of a convolution or pool. The wide image is the
    operand; for a ConvTranspose, the result."""
    rank = len(kernel)
    wide, narrow = (v.y, v.x) if v.node.op == "ConvTranspose" else (v.x, v.y)
    strides, dilations = (
        list(v.node.attrs.get(name) or [1] * rank) for name in ("strides", "dilations")
    )
    before = [pads[0] for pads in windows(v.node, list(kernel)).pads]
    after = [
        (n - 1) * s + (k - 1) * d + 1 - low - w
        for n, w, k, s, d, low in zip(
            narrow.shape[2:], wide.shape[2:], kernel, strides, dilations, before, strict=True
        )
    ]
    return Windows(list(kernel), strides, dilations, before, after)


def gather(wide: Value, weight: Value, by: Windows, group: int = 1) -> Value:
    """Returns the product of each window with a weight: a convolution of the wide image. The
    weight has the dimensions `(g o) c k`: group and output channel, input channel, element of
    the window."""
    return wide.op("Conv", weight, pads=by.padding, **by.attributes(group))


def spread(narrow: Value, weight: Value, by: Windows, group: int = 1) -> Value:
    """Multiplies each element of the narrow image by the weight `(g c) o k` (group and input
    channel, output channel, element of the window), adds the products to the elements of its
    window, and returns the wide image. This is the transpose of `gather`."""
    unread, grown = ([max(-p, 0) for p in pads] for pads in (by.before, by.after))
    attrs = by.attributes(group)
    wide = narrow.op("ConvTranspose", weight, pads=by.padding, output_padding=grown, **attrs)
    return wide.pad([0, 0, *unread], [0] * wide.rank)


def correlate(wide: Value, narrow: Value, by: Windows, group: int = 1) -> Value:
    """Returns the gradient of a convolution's weight `(g o) c k`. One of the images is the
    convolution's operand, the other the gradient of its result: `n (g c) w, n (g o) y -> (g o) c
    k`, where g is `group`.

    The gradient is itself a convolution, which sums over the batch; so it is a partial sum if the
    batch is sharded.
    """
    channels, results = wide.shape[1] // group, narrow.shape[1]
    if 0 in (wide.size, narrow.size):  # onnxruntime's Conv without channels is not always zero
        return wide.builder.zeros([results, channels, *by.kernel], wide.dtype)
    if group == 1 and by.is_identity and wide.shape[2:] == narrow.shape[2:]:
        return _pointwise(wide, narrow)
    batch, space = wide.shape[0], range(3, 1 + wide.rank)
    image = wide.swap(0, 1)
    if group > 1:
        image = wide.reshape([batch, group, channels, *wide.shape[2:]])
        image = image.transpose([2, 1, 0, *space])
        image = image.reshape([channels, group * batch, *wide.shape[2:]])
    weight = image.op(
        "Conv",
        narrow.swap(0, 1),
        strides=by.dilations,
        dilations=by.strides,
        pads=by.padding,
        group=group,
    )
    for axis, size in enumerate(by.kernel, 2):
        weight = weight.slice(0, size, axis)
    return weight.swap(0, 1)


def _pointwise(wide: Value, narrow: Value) -> Value:
    """Like `correlate`, for windows of one element without gaps, by a matrix product."""
    rank = wide.rank
    rows = narrow.swap(0, 1).reshape([narrow.shape[1], -1])
    columns = wide.transpose([0, *range(2, rank), 1]).reshape([-1, wide.shape[1]])
    product = rows @ columns
    return product.reshape([*product.shape, *[1] * (rank - 2)])
