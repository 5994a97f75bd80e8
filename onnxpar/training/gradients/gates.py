"""Gates of recurrent cells: activations that differentiate themselves by the gradient rules of
their ops."""

from __future__ import annotations

from dataclasses import dataclass

from onnxpar.rules.cell_activations import Activation
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Vjp, entry_of


@dataclass(frozen=True)
class Gate:
    """An activation applied to `x`, with the result `y`. A chain of nodes computes y from x; the
    first operand of each node is the result of the node before."""

    x: Value
    y: Value

    @staticmethod
    def of(activation: Activation, x: Value) -> Gate:
        """Appends the nodes of an activation applied to `x`, and returns the gate."""
        y = x
        for op, operands, attrs in activation.steps():
            y = y.op(op, *operands, **attrs)
        return Gate(x, y)

    def back(self, dy: Value) -> Value:
        """Returns the gradient of `x`, given the gradient of `y`."""
        at = self.y
        while at.tensor.name != self.x.tensor.name:
            node = at.tensor.inputs[0]
            entry = entry_of(node)
            assert entry is not None, node.op
            dx = entry.function(Vjp(node, dy.builder, [dy], [True] + [False] * 2))[0]
            assert dx is not None, node.op
            at, dy = dy.builder.value(node.inputs[0]), dx
        return dy
