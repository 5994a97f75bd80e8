"""Values that differ between ranks, and the collectives of the graph that each rank runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.base.arrays import Array
from onnxpar.ir.collectives import DOMAIN
from onnxpar.layout.mesh import Axes, Mesh


@dataclass
class PerRank:
    """Constants (by name) and attributes (by node and attribute) as functions of the rank.

    The graph itself has the values of rank 0. `stand_ins` are, by constant, sizes with the axes
    that split them: an empty shard of such a size counts as one element in the constant.
    """

    constants: dict[str, Callable[[int], Array]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Callable[[int], Any]] = field(default_factory=dict)
    stand_ins: dict[str, frozenset[tuple[int, Axes]]] = field(default_factory=dict)


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
    """A collective over the ranks that differ only in these axes. An attribute can be a function of
    the rank."""
    attrs["group"] = lambda rank: list(mesh.group(axes, rank))
    for key, value in attrs.items():
        if callable(value):
            per_rank.attributes[name, key] = value
    now = {key: value(0) if callable(value) else value for key, value in attrs.items()}
    return gs.Node(kind, name, now, [x], [y], domain=DOMAIN)
