"""How a node can be split: which leaves take each mesh axis, or that a pending sum passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, pairwise, product, zip_longest
from math import gcd, prod
from operator import itemgetter

import onnx_graphsurgeon as gs

from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes, Axis, parts_over
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import FactorSharding, ShardingState

_MOST_SEGMENTS = 6
"""Slots of different segments, above which only all of them are split together, or each alone."""


@dataclass(frozen=True)
class OpStrategy:
    """How a node is split.

    axes    those of each leaf of the node
    passed  axes over which the operands of `group` stay pending, and with them the result
    """

    axes: tuple[Axes, ...]
    passed: Axes = ()
    reduce: ReduceOp = "sum"
    group: frozenset[int] = frozenset()

    def operand(self, op: OpFactors, index: int) -> FactorSharding:
        """How the node reads an operand."""
        own, reduce = self.own_partial(op)
        if own and index in op.rule.additive:
            return FactorSharding(self.leaves(op.inputs[index]), own, reduce)
        if index in self.group:
            return FactorSharding(self.leaves(op.inputs[index]), self.passed, self.reduce)
        return FactorSharding(self.leaves(op.inputs[index]))

    def result(self, op: OpFactors, index: int) -> FactorSharding:
        """How the node makes a result."""
        own, reduce = self.own_partial(op)
        if not own:
            own, reduce = self.passed, self.reduce
        return FactorSharding(self.leaves(op.outputs[index]), own, reduce)

    def leaves(self, links: tuple[int | None, ...]) -> tuple[Axes, ...]:
        """The axes of a tensor's leaves, by the node's leaves behind them."""
        return tuple(() if link is None else self.axes[link] for link in links)

    def is_alike(self, axes: Set[str]) -> bool:
        """Whether these axes of the mesh are all on the same leaves, or pass together."""
        each = ({axis.name for axis in over} for over in (*self.axes, self.passed))
        return all(names in (set(), axes) for names in each)

    def own_partial(self, op: OpFactors) -> tuple[Axes, ReduceOp]:
        """What the node's own reductions leave pending."""
        axes: list[Axis] = []
        reduce: ReduceOp = "sum"
        for i, over in enumerate(self.axes):
            if over and op.reduction(i):
                axes += [a for a in over if a not in axes]
                reduce = op.reduction(i)  # type: ignore[assignment]
        return tuple(axes), reduce


@dataclass(frozen=True)
class _Split:
    """Leaves that take one mesh axis, or parts of it; none of them: the node does not use it."""

    leaves: tuple[tuple[int, Axis], ...] = ()


@dataclass(frozen=True)
class _Pass:
    """Operands that stay pending over one mesh axis."""

    group: frozenset[int]
    reduce: ReduceOp


_Option = _Split | _Pass


Kinds = dict[str, set[ReduceOp]]
"""The reductions that may be pending in each tensor, by name."""


def partial_kinds(ops: Iterable[OpFactors]) -> Kinds:
    """What may be pending where: behind what is reduced, and behind linear or monotone ops."""
    kinds: Kinds = defaultdict(set)
    for op in ops:
        own = {op.reduction(i) for i in range(len(op.leaves))} - {None}
        passed = {p.reduce for p in _passes(op, kinds)}
        for tensor in op.node.outputs:
            kinds[tensor.name] |= own | passed  # type: ignore[arg-type]
    return kinds


@dataclass(frozen=True)
class Kept:
    """How nodes are split over axes of the mesh that another search has decided, by name."""

    axes: frozenset[str]
    choices: Mapping[str, OpStrategy]


Size = Callable[[OpFactors, OpStrategy], float]
"""Bytes of what a rank holds of all that a node reads and makes."""


def choices_of(
    op: OpFactors,
    sharding: ShardingState,
    kinds: Kinds,
    kept: Kept | None = None,
    most: int = 1 << 12,
    size: Size | None = None,
) -> list[OpStrategy]:
    """All ways to split a node that agree with what is decided for its leaves. Where there are more
    than `most` combinations of what it can do on each axis, those remain that alone leave ranks
    small parts, by `size`."""
    mesh = sharding.mesh
    axes = [mesh.axis(name) for name, size in mesh.shape if size > 1]
    slots = _slots(op)
    per_axis: list[list[_Option]] = [
        [_kept(kept.choices[op.node.name], axis)]
        if kept is not None and axis.name in kept.axes
        else [*_splits(op, slots, axis, sharding), *_passes(op, kinds)]
        for axis in axes
    ]
    if prod(map(len, per_axis)) > most:
        each = zip(axes, per_axis, strict=True)
        per_axis = [_ranked(op, axis, options, sharding, size) for axis, options in each]
        while prod(map(len, per_axis)) > most:
            max(per_axis, key=len).pop()
    found: dict[OpStrategy, None] = {}
    for options in product(*per_axis):
        choice = _combined(op, dict(zip(axes, options, strict=True)))
        if choice is not None and _is_legal(op, choice, sharding):
            found[choice] = None
    return list(found)


