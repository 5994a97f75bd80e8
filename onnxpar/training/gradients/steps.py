"""Gradients of Loop and Scan: another Loop or Scan, over the same iterations in the opposite order.

Each iteration of the gradient computes an iteration of the forward pass again, from its initial
values. The forward pass returns these values as stacks, tensors with a row for each iteration; the
gradient of a Loop has as many iterations as the stacks have rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError
from onnxpar.graph.tensors import tensor_shape
from onnxpar.training.gradients.bodies import (
    Replay,
    at_positions,
    hand_out,
    new_like,
    read_around,
    zeros_like,
)
from onnxpar.training.gradients.reverse import reached_from
from onnxpar.training.gradients.sums import Sum, sum_after
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp


@dataclass
class Carried:
    """A value that the gradient's loop carries from one iteration to the next.

    operand  index of the node's operand whose gradient is the final value
    inner    the value before an iteration, an input of the body
    start    the initial value
    result   the value after an iteration
    """

    operand: int
    inner: gs.Tensor
    start: Value
    result: Value


@dataclass
class _Saved:
    """A tensor of the forward body whose values the gradient may need.

    stack  the values of all iterations, which the forward pass then returns
    row    the value of one iteration, which an iteration of the gradient reads from the stack
    """

    tensor: gs.Tensor
    stack: gs.Tensor
    row: gs.Tensor


@dataclass
class Steps:
    """A Loop or Scan, and its gradient under construction.

    count  number of carried values
    first  index of the first carried value among the node's operands, and among its body's inputs
    back   index of the first carried value among the body's outputs; 0 among the node's results
    saved  tensors of the body that the gradient may read
    """

    v: Vjp
    count: int
    first: int
    back: int
    saved: list[_Saved] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = self.v.node
        self.body: gs.Graph = self.node.attrs["body"]
        self.replay = Replay(self.v.builder.fresh("step"), self.body.opset)
        self.states = self.body.inputs[self.first : self.first + self.count]
        results = self.body.outputs[self.back :]
        self.returned, self.stacked = results[: self.count], results[self.count :]
        self.dys = [*self.v.dys, *[None] * (len(results) - len(self.v.dys))]

    def length(self) -> int | None:
        """Returns the number of iterations; None if it depends on data."""
        raise NotImplementedError

    def given(self) -> dict[int, gs.Tensor]:
        """Returns the tensors that the copy of the body reads as its inputs, by `id` of the body's
        input; without carried values."""
        raise NotImplementedError

    def row(self, stack: gs.Tensor, like: gs.Tensor, result: int | None = None) -> gs.Tensor:
        """Returns the row of a stack that an iteration of the gradient reads, a tensor with the
        type of `like`. The stack has the forward iterations in order along dimension 0 or, if
        `result` is given, as result number `result` of the node has them."""
        raise NotImplementedError

    def elements(self) -> dict[int, gs.Tensor]:
        """Returns the body's inputs that are elements of scanned operands, for operands whose
        gradients are wanted, by index of the operand."""
        return {}

    def handed(self) -> list[gs.Tensor]:
        """Returns the rows of stacks that the gradient's node passes to its body as inputs."""
        return []

    def stack_of(self, row: gs.Tensor) -> gs.Tensor | None:
        """Returns the stack of a row, if the stack has the same order as the stacks that `append`
        returns; else None."""
        return None

    def append(
        self, carried: Sequence[Carried], elements: Mapping[int, Value], rows: Sequence[Value]
    ) -> list[Value]:
        """Adds the gradient's Loop or Scan. Returns the final carried values, then the gradients of
        the operands in `elements`, and then the stacks of `rows`."""
        raise NotImplementedError

    def gradients(self) -> Grads:
        """Adds the gradient's node, and returns the gradients of the forward node's operands and of
        the outer tensors that its body reads."""
        carry, around = self._carried(), read_around(self.v)
        entering = {i: new_like(self.replay.builder, self.states[i]) for i in carry}
        provided = self.given() | {id(t): self._save(t) for t in self.states}
        self.replay.compute(self.body, provided, self._save)
        seeds = {id(self.returned[i]): t for i, t in entering.items()}
        for i, (result, dy) in enumerate(zip(self.stacked, self.dys[self.count :], strict=True)):
            if dy is not None:
                seeds[id(result)] = self.row(dy.tensor, result, i)
        elements = self.elements()
        wanted = [*(self.states[i] for i in carry), *elements.values(), *around.values()]
        differentiated = self.replay.differentiate(seeds, wanted)
        by_name = {t.name: g for t, g in zip(wanted, differentiated, strict=True)}
        carried = [self._flow(i, t, by_name[self.states[i].name]) for i, t in entering.items()]
        sums: dict[int, Sum] = {}
        for at, tensor in around.items():
            if (part := by_name[tensor.name]) is None:
                continue
            if (total := self._sum_after(part, entering)) is not None:
                sums[at] = total
            else:
                carried.append(self._sum(at, tensor, part))
        by_element = {at: g for at, t in elements.items() if (g := by_name[t.name])}
        if not carried and not by_element and not sums:
            return []
        rows = {row.tensor.name: row for total in sums.values() for row in total.rows}
        stacks = {name: stack for name, row in rows.items() if (stack := self.stack_of(row.tensor))}
        new = [row for name, row in rows.items() if name not in stacks]
        ends = self.append(carried, by_element, new)
        at_ends = [*(c.operand for c in carried), *by_element]
        values = {name: self.v.builder.value(stack) for name, stack in stacks.items()}
        values |= zip((row.tensor.name for row in new), ends[len(at_ends) :], strict=True)
        results = dict(zip(at_ends, ends, strict=False))
        results |= {at: total.total(values) for at, total in sums.items()}
        self._hand_out()
        return at_positions(self.v, results)

    def _sum_after(self, part: Value, entering: Mapping[int, gs.Tensor]) -> Sum | None:
        """Returns the sum of `part`, a gradient of one iteration, over the iterations, if it can be
        computed after the loop (see `sums.py`); else None. `entering` has inputs of the gradient's
        body."""
        if not self.length():
            return None
        computed = [t for node in self.replay.graph.nodes for t in node.outputs]
        return sum_after(part, {t.name for t in (*computed, *entering.values(), *self.handed())})

    def _flow(self, state: int, inner: gs.Tensor, result: Value | None) -> Carried:
        """Returns what the gradient's loop carries for the carried value number `state`: this
        value's gradient. `inner` is the gradient before an iteration, `result` the gradient that an
        iteration computes."""
        start = self.dys[state] or zeros_like(self.v.builder, self.states[state])
        result = result or zeros_like(self.replay.builder, inner)
        return Carried(self.first + state, inner, start, result)

    def _sum(self, operand: int, tensor: gs.Tensor, part: Value) -> Carried:
        """Returns what the gradient's loop carries for a tensor that all iterations read: a sum, to
        which each iteration adds `part`. `operand` is the index of the tensor."""
        total = new_like(self.replay.builder, tensor)
        result = self.replay.builder.value(total) + part
        return Carried(operand, total, zeros_like(self.v.builder, tensor), result)

    def _carried(self) -> list[int]:
        """Returns the indices of the carried values through which gradients flow from one iteration
        to another. Errors: ModelError if such a value changes its shape."""
        nodes, indices = self.body.nodes, range(self.count)
        ins, outs = [t.name for t in self.states], [t.name for t in self.returned]
        sources = {t.name for t in (*read_around(self.v).values(), *self.elements().values())}
        moving = {i for i in indices if self.v.wanted[self.first + i]}
        relevant = {i for i in indices if self.dys[i] is not None}
        ends = {t.name for t, dy in zip(self.stacked, self.dys[self.count :], strict=True) if dy}
        for _ in indices:
            reached = reached_from(nodes, sources | {ins[i] for i in moving})
            moving |= {i for i in indices if outs[i] in reached}
            ends |= {outs[i] for i in relevant}
            relevant |= {i for i in indices if ends & reached_from(nodes, [ins[i]])}
        for i in moving & relevant:
            self._check(self.states[i])
        return sorted(moving & relevant)

    def _save(self, tensor: gs.Tensor) -> gs.Tensor:
        """Returns a tensor that the body's copy reads in place of a tensor of the body: a row of a
        new stack, with the value from the forward pass."""
        shape, stack = tensor_shape(tensor), self._stack(tensor)
        is_known = shape is not None and None not in shape
        row = self.row(stack, tensor) if is_known else new_like(self.replay.builder, tensor)
        self.saved.append(_Saved(tensor, stack, row))
        return row

    def _stack(self, row: gs.Tensor) -> gs.Tensor:
        """Returns a new tensor that has a row like `row` for each iteration."""
        shape = [self.length(), *(tensor_shape(row) or ())]
        return gs.Variable(self.v.builder.fresh("rows"), row.dtype, shape)

    def _hand_out(self) -> None:
        """Makes the forward node return the stacks that the gradient reads."""
        for saved in self.saved:
            if saved.row.outputs or saved.stack.outputs:
                self._check(saved.tensor)
                self.stack(saved.tensor, saved.stack)

    def stack(self, tensor: gs.Tensor, rows: gs.Tensor) -> None:
        """Makes the forward node return `rows`: the values of a tensor of its body in all
        iterations, stacked along dimension 0."""
        missing = len(self.body.outputs) - self.back - len(self.node.outputs)
        self.node.outputs.extend(
            gs.Variable(self.v.builder.fresh("unread"), t.dtype)
            for t in self.body.outputs[len(self.body.outputs) - missing :]
        )
        hand_out(self.body, tensor)
        self.node.outputs.append(rows)

    def _check(self, tensor: gs.Tensor) -> None:
        """Checks that a carried value keeps its shape. Errors: ModelError."""
        shape = tensor_shape(tensor)
        if shape is None or None in shape:
            raise ModelError(
                f"{self.node.op} '{self.node.name}': the carried value '{tensor.name}' changes its "
                f"shape between iterations ({tensor.shape}), so the gradient cannot stack its "
                "values; pad it to one shape, the largest"
            )
