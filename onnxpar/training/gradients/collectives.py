"""Gradients of the collectives of a manual program (a model that its author wrote for one rank).

The programs of all ranks form one function, from the inputs of all ranks to the outputs of all
ranks. The sum of all ranks' losses is differentiated. A rank's gradient of a tensor is the gradient
with respect to its own copy, even if all ranks hold equal copies; so the gradient of an AllReduce
is an AllReduce. The gradient of a replicated parameter is the sum over the ranks, which the caller
adds (`training/manual.py`).

Groups of ranks stay the same; tags and tokens are assigned later, as for any new collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.tensors import is_float
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp

_Shape = Sequence[int | None] | None


@vjp("AllReduce", domain=DOMAIN)
def all_reduce(v: Vjp) -> Grads:
    of_all = _add(v, "AllReduce", v.dy, v.x.tensor.shape)
    return [_of_reduced(v, v.y, of_all)]


@vjp("ReduceScatter", domain=DOMAIN)
def reduce_scatter(v: Vjp) -> Grads:
    attrs = _attrs(v, "axis", "sizes")
    of_all = _add(v, "AllGather", v.dy, v.x.tensor.shape, **attrs)
    if v.node.attrs.get("op", "sum") == "sum":
        return [of_all]
    return [_of_reduced(v, _add(v, "AllGather", v.y, v.x.shape, **attrs), of_all)]


def _of_reduced(v: Vjp, whole: Value, of_whole: Value) -> Value:
    """Returns the gradient of this rank's operand of an AllReduce (sum, max, min or prod), given
    its result `whole`, and `of_whole`, the result's gradient summed over the ranks."""
    op = v.node.attrs.get("op", "sum")
    if op == "sum":
        return of_whole
    x, shape = v.x, v.x.shape
    if op in ("max", "min"):  # equal elements share the gradient
        holds = x.equal(whole).cast(x.dtype)
        return of_whole * holds / _add(v, "AllReduce", holds, shape)
    assert op == "prod", op
    is_zero = x.equal(0.0)
    count = is_zero.cast(x.dtype)
    other_zeros = _add(v, "AllReduce", count, shape) - count
    rest = is_zero.where(1.0, x)
    others = _add(v, "AllReduce", rest, shape, op="prod") / rest
    return of_whole * (other_zeros > 0.0).where(0.0, others)


@vjp("AllGather", domain=DOMAIN)
def all_gather(v: Vjp) -> Grads:
    attrs = _attrs(v, "axis", "sizes")
    shape = v.x.tensor.shape if attrs.get("sizes") else v.x.shape
    return [_add(v, "ReduceScatter", v.dy, shape, **attrs)]


@vjp("AllToAll", domain=DOMAIN)
def all_to_all(v: Vjp) -> Grads:
    """The gradient rule of AllToAll: adds the AllToAll in the opposite direction. If one axis is
    both split and joined, the table of sizes is transposed."""
    attrs = v.node.attrs
    split, concat = attrs["split_axis"], attrs["concat_axis"]
    sizes, joined = attrs.get("split_sizes"), attrs.get("concat_sizes")
    shape = v.x.tensor.shape
    if split == concat:
        count = math.isqrt(len(sizes))
        table = [int(n) for n in np.reshape(sizes, (count, count)).T.reshape(-1)]
        return [
            _add(v, "AllToAll", v.dy, shape, split_axis=split, concat_axis=split, split_sizes=table)
        ]
    if not joined:
        shape = v.x.shape  # all ranks sent shards of equal size
    back = {"split_sizes": joined, "concat_sizes": sizes}
    back = {key: list(value) for key, value in back.items() if value}
    return [_add(v, "AllToAll", v.dy, shape, split_axis=concat, concat_axis=split, **back)]


@vjp("Broadcast", domain=DOMAIN)
def broadcast(v: Vjp) -> Grads:
    """The gradient rule of Broadcast: the operand of the root gets the sum over all ranks, the
    operands of other ranks get zero. A rank that is alone in its group is its own root."""
    total = _add(v, "AllReduce", v.dy, v.x.shape)
    is_root = _rank(v).equal(v.node.attrs.get("root", 0))
    if "group" in v.node.attrs:
        is_root = is_root.op("Or", _size(v).equal(1))
    return [is_root.where(total, 0.0)]


@vjp("CollectivePermute", domain=DOMAIN)
def collective_permute(v: Vjp) -> Grads:
    """The gradient rule of CollectivePermute: adds the inverse permute. A rank whose operand no
    rank received gets zeros."""
    sources = list(v.node.attrs["sources"])
    readers = [sources.index(i) if i in sources else -1 for i in range(len(sources))]
    return [_add(v, "CollectivePermute", v.dy, v.x.tensor.shape, sources=readers)]


