"""Mixtures of experts: the share of rows that a router chooses, and the nodes that run at the ranks
of experts if ranks exchange rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import scopes
from onnxpar.layout.layout import Layout
from onnxpar.sharding.expert_cut import is_stored, moved_tensors, nodes_at_experts
from onnxpar.sharding.expert_rows import ExpertRows, Shapes, before_experts, known_shapes
from onnxpar.sharding.find_expert_rows import find_expert_rows

_MATCHES = ("Equal", "OneHot")
"""Ops that compare the expert indices that a router chose with the indices of all experts."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in a graph.

    rows        its nodes that compute rows [expert, row, column]
    share       the share of all pairs (expert, row) that the router chooses; None if unknown
    entering    the tensors with rows of tokens from outside that its masks read
    at_experts  the nodes that run at the ranks of experts if ranks exchange rows; empty if ranks
                cannot exchange rows
    moved       the tensors of rows that cross between ranks if ranks exchange rows
    """

    rows: ExpertRows
    share: float | None
    entering: tuple[gs.Tensor, ...]
    at_experts: tuple[gs.Node, ...]
    moved: tuple[gs.Tensor, ...]


@dataclass(frozen=True)
class CompactedMixture:
    """A mixture of experts for which ranks compute only the rows that the router chooses.

    name    the mixture's result in the unsplit model
    node    the node of the ranks' graphs that gives the number of chosen rows of each expert
    layout  the layout of [expert, row, column] where experts compute
    """

    name: str
    node: str
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        """Returns the mixture as an entry of plan.json."""
        layout, experts = self.layout.to_json(), self.layout.shape[0]
        return {"name": self.name, "node": self.node, "experts": experts, "layout": layout}


def chosen_share(mixture: ExpertRows, shapes: Shapes) -> float | None:
    """Returns the share of all pairs (expert, row) that a mixture's router chooses: 0.25 for 2 of 8
    experts. None if unknown. The router gives its choices as expert indices, and each index stands
    for at most one row of one expert."""
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
    """Yields the mixtures of experts of a graph and of the bodies of its nodes."""
    shapes = known_shapes(graph)
    for scope in scopes(graph):
        for rows in find_expert_rows(scope, shapes):
            at_experts = nodes_at_experts(rows, shapes)
            moved = tuple(moved_tensors(rows, at_experts))
            read = [before_experts(node.inputs[1], shapes) for node in rows.enter]
            entering = tuple({tensor.name: tensor for tensor in read}.values())
            yield Mixture(rows, chosen_share(rows, shapes), entering, at_experts, moved)
