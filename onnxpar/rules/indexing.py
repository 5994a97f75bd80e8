"""Rules of ops that select elements along one dimension by index: Gather, GatherElements,
Compress."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.tensors import Size, constant, dtype_of, is_float, numel, tensor_shape
from onnxpar.rules.communicate import like, local_places
from onnxpar.rules.movement import PERMUTES
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, names, rule

SELECTED = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "uint32")
"""Element types that onnxruntime's Where takes."""
_PICKED = "the choice of elements is data-dependent"
_CAST = ("int16", "uint16", "uint64", "bfloat16")
"""Element types that need a Cast before a Where, to a type that has all their values."""


@rule("Gather")
def gather(node: gs.Node) -> Rule:
    """Sharding rule of Gather: `v d, i -> i d`: if v is split, each rank looks up the elements in
    its shard, with zeros for all others: a partial sum.

    With constant indices that count up by one, the op is a slice:
    `(before + (i j) + after) d, _ -> i j d`.
    """
    data, index = (tensor_shape(t) or () for t in node.inputs)
    axis = node.attrs.get("axis", 0) % len(data)
    dims, at = names("d", len(data)), names("i", len(index))
    out = dims_text([*dims[:axis], *at, *dims[axis + 1 :]])
    start = run_start(node.inputs[1], data[axis])
    if start is None:
        dims[axis] = "v"
        fields = lookup(node, axis, at, len(data) - axis - 1)
        return einsum(node, f"{dims_text(dims)}, {dims_text(at)} -> {out}", **fields)
    joined, fields = run_segments(at, index, data[axis] or 0, start)
    dims[axis] = joined
    return einsum(node, f"{dims_text(dims)}, _ -> {out}", **fields)


def run_start(index: gs.Tensor, size: Size) -> int | None:
    """Returns the first of constant indices that count up by one in row-major order, e.g. 3 for
    [[3, 4], [5, 6]]; None for any other indices."""
    values = constant(index)
    if values is None or size is None or not values.size:
        return None
    flat = values.reshape(-1) % size
    return int(flat[0]) if (np.diff(flat) == 1).all() else None


def run_segments(
    at: Sequence[str], index: Sequence[Size], rows: int, start: int
) -> tuple[str, dict[str, Any]]:
    """For a dimension from which constant indices slice a range: returns (the dimension as text of
    a rule, e.g. `(before + (i j) + after)`, fields of the rule). The sliced segment is the product
    of the dimensions of the indices.

    at     the factors of the indices
    index  the shape of the indices
    rows   the size of the dimension
    start  the first index
    """
    sliced = [dim for dim, size in zip(at, index, strict=True) if size != 1] or ["one"]

    def local_index(local: Local) -> Array:
        positions = np.arange(math.prod(map(local.size, sliced)))
        positions += local.size("before") if start else 0
        return positions.reshape([local.size(dim) if dim in sliced else 1 for dim in at])

    count = numel(index)
    sizes = {"one": 1, **dict(zip(at, index, strict=True))}
    sizes |= {"before": start, "after": rows - start - count}
    text = f"({' '.join(sliced)})"
    return text if count == rows else f"(before + {text} + after)", {
        "sizes": sizes,
        "reduce": {},
        "local": {1: local_index},
        **PERMUTES,
    }


@rule("GatherElements")
def gather_elements(node: gs.Node) -> Rule:
    """Sharding rule of GatherElements: `v (d + r) e, i d e -> i d e`, split as in Gather; r are the
    elements of a dimension that no index covers."""
    data, index = (tensor_shape(t) or () for t in node.inputs)
    axis = node.attrs.get("axis", 0) % len(data)
    dims, at = names("d", len(data)), names("d", len(data))
    dims[axis], at[axis] = "v", "i"
    sizes = uncovered(dims, axis, data, index)
    fields = lookup(node, axis, at, 0)
    text = f"{dims_text(dims)}, {dims_text(at)} -> {dims_text(at)}"
    return einsum(node, text, sizes=sizes, **fields)


