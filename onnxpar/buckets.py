"""Fuses all-reduces that do not wait for each other, so that one latency serves several tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.collective import DOMAIN
from onnxpar.layout import Layout
from onnxpar.mesh import Mesh
from onnxpar.plan import part_bytes
from onnxpar.schedule import schedule
from onnxpar.subgraphs import captured


@dataclass
class _Bucket:
    """All-reduces over the same axes, and every tensor that depends on one of them."""

    nodes: list[gs.Node] = field(default_factory=list)
    size: int = 0
    behind: set[str] = field(default_factory=set)

    def takes(self, node: gs.Node, size: int, limit: int) -> bool:
        """Whether a node may join."""
        if not self.nodes:
            return True
        independent = all(t.name not in self.behind for t in node.inputs)
        return independent and self.size + size <= limit


def fuse_all_reduces(graph: gs.Graph, mesh: Mesh, bucket_bytes: int, sizes: dict[str, int]) -> bool:
    """Joins all-reduces of one kind, up to `bucket_bytes` per rank, in graph order.

    Requires a topologically sorted graph of reshard nodes, and ensures the same. A fused node has
    `members`, the (before, after) layouts of its operands. `sizes` are bytes by node, kept from an
    earlier call for the same nodes.
    """
    open_buckets: dict[tuple[object, ...], _Bucket] = {}
    full: list[_Bucket] = []
    for node in graph.nodes:
        if node.domain == DOMAIN and node.op == "AllReduce":
            before: Layout = node.attrs["before"]
            size = sizes.setdefault(node.name, part_bytes(node.inputs[0], before, mesh))
            kind = (node.attrs["axes"], before.reduce, str(node.inputs[0].dtype))
            bucket = open_buckets.setdefault(kind, _Bucket())
            if not bucket.takes(node, size, bucket_bytes):
                full.append(bucket)
                bucket = open_buckets[kind] = _Bucket()
            bucket.nodes.append(node)
            bucket.size += size
            bucket.behind |= {t.name for t in node.outputs}
        for bucket in open_buckets.values():
            if any(t.name in bucket.behind for t in _read(node)):
                bucket.behind |= {t.name for t in node.outputs}
    fused = [b for b in [*full, *open_buckets.values()] if len(b.nodes) > 1]
    for bucket in fused:
        graph.nodes.append(_fuse(bucket.nodes))
    if fused:
        gone = {id(node) for bucket in fused for node in bucket.nodes}
        graph.nodes = [node for node in graph.nodes if id(node) not in gone]
        schedule(graph)
    return bool(fused)


def _read(node: gs.Node) -> list[gs.Tensor]:
    """The operands of a node, and what its subgraphs read of the graph."""
    return [*node.inputs, *(tensor for tensor, _, _ in captured(node))]


def _fuse(nodes: list[gs.Node]) -> gs.Node:
    first = nodes[0]
    inputs = [node.inputs[0] for node in nodes]
    outputs = [node.outputs[0] for node in nodes]
    members = tuple((node.attrs["before"], node.attrs["after"]) for node in nodes)
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()
    attrs = {**first.attrs, "members": members}
    return gs.Node(first.op, first.name, attrs, inputs, outputs, domain=DOMAIN)
