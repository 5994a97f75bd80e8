"""Resolved index variables as trees of atoms."""

from __future__ import annotations

from collections.abc import Iterator

from onnxpar.layout.layout import Concat, Dim, Factor, Product
from onnxpar.sharding.factors import Leaf
from onnxpar.sharding.unify import IndexVar, flat


class Atoms:
    """The atoms of a graph, numbered in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def leaves(self, variable: IndexVar) -> Iterator[Leaf]:
        """The splittable leaves of a variable, in order."""
        variable = variable.root()
        if variable.kind:
            for child in flat(variable, variable.kind):
                yield from self.leaves(child)
        elif variable.size > 1:
            yield Leaf(self._numbers.setdefault(id(variable), len(self._numbers)), variable.size)


def unsplit_tree(variable: IndexVar) -> Dim:
    """A resolved variable as an unsplit dimension."""
    variable = variable.root()
    if not variable.kind or variable.size <= 1:
        return Factor(variable.size)
    kind = Product if variable.kind == "product" else Concat
    children = tuple(unsplit_tree(c) for c in flat(variable, variable.kind))
    return children[0] if len(children) == 1 else kind(children)


def has_major(variable: IndexVar) -> bool:
    """True if a split of the first leaf gives contiguous shards."""
    variable = variable.root()
    return variable.size > 1 and variable.kind != "concat"
