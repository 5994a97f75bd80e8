"""Plans reshards: which collectives take a tensor from one factor sharding to another, in which
order, and at which cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from onnxpar.cost.cost import Costs
from onnxpar.layout.mesh import Axes, in_mesh_order, merge_axes, plain
from onnxpar.sharding.factors import TensorFactors, sizes_of
from onnxpar.sharding.permutes import permuted
from onnxpar.sharding.reshard_graph import ReshardGraph
from onnxpar.sharding.reshard_steps import PERMUTE, ReshardStep
from onnxpar.sharding.shard_sizes import PartSizes
from onnxpar.sharding.state import FactorSharding
from onnxpar.sharding.sub_axes import Unordered

Bytes = Callable[[FactorSharding], float]
"""A function from a tensor's factor sharding to the bytes of its largest shard."""


@dataclass(frozen=True)
class ReshardedTensor:
    """A tensor for which reshards are planned.

    factors   the tensor's factors
    costs     the cost model of the mesh
    itemsize  the number of bytes of an element
    parts     gives the sizes of shards; None: default sizes
    """

    factors: TensorFactors
    costs: Costs
    itemsize: float = 4.0
    parts: PartSizes | None = None


def plan_steps(
    before: FactorSharding, after: FactorSharding, tensor: ReshardedTensor
) -> list[ReshardStep]:
    """Returns the cheapest steps from one factor sharding of a tensor to another, in order. A
    tensor [4, 6] split over tp by rows takes one AllToAll to be split over tp by columns.

    If both shardings split a dimension over the same axes in different orders, a collective permute
    comes first. If shards do not compose (sub-axes that do not divide each other, 14 elements over
    4 and over 2, sizes by hand), the steps gather the whole tensor and cut it again.
    """
    if before == after:
        return []
    factors, parts = tensor.factors, tensor.parts
    try:
        graph = ReshardGraph((before, after), factors, tensor.costs, tensor.itemsize, parts)
        steps = graph.steps(before, after)
        if all(_composes(step, factors, parts) for step in steps):
            return steps
    except Unordered:
        pass
    reordered = _reordered(before, after)
    if reordered != before and permuted(before, reordered, factors, parts, tensor.costs.mesh):
        pairs = zip(before.leaves, reordered.leaves, strict=True)
        axes = merge_axes(in_mesh_order(tuple({x for a, b in pairs if a != b for x in a})))
        step = ReshardStep(PERMUTE, axes, before, reordered)
        return [step, *plan_steps(reordered, after, tensor)]
    return [*_to_whole(before, factors), *_from_whole(after, factors)]


def _reordered(before: FactorSharding, after: FactorSharding) -> FactorSharding:
    """Returns `before` with the axes of each leaf (a part of a dimension) in the order of `after`,
    for leaves that have the same axes in both shardings."""

    def order(have: Axes, wanted: Axes) -> Axes:
        same = merge_axes(in_mesh_order(have)) == merge_axes(in_mesh_order(wanted))
        return wanted if same else have

    pairs = zip(before.leaves, after.leaves, strict=True)
    return replace(before, leaves=tuple(order(a, b) for a, b in pairs))


def _to_whole(factor_sharding: FactorSharding, factors: TensorFactors) -> Iterator[ReshardStep]:
    """Yields steps to the whole tensor: an all-reduce of partial values (each rank holds one term),
    then one all-gather for each slot (see `_slots`)."""
    if factor_sharding.partial:
        yield ReshardStep(
            "AllReduce", factor_sharding.partial, factor_sharding, factor_sharding.reduced()
        )
    have = factor_sharding.reduced()
    for slot, axes in _slots(have, factors):
        after = FactorSharding(tuple(() if i in slot else a for i, a in enumerate(have.leaves)))
        yield ReshardStep("AllGather", plain(axes), have, after)
        have = after


def _from_whole(factor_sharding: FactorSharding, factors: TensorFactors) -> Iterator[ReshardStep]:
    """Yields steps from the whole tensor: one cut for each slot (see `_slots`), then a mask if
    values must become partial (each rank holds one term)."""
    have = FactorSharding(tuple(() for _ in factor_sharding.leaves))
    for slot, axes in _slots(factor_sharding, factors):
        after = FactorSharding(tuple(axes if i in slot else a for i, a in enumerate(have.leaves)))
        yield ReshardStep("LocalSlice", plain(axes), have, after)
        have = after
    if factor_sharding.partial:
        yield ReshardStep("Select", factor_sharding.partial, have, factor_sharding)