def _ranked(
    op: OpFactors,
    axis: Axis,
    options: list[_Option],
    sharding: ShardingState,
    size: Size | None,
) -> list[_Option]:
    """What a node can do on an axis, as far as it agrees with what is decided and makes sense
    alone: nothing, sums that pass, then splits of one leaf, of two and of more by turns, of each
    those into the smallest parts first. Neighbours that have the same factors rank alike."""
    by_leaves: dict[int, list[tuple[float, int, _Option]]] = defaultdict(list)
    for option in options:
        choice = _combined(op, {axis: option})
        if choice is None or not _agrees_on(axis, choice, sharding.ops[op.node.name]):
            continue
        if len(options) == 1 or _is_possible(op, choice, sharding):
            at = [i for i, over in enumerate(choice.axes) if over]
            gaps = len({b - a for a, b in pairwise(at)})  # of like segments, the same leaf in each
            by_leaves[len(at)].append((size(op, choice) if size and at else 0.0, gaps, option))
    first = [option for _, _, option in by_leaves.pop(0, [])]
    groups = [sorted(by_leaves[n], key=itemgetter(0, 1)) for n in sorted(by_leaves)]
    turns = (each for turn in zip_longest(*groups) for each in turn if each is not None)
    return [*first, *(option for _, _, option in turns)]


def _agrees_on(axis: Axis, choice: OpStrategy, decided: Sequence[Axes | None]) -> bool:
    """Whether a choice does with one axis what is decided for the leaves."""
    return all(
        have is None or tuple(a for a in have if a.name == axis.name) == over
        for have, over in zip(decided, choice.axes, strict=True)
    )


def _kept(choice: OpStrategy, axis: Axis) -> _Option:
    """What a choice does with an axis."""
    if any(a.name == axis.name for a in choice.passed):
        return _Pass(choice.group, choice.reduce)
    parts = [(i, a) for i, axes in enumerate(choice.axes) for a in axes if a.name == axis.name]
    return _Split(tuple(parts))


def _slots(op: OpFactors) -> list[frozenset[int]]:
    """Leaves that are split together: the same atom in several segments, and what is tied; then
    several of those that stand in different segments."""
    slots: dict[frozenset[int], None] = {}
    for i, leaf in enumerate(op.leaves):
        same = {j for j, o in enumerate(op.leaves) if o.atom == leaf.atom and (i, j) in op.apart}
        alone = all((a, b) in op.apart for a, b in combinations({i, *same}, 2))
        tied = {j for group in op.co_sharded if i in group for j in group}
        slots[frozenset({i, *tied, *(same if alone else ())})] = None
    single = list(slots)
    segments = [s for s in single if any(_are_apart(op, s, o) for o in single if o is not s)]
    counts = range(2, len(segments) + 1) if len(segments) <= _MOST_SEGMENTS else [len(segments)]
    for count in counts:
        for some in combinations(segments, count):
            if all(_are_apart(op, a, b) for a, b in combinations(some, 2)):
                slots[frozenset().union(*some)] = None
    return list(slots)


def _are_apart(op: OpFactors, a: frozenset[int], b: frozenset[int]) -> bool:
    return all((i, j) in op.apart for i in a for j in b)


