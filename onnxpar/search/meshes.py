"""The search for the mesh: tries meshes of the given number of ranks, and names the axes of the
best one by what they split."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, permutations
from itertools import count as numbers

from onnxpar.base.errors import StrategyError
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.load.load import Model
from onnxpar.search.objective import Objective, OverLimit
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import Kept, OpStrategy
from onnxpar.search.search import NotBelow, Solution
from onnxpar.sharding.graph_factors import GraphFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.derived_annotations import with_derived
from onnxpar.strategy.dimension_text import axis_names
from onnxpar.strategy.entries import annotations_of
from onnxpar.strategy.expert_parallel import expert_atoms
from onnxpar.strategy.mindspore_keys import axes_in
from onnxpar.strategy.presets import batch_atoms, preset_mesh
from onnxpar.strategy.strategy import Annotation, NodeAnnotation, Strategy, TensorAnnotation
from onnxpar.strategy.training_presets import sequence_atom

BATCH, EXPERTS, SEQUENCE, WIDTH = "dp", "ep", "sp", "tp"
"""Names of axes, by the index that they split most: batch, experts, sequence, or anything else."""
ORDER = (BATCH, EXPERTS, SEQUENCE, WIDTH)
"""The order of a mesh's axes, major first, if all ranks are equally far from each other."""
TOGETHER = 2
"""The most axes of a mesh for which one search decides the splits over all axes at once."""
MOST_AXES = 3
"""The most axes of a mesh that the search finds; axes beyond TOGETHER come from splitting an axis
in two."""
SAME = 1e-6
"""Solutions whose times differ by at most this share count as equally fast; of these, the one on
the mesh with the fewest axes is taken."""
DIVIDED = 8
"""The fewest ranks of an axis that is split in two; splitting 4 ranks seldom saves time."""
WORTH = 0.01
"""The share of a run's time that each axis beyond TOGETHER must save to be kept."""
_NAMING = 0.1
"""An axis gets a name for an index only if the nodes that it splits along that index have at least
this share of the seconds of all nodes that it splits."""

BETTER = 1e-3
"""The share of a run's time that a further mesh must save. The search on a mesh ends when it is
proved that the mesh saves less."""
REFINING = 0.1
"""The largest share of a run's time that splitting an axis in two is expected to save: a solution
slower than the best by a larger share is not tried with a split axis."""

Solve = Callable[
    [ShardingState, Sequence[Sequence[Annotation]], Kept | None, float],
    Solution,
]
"""A function that finds the fastest strategy on a mesh, from a sharding state, batches of
annotations (the user's requests), decisions of another search to keep, and the seconds that the
strategy must stay below."""


def best_mesh(
    model: Model,
    factors: GraphFactors,
    devices: int,
    topology: Topology | None,
    solve: Solve,
    strategy: Strategy | None = None,
    objective: Objective | None = None,
) -> Solution:
    """Returns the fastest strategy on any mesh of `devices` ranks that meets all requests in
    `strategy`; the mesh has the axes that the requests name.

    factors    how the dimensions of the whole graph share factors
    topology   the hosts and links that ranks run on; None: the default topology
    solve      finds the fastest strategy on one mesh
    strategy   the user's requests
    objective  what to minimize, within which limits

    Errors: StrategyError if there is none.
    """
    search = Meshes(factors, devices, topology or Topology.default(), solve, strategy, objective)
    best = search.best()
    sharding = ShardingState.open(best.mesh, factors, search.topology)
    names = _names(best.mesh, _uses(best, model, sharding), search.requested)
    shape = [(names[name], size) for name, size in best.mesh.shape]
    if search.is_even:
        shape.sort(key=lambda axis: _place(axis[0]))
    return renamed(best, names, Mesh(tuple(shape)))


