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
    if node.domain not in ("", "ai.onnx") or (sizes_of is None and node.op_type != "Einsum"):
        return
    operands = [_sizes_of(types.get(name)) for name in node.input]
    if any(each is None for each in operands[: None if sizes_of is None else 1]):
        return
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    constants = {
        i: numpy_helper.to_array(values[name])
        for i, name in enumerate(node.input[1:], 1)
        if name in values
    }
    corrected = (
        _einsum(operands, attributes)
        if sizes_of is None
        else sizes_of(operands[0], attributes, constants, opset)
    )
    for axis, size in corrected:
        for type_ in (found[name] for name in node.output if name in found):
            if axis < len(type_.tensor_type.shape.dim):
                type_.tensor_type.shape.dim[axis].dim_value = size


def _sizes_of(type_: TypeProto | None) -> _Sizes | None:
    if type_ is None or not type_.tensor_type.HasField("shape"):
        return None
    dims = type_.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else None for d in dims]


def _einsum(
    operands: Sequence[_Sizes | None], attributes: Mapping[str, Any]
) -> Iterable[tuple[int, int]]:
    """The sizes of an Einsum: of a letter, that of an operand where it is not 1."""
    left, arrow, right = attributes["equation"].decode().replace(" ", "").partition("->")
    terms = left.split(",")
    sizes: dict[str | int, int | None] = {}
    for term, own in zip(terms, operands, strict=True):
        before, _, after = term.partition("...")
        width = len(own or ()) - len(before) - len(after)
        for key, size in zip([*before, *range(-width, 0), *after], own or (), strict=True):
            if sizes.get(key, 1) == 1:
                sizes[key] = size
    dots = [key for key in sorted(k for k in sizes if isinstance(k, int))]
    if not arrow:
        once = sorted({c for c in left if c.isalpha() and left.count(c) == 1})
        right = ("..." if dots else "") + "".join(once)
    before, ellipsis, after = right.partition("...")
    for axis, key in enumerate([*before, *(dots if ellipsis else []), *after]):
        known = sizes.get(key)
        if known is not None:
            yield axis, known


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


def keeps_size(attributes: Mapping[str, Any]) -> bool:
    """True for a Resize that onnxruntime leaves as large as its operand: it keeps the aspect ratio,
    and its axes count from the last one."""
    policy = attributes.get("keep_aspect_ratio_policy", b"stretch")
    return policy not in (b"stretch", "stretch") and min(attributes.get("axes") or [0]) < 0


def _resized(
    sizes: _Sizes, attributes: Mapping[str, Any], constants: Mapping[int, Any], opset: int
) -> Iterable[tuple[int, int]]:
    """The sizes of a Resize or Upsample by scales: products of floats, rounded down."""
    if keeps_size(attributes):
        yield from ((axis, size) for axis, size in enumerate(sizes) if size is not None)
        return
    scales = attributes.get("scales", constants.get(2 if opset >= 11 else 1))
    if scales is None or np.size(constants.get(3, ())):
        return
    axes = attributes.get("axes") or range(len(sizes))
    for axis, scale in zip(axes, scales, strict=False):
        size = sizes[axis]
        if size is not None:
            yield axis % len(sizes), int(np.float32(size) * np.float32(scale))


def _transposed(
    sizes: _Sizes, attributes: Mapping[str, Any], constants: Mapping[int, Any], opset: int
) -> Iterable[tuple[int, int]]:
    """The sizes of a ConvTranspose that pads as it likes, which does not add `output_padding`."""
    pads_itself = attributes.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")
    if not pads_itself or attributes.get("output_shape"):
        return
    strides = attributes.get("strides") or [1] * (len(sizes) - 2)
    for axis, (size, stride) in enumerate(zip(sizes[2:], strides, strict=True), 2):
        if size is not None:
            yield axis, size * stride


POOLS = ("AveragePool", "LpPool", "MaxPool")
_SIZES: Mapping[str, Callable[..., Iterable[tuple[int, int]]]] = {
    **dict.fromkeys(POOLS, _pooled),
    "Resize": _resized,
    "Upsample": _resized,
    "ConvTranspose": _transposed,
    "NonZero": lambda sizes, *_: [] if sizes else [(0, 1)],  # of a scalar, as of one element
}