def uncovered(
    dims: list[str], axis: int, data: Sequence[Size], index: Sequence[Size]
) -> dict[str, Size]:
    """Replaces each dimension d in `dims` that the indices cover only partly by `(d + r)`, except
    `axis`. Returns the sizes of the new factors.

    data   the shape of the data
    index  the shape of the indices
    """
    sizes: dict[str, Size] = {}
    for i, (size, covered) in enumerate(zip(data, index, strict=True)):
        if i != axis and size != covered:
            sizes[dims[i]] = covered
            sizes[f"r{i}"] = None if size is None or covered is None else size - covered
            dims[i] = f"({dims[i]} + r{i})"
    return sizes


def lookup(node: gs.Node, axis: int, at: Sequence[str], trailing: int) -> dict[str, Any]:
    """Returns the fields of a rule for a lookup by index in factor `v`, dimension `axis` of operand
    0.

    at        the factors of the indices
    trailing  the number of dimensions that the result has behind the dimensions of the indices
    """
    rows = (tensor_shape(node.inputs[0]) or ())[axis]
    if rows is None or not is_summable(node.inputs[0]):
        return {"whole": {"v": "its elements cannot be summed"}, **PERMUTES}
    lower = lower_lookup(rows, axis, at, trailing)
    return {"lowered": frozenset({"v"}), "lower": lower, **joined_by(node, ["v"]), **PERMUTES}


def is_summable(data: gs.Tensor) -> bool:
    """True if ranks can join looked-up elements of this type by a sum to which all ranks except one
    add zeros: a type that Where takes, directly or after an exact Cast."""
    return str(dtype_of(data)) in (*SELECTED, *_CAST, "bool")


def joined_by(node: gs.Node, factors: Sequence[str]) -> dict[str, Any]:
    """Returns the field `reduce` of a rule for factors whose shards give partial results: zeros for
    the elements of other ranks, joined by a sum (of bools, by max)."""
    op = "max" if dtype_of(node.inputs[0]) == np.bool_ else "sum"
    return {"reduce": dict.fromkeys(factors, op)}


def wide_type(dtype: np.dtype[Any]) -> int:
    """Returns the number of the ONNX type to which a type that Where does not take is cast; it has
    all values of `dtype`."""
    return onnx.TensorProto.FLOAT if str(dtype) == "bfloat16" else onnx.TensorProto.INT64


def finish_held(build: Lowering, held: gs.Tensor, rows: gs.Tensor) -> None:
    """Makes the result of the node: `rows` where the mask `held` is True (the rank's shard has the
    element), elsewhere zeros. For floats, the zeros are -0.0, which is neutral in a sum, so that
    the sum over ranks is bit-identical to the rows."""
    dtype = dtype_of(build.local.node.outputs[0])
    if dtype == np.bool_:
        build.finish("And", [held, rows])
        return
    assert dtype is not None
    if str(dtype) not in SELECTED:
        rows = build.add("Cast", [rows], to=wide_type(dtype))
    op, operands = "Where", [held, rows, like(rows, 0)]
    if is_float(rows):
        # The neutral element is -0. onnxruntime's Where returns it only for its last operand, and
        # onnxruntime would swap the operands of a Where that reads a Not.
        lacks = build.add("Equal", [held, np.array(False)])
        sign = build.add("Where", [held, like(rows, 1), like(rows, -1)])
        op, operands = "Mul", [build.add("Where", [lacks, like(rows, 0), rows]), sign]
    if str(dtype) in SELECTED:
        build.finish(op, operands)
    else:
        to = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        build.finish("Cast", [build.add(op, operands)], to=to)


def lower_lookup(
    rows: int, axis: int, at: Sequence[str], trailing: int
) -> Callable[[Lowering], None]:
    """Returns a lowering that looks up the elements in the rank's shard of `v`, with zeros for all
    others. `rows` is the global size of `v`; for the other arguments, see `lookup`."""

    def lower(build: Lowering) -> None:
        node = build.local.node
        index = constant(node.inputs[1])
        if index is None:
            local_index, held = local_rows(build, rows)
            if trailing > 0:
                held = build.add("Unsqueeze", [held], axes=[-1 - i for i in range(trailing)])
            elif trailing < 0:
                held = build.add("Squeeze", [held], axes=[-1])
        else:
            local_index, held = _constant_rows(build, rows, index, at, trailing)
        table = build.filled(build.input(0), "v", axis)
        finish_held(build, held, build.add(node.op, [table, local_index], **node.attrs))

    return lower


