"""Tests the sharding rule of a case: the splits that it allows, its claims about linearity, and
splits that it forbids without need.

If the rule calls a group of operands jointly linear, the op must commute with a sum; if it calls an
operand monotone, with max and min. If it says that a factor must stay whole, splitting the factor
into halves must give wrong results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from os import PathLike
from typing import Any
from zlib import crc32

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.custom_ops import use_libraries
from onnxpar.graph.shapes_by_onnxruntime import REFUSED
from onnxpar.layout.layout import ReduceOp, neutral
from onnxpar.testing.case import Case
from onnxpar.testing.oracle import TOLERANCE, Oracle, close

Terms = tuple[list[Array], list[Array]]
"""The results of a node for two sets of operands."""
Cut = tuple[int | None, ...]
"""The dimension of each operand that is halved, None if it stays whole."""


@dataclass(frozen=True)
class Proof:
    """The outcome of testing a sharding rule.

    text    the rule, such as `m k, k n -> m n {sum: k}`
    splits  the number of tested splits
    wrong   a message for each error
    missed  splits that the rule forbids without need
    """

    text: str
    splits: int
    wrong: list[str]
    missed: list[str]


def prove(case: Case, every: int = 1, libraries: Iterable[str | PathLike[str]] = ()) -> Proof:
    """Tests the sharding rule of a case: runs the splits that it allows, and tries splits that it
    forbids.

    every      1 for all splits, N for one in N
    libraries  the files of the custom ops of the case
    """
    use_libraries(libraries)
    oracle = Oracle(case)
    cuts = {(cut.factor, cut.kind): cut for cut in oracle.cuts()}.values()
    oracles = [oracle, *(Oracle(case, cut) for cut in cuts)]
    splits = [(each, split) for each in oracles for split in each.splits()]
    first = crc32(f"{case.op} {oracle.op.rule.text()}".encode()) % every  # others for other cases
    found = [each.wrong(split) for each, split in splits[first % max(len(splits), 1) :: every]]
    wrong = [f for f in found if f] + false_claims(oracle)
    return Proof(oracle.op.rule.text(), len(found), wrong, missed_splits(oracle))


def false_claims(oracle: Oracle) -> list[str]:
    """Returns a message for each group of operands that is not jointly linear, and for each operand
    that is not monotone, although the rule says so."""
    rule = oracle.op.rule
    found = []
    numbers = all(v.dtype != np.bool_ for v in oracle.whole)
    for group in rule.linear if numbers else ():
        for noisy in (True, False):
            if not _joins(oracle, np.add, _addends(oracle, group, noisy)):
                found.append(f"{oracle.op.node.op} is not jointly linear in {sorted(group)}")
    for i in sorted(rule.monotone) if numbers else ():
        reductions: tuple[tuple[ReduceOp, Any], ...] = (("max", np.maximum), ("min", np.minimum))
        for reduce, join in reductions:
            if not all(_joins(oracle, join, t) for t in _extremes(oracle, f"x{i}", reduce)):
                found.append(f"no partial {reduce} passes {oracle.op.node.op} by operand {i}")
    return found


def _joins(oracle: Oracle, join: Any, terms: Terms) -> bool:
    """True if joining the two sets of results in `terms` by `join` gives the unsplit results."""
    rounding = max(TOLERANCE.get(str(v.dtype), 0.0) for v in oracle.feeds.values())
    return all(
        close(join(a, b), whole, tolerance=max(rounding, TOLERANCE.get(str(whole.dtype), 0.0)))
        for a, b, whole in zip(*terms, oracle.whole, strict=True)
    )


def _addends(oracle: Oracle, group: frozenset[int], noisy: bool) -> Terms:
    """Returns the node's results for two sets of operands whose sum is the case's operand, for each
    operand in `group`; other operands are those of the case in both. If `noisy`, the terms are
    random; else the whole operand and zeros."""
    rng = np.random.default_rng(0)
    one, other = dict(oracle.feeds), dict(oracle.feeds)
    for name in {f"x{i}" for i in group} & oracle.feeds.keys():
        value = oracle.feeds[name]
        noise = rng.standard_normal(value.shape) if noisy else np.zeros(value.shape)
        one[name] = value - np.asarray(noise).astype(value.dtype)
        other[name] = value - one[name]
    return oracle.program.run(one), oracle.program.run(other)


def _extremes(oracle: Oracle, name: str, reduce: ReduceOp) -> Iterator[Terms]:
    """Yields the node's results for pairs of values whose elementwise max (or min, as `reduce`
    says) is the operand `name`."""
    rng = np.random.default_rng(0)
    value = oracle.feeds[name]
    step = np.abs(rng.standard_normal(value.shape) * 3 + 1).astype(value.dtype)
    other = value - step if reduce == "max" else value + step
    which = rng.random(value.shape) < 0.5
    none = np.full_like(value, neutral(reduce, value.dtype))
    for a, b in ((np.where(which, value, other), np.where(which, other, value)), (value, none)):
        feeds = [{**oracle.feeds, name: np.asarray(x, value.dtype)} for x in (a, b)]
        yield oracle.program.run(feeds[0]), oracle.program.run(feeds[1])


def missed_splits(oracle: Oracle) -> list[str]:
    """Returns the result of `missed_cuts` as text, one line per cut: `x0.1 x1.0 -> sum` if halving
    dimension 1 of operand 0 and dimension 0 of operand 1 gives two terms of the result."""
    return [
        f"{' '.join(f'x{i}.{d}' for i, d in enumerate(cut) if d is not None)} -> "
        f"{' '.join(results)}"
        for cut, results in missed_cuts(oracle).items()
    ]


def missed_cuts(oracle: Oracle) -> dict[Cut, list[str]]:
    """Returns the cuts that the rule forbids although the results of the two halves can be joined
    to the unsplit results, each with the operation that joins each result ("sum", "concat 0"). A
    cut that contains another cut of this kind is left out."""
    found: dict[Cut, list[str]] = {}
    for cut in sorted(_cuts(oracle), key=lambda c: len(c) - c.count(None)):
        if not any(_contains(cut, smaller) for smaller in found):
            results = halved(oracle, cut)
            if results:
                found[cut] = results
    return found


def _contains(cut: Cut, smaller: Cut) -> bool:
    """True if `smaller` halves the same dimensions as `cut`, or fewer."""
    return all(b is None or a == b for a, b in zip(cut, smaller, strict=True))


def _cuts(oracle: Oracle) -> Iterator[Cut]:
    """Yields cuts of up to 4 operands. Each halves at least one dimension that must stay whole
    according to the rule."""
    options: list[list[int | None]] = []
    blocked = set()
    for i, (tensor, links) in enumerate(zip(oracle.op.node.inputs, oracle.op.inputs, strict=True)):
        dims: list[int | None] = [None]
        has_layout = i < len(oracle.op.rule.inputs) and oracle.op.rule.inputs[i] is not None
        if has_layout and tensor.name in oracle.feeds:
            of_leaf = oracle.factors.tensors[tensor.name].dim_of_leaf
            for dim, size in enumerate(tensor.shape):
                if size >= 2:
                    dims.append(dim)
                    if all(k is None for k, d in zip(links, of_leaf, strict=True) if d == dim):
                        blocked.add((i, dim))
        options.append(dims)
    most = 4 if len(options) <= 4 else 3
    for cut in product(*options):
        if len(cut) - cut.count(None) <= most and any((i, d) in blocked for i, d in enumerate(cut)):
            yield cut


def halved(oracle: Oracle, cut: Cut) -> list[str] | None:
    """Runs a node on both halves of a cut. Returns for each result the operation that joins the
    halves to the unsplit result ("sum", "concat 0"); None if there is none."""
    parts = []
    for half in (0, 1):
        feeds = dict(oracle.feeds)
        for i, dim in enumerate(cut):
            if dim is not None:
                feeds[f"x{i}"] = np.array_split(feeds[f"x{i}"], 2, dim)[half]
        try:
            parts.append(oracle.program.run(feeds))
        except REFUSED:
            return None
    joins = [_join(a, b, c) for a, b, c in zip(*parts, oracle.whole, strict=True)]
    if None in joins or set(joins) == {"whole"}:
        return None
    return [j for j in joins if j]


_JOINS: Sequence[tuple[str, Any]] = (
    ("sum", np.add),
    ("max", np.maximum),
    ("min", np.minimum),
    ("prod", np.multiply),
    ("mean", lambda a, b: ((a + b) / 2).astype(a.dtype)),
)


def _join(a: Array, b: Array, whole: Array) -> str | None:
    """Returns the operation that joins two halves `a` and `b` to `whole`: "whole" if both equal it,
    "concat 1", "sum", ...; None if there is none."""
    if close(a, whole) and close(b, whole):
        return "whole"
    for dim in range(min(a.ndim, whole.ndim)):
        fits = a.ndim == b.ndim and a.shape[:dim] == b.shape[:dim]
        if (
            fits
            and a.shape[dim + 1 :] == b.shape[dim + 1 :]
            and close(np.concatenate([a, b], dim), whole)
        ):
            return f"concat {dim}"
    if a.shape != b.shape:
        return None
    with np.errstate(all="ignore"):
        return next((name for name, join in _JOINS if close(join(a, b), whole)), None)
