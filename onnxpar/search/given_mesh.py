"""The search for a strategy on the mesh that the user gave.

It must find every solution that the search for a mesh (`meshes.py`) could find on this mesh. That
search may try two axes in both orders, and gets to three axes by splitting one of two. So the
search here tries the axes in all orders (unless distances between ranks depend on the order), and
starts with neighbouring axes taken as one, which it then splits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.search.meshes import MOST_AXES, TOGETHER, Meshes, Solve, free_names, renamed
from onnxpar.search.objective import Objective
from onnxpar.search.search import Solution
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.strategy.strategy import Strategy

Group = tuple[tuple[str, int], ...]
"""Neighbouring axes of the mesh, by (name, size), which a coarser mesh has as one axis."""


def best_on_mesh(
    factors: GraphFactors,
    mesh: Mesh,
    topology: Topology | None,
    solve: Solve,
    strategy: Strategy | None = None,
    objective: Objective | None = None,
) -> Solution:
    """Returns the fastest strategy on `mesh` that meets all requests in `strategy`; it is no slower
    than a solution of `best_mesh` on this mesh.

    factors    how the dimensions of the whole graph share factors
    topology   what ranks run on; None: the default
    solve      finds the fastest strategy on one mesh
    strategy   the user's requests
    objective  what to minimize, within which limits

    Errors: StrategyError if there is none.
    """
    topology = topology or Topology.default()
    search = Meshes(factors, mesh.size, topology, solve, strategy, objective)
    solutions = list(_GivenMesh(search, mesh).solutions())
    if not solutions:
        raise search.why()
    best = min(solutions, key=lambda solution: solution.seconds)
    return search.proved(best)


class _GivenMesh:
    """Solves for one mesh: directly, and from coarser meshes whose axes are then split."""

    def __init__(self, search: Meshes, mesh: Mesh) -> None:
        self.search = search
        self.mesh = mesh
        self.known: dict[tuple[Group, ...], Solution | None] = {}

    def solutions(self) -> Iterator[Solution]:
        """Yields solutions on the given mesh: for each order of axes, the solutions that the search
        reaches directly or from coarser meshes."""
        for order in self._orders():
            axes = tuple((axis,) for axis in order)
            is_given = order == self._split_axes()
            for solution in self._on_groups(axes, directly=is_given or len(order) <= TOGETHER):
                names = {
                    new: old for (new, _), (old, _) in zip(solution.mesh.shape, order, strict=True)
                }
                yield renamed(solution, names, self.mesh)

    def _split_axes(self) -> Group:
        """The axes with several ranks; the first one if there are none."""
        return tuple(axis for axis in self.mesh.shape if axis[1] > 1) or self.mesh.shape[:1]

    def _orders(self) -> Iterable[Group]:
        """Returns the orders of axes to start with. If distances between ranks differ, or if there
        are many axes, that is only the mesh's own order; otherwise all orders, but one of several
        that differ only in names that nobody requested."""
        axes = self._split_axes()
        if not self.search.is_even or len(axes) > MOST_AXES:
            return [axes]
        requested = self.search.requested
        alike: dict[object, Group] = {}
        for order in permutations(axes):
            sign = tuple((name if name in requested else None, size) for name, size in order)
            alike.setdefault(sign, order)
        return alike.values()

    def _on_groups(self, groups: tuple[Group, ...], directly: bool) -> Iterator[Solution]:
        """Yields solutions on a mesh with an axis for each group of the given axes: one from a
        search over all axes at once (if `directly`), and one from each coarser mesh that has two
        neighbouring groups as one axis."""
        if directly:
            yield from filter(None, [self._direct(groups)])
        for at in range(len(groups) - 1 if len(groups) > TOGETHER else 0):
            pair = groups[at : at + 2]
            if any(name in self.search.requested for group in pair for name, _ in group):
                continue
            start = self._best((*groups[:at], (*pair[0], *pair[1]), *groups[at + 2 :]))
            if start is not None:
                sizes = [_size(group) for group in pair]
                yield from filter(None, [self.search.split(start, at, sizes)])

    def _best(self, groups: tuple[Group, ...]) -> Solution | None:
        """Returns the fastest solution on a mesh with an axis for each group; None if there is
        none."""
        if groups not in self.known:
            solutions = self._on_groups(groups, directly=len(groups) <= TOGETHER)
            self.known[groups] = min(solutions, key=lambda one: one.seconds, default=None)
        return self.known[groups]

    def _direct(self, groups: Sequence[Group]) -> Solution | None:
        """Returns the solution of a search over all axes at once, on a mesh with an axis for each
        group; None if there is none. Axes that are not requested by name get the names that the
        search for a mesh uses, so that both searches solve the same problem."""
        own = [
            g[0][0] if len(g) == 1 and g[0][0] in self.search.requested else None for g in groups
        ]
        free = iter(free_names(own.count(None), self.search.requested))
        names = [name or next(free) for name in own]
        return self.search.attempt(Mesh(tuple(zip(names, map(_size, groups), strict=True))))


def _size(group: Group) -> int:
    """The number of ranks along all axes of a group."""
    return math.prod(size for _, size in group)
