"""Matches the entries of a strategy with the names of nodes and tensors in a graph, and converts
the entries to axes of leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from onnxpar.base.errors import SizeError, StrategyError
from onnxpar.layout.layout import Dim, Factor
from onnxpar.layout.mesh import Axes, Mesh, parts_over
from onnxpar.rules.notation import expr_vars
from onnxpar.sharding.factors import OpFactors, TensorFactors
from onnxpar.sharding.state import ShardingState, overlaps
from onnxpar.strategy.dimension_text import is_cut, named_axis, read_split, read_splits
from onnxpar.strategy.mindspore_keys import has_keys, plain_entry
from onnxpar.strategy.named_ops import NamedOps, matching
from onnxpar.strategy.spread import leaf_count, spread_dim
from onnxpar.strategy.strategy import NodeAnnotation, Strategy, TensorAnnotation, with_co_sharded


def annotations_of(
    strategy: Strategy, sharding: ShardingState
) -> list[NodeAnnotation | TensorAnnotation]:
    """Returns the annotations (requests for axes of leaves) of all nodes and tensors that entries
    of the strategy match, one for each; a later entry overrides an earlier one.

    Errors: StrategyError for a pattern that matches nothing, and for a request that cannot be met.
    The error names the node or tensor, and the remedy.
    """
    of_nodes: dict[str, NodeAnnotation] = {}
    of_tensors: dict[str, TensorAnnotation] = {}
    known = NamedOps.of(sharding.factors, strategy.source)
    for pattern, entry in strategy.shard.items():
        for op in known.matching(str(pattern), strategy.source):
            with _of_entry(str(pattern), op.node.name):
                annotation = _node_annotation(op, entry, sharding)
            earlier = of_nodes.get(op.node.name)
            of_nodes[op.node.name] = annotation if earlier is None else _joined(earlier, annotation)
    stacks, tensors = known.stacks, sharding.factors.tensors
    file_names = sharding.factors.file_names
    for pattern, entry in strategy.tensors.items():
        names = [*tensors, *file_names, *stacks.names(str(pattern), tensors)]
        for name in matching(str(pattern), names, "tensor", strategy.source):
            tensor, item_list = file_names.get(name, name), entry
            if tensor not in tensors:
                tensor = stacks.of[name]
                item_list = stacks.add(name, entry, len(tensors[tensor].dims))
            if item_list is not None:
                with _of_entry(str(pattern), tensor):
                    of_tensors[tensor] = _tensor_annotation(tensor, item_list, sharding)
    stacks.check()
    return [*of_nodes.values(), *of_tensors.values()]


@contextmanager
def _of_entry(pattern: str, name: str) -> Iterator[None]:
    """Puts the pattern of an entry before an error about the node or tensor that the entry matches,
    unless the pattern is the name itself."""
    try:
        yield
    except StrategyError as error:
        if pattern != name:
            error.args = (f"entry {pattern!r}: {error}", *error.args[1:])
        raise


def _joined(earlier: NodeAnnotation, later: NodeAnnotation) -> NodeAnnotation:
    """Returns the annotation of a node that two entries match; for a leaf (a part of a dimension)
    in both, the later one counts. Errors: StrategyError if both together split two dimensions over
    one axis."""
    axes = {**earlier.axes, **later.axes}
    parts = {leaf: sizes for leaf, sizes in earlier.parts.items() if leaf not in later.axes}
    op = later.op
    _check_once(f"{op.node.op} '{op.node.name}'", op, with_co_sharded(op, axes))
    return NodeAnnotation(op, axes, parts | dict(later.parts))


def _node_annotation(op: OpFactors, entry: Any, sharding: ShardingState) -> NodeAnnotation:
    """Returns the annotation that an entry of `shard` gives a node. The entry is a list with an
    item for each input, a mapping of factors, or has MindSpore's keys. Errors: StrategyError."""
    what = f"{op.node.op} '{op.node.name}'"
    if has_keys(entry):
        entry = plain_entry(op, entry, sharding.mesh, what)
    if isinstance(entry, Mapping):
        return _factor_annotation(op, entry, sharding, what)
    if not isinstance(entry, Sequence) or isinstance(entry, str):
        raise StrategyError(
            f"{what}: {entry!r} is not an entry for a node; give {{factor: axis}}, or a list with "
            "a list of dimensions for each input"
        )
    if len(entry) > len(op.node.inputs):
        raise StrategyError(
            f"{what} has {len(op.node.inputs)} inputs, but the strategy lists {len(entry)}; leave "
            "the others out"
        )
    axes: dict[int, Axes] = {}
    parts: dict[int, tuple[int, ...]] = {}
    pre = 1
    for index, dims in enumerate(entry):
        tensor = sharding.factors.tensors.get(op.node.inputs[index].name)
        rank = len(tensor.dims) if tensor else 0
        if dims is None:
            continue
        if not isinstance(dims, Sequence) or isinstance(dims, str) or len(dims) != rank:
            raise StrategyError(
                f"{what}: input {index} has {rank} dimensions, but the strategy gives {dims!r}; "
                "give one item for each dimension"
            )
        for axis, item in enumerate(dims):
            assert tensor is not None
            at = [j for j, d in enumerate(tensor.dim_of_leaf) if d == axis]
            links = [op.inputs[index][j] for j in at]
            if _counted(item) and links and all(axes.get(k, ()) for k in links if k is not None):
                over = next((axes[k] for k in links if k is not None and axes.get(k)), ())
                if parts_over(over) == item:
                    continue  # an earlier operand has given this factor its axes
            label = f"input {index} dimension {axis}"
            factors = _factors_of(op, index, axis)
            annotation = _Leaves(op, sharding, f"{what}: {label}", factors, axes, parts)
            pre = annotation.decide(tensor.dims[axis], links, item, pre)
    _check_once(what, op, with_co_sharded(op, axes))
    return NodeAnnotation(op, axes, parts)


