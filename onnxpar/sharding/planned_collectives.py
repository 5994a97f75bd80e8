"""Describes the collectives of a graph as plan.json and the tables of a plan list them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.cost.cost import bytes_sent
from onnxpar.graph.per_rank import take_inner
from onnxpar.graph.reshards import operands_of, reshard_of
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.layout.mesh import Mesh
from onnxpar.sharding.shard_bytes import reshard_bytes


@dataclass(frozen=True)
class Collective:
    """One collective of a plan.

    kind     the op, such as AllReduce
    group    the ranks of rank 0's group; of another group if rank 0 takes no part
    groups   the number of groups
    bytes    bytes that the rank with the largest shard sends, over all iterations of a Scan
    tensor   the resharded tensors, or the node in which the collective is
    before   the layout of the operand, as text
    after    the layout of the result, as text
    operand  bytes of the operands on the rank with the largest shards
    """

    kind: str
    name: str
    group: tuple[int, ...]
    groups: int
    bytes: int
    tensor: str
    before: str
    after: str
    operand: int = 0

    def repeated(self, iterations: int) -> Collective:
        """Returns the collective with the bytes of this many iterations of a loop."""
        return replace(self, bytes=self.bytes * iterations, operand=self.operand * iterations)


def collective_of(node: gs.Node, mesh: Mesh) -> Collective:
    """Returns the plan's entry for a reshard node, a collective that changes a tensor's layout."""
    members = operands_of(node)
    group = mesh.group(reshard_of(node).axes, 0)
    size = reshard_bytes(node)
    sent = int(bytes_sent(node.op, len(group), size))
    tensor = " ".join(source.name.split("@")[0] for source, _, _ in members)
    before, after = ("; ".join(dict.fromkeys(m[i].text(mesh) for m in members)) for i in (1, 2))
    groups = mesh.size // len(group)
    return Collective(node.op, node.name, group, groups, sent, tensor, before, after, int(size))


def inner_collective(node: gs.Node, mesh: Mesh) -> Collective:
    """Returns the plan's entry for a collective inside an op, such as the all-reduce of a split
    softmax. Removes the data for this entry from the node."""
    inner = take_inner(node)
    group = mesh.group(inner.axes, 0)
    size = math.prod(inner.shape) * numpy_dtype(node.inputs[0]).itemsize
    over = ".".join(mesh.text(a) for a in inner.axes)
    before = f"{node.attrs.get('op', 'parts')}({over})"
    sent = int(bytes_sent(node.op, len(group), size))
    within = node.name.split("::")[0]
    groups = mesh.size // len(group)
    return Collective(node.op, node.name, group, groups, sent, f"in {within}", before, "-", size)
