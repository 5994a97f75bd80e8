"""Ops that pick elements along one dimension by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.ir.tensors import Size, constant, dtype_of, numel, tensor_shape
from onnxpar.rules.communicate import like
from onnxpar.rules.movement import PERMUTES
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, names, rule

SELECTED = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "uint32")
"""Types that Where selects among."""
_PICKED = "the choice of elements is data-dependent"
_CAST = ("int16", "uint16", "uint64", "bfloat16")
"""Types that are selected as another, which holds all their values."""


@rule("Gather")
def gather(node: gs.Node) -> Rule:
    """`v d, i -> i d`: a split table gives each rank the rows it holds and zeros for the others.

    Constant indices that count up are a slice: `(before + (i j) + after) d, _ -> i j d`.
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
    """The first of constant indices that count up by one, row by row; None where they do not."""
    values = constant(index)
    if values is None or size is None or not values.size:
        return None
    flat = values.reshape(-1) % size
    return int(flat[0]) if (np.diff(flat) == 1).all() else None


def run_segments(
    at: Sequence[str], index: Sequence[Size], rows: int, start: int
) -> tuple[str, dict[str, Any]]:
    """The dimension that a constant run slices as text, and the fields of its rule.

    The segment that is kept is the product of the index's dimensions.
    """
    kept = [dim for dim, size in zip(at, index, strict=True) if size != 1] or ["one"]

    def local_index(local: Local) -> Array:
        found = np.arange(math.prod(map(local.size, kept)))
        found += local.size("before") if start else 0
        return found.reshape([local.size(dim) if dim in kept else 1 for dim in at])

    count = numel(index)
    sizes = {"one": 1, **dict(zip(at, index, strict=True))}
    sizes |= {"before": start, "after": rows - start - count}
    text = f"({' '.join(kept)})"
    return text if count == rows else f"(before + {text} + after)", {
        "sizes": sizes,
        "reduce": {},
        "local": {1: local_index},
        **PERMUTES,
    }


@rule("GatherElements")
def gather_elements(node: gs.Node) -> Rule:
    """`v (d + r) e, i d e -> i d e`, as Gather; r is what the indices do not cover."""
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
    """Makes `(d + r)` of the dimensions whose first elements alone are indexed; sizes of these."""
    sizes: dict[str, Size] = {}
    for i, (size, covered) in enumerate(zip(data, index, strict=True)):
        if i != axis and size != covered:
            sizes[dims[i]] = covered
            sizes[f"r{i}"] = None if size is None or covered is None else size - covered
            dims[i] = f"({dims[i]} + r{i})"
    return sizes


def lookup(node: gs.Node, axis: int, at: Sequence[str], trailing: int) -> dict[str, Any]:
    """The fields of a rule that looks factor `v`, the axis of operand 0, up by indices over `at`.

    The result has `trailing` more dimensions behind those of the indices.
    """
    rows = (tensor_shape(node.inputs[0]) or ())[axis]
    if rows is None or not is_summable(node.inputs[0]):
        return {"whole": {"v": "its elements cannot be summed"}, **PERMUTES}
    lower = lower_lookup(rows, axis, at, trailing)
    return {"lowered": frozenset({"v"}), "lower": lower, **joined_by(node, ["v"]), **PERMUTES}


def is_summable(data: gs.Tensor) -> bool:
    """Whether a sum joins elements of which all but one are zero."""
    return str(dtype_of(data)) in (*SELECTED, *_CAST, "bool")


def joined_by(node: gs.Node, factors: Sequence[str]) -> dict[str, Any]:
    """The field of a rule that says how parts join that are zero but for what a rank holds."""
    op = "max" if dtype_of(node.inputs[0]) == np.bool_ else "sum"
    return {"reduce": dict.fromkeys(factors, op)}


def finish_held(build: Lowering, held: gs.Tensor, rows: gs.Tensor) -> None:
    """Makes the result of what the rank holds, and of zeros elsewhere."""
    dtype = dtype_of(build.local.node.outputs[0])
    if dtype == np.bool_:
        build.finish("And", [held, rows])
    elif str(dtype) in SELECTED:
        build.finish("Where", [held, rows, np.zeros((), dtype)])
    else:
        wide = onnx.TensorProto.FLOAT if str(dtype) == "bfloat16" else onnx.TensorProto.INT64
        rows = build.add("Cast", [rows], to=wide)
        found = build.add("Where", [held, rows, like(rows, 0)])
        build.finish("Cast", [found], to=onnx.helper.np_dtype_to_tensor_dtype(dtype))


