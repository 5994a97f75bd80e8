"""Copies of control-flow bodies, which are differentiated: the gradient of an iteration computes
the iteration again, except random numbers, which the forward pass returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.errors import ModelError
from onnxpar.grad.reverse import drop_unread, gradients
from onnxpar.grad.value import Builder, Value
from onnxpar.grad.vjp import Grads, Vjp, operands_of
from onnxpar.ir.clone import clone_node
from onnxpar.ir.subgraphs import draws, scopes
from onnxpar.ir.tensors import constant

Handed = Callable[[gs.Tensor], gs.Tensor]
"""From a tensor of the body to the value that the forward pass returned, in the body's copy."""


class Replay:
    """A graph that computes a body again, and then its gradients.

    graph    the graph, whose results `close` sets
    builder  appends nodes to it
    """

    def __init__(self, name: str, opset: int) -> None:
        self.name = name
        self.graph = gs.Graph(name=name, opset=opset)
        self.builder = Builder(self.graph, f"{name}/step")
        self._copies: dict[int, gs.Tensor] = {}

    def compute(self, body: gs.Graph, given: Mapping[int, gs.Tensor], drawn: Handed) -> None:
        """Adds copies of a body's nodes, which read `given` in place of the body's inputs; keys are
        identities of tensors. Errors: ModelError where a nested body draws random numbers."""
        self._copies.update(given)
        for node in body.nodes:
            for inner in (n for n in _within(node) if draws(n)):
                raise ModelError(
                    f"{inner.op} '{inner.name}' draws random numbers in a body nested in the body "
                    f"'{body.name}', and the gradient would draw other ones; move it out of the "
                    "nested body"
                )
            if draws(node):
                self._redraw(node, drawn)
            else:
                self.graph.nodes.append(clone_node(node, f"{self.name}/", self._copies))

    def copy(self, tensor: gs.Tensor) -> gs.Tensor:
        """The copy of a body's tensor; a tensor of another graph is returned as it is."""
        return self._copies.get(id(tensor), tensor)

    def differentiate(
        self, seeds: Mapping[int, gs.Tensor], wanted: Sequence[gs.Tensor]
    ) -> list[Value | None]:
        """Appends the gradients of tensors of the body or of the graphs around it; `seeds` are the
        gradients of its results, by the identity of the result."""
        given = {self._copies[of].name: self.builder.value(t) for of, t in seeds.items()}
        copies = [self.copy(t) for t in wanted]
        found = gradients(self.graph, given, copies, f"{self.name}/grad")
        return [found[t.name] for t in copies]

    def close(self, results: Sequence[Value]) -> None:
        """Sets the graph's results, each made by a node of its own, and drops unused nodes."""
        made = {t.name for node in self.graph.nodes for t in node.outputs}
        for value in results:
            if value.tensor.name not in made:
                value = value.op("Identity")
            made.discard(value.tensor.name)
            self.graph.outputs.append(value.tensor)
        drop_unread(self.graph)

    def _redraw(self, node: gs.Node, drawn: Handed) -> None:
        """Reuses the random numbers that a node drew in the forward pass: a Dropout's mask."""
        if node.op != "Dropout":
            self._copies.update((id(t), drawn(t)) for t in node.outputs if t.name)
            return
        x, ratio, training = (self._value(t) for t in node.inputs)
        while len(node.outputs) < 2:
            node.outputs.append(gs.Variable.empty())
        if not node.outputs[1].name:
            node.outputs[1] = gs.Variable(f"{self.name}/{node.name}/mask", np.bool_, list(x.shape))
        mask = self.builder.value(drawn(node.outputs[1]))
        rest = (
            1.0 - ratio.cast(x.dtype) if ratio.tensor.name else self.builder.constant(0.5, x.dtype)
        )
        kept = mask.where(x / training.where(rest, 1.0), 0.0)
        self._copies[id(node.outputs[1])] = mask.tensor
        self._copies[id(node.outputs[0])] = kept.tensor

    def _value(self, tensor: gs.Tensor) -> Value:
        return self.builder.value(self.copy(tensor))


def hand_out(body: gs.Graph, tensor: gs.Tensor) -> None:
    """Makes a tensor of a body one of its results."""
    name = f"{tensor.name}/out{len(body.outputs)}"
    result = gs.Variable(name, tensor.dtype, tensor.shape)
    body.nodes.append(gs.Node("Identity", name, {}, [tensor], [result]))
    body.outputs.append(result)


def is_true(tensor: gs.Tensor) -> bool:
    """True if a tensor is a constant of true elements."""
    value = constant(tensor)
    return value is not None and bool(value.all())


def read_around(v: Vjp) -> dict[int, gs.Tensor]:
    """Tensors of outer graphs that bodies read and whose gradients are wanted, by position among
    the node's operands."""
    reads = operands_of(v.node)
    return {i: reads[i] for i in range(len(v.node.inputs), len(reads)) if v.wanted[i]}


def at_positions(v: Vjp, found: Mapping[int, Value]) -> Grads:
    """Gradients by position, as the list that a rule returns."""
    return [found.get(i) for i in range(len(v.wanted))]


def zeros_like(builder: Builder, tensor: gs.Tensor) -> Value:
    """Zeros of the type and shape of a tensor."""
    known = builder.value(tensor)
    return builder.zeros(known.shape, known.dtype)


def new_like(builder: Builder, tensor: gs.Tensor) -> gs.Tensor:
    """A new tensor of the type and shape of another."""
    return gs.Variable(builder.fresh("of"), tensor.dtype, tensor.shape)


def add_with_bodies(
    builder: Builder,
    op: str,
    operands: Sequence[gs.Tensor],
    like: Sequence[gs.Tensor],
    attrs: Mapping[str, Any],
) -> list[Value]:
    """Adds a node with bodies, whose results have the types and shapes of `like`."""
    results = [new_like(builder, tensor) for tensor in like]
    node = gs.Node(op, builder.fresh(op), dict(attrs), list(operands), results)
    builder.graph.nodes.append(node)
    return [builder.value(t) for t in results]


def _within(node: gs.Node) -> list[gs.Node]:
    """The nodes of a node's subgraphs, at any depth."""
    inner = gs.Graph([node])
    return [n for scope in scopes(inner) if scope is not inner for n in scope.nodes]
