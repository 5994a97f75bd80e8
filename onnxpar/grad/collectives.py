"""Gradients of collectives that a program per rank has by hand.

The programs of all ranks together are one function, of what each rank is given to what each makes.
What is differentiated is the sum over ranks of what each makes of its own results, so what reaches
a rank's copy is the gradient of that copy, also where all ranks have equal ones: of a sum over
ranks the gradient is a sum over ranks. A parameter that all ranks hold has the sum of their
gradients, which is for those to take who know that it is held so.

Groups stay; tags and tokens are left to be settled, as for any collective without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.grad.value import Value
from onnxpar.grad.vjp import Grads, Vjp, vjp
from onnxpar.ir.collectives import DOMAIN
from onnxpar.ir.tensors import is_float

_Shape = Sequence[int | None] | None


@vjp("AllReduce", domain=DOMAIN)
def all_reduce(v: Vjp) -> Grads:
    of_all = _add(v, "AllReduce", v.dy, v.x.tensor.shape)
    return [_of_reduced(v, v.y, of_all)]


@vjp("ReduceScatter", domain=DOMAIN)
def reduce_scatter(v: Vjp) -> Grads:
    how = _attrs(v, "axis", "sizes")
    of_all = _add(v, "AllGather", v.dy, v.x.tensor.shape, **how)
    if v.node.attrs.get("op", "sum") == "sum":
        return [of_all]
    return [_of_reduced(v, _add(v, "AllGather", v.y, v.x.shape, **how), of_all)]


def _of_reduced(v: Vjp, whole: Value, of_whole: Value) -> Value:
    """The gradient of a rank's summand, factor or candidate, by that of the whole result."""
    op = v.node.attrs.get("op", "sum")
    if op == "sum":
        return of_whole
    x, shape = v.x, v.x.shape
    if op in ("max", "min"):  # equal ones share it
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
    how = _attrs(v, "axis", "sizes")
    shape = v.x.tensor.shape if how.get("sizes") else v.x.shape
    return [_add(v, "ReduceScatter", v.dy, shape, **how)]


@vjp("AllToAll", domain=DOMAIN)
def all_to_all(v: Vjp) -> Grads:
    """The way back: what was cut is joined. Along one axis the table is turned."""
    given = v.node.attrs
    split, concat = given["split_axis"], given["concat_axis"]
    sizes, joined = given.get("split_sizes"), given.get("concat_sizes")
    shape = v.x.tensor.shape
    if split == concat:
        count = math.isqrt(len(sizes))
        table = [int(n) for n in np.reshape(sizes, (count, count)).T.reshape(-1)]
        return [
            _add(v, "AllToAll", v.dy, shape, split_axis=split, concat_axis=split, split_sizes=table)
        ]
    if not joined:
        shape = v.x.shape  # members have contributed equal parts
    back = {"split_sizes": joined, "concat_sizes": sizes}
    back = {key: list(value) for key, value in back.items() if value}
    return [_add(v, "AllToAll", v.dy, shape, split_axis=concat, concat_axis=split, **back)]


@vjp("Broadcast", domain=DOMAIN)
def broadcast(v: Vjp) -> Grads:
    """All to the root, whose the result is."""
    total = _add(v, "AllReduce", v.dy, v.x.shape)
    return [_rank(v).equal(v.node.attrs.get("root", 0)).where(total, 0.0)]


@vjp("NeighborExchange", domain=DOMAIN)
def neighbor_exchange(v: Vjp) -> Grads:
    """What a rank has of its neighbours goes back to their edges, its own part staying."""
    before, after = (list(v.node.attrs[key]) for key in ("before", "after"))
    axis, shape, count = v.node.attrs["axis"] % v.x.rank, v.x.shape, len(before)
    extent = shape[axis]
    table = np.diag([extent] * count) + np.diag(before[1:], -1) + np.diag(after[:-1], 1)
    wide: _Shape = [None if a == axis else s for a, s in enumerate(shape)]
    sizes = [int(n) for n in table.reshape(-1)]
    moved = _add(v, "AllToAll", v.dy, wide, split_axis=axis, concat_axis=axis, split_sizes=sizes)
    rank = _rank(v)

    def by_rank(values: Any) -> Value:
        return v.builder.constant(values, np.int64).op("Gather", rank, axis=0)

    low = np.array([0, *after[:-1]])
    high = np.array([*before[1:], 0])
    at = v.builder.constant([axis], np.int64)

    def piece(start: Any, length: Any, edge: int) -> Value:
        """Elements of each rank, put at that edge of its part."""
        ends = by_rank(start[:, None]), by_rank((start + length)[:, None])
        cut = _node(v, "Slice", [moved, *ends, at], wide)
        rest = extent - length
        pads = by_rank(np.stack([rest, 0 * rest] if edge else [0 * rest, rest], axis=1))
        return _node(v, "Pad", [cut, pads, None, at], shape)

    own = piece(low, np.full(count, extent), 0)
    return [own + piece(0 * low, low, 0) + piece(low + extent, high, 1)]


@vjp("Send", domain=DOMAIN, message=True)
def send(v: Vjp) -> Grads:
    """What the receiver's gradient is; nothing where there is none."""
    if not is_float(v.x.tensor):
        return []
    none = v.builder.zeros(v.x.shape, v.x.dtype)
    return [_add(v, "Recv", none, v.x.shape, in_group=False, peer=list(v.node.attrs["peer"]))]


@vjp("Recv", domain=DOMAIN, message=True)
def receive(v: Vjp) -> Grads:
    """It goes to the sender; where there is none, the operand is what is handed on."""
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
    return {name: v.node.attrs[name] for name in names if name in v.node.attrs}


def _rank(v: Vjp, in_group: bool = True) -> Value:
    """The rank's place in the node's group, or among all."""
    return _node(
        v,
        "Rank",
        [],
        [],
        dtype=np.int64,
        domain=DOMAIN,
        **_attrs(v, "axes", "group") if in_group else {},
    )


def _add(v: Vjp, op: str, x: Value, shape: _Shape, /, in_group: bool = True, **attrs: Any) -> Value:
    """A collective in the node's group."""
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
    """A node whose result has this shape, of which no inference knows, and which differs by rank
    where it is open; its type is by default that of the first operand."""
    name = v.builder.fresh(op)
    tensors = [gs.Variable.empty() if x is None else x.tensor for x in operands]
    dtype = tensors[0].dtype if dtype is None else dtype
    result = gs.Variable(name, dtype, None if shape is None else list(shape))
    v.builder.graph.nodes.append(gs.Node(op, name, attrs, tensors, [result], domain=domain))
    return v.builder.value(result)
