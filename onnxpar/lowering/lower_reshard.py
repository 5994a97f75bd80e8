"""Lowers a reshard to the nodes of a rank, from the positions that the rank holds before and after.

Collectives of the runtime split and join contiguous shards. Where a rank's positions in a dimension
are not contiguous (an inner factor of a merged dimension is split, or a segment of a concatenated
one), a Gather before or after the collective puts the elements in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.base.errors import OpenSizesError
from onnxpar.graph.collectives import KINDS
from onnxpar.graph.per_rank import PerRank, collective_node
from onnxpar.graph.reshards import reshard_of
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.layout.layout import (
    Dim,
    Factor,
    Layout,
    Product,
    first_index,
    indices,
    leaves,
    local_size,
    local_sizes,
    neutral,
    normalize,
    split_count,
)
from onnxpar.layout.mesh import Axes, Mesh

_WIDE = {
    **dict.fromkeys(("int4", "int2"), np.int8),
    **dict.fromkeys(("uint4", "uint2"), np.uint8),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), np.float16
    ),
    "float8_e8m0fnu": np.float32,
}
"""Wider types for types that no collective sends and no kernel slices, with all their values."""


@dataclass
class ReshardBuilder:
    """Replaces one reshard node by the nodes that a rank runs.

    node      the reshard
    mesh      the ranks
    per_rank  gets the constants and attributes that differ by rank
    tag       the tag of its collective, which tells messages of different collectives apart
    """

    node: gs.Node
    mesh: Mesh
    per_rank: PerRank
    tag: int

    def __post_init__(self) -> None:
        self.reshard = reshard_of(self.node)
        self.axes = self.reshard.axes
        self.before, self.after = self.reshard.before, self.reshard.after
        self.inputs, self.outputs = list(self.node.inputs), list(self.node.outputs)
        self.node.inputs.clear()
        self.node.outputs.clear()
        self.built: list[gs.Node] = []

    def build(self) -> list[gs.Node]:
        """Returns the nodes of a rank, in order; the last node computes the reshard's result."""
        wide = _WIDE.get(str(numpy_dtype(self.inputs[0])))
        if wide is None:
            self._lower(self.inputs[0], self.outputs[0])
            return self.built
        sent, received = (gs.Variable(f"{self.node.name}::{n}", wide) for n in ("sent", "received"))
        self._cast(self.inputs[0], sent)
        self._lower(sent, received)
        self._cast(received, self.outputs[0])
        return self.built

    def _cast(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Casts `x` to the wider type of `y`, or back; values do not change, and infinities stay
        infinite."""
        to = numpy_dtype(y)
        is_float8 = str(to).startswith("float8")
        attrs = {"saturate": 0} if is_float8 else {}
        self._add("Cast", [x], y, to=onnx.helper.np_dtype_to_tensor_dtype(to), **attrs)

    def _lower(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds the nodes that compute `y` from `x`, by the method of this kind of reshard."""
        lower = getattr(self, "_" + self.node.op)
        before, after = self.before, self.after
        if not KINDS[self.node.op].by_message:
            self.before, self.after = _unmerged(before, after)
        if self.before == before:
            lower(x, y)
            return
        apart, result = self._fresh(x, "apart"), self._fresh(y, "result")
        same = _same_first(self.before, before)
        self._reshape(x, self.before, apart, same)
        lower(apart, result)
        self._reshape(result, after, y, same)

    def _reshape(self, x: gs.Tensor, layout: Layout, y: gs.Tensor, same: int = 0) -> None:
        """Reshapes `x` to the rank's shard of a layout. The first `same` dimensions of the layout
        are also the first dimensions of `x`, so that a Reshape may copy their sizes if they are
        unknown. Errors: OpenSizesError if too many sizes are unknown."""
        unknown = [i for i, dim in enumerate(layout.dims) if dim.size < 0]
        if len(unknown) < 2:
            self._resized(x, partial(local_shape, layout, self.mesh), y)
            return
        if unknown[-2] >= same:
            raise OpenSizesError(
                f"'{self.node.name}' moves shards of a dimension before several dimensions of "
                "unknown size; split another dimension, or fix their sizes with --dim NAME=N",
                {self.node.name: frozenset()},
            )

        def sizes(rank: int) -> Array:
            """The shape, with 0 for sizes that Reshape copies from its operand."""
            shape = local_shape(layout, self.mesh, rank)
            shape[unknown[:-1]] = 0
            return shape

        self._add("Reshape", [x, self._varying(f"shape{len(self.built)}", sizes)], y)

    def _resized(self, x: gs.Tensor, shape: Callable[[int], Array], y: gs.Tensor) -> None:
        """Reshapes `x` to `shape(rank)`, which may have sizes of 0."""
        target = self._varying(f"shape{len(self.built)}", shape)
        self._add("Reshape", [x, target], y, allowzero=1)

    def _AllReduce(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds an all-reduce."""
        self._collective("AllReduce", x, y, op=self.before.reduce)

    def _Broadcast(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds a broadcast from the first member of each group."""
        self._collective("Broadcast", x, y, root=0)

    def _AllGather(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds an all-gather, and a Gather behind it if shards are not contiguous."""
        (axis,) = changed_dims(self.before, self.after)
        before, after = self.before.dims[axis], self.after.dims[axis]
        joined = y if is_run(before) else self._fresh(y, "joined")
        self._collective("AllGather", x, joined, axis=axis, sizes=self._sizes(before))
        if joined is not y:
            self._order(joined, y, axis, lambda rank: self._joined(before, rank), after)

    def _ReduceScatter(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds a reduce-scatter, and a Gather before it if shards are not contiguous."""
        (axis,) = changed_dims(self.before, self.after)
        before, after = self.before.dims[axis], self.after.dims[axis]
        x = self._by_member(x, axis, before, after)
        sizes = self._sizes(after)
        self._collective("ReduceScatter", x, y, axis=axis, sizes=sizes, op=self.before.reduce)

    def _AllToAll(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds an all-to-all from the dimension that becomes whole to the one that becomes split,
        with Gathers around it if shards are not contiguous."""
        changed = changed_dims(self.before, self.after)
        gains = split_count(self.after.dims[changed[0]]) > split_count(self.before.dims[changed[0]])
        split, concat = changed if gains else changed[::-1]
        x = self._by_member(x, split, self.before.dims[split], self.after.dims[split])
        before = self.before.dims[concat]
        joined = y if is_run(before) else self._fresh(y, "joined")
        self._collective(
            "AllToAll",
            x,
            joined,
            split_axis=split,
            concat_axis=concat,
            split_sizes=self._sizes(self.after.dims[split]),
            concat_sizes=self._sizes(before),
        )
        if joined is not y:
            after = self.after.dims[concat]
            self._order(joined, y, concat, lambda rank: self._joined(before, rank), after)

    def _CollectivePermute(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds a collective in which each rank gets its new shard from the rank that has it."""
        sources = shard_sources(self.before, self.after, self.mesh, self.axes)
        shapes: dict[str, Any] = {}
        if self.before.dims:
            shapes["shapes"] = self._member_shapes
        self._collective("CollectivePermute", x, y, sources=sources, **shapes)

    def _member_shapes(self, rank: int) -> list[int]:
        """Returns the shapes of the shards of all members of a rank's group, one after the other;
        -1 for a whole dimension, whose size may differ between runs."""
        members = np.array(self.mesh.group(self.axes, rank))
        columns = [
            local_sizes(dim, self.mesh, members)
            if split_count(dim) > 1
            else np.full_like(members, -1)
            for dim in self.before.dims
        ]
        shapes: list[int] = np.stack(columns, axis=1).reshape(-1).tolist()
        return shapes

    def _LocalSlice(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds a Slice (or a Gather) with which a rank takes its shard out of what it holds."""
        (axis,) = changed_dims(self.before, self.after)
        before, after = self.before.dims[axis], self.after.dims[axis]
        if not (is_run(before) and is_run(after)):
            self._order(x, y, axis, lambda rank: indices(before, self.mesh, rank), after)
            return

        def start(rank: int) -> Array:
            held, kept = (first_index(dim, self.mesh, rank) for dim in (before, after))
            return np.array([kept - held], np.int64)

        def end(rank: int) -> Array:
            return start(rank) + local_size(after, self.mesh, rank)

        axes = self._constant("axes", np.array([axis], np.int64))
        bounds = [self._varying("start", start), self._varying("end", end), axes]
        self._add("Slice", [x, *bounds], y)

    def _Select(self, x: gs.Tensor, y: gs.Tensor) -> None:
        """Adds a Where that makes a partial tensor of a whole one: the first member of a group
        keeps its values, the others get the neutral element of the reduction."""
        dtype = numpy_dtype(x)
        zero = self._constant("neutral", np.asarray(neutral(self.after.reduce, dtype), dtype))
        first = self._varying(
            "first", lambda rank: np.array(not self.mesh.coordinate(self.axes, rank))
        )
        self._add("Where", [first, x, zero], y)

    def _by_member(
        self, x: gs.Tensor, axis: int, before: Dim, after: Dim, what: str = "ordered"
    ) -> gs.Tensor:
        """Returns `x` with its elements along `axis` in the order of the members of the group that
        will get them, so that the elements of each member are contiguous. `before` and `after` are
        the layouts of the dimension."""
        if is_run(before) and is_run(after):
            return x
        ordered = self._fresh(x, what)

        def wanted(rank: int) -> Array:
            members = self.mesh.group(self.axes, rank)
            return np.concatenate([indices(after, self.mesh, m) for m in members])

        self._pick(x, ordered, axis, lambda rank: indices(before, self.mesh, rank), wanted)
        return ordered

    def _order(
        self, x: gs.Tensor, y: gs.Tensor, axis: int, held: Callable[[int], Array], after: Dim
    ) -> None:
        """Computes `y`, whose dimension `axis` has the layout `after`, from `x`, whose elements
        there have the global positions `held(rank)`."""
        self._pick(x, y, axis, held, lambda rank: indices(after, self.mesh, rank))

    def _pick(
        self,
        x: gs.Tensor,
        y: gs.Tensor,
        axis: int,
        held: Callable[[int], Array],
        wanted: Callable[[int], Array],
    ) -> None:
        """Computes `y`: the elements of `x` at the global positions `wanted(rank)` along `axis`.
        The elements of `x` there have the global positions `held(rank)`."""

        def index(rank: int) -> Array:
            have = held(rank)
            order = np.argsort(have, kind="stable")
            return np.asarray(order[np.searchsorted(have, wanted(rank), sorter=order)], np.int64)

        order = self._varying(f"order{len(self.built)}", index)
        self._add("Gather", [x, order], y, axis=axis)

    def _joined(self, before: Dim, rank: int) -> Array:
        """Returns the global positions in a dimension of the layout `before` that the members of a
        rank's group hold, one member after the other."""
        members = self.mesh.group(self.axes, rank)
        return np.concatenate([indices(before, self.mesh, m) for m in members])

    def _sizes(self, dim: Dim) -> Callable[[int], list[int]]:
        """Returns a function from a rank to the sizes of the shards of all members of its group, in
        a dimension of this layout."""
        mesh, axes = self.mesh, self.axes
        return lambda rank: local_sizes(dim, mesh, np.array(mesh.group(axes, rank))).tolist()

    def _collective(self, kind: str, x: gs.Tensor, y: gs.Tensor, **attrs: Any) -> None:
        """Adds a collective of this kind, with the group and tag of the reshard, and these
        attributes."""
        self.built.append(
            collective_node(
                kind,
                self.node.name,
                x,
                y,
                self.axes,
                self.mesh,
                self.per_rank,
                tag=self.tag,
                **attrs,
            )
        )

    def _add(self, op: str, inputs: Sequence[gs.Tensor], y: gs.Tensor, **attrs: Any) -> None:
        name = f"{self.node.name}::{op}{len(self.built)}"
        self.built.append(gs.Node(op, name, attrs, list(inputs), [y]))

    def _fresh(self, like: gs.Tensor, what: str) -> gs.Variable:
        return gs.Variable(f"{self.node.name}::{what}", like.dtype)

    def _constant(self, what: str, value: Array) -> gs.Constant:
        return gs.Constant(f"{self.node.name}::{what}", value)

    def _varying(self, what: str, value: Callable[[int], Array]) -> gs.Constant:
        constant = self._constant(what, value(0))
        self.per_rank.constants[constant.name] = value
        return constant


def shard_sources(before: Layout, after: Layout, mesh: Mesh, axes: Axes) -> list[int]:
    """Returns, for each member of a group along `axes`, the index of the member that sends its
    shard of the layout `after`: a member that holds this shard in the layout `before`. A member
    that already has its shard is its own sender. No member sends twice. Members that swap their
    shards give [1, 0]."""

    members = np.array(mesh.group(axes, 0))

    def held(layout: Layout) -> list[tuple[int, ...]]:
        """The coordinates of each member's shard, and the index of its term of a partial sum."""
        splits = [leaf.axes for dim in layout.dims for leaf in leaves(dim)]
        columns = [mesh.coordinate(over, members) for over in (*splits, layout.partial)]
        return list(map(tuple, np.stack(columns, axis=1).tolist()))

    have, wanted = held(before), held(after)
    sources = [i if a == b else -1 for i, (a, b) in enumerate(zip(have, wanted, strict=True))]
    free: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i in reversed(range(len(members))):
        if sources[i] < 0:
            free[have[i]].append(i)
    return [free[wanted[i]].pop() if source < 0 else source for i, source in enumerate(sources)]


def _unmerged(before: Layout, after: Layout) -> tuple[Layout, Layout]:
    """Returns both layouts with merged dimensions taken apart where needed: a dimension that merges
    several factors ([batch * heads]), and in which an inner factor's split changes, becomes a
    dimension for each factor. There, shards are contiguous."""
    dims: list[tuple[Dim, Dim]] = []
    for b, a in zip(before.dims, after.dims, strict=True):
        changes = b != a and not (is_run(b) and is_run(a))
        if changes and isinstance(b, Product) and isinstance(a, Product):
            dims += zip(b.children, a.children, strict=True)
        else:
            dims.append((b, a))
    return replace(before, dims=tuple(b for b, _ in dims)), replace(
        after, dims=tuple(a for _, a in dims)
    )


def _same_first(one: Layout, other: Layout) -> int:
    """Returns the number of leading dimensions in which two layouts are equal."""
    pairs = zip(one.dims, other.dims, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def local_shape(layout: Layout, mesh: Mesh, rank: int) -> Array:
    """Returns the shape of a rank's shard, as an array."""
    return np.array(layout.local_shape(mesh, rank), np.int64)


def is_run(dim: Dim) -> bool:
    """True if the positions that a rank holds in a dimension are contiguous."""
    return isinstance(normalize(dim), Factor)


def changed_dims(before: Layout, after: Layout) -> list[int]:
    """Returns the indices of the dimensions in which two layouts differ."""
    pairs = zip(before.dims, after.dims, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a != b]