def _constant_rows(
    build: Lowering, rows: int, index: Array, at: Sequence[str], trailing: int
) -> tuple[gs.Tensor, gs.Tensor]:
    """Like `local_rows`, for constant indices: returns (positions in the rank's shard, 0 for
    elements of other ranks; a mask that is True for elements in the shard)."""

    def row(local: Local) -> Array:
        part = index[np.ix_(*(_positions(local, dim) for dim in at))] if at else index
        return np.asarray(local_places(local, "v", rows)[part])

    def mask(local: Local) -> Array:
        held = row(local) >= 0
        return held[..., 0] if trailing < 0 else held.reshape(held.shape + (1,) * trailing)

    local_index = build.per_rank(lambda local: np.maximum(row(local), 0).astype(index.dtype))
    return local_index, build.per_rank(mask)


def _positions(local: Local, dim: str) -> Array:
    """Global positions of the rank's shard; [0] for a dimension of one element."""
    return np.zeros(1, np.int64) if dim == "1" else local.positions(dim)


def local_rows(
    build: Lowering, rows: int, elsewhere: Callable[[Local], int] = lambda _: 0
) -> tuple[gs.Tensor, gs.Tensor]:
    """Turns computed global indices into positions in the rank's shard of `v`. Returns (positions,
    a mask that is True for elements in the shard).

    rows       the global size of `v`
    elsewhere  from the rank's view to the position that stands for an element of another rank

    If a shard is not contiguous, this needs a constant table of positions. An index beyond the
    global size stays beyond the shard, so that the kernel refuses it as usual.
    """
    dtype = dtype_of(build.local.node.inputs[1])
    assert dtype is not None
    other: gs.Tensor = build.per_rank(lambda local: np.array(elsewhere(local), dtype))
    if build.local.is_run("v"):
        start = build.per_rank(lambda at: np.array(at.interval("v")[0], dtype))
        from_end = build.add("Add", [build.input(1), np.array(rows, dtype)])
        is_negative = build.add("Less", [build.input(1), np.array(0, dtype)])
        row = build.add("Where", [is_negative, from_end, build.input(1)])
        local_index = build.add("Sub", [row, start])
        exists = _between(build, row, np.array(rows, dtype))
        other = build.add("Where", [exists, other, np.array(rows + 1, dtype)])
    else:
        table = build.per_rank(lambda at: local_places(at, "v", rows).astype(dtype))
        local_index = build.add("Gather", [table, build.input(1)], axis=0)
    count = build.per_rank(lambda at: np.array(at.size("v"), dtype))
    held = _between(build, local_index, count)
    return build.add("Where", [held, local_index, other]), held


def _between(build: Lowering, row: gs.Tensor, count: Any) -> gs.Tensor:
    """Returns a boolean mask: True for positions in [0, count)."""
    dtype = dtype_of(build.local.node.inputs[1])
    above = build.add("Greater", [row, np.array(-1, dtype)])
    return build.add("And", [build.add("Less", [row, count]), above])


@rule("Compress")
def compress(node: gs.Node) -> Rule:
    """Sharding rule of Compress: `d v, c -> d w`; v, the condition c, and w must stay whole.
    Without an axis, all dimensions must."""
    axis = node.attrs.get("axis")
    rank = len(tensor_shape(node.inputs[0]) or ())
    before, after = names("d", rank), names("d", rank)
    if axis is None:
        after = ["w"]
        whole = dict.fromkeys([*before, "c", "w"], _PICKED)
    else:
        before[axis % rank], after[axis % rank] = "v", "w"
        whole = dict.fromkeys("vcw", _PICKED)
    return einsum(
        node,
        f"{dims_text(before)}, c -> {dims_text(after)}",
        whole=whole,
        **PERMUTES,
    )
