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
from functools import cache


@dataclass(frozen=True)
class Var:
    """A factor by name."""

    name: str


@dataclass(frozen=True)
class Prod:
    """A dimension that merges factors, the major one first: `(h d)`. Without factors, a dimension
    of one element, `1`."""

    children: tuple[Expr, ...]


@dataclass(frozen=True)
class Cat:
    """A dimension of segments, one after the other: `a + b`."""

    children: tuple[Expr, ...]


Expr = Var | Prod | Cat
ONE = Prod(())
Spec = tuple[Expr, ...]


def spec_text(spec: Spec | None) -> str:
    """Returns the text of the dimensions of one operand or result: `b (h d)`; `()` for a scalar,
    `_` for None."""
    return "_" if spec is None else " ".join(map(expr_text, spec)) or "()"


def expr_text(expr: Expr, nested: bool = False) -> str:
    """Returns the text of one dimension: `b`, `(h d)` or `a + b`. If `nested` in another
    expression, a sum of segments gets parentheses."""
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
    """Yields the names of the factors of a dimension, in order: h and d for `(h d)`."""
    if isinstance(expr, Var):
        yield expr.name
    else:
        for child in expr.children:
            yield from expr_vars(child)


Specs = tuple[Spec | None, ...]


class RuleTextError(ValueError):
    """The text of a rule is not in the notation of this module."""


@cache
def parse_rule(text: str) -> tuple[Specs, Specs]:
    """Returns (dimensions of each operand, dimensions of each result) of a rule such as
    `m k, k n -> m n`; None for a tensor `_`. Errors: RuleTextError, which shows the place of the
    error."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleTextError(f"{text!r} has no ->, which separates operands and results")
    if "->" in right:
        raise _at(text, text.rindex("->"), "a rule has one ->")
    for side, wrong, own, what in ((left, ";", ",", "operands"), (right, ",", ";", "results")):
        if wrong in side:
            start = 0 if side is left else len(left) + len(arrow)
            raise _at(text, text.index(wrong, start), f"{own!r} separates {what}")
    sides = []
    for side, start, separator in ((left, 0, ","), (right, len(left) + len(arrow), ";")):
        specs: list[Spec | None] = []
        for part in side.split(separator):
            specs.append(_parse_spec(text, part, start))
            start += len(part) + 1
        sides.append(tuple(specs))
    return sides[0], sides[1]


def _at(text: str, place: int, reason: str) -> RuleTextError:
    """Returns the error that shows the place of a mistake in the text of a rule."""
    return RuleTextError(f"{text[:place]!r} is followed by {text[place:]!r}: {reason}")


def parse_spec(text: str) -> Spec | None:
    """Returns the dimensions of one operand, e.g. of `b (h d)`; None for `_`. Errors: RuleTextError
    if the text breaks the grammar."""
    return _parse_spec(text, text, 0)


def _parse_spec(text: str, part: str, start: int) -> Spec | None:
    """Returns the dimensions of one operand: of `part`, which begins at index `start` of `text`."""
    tokens = list(re.finditer(r"[A-Za-z_]\w*|[()+]|1|\S", part))
    depth = 0
    for token in tokens:
        word = token[0]
        depth += (word == "(") - (word == ")")
        if not re.fullmatch(r"[A-Za-z_]\w*|[()+]|1", word):
            raise _at(text, start + token.start(), "names of factors are letters, digits and _")
        if depth < 0:
            raise _at(text, start + token.start(), "nothing is open that it could close")
    if depth:
        raise _at(text, start + len(part), "a parenthesis is not closed")
    words = [token[0] for token in tokens]
    if words == ["_"]:
        return None
    if words == ["(", ")"]:
        return ()
    if words[:1] == ["+"] or words[-1:] == ["+"]:
        raise _at(text, start + part.index("+"), "+ stands between two segments of a dimension")
    return _parse_dims(words, 0)[0]


def _parse_dims(tokens: list[str], at: int) -> tuple[Spec, int]:
    """Parses tokens from index `at` up to a closing parenthesis or the end. Returns (dimensions,
    index behind them)."""
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
    """Joins the dimensions of one operand to text of a rule: ["b", "(h d)"] becomes "b (h d)", and
    [] "()"."""
    return " ".join(dims) or "()"
