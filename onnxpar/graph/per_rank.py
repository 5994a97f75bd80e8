"""Values that differ between ranks, and the collectives of the graph that each rank runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.graph.collectives import DOMAIN
from onnxpar.layout.mesh import Axes, Mesh


@dataclass
class PerRank:
    """Constants (by name) and attributes (by node and attribute) as functions of the rank. The
    graph itself has rank 0's values. If an attribute's function returns None for a rank, the rank
    does not have the attribute.

    `stand_ins` tells, by constant, which sizes the constant counts as one element where a shard is
    empty: (size, axes that split it).
    """

    constants: dict[str, Callable[[int], Array]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Callable[[int], Any]] = field(default_factory=dict)
    stand_ins: dict[str, frozenset[tuple[int, Axes]]] = field(default_factory=dict)

    def copy_attributes(self, node: str, copy: str) -> None:
        """Gives the node `copy`, a copy of `node`, the attributes of `node` that depend on the
        rank."""
        for (name, key), function in list(self.attributes.items()):
            if name == node:
                self.attributes[copy, key] = function


@dataclass(frozen=True)
class _GroupOf:
    """The group of a rank: the ranks that differ from it only along these axes. Equal objects give
    equal groups, so that the groups of thousands of ranks need not be computed for each
    collective."""

    mesh: Mesh
    axes: Axes

    def __call__(self, rank: int) -> list[int]:
        return list(self.mesh.group(self.axes, rank))


def collective_node(
    kind: str,
    name: str,
    x: gs.Tensor,
    y: gs.Tensor,
    axes: Axes,
    mesh: Mesh,
    per_rank: PerRank,
    **attrs: Any,
) -> gs.Node:
    """Returns a node of a collective, from x to y, over the ranks that differ only in these axes.
    An attribute can be a function of the rank, which is recorded in `per_rank`."""
    attrs["group"] = _GroupOf(mesh, axes)
    for key, value in attrs.items():
        if callable(value):
            per_rank.attributes[name, key] = value
    now = {key: value(0) if callable(value) else value for key, value in attrs.items()}
    return gs.Node(kind, name, now, [x], [y], domain=DOMAIN)


_INNER = "onnxpar.inner"


@dataclass(frozen=True)
class InnerCollective:
    """The plan's data on a collective that ranks run inside one op of the model: its mesh axes, and
    the shape of its operand or of its result on rank 0, whichever is larger."""

    axes: Axes
    shape: tuple[int, ...]


def note_inner(node: gs.Node, inner: InnerCollective) -> None:
    """Attaches the plan's data to the node of a collective inside an op."""
    node.attrs[_INNER] = inner


def take_inner(node: gs.Node) -> InnerCollective:
    """Removes and returns the data that `note_inner` attached to a node."""
    inner: InnerCollective = node.attrs.pop(_INNER)
    return inner