@vjp("NeighborExchange", domain=DOMAIN)
def neighbor_exchange(v: Vjp) -> Grads:
    """The gradient rule of NeighborExchange: sends the gradient of each halo (elements received
    from a neighbour) back to the neighbour that owns them, which adds it at its edge."""
    before, after = (list(v.node.attrs[key]) for key in ("before", "after"))
    axis, shape, count = v.node.attrs["axis"] % v.x.rank, v.x.shape, len(before)
    extent = shape[axis]
    table = np.diag([extent] * count) + np.diag(before[1:], -1) + np.diag(after[:-1], 1)
    wide: _Shape = [None if a == axis else s for a, s in enumerate(shape)]
    sizes = [int(n) for n in table.reshape(-1)]
    moved = _add(v, "AllToAll", v.dy, wide, split_axis=axis, concat_axis=axis, split_sizes=sizes)
    rank = _rank(v)
    if "group" in v.node.attrs:  # the last entries are for a rank alone in its group
        rank = _size(v).equal(1).where(count, rank)

    def by_rank(values: Any) -> Value:
        return v.builder.constant(values, np.int64).op("Gather", rank, axis=0)

    low = np.array([0, *after[:-1], 0])
    high = np.array([*before[1:], 0, 0])
    at = v.builder.constant([axis], np.int64)

    def piece(start: Any, length: Any, edge: int) -> Value:
        """Returns `length` elements of `moved` from `start` on (both by rank), padded to the size
        of a shard: with zeros at its end (`edge` 0) or at its start (`edge` 1)."""
        ends = by_rank(start[:, None]), by_rank((start + length)[:, None])
        cut = _node(v, "Slice", [moved, *ends, at], wide)
        rest = extent - length
        pads = by_rank(np.stack([rest, 0 * rest] if edge else [0 * rest, rest], axis=1))
        return _node(v, "Pad", [cut, pads, None, at], shape)

    of_shard = piece(low, np.full(count + 1, extent), 0)
    return [of_shard + piece(0 * low, low, 0) + piece(low + extent, high, 1)]


@vjp("Send", domain=DOMAIN, message=True)
def send(v: Vjp) -> Grads:
    """The gradient rule of Send: receives the gradient from the rank that received the operand; a
    rank without a receiver gets zeros."""
    if not is_float(v.x.tensor):
        return []
    none = v.builder.zeros(v.x.shape, v.x.dtype)
    return [_add(v, "Recv", none, v.x.shape, in_group=False, peer=list(v.node.attrs["peer"]))]


@vjp("Recv", domain=DOMAIN, message=True)
def receive(v: Vjp) -> Grads:
    """The gradient rule of Recv: sends the gradient to the sender. On a rank without a sender, the
    Recv returned its operand, so the operand gets the gradient."""
    if not is_float(v.x.tensor):
        return []
    peers = list(v.node.attrs["peer"])
    dy = v.dy
    name = v.builder.fresh("Send")
    v.builder.graph.nodes.append(
        gs.Node("Send", name, {"peer": peers}, [dy.tensor], [], domain=DOMAIN)
    )
    alone = v.builder.constant(np.array(peers) < 0).op("Gather", _rank(v, in_group=False), axis=0)
    return [alone.where(dy, 0.0)]


def _attrs(v: Vjp, *names: str) -> dict[str, Any]:
    """Returns the attributes with these names that the node has."""
    return {name: v.node.attrs[name] for name in names if name in v.node.attrs}


def _rank(v: Vjp, in_group: bool = True) -> Value:
    """Adds a node that returns this rank's index in the node's group, or among all ranks."""
    return _node(
        v,
        "Rank",
        [],
        [],
        dtype=np.int64,
        domain=DOMAIN,
        **_attrs(v, "axes", "group") if in_group else {},
    )


def _size(v: Vjp) -> Value:
    """Returns the number of ranks in the node's group."""
    return _node(v, "GroupSize", [], [], dtype=np.int64, domain=DOMAIN, **_attrs(v, "group"))


def _add(v: Vjp, op: str, x: Value, shape: _Shape, /, in_group: bool = True, **attrs: Any) -> Value:
    """Adds a collective, by default in the node's group, and returns its result."""
    group = _attrs(v, "axes", "group") if in_group else {}
    return _node(v, op, [x], shape, dtype=x.dtype, domain=DOMAIN, **group, **attrs)


def _node(
    v: Vjp,
    op: str,
    operands: Sequence[Value | None],
    shape: _Shape,
    /,
    dtype: Any = None,
    domain: str | None = None,
    **attrs: Any,
) -> Value:
    """Adds a node, and returns its result. The caller gives the result's `shape`, because shape
    inference does not know it; a size that differs between ranks is None. The dtype defaults to
    that of the first operand."""
    name = v.builder.fresh(op)
    tensors = [gs.Variable.empty() if x is None else x.tensor for x in operands]
    dtype = tensors[0].dtype if dtype is None else dtype
    result = gs.Variable(name, dtype, None if shape is None else list(shape))
    v.builder.graph.nodes.append(gs.Node(op, name, attrs, tensors, [result], domain=domain))
    return v.builder.value(result)
