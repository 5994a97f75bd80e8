"""Reshards: nodes of the global graph that take tensors from one layout to another.

Their ops have the names of collectives (`AllReduce`, `LocalSlice`), but a domain of their own: the
plugin does not know them. In the global program each is an identity; localize-ops turns it into the
plugin's collectives and ordinary ops. Only this module knows how a node stores its layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.layout.layout import Layout
from onnxpar.layout.mesh import Axes

_DOMAIN = "onnxpar.reshard"
_KEY = "reshard"


@dataclass(frozen=True)
class Reshard:
    """The description of a reshard node.

    kind     the name of a row of `KINDS`, such as "AllGather"
    axes     the mesh axes of its groups
    members  (layout before, layout after) of each operand; a fused reshard has several
    share    the fraction of the elements that ranks really send: of the rows of all experts, the
             chosen ones
    """

    kind: str
    axes: Axes
    members: tuple[tuple[Layout, Layout], ...]
    share: float = 1.0

    @property
    def before(self) -> Layout:
        """The layout of the first operand."""
        return self.members[0][0]

    @property
    def after(self) -> Layout:
        """The layout of the first result."""
        return self.members[0][1]


def reshard_node(
    name: str, reshard: Reshard, inputs: Sequence[gs.Tensor], outputs: Sequence[gs.Tensor]
) -> gs.Node:
    """Returns a node that reshards these inputs to these outputs, one for each."""
    return gs.Node(reshard.kind, name, {_KEY: reshard}, list(inputs), list(outputs), domain=_DOMAIN)


def is_reshard(node: gs.Node) -> bool:
    """True for a reshard; False for any other node, also for a collective of the plugin."""
    return bool(node.domain == _DOMAIN)


def reshard_of(node: gs.Node) -> Reshard:
    """The description of a reshard node."""
    reshard: Reshard = node.attrs[_KEY]
    return reshard


def set_reshard(node: gs.Node, reshard: Reshard) -> None:
    """Replaces the axes or layouts of a reshard node; its kind must stay."""
    assert node.op == reshard.kind, (node.op, reshard.kind)
    node.attrs = {_KEY: reshard}


def operands_of(node: gs.Node) -> list[tuple[gs.Tensor, Layout, Layout]]:
    """Returns (operand, layout before, layout after) for each operand of a reshard node."""
    return [(t, *layouts) for t, layouts in zip(node.inputs, reshard_of(node).members, strict=True)]
