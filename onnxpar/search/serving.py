"""What it takes to serve several readers of a tensor together, as tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.search.reshard_costs import MOST_TOGETHER, End, Ways, faster
from onnxpar.search.sums import Sums
from onnxpar.sharding.state import Placement

MOST_DENSE = 1 << 20
"""Entries of a table over the maker, one reader, and what is made for all readers; no more than
elimination makes."""

Paths = Callable[[End, End], Array]
"""Seconds from the placements of one end to those of another, as rows."""


@dataclass(frozen=True)
class Serving:
    """Adds tables for one tensor, or `times` as many that are alike. Within a limit on memory,
    `is_limited`, it counts who reads a copy."""

    sums: Sums
    ways: Ways
    times: int
    is_limited: bool

    def serve(self, made: End, needs: Sequence[End]) -> tuple[dict[End, End], End | None]:
        """The ends by variables of their own. Where tables would be too large, each reader is
        served by itself, from what is made or from one placement that is made of it for all, which
        is returned: of up to two readers that is exact, of more nearly."""
        ends = [made, *needs]
        counts = [len(set(end.placements)) for end in ends]
        if len(ends) <= 5 and math.prod(counts) <= MOST_TOGETHER:
            at = {end: distinct(self.sums, end) for end in ends}
            together = [at[end] for end in ends]
            self.sums.add(together, partial(self._together, together))
            return at, None
        start = distinct(self.sums, made)
        at = {made: start}
        placements = {p.reduced() for p in made.placements}
        placements |= {p for end in needs for p in end.placements if not p.partial}
        shared = tuple(sorted(placements, key=repr))
        common = End(self.sums.add_variable(len(shared)), shared)
        self.sums.add([start, common], partial(self._path, start, common))
        for need, count in zip(needs, counts[1:], strict=True):
            is_small = counts[0] * len(shared) * count <= MOST_DENSE
            at[need] = (self._from_either if is_small else self._from_one)(start, common, need)
        return at, common

    def _together(self, ends: Sequence[End]) -> Array:
        return self.times * self.ways.tree(ends)

    def _path(self, start: End, goal: End) -> Array:
        return self.times * self.ways.paths(start, goal)

    def _from_either(self, made: End, common: End, need: End) -> End:
        """Serves a reader from what is nearer, what is made or what is common: one table."""
        own = distinct(self.sums, need)
        self.sums.add([made, common, own], partial(self._nearer, made, common, own))
        return own

    def _nearer(self, made: End, common: End, own: End) -> Array:
        one = self.ways.paths(made, own)[:, :, None, :]
        other = self.ways.onward(common, own)[:, None, :, :]
        return self.times * faster(one, other)

    def _from_one(self, made: End, common: End, need: End) -> End:
        """The same by tables over pairs, which have the same least sum: a variable of the reader's
        own also says what it is served from, and within a limit, whether by a copy or as that is.
        Of two sums, the source that makes the larger one less counts."""
        placements = tuple(dict.fromkeys(need.placements))
        copied = tuple(is_copy for _, is_copy in self._kinds for _ in placements)
        values = placements * len(self._kinds)
        own = replace(_restated(self.sums, need, values), copied=copied)
        goal = End(None, placements)
        self.sums.add([made, own], partial(self._from, 0, self.ways.paths, made, goal))
        self.sums.add([common, own], partial(self._from, 1, self.ways.onward, common, goal))
        return own

    @property
    def _kinds(self) -> list[tuple[int, bool]]:
        """The source by number, and whether the reader takes a copy; without a limit, that does not
        count."""
        return [(n, is_copy) for is_copy in (False, True)[not self.is_limited :] for n in (0, 1)]

    def _from(self, number: int, paths: Paths, source: End, goal: End) -> Array:
        """What a source takes to serve the placements of a goal, in each kind; nothing where it
        does not serve them."""
        seconds, is_same = self.times * paths(source, goal), ~self.ways.differ(source, goal)
        parts = [
            np.zeros_like(seconds)
            if n != number
            else np.where(self.is_limited & (is_same == is_copy), np.inf, seconds)
            for n, is_copy in self._kinds
        ]
        return np.concatenate(parts, axis=-1)


def distinct(sums: Sums, end: End) -> End:
    """The same by a variable whose values are the placements, where these are fewer."""
    placements = tuple(dict.fromkeys(end.placements))
    if end.variable is None or len(placements) == len(end.placements):
        return end
    return _restated(sums, end, placements)


def _restated(sums: Sums, end: End, placements: tuple[Placement, ...]) -> End:
    """The same by a new variable with these placements, of which some may be equal."""
    restated = End(sums.add_variable(len(placements)), placements)

    def allowed() -> Array:
        at: dict[Placement, list[int]] = defaultdict(list)
        for i, placement in enumerate(placements):
            at[placement].append(i)
        values = np.full((len(end.placements), len(placements)), np.inf)
        for i, placement in enumerate(end.placements):
            values[i, at[placement]] = 0
        return values

    sums.forbid([end, restated], allowed)
    return restated
