"""The strategies of a node. A strategy says, for each mesh axis, which leaves (splittable parts of
dimensions) of the node the axis splits, or that the node passes on operands that are partial over
the axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product, zip_longest
from math import gcd, prod
from operator import itemgetter

import onnx_graphsurgeon as gs

from onnxpar.layout.layout import ReduceOp
from onnxpar.layout.mesh import Axes, Axis, parts_over, plain
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import FactorSharding, ShardingState

_MOST_SEGMENTS = 6
"""Of a dimension with at most this number of segments, any subset of the segments may be split;
with more, only all or a single one."""


@dataclass(frozen=True)
class OpStrategy:
    """A strategy of one node. Leaves are the node's factors, cut so that all tensors agree on them;
    mesh axes split leaves.

    axes    the mesh axes that split each leaf of the node
    passed  mesh axes over which the operands in `group`, and therefore the result, are partial
    reduce  the reduction of these partial operands
    group   indices of the operands that are partial over `passed`

    A MatMul `m k, k n -> m n` whose leaves m, k, n have the axes (), (tp,), () has partial sums
    over tp as its result.
    """

    axes: tuple[Axes, ...]
    passed: Axes = ()
    reduce: ReduceOp = "sum"
    group: frozenset[int] = frozenset()

    def operand(self, op: OpFactors, index: int) -> FactorSharding:
        """Returns the sharding in which the node requires operand `index`."""
        own, reduce = self.own_partial(op)
        if own and index in op.rule.additive:
            return FactorSharding(self.leaves(op.inputs[index]), own, reduce)
        if index in self.group:
            return FactorSharding(self.leaves(op.inputs[index]), self.passed, self.reduce)
        return FactorSharding(self.leaves(op.inputs[index]))

    def result(self, op: OpFactors, index: int) -> FactorSharding:
        """Returns the sharding in which the node produces result `index`."""
        own, reduce = self.own_partial(op)
        if not own:
            own, reduce = self.passed, self.reduce
        return FactorSharding(self.leaves(op.outputs[index]), own, reduce)

    def leaves(self, links: tuple[int | None, ...]) -> tuple[Axes, ...]:
        """Returns the axes of each leaf (splittable part) of a tensor. `links` has for each the
        index of the node's leaf with the same axes, or None for one that stays whole."""
        return tuple(() if link is None else self.axes[link] for link in links)

    def beside(self, axis: str) -> Hashable:
        """Returns a key that is equal for strategies of one node that differ in nothing but this
        mesh axis."""
        each = tuple(tuple(a for a in over if a.name != axis) for over in (*self.axes, self.passed))
        return each, (self.reduce, self.group) if each[-1] else None

    def own_partial(self, op: OpFactors) -> tuple[Axes, ReduceOp]:
        """Returns (axes, reduction) of the partial sums that the node itself produces: the axes
        that split leaves which the node reduces, as k in a MatMul."""
        axes: list[Axis] = []
        reduce: ReduceOp = "sum"
        for i, over in enumerate(self.axes):
            if over and op.reduction(i):
                axes += [a for a in plain(over) if a not in axes]
                reduce = op.reduction(i)  # type: ignore[assignment]
        return tuple(axes), reduce


@dataclass(frozen=True)
class _Split:
    """An option for one mesh axis: the leaves (node's factors) that the axis, or a sub-axis of it,
    splits; empty if it splits none."""

    leaves: tuple[tuple[int, Axis], ...] = ()


@dataclass(frozen=True)
class _Pass:
    """An option for one mesh axis: the operands in `group` are partial over the axis, by this
    reduction, and the node passes that on to its result."""

    group: frozenset[int]
    reduce: ReduceOp


_Option = _Split | _Pass


Kinds = dict[str, set[ReduceOp]]
"""The reductions ("sum", "max", ...) by which each tensor may be partial, by tensor name."""


def partial_kinds(ops: Iterable[OpFactors]) -> Kinds:
    """Returns by which reductions each tensor may be partial: as the result of an op that reduces,
    or of a linear or monotone op that passes a partial operand on."""
    kinds: Kinds = defaultdict(set)
    for op in ops:
        own = {op.reduction(i) for i in range(len(op.leaves))} - {None}
        passed = {p.reduce for p in _passes(op, kinds)}
        for tensor in op.node.outputs:
            kinds[tensor.name] |= own | passed  # type: ignore[arg-type]
    return kinds


@dataclass(frozen=True)
class Kept:
    """The decisions of another search that this one keeps: its mesh axes (by name), and its
    strategies of nodes (by node name), where only these axes count."""

    axes: frozenset[str]
    strategies: Mapping[str, OpStrategy]


Size = Callable[[OpFactors, OpStrategy], float]
"""A function from a node and a strategy to the bytes of a rank's shards of all operands and
results."""