def _slots(
    factor_sharding: FactorSharding, factors: TensorFactors
) -> Iterator[tuple[list[int], Axes]]:
    """Yields (leaves of one dimension that are split over the same axes, these axes): one leaf (a
    part of a dimension), or one leaf in each segment of a concatenation."""
    slots: dict[tuple[int, Axes], list[int]] = defaultdict(list)
    for leaf, axes in enumerate(factor_sharding.leaves):
        if axes:
            slots[factors.dim_of_leaf[leaf], axes].append(leaf)
    for (_, axes), slot in slots.items():
        yield slot, axes


def _composes(step: ReshardStep, factors: TensorFactors, parts: PartSizes | None) -> bool:
    """True if on each leaf (a part of a dimension) that a step changes, each of the larger
    shards is a union of smaller shards: (7, 7) and (4, 3, 4, 3) compose, (7, 7) and (4, 4, 3, 3)
    do not."""
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
    """Returns the sizes of the shards of a leaf (a part of a dimension) that is split over
    `axes`."""
    return sizes_of(parts(leaf, axes) if parts else None, factors.leaves[leaf].size, axes)


def cost(steps: Sequence[ReshardStep], size: Bytes, costs: Costs) -> float:
    """Returns the seconds of the steps by the cost model `costs`; `size` gives the bytes of
    shards."""
    return sum(
        costs.step(s.kind, s.axes, max(size(s.before), size(s.after))) + costs.rows(s.rows)
        for s in steps
    )


def plan_tree(
    start: FactorSharding, wanted: Sequence[FactorSharding], size: Bytes, tensor: ReshardedTensor
) -> list[ReshardStep]:
    """Returns the cheapest steps that produce every wanted sharding of a tensor, each from `start`
    or from the result of an earlier step.

    Planning for all readers of a tensor together reduces a partial sum (each rank holds one term)
    once, not once per reader.
    """
    goals = list(dict.fromkeys(w for w in wanted if w != start))
    orders = permutations(goals) if len(goals) <= 3 else [goals]
    trees = [_grow(start, order, size, tensor) for order in orders]
    return min(trees, key=lambda steps: cost(steps, size, tensor.costs), default=[])


def exchanges(
    start: FactorSharding, wanted: Sequence[FactorSharding], tensor: ReshardedTensor
) -> list[ReshardStep] | None:
    """Like `plan_tree`, with all-to-alls alone: one from `start` to each wanted sharding, after one
    all-reduce of partial sums (each rank holds one term) if a wanted sharding is not partial. None
    if other steps are needed."""
    goals = [goal for goal in dict.fromkeys(wanted) if goal != start]
    reduced, steps = start.reduced(), list[ReshardStep]()
    if start.partial and not all(goal.partial for goal in goals):
        steps.append(ReshardStep("AllReduce", start.partial, start, reduced))
    for goal in goals:
        step = _exchange(start if goal.partial else reduced, goal)
        if step is not None and _composes(step, tensor.factors, tensor.parts):
            steps.append(step)
        elif goal != reduced:
            return None
    return steps


def _exchange(start: FactorSharding, goal: FactorSharding) -> ReshardStep | None:
    """Returns the all-to-all between two shardings; None if one all-to-all does not lead from
    `start` to `goal`."""
    pairs = [(plain(a), plain(b)) for a, b in zip(start.leaves, goal.leaves, strict=True)]
    removed = [tuple(x for x in a if x not in b) for a, b in pairs if a[: len(b)] == b != a]
    added = [tuple(x for x in b if x not in a) for a, b in pairs if b[: len(a)] == a != b]
    same = sum(a == b for a, b in pairs)
    is_one = len(removed) == len(added) == 1 and removed == added and same == len(pairs) - 2
    if not is_one or (start.partial, start.reduce) != (goal.partial, goal.reduce):
        return None
    return ReshardStep("AllToAll", in_mesh_order(removed[0]), start, goal)


def _grow(
    start: FactorSharding, goals: Iterable[FactorSharding], size: Bytes, tensor: ReshardedTensor
) -> list[ReshardStep]:
    """Returns steps that produce the goals in this order, each from `start` or from the cheapest
    earlier result."""
    produced = [start]
    tree: list[ReshardStep] = []
    for goal in goals:
        if goal in produced:
            continue
        sources = [s for s in produced if not s.partial or goal.partial or s == start]
        paths = [plan_steps(source, goal, tensor) for source in sources]
        best = min(paths, key=lambda steps: cost(steps, size, tensor.costs))
        tree += best
        produced += [s.after for s in best]
    return tree
