"""Copies the bodies of If, Loop and Scan in order to differentiate them. The gradient of an
iteration computes the iteration again, except random numbers, which the forward pass returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError
from onnxpar.graph.clone import clone_node
from onnxpar.graph.subgraphs import draws, scopes
from onnxpar.graph.tensors import constant
from onnxpar.training.gradients.reverse import drop_unread, gradients
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.gradients.vjp import Grads, Vjp, operands_of

Handed = Callable[[gs.Tensor], gs.Tensor]
"""A function from a tensor of the body to a tensor that the body's copy reads, with the value from
the forward pass."""


class Replay:
    """The body of a gradient's If, Loop or Scan: a graph that computes the body of the forward node
    again, and then its gradients.

    graph    the graph; `close` sets its outputs
    builder  appends nodes to the graph
    """

    def __init__(self, name: str, opset: int) -> None:
        self.name = name
        self.graph = gs.Graph(name=name, opset=opset)
        self.builder = Builder(self.graph, f"{name}/step")
        self._copies: dict[int, gs.Tensor] = {}

    def compute(self, body: gs.Graph, provided: Mapping[int, gs.Tensor], drawn: Handed) -> None:
        """Adds copies of a body's nodes.

        provided  tensors that the copies read instead of tensors of the body, such as its inputs,
                  by `id` of the body's tensor
        drawn     a function from a random result of the body to its value from the forward pass

        Errors: ModelError if a nested body draws random numbers.
        """
        self._copies.update(provided)
        for node in body.nodes:
            for inner in (n for n in _within(node) if draws(n)):
                raise ModelError(
                    f"{inner.op} '{inner.name}' draws random numbers in a body nested in the body "
                    f"'{body.name}', and the gradient would draw different numbers; move it out of "
                    "the nested body"
                )
            if draws(node):
                self._redraw(node, drawn)
            else:
                self.graph.nodes.append(clone_node(node, f"{self.name}/", self._copies))

    def copy(self, tensor: gs.Tensor) -> gs.Tensor:
        """Returns the copy of a body's tensor; a tensor of another graph as it is."""
        return self._copies.get(id(tensor), tensor)

    def differentiate(
        self, seeds: Mapping[int, gs.Tensor], wanted: Sequence[gs.Tensor]
    ) -> list[Value | None]:
        """Appends the gradients of `wanted`, tensors of the body or of outer graphs. Returns a
        gradient for each; None for a tensor without one. `seeds` are the gradients of the body's
        outputs, by `id` of the output."""
        dys = {self._copies[of].name: self.builder.value(t) for of, t in seeds.items()}
        copies = [self.copy(t) for t in wanted]
        by_name = gradients(self.graph, dys, copies, f"{self.name}/grad")
        return [by_name[t.name] for t in copies]

    def close(self, results: Sequence[Value]) -> None:
        """Sets the graph's outputs, and drops unused nodes. An Identity is added if two outputs
        would be one tensor, or if no node computes an output."""
        computed = {t.name for node in self.graph.nodes for t in node.outputs}
        for value in results:
            if value.tensor.name not in computed:
                value = value.op("Identity")
            computed.discard(value.tensor.name)
            self.graph.outputs.append(value.tensor)
        drop_unread(self.graph)

    def _redraw(self, node: gs.Node, drawn: Handed) -> None:
        """Replaces a random node by its values from the forward pass. A Dropout is computed again
        from its mask of the forward pass."""
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
        y = mask.where(x / training.where(rest, 1.0), 0.0)
        self._copies[id(node.outputs[1])] = mask.tensor
        self._copies[id(node.outputs[0])] = y.tensor

    def _value(self, tensor: gs.Tensor) -> Value:
        """Returns the copy of a body's tensor as a Value."""
        return self.builder.value(self.copy(tensor))


def hand_out(body: gs.Graph, tensor: gs.Tensor) -> None:
    """Makes a tensor of a body an additional output of the body."""
    name = f"{tensor.name}/out{len(body.outputs)}"
    result = gs.Variable(name, tensor.dtype, tensor.shape)
    body.nodes.append(gs.Node("Identity", name, {}, [tensor], [result]))
    body.outputs.append(result)


def is_true(tensor: gs.Tensor) -> bool:
    """True if a tensor is a constant whose elements are all true."""
    value = constant(tensor)
    return value is not None and bool(value.all())


def read_around(v: Vjp) -> dict[int, gs.Tensor]:
    """Returns the tensors of outer graphs that the node's bodies read and whose gradients are
    wanted, by index in `operands_of`."""
    reads = operands_of(v.node)
    return {i: reads[i] for i in range(len(v.node.inputs), len(reads)) if v.wanted[i]}


def at_positions(v: Vjp, by_position: Mapping[int, Value]) -> Grads:
    """Returns the list of gradients that a gradient rule must return, given gradients by index of
    the operand."""
    return [by_position.get(i) for i in range(len(v.wanted))]


def zeros_like(builder: Builder, tensor: gs.Tensor) -> Value:
    """Returns zeros with the type and shape of a tensor."""
    like = builder.value(tensor)
    return builder.zeros(like.shape, like.dtype)


def new_like(builder: Builder, tensor: gs.Tensor) -> gs.Tensor:
    """Returns a new tensor with the type and shape of another tensor."""
    return gs.Variable(builder.fresh("of"), tensor.dtype, tensor.shape)


def add_with_bodies(
    builder: Builder,
    op: str,
    operands: Sequence[gs.Tensor],
    like: Sequence[gs.Tensor],
    attrs: Mapping[str, Any],
) -> list[Value]:
    """Adds a node with bodies (If, Loop, Scan), and returns its results, which have the types and
    shapes of the tensors `like`."""
    results = [new_like(builder, tensor) for tensor in like]
    node = gs.Node(op, builder.fresh(op), dict(attrs), list(operands), results)
    builder.graph.nodes.append(node)
    return [builder.value(t) for t in results]


def _within(node: gs.Node) -> list[gs.Node]:
    """Returns the nodes of a node's subgraphs, at any depth."""
    inner = gs.Graph([node])
    return [n for scope in scopes(inner) if scope is not inner for n in scope.nodes]
