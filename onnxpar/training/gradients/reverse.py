"""Reverse-mode differentiation: visits the nodes of a graph from last to first, and appends the
nodes that their gradient rules add."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.stop_gradient import is_stop
from onnxpar.graph.subgraphs import detach
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.gradients.vjp import (
    Vjp,
    carries,
    entry_of,
    is_message,
    is_trainable_type,
    operands_of,
    without,
)


def gradients(
    graph: gs.Graph,
    seeds: Mapping[str, Value],
    wanted: Iterable[gs.Tensor],
    prefix: str = "grad",
) -> dict[str, Value | None]:
    """Appends to a graph the gradients of a sum: of the tensors in `seeds`, each times its seed.

    seeds   the given gradients, by name of a tensor that a node of the graph computes
    wanted  tensors by which to differentiate, of the graph or of outer graphs
    prefix  prefix for the names of nodes that sum up gradients

    Returns the gradient of each wanted tensor by its name, with the tensor's shape and dtype; None
    if no tensor in `seeds` depends on it. New nodes that no node reads are removed.

    Errors: ModelError, which names an op without a gradient on a path from a wanted tensor to a
    tensor in `seeds`.
    """
    names = [t.name for t in wanted]
    forward = list(graph.nodes)
    reached = reached_from(forward, names)
    sent = _is_sent(forward, reached)
    terms: dict[str, list[Value]] = {name: [seed] for name, seed in seeds.items()}
    for node in reversed(forward):
        reads = operands_of(node)
        flows = any(t.name in terms and t.name in reached for t in node.outputs)
        flows = flows and any(t.name in reached for t in reads)
        if not flows and not (sent and is_message(node)):
            continue
        builder = Builder(graph, f"{node.name}.grad")
        dys = [
            _total(builder, terms[t.name]) if t.name in terms and t.name in reached else None
            for t in node.outputs
        ]
        for tensor, dy in zip(node.outputs, dys, strict=True):
            if dy is not None:
                terms[tensor.name] = [dy]
        view = Vjp(node, builder, dys, [t.name in reached for t in reads])
        for tensor, gradient in zip(reads, _apply_rule(view), strict=False):
            if gradient is not None and tensor.name in reached:
                if node.domain != DOMAIN:  # collectives do not broadcast; sizes may differ
                    gradient = _fitted(gradient, builder.value(tensor))
                terms.setdefault(tensor.name, []).append(gradient)
    last = Builder(graph, prefix)
    results = {name: _total(last, terms[name]) if name in terms else None for name in names}
    read = {v.tensor.name for v in results.values() if v is not None}
    drop_unread(graph, len(forward), read)
    return results


def reached_from(nodes: Iterable[gs.Node], sources: Iterable[str]) -> set[str]:
    """Returns the names of `sources`, and of all tensors that depend on them by a path without a
    stop (`detach`) and may have a gradient: floating-point tensors, and tensors of other types that
    carry such numbers, for example sequences."""
    nodes, reached, count = list(nodes), set(sources), -1
    while len(reached) > count:
        count = len(reached)
        sent = _is_sent(nodes, reached)
        for node in nodes:
            if is_stop(node):
                continue
            received = sent and is_message(node)
            if received or any(t.name in reached for t in operands_of(node)):
                hidden = carries(node)
                named = [t for t in node.outputs if t.name]
                reached |= {t.name for t in named if hidden or is_trainable_type(t)}
        if not any(is_message(node) for node in nodes):
            break
    return reached


def _is_sent(nodes: Iterable[gs.Node], reached: set[str]) -> bool:
    """True if a Send carries a tensor named in `reached` to another rank."""
    return any(t.name in reached for node in nodes if is_message(node) for t in node.inputs)


def _apply_rule(view: Vjp) -> list[Value | None]:
    """Applies the gradient rule of a node, and returns the gradients by operand. Errors: ModelError
    if the op has no rule."""
    node = view.node
    entry = entry_of(node)
    if entry is None:
        reason = without().get((node.domain or "", node.op), "there is no rule for this op")
        raise ModelError(
            f"{node.op} '{node.name}' has no gradient ({reason}), and is on a path from a "
            "parameter to the loss; exclude the parameters before it with --frozen, or register a "
            "rule with onnxpar.training.gradients.vjp"
        )
    return list(entry.function(view))


def _fitted(gradient: Value, tensor: Value) -> Value:
    """Returns a gradient, summed over the dimensions in which its tensor was broadcast, in the
    shape of the tensor."""
    fitted = gradient.sum_to(tensor.shape)
    assert fitted.dtype == tensor.dtype, f"{tensor}: gradient of type {fitted.dtype}"
    return fitted


def _total(builder: Builder, terms: list[Value]) -> Value:
    """Returns the sum of gradients. 16-bit terms are added in float32, and the sum is rounded
    once."""
    total = builder.value(terms[0].tensor)
    if len(terms) == 1:
        return total
    dtype, total = total.dtype, total.wide()
    for term in terms[1:]:
        total = total + builder.value(term.tensor).wide()
    return total.cast(dtype)


def drop_unread(graph: gs.Graph, first: int = 0, kept: Collection[str] = ()) -> None:
    """Removes nodes whose results no node reads. Keeps the first `first` nodes, Sends and Recvs,
    and nodes that compute graph outputs or tensors named in `kept`."""
    kept = {*kept, *(t.name for t in graph.outputs)}
    for i in reversed(range(first, len(graph.nodes))):
        node = graph.nodes[i]
        if not any(t.outputs or t.name in kept for t in node.outputs) and not is_message(node):
            detach(node)
            del graph.nodes[i]
