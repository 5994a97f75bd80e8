"""Infers the types (element type and shape) of the results of the plugin's ops on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import NodeProto, TensorProto, TypeProto

from onnxpar.graph.collectives import KINDS, RANK_CONSTANTS

OPS = (*(kind.name for kind in KINDS.values() if kind.by_hand), *RANK_CONSTANTS)
"""The plugin's ops that a manual program may contain."""

_Dims = list[int | str | None]


def result_types(
    node: NodeProto, types: Mapping[str, TypeProto], members: int
) -> dict[str, TypeProto]:
    """Returns the type of each result of a node, by name. A size stays open if it differs between
    ranks or depends on data. An AllGather of [4, 6] along axis 0 with 2 members gives [8, 6].

    types    the types of the node's operands, by name
    members  the number of ranks in the node's group; a group of one rank keeps its operand

    Errors: ValueError for an axis that the operand does not have.
    """
    names = list(node.output)
    if node.op_type in RANK_CONSTANTS:
        return {names[0]: onnx.helper.make_tensor_type_proto(TensorProto.INT64, [])}
    token = onnx.helper.make_tensor_type_proto(TensorProto.BOOL, [0])
    if node.op_type == "Send":
        return {name: token for name in names if name}
    tokens = {name: token for name in names[1:] if name}
    x = types.get(node.input[0])
    if x is None or not x.HasField("tensor_type"):
        return tokens
    if not x.tensor_type.HasField("shape"):
        return tokens | {names[0]: _typed(x.tensor_type.elem_type, None)}
    dims = _dims(x) if members == 1 else _result_dims(node, _dims(x), members)
    return tokens | {names[0]: _typed(x.tensor_type.elem_type, dims)}


def _result_dims(node: NodeProto, x: _Dims, members: int) -> _Dims:
    """Returns the sizes of a collective's result, from the sizes `x` of its operand; None for an
    open size (known only at run time)."""
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    y = list(x)

    def axis(name: str) -> int:
        at = int(attrs.get(name, 0))
        if not -len(x) <= at < len(x):
            raise ValueError(f"{name}={at}, but the operand has {len(x)} dimensions")
        return at

    joins, cuts = KINDS[node.op_type].joins, KINDS[node.op_type].cuts
    if joins:
        y[axis(joins.axis)] = _joined(x[axis(joins.axis)], attrs.get(joins.sizes), members)
    if cuts:
        y[axis(cuts.axis)] = _cut(x[axis(cuts.axis)], attrs.get(cuts.sizes), members)
    if joins and cuts and axis(joins.axis) % len(x) == axis(cuts.axis) % len(x):
        y[axis(cuts.axis)] = None
    if node.op_type == "NeighborExchange":
        halos = {a + b for a, b in zip(attrs["before"], attrs["after"], strict=True)}
        extent = x[axis("axis")]
        even = isinstance(extent, int) and len(halos) == 1
        y[axis("axis")] = extent + halos.pop() if even and isinstance(extent, int) else None
    return y


def _joined(extent: int | str | None, sizes: Sequence[int] | None, members: int) -> int | None:
    """Returns the size of a dimension that `members` ranks join; None if it is open. `sizes` are
    the sizes of the members' parts, if the node has them."""
    if sizes:
        return sum(sizes)
    return extent * members if isinstance(extent, int) else None


def _cut(extent: int | str | None, sizes: Sequence[int] | None, members: int) -> int | None:
    """Returns the size of each part of a dimension that is cut for `members` ranks; None if parts
    differ or the size is open. `sizes` are the sizes of the parts, if the node has them."""
    if sizes:
        return sizes[0] if len(set(sizes)) == 1 else None
    return extent // members if isinstance(extent, int) and extent % members == 0 else None


def _dims(type_: TypeProto) -> _Dims:
    """Returns the sizes of a tensor type: numbers, names, or None for an unknown size."""
    return [
        d.dim_value if d.HasField("dim_value") else d.dim_param or None
        for d in type_.tensor_type.shape.dim
    ]


def _typed(dtype: int, dims: _Dims | None) -> TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype, dims)
