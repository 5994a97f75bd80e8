"""Annotations for gradients that are sums of few rows, such as that of an embedding: ranks exchange
the rows instead of the sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import bytes_sent
from onnxpar.ir.tensors import shape_bytes
from onnxpar.ir.training_spec import Step
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState

_EXPANDS = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_KEEPS = ("Cast", "Div", "Identity", "Mul", "Reshape", "Transpose")
"""Ops whose result is partial if their first operand is."""


@dataclass(frozen=True)
class WholeSum:
    """Keeps a scatter whole along the rows that it adds, together with the nodes that expand its
    indices, so that rows and indices are gathered."""

    op: OpFactors

    def apply(self, sharding: ShardingState) -> bool:
        """Closes these leaves where they are still open."""
        producers = {op.node.name: op for op in sharding.factors.ops}
        expanding = [producers[node.name] for node in _expanding(self.op.node)]
        atoms = {leaf.atom for i, leaf in enumerate(self.op.leaves) if self.op.reduction(i)}
        for op in (self.op, *expanding):
            for i, leaf in enumerate(op.leaves):
                if leaf.atom in atoms:
                    sharding.close(op, i)
        return False


def sparse_sums(sharding: ShardingState, step: Step, axes: Axes) -> Iterator[WholeSum]:
    """Yields an annotation for each scatter that adds rows to the gradient of a parameter, if it
    takes less time to gather rows and indices over `axes` than to all-reduce the gradient. A
    gradient that is also a sum of other things is all-reduced."""
    ops = {t.name: op for op in sharding.factors.ops for t in op.node.outputs}
    for name in step.gradients.values():
        addends = list(_addends(ops[name].node)) if name in ops else []
        if addends and all(_adds_few_rows(node, sharding, axes) for node in addends):
            yield from (WholeSum(ops[node.outputs[0].name]) for node in addends)


def _addends(node: gs.Node) -> Iterator[gs.Node]:
    """The nodes whose results a node adds up."""
    added = node.inputs if node.op in ("Add", "Sum") else node.inputs[:1]
    if node.op not in ("Add", "Sum", *_KEEPS) or not all(t.inputs for t in added):
        yield node
        return
    for tensor in added:
        yield from _addends(tensor.inputs[0])


def _adds_few_rows(node: gs.Node, sharding: ShardingState, axes: Axes) -> bool:
    """True for a scatter whose rows and indices are gathered faster than the sum is all-reduced
    together with other gradients. Other axes of the mesh may split the sum, but perhaps not the
    rows."""
    if node.op not in ("ScatterElements", "ScatterND") or node.attrs.get("reduction") != "add":
        return False
    expanding = _expanding(node)
    indices = expanding[-1].inputs[0] if expanding else node.inputs[1]
    gathered = [shape_bytes(t, t.shape) for t in (node.inputs[2], indices)]
    costs, ranks = sharding.costs, parts_over(axes)
    share = shape_bytes(node.outputs[0], node.outputs[0].shape) * ranks / sharding.mesh.size
    bandwidth = costs.level(axes).link("AllReduce").bandwidth
    reduced = bytes_sent("AllReduce", ranks, share) / bandwidth
    return sum(costs.collective("AllGather", axes, size) for size in gathered) < reduced


def _expanding(scatter: gs.Node) -> list[gs.Node]:
    """The nodes that make the scatter's indices from the indices of rows, last one first."""
    found: list[gs.Node] = []
    at = scatter.inputs[1]
    while at.inputs and at.inputs[0].op in _EXPANDS and len(at.outputs) == 1:
        found.append(at.inputs[0])
        at = found[-1].inputs[0]
    return found
