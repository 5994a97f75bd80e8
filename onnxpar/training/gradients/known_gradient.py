"""Finds the nodes that a gradient rule has added to a training step.

The rule is applied to the node again, and the step's nodes are compared with the rule's nodes. So
a step needs no records of its gradients; a step that was changed does not match.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import is_float
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.gradients.vjp import Vjp, entry_of

_DY = "dy"


@dataclass
class KnownGradient:
    """The gradient of a node with one result, in a training step.

    operands  operands of the node, or recomputed copies; None if no gradient reads the operand
    dy        the gradient of the result
    results   the gradient of each operand; None if the step does not compute it
    nodes     the nodes that compute the gradients
    """

    operands: list[gs.Tensor | None]
    dy: gs.Tensor
    results: list[gs.Tensor | None]
    nodes: list[gs.Node]


def find_gradient(graph: gs.Graph, node: gs.Node) -> KnownGradient | None:
    """Returns the gradient of a node in the node's graph. None if the graph has no such gradient,
    or if its nodes differ from those that the gradient rule adds."""
    added = [n for n in graph.nodes if n.name.startswith(f"{node.name}.grad/")]
    if not added or entry_of(node) is None:
        return None
    reference = _reference(graph, node)
    match = _Match()
    results: list[gs.Tensor | None] = []
    for wanted in reference:
        results.append(None if wanted is None else match.of_any(wanted.tensor, added))
    if _DY not in match.bound:
        return None
    operands = [match.bound.get(_operand(i)) for i in range(len(node.inputs))]
    return KnownGradient(operands, match.bound[_DY], results, list(match.nodes.values()))


def _operand(index: int) -> str:
    """Returns the name of an operand in the graph of `_reference`."""
    return f"operand{index}"


def _reference(graph: gs.Graph, node: gs.Node) -> list[Value | None]:
    """Applies a node's gradient rule in a new graph, and returns the operands' gradients (None for
    an operand without). The new graph has inputs in place of the node's operands, with the names
    that `_operand` gives."""
    operands = [
        gs.Variable(_operand(i), t.dtype, t.shape) if t.name else gs.Variable.empty()
        for i, t in enumerate(node.inputs)
    ]
    y = node.outputs[0]
    copy = gs.Node(node.op, node.name, _attrs(node), operands, [gs.Variable("y")], node.domain)
    copy.outputs[0].dtype, copy.outputs[0].shape = y.dtype, y.shape
    builder = Builder(gs.Graph(opset=graph.opset), "reference")
    dy = builder.value(gs.Variable(_DY, y.dtype, y.shape))
    wanted = [bool(t.name) and is_float(t) for t in operands]
    entry = entry_of(node)
    assert entry is not None
    return list(entry.function(Vjp(copy, builder, [dy], wanted)))


@dataclass
class _Match:
    """Compares the nodes that a gradient rule adds with the nodes of a step.

    bound  tensors of the step, by name of the rule's operand
    nodes  nodes of the step that match, by `id`
    """

    bound: dict[str, gs.Tensor] = field(default_factory=dict)
    nodes: dict[int, gs.Node] = field(default_factory=dict)

    def of_any(self, wanted: gs.Tensor, nodes: list[gs.Node]) -> gs.Tensor | None:
        """Returns the first result of `nodes` (of the step) that is computed like `wanted`, a
        tensor of the rule; None if there is none."""
        for tensor in [t for node in nodes for t in node.outputs]:
            trial = _Match(dict(self.bound), dict(self.nodes))
            if trial._is(wanted, tensor):
                self.bound, self.nodes = trial.bound, trial.nodes
                return tensor
        return None

    def _is(self, wanted: gs.Tensor, tensor: gs.Tensor) -> bool:
        """True if a tensor of the step is computed like `wanted`, a tensor of the rule."""
        if isinstance(wanted, gs.Constant):
            return isinstance(tensor, gs.Constant) and _equal(wanted.values, tensor.values)
        if not wanted.name or not tensor.name:
            return bool(wanted.name == tensor.name)
        if not wanted.inputs:
            if wanted.dtype != tensor.dtype or list(wanted.shape) != list(tensor.shape or ()):
                return False
            return self.bound.setdefault(wanted.name, tensor) is tensor
        ours = tensor.inputs[0] if tensor.inputs else None
        theirs = wanted.inputs[0]
        if ours is None or (ours.op, ours.domain or "") != (theirs.op, theirs.domain or ""):
            return False
        if len(ours.inputs) != len(theirs.inputs) or not _same_attrs(ours, theirs):
            return False
        if not all(map(self._is, theirs.inputs, ours.inputs)):
            return False
        self.nodes[id(ours)] = ours
        at = next(i for i, t in enumerate(theirs.outputs) if t is wanted)
        return at < len(ours.outputs) and ours.outputs[at] is tensor


def _attrs(node: gs.Node) -> dict[str, Any]:
    """Returns the attributes of a node, without those that the loader has added."""
    return {key: value for key, value in node.attrs.items() if not key.startswith("onnxpar.")}


def _same_attrs(ours: gs.Node, theirs: gs.Node) -> bool:
    """True if the attributes of two nodes are equal."""
    mine, others = _attrs(ours), _attrs(theirs)
    if mine.keys() != others.keys():
        return False
    return all(_equal(_value(mine[key]), _value(others[key])) for key in mine)


def _value(value: Any) -> Any:
    """Returns the value of an attribute, as an array if it is a tensor."""
    return value.values if isinstance(value, gs.Constant) else value


def _equal(a: Any, b: Any) -> bool:
    """True if two attributes or arrays are equal, in dtype and values."""
    if isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)
