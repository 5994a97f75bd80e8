"""The notation of sharding rules, and its parser.

m k, k n -> m n          a factor per dimension; k, absent from the result, is reduced
(b h) s -> b h s         factors merged into one dimension, the major one first
a + b, ... -> a ; b      segments of a dimension; `;` separates results, `,` operands
1                        a dimension of one element that is broadcast or dropped
_                        an operand that is absent or has no layout (whole on every rank)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Var:
    """A factor by name."""

    name: str


@dataclass(frozen=True)
class Prod:
    """A dimension that merges factors."""

    children: tuple[Expr, ...]


@dataclass(frozen=True)
class Cat:
    """A dimension of segments, one after the other."""

    children: tuple[Expr, ...]


Expr = Var | Prod | Cat
ONE = Prod(())
Spec = tuple[Expr, ...]


def spec_text(spec: Spec | None) -> str:
    """The text form of an operand's dimensions; a scalar prints as `()`."""
    return "_" if spec is None else " ".join(map(expr_text, spec)) or "()"


def expr_text(expr: Expr, nested: bool = False) -> str:
    """The text form of one dimension."""
    if isinstance(expr, Var):
        return expr.name
    if isinstance(expr, Prod):
        return (
            "(" + " ".join(expr_text(c, True) for c in expr.children) + ")"
            if expr.children
            else "1"
        )
    text = " + ".join(expr_text(c, True) for c in expr.children)
    return f"({text})" if nested else text


def expr_vars(expr: Expr) -> Iterator[str]:
    """The factors of a dimension, in order."""
    if isinstance(expr, Var):
        yield expr.name
    else:
        for child in expr.children:
            yield from expr_vars(child)


def parse_spec(text: str) -> Spec | None:
    """Parses the dimensions of one operand, in the notation of this module; None for `_`."""
    tokens = re.findall(r"[A-Za-z_]\w*|[()+]|1", text)
    if tokens == ["_"]:
        return None
    if tokens == ["(", ")"]:
        return ()
    spec, end = _parse_dims(tokens, 0)
    assert end == len(tokens), text
    return spec


def _parse_dims(tokens: list[str], at: int) -> tuple[Spec, int]:
    dims: list[Expr] = []
    while at < len(tokens) and tokens[at] != ")":
        joined = tokens[at] == "+"
        at += joined
        if tokens[at] == "(":
            inner, at = _parse_dims(tokens, at + 1)
            item: Expr = inner[0] if len(inner) == 1 else Prod(inner)
        else:
            item = ONE if tokens[at] == "1" else Var(tokens[at])
        at += 1
        if joined:
            last = dims.pop()
            item = Cat((*(last.children if isinstance(last, Cat) else (last,)), item))
        dims.append(item)
    return tuple(dims), at


def dims_text(dims: Iterable[str]) -> str:
    """The dimensions of an operand as rule text."""
    return " ".join(dims) or "()"
