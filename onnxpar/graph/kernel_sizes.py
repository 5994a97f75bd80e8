"""Sizes of results as onnxruntime's kernels compute them, where ONNX's shape inference gives
others. So all inferred sizes are right in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper

from onnxpar.graph.einsum import einsum_dims, einsum_sizes

_Sizes = Sequence[int | None]
_Found = Iterable[tuple[int, int]]
"""Pairs (axis, size) of a result."""


def correct_sizes(
    node: NodeProto,
    opset: int,
    types: Mapping[str, TypeProto],
    values: Mapping[str, TensorProto],
    found: Mapping[str, TypeProto],
) -> None:
    """Replaces sizes of a node's results in `found`, the inferred types, by the sizes that
    onnxruntime's kernel gives.

    opset   the version of ONNX's own ops
    types   types of operands, by name
    values  known values of operands, by name
    """
    sizes_of = _SIZES.get(node.op_type)
    if sizes_of is None or node.domain not in ("", "ai.onnx"):
        return
    operands = [known_sizes(types.get(name)) for name in node.input]
    if not operands or operands[0] is None:
        return
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    constants = {
        i: numpy_helper.to_array(values[name])
        for i, name in enumerate(node.input)
        if name in values
    }
    sized = _Sized(operands[0], operands, attributes, constants, opset)
    for axis, size in sizes_of(sized):
        for type_ in (found[name] for name in node.output if name in found):
            if axis < len(type_.tensor_type.shape.dim):
                type_.tensor_type.shape.dim[axis].dim_value = size


def known_sizes(type_: TypeProto | None) -> tuple[int | None, ...] | None:
    """Returns the sizes that a type gives, with None for unknown ones; None if the number of
    dimensions is unknown."""
    if type_ is None or not type_.HasField("tensor_type"):
        return None
    if not type_.tensor_type.HasField("shape"):
        return None
    dims = type_.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in dims)


def _einsum(node: _Sized) -> _Found:
    """Sizes of an Einsum with broadcasting: onnx takes the size of the first operand, even where it
    is 1."""
    shapes = [each for each in node.operands if each is not None]
    if len(shapes) < len(node.operands):
        return
    equation = node.attributes["equation"].decode()
    terms, out = einsum_dims(equation, [*map(len, shapes)], lambda n: [f"...{i}" for i in range(n)])
    sizes = einsum_sizes(terms, shapes)
    for axis, dim in enumerate(out):
        size = sizes.get(dim)
        if size is not None:
            yield axis, size


@dataclass(frozen=True)
class _Sized:
    """A node with known facts: its attributes, the sizes of its first operand and of all operands,
    and values of operands by position."""

    sizes: _Sizes
    operands: Sequence[_Sizes | None]
    attributes: Mapping[str, Any]
    constants: Mapping[int, Any]
    opset: int


@dataclass(frozen=True)
class PoolWindows:
    """The windows of a pool along one dimension: `count` windows, each of `span` elements from its
    first to its last, at intervals of `stride`, with `before` and `after` elements of padding at
    the ends of the dimension."""

    before: int
    after: int
    span: int
    stride: int
    count: int


def pool_windows(attributes: Mapping[str, Any], i: int, size: int) -> PoolWindows:
    """Returns the windows along spatial dimension number `i` of `size` elements, as onnxruntime
    counts them: the last window must begin inside of the dimension, or in the padding before it;
    automatic padding ignores dilations.

    attributes  attributes of the pool
    """
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


def _pooled(node: _Sized) -> _Found:
    for i, size in enumerate(node.sizes[2:]):
        if size is not None:
            yield 2 + i, pool_windows(node.attributes, i, size).count


def keeps_size(attributes: Mapping[str, Any]) -> bool:
    """True for a Resize whose result onnxruntime makes as large as the operand: with
    keep_aspect_ratio_policy, and axes that count from the last one."""
    policy = attributes.get("keep_aspect_ratio_policy", b"stretch")
    return policy not in (b"stretch", "stretch") and min(attributes.get("axes") or [0]) < 0


def _resized(node: _Sized) -> _Found:
    """Sizes of a Resize or Upsample by scales: float32 products, rounded down."""
    if keeps_size(node.attributes):
        yield from ((axis, size) for axis, size in enumerate(node.sizes) if size is not None)
        return
    scales = node.attributes.get("scales", node.constants.get(2 if node.opset >= 11 else 1))
    if scales is None or np.size(node.constants.get(3, ())):
        return
    axes = node.attributes.get("axes") or range(len(node.sizes))
    for axis, scale in zip(axes, scales, strict=False):
        size = node.sizes[axis]
        if size is not None:
            yield axis % len(node.sizes), int(np.float32(size) * np.float32(scale))


def _transposed(node: _Sized) -> _Found:
    """Spatial sizes of a ConvTranspose with automatic padding: size * stride, or less if the kernel
    does not reach that far. ONNX's inference adds `output_padding`."""
    attributes, sizes = node.attributes, node.sizes
    pads_itself = attributes.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")
    if not pads_itself or attributes.get("output_shape"):
        return
    rank = len(sizes) - 2
    weight = node.operands[1] or [None] * (rank + 2)
    strides, dilations = (attributes.get(k) or [1] * rank for k in ("strides", "dilations"))
    more = attributes.get("output_padding") or [0] * rank
    for i, kernel in enumerate(attributes.get("kernel_shape") or weight[2:]):
        size = sizes[2 + i]
        if size is not None and kernel is not None:
            reach = (size - 1) * strides[i] + more[i] + (kernel - 1) * dilations[i] + 1
            yield 2 + i, max(min(size * strides[i], reach), 0)


def _counted(node: _Sized) -> _Found:
    """The size of a Range of integers, computed in integers; onnx computes it in floats."""
    if any(i not in node.constants or node.constants[i].dtype.kind != "i" for i in range(3)):
        return
    start, limit, delta = (int(node.constants[i]) for i in range(3))
    if delta:
        yield 0, max(0, -((start - limit) // delta))


POOLS = ("AveragePool", "LpPool", "MaxPool")
_SIZES: Mapping[str, Callable[[_Sized], _Found]] = {
    **dict.fromkeys(POOLS, _pooled),
    "Resize": _resized,
    "Upsample": _resized,
    "ConvTranspose": _transposed,
    "Einsum": _einsum,
    "Range": _counted,
    "NonZero": lambda node: [] if node.sizes else [(0, 1)],  # of a scalar, as of one element
}
