"""One direction of a recurrent network, and the backward pass through its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onnxpar.rules.cell_activations import Activation
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Vjp


class Direction:
    """One direction of a recurrent node (LSTM, GRU, RNN). Its tensors have no dimension for
    directions; in sequences, the dimension of steps comes first.

    acts             the activations: f, g and h in the ONNX standard
    w, r             the weights of the input and of the hidden state
    bias, peepholes  the direction's other weights; None if the node has none
    lengths          number of steps of each sequence, [1, batch, 1]; None if all sequences have all
                     steps
    h0, c0           the first hidden state and cells
    dy, dh, dc       the gradients of Y, Y_h and Y_c
    """

    def __init__(self, v: Vjp, acts: Sequence[Activation], index: int) -> None:
        self.v, self.acts, self.index = v, acts, index
        self.backwards = index == 1 or v.attr("direction") == "reverse"
        self.x = v.x.swap(0, 1) if v.attr("layout") else v.x
        self.w, self.r = self._slice(v.operands[1]), self._slice(v.operands[2])
        self.bias, self.peepholes = self._weight(3), self._weight(7)
        lengths = v.operand(4)
        shape = [1, self.x.shape[1], 1]
        self.lengths = None if lengths is None else lengths.cast(np.int32).reshape(shape)
        self.h0, self.c0 = self._state(v.operand(5)), self._state(v.operand(6))
        self.y = self._sequence(v.y)
        self.dy = self.masked(self._sequence(v.gradient(0)))
        self.dh, self.dc = self._end(1), self._end(2)

    def _slice(self, tensor: Value, axis: int = 0) -> Value:
        """Returns this direction's slice of a tensor whose dimension `axis` numbers directions."""
        shape = [s for a, s in enumerate(tensor.shape) if a != axis]
        return tensor.slice(self.index, self.index + 1, axis).reshape(shape)

    def _weight(self, operand: int) -> Value | None:
        """Returns this direction's slice of a weight; None if the node lacks this operand."""
        tensor = self.v.operand(operand)
        return None if tensor is None else self._slice(tensor)

    def _state(self, tensor: Value | None) -> Value:
        """Returns this direction's slice of a state or of a state's gradient; zeros if it is
        None."""
        if tensor is None:
            return self.v.builder.zeros([self.x.shape[1], self.r.shape[1]], self.x.dtype)
        return self._slice(tensor, 1 if self.v.attr("layout") else 0)

    def _sequence(self, y: Value) -> Value:
        """Returns this direction's hidden states of all steps, or their gradients."""
        states = self._slice(y, 2 if self.v.attr("layout") else 1)
        return states.swap(0, 1) if self.v.attr("layout") else states

    def _end(self, output: int) -> Value:
        """Returns the gradient of a last state, which is result `output` of the node. It is zero
        for sequences without steps, because their last state is zero and does not depend on the
        first state."""
        dy = self._state(self.v.dys[output] if output < len(self.v.dys) else None)
        if self.lengths is None:
            return dy
        return (self.lengths.reshape([-1, 1]) > 0).where(dy, 0.0)

    @cached_property
    def steps(self) -> Value:
        """The indices of the steps, [steps, 1, 1]."""
        return self.v.builder.constant(np.arange(self.x.shape[0]).reshape(-1, 1, 1), np.int32)

    @cached_property
    def valid(self) -> Value | None:
        """The mask of the steps that each sequence has; None if all sequences have all steps."""
        return None if self.lengths is None else self.steps < self.lengths

    def masked(self, x: Value, otherwise: float = 0.0) -> Value:
        """Returns the tensor [step, batch, ...] with `otherwise` at steps past the end of a
        sequence."""
        return x if self.valid is None else self.valid.where(x, otherwise)

    @property
    def masks(self) -> list[Value]:
        """[valid], the mask of steps, to pass it on as an optional sequence; [] if there is
        none."""
        return [] if self.valid is None else [self.valid]

    @cached_property
    def before(self) -> Value:
        """The hidden state before each step; undefined at steps past the end of a sequence."""
        first = self.h0.unsqueeze([0])
        count = self.y.shape[0]
        if not self.backwards:
            return join(0, first, self.y.slice(0, count - 1, 0))
        shifted = join(0, self.y.slice(1, count, 0), first)
        if self.lengths is None:
            return shifted
        return (self.steps + 1).equal(self.lengths).where(first, shifted)

    @cached_property
    def biases(self) -> tuple[Value | None, Value | None]:
        """The biases that are added to the products with W and with R."""
        if self.bias is None:
            return None, None
        ends = (0, self.w.shape[0], 2 * self.w.shape[0])
        return self.bias.slice(*ends[:2], 0), self.bias.slice(*ends[1:], 0)

    def gates(self, x: Value) -> list[Value]:
        """Splits the last dimension into one tensor for each gate."""
        count = x.shape[-1] // self.r.shape[1]
        if count == 1:
            return [x]
        return x.builder.add_each("Split", [x], count, axis=-1, num_outputs=count)

    def back(
        self, step: Callable[..., tuple[list[Value], Value]], states: list[Value], *sequences: Value
    ) -> tuple[Value, list[Value]]:
        """Appends a Scan from the last step to the first. Returns the gradients of the gates'
        operands for all steps, and the gradients of the initial states.

        step       takes the gradients of the states after a step, and the elements of `sequences`;
                   returns the gradients of the states before the step, and of the gates' operands
        states     the gradients of the states after the last step
        sequences  values of all steps that `step` reads
        """

        def scan_step(ends: list[Value], elements: list[Value]) -> tuple[list[Value], list[Value]]:
            before, gates = step(*ends, *elements)
            return before, [gates]

        ends, results = self.v.builder.scan(scan_step, states, sequences, not self.backwards)
        return results[0], ends


@dataclass
class Passed:
    """The gradients of one direction of a recurrent node.

    gates         gradient of the product with W, for all steps
    recurrent     gradient of the product with R, for all steps
    of_r          gradient of R
    of_h0, of_c0  gradients of the first hidden state and cells
    of_peepholes  gradient of the peepholes
    """

    gates: Value
    recurrent: Value
    of_r: Value
    of_h0: Value
    of_c0: Value | None = None
    of_peepholes: Value | None = None


def linear(x: Value, weight: Value, bias: Value | None) -> Value:
    """Returns the product of the elements of all steps with a weight's transpose, plus a bias if
    there is one."""
    y = x @ weight.swap()
    return y if bias is None else y + bias


def plus(x: Value, y: Value, factor: Value | None) -> Value:
    """Returns x + y * factor; x if there is no factor."""
    return x if factor is None else x + y * factor


def product(a: Value, b: Value) -> Value:
    """Returns the product of two sequences as matrices, summed over the steps and the batch."""
    rows = a.reshape([-1, a.shape[-1]])
    return rows.swap() @ b.reshape([-1, b.shape[-1]])


def join(axis: int, *values: Value) -> Value:
    """Returns the concatenation of tensors along an axis."""
    return values[0].builder.add("Concat", *values, axis=axis)


def frozen(dh: Value, before: Value, valid: Sequence[Value]) -> Value:
    """Returns the gradient of the state before a step: `before`. For a sequence that has ended
    before the step, it is `dh`, the gradient of the state after the step. `valid` has the mask of
    steps, if there is one."""
    return valid[0].where(before, dh) if valid else before
