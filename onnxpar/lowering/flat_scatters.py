"""Flattens a ScatterElements that adds rows to zeros: in one dimension it takes half the time.

    ScatterElements(zeros [v, d], Expand(at [n, 1]), rows [n, d])
    ScatterElements(zeros [v d], at * d + [0, 1, ... d - 1], rows [n d])

Only ranks' graphs have the second form, in which the dimensions are merged: in the global graph, a
merged dimension could not be split by columns.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import GraphProto, TensorProto

from onnxpar.graph.origin import copy_origin
from onnxpar.graph.patterns import Known, Match, Op, rewrite

_ROWS = Op(
    "ScatterElements",
    Op("ConstantOfShape", Known("shape"), name="zeros"),
    Op("Expand", Op("Reshape", "index", Known("column"), name="narrow"), Known("rows")),
    "updates",
    axis=(None, 0),
    reduction=b"add",
)


def flatten_scatters(graph: GraphProto) -> None:
    """Flattens, in place, each ScatterElements of a rank's graph that adds rows to a tensor of
    zeros, such as the gradient of a table. A negative index still counts from the end."""
    rewrite(graph, {_ROWS: _flatten})


def _flatten(at: Match) -> bool:
    """Replaces a ScatterElements of whole rows by one in a single dimension; returns False for any
    other."""
    shape, rows, column = (at[name].tolist() for name in ("shape", "rows", "column"))
    are_rows = shape[1:] == rows[1:] and column == [rows[0], *[1] * (len(rows) - 1)]
    if not are_rows or len(shape) < 2 or 0 in (*shape, *rows):
        return False
    width = math.prod(shape[1:])
    zeros = at.add("ConstantOfShape", [[math.prod(shape)]])
    at.nodes[-1].attribute.extend(at["zeros"].attribute)
    index = at.add("Cast", [at["narrow"].output[0]], to=TensorProto.INT64)
    first = at.add("Mul", [at.add("Reshape", [index, [-1, 1]]), width])
    places = at.add("Reshape", [at.add("Add", [first, np.arange(width)]), [-1]])
    updates = at.add("Reshape", [at["updates"], [-1]])
    total = at.add("ScatterElements", [zeros, places, updates], axis=0, reduction="add")
    at.add("Reshape", [total, shape])
    copy_origin(at.nodes[:-1], at.node)
    return True
