"""Protects sizes of 0 in a rank's Reshape or Expand, which the runtime could misread.

A Reshape reads a 0 as "copy the operand's size" unless it has `allowzero` (opset 14).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from onnxpar.ir.per_rank import PerRank
from onnxpar.lowering.rank_view import NodeView
from onnxpar.rules.notation import expr_vars
from onnxpar.sharding.factors import OpFactors


def _void_dims(op: OpFactors, view: NodeView) -> list[int]:
    """The dimensions of a Reshape's result that may be empty on some rank."""

    def may_be_void(factor: str) -> bool:
        return view.may_be_empty(factor) or (factor in view.open and not view.is_split(factor))

    spec = op.rule.outputs[0] or ()
    return [i for i, e in enumerate(spec) if any(map(may_be_void, expr_vars(e)))]


def _strays(op: OpFactors, void: Sequence[int]) -> list[int]:
    """Those of the `void` dimensions that the operand does not have at the same index. Before opset
    14, a size of 0 copies the operand's size at the same index, which is right for all other void
    dimensions."""
    before, after = op.rule.inputs[0] or (), op.rule.outputs[0] or ()
    return [i for i in void if before[i : i + 1] != after[i : i + 1]]


def merged_zeros(graph: gs.Graph, op: OpFactors, view: NodeView) -> frozenset[str]:
    """The factors of a Reshape that need stand-ins for empty shards: before opset 14, a Reshape can
    infer one size (-1), but only if no other size is 0."""
    if op.node.op != "Reshape" or graph.opset >= 14:
        return frozenset()
    void = _void_dims(op, view)
    if len(void) < 2 or not _strays(op, void):
        return frozenset()
    return frozenset(filter(view.may_be_empty, op.rule.sizes))


def expanded_zeros(op: OpFactors, view: NodeView) -> frozenset[str]:
    """The factors of an Expand that need stand-ins for empty shards: onnxruntime (1.32) may drop an
    Expand to a constant shape with a size of 0, as if it had no effect."""
    if op.node.op != "Expand" or op.node.domain:
        return frozenset()
    kept = {f for expr in op.rule.inputs[0] or () for f in expr_vars(expr)}
    made = {f for expr in op.rule.outputs[0] or () for f in expr_vars(expr)} - kept
    return frozenset(f for f in made - set(view.open) if view.may_be_empty(f))


def keep_zeros(graph: gs.Graph, op: OpFactors, view: NodeView, per_rank: PerRank) -> None:
    """Makes a Reshape to a rank's own shape read a size of 0 as 0, not as a size to copy. Before
    opset 14, the only such size becomes -1."""
    void = _void_dims(op, view)
    if graph.opset >= 14:
        if void:
            op.node.attrs["allowzero"] = 1
        return
    if len(void) != 1 or not _strays(op, void):
        return
    target = op.node.inputs[1]
    by_rank = per_rank.constants.pop(target.name, None)

    def shape(rank: int) -> npt.NDArray[Any]:
        sizes = np.array(target.values if by_rank is None else by_rank(rank))
        sizes[void[0]] = -1
        return sizes

    op.node.inputs[1] = gs.Constant(target.name, shape(0))
    if by_rank is not None:
        per_rank.constants[target.name] = shape
