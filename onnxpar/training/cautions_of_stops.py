"""Warnings where torch's gradients may differ from those of a file: torch has `detach()`,
`no_grad`, custom gradients and `padding_idx`, which most files do not record."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import onnx_graphsurgeon as gs

from onnxpar.graph.stop_gradient import is_stop, padding_row
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.tensors import numel
from onnxpar.load.load import Model
from onnxpar.training.gradients.constant_values import zero_rows
from onnxpar.training.gradients.reverse import reached_from
from onnxpar.training.gradients.trained import Weights, leading

_NAMED = re.compile(r"detach|stop_?grad", re.IGNORECASE)
_STEPS = ("Floor", "Ceil", "Round", "Sign")
"""Ops whose gradient is zero."""
_BY_CLASS = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_OF_DISTANCES = (
    *("Mul", "Pow", "Abs", "Sqrt", "Neg", "Div", "Add", "Cast", "Reshape", "Squeeze", "Identity"),
    *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2"),
)
"""Ops that turn a difference into a loss."""


def cautions_of_stops(
    model: Model, weights: Weights, ends: Collection[str] | None, is_loss: bool
) -> Iterator[str]:
    """Yields sentences about places where torch may stop or replace a gradient, but the graph does
    not mark a stop.

    ends     names of the outputs from which the loss is computed; None: all
    is_loss  True if the output is the loss
    """
    trained = {t.name: t.tensor for t in weights.trained}
    flows = reached_from(model.graph.nodes, trained) & leading(model.graph, ends)
    yield from _of_names(model.graph, flows)
    yield from _of_estimators(model.graph, flows)
    yield from _of_steps(model.graph, ends, trained, flows)
    if is_loss:
        yield from _of_targets([t for t in model.graph.outputs if t.name in (ends or ())], trained)
    yield from _of_padding(model, trained)


def _of_names(graph: gs.Graph, flows: Collection[str]) -> Iterator[str]:
    """Yields a sentence about each Identity whose name says that it stops gradients, although it
    does not. `flows` has the tensors through which gradients flow."""
    for node in all_nodes(graph):
        if node.op != "Identity" or is_stop(node) or node.outputs[0].name not in flows:
            continue
        if any(_NAMED.search(name) for name in (node.name, node.outputs[0].name)):
            yield (
                f"Identity '{node.name}' is named like a detach(), but gradients flow through it; "
                f"to stop them, give --stop-gradient '{node.name}'"
            )


def _of_estimators(graph: gs.Graph, flows: Collection[str]) -> Iterator[str]:
    """Yields a sentence about each tensor that is added and then subtracted again: this has no
    other use than a straight-through estimator, x + (q(x) - x).detach()."""
    for node in all_nodes(graph):
        if node.op not in ("Add", "Sub") or node.outputs[0].name not in flows:
            continue
        for inner in (n for t in node.inputs for n in t.inputs if n.op in ("Add", "Sub")):
            if _cancels(node, inner):
                name = inner.outputs[0].name
                what = f"stop the gradient of {name!r}: --stop-gradient '{name}'"
                if node.op == "Sub":
                    what = f"name what torch detaches: {inner.op} '{inner.name}' reads it"
                yield (
                    f"{node.op} '{node.name}' adds a tensor that {inner.op} '{inner.name}' takes "
                    f"off, as a straight-through estimator does, but gradients flow through both; "
                    f"{what}"
                )


def _cancels(node: gs.Node, inner: gs.Node) -> bool:
    """True if `inner` adds (or subtracts) a tensor, and `node` reverses this."""
    outer = [t for t in node.inputs if all(n is not inner for n in t.inputs)]
    if len(outer) != 1:
        return False
    if node.op == "Add":  # x + (q - x)
        return inner.op == "Sub" and inner.inputs[1] is outer[0]
    # (q + x) - x
    return inner.op == "Add" and node.inputs[1] is outer[0] and outer[0] in inner.inputs


def _of_steps(
    graph: gs.Graph,
    ends: Collection[str] | None,
    trained: Collection[str],
    flows: Collection[str],
) -> Iterator[str]:
    """Yields a sentence if the loss depends on a trained weight only through step functions, such
    as Round. The parameters are those of the functions above; `trained` has the names of trained
    weights."""
    steps = [n for n in all_nodes(graph) if n.op in _STEPS and n.outputs[0].name in flows]
    if not steps:
        return
    smooth = leading(graph, ends, lambda node: is_stop(node) or node.op in _STEPS)
    stuck = [name for name in trained if name not in smooth]
    for node in steps:
        behind = [
            name for name in stuck if node.outputs[0].name in reached_from(graph.nodes, [name])
        ]
        if behind:
            more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
            yield (
                f"{behind[0]}{more}: the loss depends on this only through {node.op} "
                f"'{node.name}', whose gradient is zero, so it does not change. A file does not "
                "have the gradient that a straight-through estimator defines in torch; write "
                "x + (round(x) - x) in the network, and give --stop-gradient for the difference"
            )
            stuck = [name for name in stuck if name not in behind]


def _of_targets(outputs: Collection[gs.Tensor], trained: Collection[str]) -> Iterator[str]:
    """Yields a sentence for each loss, behind these outputs, whose labels or target is a constant
    of the model."""
    nodes = {id(n): n for t in outputs for n in t.inputs}
    waiting = list(nodes.values())
    while waiting:
        node = waiting.pop()
        targets = node.inputs[1:2] if node.op in _BY_CLASS else ()
        if node.op == "Sub":
            targets = [t for t in node.inputs if list(t.shape) == list(node.outputs[0].shape)]
        for target in targets:
            is_stored = isinstance(target, gs.Constant) and target.name not in trained
            if is_stored and numel(target.shape) > 1:
                yield (
                    f"{node.op} '{node.name}' compares with {target.name!r}, a constant of the "
                    "model, in every step; if this is a target, make it an input of the network"
                )
        if node.op in _OF_DISTANCES:
            behind = {id(n): n for t in node.inputs for n in t.inputs if id(n) not in nodes}
            nodes |= behind
            waiting += behind.values()


def _of_padding(model: Model, trained: Mapping[str, gs.Constant]) -> Iterator[str]:
    """Yields a sentence about each table that seems to have a row for padding: the row is zero, and
    no other row is."""
    for name, table in trained.items():
        lookups = [n for n in table.outputs if n.op == "Gather" and n.inputs[0] is table]
        lookups = [n for n in lookups if not isinstance(n.inputs[1], gs.Constant)]
        if not lookups or any(padding_row(n) is not None for n in lookups):
            continue
        rows = zero_rows(table, model.folder)
        if len(rows) == 1:
            yield (
                f"{name}: row {rows[0]} is all zeros, as that of padding_idx={rows[0]} in torch, "
                f"which is never trained; this step trains it. Give --padding-idx {name}={rows[0]}"
            )
