"""Values of the graph that differ between ranks, and nodes of collectives."""

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
    """Values of the shared graph that depend on the rank, each as a function of the rank; the graph
    itself has rank 0's.

    constants   by name
    attributes  by (node, attribute); where the function returns None, the rank does not have the
                attribute
    stand_ins   for constants that hold sizes: which sizes count as one element on ranks with an
                empty shard, as (size, axes that split it)
    """

    constants: dict[str, Callable[[int], Array]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Callable[[int], Any]] = field(default_factory=dict)
    stand_ins: dict[str, frozenset[tuple[int, Axes]]] = field(default_factory=dict)

    def copy_attributes(self, node: str, copy: str) -> None:
        """Registers all attributes of the node named `node` that depend on the rank also for its
        copy, the node named `copy`."""
        for (name, key), function in list(self.attributes.items()):
            if name == node:
                self.attributes[copy, key] = function


@dataclass(frozen=True)
class _GroupOf:
    """A function from a rank to its group: the ranks that differ from it only along these axes.
    Equal objects give equal groups, so the groups of thousands of ranks need not be compared for
    each collective."""

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
    """Returns the node of a collective with operand x and result y, over the ranks that differ only
    along these axes. An attribute may be a function of the rank, which is recorded in `per_rank`.
    """
    attrs["group"] = _GroupOf(mesh, axes)
    for key, value in attrs.items():
        if callable(value):
            per_rank.attributes[name, key] = value
    now = {key: value(0) if callable(value) else value for key, value in attrs.items()}
    return gs.Node(kind, name, now, [x], [y], domain=DOMAIN)


_INNER = "onnxpar.inner"


@dataclass(frozen=True)
class InnerCollective:
    """For the plan: the mesh axes of a collective that ranks run inside one op of the model (a
    split softmax), and the shape on rank 0 of its operand or result, whichever is larger."""

    axes: Axes
    shape: tuple[int, ...]


def note_inner(node: gs.Node, inner: InnerCollective) -> None:
    """Attaches an InnerCollective to the node of the collective."""
    node.attrs[_INNER] = inner


def take_inner(node: gs.Node) -> InnerCollective:
    """Removes the InnerCollective from a node and returns it."""
    inner: InnerCollective = node.attrs.pop(_INNER)
    return inner
