"""Whole random graphs, and random layouts for them."""

from __future__ import annotations

from dataclasses import dataclass

import random_graphs.contraction
import random_graphs.elementwise
import random_graphs.indexing
import random_graphs.movement  # noqa: F401
from random_graphs.builder import MAKERS, Builder, NotHere

from onnxpar.mesh import Axes, Axis, Mesh, parts_over
from onnxpar.factors import OpFactors
from onnxpar.sharding import Sharding
from onnxpar.strategy import Seed, TensorSeed

MESHES = ("a=2", "a=3", "a=4", "a=2,b=2")

THEMES = {
    "any": tuple(sorted(MAKERS)),
    "merged": ("Reshape", "Reshape", "MatMul", "Transpose", "Add", "Concat", "Split", "Slice"),
    "partial": ("MatMul", "ReduceSum", "Gemm", "Add", "Mul", "ReduceMax", "Where", "Concat", "Conv"),
}
"""What a graph is mostly made of."""


def build(b: Builder) -> None:
    """Adds random nodes until there are enough of them."""
    for _ in range(b.number(1, 2)):
        b.fresh(b.shape(2, 4), fed=True)
    theme = THEMES[b.choose(list(THEMES))]
    wanted = b.number(3, 9)
    for _ in range(3 * wanted):
        op = b.choose(theme if b.number(0, 2) else THEMES["any"])
        try:
            MAKERS[op](b, op)
        except NotHere:
            continue
        if len(b.nodes) >= wanted:
            return


@dataclass(frozen=True)
class NodeSplit:
    """Splits one leaf of a node."""

    op: OpFactors
    leaf: int
    axes: Axes

    def apply(self, sharding: Sharding) -> bool:
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


def seeds(b: Builder, sharding: Sharding) -> list[list[Seed]]:
    """One to five annotations of nodes or tensors, in rounds."""
    choices = axes_of(sharding.mesh)
    ops = [op for op in sharding.factors.ops if op.leaves]
    tensors = {n: t for n, t in sharding.factors.tensors.items() if t.leaves}
    rounds: list[list[Seed]] = []
    for _ in range(b.number(1, 5)):
        if ops and b.coin():
            op = b.choose(ops)
            leaf = b.number(0, len(op.leaves) - 1)
            axes = fitting(b, choices, op.leaves[leaf].size)
            if axes:
                rounds.append([NodeSplit(op, leaf, axes)])
        elif tensors:
            name = b.choose(list(tensors))
            leaves = tensors[name].leaves
            leaf = b.number(0, len(leaves) - 1)
            axes = fitting(b, choices, leaves[leaf].size)
            if axes:
                given: list[Axes | None] = [None] * len(leaves)
                given[leaf] = axes
                parts = {leaf: uneven(b, leaves[leaf].size, axes)} if not b.number(0, 3) else {}
                rounds.append([TensorSeed(name, given, parts, pin=b.coin())])
    return rounds


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
