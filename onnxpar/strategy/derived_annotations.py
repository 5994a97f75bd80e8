"""Annotates nodes that a training step derives from an annotated node of the model: its gradient,
and its copies for recomputation and evaluation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxpar.layout.mesh import Axes
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.strategy import Annotation, NodeAnnotation

_DERIVED = re.compile(
    r"(?P<scan>accumulate/|)(recompute/block\.\d+/)?(?P<name>.*?)(\.grad/.*)?", re.DOTALL
)
_EVALUATED = re.compile(r"(evaluate/)?evaluation/(?P<name>.*)|evaluate/(?P<alike>.*)", re.DOTALL)


@dataclass(frozen=True)
class DerivedAnnotation:
    """Axes for the leaves (parts of dimensions) of a derived node (a gradient or a copy), by index
    of the leaf. They apply only to leaves that are open, and only if no other leaf of the node uses
    the axes."""

    op: OpFactors
    axes: Mapping[int, Axes]

    def apply(self, sharding: ShardingState) -> bool:
        """Decides the leaves (parts of dimensions) that are still undecided: first the leaves to
        split, then the leaves that stay whole. True if a leaf was split."""
        changed = False
        for leaf, axes in self.axes.items():
            if axes:
                changed |= sharding.assign_op(self.op, leaf, axes)
        for leaf, axes in self.axes.items():
            if not axes:
                sharding.close(self.op, leaf)
        return changed


def with_derived(annotations: Sequence[Annotation], sharding: ShardingState) -> list[Annotation]:
    """Returns the annotations, followed by annotations of the nodes that a training step derives
    from the annotated nodes.

    A leaf (a part of a dimension) of a derived node gets the axes that the annotation requests for
    the leaf's atom. Annotations of derived nodes come last, so that a user's own annotation of a
    derived node wins.
    """
    requested = {a.op.node.name: a for a in annotations if isinstance(a, NodeAnnotation)}
    derived: dict[str, list[OpFactors]] = defaultdict(list)
    for op in sharding.factors.ops:
        for name in sources_of(op.node.name):
            if name in requested:
                derived[name].append(op)
    more = [
        DerivedAnnotation(op, axes)
        for name, annotation in requested.items()
        for op in derived[name]
        if (axes := _axes_of(op, annotation))
    ]
    return [*annotations, *more]


def sources_of(name: str) -> Iterator[str]:
    """Yields possible names of the node from which the node `name` is derived: `fc/MatMul` for
    `fc/MatMul.grad/x`, which computes a gradient of it."""
    evaluated = _EVALUATED.fullmatch(name)
    if evaluated:
        source = evaluated["name"] or evaluated["alike"]
        yield from (source, f"accumulate/{source}")
    derived = _DERIVED.fullmatch(name)
    if derived and derived["scan"] + derived["name"] != name:
        yield derived["scan"] + derived["name"]


def _axes_of(op: OpFactors, annotation: NodeAnnotation) -> dict[int, Axes]:
    """Returns the axes for the leaves (parts of dimensions) of a derived node, by index: the axes
    that the annotation requests for the leaf's atom. Leaves with other atoms are left out."""
    of_atom: dict[int, set[Axes]] = defaultdict(set)
    for leaf, axes in annotation.axes.items():
        of_atom[annotation.op.leaves[leaf].atom].add(axes)
    return {
        i: next(iter(of_atom[leaf.atom]))
        for i, leaf in enumerate(op.leaves)
        if len(of_atom.get(leaf.atom, ())) == 1
    }
