"""Sizes of results that constants select (Compress, SequenceAt), which ONNX's inference leaves
open."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import NodeProto, TypeProto

from onnxpar.base.arrays import Array


def compressed(
    node: NodeProto, type_: TypeProto, sizes: Sequence[int | None], condition: Array
) -> TypeProto:
    """Returns the type of the result of a Compress: `type_`, as ONNX infers it, with the sizes that
    follow from the sizes of operand 0 and from the value of operand 1 (`condition`)."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    shape = list(sizes)
    if axis is None:
        known = [s for s in sizes if s is not None]
        shape, axis = [math.prod(known) if len(known) == len(sizes) else None], 0
    if shape[axis] is not None:
        shape[axis] = int(np.count_nonzero(condition[: shape[axis]]))
    return onnx.helper.make_tensor_type_proto(type_.tensor_type.elem_type, shape)


def part_of(split: NodeProto, whole: TypeProto, sizes: Array, place: int) -> TypeProto | None:
    """Returns the type of element number `place` of the sequence that a SplitToSequence makes of a
    tensor of type `whole`; None if there is no such element, or its type is unknown. `sizes` is the
    value of operand 1."""
    attributes = {a.name: a.i for a in split.attribute}
    part = TypeProto()
    part.CopyFrom(whole)
    dims = part.tensor_type.shape.dim
    axis = attributes.get("axis", 0)
    if not -len(dims) <= axis < len(dims) or not attributes.get("keepdims", 1):
        return None
    if sizes.ndim:
        count, size = sizes.size, None
    elif dims[axis].HasField("dim_value") and sizes > 0:
        size, step = dims[axis].dim_value, int(sizes)
        count = -(-size // step)
    else:
        return None
    if not -count <= place < count:
        return None
    if size is None:
        dims[axis].dim_value = int(sizes[place])
    else:
        dims[axis].dim_value = min(step, size - place % count * step)
    return part
