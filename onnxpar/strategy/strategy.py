"""Strategies as users write them, and annotations: the requests for layouts of single nodes and
tensors into which strategies, presets and a model's own annotations are converted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from onnxpar.base.errors import StrategyError
from onnxpar.base.plain_yaml import parse, read_text
from onnxpar.base.unreadable import cannot_read
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState

Groups = tuple[tuple[int, ...], ...]
"""Lists of ranks that run collectives together."""
_KEYS = ("mesh", "shard", "tensors", "place", "groups", "context")


@dataclass(frozen=True)
class Strategy:
    """A strategy as written: entries of `shard` by node glob, of `tensors` by tensor glob. The name
    of a weight or input in `shard` stands for the nodes that read it.

    mesh     the mesh; None if the strategy has none
    shard    by node: a list with an item of `tensors` for each input of the node (null leaves an
             input open), or a mapping from factors of the node's rule to items
    tensors  by tensor: a list with one item per dimension: null or 1 (whole), a number of parts, an
             axis name, a list of axis names, {axis: [sizes by hand]}, or text as layouts are
             printed
    source   the file, for errors
    groups   named groups of ranks, for collectives of a manual program
    context  settings under the names of MindSpore's `set_auto_parallel_context`
    place    by table: `host` keeps an embedding table in files
    """

    mesh: Mesh | None = None
    shard: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    source: str = "strategy"
    groups: Mapping[str, Groups] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    place: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_argument(
        strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None,
    ) -> Strategy | None:
        """Returns the strategy that a caller gives as a file, a mapping, or a Strategy; None stays
        None."""
        if isinstance(strategy, Mapping):
            return Strategy.of(strategy)
        if isinstance(strategy, (str, os.PathLike)):
            return Strategy.read(os.fspath(strategy))
        return strategy

    @staticmethod
    def read(path: str | Path) -> Strategy:
        """Reads a strategy file (YAML). Errors: StrategyError, which names the file and the
        mistake."""
        try:
            data = parse(read_text(path))
        except OSError as error:
            raise StrategyError(cannot_read(path, error)) from None
        except ValueError as error:
            raise StrategyError(f"{path}: {error}") from None
        return Strategy.of(data or {}, str(path))

    @staticmethod
    def of(data: Any, source: str = "strategy") -> Strategy:
        """Returns the strategy in a mapping with the structure of a strategy file; `source` names
        the file in errors. Errors: StrategyError."""
        if not isinstance(data, Mapping):
            raise StrategyError(f"{source}: expected a mapping with mesh, shard and tensors")
        unknown = sorted(set(map(str, data)) - set(_KEYS))
        if unknown:
            raise StrategyError(f"{source}: unknown key {unknown[0]!r}; use {', '.join(_KEYS)}")
        mesh = data.get("mesh")
        for key in _KEYS:
            if data.get(key) is not None and not isinstance(data[key], Mapping):
                raise StrategyError(f"{source}: {key} must be a mapping")
        if mesh and not all(type(n) is int for n in mesh.values()):
            raise StrategyError(
                f"{source}: mesh sizes must be whole numbers, as in {{dp: 2, tp: 4}}"
            )
        return Strategy(
            Mesh.of((str(k), n) for k, n in mesh.items()) if mesh else None,
            data.get("shard") or {},
            data.get("tensors") or {},
            source,
            {str(k): _groups(k, v, source) for k, v in (data.get("groups") or {}).items()},
            data.get("context") or {},
            data.get("place") or {},
        )


def _groups(name: Any, entry: Any, source: str) -> Groups:
    """Returns the lists of ranks of a named group: one list of ranks, or several disjoint lists.
    Errors: StrategyError."""
    lists = entry if isinstance(entry, list) and entry and type(entry[0]) is list else [entry]
    if not all(isinstance(r, list) and r and all(type(n) is int for n in r) for r in lists):
        raise StrategyError(
            f"{source}: group {name!r} is {entry!r}; give a list of ranks, as in [0, 3], or "
            "several, as in [[0, 3], [1, 2]]"
        )
    return tuple(map(tuple, lists))


class Annotation(Protocol):
    """A request for the layouts of nodes and tensors. Annotations apply in the order of their
    priority: a later one decides only leaves (parts of dimensions) that earlier ones left
    undecided."""

    def apply(self, sharding: ShardingState) -> bool:
        """Decides leaves (parts of dimensions) that are still undecided. True if a leaf was
        split."""
        ...


@dataclass(frozen=True)
class NodeAnnotation:
    """A request for a node: the axes of some of its leaves (parts of dimensions), by index, and the
    sizes of their parts if the user gave them."""

    op: OpFactors
    axes: Mapping[int, Axes]
    parts: Mapping[int, tuple[int, ...]]

    def apply(self, sharding: ShardingState) -> bool:
        """Fixes these leaves (parts of dimensions), also the leaves that shall stay whole, and the
        leaves that must have the same axes (co-sharded leaves of the node, and leaves of nodes that
        onnxruntime fuses with it)."""
        for leaf, axes in with_co_sharded(self.op, self.axes).items():
            sharding.fix(self.op, leaf, axes)
            if leaf in self.parts:
                sharding.parts[self.op.leaves[leaf].atom, axes] = self.parts[leaf]
        return True


@dataclass(frozen=True)
class TensorAnnotation:
    """A request for a tensor.

    axes   the axes of each leaf (a part of a dimension); () for whole, None for a leaf that stays
           open
    parts  the sizes of a leaf's parts, by index of the leaf, if the user gave them
    pin    True if the tensor keeps this layout even if its producer or readers require another
    """

    tensor: str
    axes: Sequence[Axes | None]
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pin: bool = False

    def apply(self, sharding: ShardingState) -> bool:
        """Decides the leaves (parts of dimensions) that are still undecided. True if a leaf was
        split."""
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


def with_co_sharded(op: OpFactors, axes: Mapping[int, Axes]) -> dict[int, Axes]:
    """Returns `axes` with axes for co-sharded leaves (parts of dimensions) that have none yet: the
    rows after a convolution are split over the same axes as the rows before it."""
    all_axes = dict(axes)
    for group in op.co_sharded:
        split = next((axes[leaf] for leaf in group if axes.get(leaf)), ())
        all_axes |= {leaf: split for leaf in group if split and leaf not in axes}
    return all_axes
