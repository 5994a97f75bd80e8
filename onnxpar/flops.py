"""How much a contraction computes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxpar.factors import OpFactors, with_axes
from onnxpar.layout import local_size
from onnxpar.rules.rule import Rule, Size, expr_vars
from onnxpar.sharding import Sharding


def flops(op: OpFactors, sharding: Sharding | None = None) -> int:
    """Multiplications and additions of a contraction: of all of it, or of rank 0's part."""
    sizes = op.rule.sizes if sharding is None else _sizes_on_rank_0(op, sharding)
    return 2 * _products(op.rule, sizes)


def _products(rule: Rule, sizes: Mapping[str, Size]) -> int:
    """Multiplications of a contraction. Windows relate every position of the larger image to few
    of the smaller, so that only the positions of the smaller count."""
    operands = [{v for expr in spec or () for v in expr_vars(expr)} for spec in rule.inputs[:2]]
    result = {v for expr in rule.outputs[0] or () for v in expr_vars(expr)}
    ways = (operands[0] | operands[-1], result | operands[-1] | rule.reduce.keys())
    return min(math.prod(1 if sizes[v] is None else sizes[v] or 0 for v in way) for way in ways)


def _sizes_on_rank_0(op: OpFactors, sharding: Sharding) -> dict[str, Size]:
    """How many values of each factor rank 0 computes."""
    sizes = dict(op.rule.sizes)
    axes = sharding.op_axes(op)
    for name in sizes.keys() - op.whole.keys():
        over = [(axes[i], None) for i, leaf in enumerate(op.leaves) if leaf.factor == name]
        sizes[name] = local_size(with_axes(op.trees[name], iter(over)), sharding.mesh, 0)
    return sizes