class Meshes:
    """Tries meshes of `devices` ranks for one model, and remembers why meshes were refused and what
    was proved. For the arguments, see `best_mesh`."""

    def __init__(
        self,
        factors: GraphFactors,
        devices: int,
        topology: Topology,
        solve: Solve,
        strategy: Strategy | None,
        objective: Objective | None,
    ) -> None:
        self.factors = factors
        self.objective = objective or Objective()
        self.one_axis = preset_mesh(None, devices)
        self.topology = topology
        self.solve = solve
        self.strategy = strategy
        self.requested = requested_axes(strategy) if strategy is not None else ()
        # True if all ranks are at the same distance; then the order of the mesh's axes does not
        # matter, because each leaf has its own order of axes
        self.is_even = not any(unit < devices for unit in topology.units())
        # True if ranks differ in nothing, and no axis has a name: then two orders of the same axes
        # differ only in which one is gathered alone where both split a dimension
        goal, parts = self.objective, topology.shares
        self.are_alike = self.is_even and not (self.requested or parts or goal.memories)
        self.refused: list[tuple[Mesh, StrategyError]] = []
        # a lower bound on the seconds of every strategy on the meshes tried, without divided axes;
        # `is_complete` as in Proof
        self.bound = math.inf
        self.is_complete = True

    def best(self) -> Solution:
        """Returns the fastest solution on a mesh of up to TOGETHER axes, or on one that splits its
        axes further, if that saves enough. Errors: StrategyError if there is none."""
        if self.objective.any_fit:
            return self._first()
        coarse, by_place = list(self._coarse()), dict[int, Solution]()
        # first meshes with axes of similar size: fast ones exclude the others early
        for place in sorted(range(len(coarse)), key=lambda i: _largest(coarse[i])):
            best_place = min(by_place, key=lambda i: by_place[i].seconds, default=place)
            least = by_place[best_place].seconds if by_place else math.inf
            margin = SAME if place < best_place else -BETTER
            solution = self.attempt(coarse[place], below=least * (1 + margin))
            if solution is not None:
                by_place[place] = solution
        if not by_place:
            raise self.why()
        solutions = [by_place[place] for place in sorted(by_place)]
        least = min(map(_seconds, solutions))
        best = next(s for s in solutions if s.seconds <= least * (1 + SAME))
        most = max(len(solution.mesh.shape) for solution in solutions)
        start = min((s for s in solutions if len(s.mesh.shape) == most), key=_seconds)
        refined = self._refined(start, best.seconds)
        chosen = refined if refined.seconds < best.seconds * (1 - WORTH) else best
        return replace(self.proved(chosen), axes=max(TOGETHER, len(self.requested)))

    def proved(self, solution: Solution) -> Solution:
        """Returns the solution with the lower bound that holds for all tried meshes on which
        everything was decided at once."""
        return replace(solution, bound=self.bound, is_complete=self.is_complete)

    def _first(self) -> Solution:
        """Returns the first solution within the limits, on one axis or on two of nearly equal
        sizes. Errors: StrategyError if there is none."""
        one, *more = self._coarse()  # `one` has more than one axis if a strategy names more
        for mesh in [one, *sorted(more, key=_largest)[:2]]:
            solution = self.attempt(mesh)
            if solution is not None:
                return solution
            if self.objective.patience.is_out:
                break
        raise self.why()

    def _refined(self, best: Solution, seconds: float) -> Solution:
        """Splits axes of a solution in two, one after the other, while each split saves enough time
        compared with the solution before, and with `seconds`, the time of the best one. Strategies
        over the other axes stay. Returns the last solution."""
        if best.seconds > seconds * (1 + REFINING):
            return best
        while TOGETHER <= len(best.mesh.shape) < MOST_AXES:
            below = min(best.seconds, seconds) * (1 - WORTH)
            finer = min(self._finer(best, below), key=_seconds, default=best)
            if finer.seconds >= best.seconds * (1 - WORTH):
                break
            best = finer
        return best

    def _coarse(self) -> Iterator[Mesh]:
        """Yields meshes with one axis, then with two axes of all possible sizes (in one order only,
        if ranks are equal); with more axes if the strategy names more."""
        devices = self.one_axis.size
        for count in range(max(1, len(self.requested)), max(TOGETHER, len(self.requested)) + 1):
            names = (*self.requested, *free_names(count - len(self.requested), self.requested))
            for sizes in [(devices,)] if count == 1 else _products(devices, count):
                if self.are_alike and sizes != tuple(sorted(sizes)):
                    continue
                for order in permutations(names) if self.requested else [names]:
                    yield Mesh(tuple(zip(order, sizes, strict=True)))

    def _finer(self, best: Solution, below: float) -> Iterator[Solution]:
        """Yields solutions after one axis of `best` was split in two, each faster than `below`
        seconds and than the solutions before. Tries each axis of DIVIDED or more ranks that is not
        requested by name: first with parts of similar size, then with more and more different ones,
        while that is faster."""
        for at, (name, size) in enumerate(best.mesh.shape):
            if size < DIVIDED or name in self.requested:
                continue
            ways = list(_products(size, 2))
            middle = min(range(len(ways)), key=lambda i: max(ways[i]))
            for direction in (ways[middle:], ways[:middle][::-1]):
                last = math.inf
                for sizes in direction:
                    solution = self.split(best, at, sizes, below)
                    if solution is None or solution.seconds >= last:
                        break
                    last = solution.seconds
                    below = min(below, last * (1 - BETTER))
                    yield solution

    def split(
        self, best: Solution, at: int, sizes: Sequence[int], below: float = math.inf
    ) -> Solution | None:
        """Returns the solution after axis number `at` of `best` was split in two of these sizes;
        the strategies over the other axes stay. None if no solution takes less than `below`
        seconds."""
        shape = best.mesh.shape
        others = [n for i, (n, _) in enumerate(shape) if i != at]
        parts = zip(free_names(2, [*others, shape[at][0]]), sizes, strict=True)
        kept = Kept(frozenset(others), best.chosen)
        return self.attempt(Mesh((*shape[:at], *parts, *shape[at + 1 :])), kept, below)

    def attempt(
        self, mesh: Mesh, kept: Kept | None = None, below: float = math.inf
    ) -> Solution | None:
        """Returns the fastest solution on a mesh; None if no solution takes less than `below`
        seconds, or there is none at all (`why` then has the reason). Also lowers `bound` to the
        bound that is proved for the mesh, unless decisions of another search are `kept`."""
        self.objective.patience.tell(f"mesh {mesh}")
        sharding = ShardingState.open(mesh, self.factors, self.topology)
        try:
            annotations = [] if self.strategy is None else annotations_of(self.strategy, sharding)
            solution = self.solve(sharding, [with_derived(annotations, sharding)], kept, below)
        except NotBelow as error:
            self._note(error.bound, error.is_complete, kept)
            return None
        except StrategyError as error:
            if isinstance(error, OverLimit) and not error.is_proved:
                self._note(0.0, True, kept)
            self.refused.append((mesh, error))
            return None
        self._note(solution.bound, solution.is_complete, kept)
        return solution

    def _note(self, bound: float, is_complete: bool, kept: Kept | None) -> None:
        """Includes what was proved for a mesh in what is proved for all."""
        if kept is None:
            self.bound = min(self.bound, bound)
            self.is_complete &= is_complete

    def why(self) -> StrategyError:
        """Returns the error for the user if no mesh has a solution. If the limit on memory excludes
        solutions, it is an OverLimit with the least memory that a strategy needs."""
        devices = self.one_axis.size
        if not self.refused:
            return StrategyError(
                f"no mesh of {devices} ranks has the axes {', '.join(self.requested)}, which "
                f"{self.strategy.source if self.strategy else ''} names; give the mesh with --mesh"
            )
        over = [error for _, error in self.refused if isinstance(error, OverLimit)]
        if over:
            nearest = min(over, key=lambda error: error.found)
            lowest = min(over, key=lambda error: error.least or 0.0)
            least, states = lowest.least or 0.0, lowest.states
            return OverLimit(str(nearest), least, nearest.found, states=states)
        mesh, error = self.refused[0]
        return StrategyError(
            f"no mesh of {devices} ranks satisfies all requested layouts; on {mesh}: {error}"
        )