def _factor_annotation(
    op: OpFactors, entry: Mapping[str, Any], sharding: ShardingState, what: str
) -> NodeAnnotation:
    """Returns the annotation that an entry such as {m: dp, n: tp}, by factors of the node's rule,
    gives a node."""
    axes: dict[int, Axes] = {}
    parts: dict[int, tuple[int, ...]] = {}
    pre = 1
    for factor, item in entry.items():
        if factor not in op.trees:
            why = "".join(f"; {reason}" for reason in dict.fromkeys(op.whole.values()))
            raise StrategyError(
                f"{what} has no factor {factor!r}; its rule is {op.rule.text()}{why}"
            )
        tree = op.trees[factor]
        at = [i for i, leaf in enumerate(op.leaves) if leaf.factor == factor]
        links = [*at, *[None] * (leaf_count(tree) - len(at))]
        label = f"{what}: factor {factor}"
        annotation = _Leaves(op, sharding, label, frozenset({factor}), axes, parts)
        pre = annotation.decide(tree, links, item, pre)
    _check_once(what, op, with_co_sharded(op, axes))
    return NodeAnnotation(op, axes, parts)


def _factors_of(op: OpFactors, index: int, axis: int) -> frozenset[str]:
    """Returns the factors in dimension `axis` of the operand `index`, by the node's rule."""
    spec = op.rule.inputs[index] if index < len(op.rule.inputs) else None
    return frozenset(expr_vars(spec[axis])) if spec and axis < len(spec) else frozenset()


