"""Ops that pick elements along one dimension by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.rules.movement import PERMUTES
from onnxpar.rules.rule import (
    Local,
    Lowering,
    Rule,
    Size,
    constant,
    dims_text,
    dtype_of,
    einsum,
    names,
    numel,
    rule,
    tensor_shape,
)

Array = np.ndarray[Any, Any]
_SUMMABLE = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


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
    """`v d, i d -> i d`, as Gather; dimensions that the indices cover in part are whole."""
    data, index = (tensor_shape(t) or () for t in node.inputs)
    axis = node.attrs.get("axis", 0) % len(data)
    dims, at = names("d", len(data)), names("d", len(data))
    dims[axis], at[axis] = "v", "i"
    fields = lookup(node, axis, at, 0)
    for i, (size, covered) in enumerate(zip(data, index, strict=True)):
        if i != axis and (size is None or size != covered):
            at[i] = f"i{i}"
            partly = dict.fromkeys((dims[i], at[i]), "the indices cover a part of it")
            fields["whole"] = {**fields.get("whole", {}), **partly}
    return einsum(node, f"{dims_text(dims)}, {dims_text(at)} -> {dims_text(at)}", **fields)


def lookup(node: gs.Node, axis: int, at: Sequence[str], trailing: int) -> dict[str, Any]:
    """The fields of a rule that looks factor `v`, the axis of operand 0, up by indices over `at`.

    The result has `trailing` more dimensions behind those of the indices.
    """
    rows = (tensor_shape(node.inputs[0]) or ())[axis]
    if str(dtype_of(node.inputs[0])) not in _SUMMABLE or rows is None:
        return {"whole": {"v": "its elements have no sum"}, **PERMUTES}
    lower = lower_lookup(rows, at, trailing)
    return {"lowered": frozenset({"v"}), "lower": lower, **PERMUTES}


def lower_lookup(rows: int, at: Sequence[str], trailing: int) -> Callable[[Lowering], None]:
    """Looks up the local row where this rank holds it, and gives zero elsewhere."""

    def lower(build: Lowering) -> None:
        node = build.local.node
        index = constant(node.inputs[1])
        if index is None:
            found, held = _local_rows(build, rows)
            if trailing > 0:
                held = build.add("Unsqueeze", [held], axes=[-1 - i for i in range(trailing)])
            elif trailing < 0:
                held = build.add("Squeeze", [held], axes=[-1])
        else:
            found, held = _constant_rows(build, rows, index, at, trailing)
        rows_of = build.add(node.op, [build.input(0), found], **node.attrs)
        zero = np.zeros((), dtype_of(node.outputs[0]))
        build.finish("Where", [held, rows_of, zero])

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


def _local_rows(build: Lowering, rows: int) -> tuple[gs.Tensor, gs.Tensor]:
    """Nodes that turn global into local rows (0 where not held), and a mask of those held.

    A constant map from global to local rows is needed only where a rank's rows are not one run. An
    index beyond the whole table stays beyond the part, so that the runtime refuses it as it would.
    """
    dtype = dtype_of(build.local.node.inputs[1])
    assert dtype is not None
    other: Any = np.zeros((), dtype)
    if build.local.is_run("v"):
        start = build.per_rank(lambda at: np.array(at.positions("v")[:1].sum(), dtype))
        from_end = build.add("Add", [build.input(1), np.array(rows, dtype)])
        is_negative = build.add("Less", [build.input(1), other])
        row = build.add("Where", [is_negative, from_end, build.input(1)])
        found = build.add("Sub", [row, start])
        exists = _between(build, row, np.array(rows, dtype))
        other = build.add("Where", [exists, other, np.array(rows, dtype)])
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
