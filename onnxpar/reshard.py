"""From one placement of a tensor to another: which collectives, in which order, at what cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from onnxpar.factors import TensorFactors, with_axes
from onnxpar.layout import ReduceOp, nested_parts
from onnxpar.mesh import Axes, Axis
from onnxpar.search.cost import Costs
from onnxpar.sharding import Placement, covered_axes, overlaps

LOCAL_STEPS = ("LocalSlice", "Select")
"""Steps that move nothing between ranks."""


@dataclass(frozen=True)
class Step:
    """One collective, or a local cut: `kind` over `axes`, between two placements.

    LocalSlice keeps this rank's part; Select keeps the value on coordinate 0 of `axes` and the
    neutral element of the reduction elsewhere (from whole to partial).
    """

    kind: str
    axes: Axes
    before: Placement
    after: Placement


Bytes = Callable[[Placement], float]
"""Bytes that the fullest rank holds under a placement."""


PartSizes = Callable[[int, Axes], tuple[int, ...]]
"""Sizes of the parts of a leaf that is split over axes."""


def plan_steps(
    before: Placement, after: Placement, factors: TensorFactors, parts: PartSizes | None = None
) -> list[Step]:
    """The steps from one placement of a tensor to another, fewest bytes first where order is free.

    Axes that are added to an unused leaf are cut at once; what is pending is scattered to where it
    is wanted, else all-reduced; an axis that moves between leaves is an all-to-all; the rest is
    gathered and cut. Where parts do not compose (sub-axes that do not divide each other, 14 over 4
    and over 2, sizes by hand) the way leads through the whole tensor.
    """
    cuts = cuts_of([*before.leaves, *after.leaves, before.partial, after.partial])
    if cuts is not None:
        walk = _Walk(refined(before, cuts), refined(after, cuts), factors)
        steps = walk.run()
        if all(_composes(step, factors, parts) for step in steps):
            return steps
    whole = Placement(tuple(() for _ in before.leaves))
    assert whole not in (before, after), (before, after)
    return plan_steps(before, whole, factors, parts) + plan_steps(whole, after, factors, parts)


def _composes(step: Step, factors: TensorFactors, parts: PartSizes | None) -> bool:
    """Whether the fewer parts of each changed leaf are unions of the more."""
    for i, (a, b) in enumerate(zip(step.before.leaves, step.after.leaves, strict=True)):
        if a == b:
            continue
        few, many = sorted((_sizes(factors, parts, i, a), _sizes(factors, parts, i, b)), key=len)
        n = len(many) // len(few)
        if tuple(sum(many[j * n : (j + 1) * n]) for j in range(len(few))) != few:
            return False
    return True


def _sizes(
    factors: TensorFactors, parts: PartSizes | None, leaf: int, axes: Axes
) -> tuple[int, ...]:
    if parts is not None:
        return parts(leaf, axes)
    return nested_parts(factors.leaves[leaf].size, tuple(a.size for a in axes))


Refined = tuple[list[Axes], Axes, ReduceOp]


class _Walk:
    """The placement on its way; leaves in different segments of a dimension move together."""

    def __init__(self, start: Refined, goal: Refined, factors: TensorFactors) -> None:
        self.leaves, self.partial, self.op = start
        self.goal, self.goal_partial, self.goal_op = goal
        self.factors = factors
        self.steps: list[Step] = []

    def run(self) -> list[Step]:
        """The steps, in order."""
        self.cut_free_axes()
        self.reduce()
        self.exchange()
        self.gather()
        self.cut_free_axes()
        self.select()
        assert self.leaves == self.goal and set(self.partial) == set(self.goal_partial)
        return self.steps

    def step(self, kind: str, axes: Axes, moved: Mapping[int, Axes], partial: Axes) -> None:
        before = Placement(tuple(self.leaves), self.partial, self.op)
        self.op = self.goal_op if kind == "Select" else self.op
        self.leaves = [moved.get(i, a) for i, a in enumerate(self.leaves)]
        self.partial = partial
        after = Placement(tuple(self.leaves), partial, self.op)
        self.steps.append(Step(kind, axes, before, after))

    def added(self, leaf: int) -> Axes:
        """The axes that a leaf still lacks; empty while it holds others."""
        have, want = self.leaves[leaf], self.goal[leaf]
        return want[len(have) :] if want[: len(have)] == have else ()

    def gone(self, leaf: int) -> Axes:
        """The axes that a leaf must give up."""
        return self.leaves[leaf][len(_common(self.leaves[leaf], self.goal[leaf])) :]

    def groups(self, change: Callable[[int], Axes]) -> list[tuple[int, Axes, list[int]]]:
        """(dimension, axes, leaves) of equal changes within a dimension."""
        found: dict[tuple[int, Axes], list[int]] = {}
        for leaf, dim in enumerate(self.factors.dim_of_leaf):
            if change(leaf):
                found.setdefault((dim, change(leaf)), []).append(leaf)
        return [(dim, axes, group) for (dim, axes), group in found.items()]

    def cut_free_axes(self) -> None:
        for _, axes, group in self.groups(self.added):
            used = list(self.partial)
            for i, have in enumerate(self.leaves):
                if not all((i, j) in self.factors.apart for j in group):
                    used += have
            if not overlaps(axes, used):
                self.step("LocalSlice", axes, {i: self.goal[i] for i in group}, self.partial)

    def excess(self) -> Axes:
        keep = self.goal_partial if self.op == self.goal_op else ()
        return tuple(a for a in self.partial if a not in keep)

    def reduce(self) -> None:
        for _, axes, group in self.groups(self.added):
            if set(axes) <= set(self.excess()) and self._covers(group, axes):
                rest = tuple(a for a in self.partial if a not in axes)
                self.step("ReduceScatter", axes, {i: self.goal[i] for i in group}, rest)
        if self.excess():
            over = self.excess()
            self.step("AllReduce", over, {}, tuple(a for a in self.partial if a not in over))

    def _covers(self, group: list[int], axes: Axes) -> bool:
        """Whether every element of the dimension is split: no segment stays whole."""
        given = iter([(axes if i in group else (), None) for i in range(len(self.leaves))])
        dims = [with_axes(dim, given) for dim in self.factors.dims]
        return covered_axes(dims[self.factors.dim_of_leaf[group[0]]]) is not None

    def exchange(self) -> None:
        for source, gone, losing in self.groups(self.gone):
            for target, added, gaining in self.groups(self.added):
                if source == target or gone != added:
                    continue
                if not (self._covers(losing, gone) and self._covers(gaining, added)):
                    continue
                moved = {i: self.leaves[i][: -len(gone)] for i in losing}
                moved |= {j: self.leaves[j] + added for j in gaining}
                self.step("AllToAll", gone, moved, self.partial)
                break

    def gather(self) -> None:
        for _, axes, group in self.groups(self.gone):
            moved = {i: self.leaves[i][: -len(axes)] for i in group}
            self.step("AllGather", axes, moved, self.partial)

    def select(self) -> None:
        added = tuple(a for a in self.goal_partial if a not in self.partial)
        if added:
            self.step("Select", added, {}, self.goal_partial)


def _common(a: Axes, b: Axes) -> Axes:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def cuts_of(axes: Iterable[Axes]) -> dict[str, list[int]] | None:
    """Where each mesh axis must be cut so that all sub-axes in use are unions of pieces."""
    cuts: dict[str, set[int]] = {}
    for axis in (a for group in axes for a in group):
        cuts.setdefault(axis.name, set()).update((axis.pre, axis.pre * axis.size))
    ordered = {name: sorted(at) for name, at in cuts.items()}
    for at in ordered.values():
        if any(b % a for a, b in pairwise(at)):
            return None
    return ordered


def refined(placement: Placement, cuts: dict[str, list[int]]) -> Refined:
    def pieces(axis: Axis) -> Axes:
        at = [c for c in cuts[axis.name] if axis.pre <= c <= axis.pre * axis.size]
        return tuple(Axis(axis.name, b // a, a) for a, b in pairwise(at))

    def all_pieces(axes: Axes) -> Axes:
        return tuple(p for a in axes for p in pieces(a))

    leaves = [all_pieces(axes) for axes in placement.leaves]
    return leaves, all_pieces(placement.partial), placement.reduce


def cost(steps: Sequence[Step], size: Bytes, costs: Costs) -> float:
    """Seconds for the steps, by the cost model."""
    return sum(costs.step(s.kind, s.axes, max(size(s.before), size(s.after))) for s in steps)


def plan_tree(
    start: Placement,
    wanted: Sequence[Placement],
    size: Bytes,
    costs: Costs,
    factors: TensorFactors,
    parts: PartSizes | None = None,
) -> list[Step]:
    """The cheapest steps that make every wanted placement, each from any that is there already.

    All consumers of a tensor are served together, so that a sum that three nodes read is reduced
    once.
    """
    goals = list(dict.fromkeys(w for w in wanted if w != start))
    orders = permutations(goals) if len(goals) <= 3 else [goals]
    trees = [_grow(start, order, size, costs, factors, parts) for order in orders]
    return min(trees, key=lambda steps: cost(steps, size, costs), default=[])


def _grow(
    start: Placement,
    goals: Iterable[Placement],
    size: Bytes,
    costs: Costs,
    factors: TensorFactors,
    parts: PartSizes | None,
) -> list[Step]:
    made = [start]
    tree: list[Step] = []
    for goal in goals:
        if goal in made:
            continue
        sources = [s for s in made if not s.partial or goal.partial or s == start]
        paths = [plan_steps(source, goal, factors, parts) for source in sources]
        best = min(paths, key=lambda steps: cost(steps, size, costs))
        tree += best
        made += [s.after for s in best]
    return tree
