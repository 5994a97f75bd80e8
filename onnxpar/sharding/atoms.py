"""Numbers the atoms of a graph, and turns unified index variables into trees of atoms. An atom is a
part of a dimension that no op divides further."""

from __future__ import annotations

from collections.abc import Iterator

from onnxpar.layout.layout import Concat, Dim, Factor, Product
from onnxpar.sharding.factors import Leaf
from onnxpar.sharding.unify import IndexVar, flat


class Atoms:
    """The atoms (parts of dimensions) of a graph, numbered in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def leaves(self, variable: IndexVar) -> Iterator[Leaf]:
        """Yields the leaves (number and size of an atom) of which a dimension consists, in order,
        without atoms (parts of dimensions) of one element. A dimension `heads * 64` has two: heads,
        and 64."""
        variable = variable.root()
        if variable.kind:
            for child in flat(variable, variable.kind):
                yield from self.leaves(child)
        elif variable.size > 1:
            yield Leaf(self._numbers.setdefault(id(variable), len(self._numbers)), variable.size)


def unsplit_tree(variable: IndexVar) -> Dim:
    """Returns the dimension that a variable stands for as a tree of factors, without mesh axes."""
    variable = variable.root()
    if not variable.kind or variable.size <= 1:
        return Factor(variable.size)
    kind = Product if variable.kind == "product" else Concat
    children = tuple(unsplit_tree(c) for c in flat(variable, variable.kind))
    return children[0] if len(children) == 1 else kind(children)


def has_major(variable: IndexVar) -> bool:
    """True if a split of the dimension's first leaf (a part of a dimension) gives contiguous
    shards: the dimension has more than one element, and is not a concatenation."""
    variable = variable.root()
    return variable.size > 1 and variable.kind != "concat"
