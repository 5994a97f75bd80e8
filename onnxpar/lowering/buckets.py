"""Fuses independent collectives into buckets: several tensors are sent by one collective, and so
wait for its latency once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.cost.cost import Costs
from onnxpar.graph.collectives import KINDS, PARTIAL, SPLIT, WHOLE
from onnxpar.graph.reshards import Reshard, is_reshard, reshard_node, reshard_of
from onnxpar.graph.subgraphs import read_by
from onnxpar.layout.layout import Layout, dim_axes, is_data_dependent, leaves, local_size
from onnxpar.layout.mesh import Mesh
from onnxpar.layout.shares import Proportion
from onnxpar.lowering.lower_reshard import changed_dims, is_run
from onnxpar.lowering.order_nodes import schedule
from onnxpar.sharding.shard_bytes import reshard_bytes

Kind = tuple[object, ...]
BUCKET_BYTES = 64 << 20
"""Default size of a bucket of all-reduces, in bytes per rank."""
PART_BYTES = 8 << 20
"""Default size of a bucket of reduce-scatters or all-gathers, in bytes per rank. It is smaller,
since tensors stay whole until the bucket is full."""
SHARE = 1 / 8
"""The largest share of all bytes in one bucket, where compute is to hide collectives. So compute
hides most of them even if ranks compute faster than predicted."""
_FUSED = [kind for kind in KINDS.values() if kind.is_fused]
REDUCTIONS = tuple(kind.name for kind in _FUSED if kind.change == (PARTIAL, WHOLE))
"""Kinds of collectives that may be fused; operand and result are whole tensors."""
EXCHANGES = tuple(kind.name for kind in _FUSED if kind.change == (SPLIT, SPLIT))
"""Kinds of collectives that may be fused; operand and result are shards."""
PARTS = tuple(kind.name for kind in _FUSED if kind.name not in (*REDUCTIONS, *EXCHANGES))
"""Kinds of collectives that may be fused; either the operand or the result is a shard."""
_TOLERANCE = 1e-9
"""Relative tolerance for equal times: smaller differences are rounding errors."""
Wanted = Mapping[str, object]
"""The purpose of each collective, by name; only collectives with the same purpose are fused."""


@dataclass
class _Bucket:
    """Collectives of one kind, which become a single collective.

    nodes      the collectives
    size       their bytes
    read       the tensors that they read
    dependent  the tensors that depend on any of them; a collective that reads one cannot join
    """

    nodes: list[gs.Node] = field(default_factory=list)
    size: int = 0
    read: set[str] = field(default_factory=set)
    dependent: set[str] = field(default_factory=set)

    def takes(self, node: gs.Node, size: int, limit: int) -> bool:
        """True if a node of `size` bytes may join the bucket: it depends on none of its nodes, and
        the bucket stays within `limit`."""
        if not self.nodes:
            return True
        independent = all(t.name not in self.dependent for t in node.inputs)
        return independent and self.size + size <= limit


def _kind(node: gs.Node, wanted: Wanted, mesh: Mesh, ops: Collection[str]) -> Kind | None:
    """Returns a key of a collective: collectives with equal keys may share a bucket. None if the
    node cannot be fused, is fused already, or has an op that is not in `ops`. `wanted` has the
    purpose of each collective, by name."""
    if not is_reshard(node) or node.op not in ops:
        return None
    reshard, dtype = reshard_of(node), str(node.inputs[0].dtype)
    if len(reshard.members) > 1 or (node.op in PARTS and not _is_even(reshard, mesh)):
        return None
    if node.op in EXCHANGES:
        held = held_dim(*reshard.members[0])
        purpose = wanted.get(node.name)
        return None if held is None else (node.op, reshard.axes, dtype, *held, purpose)
    if reshard.share < 1 or any(map(is_data_dependent, reshard.before.dims)):
        return None  # the tensor's part of the bucket has no known size
    reader = _first_reader(node) if node.op == "AllGather" else None
    return node.op, reshard.axes, reshard.before.reduce, dtype, wanted.get(node.name), reader


def held_dim(before: Layout, after: Layout) -> tuple[int, bool] | None:
    """Returns the dimension of a tensor that an all-to-all gathers on the ranks at one coordinate,
    or spreads from there, and True if these ranks hold it before. None for any other all-to-all,
    and if shards are not contiguous."""
    changed = changed_dims(before, after)
    pairs = [(i, before.dims[i], after.dims[i]) for i in changed]
    if len(pairs) != 2 or not all(is_run(b) and is_run(a) for _, b, a in pairs):
        return None
    for i, b, a in pairs:
        one, other = ({axis for axis in dim_axes(dim) if axis.at is not None} for dim in (b, a))
        if one != other:
            return i, bool(one - other)
    return None


def _is_even(reshard: Reshard, mesh: Mesh) -> bool:
    """True if a collective gathers or scatters a single dimension, which has equal shards on all
    ranks."""
    before, after = reshard.before, reshard.after
    dims = changed_dims(before, after)
    if len(dims) != 1:
        return False
    dim = (before if reshard.kind == "AllGather" else after).dims[dims[0]]
    if any(isinstance(leaf.parts, Proportion) for leaf in leaves(dim)):
        return False
    return len({local_size(dim, mesh, rank) for rank in range(mesh.size)}) == 1


def _first_reader(node: gs.Node) -> str | None:
    """Returns the name of the first node that reads a gathered tensor; None if no node does. Only
    gathers with the same first reader are fused: otherwise, a fused gather would allocate results
    too early."""
    return next((str(reader.name) for t in node.outputs for reader in t.outputs), None)


def _size(node: gs.Node, mesh: Mesh, sizes: dict[str, int]) -> int:
    """Returns the bytes per rank of the whole tensor that a collective reduces or gathers. `sizes`
    caches them, by name."""
    if node.name not in sizes:
        sizes[node.name] = reshard_bytes(node)
    return sizes[node.name]


def first_of_buckets(
    graph: gs.Graph,
    costs: Costs,
    seconds: Mapping[str, float],
    limit: Callable[[str], int],
    sizes: dict[str, int],
    wanted: Wanted,
    share: float = SHARE,
) -> set[str]:
    """Divides collectives into buckets that overlap with compute; returns the names of the first
    node of each bucket. A bucket is sent when its last tensor is computed and the link is free. The
    division minimizes the end of the last bucket; among equal ones, the last buckets are largest.

    seconds  the compute time of each node, by name
    limit    the most bytes per rank of a bucket, by kind of collective
    wanted   the purpose of each collective, by name; only equal ones share a bucket
    share    the most bytes of a bucket, as a share of the bytes of all collectives of its kind

    The graph must be sorted topologically. Collectives of different kinds count as if each kind had
    a link of its own.
    """
    clock = 0.0
    candidates: dict[Kind, list[tuple[gs.Node, float]]] = defaultdict(list)
    for node in graph.nodes:
        clock += seconds.get(node.name, 0.0)
        kind = _kind(node, wanted, costs.mesh, (*REDUCTIONS, *PARTS))
        if kind is not None:
            candidates[kind].append((node, clock))
    first: set[str] = set()
    for members in candidates.values():
        nodes = [node for node, _ in members]
        ready: Array = np.array([time for _, time in members])
        ends: Array = np.cumsum([0.0, *(_size(node, costs.mesh, sizes) for node in nodes)])
        op, axes = nodes[0].op, reshard_of(nodes[0]).axes
        taking = partial(costs.steps, op, axes)
        most = min(limit(op), share * ends[-1])
        first |= {nodes[at].name for at in _starts(ready, ends, taking, most)}
    return first


def _starts(
    ready: Array, ends: Array, taking: Callable[[list[float]], list[float]], limit: float
) -> Iterator[int]:
    """Yields the index of the first tensor of each bucket, from the last bucket to the first one,
    for collectives of one kind. Dynamic programming finds the division with the earliest end.

    ready   the time at which each tensor is computed
    ends    cumulative bytes: of the tensors before each tensor, and of all tensors
    taking  returns the seconds of collectives with these numbers of bytes
    limit   the most bytes of a bucket
    """
    count = len(ready)
    sent: Array = np.zeros(count + 1)  # sent[n]: the time at which the first n tensors are sent
    for end in range(1, count + 1):
        begin = _least(ends, end, limit)
        took = taking((ends[end] - ends[begin:end]).tolist())
        sent[end] = np.min(np.maximum(sent[begin:end], ready[end - 1]) + took)
    due, end = sent[count], count
    while end:
        begin = _least(ends, end, limit)
        latest = due - np.array(taking((ends[end] - ends[begin:end]).tolist()))
        slack = _TOLERANCE * due
        fits = np.maximum(sent[begin:end], ready[end - 1]) <= latest + slack
        at = int(np.argmax(fits))
        yield begin + at
        due, end = latest[at] + slack, begin + at


def _least(ends: Array, end: int, limit: float) -> int:
    """Returns the first index of the largest bucket of at most `limit` bytes that ends before index
    `end`; a bucket has at least one tensor. `ends` are cumulative bytes: element i is the bytes of
    all tensors before tensor i."""
    return min(int(np.searchsorted(ends, ends[end] - limit)), end - 1)


def fuse_collectives(
    graph: gs.Graph,
    mesh: Mesh,
    bucket_bytes: int,
    sizes: dict[str, int],
    wanted: Wanted,
    first: Collection[str] = (),
    ops: Collection[str] = REDUCTIONS,
) -> bool:
    """Fuses collectives of one kind into buckets, in graph order; returns True if a bucket was
    fused. The graph must be sorted topologically, and stays sorted.

    bucket_bytes  the most bytes per rank of a bucket
    sizes         caches bytes by node between calls
    wanted        the purpose of each collective, by name; only equal ones are fused
    first         names of nodes at which a new bucket begins
    ops           the kinds to fuse

    All-gathers are fused if the same node reads their results first, or if no node reads them.
    All-to-alls are fused if each moves a dimension to or from ranks at one coordinate, and if
    `wanted` says that the other dimensions have equal sizes. A fused node has `members`, the
    (before, after) layouts of its operands.
    """
    fused = [
        nodes
        for nodes in independent_groups(
            graph,
            lambda node: _kind(node, wanted, mesh, ops),
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
    """Divides nodes into groups, in graph order: the nodes of a group are of one kind, do not
    depend on each other, and are at most `limit` in size together.

    kind   returns the kind of a node; None: the node is in no group
    size   returns the size of a node
    first  names of nodes at which a new group begins
    """
    open_buckets: dict[Kind, _Bucket] = {}
    full: list[_Bucket] = []
    for node in graph.nodes:
        key = kind(node)
        if key is not None:
            more = size(node)
            bucket = open_buckets.setdefault(key, _Bucket())
            if node.name in first or not bucket.takes(node, more, limit):
                full.append(bucket)
                bucket = open_buckets[key] = _Bucket()
            bucket.nodes.append(node)
            bucket.size += more
            bucket.read |= {t.name for t in node.inputs}
            bucket.dependent |= {t.name for t in node.outputs}
            # a node that depends on one node of a bucket depends on the whole bucket
            for other in open_buckets.values():
                if not other.dependent.isdisjoint(bucket.read):
                    other.dependent |= bucket.dependent
        for bucket in open_buckets.values():
            if any(t.name in bucket.dependent for t in read_by(node)):
                bucket.dependent |= {t.name for t in node.outputs}
    return [bucket.nodes for bucket in (*full, *open_buckets.values()) if bucket.nodes]


def _fuse(nodes: list[gs.Node]) -> gs.Node:
    """Returns a single collective in place of these, with all their operands and results."""
    first = nodes[0]
    inputs = [node.inputs[0] for node in nodes]
    outputs = [node.outputs[0] for node in nodes]
    members = tuple(layouts for node in nodes for layouts in reshard_of(node).members)
    reshard = replace(reshard_of(first), members=members)
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()
    return reshard_node(first.name, reshard, inputs, outputs)
