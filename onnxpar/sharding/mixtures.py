"""Mixtures of experts: the share of chosen rows, and the part that runs at the ranks of experts.

x = Where(chosen, tokens, 0)                  at the rank of the tokens
...    nodes with weights of experts          at the rank of the expert
ReduceSum(Where(chosen, z * weight, 0))       at the rank of the tokens
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import scopes
from onnxpar.layout.layout import Layout
from onnxpar.sharding.expert_rows import (
    RANK,
    ExpertRows,
    Role,
    Shapes,
    known_shapes,
)
from onnxpar.sharding.find_expert_rows import find_expert_rows

_MATCHES = ("Equal", "OneHot")
"""Ops that compare the expert indices that a router chose with the indices of all experts."""

_PREPARES = frozenset(
    [
        "Cast",
        "DequantizeLinear",
        "Identity",
        "Range",
        "Reshape",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Ops that prepare stored values for the nodes that read them."""


@dataclass(frozen=True)
class ExpertPart:
    """The nodes of a mixture that experts compute, in graph order, and their only `result`."""

    nodes: tuple[gs.Node, ...]
    result: gs.Tensor


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts.

    rows   the nodes that compute rows
    share  the share of pairs of an expert and a row that the router chooses; None if unknown
    part   the nodes that run at the ranks of experts if ranks exchange rows; None if they cannot
    """

    rows: ExpertRows
    share: float | None
    part: ExpertPart | None

    @property
    def moved(self) -> list[gs.Tensor]:
        """The tensors of rows that enter the experts, and their result, if ranks can exchange
        rows."""
        if self.part is None:
            return []
        return [*(node.outputs[0] for node in self.rows.enter), self.part.result]


@dataclass(frozen=True)
class CompactedMixture:
    """A mixture of which ranks compute the chosen rows alone.

    name    its result in the unsplit model
    node    the node of the ranks' graphs that splits the numbers of rows by expert
    layout  of [expert, row, column] where experts compute
    """

    name: str
    node: str
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        """Returns the mixture in the form that plan.json has."""
        layout, experts = self.layout.to_json(), self.layout.shape[0]
        return {"name": self.name, "node": self.node, "experts": experts, "layout": layout}


def expert_part(mixture: ExpertRows, shapes: Shapes) -> ExpertPart | None:
    """The nodes up to the last node with a weight of experts; None if they read other rows than the
    entering rows, have several results, or belong to a training step."""
    if mixture.leave is None:
        return None
    stored: dict[int, bool] = {}
    owners = [
        n for n in mixture.inside if n.op == "MatMul" or _reads_weight(n, mixture, shapes, stored)
    ]
    nodes = _upstream(owners, mixture.inside)
    rows = {id(t) for node in (*nodes, *mixture.enter) for t in node.outputs}
    members = {id(node) for node in nodes}
    leaving = {
        id(t): t for node in nodes for t in node.outputs
        if any(id(reader) not in members for reader in t.outputs)
    }  # fmt: skip
    if len(leaving) != 1:
        return None
    for node in mixture.inside:
        for tensor in node.inputs:
            if id(node) in members:
                is_known = id(tensor) in rows or is_stored(tensor, stored)
            else:
                is_known = id(tensor) not in rows or id(tensor) in leaving
            if tensor.name and not is_known:
                return None
    return ExpertPart(tuple(nodes), next(iter(leaving.values())))


def chosen_share(mixture: ExpertRows, shapes: Shapes) -> float | None:
    """The share of pairs of an expert and a row that the router chooses; None if unknown. The
    router gives its choices as expert indices; a choice is at most one row of one expert."""
    experts, rows, _ = shapes[mixture.chosen.name]
    todo, seen = deque([mixture.chosen]), {id(mixture.chosen)}
    while todo:
        for node in todo.popleft().inputs:
            if node.op in _MATCHES:
                stored: dict[int, bool] = {}
                count = 2 if node.op == "Equal" else 1
                choices = [t for t in node.inputs[:count] if not is_stored(t, stored)]
                if len(choices) != 1 or choices[0].name not in shapes:
                    return None
                chosen = math.prod(shapes[choices[0].name])
                return min(chosen / max(experts * rows, 1), 1.0)
            fresh = [t for t in node.inputs if t.name and id(t) not in seen]
            seen |= {id(t) for t in fresh}
            todo += fresh
    return None


def find_mixtures(graph: gs.Graph) -> Iterator[Mixture]:
    """Yields the mixtures of a graph and its bodies."""
    shapes = known_shapes(graph)
    for scope in scopes(graph):
        for rows in find_expert_rows(scope, shapes):
            yield Mixture(rows, chosen_share(rows, shapes), expert_part(rows, shapes))


def _reads_weight(
    node: gs.Node, mixture: ExpertRows, shapes: Shapes, stored: dict[int, bool]
) -> bool:
    """True if a node reads a stored operand with a matrix for each expert."""
    experts = shapes[mixture.chosen.name][0]
    return any(
        t.name in shapes
        and len(shapes[t.name]) == RANK
        and shapes[t.name][0] == experts > 1
        and is_stored(t, stored)
        for t in node.inputs
    )


def _upstream(owners: Collection[gs.Node], inside: Collection[gs.Node]) -> list[gs.Node]:
    """The nodes of `inside` on which owners depend, and the owners, in graph order."""
    within = {id(node) for node in inside}
    needed: set[int] = set()
    todo = list(owners)
    while todo:
        node = todo.pop()
        if id(node) in within and id(node) not in needed:
            needed.add(id(node))
            todo += [maker for t in node.inputs for maker in t.inputs]
    return [node for node in inside if id(node) in needed]


def is_stored(tensor: gs.Tensor, known: dict[int, bool]) -> bool:
    """True if a tensor is stored with the model, or is computed from stored tensors alone."""
    if id(tensor) not in known:
        known[id(tensor)] = False
        maker = tensor.inputs[0] if tensor.inputs else None
        known[id(tensor)] = is_weight(tensor) or (
            maker is not None
            and maker.op in _PREPARES
            and all(is_stored(t, known) for t in maker.inputs if t.name)
        )
    return known[id(tensor)]


@dataclass(frozen=True)
class Crossing:
    """The nodes of a mixture whose rows cross between ranks.

    there   the exchanges that take rows to the ranks of experts
    inside  the nodes between the exchanges, which run at the ranks of experts
    back    the exchange that takes results to the ranks of the rows
    after   the nodes after `back`, before the sum over experts
    """

    there: tuple[gs.Node, ...]
    inside: tuple[gs.Node, ...]
    back: gs.Node
    after: tuple[gs.Node, ...]


def crossing(mixture: ExpertRows) -> Crossing | None:
    """The exchanges of a mixture's rows between ranks; None if ranks exchange other tensors."""
    if mixture.leave is None or mixture.of(Role.REDUCED):
        return None
    entered = {id(node) for node in mixture.enter}
    exchanges = mixture.of(Role.CROSSING)
    there = [n for n in exchanges if n.inputs[0].inputs and id(n.inputs[0].inputs[0]) in entered]
    backs = [node for node in exchanges if not any(node is n for n in there)]
    if len(backs) != 1 or len(there) != len(entered) or not all(map(_goes, there)):
        return None
    (back,) = backs
    late: set[int] = {id(back)}
    for node in mixture.inside:
        if any(id(maker) in late for t in node.inputs for maker in t.inputs):
            late.add(id(node))
    moved = {id(node) for node in exchanges}
    after = tuple(n for n in mixture.inside if id(n) in late and id(n) not in moved)
    inside = tuple(n for n in mixture.inside if id(n) not in late and id(n) not in moved)
    apart = {id(node) for node in inside}
    readers = [*after, mixture.leave]
    leaks = any(id(m) in apart | entered for n in readers for t in n.inputs for m in t.inputs)
    turns = (back.attrs.get("split_axis"), back.attrs.get("concat_axis")) == (1, 0)
    reads = [m for n in inside for t in n.inputs for m in t.inputs]
    if leaks or not turns or any(id(maker) in entered for maker in reads):
        return None
    return Crossing(tuple(there), inside, back, after)


def _goes(node: gs.Node) -> bool:
    return (node.attrs.get("split_axis"), node.attrs.get("concat_axis")) == (0, 1)