def _splits(
    op: OpFactors, slots: list[frozenset[int]], axis: Axis, sharding: ShardingState
) -> Iterator[_Split]:
    """Nothing, each slot that has enough elements, and slots of a dimension of which each but the
    last has too few, and the next takes what is left of the axis. What is left of the only axis may
    be idle, too; of several, another mesh says so."""
    yield _Split()
    may_idle = sum(n > 1 for _, n in sharding.mesh.shape) == 1
    beside = _neighbours(op, sharding)
    size = {slot: min(op.leaves[i].size for i in slot) for slot in slots}

    def shares(slot: frozenset[int], axis: Axis) -> Iterator[frozenset[tuple[int, Axis]]]:
        """The axis on a slot, or a share of it, and the rest on slots right behind it."""
        share = axis.size if size[slot] >= axis.size else gcd(size[slot], axis.size)
        own = frozenset((i, Axis(axis.name, share, axis.pre)) for i in slot)
        if share == axis.size or (may_idle and share > 1):
            yield own
        if share == axis.size:
            return
        rest = Axis(axis.name, axis.size // share, axis.pre * share)
        for other in slots if share > 1 else ():
            if all(any((i, j) in beside for j in other) for i in slot):
                for behind in shares(other, rest):
                    if slot.isdisjoint(i for i, _ in behind):
                        yield own | behind

    for slot in slots:
        for split in shares(slot, axis):
            yield _Split(tuple(sorted(split)))


def _neighbours(op: OpFactors, sharding: ShardingState) -> set[tuple[int, int]]:
    """Leaves of a node that stand in one dimension of a tensor, the second right behind the
    first."""
    found = set()
    for tensor, links in op.operands():
        factors = sharding.factors.tensors.get(tensor.name)
        dims = factors.dim_of_leaf if factors else ()
        for (i, a), (j, b) in pairwise(zip(links, dims, strict=False)):
            if i is not None and j is not None and a == b:
                found.add((i, j))
    return found


def _passes(op: OpFactors, kinds: Kinds) -> Iterator[_Pass]:
    """What may pass a node with one result."""
    if op.bodies or len([t for t in op.node.outputs if t.name]) != 1:
        return
    names = [t.name for t in op.node.inputs]
    for group in op.rule.linear:
        if any("sum" in kinds.get(names[i], ()) for i in group):
            yield _Pass(group, "sum")
    for i in sorted(op.rule.monotone):
        for reduce in sorted(kinds.get(names[i], set()) & {"max", "min"}):
            yield _Pass(frozenset({i}), reduce)


def _combined(op: OpFactors, options: Mapping[Axis, _Option]) -> OpStrategy | None:
    """The choice that takes an option for each axis, None where they do not go together."""
    axes: list[Axes] = [()] * len(op.leaves)
    passed: Axes = ()
    how: _Pass | None = None
    for axis, option in options.items():
        if isinstance(option, _Pass):
            if how not in (None, option):
                return None
            how, passed = option, (*passed, axis)
            continue
        for leaf, part in option.leaves:
            axes[leaf] = (*axes[leaf], part)
    if any(a and parts_over(a) > leaf.size for a, leaf in zip(axes, op.leaves, strict=True)):
        return None
    if len({op.reduction(i) for i, over in enumerate(axes) if over} - {None}) > 1:
        return None
    if how is None:
        return OpStrategy(tuple(axes))
    if any(over and op.reduction(i) for i, over in enumerate(axes)):
        return None
    return OpStrategy(tuple(axes), passed, how.reduce, how.group)


def _is_legal(op: OpFactors, choice: OpStrategy, sharding: ShardingState) -> bool:
    """Whether the choice agrees with what is decided, and ranks can hold such parts."""
    decided = sharding.ops[op.node.name]
    if any(have is not None and have != a for have, a in zip(decided, choice.axes, strict=True)):
        return False
    return _is_possible(op, choice, sharding)


def _is_possible(op: OpFactors, choice: OpStrategy, sharding: ShardingState) -> bool:
    """Whether ranks can hold such parts, whatever is decided."""
    if _cuts_open_weight(op, choice, sharding):
        return False
    name = op.node.name
    decided = sharding.ops[name]
    try:
        sharding.ops[name] = list(choice.axes)
        sharding.legalize(op)
        return tuple(sharding.ops[name]) == choice.axes
    finally:
        sharding.ops[name] = decided


def _cuts_open_weight(op: OpFactors, choice: OpStrategy, sharding: ShardingState) -> bool:
    """Whether the parts of a stored operand would have sizes that only a run can tell."""
    factors = sharding.factors
    return bool(factors.open_atoms) and any(
        choice.axes[link] and op.leaves[link].atom in factors.open_atoms
        for tensor, links in zip(op.node.inputs, op.inputs, strict=True)
        if isinstance(tensor, gs.Constant)
        for link in links
        if link is not None
    )
