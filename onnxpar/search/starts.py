"""Good values of the variables for the start of a search, found along one mesh axis at a time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import cycle
from operator import itemgetter

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.search.solver.elimination import Table
from onnxpar.search.solver.pruning import NEAR, among, minimize_in_parts

Values = dict[int, int]
"""{variable of nodes: the number of their strategy}."""


class AlongAxes:
    """A function that finds good values of the nodes' variables. All nodes start whole; then their
    strategies are optimized along one mesh axis at a time, unchanged along the others, as long as
    that saves time. Each axis is the first one once; the best result counts. With one axis, the
    result is whole nodes.

    strategies  the strategies of each variable's nodes
    axes        the mesh axes, by name
    """

    def __init__(self, strategies: Mapping[int, Sequence[OpStrategy]], axes: Sequence[str]) -> None:
        self._whole = {v: _first_whole(each) for v, each in strategies.items()}
        self._turns = [(*axes[i:], *axes[:i]) for i in range(len(axes))]
        self._beside = {axis: _numbers(strategies, axis) for axis in axes}

    def __call__(self, sizes: Sequence[int], tables: Sequence[Table]) -> Values:
        """Returns values of the nodes' variables that occur in these tables."""
        left = {v for table in tables for v in table.scope}
        whole = {v: value for v, value in self._whole.items() if v in left}
        if len(self._turns) < 2:
            return whole
        results = [self._descended(sizes, tables, whole, turn) for turn in self._turns]
        return min(results, key=itemgetter(0))[1]

    def _descended(
        self, sizes: Sequence[int], tables: Sequence[Table], whole: Values, axes: Sequence[str]
    ) -> tuple[float, Values]:
        """Returns (the sum, the values) after the optimizations from whole nodes, along the axes in
        this order."""
        total, best, tried = math.inf, whole, 0
        for axis in cycle(axes):
            beside = self._beside[axis]
            same = {v: np.flatnonzero(beside[v] == beside[v][value]) for v, value in best.items()}
            lower, values = _least(sizes, tables, same, best)
            tried = 1 if lower < total * (1 - NEAR) else tried + 1
            if lower < total:
                total, best = lower, values
            if tried >= len(axes):
                break
        return total, best


def _first_whole(strategies: Sequence[OpStrategy]) -> int:
    """Returns the number of the first strategy that splits nothing; 0 if each splits something."""
    return next((i for i, one in enumerate(strategies) if not any((*one.axes, one.passed))), 0)


def _numbers(strategies: Mapping[int, Sequence[OpStrategy]], axis: str) -> dict[int, Array]:
    """Returns, for each variable, a number for each strategy; the numbers are equal for strategies
    that differ only in this axis."""
    known: dict[int, Array] = {}
    for each in strategies.values():
        if id(each) not in known:
            numbers: dict[Hashable, int] = {}
            keys = [s.beside(axis) for s in each]
            known[id(each)] = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    return {v: known[id(each)] for v, each in strategies.items()}


def _least(
    sizes: Sequence[int], tables: Sequence[Table], kept: Mapping[int, Array], first: Values
) -> tuple[float, Values]:
    """Returns (a low sum, the values that give it), where the variables in `kept` have only these
    values. The sum is no higher than the sum for the values `first`."""
    every = {v: kept.get(v, np.arange(size)) for v, size in enumerate(sizes)}
    few = [len(every[v]) for v in range(len(sizes))]
    at = {v: int(np.searchsorted(kept[v], value)) for v, value in first.items()}
    total, values, _ = minimize_in_parts(few, among(tables, every), lambda *_: at)
    return total, {v: int(kept[v][values[v]]) for v in first}