def _largest(mesh: Mesh) -> int:
    """The size of the largest axis."""
    return max(size for _, size in mesh.shape)


def _seconds(solution: Solution) -> float:
    return solution.seconds


def requested_axes(strategy: Strategy) -> tuple[str, ...]:
    """Returns the mesh axes that the entries of a strategy name, without repetitions."""
    entries: list[object] = list(strategy.tensors.values())
    for entry in strategy.shard.values():
        entries += axes_in(entry) if isinstance(entry, Mapping) else [entry]
    return tuple(dict.fromkeys(name for entry in entries for name in axis_names(entry)))


def _products(size: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields all sequences of `count` factors, each 2 or more, whose product is `size`: (2, 6),
    (3, 4), (4, 3), (6, 2) for 12."""
    if count == 1:
        yield (size,)
        return
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            for rest in _products(size // first, count - 1):
                yield first, *rest


def free_names(count: int, taken: Iterable[str]) -> tuple[str, ...]:
    """Returns `count` preliminary names of axes that are not in `taken`; used until the search has
    decided what the axes split."""
    names = chain((WIDTH,) if count == 1 else (BATCH, WIDTH), (f"axis{i}" for i in numbers()))
    return tuple(islice((name for name in names if name not in set(taken)), count))


def _uses(best: Solution, model: Model, sharding: ShardingState) -> dict[str, dict[str, float]]:
    """Returns, for each axis of the best mesh, the seconds that the nodes which it splits along the
    batch, experts, sequence or anything else would take on one rank, by these names of ORDER."""
    roles: dict[int | None, str] = {sequence_atom(model.graph, sharding, model.step): SEQUENCE}
    roles |= dict.fromkeys(expert_atoms(model.graph, sharding), EXPERTS)
    roles |= dict.fromkeys(batch_atoms(model.graph, sharding, model.step), BATCH)
    uses: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for op in sharding.factors.ops:
        over = best.chosen[op.node.name].axes
        compute, _ = op_cost(op, OpStrategy(tuple(() for _ in over)), sharding)
        for leaf, axes in zip(op.leaves, over, strict=True):
            for axis in axes:
                uses[axis.name][roles.get(leaf.atom, WIDTH)] += compute
    return uses


def _names(
    mesh: Mesh, uses: Mapping[str, Mapping[str, float]], requested: Sequence[str]
) -> dict[str, str]:
    """Returns the final name of each axis, by what it splits (`uses`), the axis with the most
    seconds first. Requested axes keep their names; of several axes with one name, all but the first
    get numbers: "tp", "tp2"."""
    names = {name: name for name in requested}
    ranked = sorted(
        (-seconds, axis, role)
        for axis, by_role in uses.items()
        for role, seconds in by_role.items()
        if seconds >= _NAMING * sum(by_role.values())
    )
    for _, axis, role in ranked:
        if axis not in names and role not in names.values():
            names[axis] = role
    for axis, _ in mesh.shape:
        if axis not in names:
            role = max(uses[axis], key=uses[axis].__getitem__) if uses.get(axis) else WIDTH
            numbered = (role, *(f"{role}{i}" for i in range(2, len(mesh.shape) + 2)))
            names[axis] = next(name for name in numbered if name not in names.values())
    return names


def renamed(best: Solution, names: Mapping[str, str], mesh: Mesh) -> Solution:
    """Returns the solution with its axes renamed by `names` (old to new), on `mesh`, which has the
    new names."""

    def named(axes: Axes) -> Axes:
        return tuple(replace(axis, name=names[axis.name]) for axis in axes)

    def annotation(one: Annotation) -> Annotation:
        if isinstance(one, NodeAnnotation):
            return replace(one, axes={leaf: named(axes) for leaf, axes in one.axes.items()})
        assert isinstance(one, TensorAnnotation)
        return replace(one, axes=[None if a is None else named(a) for a in one.axes])

    chosen = {
        node: replace(c, axes=tuple(map(named, c.axes)), passed=named(c.passed))
        for node, c in best.chosen.items()
    }
    annotations = [annotation(one) for one in best.annotations]
    return replace(best, mesh=mesh, annotations=annotations, chosen=chosen)


def _place(name: str) -> int:
    """The place of an axis in ORDER, by its name without numbers."""
    kind = name.rstrip("0123456789")
    return ORDER.index(kind) if kind in ORDER else len(ORDER)
