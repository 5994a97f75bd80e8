"""Ops that pick elements by index."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.rules.movement import FIRST
from onnxpar.rules.rule import Local, Lowering, Rule, constant, einsum, names, rule, tensor_shape


@rule("Gather")
def gather(node: gs.Node) -> Rule:
    """`v d, i -> i d`: a split table gives each rank the rows it holds and zeros for the others."""
    data, index = (tensor_shape(t) or () for t in node.inputs)
    axis = node.attrs.get("axis", 0) % len(data)
    dims, at = names("d", len(data)), names("i", len(index))
    dims[axis] = "v"
    out = [*dims[:axis], *at, *dims[axis + 1 :]]
    return einsum(
        node,
        f"{' '.join(dims)}, {' '.join(at) or '()'} -> {' '.join(out) or '()'}",
        linear=(FIRST,),
        monotone=FIRST,
        lowered=frozenset({"v"}),
        lower=lower_gather,
    )


def lower_gather(build: Lowering) -> None:
    """Look up the local row where this rank holds it; give zero elsewhere.

    A constant map from global to local rows is needed only where a rank's rows are not one run.
    """
    node = build.local.node
    axis = node.attrs.get("axis", 0) % len(tensor_shape(node.inputs[0]) or ())
    trailing = len(tensor_shape(node.inputs[0]) or ()) - axis - 1
    rows = (tensor_shape(node.inputs[0]) or ())[axis] or 0
    index = constant(node.inputs[1])
    if index is not None:
        found: Any = build.per_rank(lambda at: _rows(at, rows, index)[0].astype(index.dtype))
        held: Any = build.per_rank(lambda at: _trail(_rows(at, rows, index)[1], trailing))
    else:
        found, held = _local_rows(build, rows)
        if trailing:
            held = build.add("Unsqueeze", [held], axes=[-1 - i for i in range(trailing)])
    rows_of = build.add("Gather", [build.input(0), found], axis=axis)
    zero = np.zeros((), np.dtype(node.outputs[0].dtype))
    build.finish("Where", [held, rows_of, zero])


def _local_rows(build: Lowering, rows: int) -> tuple[gs.Tensor, gs.Tensor]:
    """Nodes that turn global into local rows, clamped into range, and a mask of those held."""
    index = build.local.node.inputs[1]
    dtype = np.dtype(index.dtype)
    last = build.per_rank(lambda at: np.array(max(len(at.positions("v")) - 1, 0), dtype))
    if build.local.is_run("v"):
        start = build.per_rank(lambda at: np.array(at.positions("v")[:1].sum(), dtype))
        row = build.add("Mod", [build.input(1), np.array(rows, dtype)])
        found = build.add("Sub", [row, start])
    else:
        table = build.per_rank(lambda at: _row_map(at, rows).astype(dtype))
        found = build.add("Gather", [table, build.input(1)], axis=0)
    zero = np.zeros((), dtype)
    clamped = build.add("Max", [build.add("Min", [found, last]), zero])
    return clamped, build.add("Equal", [found, clamped])


def _row_map(local: Local, rows: int) -> np.ndarray[Any, Any]:
    """For each global row its local position, or -1 where it is not held."""
    held = local.positions("v")
    table = np.full(rows, -1, np.int64)
    table[held] = np.arange(len(held))
    return table


def _rows(
    local: Local, rows: int, index: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Local rows of a constant index (0 where not held), and the mask of those held."""
    found = _row_map(local, rows)[index]
    return np.maximum(found, 0), found >= 0


def _trail(mask: np.ndarray[Any, Any], ones: int) -> np.ndarray[Any, Any]:
    return mask.reshape(mask.shape + (1,) * ones)
