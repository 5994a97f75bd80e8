"""What the work of a node takes on the fullest rank, for each way to split it."""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

from onnxpar.factors import OpFactors
from onnxpar.flops import flops_on_rank_0
from onnxpar.plan import part_bytes
from onnxpar.search.choices import Choice
from onnxpar.search.tensor_parallel import is_contraction
from onnxpar.sharding import Placement, Sharding

_VIEWS = frozenset(
    ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant")
)
"""Ops that move no bytes."""
_LOOK_UP = frozenset(("Gather", "GatherND", "GatherElements"))
"""Ops that read as much of their first operand as they return."""
_ROUNDS = 2
"""Small collectives that ranks exchange within a node that is split over what it works across."""


def work_seconds(op: OpFactors, choice: Choice, sharding: Sharding) -> float:
    """Seconds of a node on the rank with the largest part: the roofline of its operations and the
    bytes that it reads and writes, and what the ranks say to each other inside it."""
    if op.bodies:
        return 0.0
    sizes = [
        _bytes(t, choice.operand(op, i), sharding) for i, t in enumerate(op.node.inputs) if t.name
    ]
    results = [
        _bytes(t, choice.result(op, i), sharding) for i, t in enumerate(op.node.outputs) if t.name
    ]
    if op.node.op in _VIEWS:
        moved = 0.0
    elif op.node.op in _LOOK_UP:
        moved = sum(results) * 2 + sum(sizes[1:])
    else:
        moved = sum(sizes) + sum(results)
    count = flops_on_rank_0(op, choice.axes, sharding.mesh) if is_contraction(op) else 0
    return sharding.costs.compute(count, moved) + _talk(
        op, choice, sharding, max(results, default=0)
    )


def _bytes(tensor: gs.Tensor, placement: Placement, sharding: Sharding) -> float:
    if tensor.name not in sharding.factors.tensors:
        return 0.0
    layout = sharding.layout(tensor, placement)
    return part_bytes(tensor, layout, sharding.mesh)


def _talk(op: OpFactors, choice: Choice, sharding: Sharding, result: float) -> float:
    """What it takes to work across a split factor: partial results travel, without that factor."""
    axes = tuple(
        a
        for a in dict.fromkeys(
            a
            for leaf, over in zip(op.leaves, choice.axes, strict=True)
            if leaf.factor in op.rule.across
            for a in over
        )
    )
    if not axes:
        return 0.0
    across = math.prod(
        leaf.size
        for leaf, over in zip(op.leaves, choice.axes, strict=True)
        if over and leaf.factor in op.rule.across
    )
    return _ROUNDS * sharding.costs.collective("AllReduce", axes, result / across)
