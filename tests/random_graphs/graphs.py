"""Whole random graphs, and random layouts for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import random_graphs.composite
import random_graphs.contraction
import random_graphs.elementwise
import random_graphs.indexing
import random_graphs.movement  # noqa: F401
from random_graphs.builder import MAKERS, Builder, NotHere
from random_graphs.patterns import PATTERNS, changing, keeping, softly

from onnxpar.layout.mesh import Axes, Axis, Mesh, parts_over
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.strategy import Annotation, TensorAnnotation

MESHES = ("a=2", "a=3", "a=4", "a=2,b=2")

THEMES = {
    "any": tuple(sorted(MAKERS)),
    "merged": ("Reshape", "Reshape", "MatMul", "Transpose", "Add", "Concat", "Split", "Slice"),
    "partial": (
        "MatMul",
        "ReduceSum",
        "ReduceMax",
        "Add",
        "Mul",
        "Sub",
        "Where",
        "Concat",
        "Slice",
    ),
}
"""What a graph is mostly made of."""


def build(b: Builder, ops: Sequence[str]) -> None:
    """Adds these ops, and between them random nodes of one theme."""
    for _ in range(b.number(1, 2)):
        b.fresh(b.shape(2, 4), fed=True)
    theme = THEMES[b.choose(list(THEMES))]
    for op in ops:
        insert(b, op)
        add_some(b, theme, b.number(0, 3))
    tie_up(b)


def insert(b: Builder, op: str) -> None:
    """Adds one node of this op, with operands of its own where no value suits."""
    for shape, kind in ((None, ""), *OPERANDS):
        if shape:
            b.fresh(shape, kind, fed=b.coin(), low=0 if kind == "int" else -3)
        try:
            MAKERS[op](b, op)
        except NotHere:
            continue
        return


OPERANDS = (
    ((4, 6), "float"),
    ((3, 4, 6), "float"),
    ((6, 4), "int"),
    ((2, 4, 4, 2), "float"),
    ((4, 1, 6), "bool"),
)
"""What ops are given that suit no value of the graph so far."""


def add_some(b: Builder, theme: Sequence[str], count: int) -> None:
    """Adds up to `count` nodes or patterns."""
    for _ in range(count):
        try:
            if b.number(0, 2):
                op = b.choose(theme)
                MAKERS[op](b, op)
            else:
                b.choose(PATTERNS)(b)
        except NotHere:
            continue


def tie_up(b: Builder) -> None:
    """Gives what nothing reads a reader, so that what is pending there need not end there."""
    read = {name for node in b.nodes for name in node.input}
    for value in [v for v in b.values if v.kind == "float" and v.name not in read and v.shape]:
        try:
            b.choose([keeping, changing, softly])(b, value)
        except NotHere:
            continue


@dataclass(frozen=True)
class NodeSplit:
    """Splits one leaf of a node."""

    op: OpFactors
    leaf: int
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Decides the leaf where it is open and the axes are free."""
        return sharding.assign_op(self.op, self.leaf, self.axes)


def axes_of(mesh: Mesh) -> list[Axes]:
    """Everything that a leaf can be split over: axes, both orders of two, and halves of four."""
    out: list[Axes] = []
    for name, size in mesh.shape:
        out.append((mesh.axis(name),))
        if size == 4:
            out += [(Axis(name, 2, 1),), (Axis(name, 2, 2),)]
            out.append((Axis(name, 2, 2), Axis(name, 2, 1)))
    if len(out) == 2:
        out += [out[0] + out[1], out[1] + out[0]]
    return out


Places = list[tuple[Any, int, int]]
"""Node or tensor, leaf, size."""


def seeds(b: Builder, sharding: ShardingState, ops: Sequence[str]) -> list[list[Annotation]]:
    """One to seven annotations of nodes or tensors, in rounds: `ops`, what is reduced or merged,
    what patterns were built around, and anything else."""
    any_op, reduced = op_leaves(sharding)
    inserted = [place for place in any_op if place[0].node.op in ops]
    any_tensor, merged = tensor_leaves(sharding)
    hinted = hinted_leaves(b, sharding)
    kinds = [places for places in (inserted, hinted, merged, reduced, any_op, any_tensor) if places]
    plan = [inserted, b.choose([hinted, merged])]
    plan += [b.choose(kinds or [[]]) for _ in range(b.number(0, 5))]
    return [
        [seed] for places in plan if places for seed in [random_seed(b, sharding, places)] if seed
    ]


def random_seed(b: Builder, sharding: ShardingState, places: Places) -> Annotation | None:
    """An annotation of one of the places; None where nothing fits there."""
    where, leaf, size = b.choose(places)
    axes = fitting(b, axes_of(sharding.mesh), size)
    if not axes:
        return None
    if isinstance(where, OpFactors):
        return NodeSplit(where, leaf, axes)
    given: list[Axes | None] = [None] * len(sharding.tensors[where])
    given[leaf] = axes
    parts = {} if b.number(0, 3) else {leaf: uneven(b, size, axes)}
    return TensorAnnotation(where, given, parts, pin=b.coin())


def op_leaves(sharding: ShardingState) -> tuple[Places, Places]:
    """All leaves of nodes, and those over which a node reduces."""
    found: Places = [
        (op, i, leaf.size) for op in sharding.factors.ops for i, leaf in enumerate(op.leaves)
    ]
    return found, [place for place in found if place[0].reduction(place[1])]


def hinted_leaves(b: Builder, sharding: ShardingState) -> Places:
    """Leaves of dimensions that the graph was built around."""
    found: Places = []
    for name, dim in b.hints:
        factors = sharding.factors.tensors.get(name)
        for i, leaf in enumerate(factors.leaves if factors else ()):
            if factors and factors.dim_of_leaf[i] == dim:
                found.append((name, i, leaf.size))
    return found


def tensor_leaves(sharding: ShardingState) -> tuple[Places, Places]:
    """All leaves of tensors, and those that share their dimension with others."""
    found: Places = []
    merged: Places = []
    for name, factors in sharding.factors.tensors.items():
        for i, (leaf, dim) in enumerate(zip(factors.leaves, factors.dim_of_leaf, strict=True)):
            found.append((name, i, leaf.size))
            if factors.dim_of_leaf.count(dim) > 1:
                merged.append((name, i, leaf.size))
    return found, merged


def fitting(b: Builder, choices: list[Axes], size: int) -> Axes:
    """Axes that make no more parts than there are elements."""
    found = [axes for axes in choices if parts_over(axes) <= size]
    return b.choose(found) if found else ()


def uneven(b: Builder, size: int, axes: Axes) -> tuple[int, ...]:
    """Sizes by hand: one element each, and the rest somewhere."""
    parts = [1] * parts_over(axes)
    for _ in range(size - len(parts)):
        parts[b.number(0, len(parts) - 1)] += 1
    return tuple(parts)