def lower_lookup(
    rows: int, axis: int, at: Sequence[str], trailing: int
) -> Callable[[Lowering], None]:
    """Looks up the local row where this rank holds it, and gives zero elsewhere."""

    def lower(build: Lowering) -> None:
        node = build.local.node
        index = constant(node.inputs[1])
        if index is None:
            found, held = local_rows(build, rows)
            if trailing > 0:
                held = build.add("Unsqueeze", [held], axes=[-1 - i for i in range(trailing)])
            elif trailing < 0:
                held = build.add("Squeeze", [held], axes=[-1])
        else:
            found, held = _constant_rows(build, rows, index, at, trailing)
        table = build.filled(build.input(0), "v", axis)
        finish_held(build, held, build.add(node.op, [table, found], **node.attrs))

    return lower


def _constant_rows(
    build: Lowering, rows: int, index: Array, at: Sequence[str], trailing: int
) -> tuple[gs.Tensor, gs.Tensor]:
    """Local rows of constant indices (0 where not held), and a mask of those held."""

    def row(local: Local) -> Array:
        part = index[np.ix_(*(_positions(local, dim) for dim in at))] if at else index
        return np.asarray(_row_map(local, rows)[part])

    def mask(local: Local) -> Array:
        held = row(local) >= 0
        return held[..., 0] if trailing < 0 else held.reshape(held.shape + (1,) * trailing)

    found = build.per_rank(lambda local: np.maximum(row(local), 0).astype(index.dtype))
    return found, build.per_rank(mask)


def _positions(local: Local, dim: str) -> Array:
    return np.zeros(1, np.int64) if dim == "1" else local.positions(dim)


def local_rows(
    build: Lowering, rows: int, elsewhere: Callable[[Local], int] = lambda _: 0
) -> tuple[gs.Tensor, gs.Tensor]:
    """Nodes that turn global into local rows (`elsewhere` where not held), and a mask of those
    held.

    A constant map from global to local rows is needed only where a rank's rows are not one run. An
    index beyond the whole table stays beyond the part, so that the runtime refuses it as it would.
    """
    dtype = dtype_of(build.local.node.inputs[1])
    assert dtype is not None
    other: gs.Tensor = build.per_rank(lambda local: np.array(elsewhere(local), dtype))
    if build.local.is_run("v"):
        start = build.per_rank(lambda at: np.array(at.interval("v")[0], dtype))
        from_end = build.add("Add", [build.input(1), np.array(rows, dtype)])
        is_negative = build.add("Less", [build.input(1), np.array(0, dtype)])
        row = build.add("Where", [is_negative, from_end, build.input(1)])
        found = build.add("Sub", [row, start])
        exists = _between(build, row, np.array(rows, dtype))
        other = build.add("Where", [exists, other, np.array(rows + 1, dtype)])
    else:
        table = build.per_rank(lambda at: _row_map(at, rows).astype(dtype))
        found = build.add("Gather", [table, build.input(1)], axis=0)
    count = build.per_rank(lambda at: np.array(at.size("v"), dtype))
    held = _between(build, found, count)
    return build.add("Where", [held, found, other]), held


def _between(build: Lowering, row: gs.Tensor, count: Any) -> gs.Tensor:
    """Whether rows stand in [0, count)."""
    dtype = dtype_of(build.local.node.inputs[1])
    above = build.add("Greater", [row, np.array(-1, dtype)])
    return build.add("And", [build.add("Less", [row, count]), above])


def _row_map(local: Local, rows: int) -> Array:
    """For each global row its local position, or -1 where it is not held."""
    held = local.positions("v")
    table = np.full(rows, -1, np.int64)
    table[held] = np.arange(len(held))
    return table


@rule("Compress")
def compress(node: gs.Node) -> Rule:
    """`d v, c -> d w`: only what is picked along is whole."""
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
