"""Tells which nodes are contractions (they multiply two operands and add up products), and which
weights contractions read."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.rules.contrib_experts import EXPERT_WEIGHTS
from onnxpar.rules.fused_attention import GRADIENT, SCORED
from onnxpar.sharding.factors import OpFactors
from onnxpar.strategy.recurrences import MOVES, recurrences

_CONTRACT = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "FusedMatMul", "TransposeMatMul"}
_WEIGHT = {
    **dict.fromkeys(("MatMulInteger", "ConvInteger", "MatMulNBits", "Attention", "QAttention"), 1),
    **dict.fromkeys((GRADIENT, SCORED), 1),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv", "QGemm"), 3),
}
"""The index of the weight among the operands, for ops that have more than two operands, such as
scales and zero points."""
CONTRACTIONS = _CONTRACT | _WEIGHT.keys() | EXPERT_WEIGHTS.keys()
"""Ops that multiply two operands and add up the products."""
_NORMALIZE = {"LpNormalization", "Div"}
"""Ops that normalize weights; exporters write a Div with the norm as the divisor."""
_LOOK_UP = {"Gather", "GatherND", "GatherElements"}


def is_contraction(op: OpFactors) -> bool:
    """True if a node is a product that adds up, such as MatMul, Conv or Einsum: it multiplies two
    operands and reduces a factor."""
    return op.node.op in CONTRACTIONS and bool(op.rule.reduce or op.rule.communicating)


def convolves(op: OpFactors) -> bool:
    """True for a convolution."""
    return "Conv" in op.node.op


def is_contracted(weight: gs.Tensor) -> bool:
    """True if a product, a convolution, a lookup or a recurrence reads the weight, directly or
    after ops that move, cast or normalize it."""
    if any(recurrences(weight)):
        return True
    for node in weight.outputs:
        position = next(i for i, t in enumerate(node.inputs) if t is weight)
        if node.op in _CONTRACT or (node.op in _LOOK_UP and position == 0):
            return True
        if _WEIGHT.get(node.op) == position or position in EXPERT_WEIGHTS.get(node.op, ()):
            return True
        is_matrix = len(weight.shape or ()) > 1
        moves = node.op in MOVES or (node.op == "DequantizeLinear" and position == 0)
        moves |= node.op in _NORMALIZE and position == 0 and is_matrix
        if moves and any(is_contracted(t) for t in node.outputs):
            return True
    return False