@dataclass
class _Leaves:
    """The leaves (parts of dimensions) of a node that its strategy entry has decided so far. An
    entry has an item for each dimension or factor.

    what     names the current item in errors
    factors  the factors of the current item
    axes     the axes of each decided leaf
    parts    the sizes by hand of the parts of a leaf, for leaves that have them
    """

    op: OpFactors
    sharding: ShardingState
    what: str
    factors: frozenset[str]
    axes: dict[int, Axes]
    parts: dict[int, tuple[int, ...]]

    def decide(self, dim: Dim, links: Sequence[int | None], item: Any, pre: int) -> int:
        """Reads the item of one dimension or factor, and decides its leaves (parts of dimensions).
        Returns the product of the numbers of shards in all items up to this one.

        dim    the tree of the dimension or factor
        links  the node's leaf for each leaf of `dim`; None for a leaf that stays whole
        pre    the product of the numbers of shards in earlier items
        """
        if is_cut(item):
            splits = read_splits(item, dim, self.sharding.mesh, self.what)
            spread = [over for over, _ in splits]
            blocked = any(over and k is None for over, k in zip(spread, links, strict=True))
            hand = {k: p for k, (_, p) in zip(links, splits, strict=True) if k is not None and p}
            if blocked:
                raise StrategyError(
                    f"{self.what}: {item!r} splits a factor that must stay whole "
                    f"({self._reasons()}); write its size there"
                )
        else:
            over, sizes, pre = read_item(item, self.sharding.mesh, self.what, pre)
            if over and links and all(link is None for link in links):
                raise StrategyError(
                    f"{self.what} must stay whole ({self._reasons()}); write 1 there"
                )
            spread = _spread(dim, over, links, self.what, self.sharding)
            leaves = [-1 if k is None else k for k in links]
            hand = _hand_parts(self.what, leaves, spread, over, sizes, dim)
        known = {k: a for k, a in zip(links, spread, strict=True) if k is not None}
        for leaf, over_leaf in known.items():
            if self.axes.get(leaf) and over_leaf and self.axes[leaf] != over_leaf:
                raise StrategyError(f"{self.what} gets two different splits; give one of them")
            self.axes[leaf] = over_leaf or self.axes.get(leaf, ())
        self.parts |= hand
        return pre

    def _reasons(self) -> str:
        """Returns the reasons why the item's factors stay whole, for an error."""
        whole = self.op.whole
        reasons = [whole[f] for f in sorted(self.factors) if f in whole] or whole.values()
        return "; ".join(dict.fromkeys(reasons)) or "it has no factor"


def _check_once(what: str, factors: OpFactors | TensorFactors, axes: Mapping[int, Axes]) -> None:
    """Checks that no axis splits a node or tensor twice. Errors: StrategyError, beginning with
    `what`."""
    for leaf_axes in axes.values():
        twice = next((a for a, b in combinations(leaf_axes, 2) if a.overlaps(b)), None)
        if twice is not None:
            raise StrategyError(
                f"{what}: {twice.name} splits one of its dimensions twice; use each axis once"
            )
    for (i, a), (j, b) in combinations(axes.items(), 2):
        if (i, j) not in factors.apart and overlaps(a, b):
            raise StrategyError(f"{what}: an axis splits two of its dimensions; use each axis once")


def _counted(item: Any) -> bool:
    """True if an item is a number of shards, not axes."""
    return isinstance(item, int) and item != 1


def _spread(
    dim: Dim, over: Axes, links: Sequence[int | None], what: str, sharding: ShardingState
) -> list[Axes]:
    """Returns the axes for each leaf (a part of a dimension) of an operand's dimension that is
    split over `over`. Errors: SizeError if the dimension has no leaf for these axes."""
    blocked = frozenset(j for j, link in enumerate(links) if link is None)
    spread = spread_dim(dim, over, blocked)
    if spread is None:
        raise SizeError(_does_not_split(what, dim, over, sharding), dim.size)
    return spread


def read_item(
    item: Any, mesh: Mesh, what: str, pre: int
) -> tuple[Axes, tuple[int, ...] | None, int]:
    """Reads a strategy's item of one dimension: None, 1, "tp", ["dp", "tp"], 4 or {"tp": [3, 1]}.
    Returns (axes, sizes by hand or None, product of the numbers of shards up to this item).

    pre  the product of the numbers of shards before this item: a number takes the next axes
    """
    if item in (None, 1, "-"):
        return (), None, pre
    if isinstance(item, int) and not isinstance(item, bool):
        if item < 1:
            raise StrategyError(f"{what}: {item} is no number of shards; write 1 to split nothing")
        if mesh.size % (pre * item):
            needed = f"{item} shards"
            if pre > 1:
                needed += f", and {pre} by the items before, need {pre * item} ranks"
            raise StrategyError(
                f"{what}: {needed}, but {mesh.size} ranks (mesh {mesh}) do not divide into "
                f"{pre * item}; write another number, or change --devices"
            )
        return mesh.flat(pre, item), None, pre * item
    if isinstance(item, str):
        return *read_split(item, mesh, what), pre
    if isinstance(item, Mapping) and len(item) == 1:
        name, sizes = next(iter(item.items()))
        if isinstance(sizes, Sequence) and all(isinstance(s, int) and s >= 0 for s in sizes):
            return (named_axis(str(name), mesh, what),), tuple(sizes), pre
    if isinstance(item, Sequence) and item and all(isinstance(a, str) for a in item):
        return tuple(named_axis(a, mesh, what) for a in item), None, pre
    raise StrategyError(
        f"{what}: {item!r} is not a split; use null, a number of parts, an axis, a list of axes or "
        "{axis: [sizes]}"
    )


