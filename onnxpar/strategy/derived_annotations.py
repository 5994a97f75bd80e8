"""What a strategy asks of a node of the model, asked of the nodes that a training step derives from
it, too: of its gradient, and of its copies for recomputation and evaluation."""

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
class DerivedSeed:
    """Axes for leaves of a node that was derived from another one: those that are still open, and
    that its other leaves leave free."""

    op: OpFactors
    axes: Mapping[int, Axes]

    def apply(self, sharding: ShardingState) -> bool:
        """Decides the leaves that are still open, those that are to be split first."""
        changed = False
        for leaf, axes in self.axes.items():
            if axes:
                changed |= sharding.assign_op(self.op, leaf, axes)
        for leaf, axes in self.axes.items():
            if not axes:
                sharding.close(self.op, leaf)
        return changed


def with_derived(annotations: Sequence[Annotation], sharding: ShardingState) -> list[Annotation]:
    """Seeds, followed by those of the nodes that are derived from nodes that they name.

    What is asked of an atom of a node is asked of it there, too. Seeds of the derived nodes
    themselves come first.
    """
    asked = {s.op.node.name: s for s in annotations if isinstance(s, NodeAnnotation)}
    derived: dict[str, list[OpFactors]] = defaultdict(list)
    for op in sharding.factors.ops:
        for name in sources_of(op.node.name):
            if name in asked:
                derived[name].append(op)
    more = [
        DerivedSeed(op, axes)
        for name, annotation in asked.items()
        for op in derived[name]
        if (axes := _axes_of(op, annotation))
    ]
    return [*annotations, *more]


def sources_of(name: str) -> Iterator[str]:
    """The names that the node may have that a node of this name is derived from."""
    evaluated = _EVALUATED.fullmatch(name)
    if evaluated:
        own = evaluated["name"] or evaluated["alike"]
        yield from (own, f"accumulate/{own}")
    derived = _DERIVED.fullmatch(name)
    if derived and derived["scan"] + derived["name"] != name:
        yield derived["scan"] + derived["name"]


def _axes_of(op: OpFactors, annotation: NodeAnnotation) -> dict[int, Axes]:
    """By leaf, the axes of the same atom in the node that a seed is for, where that has one."""
    of_atom: dict[int, set[Axes]] = defaultdict(set)
    for leaf, axes in annotation.axes.items():
        of_atom[annotation.op.leaves[leaf].atom].add(axes)
    return {
        i: next(iter(of_atom[leaf.atom]))
        for i, leaf in enumerate(op.leaves)
        if len(of_atom.get(leaf.atom, ())) == 1
    }
