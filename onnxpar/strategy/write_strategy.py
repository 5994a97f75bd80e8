"""Writes splits of nodes and tensors as entries of a strategy file, from which onnxpar reads the
same splits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

from onnxpar.layout.layout import Dim, Factor
from onnxpar.layout.mesh import Axes, Mesh, merge_axes
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.dimension_text import LeafSplit, dim_text, split_text
from onnxpar.strategy.spread import spread_dim
from onnxpar.strategy.strategy import Strategy

Splits = Sequence[LeafSplit]


def node_entry(op: OpFactors, splits: Splits, sharding: ShardingState) -> Any:
    """Returns the entry of a node whose leaves (parts of dimensions) have these splits: a list with
    an item for each input."""
    entry: list[Any] = []
    for tensor, links in zip(op.node.inputs, op.inputs, strict=True):
        if all(link is None for link in links):
            entry.append(None)
        else:
            dims, splits_of_dim = _operand(tensor.name, links, splits, sharding)
            entry.append([_item(d, *splits_of_dim[i], sharding.mesh) for i, d in enumerate(dims)])
    while entry and entry[-1] is None:
        entry.pop()
    return entry


def factor_entry(op: OpFactors, splits: Splits, mesh: Mesh) -> Any:
    """Returns the entry of a node by factors of its rule, such as {"n": "tp"}; this form can
    express every split."""
    entry: dict[str, Any] = {}
    for name, tree in op.trees.items():
        factor_splits = [
            s for s, leaf in zip(splits, op.leaves, strict=True) if leaf.factor == name
        ]
        if factor_splits:
            missing = _count(tree) - len(factor_splits)
            blocked = frozenset(range(len(factor_splits), len(factor_splits) + missing))
            entry[name] = _item(tree, [*factor_splits, *[((), None)] * missing], blocked, mesh)
    return entry


def tensor_entry(name: str, splits: Splits, sharding: ShardingState) -> Any:
    """Returns the entry of a tensor whose leaves (parts of dimensions) have these splits: a list
    with an item for each dimension."""
    links = range(len(splits))
    dims, splits_of_dim = _operand(name, links, splits, sharding)
    return [_item(dim, *splits_of_dim[i], sharding.mesh) for i, dim in enumerate(dims)]


def _operand(
    name: str, links: Sequence[int | None], splits: Splits, sharding: ShardingState
) -> tuple[Sequence[Dim], list[tuple[list[LeafSplit], frozenset[int]]]]:
    """Returns the dimensions of a tensor and, for each dimension, (the splits of its leaves, the
    indices of leaves that must stay whole). `links` has for each leaf (a part of a dimension) its
    index in `splits`, or None."""
    factors = sharding.factors.tensors[name]
    splits_of_dim = []
    for axis in range(len(factors.dims)):
        dim_links = [k for k, d in zip(links, factors.dim_of_leaf, strict=True) if d == axis]
        blocked = frozenset(i for i, k in enumerate(dim_links) if k is None)
        splits_of_dim.append(([((), None) if k is None else splits[k] for k in dim_links], blocked))
    return factors.dims, splits_of_dim


def _item(dim: Dim, splits: Splits, blocked: frozenset[int], mesh: Mesh) -> Any:
    """Returns the shortest item of a dimension that onnxpar reads as these splits of its leaves
    (parts of dimensions): "tp", or `2*tp*16` if nothing shorter does."""
    requested = [axes for axes, _ in splits]
    if not any(requested):
        return None
    by_hand = any(parts for _, parts in splits)
    first = next(axes for axes in requested if axes)
    for over in (first, merge_axes(tuple(a for axes in requested for a in axes))):
        if not (by_hand and (not isinstance(dim, Factor) or len(splits) > 1)):
            spread = spread_dim(dim, over, blocked)
            if spread is not None and [merge_axes(a) for a in spread] == requested:
                return _simple(over, splits[0][1] if by_hand else None, mesh)
    return dim_text(dim, splits, mesh)


def _simple(axes: Axes, parts: tuple[int, ...] | None, mesh: Mesh) -> Any:
    """Returns the item of a dimension with one leaf (a part of a dimension) to split: "tp", ["dp",
    "tp"], {"tp": [3, 1]} or text."""
    names = [mesh.text(axis) for axis in axes]
    is_named = all(name in mesh.sizes for name in names)
    if parts is not None and is_named and len(names) == 1:
        return {names[0]: list(parts)}
    if parts is not None or not is_named:
        return split_text((axes, parts), mesh)
    return names if len(names) > 1 else names[0]


def _count(dim: Dim) -> int:
    """Returns the number of leaves (parts of dimensions) of a dimension with two or more
    elements."""
    if isinstance(dim, Factor):
        return int(dim.size > 1)
    return sum(map(_count, dim.children))


def strategy_text(strategy: Strategy, comment: str) -> str:
    """Returns the strategy as YAML, one entry per line, after `comment`."""
    lines = [f"# {comment}"]
    if strategy.mesh is not None:
        sizes = ", ".join(f"{name}: {size}" for name, size in strategy.mesh.shape)
        lines.append(f"mesh: {{{sizes}}}")
    for key, entries in (("shard", strategy.shard), ("tensors", strategy.tensors)):
        if entries:
            lines += [f"{key}:", *(f"  {_key(k)}: {_value(v)}" for k, v in entries.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    """Returns a name as a key in YAML, quoted if it must be."""
    is_plain = re.fullmatch(r"[A-Za-z_/][\w./*-]*", name) and yaml.safe_load(name) == name
    return name if is_plain else json.dumps(name)


def _value(entry: Any) -> str:
    """Returns an entry as YAML on one line, in flow style."""
    text: str = yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=1 << 20)
    return text.strip()
