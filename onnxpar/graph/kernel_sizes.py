"""The sizes that onnxruntime's kernels give results, where ONNX's shape inference differs: all
sizes then are the sizes in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper

_Sizes = Sequence[int | None]


def correct_sizes(
    node: NodeProto,
    opset: int,
    types: Mapping[str, TypeProto],
    values: Mapping[str, TensorProto],
    found: Mapping[str, TypeProto],
) -> None:
    """Replaces sizes of the node's results in `found`, the inferred types, by the sizes of
    onnxruntime's kernel. `types` are the types of operands, `values` the known values; `opset` is
    the version of ONNX's own ops."""
    sizes_of = _SIZES.get(node.op_type)
    own = types.get(node.input[0]) if node.input else None
    if sizes_of is None or node.domain not in ("", "ai.onnx") or own is None:
        return
    if not own.tensor_type.HasField("shape"):
        return
    dims = own.tensor_type.shape.dim
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in dims]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    constants = {
        i: numpy_helper.to_array(values[name])
        for i, name in enumerate(node.input[1:], 1)
        if name in values
    }
    for axis, size in sizes_of(sizes, attributes, constants, opset):
        for type_ in (found[name] for name in node.output if name in found):
            if axis < len(type_.tensor_type.shape.dim):
                type_.tensor_type.shape.dim[axis].dim_value = size


@dataclass(frozen=True)
class PoolWindows:
    """The windows of a pool along one dimension: `count` windows, each of `span` elements from its
    first to its last, a `stride` apart, with `before` and `after` elements of padding."""

    before: int
    after: int
    span: int
    stride: int
    count: int


def pool_windows(attributes: Mapping[str, Any], i: int, size: int) -> PoolWindows:
    """The windows along spatial dimension `i` of `size` elements. The last window must begin inside
    of the dimension, or in the padding before it; automatic padding does not know dilations."""
    rank = len(attributes["kernel_shape"])
    width = attributes["kernel_shape"][i]
    stride, dilation = ((attributes.get(k) or [1] * rank)[i] for k in ("strides", "dilations"))
    auto = attributes.get("auto_pad", b"NOTSET")
    pads = attributes.get("pads") or [0] * (2 * rank)
    before, after = (pads[i], pads[rank + i]) if auto == b"NOTSET" else (0, 0)
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        total = (-(-size // stride) - 1) * stride + width - size
        before = int((total if auto == b"SAME_UPPER" else total + 1) / 2)
        after = total - before
    span = (width - 1) * dilation + 1
    room = size + before + after - span
    count = int(room / stride) + 1
    if attributes.get("ceil_mode"):
        count = -(-room // stride) + 1
        count -= (count - 1) * stride >= size + before
    return PoolWindows(before, after, span, stride, count)


def _pooled(
    sizes: _Sizes, attributes: Mapping[str, Any], constants: Mapping[int, Any], opset: int
) -> Iterable[tuple[int, int]]:
    for i, size in enumerate(sizes[2:]):
        if size is not None:
            yield 2 + i, pool_windows(attributes, i, size).count


def _resized(
    sizes: _Sizes, attributes: Mapping[str, Any], constants: Mapping[int, Any], opset: int
) -> Iterable[tuple[int, int]]:
    """The sizes of a Resize or Upsample by scales: products of floats, rounded down."""
    scales = attributes.get("scales", constants.get(2 if opset >= 11 else 1))
    if scales is None or np.size(constants.get(3, ())):
        return
    axes = attributes.get("axes") or range(len(sizes))
    for axis, scale in zip(axes, scales, strict=False):
        size = sizes[axis]
        if size is not None:
            yield axis % len(sizes), int(np.float32(size) * np.float32(scale))


POOLS = ("AveragePool", "LpPool", "MaxPool")
_SIZES: Mapping[str, Callable[..., Iterable[tuple[int, int]]]] = {
    **dict.fromkeys(POOLS, _pooled),
    "Resize": _resized,
    "Upsample": _resized,
}