def strategies_of(
    op: OpFactors,
    sharding: ShardingState,
    kinds: Kinds,
    kept: Kept | None = None,
    most: int = 1 << 12,
    size: Size | None = None,
) -> list[OpStrategy]:
    """Returns all strategies of a node that agree with the axes that are decided for its leaves
    (factors) already.

    kinds  by which reductions tensors may be partial
    kept   decisions of another search
    most   if there are more combinations of options for the axes, only the best options of each
           axis (by `_ranked`) are combined
    size   for `_ranked`: the bytes of a rank's shards under a strategy
    """
    axes = _split_axes(sharding)
    per_axis = _per_axis(op, sharding, kinds, kept)
    if prod(map(len, per_axis)) > most:
        each = zip(axes, per_axis, strict=True)
        per_axis = [_ranked(op, axis, options, sharding, size) for axis, options in each]
        while prod(map(len, per_axis)) > most:
            max(per_axis, key=len).pop()
    strategies: dict[OpStrategy, None] = {}
    for options in product(*per_axis):
        strategy = _combined(op, dict(zip(axes, options, strict=True)))
        if strategy is not None and _is_legal(op, strategy, sharding):
            strategies[strategy] = None
    return list(strategies)


def combinations_of(
    op: OpFactors, sharding: ShardingState, kinds: Kinds, kept: Kept | None = None
) -> int:
    """Returns the number of combinations of options for the axes; the strategies of a node are the
    possible ones among these."""
    return prod(map(len, _per_axis(op, sharding, kinds, kept)))


def _split_axes(sharding: ShardingState) -> list[Axis]:
    """The mesh axes with several ranks."""
    return [sharding.mesh.axis(name) for name, size in sharding.mesh.shape if size > 1]


def _per_axis(
    op: OpFactors, sharding: ShardingState, kinds: Kinds, kept: Kept | None
) -> list[list[_Option]]:
    """Returns the options of a node for each mesh axis; for an axis in `kept`, only the option that
    the other search chose."""
    slots = _slots(op)
    return [
        [_kept(kept.strategies[op.node.name], axis)]
        if kept is not None and axis.name in kept.axes
        else _held(op, axis, sharding) or [*_splits(op, slots, axis, sharding), *_passes(op, kinds)]
        for axis in _split_axes(sharding)
    ]


def _held(op: OpFactors, axis: Axis, sharding: ShardingState) -> list[_Option]:
    """Returns the option for an axis of a node with a dealt table, which only ranks at one
    coordinate of the axis have; empty for other nodes."""
    decided = enumerate(sharding.ops[op.node.name])
    own = [(i, a) for i, over in decided for a in over or () if a.name == axis.name]
    return [_Split(tuple(own))] if any(a.at is not None for _, a in own) else []


def _ranked(
    op: OpFactors,
    axis: Axis,
    options: list[_Option],
    sharding: ShardingState,
    size: Size | None,
) -> list[_Option]:
    """Returns the options of a node for one axis, the best first, without options that contradict a
    decision or with which ranks cannot compute. The order: no split, and partial operands that
    pass; then alternately splits of one leaf, of two, and of more, of each kind the smallest shards
    first. Neighbouring nodes with the same factors get the same order."""
    by_leaves: dict[int, list[tuple[float, int, _Option]]] = defaultdict(list)
    for option in options:
        strategy = _combined(op, {axis: option})
        if strategy is None or not _agrees_on(axis, strategy, sharding.ops[op.node.name]):
            continue
        if len(options) == 1 or _is_possible(op, strategy, sharding):
            at = [i for i, over in enumerate(strategy.axes) if over]
            gaps = len({b - a for a, b in pairwise(at)})  # 1: the same leaf of equal segments
            by_leaves[len(at)].append((size(op, strategy) if size and at else 0.0, gaps, option))
    first = [option for _, _, option in by_leaves.pop(0, [])]
    groups = [sorted(by_leaves[n], key=itemgetter(0, 1)) for n in sorted(by_leaves)]
    alternating = (one for some in zip_longest(*groups) for one in some if one is not None)
    return [*first, *(option for _, _, option in alternating)]


def _agrees_on(axis: Axis, strategy: OpStrategy, decided: Sequence[Axes | None]) -> bool:
    """True if a strategy uses this axis as decided. `decided` has the axes of each leaf of the
    node, None for one that is not decided."""
    return all(
        have is None or tuple(a for a in have if a.name == axis.name) == over
        for have, over in zip(decided, strategy.axes, strict=True)
    )


def _kept(strategy: OpStrategy, axis: Axis) -> _Option:
    """Returns the option for an axis that a strategy has."""
    if any(a.name == axis.name for a in strategy.passed):
        return _Pass(strategy.group, strategy.reduce)
    parts = [(i, a) for i, axes in enumerate(strategy.axes) for a in axes if a.name == axis.name]
    return _Split(tuple(parts))


