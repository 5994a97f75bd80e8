"""Annotations for gradients that are sums of few rows, such as the gradient of an embedding: ranks
exchange the rows instead of an all-reduce of the sum, which has mostly zeros."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import bytes_sent
from onnxpar.graph.tensors import numel, numpy_dtype, shape_bytes
from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState

_EXPANDS = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_KEEPS = ("Cast", "Div", "Identity", "Mul", "Reshape", "Transpose")
"""Ops whose result is partial (a term of a sum over ranks) if their first operand is."""


@dataclass(frozen=True)
class WholeRows:
    """The annotation that keeps nodes whole along these atoms (parts of dimensions), which number
    the rows to add up: every rank then gathers all rows."""

    ops: Sequence[OpFactors]
    atoms: Collection[int]

    def apply(self, sharding: ShardingState) -> bool:
        """Makes the undecided leaves (parts of dimensions) with these atoms whole."""
        for op in self.ops:
            for i, leaf in enumerate(op.leaves):
                if leaf.atom in self.atoms:
                    sharding.close(op, i)
        return False


def sparse_sums(sharding: ShardingState, step: Step, axes: Axes) -> Iterator[WholeRows]:
    """Yields an annotation for each scatter that adds rows to the gradient of a parameter, if
    gathering rows and indices over `axes` takes less time than the all-reduce of the gradient.

    A gradient that has other addends, too, is all-reduced. The indices of a lazily trained table
    (only rows that a batch reads are updated) are gathered in any case, because each rank needs all
    of them.
    """
    ops = {t.name: op for op in sharding.factors.ops for t in op.node.outputs}
    for name in (*step.gradients.values(), *step.rows.values()):
        addends = list(_addends(ops[name].node)) if name in ops else []
        is_few = all(_adds_few_rows(node, sharding, axes) for node in addends)
        is_wanted = is_few or (name in step.rows.values() and all(map(_adds_rows, addends)))
        for node in addends if is_wanted else ():
            op = ops[node.outputs[0].name]
            nodes = [*([node] if is_few else []), *_index_nodes(node)]
            known = [ops[n.outputs[0].name] for n in nodes if n.outputs[0].name in ops]
            summed = {leaf.atom for i, leaf in enumerate(op.leaves) if op.reduction(i)}
            yield WholeRows(known, summed)


def _addends(node: gs.Node) -> Iterator[gs.Node]:
    """Yields the nodes whose results `node` adds up; the node itself if it adds up none."""
    added = node.inputs if node.op in ("Add", "Sum") else node.inputs[:1]
    if node.op not in ("Add", "Sum", *_KEEPS) or not all(t.inputs for t in added):
        yield node
        return
    for tensor in added:
        yield from _addends(tensor.inputs[0])


def _adds_rows(node: gs.Node) -> bool:
    """True for a scatter that adds rows to a tensor."""
    scatters = node.op in ("ScatterElements", "ScatterND")
    return scatters and node.attrs.get("reduction") == "add"


def _adds_few_rows(node: gs.Node, sharding: ShardingState, axes: Axes) -> bool:
    """True for a scatter if gathering its rows and indices takes less time than the all-reduce of
    its sum in a bucket with other gradients. Other axes of the mesh may split the sum, but perhaps
    not the rows."""
    if not _adds_rows(node):
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
    """Returns the nodes that expand indices of rows to indices of elements, the last node first."""
    nodes: list[gs.Node] = []
    at = scatter.inputs[1]
    while at.inputs and at.inputs[0].op in _EXPANDS and len(at.outputs) == 1:
        nodes.append(at.inputs[0])
        at = nodes[-1].inputs[0]
    return nodes


def _index_nodes(scatter: gs.Node) -> list[gs.Node]:
    """Returns the nodes that compute a scatter's indices, backwards up to nodes that read anything
    but integers, or more integers than there are rows."""
    nodes = _expanding(scatter)
    ends = [nodes[-1].inputs[0] if nodes else scatter.inputs[1]]
    rows = numel(ends[0].shape)
    for tensor in ends:
        node = tensor.inputs[0] if tensor.inputs else None
        if node is not None and node not in nodes and _are_indices(node.inputs, rows):
            nodes.append(node)
            ends += node.inputs
    return nodes


def _are_indices(tensors: Sequence[gs.Tensor], most: int) -> bool:
    """True if all these tensors are integers or booleans of at most `most` elements."""
    known = [t for t in tensors if t.name]
    return all(
        t.shape is not None and numpy_dtype(t).kind in "iub" and numel(t.shape) <= most
        for t in known
    )
