"""Unifies dimensions: union-find over products and concatenations of index variables.

If a Reshape makes `12` of `3 * 4`, unification turns the variable of size 12 into a product of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnxpar.rules.notation import Cat, Expr, Prod, Var


class IndexVar:
    """A dimension, or a factor or segment of a dimension, during unification (a union-find node).

    size      its number of elements
    kind      "product" or "concat" of `children`; "" for an atom, which has no parts
    children  its factors (major first) or segments, in order
    """

    __slots__ = ("children", "kind", "parent", "size")

    def __init__(self, size: int, kind: str = "", children: tuple[IndexVar, ...] = ()) -> None:
        self.size = size
        self.kind = kind
        self.children = children
        self.parent: IndexVar | None = None

    def root(self) -> IndexVar:
        """Returns the representative of this variable and all variables that are unified with
        it."""
        node = self
        while node.parent is not None:
            if node.parent.parent is not None:
                node.parent = node.parent.parent
            node = node.parent
        return node


def flat(node: IndexVar, kind: str) -> list[IndexVar]:
    """Returns the children of a product or concatenation, with nested nodes of the same kind
    flattened and trivial children left out. For a variable of another kind, returns the variable
    itself."""
    node = node.root()
    if node.kind != kind:
        return [node]
    neutral = 1 if kind == "product" else 0
    return [n for c in node.children for n in flat(c, kind) if n.size != neutral]


def _refine(node: IndexVar, kind: str, sizes: tuple[int, ...]) -> list[IndexVar] | None:
    """Turns an atom (a part of a dimension) into a product or concatenation of new variables with
    these sizes. Returns these variables; None if `node` is no atom."""
    node = node.root()
    if node.kind:
        return None
    node.kind, node.children = kind, tuple(IndexVar(s) for s in sizes)
    return list(node.children)


def _only(node: IndexVar) -> IndexVar:
    """Returns the variable's representative; for a product or concatenation with one non-trivial
    child, this child's."""
    node = node.root()
    children = flat(node, node.kind) if node.kind and node.size > 1 else [node]
    if len(children) == 1 and children[0] is not node:
        node.parent = children[0]
    return node.root()


def unify(a: IndexVar, b: IndexVar) -> bool:
    """Makes two variables stand for the same dimension; if they are divided differently, both are
    divided further, until they agree. Returns False if they cannot agree; some of their parts may
    be unified even then."""
    a, b = _only(a), _only(b)
    if a is b:
        return True
    if a.size != b.size:
        return False
    if a.size <= 1:
        return True
    if not a.kind or not b.kind:
        child, parent = (a, b) if not a.kind else (b, a)
        child.parent = parent
        return True
    if a.kind != b.kind:
        return False
    if not _align(a.kind, flat(a, a.kind), flat(b, b.kind)):
        return False
    a, b = a.root(), b.root()
    if a is not b:
        child, parent = (b, a) if _contains(b, a) else (a, b)
        child.parent = parent
    return True


def _contains(whole: IndexVar, part: IndexVar) -> bool:
    """True if the product or concatenation `whole` has `part` as a child, directly or in nested
    nodes of the same kind. After unification, all its other children are trivial."""
    children = [child.root() for child in whole.children]
    return any(c is part or (c.kind == whole.kind and _contains(c, part)) for c in children)


def _align(kind: str, a: list[IndexVar], b: list[IndexVar]) -> bool:
    """Unifies the children of two products, or of two concatenations, in order, and divides
    children whose sizes differ. Returns False if they cannot agree."""
    a, b = a[::-1], b[::-1]
    while a and b:
        x, y = a.pop(), b.pop()
        if x.size == y.size:
            if not unify(x, y):
                return False
            continue
        is_product = kind == "product"
        first = math.gcd(x.size, y.size) if is_product else min(x.size, y.size)
        if is_product and first == 1:
            return False
        for child, rest in ((x, a), (y, b)):
            refined: list[IndexVar] | None = [child]
            if child.size != first:
                second = child.size // first if is_product else child.size - first
                refined = _refine(child, kind, (first, second))
            if refined is None:
                return False
            rest.extend(refined[::-1])
    return not a and not b


def compose(expr: Expr, factors: Mapping[str, IndexVar]) -> IndexVar:
    """Returns the variable for a rule's expression of a dimension, such as `h d`. `factors` has the
    variables of the rule's factors, by name."""
    if isinstance(expr, Var):
        return factors[expr.name]
    children = tuple(compose(c, factors) for c in expr.children)
    sizes = [c.size for c in children]
    if isinstance(expr, Prod):
        return IndexVar(math.prod(sizes), "product", children)
    assert isinstance(expr, Cat)
    return IndexVar(sum(sizes), "concat", children)


def same(a: IndexVar, b: IndexVar) -> bool:
    """True if two variables resolve to the same atoms (parts of dimensions) in the same
    structure."""
    a, b = a.root(), b.root()
    if a is b or (a.size == b.size and a.size in (0, 1)):
        return True
    if a.size != b.size:
        return False
    kind = a.kind or b.kind
    if not kind:
        return False
    x, y = flat(a, kind), flat(b, kind)
    if len(x) == 1 and len(y) == 1:
        return x[0] is y[0] if x[0] is a or y[0] is b else same(x[0], y[0])
    return len(x) == len(y) and all(same(p, q) for p, q in zip(x, y, strict=True))
