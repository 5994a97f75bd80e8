"""The size of a selection by a constant, which ONNX's inference leaves open."""

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
    """Returns the type of the result of a Compress, given the one that ONNX infers, the sizes of
    operand 0 and the value of operand 1."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), None)
    shape = list(sizes)
    if axis is None:
        known = [s for s in sizes if s is not None]
        shape, axis = [math.prod(known) if len(known) == len(sizes) else None], 0
    if shape[axis] is not None:
        shape[axis] = int(np.count_nonzero(condition[: shape[axis]]))
    return onnx.helper.make_tensor_type_proto(type_.tensor_type.elem_type, shape)
