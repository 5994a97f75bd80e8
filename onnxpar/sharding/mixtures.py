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
    """A mixture of experts.

    rows        the nodes that compute rows
    share       the share of pairs of an expert and a row that the router chooses; None if unknown
    entering    the tensors with rows outside the mixture that its masks read
    at_experts  the nodes that run at the ranks of experts if ranks exchange rows; empty if ranks
                cannot exchange rows
    moved       the tensors of rows that then cross between ranks
    """

    rows: ExpertRows
    share: float | None
    entering: tuple[gs.Tensor, ...]
    at_experts: tuple[gs.Node, ...]
    moved: tuple[gs.Tensor, ...]


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
            at_experts = nodes_at_experts(rows, shapes)
            moved = tuple(moved_tensors(rows, at_experts))
            read = [before_experts(node.inputs[1], shapes) for node in rows.enter]
            entering = tuple({tensor.name: tensor for tensor in read}.values())
            yield Mixture(rows, chosen_share(rows, shapes), entering, at_experts, moved)