def _slots(op: OpFactors) -> list[frozenset[int]]:
    """Returns slots: sets of the node's leaves (indices) that one axis can split together. These
    are a leaf with the same index in other segments of a dimension, and leaves that the same axes
    must split, such as rows before and after a window; then combinations of such sets in different
    segments."""
    slots: dict[frozenset[int], None] = {}
    for i, leaf in enumerate(op.leaves):
        same = {j for j, o in enumerate(op.leaves) if o.atom == leaf.atom and (i, j) in op.apart}
        same -= {j for ring in op.rings if i in ring for j in ring}
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
    """True if each leaf of `a` and each of `b` are in different segments of a dimension, so that
    one axis can split both."""
    return all((i, j) in op.apart for i in a for j in b)


def _splits(
    op: OpFactors, slots: list[frozenset[int]], axis: Axis, sharding: ShardingState
) -> Iterator[_Split]:
    """Yields the ways to split a node by one axis: no leaf; each slot (a set of leaves that are
    split together) with enough elements; and several neighbouring slots, where each but the last
    has too few elements and leaves a sub-axis to the next. If the mesh has only this axis, a
    sub-axis may also split nothing; otherwise another mesh covers that case."""
    yield _Split()
    may_idle = sum(n > 1 for _, n in sharding.mesh.shape) == 1
    beside = _neighbours(op, sharding)
    size = {slot: min(op.leaves[i].size for i in slot) for slot in slots}

    def shares(slot: frozenset[int], axis: Axis) -> Iterator[frozenset[tuple[int, Axis]]]:
        """Yields the ways to split a slot by the axis, or by a sub-axis if the slots right behind
        it take the rest."""
        share = axis.size if size[slot] >= axis.size else gcd(size[slot], axis.size)
        own = frozenset((i, Axis(axis.name, share, axis.pre)) for i in slot)
        if share == axis.size or (may_idle and share > 1):
            yield own
        if share == axis.size:
            return
        rest = Axis(axis.name, axis.size // share, axis.pre * share)
        for other in slots if share > 1 else ():
            if all(any((i, j) in beside for j in other) for i in slot):
                for further in shares(other, rest):
                    if slot.isdisjoint(i for i, _ in further):
                        yield own | further

    for slot in slots:
        for split in shares(slot, axis):
            yield _Split(tuple(sorted(split)))


def _neighbours(op: OpFactors, sharding: ShardingState) -> set[tuple[int, int]]:
    """Returns the pairs of a node's leaves (indices) that are in one dimension of some tensor, the
    second directly behind the first: (h, d) of `b (h d)`."""
    pairs = set()
    for tensor, links in op.operands():
        factors = sharding.factors.tensors.get(tensor.name)
        dims = factors.dim_of_leaf if factors else ()
        for (i, a), (j, b) in pairwise(zip(links, dims, strict=False)):
            if i is not None and j is not None and a == b:
                pairs.add((i, j))
    return pairs


def _passes(op: OpFactors, kinds: Kinds) -> Iterator[_Pass]:
    """Yields the groups of operands that may be partial, with a partial result; none unless the
    node has exactly one result."""
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
    """Returns the strategy with these options for the axes; None if two of the options exclude each
    other."""
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
    divides = [tuple(a for a in over if a.at is None) for over in axes]
    if any(a and parts_over(a) > leaf.size for a, leaf in zip(divides, op.leaves, strict=True)):
        return None
    if len({op.reduction(i) for i, over in enumerate(axes) if over} - {None}) > 1:
        return None
    if how is None:
        return OpStrategy(tuple(axes))
    if any(over and op.reduction(i) for i, over in enumerate(axes)):
        return None
    return OpStrategy(tuple(axes), passed, how.reduce, how.group)


def _is_legal(op: OpFactors, strategy: OpStrategy, sharding: ShardingState) -> bool:
    """True if ranks can compute with the strategy, and it has the axes that are decided for the
    node."""
    decided = sharding.ops[op.node.name]
    if any(have is not None and have != a for have, a in zip(decided, strategy.axes, strict=True)):
        return False
    return _is_possible(op, strategy, sharding)


def _is_possible(op: OpFactors, strategy: OpStrategy, sharding: ShardingState) -> bool:
    """True if ranks can compute with the shards of this strategy, whatever is decided for the
    node."""
    if _cuts_open_weight(op, strategy, sharding):
        return False
    name = op.node.name
    decided = sharding.ops[name]
    try:
        sharding.ops[name] = list(strategy.axes)
        sharding.legalize(op)
        return tuple(sharding.ops[name]) == strategy.axes
    finally:
        sharding.ops[name] = decided


def _cuts_open_weight(op: OpFactors, strategy: OpStrategy, sharding: ShardingState) -> bool:
    """True if the strategy splits a stored operand along an index whose size is known only in a
    run, so that the sizes of its shards would be, too."""
    factors = sharding.factors
    return bool(factors.open_atoms) and any(
        strategy.axes[link] and op.leaves[link].atom in factors.open_atoms
        for tensor, links in zip(op.node.inputs, op.inputs, strict=True)
        if isinstance(tensor, gs.Constant)
        for link in links
        if link is not None
    )
