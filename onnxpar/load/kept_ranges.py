"""Keeps onnxruntime from turning a Gather by a Range that crosses zero into a Slice.

The Slice gets the start and the end of the Range, but counts negative ones from the end of the
dimension: it takes nothing where `x[arange(n - 1, -1, -1)]` takes all rows in reverse.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import GraphProto

from onnxpar.graph.patterns import Match, Op, attributes, rewrite
from onnxpar.graph.stored import nodes_of

SLICING = ("GatherToSliceFusion",)
"""onnxruntime's optimizers that make a Slice of a Gather."""


def takes_ranges(model: onnx.ModelProto) -> bool:
    """True if a Gather of this model reads the result of a Range."""
    nodes = list(nodes_of(model.graph))
    ranges = {name for node in nodes if node.op_type == "Range" for name in node.output}
    return any(n.op_type == "Gather" and not ranges.isdisjoint(n.input[1:]) for n in nodes)


def keep_ranges(graph: GraphProto) -> None:
    """Negates twice the indices of each Gather by a Range that may cross zero, in place, also in
    bodies: so onnxruntime does not see that a Range makes them."""
    rewrite(graph, {Op("Gather", "x", Op("Range", "start", "limit", "step")): _negate_twice})


def _negate_twice(at: Match) -> bool:
    """Lets a Gather read its indices negated twice, unless constants tell that the indices are of
    one sign; returns False if the node stays as it is."""
    start, limit, step = (at.scope.value(at[name]) for name in ("start", "limit", "step"))
    low = start if step is None or np.ravel(step)[0] >= 0 else limit
    if step is None or low is None or np.ravel(low)[0] >= 0:
        return False
    once = at.add("Neg", [at.operand(1)], "negated0")
    at.add("Gather", [at["x"], at.add("Neg", [once], "negated1")], **attributes(at.node))
    return True
