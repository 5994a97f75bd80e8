"""Protects sizes of 0 in a rank's Reshape or Expand, which onnxruntime could misread.

A Reshape reads a 0 as "copy the operand's size" unless it has the attribute `allowzero`.
"""

from __future__ import annotations

from onnxpar.lowering.rank_view import NodeView
from onnxpar.rules.notation import expr_vars
from onnxpar.sharding.factors import OpFactors


def expanded_zeros(op: OpFactors, view: NodeView) -> frozenset[str]:
    """Returns the factors (index variables) of an Expand whose empty shards need an element in
    their place: onnxruntime (1.32) may drop an Expand to a constant shape with a size of 0, as if
    it had no effect. Empty for any other node."""
    if op.node.op != "Expand" or op.node.domain:
        return frozenset()
    kept = {f for expr in op.rule.inputs[0] or () for f in expr_vars(expr)}
    expanded = {f for expr in op.rule.outputs[0] or () for f in expr_vars(expr)} - kept
    return frozenset(f for f in expanded - set(view.open) if view.may_be_empty(f))


def keep_zeros(op: OpFactors, view: NodeView) -> None:
    """Lets a Reshape to a rank's shape read a size of 0 as 0, not as a size to copy, if a size may
    be 0."""

    def may_be_empty(factor: str) -> bool:
        return view.may_be_empty(factor) or (factor in view.open and not view.is_split(factor))

    if any(may_be_empty(f) for expr in op.rule.outputs[0] or () for f in expr_vars(expr)):
        op.node.attrs["allowzero"] = 1
