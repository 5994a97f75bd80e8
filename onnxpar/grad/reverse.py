"""Reverse-mode differentiation: walks a graph from its end and appends what the rules of its nodes
say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx_graphsurgeon as gs

from onnxpar.errors import ModelError
from onnxpar.grad.value import Builder, Value
from onnxpar.grad.vjp import (
    Vjp,
    carries,
    entry_of,
    is_message,
    is_trainable_type,
    operands_of,
    without,
)
from onnxpar.ir.collectives import DOMAIN
from onnxpar.ir.subgraphs import detach


def gradients(
    graph: gs.Graph,
    seeds: Mapping[str, Value],
    wanted: Iterable[gs.Tensor],
    prefix: str = "grad",
) -> dict[str, Value | None]:
    """Appends the gradients of tensors to a graph: of the sum of results times their seeds.

    seeds   gradients of tensors that nodes of the graph make, by name
    wanted  tensors of the graph, or of graphs around it
    prefix  starts names that no node is to thank for
    Returns them by name, each with the shape and type of its tensor; None where the seeded tensors
    do not depend on it. Nodes that turn out to be of no use are removed.

    Errors: ModelError, naming an op without a gradient that lies between.
    """
    names = [t.name for t in wanted]
    forward = list(graph.nodes)
    reached = reached_from(forward, names)
    sent = _is_sent(forward, reached)
    found: dict[str, list[Value]] = {name: [seed] for name, seed in seeds.items()}
    for node in reversed(forward):
        reads = operands_of(node)
        flows = any(t.name in found and t.name in reached for t in node.outputs)
        flows = flows and any(t.name in reached for t in reads)
        if not flows and not (sent and is_message(node)):
            continue
        builder = Builder(graph, f"{node.name}.grad")
        dys = [
            _total(builder, found[t.name]) if t.name in found and t.name in reached else None
            for t in node.outputs
        ]
        for tensor, dy in zip(node.outputs, dys, strict=True):
            if dy is not None:
                found[tensor.name] = [dy]
        view = Vjp(node, builder, dys, [t.name in reached for t in reads])
        for tensor, gradient in zip(reads, _asked(view), strict=False):
            if gradient is not None and tensor.name in reached:
                if node.domain != DOMAIN:  # whose parts may differ in size, and broadcast nothing
                    gradient = _fitted(gradient, builder.value(tensor))
                found.setdefault(tensor.name, []).append(gradient)
    last = Builder(graph, prefix)
    results = {name: _total(last, found[name]) if name in found else None for name in names}
    kept = {v.tensor.name for v in results.values() if v is not None}
    drop_unread(graph, len(forward), kept)
    return results


def reached_from(nodes: Iterable[gs.Node], sources: Iterable[str]) -> set[str]:
    """The tensors that depend on some of these, themselves included: those of floating-point
    numbers, and what carries such numbers."""
    nodes, reached, known = list(nodes), set(sources), -1
    while len(reached) > known:
        known = len(reached)
        sent = _is_sent(nodes, reached)
        for node in nodes:
            received = sent and is_message(node)
            if received or any(t.name in reached for t in operands_of(node)):
                hidden = carries(node)
                named = [t for t in node.outputs if t.name]
                reached |= {t.name for t in named if hidden or is_trainable_type(t)}
        if not any(is_message(node) for node in nodes):
            break
    return reached


def _is_sent(nodes: Iterable[gs.Node], reached: set[str]) -> bool:
    """Whether some message carries what is reached to another rank."""
    return any(t.name in reached for node in nodes if is_message(node) for t in node.inputs)


def _asked(view: Vjp) -> list[Value | None]:
    """What the rule of a node says. Errors: ModelError where it has none."""
    node = view.node
    entry = entry_of(node)
    if entry is None:
        reason = without().get((node.domain or "", node.op), "no rule is known")
        raise ModelError(
            f"{node.op} '{node.name}' has no gradient ({reason}), and lies between a parameter and "
            f"the loss; leave out what it depends on with --frozen, or register a rule with "
            f"onnxpar.grad.vjp"
        )
    return list(entry.function(view))


def _fitted(gradient: Value, tensor: Value) -> Value:
    """A gradient summed over what was broadcast."""
    fitted = gradient.sum_to(tensor.shape)
    assert fitted.dtype == tensor.dtype, f"{tensor}: gradient of type {fitted.dtype}"
    return fitted


def _total(builder: Builder, terms: list[Value]) -> Value:
    total = builder.value(terms[0].tensor)
    for term in terms[1:]:
        total = total + term
    return total


def drop_unread(graph: gs.Graph, first: int = 0, kept: Collection[str] = ()) -> None:
    """Removes nodes behind the first ones whose results nothing reads."""
    kept = {*kept, *(t.name for t in graph.outputs)}
    for i in reversed(range(first, len(graph.nodes))):
        node = graph.nodes[i]
        if not any(t.outputs or t.name in kept for t in node.outputs) and not is_message(node):
            detach(node)
            del graph.nodes[i]