def _tensor_annotation(name: str, entry: Any, sharding: ShardingState) -> TensorAnnotation:
    """Returns the annotation that an entry of `tensors`, a list with an item for each dimension,
    gives a tensor. Errors: StrategyError."""
    factors = sharding.factors.tensors[name]
    what = f"tensor '{name}'"
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != len(factors.dims):
        raise StrategyError(
            f"{what} has {len(factors.dims)} dimensions, but the strategy gives {entry!r}; give "
            "one item for each dimension"
        )
    axes: list[Axes] = []
    parts: dict[int, tuple[int, ...]] = {}
    pre = 1
    for i, (dim, item) in enumerate(zip(factors.dims, entry, strict=True)):
        at = range(len(axes), len(axes) + leaf_count(dim))
        if is_cut(item):
            splits = read_splits(item, dim, sharding.mesh, what)
            over = tuple(dict.fromkeys(a for leaf_axes, _ in splits for a in leaf_axes))
            spread: list[Axes] | None = [leaf_axes for leaf_axes, _ in splits]
            parts |= {j: p for j, (_, p) in zip(at, splits, strict=True) if p}
        else:
            over, sizes, pre = read_item(item, sharding.mesh, what, pre)
            spread = spread_dim(dim, over)
            if spread is not None:
                parts |= _hand_parts(what, at, spread, over, sizes, dim)
        if spread is None:
            text = _does_not_split(f"{what} dimension {i}", dim, over, sharding)
            raise SizeError(text, dim.size)
        axes += spread
    _check_once(what, factors, dict(enumerate(axes)))
    return TensorAnnotation(name, axes, parts, pin=True)


def _hand_parts(
    what: str,
    leaves: Sequence[int],
    spread: Sequence[Axes],
    over: Axes,
    sizes: tuple[int, ...] | None,
    dim: Dim,
) -> dict[int, tuple[int, ...]]:
    """Returns the sizes by hand of a dimension's parts, by the leaf (a part of a dimension) that
    they split; none without `sizes`. Errors: SizeError if they do not add up; StrategyError if the
    dimension has several leaves."""
    if sizes is None:
        return {}
    if len(sizes) != parts_over(over) or sum(sizes) != dim.size:
        raise SizeError(
            f"{what}: the sizes {list(sizes)} must be {parts_over(over)} numbers that add up to "
            f"{dim.size}",
            dim.size,
        )
    if not isinstance(dim, Factor) or len(leaves) != 1 or spread[0] != over:
        raise StrategyError(
            f"{what}: an op merges or cuts this dimension, so its shards cannot be given sizes; "
            "give only the axis"
        )
    return {leaves[0]: sizes}


def _does_not_split(what: str, dim: Dim, axes: Axes, sharding: ShardingState) -> str:
    """Returns the text of an error: these axes cannot split the dimension; with the remedy."""
    over = ".".join(sharding.mesh.text(a) for a in axes)
    n = parts_over(axes)
    fitting = [d for d in range(min(n, dim.size), 1, -1) if dim.size % d == 0]
    remedy = "leave it whole"
    if not isinstance(dim, Factor):
        remedy = "some op reads it as smaller factors; leave it whole"
    elif fitting:
        remedy = f"split it into {fitting[0]}, or leave it whole"
    return f"{what}: {dim.size} elements do not split into {n} parts over {over}; {remedy}"
