"""What people ask for: strategy files, MindSpore tuples, presets; and how it lands on factors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from onnxpar.base.plain_yaml import parse
from onnxpar.errors import SizeError, StrategyError
from onnxpar.files.write_file import unread
from onnxpar.layout.layout import Concat, Dim, Factor, leaves
from onnxpar.layout.mesh import Axes, Axis, Mesh, parts_over
from onnxpar.rules.notation import expr_vars
from onnxpar.sharding.factors import GraphFactors, OpFactors, TensorFactors
from onnxpar.sharding.state import ShardingState, overlaps
from onnxpar.strategy.dimension_text import is_cut, read_piece, read_pieces


@dataclass(frozen=True)
class Strategy:
    """A strategy as written: entries of `shard` by node glob, of `tensors` by tensor glob. A node
    is also known by the weights and inputs that it reads.

    An entry is a list per dimension (for `shard`, a list of those per input, of which null says
    nothing; or {factor: ...} of the node's rule) of: null or 1 (whole), a number of parts, an axis
    name, a list of axis names, {axis: [sizes by hand]}, or text as layouts are printed.
    """

    mesh: Mesh | None = None
    shard: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    source: str = "strategy"

    @staticmethod
    def given(
        strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None,
    ) -> Strategy | None:
        """What a caller gives: a file, the same structure in Python, or a strategy."""
        if isinstance(strategy, Mapping):
            return Strategy.of(strategy)
        if isinstance(strategy, (str, os.PathLike)):
            return Strategy.read(os.fspath(strategy))
        return strategy

    @staticmethod
    def read(path: str | Path) -> Strategy:
        """Reads a strategy file (YAML). Errors: StrategyError, naming the file and what is
        wrong."""
        try:
            data = parse(Path(path).read_text())
        except OSError as error:
            raise StrategyError(f"cannot read {path}: {unread(error)}; give a file") from None
        except ValueError as error:
            raise StrategyError(f"{path}: {error}") from None
        return Strategy.of(data or {}, str(path))

    @staticmethod
    def of(data: Any, source: str = "strategy") -> Strategy:
        """A strategy from the same structure in Python."""
        if not isinstance(data, Mapping):
            raise StrategyError(f"{source}: a mapping with mesh, shard and tensors is expected")
        unknown = sorted(set(map(str, data)) - {"mesh", "shard", "tensors"})
        if unknown:
            raise StrategyError(f"{source}: unknown key {unknown[0]!r}; use mesh, shard, tensors")
        mesh = data.get("mesh")
        for key in ("mesh", "shard", "tensors"):
            if data.get(key) is not None and not isinstance(data[key], Mapping):
                raise StrategyError(f"{source}: {key} must be a mapping")
        if mesh and not all(type(n) is int for n in mesh.values()):
            raise StrategyError(f"{source}: mesh sizes must be whole numbers")
        return Strategy(
            Mesh.of((str(k), n) for k, n in mesh.items()) if mesh else None,
            data.get("shard") or {},
            data.get("tensors") or {},
            source,
        )


class Annotation(Protocol):
    """An annotation that waits for its turn: the order of seeds is their priority."""

    def apply(self, sharding: ShardingState) -> bool:
        """Decides leaves that are still open; returns whether any was."""
        ...


@dataclass(frozen=True)
class NodeAnnotation:
    """What a strategy asks of one node: all leaves of the inputs it names are decided."""

    op: OpFactors
    axes: Mapping[int, Axes]
    parts: Mapping[int, tuple[int, ...]]

    def apply(self, sharding: ShardingState) -> bool:
        """Fixes the named leaves, the whole ones too, and those that are tied or bonded to them."""
        for leaf, axes in _with_ties(self.op, self.axes).items():
            sharding.fix(self.op, leaf, axes)
            if leaf in self.parts:
                sharding.parts[self.op.leaves[leaf].atom, axes] = self.parts[leaf]
        return True


@dataclass(frozen=True)
class TensorAnnotation:
    """Axes for leaves of one tensor; `pin` makes it hold that layout whatever its neighbours
    need."""

    tensor: str
    axes: Sequence[Axes | None]
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pin: bool = False

    def apply(self, sharding: ShardingState) -> bool:
        """Decides the leaves that are still open."""
        changed = False
        for leaf, axes in enumerate(self.axes):
            if axes is None:
                continue
            if leaf in self.parts:
                atom = sharding.factors.tensors[self.tensor].leaves[leaf].atom
                sharding.parts[atom, axes] = self.parts[leaf]
            if axes:
                changed |= sharding.assign_tensor(self.tensor, leaf, axes)
            elif sharding.tensors[self.tensor][leaf] is None:
                sharding.tensors[self.tensor][leaf] = ()
        if self.pin:
            sharding.pinned.add(self.tensor)
        return changed


def annotations_of(
    strategy: Strategy, sharding: ShardingState
) -> list[NodeAnnotation | TensorAnnotation]:
    """The strategy's entries, matched against the graph's names: one seed for each node or tensor,
    in which later entries have the last word.

    Errors: StrategyError for a pattern that matches nothing, and for what cannot be met, naming the
    node or tensor and the remedy.
    """
    of_nodes: dict[str, NodeAnnotation] = {}
    of_tensors: dict[str, TensorAnnotation] = {}
    ops = {op.node.name: op for op in sharding.factors.ops}
    readers = readers_of_fed(sharding.factors)
    for pattern, entry in strategy.shard.items():
        nodes = (*ops, *([] if _matches(str(pattern), ops) else readers))
        for name in matching(str(pattern), nodes, "node", strategy.source):
            for op in [ops[name]] if name in ops else readers[name]:
                annotation = _node_annotation(op, entry, sharding)
                earlier = of_nodes.get(op.node.name)
                of_nodes[op.node.name] = (
                    annotation if earlier is None else _joined(earlier, annotation)
                )
    for pattern, entry in strategy.tensors.items():
        for name in matching(str(pattern), sharding.factors.tensors, "tensor", strategy.source):
            of_tensors[name] = _tensor_annotation(name, entry, sharding)
    return [*of_nodes.values(), *of_tensors.values()]


def _joined(earlier: NodeAnnotation, later: NodeAnnotation) -> NodeAnnotation:
    """What two entries ask of one node; of what both decide, the later one has the last word.
    Errors: StrategyError where they split two dimensions over one axis."""
    axes = {**earlier.axes, **later.axes}
    parts = {leaf: sizes for leaf, sizes in earlier.parts.items() if leaf not in later.axes}
    op = later.op
    _check_once(f"{op.node.op} '{op.node.name}'", op, _with_ties(op, axes))
    return NodeAnnotation(op, axes, parts | dict(later.parts))


def readers_of_fed(factors: GraphFactors) -> dict[str, list[OpFactors]]:
    """The nodes that read each weight and input of the graph, by its name."""
    readers: dict[str, list[OpFactors]] = {}
    for op in factors.ops:
        for tensor in op.node.inputs:
            if tensor.name in factors.tensors and not tensor.inputs:
                readers.setdefault(tensor.name, []).append(op)
    return readers


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def matching(pattern: str, names: Iterable[str], what: str, source: str) -> list[str]:
    names = list(names)
    found = [n for n in names if n == pattern] or [n for n in names if fnmatchcase(n, pattern)]
    if not found:
        near = [n for n in names if pattern.strip("*/").lower() in n.lower()][:3] or names[:3]
        raise StrategyError(
            f"{source}: {pattern!r} matches no {what}; there are {', '.join(map(repr, near))} ..."
        )
    return found


def _node_annotation(op: OpFactors, entry: Any, sharding: ShardingState) -> NodeAnnotation:
    what = f"{op.node.op} '{op.node.name}'"
    if isinstance(entry, Mapping):
        return _factor_annotation(op, entry, sharding, what)
    if not isinstance(entry, Sequence) or isinstance(entry, str):
        raise StrategyError(f"{what}: a list of inputs, each a list of dimensions, is expected")
    if len(entry) > len(op.node.inputs):
        raise StrategyError(
            f"{what} has {len(op.node.inputs)} inputs, the strategy speaks of {len(entry)}"
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
            raise StrategyError(f"{what}: input {index} has {rank} dimensions, strategy {dims!r}")
        for axis, ask in enumerate(dims):
            assert tensor is not None
            at = [j for j, d in enumerate(tensor.dim_of_leaf) if d == axis]
            links = [op.inputs[index][j] for j in at]
            if _counted(ask) and links and all(axes.get(k, ()) for k in links if k is not None):
                over = next((axes[k] for k in links if k is not None and axes.get(k)), ())
                if parts_over(over) == ask:
                    continue  # this factor had its axes from an earlier operand
            label = f"input {index} dimension {axis}"
            factors = _factors_of(op, index, axis)
            annotation = _Leaves(op, sharding, f"{what}: {label}", factors, axes, parts)
            pre = annotation.decide(tensor.dims[axis], links, ask, pre)
    _check_once(what, op, _with_ties(op, axes))
    return NodeAnnotation(op, axes, parts)


def _factor_annotation(
    op: OpFactors, entry: Mapping[str, Any], sharding: ShardingState, what: str
) -> NodeAnnotation:
    """What is asked of the factors of the node's rule, by name."""
    axes: dict[int, Axes] = {}
    parts: dict[int, tuple[int, ...]] = {}
    pre = 1
    for factor, ask in entry.items():
        if factor not in op.trees:
            why = "".join(f"; {reason}" for reason in dict.fromkeys(op.whole.values()))
            raise StrategyError(
                f"{what} has no factor {factor!r}; its rule is {op.rule.text()}{why}"
            )
        tree = op.trees[factor]
        at = [i for i, leaf in enumerate(op.leaves) if leaf.factor == factor]
        links = [*at, *[None] * (_leaf_count(tree) - len(at))]
        label = f"{what}: factor {factor}"
        annotation = _Leaves(op, sharding, label, frozenset({factor}), axes, parts)
        pre = annotation.decide(tree, links, ask, pre)
    _check_once(what, op, _with_ties(op, axes))
    return NodeAnnotation(op, axes, parts)


def _factors_of(op: OpFactors, index: int, axis: int) -> frozenset[str]:
    """The factors that an operand's dimension consists of, by the node's rule."""
    spec = op.rule.inputs[index] if index < len(op.rule.inputs) else None
    return frozenset(expr_vars(spec[axis])) if spec and axis < len(spec) else frozenset()


@dataclass
class _Leaves:
    """The leaves of a node that its entry has decided so far, and the factors that are spoken
    of."""

    op: OpFactors
    sharding: ShardingState
    what: str
    factors: frozenset[str]
    axes: dict[int, Axes]
    parts: dict[int, tuple[int, ...]]

    def decide(self, dim: Dim, links: Sequence[int | None], ask: Any, pre: int) -> int:
        """Takes one dimension's entry; returns how many flat parts are in use then."""
        if is_cut(ask):
            pieces = read_pieces(ask, dim, self.sharding.mesh, self.what)
            spread = [over for over, _ in pieces]
            blocked = any(over and k is None for over, k in zip(spread, links, strict=True))
            hand = {k: p for k, (_, p) in zip(links, pieces, strict=True) if k is not None and p}
            if blocked:
                raise StrategyError(f"{self.what}: {ask!r} splits what must stay whole")
        else:
            over, sizes, pre = read_ask(ask, self.sharding.mesh, self.what, pre)
            if over and links and all(link is None for link in links):
                raise StrategyError(f"{self.what} must stay whole ({self._reasons()}); leave it 1")
            spread = _spread(dim, over, links, self.what, self.sharding)
            leaves = [-1 if k is None else k for k in links]
            hand = _hand_parts(self.what, leaves, spread, over, sizes, dim)
        known = {k: a for k, a in zip(links, spread, strict=True) if k is not None}
        for leaf, given in known.items():
            if self.axes.get(leaf) and given and self.axes[leaf] != given:
                raise StrategyError(f"{self.what} is asked for in two ways")
            self.axes[leaf] = given or self.axes.get(leaf, ())
        self.parts |= hand
        return pre

    def _reasons(self) -> str:
        """Why these factors are not split."""
        whole = self.op.whole
        reasons = [whole[f] for f in sorted(self.factors) if f in whole] or whole.values()
        return "; ".join(dict.fromkeys(reasons)) or "it has no factor"


def _with_ties(op: OpFactors, axes: Mapping[int, Axes]) -> dict[int, Axes]:
    """The axes with those of leaves that are split alike, as far as nothing else is said of them:
    rows after a convolution go with those before it."""
    found = dict(axes)
    for group in op.co_sharded:
        split = next((axes[leaf] for leaf in group if axes.get(leaf)), ())
        found |= {leaf: split for leaf in group if split and leaf not in axes}
    return found


def _check_once(what: str, factors: OpFactors | TensorFactors, axes: Mapping[int, Axes]) -> None:
    for own in axes.values():
        twice = next((a for a, b in combinations(own, 2) if a.overlaps(b)), None)
        if twice is not None:
            raise StrategyError(
                f"{what}: {twice.name} splits one of its dimensions twice; use each axis once"
            )
    for (i, a), (j, b) in combinations(axes.items(), 2):
        if (i, j) not in factors.apart and overlaps(a, b):
            raise StrategyError(f"{what}: an axis splits two of its dimensions; use each axis once")


def _counted(ask: Any) -> bool:
    return isinstance(ask, int) and ask != 1


def _spread(
    dim: Dim, over: Axes, links: Sequence[int | None], what: str, sharding: ShardingState
) -> list[Axes]:
    """The axes for the leaves of an operand's dimension; an error where it cannot be split so."""
    blocked = frozenset(j for j, link in enumerate(links) if link is None)
    spread = spread_dim(dim, over, blocked)
    if spread is None:
        raise SizeError(_does_not_split(what, dim, over, sharding))
    return spread


def read_ask(ask: Any, mesh: Mesh, what: str, pre: int) -> tuple[Axes, tuple[int, ...] | None, int]:
    """Reads one dimension's entry: axes, sizes by hand, and how many flat parts are in use then."""
    if ask in (None, 1, "-"):
        return (), None, pre
    if isinstance(ask, int) and not isinstance(ask, bool):
        if ask < 1 or mesh.size % (pre * ask):
            raise StrategyError(
                f"{what}: the strategy asks for {pre * ask} parts, which do not fit {mesh.size} "
                f"devices (mesh {mesh}); lower them, or give more --devices"
            )
        return mesh.flat(pre, ask), None, pre * ask
    if isinstance(ask, str):
        return *read_piece(ask, mesh, what), pre
    if isinstance(ask, Mapping) and len(ask) == 1:
        name, sizes = next(iter(ask.items()))
        if isinstance(sizes, Sequence) and all(isinstance(s, int) and s >= 0 for s in sizes):
            return (mesh.axis(str(name)),), tuple(sizes), pre
    if isinstance(ask, Sequence) and ask and all(isinstance(a, str) for a in ask):
        return tuple(mesh.axis(a) for a in ask), None, pre
    raise StrategyError(
        f"{what}: {ask!r} is no split; use null, a number of parts, an axis, a list of axes or "
        "{axis: [sizes]}"
    )


def _tensor_annotation(name: str, entry: Any, sharding: ShardingState) -> TensorAnnotation:
    factors = sharding.factors.tensors[name]
    what = f"tensor '{name}'"
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != len(factors.dims):
        raise StrategyError(
            f"{what} has {len(factors.dims)} dimensions, the strategy says {entry!r}"
        )
    axes: list[Axes] = []
    parts: dict[int, tuple[int, ...]] = {}
    pre = 1
    for i, (dim, ask) in enumerate(zip(factors.dims, entry, strict=True)):
        at = range(len(axes), len(axes) + _leaf_count(dim))
        if is_cut(ask):
            pieces = read_pieces(ask, dim, sharding.mesh, what)
            over = tuple(dict.fromkeys(a for given, _ in pieces for a in given))
            spread: list[Axes] | None = [given for given, _ in pieces]
            parts |= {j: p for j, (_, p) in zip(at, pieces, strict=True) if p}
        else:
            over, sizes, pre = read_ask(ask, sharding.mesh, what, pre)
            spread = spread_dim(dim, over)
            if spread is not None:
                parts |= _hand_parts(what, at, spread, over, sizes, dim)
        if spread is None:
            raise SizeError(_does_not_split(f"{what} dimension {i}", dim, over, sharding))
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
    if sizes is None:
        return {}
    if len(sizes) != parts_over(over) or sum(sizes) != dim.size:
        raise SizeError(
            f"{what}: sizes by hand {list(sizes)} must be {parts_over(over)} parts "
            f"that add up to {dim.size}"
        )
    if not isinstance(dim, Factor) or len(leaves) != 1 or spread[0] != over:
        raise StrategyError(f"{what}: sizes by hand need a dimension that no op merges or cuts")
    return {leaves[0]: sizes}


def _does_not_split(what: str, dim: Dim, axes: Axes, sharding: ShardingState) -> str:
    over = ".".join(sharding.mesh.text(a) for a in axes)
    n = parts_over(axes)
    fitting = [d for d in range(min(n, dim.size), 1, -1) if dim.size % d == 0]
    remedy = "leave it whole"
    if not isinstance(dim, Factor):
        remedy = "some op reads it in pieces that are smaller; leave it whole"
    elif fitting:
        remedy = f"split it into {fitting[0]}, or leave it whole"
    return f"{what}: {dim.size} elements do not split into {n} parts over {over}; {remedy}"


def spread_dim(dim: Dim, axes: Axes, blocked: frozenset[int] = frozenset()) -> list[Axes] | None:
    """Axes for the splittable leaves of a dimension, so that it is split over all of them.

    Of merged factors the first takes them that divides evenly, else the first that is large enough,
    else the largest, of which some parts are empty then; of segments each that can. `blocked`
    leaves stay whole. None where all are.
    """
    found = _spread_over(dim, axes, blocked)
    if found is not None or not axes:
        return found
    if dim.size <= 1:
        return []
    at = [i for i, leaf in enumerate(_splittable(dim)) if i not in blocked]
    if not at:
        return None
    if isinstance(dim, Concat):
        return [axes if i in at else () for i in range(_leaf_count(dim))]
    largest = max(at, key=lambda i: _splittable(dim)[i].size)
    return [axes if i == largest else () for i in range(_leaf_count(dim))]


def _splittable(dim: Dim) -> list[Factor]:
    return [leaf for leaf in leaves(dim) if leaf.size > 1]


def _spread_over(dim: Dim, axes: Axes, blocked: frozenset[int]) -> list[Axes] | None:
    """The same where no part is empty; None where nothing is large enough."""
    if isinstance(dim, Factor):
        if not axes:
            return [()] if dim.size > 1 else []
        return [axes] if parts_over(axes) <= dim.size and 0 not in blocked else None
    empty = [[()] * _leaf_count(c) for c in dim.children]
    starts = [sum(map(len, empty[:i])) for i in range(len(empty))]
    inner = [
        frozenset(j - s for j in blocked if s <= j < s + len(e))
        for s, e in zip(starts, empty, strict=True)
    ]
    if not axes:
        return [a for e in empty for a in e]
    if isinstance(dim, Concat):
        split = [_spread_over(c, axes, b) for c, b in zip(dim.children, inner, strict=True)]
        if all(s is None for s in split):
            return None
        return [a for s, e in zip(split, empty, strict=True) for a in (e if s is None else s)]
    n = parts_over(axes)
    ranked = [i for i, c in enumerate(dim.children) if c.size % n == 0]
    ranked += [i for i, c in enumerate(dim.children) if c.size >= n and i not in ranked]
    for i in ranked:
        taken = _spread_over(dim.children[i], axes, inner[i])
        if taken is not None:
            return [a for j, e in enumerate(empty) for a in (taken if i == j else e)]
    nestable = all(isinstance(c, Factor) for c in dim.children) and not blocked
    return nest([c.size for c in dim.children], axes) if nestable else None


def _leaf_count(dim: Dim) -> int:
    return len(_splittable(dim))


def nest(sizes: Sequence[int], axes: Axes) -> list[Axes] | None:
    """Several factors share one axis: 2 heads groups by 4 heads over tp=8 are tp:(1)2 and
    tp:(2)4."""
    out: list[Axes] = []
    rest = list(axes)
    for size in sizes:
        taken: list[Axis] = []
        while rest and size % rest[0].size == 0:
            size //= rest[0].size
            taken.append(rest.pop(0))
        if rest and size > 1 and rest[0].size % size == 0:
            axis = rest.pop(0)
            taken.append(Axis(axis.name, size, axis.pre))
            rest.insert(0, Axis(axis.name, axis.size // size, axis.pre * size))
        out.append(tuple(taken))
    return None if rest else out
