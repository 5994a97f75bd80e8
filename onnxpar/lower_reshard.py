"""How a reshard becomes nodes that a rank runs: everything follows from which positions it holds.

Collectives of the runtime cut and join contiguous parts. Where a rank's positions in a dimension
are not one run (a split of an inner factor, or of segments), the parts are ordered by a Gather
before or behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.arrays import Array
from onnxpar.collective import PerRank, collective_node
from onnxpar.layout import (
    Dim,
    Factor,
    Layout,
    Product,
    indices,
    local_size,
    neutral,
    normalize,
    split_count,
)
from onnxpar.mesh import Axes, Mesh
from onnxpar.plan import numpy_dtype


@dataclass
class ReshardBuilder:
    """Replaces one reshard node by a rank's own nodes."""

    node: gs.Node
    mesh: Mesh
    per_rank: PerRank
    tag: int
    opset: int

    def __post_init__(self) -> None:
        self.axes: Axes = self.node.attrs["axes"]
        self.before: Layout = self.node.attrs["before"]
        self.after: Layout = self.node.attrs["after"]
        self.inputs, self.outputs = list(self.node.inputs), list(self.node.outputs)
        self.node.inputs.clear()
        self.node.outputs.clear()
        self.built: list[gs.Node] = []

    def build(self) -> list[gs.Node]:
        """The nodes, in order; the last makes the reshard's result."""
        if len(self.inputs) > 1:
            self._bucket()
            return self.built
        lower = getattr(self, "_" + self.node.op)
        before, after = self.before, self.after
        self.before, self.after = _unmerged(before, after)
        if self.before == before:
            lower(self.inputs[0], self.outputs[0])
            return self.built
        apart, result = self._fresh(self.inputs[0], "apart"), self._fresh(self.outputs[0], "result")
        self._reshape(self.inputs[0], self.before, apart)
        lower(apart, result)
        self._reshape(result, after, self.outputs[0])
        return self.built

    def _reshape(self, x: gs.Tensor, layout: Layout, y: gs.Tensor) -> None:
        """To the rank's part of that layout."""
        shape = self._varying(f"shape{len(self.built)}", partial(_shape, layout, self.mesh))
        self._add("Reshape", [x, shape], y)

    def _bucket(self) -> None:
        """Several all-reduces as one: their elements in a row."""
        befores = [before for before, _ in self.node.attrs["members"]]
        flat = []
        for i, tensor in enumerate(self.inputs):
            flat.append(self._fresh(tensor, f"flat{i}"))
            self._add("Reshape", [tensor, self._constant(f"row{i}", np.array([-1]))], flat[i])
        joined, summed = self._fresh(flat[0], "joined"), self._fresh(flat[0], "summed")
        self._add("Concat", flat, joined, axis=0)
        self._collective("AllReduce", joined, summed, op=self.before.reduce)

        def sizes(rank: int) -> Array:
            shapes = [b.local_shape(self.mesh, rank) for b in befores]
            return np.array([np.prod(s, dtype=np.int64) for s in shapes])

        pieces = [self._fresh(t, f"piece{i}") for i, t in enumerate(self.inputs)]
        self._split(summed, sizes, pieces)
        for i, (piece, result, layout) in enumerate(
            zip(pieces, self.outputs, befores, strict=True)
        ):
            shape = partial(_shape, layout, self.mesh)
            self._add("Reshape", [piece, self._varying(f"shape{i}", shape)], result)

    def _split(
        self, x: gs.Tensor, sizes: Callable[[int], Array], results: list[gs.Variable]
    ) -> None:
        """Cuts the first dimension; sizes are an attribute before opset 13."""
        name = f"{self.node.name}::Split"
        if self.opset >= 13:
            operands = [x, self._varying("sizes", sizes)]
            self.built.append(gs.Node("Split", name, {"axis": 0}, operands, results))
            return
        self.per_rank.attributes[name, "split"] = lambda rank: sizes(rank).tolist()
        attrs = {"axis": 0, "split": sizes(0).tolist()}
        self.built.append(gs.Node("Split", name, attrs, [x], results))

    def _AllReduce(self, x: gs.Tensor, y: gs.Tensor) -> None:
        self._collective("AllReduce", x, y, op=self.before.reduce)

    def _Broadcast(self, x: gs.Tensor, y: gs.Tensor) -> None:
        self._collective("Broadcast", x, y, root=0)

    def _AllGather(self, x: gs.Tensor, y: gs.Tensor) -> None:
        (axis,) = self._changed()
        before, after = self.before.dims[axis], self.after.dims[axis]
        joined = y if _is_run(before) else self._fresh(y, "joined")
        self._collective("AllGather", x, joined, axis=axis, sizes=self._sizes(before))
        if joined is not y:
            self._order(joined, y, axis, lambda rank: self._joined(before, rank), after)

    def _ReduceScatter(self, x: gs.Tensor, y: gs.Tensor) -> None:
        (axis,) = self._changed()
        before, after = self.before.dims[axis], self.after.dims[axis]
        x = self._by_member(x, axis, before, after)
        sizes = self._sizes(after)
        self._collective("ReduceScatter", x, y, axis=axis, sizes=sizes, op=self.before.reduce)

    def _AllToAll(self, x: gs.Tensor, y: gs.Tensor) -> None:
        changed = self._changed()
        gains = split_count(self.after.dims[changed[0]]) > split_count(self.before.dims[changed[0]])
        split, concat = changed if gains else changed[::-1]
        x = self._by_member(x, split, self.before.dims[split], self.after.dims[split])
        before = self.before.dims[concat]
        joined = y if _is_run(before) else self._fresh(y, "joined")
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

    def _LocalSlice(self, x: gs.Tensor, y: gs.Tensor) -> None:
        (axis,) = self._changed()
        before, after = self.before.dims[axis], self.after.dims[axis]
        if not (_is_run(before) and _is_run(after)):
            self._order(x, y, axis, lambda rank: indices(before, self.mesh, rank), after)
            return

        def start(rank: int) -> Array:
            held = indices(before, self.mesh, rank)
            return np.array([indices(after, self.mesh, rank)[0] - held[0]], np.int64)

        def end(rank: int) -> Array:
            return start(rank) + local_size(after, self.mesh, rank)

        axes = self._constant("axes", np.array([axis], np.int64))
        bounds = [self._varying("start", start), self._varying("end", end), axes]
        self._add("Slice", [x, *bounds], y)

    def _Select(self, x: gs.Tensor, y: gs.Tensor) -> None:
        dtype = numpy_dtype(x)
        zero = self._constant("neutral", np.asarray(neutral(self.after.reduce, dtype), dtype))
        first = self._varying(
            "first", lambda rank: np.array(not self.mesh.coordinate(self.axes, rank))
        )
        self._add("Where", [first, x, zero], y)

    def _by_member(self, x: gs.Tensor, axis: int, before: Dim, after: Dim) -> gs.Tensor:
        """The operand with each member's part in one run."""
        if _is_run(before) and _is_run(after):
            return x
        ordered = self._fresh(x, "ordered")

        def wanted(rank: int) -> Array:
            members = self.mesh.group(self.axes, rank)
            return np.concatenate([indices(after, self.mesh, m) for m in members])

        self._pick(x, ordered, axis, lambda rank: indices(before, self.mesh, rank), wanted)
        return ordered

    def _order(
        self, x: gs.Tensor, y: gs.Tensor, axis: int, held: Callable[[int], Array], after: Dim
    ) -> None:
        self._pick(x, y, axis, held, lambda rank: indices(after, self.mesh, rank))

    def _pick(
        self,
        x: gs.Tensor,
        y: gs.Tensor,
        axis: int,
        held: Callable[[int], Array],
        wanted: Callable[[int], Array],
    ) -> None:
        """Gathers global positions `wanted` from an operand that has them in the order `held`."""

        def index(rank: int) -> Array:
            have = held(rank)
            order = np.argsort(have, kind="stable")
            return np.asarray(order[np.searchsorted(have, wanted(rank), sorter=order)], np.int64)

        order = self._varying(f"order{len(self.built)}", index)
        self._add("Gather", [x, order], y, axis=axis)

    def _joined(self, before: Dim, rank: int) -> Array:
        members = self.mesh.group(self.axes, rank)
        return np.concatenate([indices(before, self.mesh, m) for m in members])

    def _sizes(self, dim: Dim) -> Callable[[int], list[int]]:
        """The extent of each member's part."""
        return lambda rank: [
            local_size(dim, self.mesh, m) for m in self.mesh.group(self.axes, rank)
        ]

    def _changed(self) -> list[int]:
        pairs = zip(self.before.dims, self.after.dims, strict=True)
        return [i for i, (a, b) in enumerate(pairs) if a != b]

    def _collective(self, kind: str, x: gs.Tensor, y: gs.Tensor, **attrs: Any) -> None:
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


def _unmerged(before: Layout, after: Layout) -> tuple[Layout, Layout]:
    """The same with a dimension for each factor of those merged ones of which an inner factor
    changes: there, parts are contiguous."""
    dims: list[tuple[Dim, Dim]] = []
    for b, a in zip(before.dims, after.dims, strict=True):
        changes = b != a and not (_is_run(b) and _is_run(a))
        if changes and isinstance(b, Product) and isinstance(a, Product):
            dims += zip(b.children, a.children, strict=True)
        else:
            dims.append((b, a))
    return replace(before, dims=tuple(b for b, _ in dims)), replace(
        after, dims=tuple(a for _, a in dims)
    )


def _shape(layout: Layout, mesh: Mesh, rank: int) -> Array:
    return np.array(layout.local_shape(mesh, rank), np.int64)


def _is_run(dim: Dim) -> bool:
    return isinstance(normalize(dim), Factor)
