"""Fuses all-reduces that do not wait for each other, so that one latency serves several tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.collective import DOMAIN
from onnxpar.layout import Layout
from onnxpar.mesh import Mesh
from onnxpar.plan import part_bytes
from onnxpar.schedule import schedule
from onnxpar.search.cost import Costs
from onnxpar.subgraphs import captured

Kind = tuple[object, ...]
BUCKET_BYTES = 64 << 20
"""Bytes per rank that are reduced together by default."""
Wanted = Mapping[str, object]
"""What all-reduces are for, by name; only those for the same are fused."""


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


def _is_all_reduce(node: gs.Node) -> bool:
    return bool(node.domain == DOMAIN and node.op == "AllReduce")


def _kind(node: gs.Node, wanted: Wanted) -> Kind:
    """What all-reduces of one bucket have in common."""
    reduce, dtype = node.attrs["before"].reduce, str(node.inputs[0].dtype)
    return node.attrs["axes"], reduce, dtype, wanted.get(node.name)


def _size(node: gs.Node, mesh: Mesh, sizes: dict[str, int]) -> int:
    before: Layout = node.attrs["before"]
    return sizes.setdefault(node.name, part_bytes(node.inputs[0], before, mesh))


def first_of_buckets(
    graph: gs.Graph,
    costs: Costs,
    seconds: Mapping[str, float],
    tail: float,
    sizes: dict[str, int],
    wanted: Wanted,
) -> set[str]:
    """Where buckets begin, so that computing hides them: the names of their first all-reduces.

    The last bucket of a kind takes at most `tail` seconds; each earlier one at most the time that
    is computed between its last tensor and the last of the next. `seconds` is how long nodes take,
    by name. The idea is MindSpore's fusion by cost model (parallel/allreduce_fusion).
    """
    clock = 0.0
    ready: dict[Kind, list[tuple[gs.Node, float]]] = defaultdict(list)
    for node in graph.nodes:
        clock += seconds.get(node.name, 0.0)
        if _is_all_reduce(node):
            ready[_kind(node, wanted)].append((node, clock))
    first: set[str] = set()
    for members in ready.values():
        end = len(members)
        allowed = tail
        while end:
            start, total = end - 1, _size(members[end - 1][0], costs.mesh, sizes)
            axes = members[start][0].attrs["axes"]
            while start:
                total += _size(members[start - 1][0], costs.mesh, sizes)
                if costs.collective("AllReduce", axes, total) > allowed:
                    break
                start -= 1
            first.add(members[start][0].name)
            if start:
                allowed = max(members[end - 1][1] - members[start - 1][1], 0.0)
            end = start
    return first


def fuse_all_reduces(
    graph: gs.Graph,
    mesh: Mesh,
    bucket_bytes: int,
    sizes: dict[str, int],
    wanted: Wanted,
    first: Collection[str] = (),
) -> bool:
    """Joins all-reduces of one kind, up to `bucket_bytes` per rank, in graph order.

    Requires a topologically sorted graph of reshard nodes, and ensures the same. A fused node has
    `members`, the (before, after) layouts of its operands. `sizes` are bytes by node, kept from an
    earlier call for the same nodes; a bucket begins at each of `first`.
    """
    fused = [
        nodes
        for nodes in independent_groups(
            graph,
            lambda node: _kind(node, wanted) if _is_all_reduce(node) else None,
            lambda node: _size(node, mesh, sizes),
            bucket_bytes,
            first,
        )
        if len(nodes) > 1
    ]
    for nodes in fused:
        graph.nodes.append(_fuse(nodes))
    if fused:
        gone = {id(node) for nodes in fused for node in nodes}
        graph.nodes = [node for node in graph.nodes if id(node) not in gone]
        schedule(graph)
    return bool(fused)


def independent_groups(
    graph: gs.Graph,
    kind: Callable[[gs.Node], Kind | None],
    size: Callable[[gs.Node], int],
    limit: int,
    first: Collection[str] = (),
) -> list[list[gs.Node]]:
    """Groups of nodes of one kind that do not wait for each other, each up to `limit` in size, in
    graph order; nodes of no kind are in none. A group begins at each of `first`."""
    open_buckets: dict[Kind, _Bucket] = {}
    full: list[_Bucket] = []
    for node in graph.nodes:
        of = kind(node)
        if of is not None:
            more = size(node)
            bucket = open_buckets.setdefault(of, _Bucket())
            if node.name in first or not bucket.takes(node, more, limit):
                full.append(bucket)
                bucket = open_buckets[of] = _Bucket()
            bucket.nodes.append(node)
            bucket.size += more
            bucket.behind |= {t.name for t in node.outputs}
            for other in open_buckets.values():  # with the node, its whole bucket waits for others
                if any(t.name in other.behind for t in node.inputs):
                    other.behind |= bucket.behind
        for bucket in open_buckets.values():
            if any(t.name in bucket.behind for t in _read(node)):
                bucket.behind |= {t.name for t in node.outputs}
    return [bucket.nodes for bucket in (*full, *open_buckets.values()) if bucket.nodes]


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
