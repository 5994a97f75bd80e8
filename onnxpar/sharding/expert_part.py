"""The part of a mixture of experts that experts themselves compute, and how many rows they get.

x = Where(chosen, tokens, 0)                  at the rank of the tokens
...    nodes with weights of experts          at the rank of the expert
ReduceSum(Where(chosen, z * weight, 0))       at the rank of the tokens
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain

import onnx_graphsurgeon as gs

from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import scopes
from onnxpar.sharding.chosen_rows import (
    RANK,
    ChosenRows,
    Shapes,
    find_chosen_rows,
    known_shapes,
)
from onnxpar.sharding.trained_rows import TrainedRows, find_trained_rows

_MATCHES = ("Equal", "OneHot")
"""Ops that compare the numbers of a router's choices with the numbers of experts."""

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
"""Ops that bring stored values into the form in which nodes read them."""


@dataclass(frozen=True)
class ExpertPart:
    """What experts compute of a mixture: `nodes` in graph order, and the `result` that they
    leave."""

    nodes: tuple[gs.Node, ...]
    result: gs.Tensor


def expert_part(found: ChosenRows, shapes: Shapes) -> ExpertPart | None:
    """The nodes up to the last one with a weight of experts; None if they read rows other than
    those that enter, or leave several results."""
    stored: dict[int, bool] = {}
    owners = [
        n for n in found.inside if n.op == "MatMul" or _reads_weight(n, found, shapes, stored)
    ]
    nodes = _upstream(owners, found.inside)
    kept = {id(t) for node in (*nodes, *found.enter) for t in node.outputs}
    members = {id(node) for node in nodes}
    leaving = {
        id(t): t for node in nodes for t in node.outputs
        if any(id(reader) not in members for reader in t.outputs)
    }  # fmt: skip
    if len(leaving) != 1:
        return None
    for node in found.inside:
        for tensor in node.inputs:
            if id(node) in members:
                is_known = id(tensor) in kept or is_stored(tensor, stored)
            else:
                is_known = id(tensor) not in kept or id(tensor) in leaving
            if tensor.name and not is_known:
                return None
    return ExpertPart(tuple(nodes), next(iter(leaving.values())))


def chosen_share(found: ChosenRows | TrainedRows, shapes: Shapes) -> float | None:
    """The part of the rows of all experts that a router chooses; None if it is unknown. The router
    numbers its choices, each of which is at most one row of one expert."""
    experts, rows, _ = shapes[found.chosen.name]
    todo, seen = deque([found.chosen]), {id(found.chosen)}
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


def chosen_shares(graph: gs.Graph, shapes: Shapes) -> dict[str, float]:
    """For each tensor by which rows enter or leave the experts of a mixture, by name, the part of
    its rows that are not zeros."""
    found = {}
    for scope in scopes(graph):
        for mixture in find_chosen_rows(scope, shapes):
            part, share = expert_part(mixture, shapes), chosen_share(mixture, shapes)
            if part is not None and share is not None:
                moved = [node.outputs[0] for node in mixture.enter] + [part.result]
                found.update({tensor.name: share for tensor in moved})
    return found


def computed_shares(graph: gs.Graph) -> Iterator[tuple[ChosenRows | TrainedRows, float]]:
    """The mixtures of a graph and its bodies, each with the part of its rows that a router
    chooses."""
    shapes = known_shapes(graph)
    for scope in scopes(graph):
        mixtures: Iterator[ChosenRows | TrainedRows] = chain(
            find_chosen_rows(scope, shapes), find_trained_rows(scope, shapes)
        )
        for found in mixtures:
            share = chosen_share(found, shapes)
            if share is not None:
                yield found, share


def _reads_weight(
    node: gs.Node, found: ChosenRows, shapes: Shapes, stored: dict[int, bool]
) -> bool:
    """True if a node has an operand with values for each expert that is stored with the model."""
    experts = shapes[found.chosen.name][0]
    return any(
        t.name in shapes
        and len(shapes[t.name]) == RANK
        and shapes[t.name][0] == experts > 1
        and is_stored(t, stored)
        for t in node.inputs
    )


def _upstream(owners: Collection[gs.Node], inside: Collection[gs.Node]) -> list[gs.Node]:
    """The nodes from which owners follow, and the owners, in graph order."""
    within = {id(node) for node in inside}
    wanted: set[int] = set()
    todo = list(owners)
    while todo:
        node = todo.pop()
        if id(node) in within and id(node) not in wanted:
            wanted.add(id(node))
            todo += [maker for t in node.inputs for maker in t.inputs]
    return [node for node in inside if id(node) in wanted]


def is_stored(tensor: gs.Tensor, known: dict[int, bool]) -> bool:
    """True if a tensor is stored with the model, or follows from such tensors alone."""
    if id(tensor) not in known:
        known[id(tensor)] = False
        maker = tensor.inputs[0] if tensor.inputs else None
        known[id(tensor)] = is_weight(tensor) or (
            maker is not None
            and maker.op in _PREPARES
            and all(is_stored(t, known) for t in maker.inputs if t.name)
        )
    return known[id(tensor)]
