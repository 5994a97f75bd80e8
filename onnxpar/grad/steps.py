"""Gradients of Loop and Scan: another one from the other end, whose steps differentiate theirs.

A step is computed anew from what it started from, which the forward pass hands out, a row for each
step; the gradient of a Loop takes as many turns as there are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from onnxpar.errors import ModelError
from onnxpar.grad.bodies import (
    Replay,
    at_positions,
    hand_out,
    new_like,
    read_around,
    zeros_like,
)
from onnxpar.grad.reverse import reached_from
from onnxpar.grad.sums import Sum, sum_behind
from onnxpar.grad.value import Value
from onnxpar.grad.vjp import Grads, Vjp
from onnxpar.ir.tensors import tensor_shape


@dataclass
class Carried:
    """What the gradient hands from step to step; at its end it is that of an operand."""

    operand: int
    inner: gs.Tensor
    start: Value
    result: Value


@dataclass
class _Saved:
    """A tensor of the forward body, the stack of what it is in all steps, and a row of that."""

    tensor: gs.Tensor
    stack: gs.Tensor
    row: gs.Tensor


@dataclass
class Steps:
    """A Loop or Scan: `count` values are carried, from the operands `first` of the node and of its
    body, to the results `back` of the body and 0 of the node."""

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
        """How many steps there are, None where only a run can tell."""
        raise NotImplementedError

    def given(self) -> dict[int, gs.Tensor]:
        """What the copy of a step is handed but for the carried values, by the identity of the
        body's."""
        raise NotImplementedError

    def row(self, stack: gs.Tensor, like: gs.Tensor, result: int | None = None) -> gs.Tensor:
        """What a step of the gradient reads of a stack, which is in the order of the forward steps,
        or as this one of the `stacked` results."""
        raise NotImplementedError

    def elements(self) -> dict[int, gs.Tensor]:
        """What a step is handed of wanted operands, by position."""
        return {}

    def handed(self) -> list[gs.Tensor]:
        """The rows that the steps of the gradient are handed rather than read themselves."""
        return []

    def stack_of(self, row: gs.Tensor) -> gs.Tensor | None:
        """The stack of which a step of the gradient reads a row, where its order is that of what
        `append` stacks."""
        return None

    def append(
        self, carried: Sequence[Carried], elements: Mapping[int, Value], rows: Sequence[Value]
    ) -> list[Value]:
        """Adds the gradient's node; returns what is carried at its end, then the gradients of
        operands of whose elements these are, and then the stacks of rows."""
        raise NotImplementedError

    def gradients(self) -> Grads:
        """The gradients of all that the node reads."""
        carry, around = self._carried(), read_around(self.v)
        entering = {i: new_like(self.replay.builder, self.states[i]) for i in carry}
        given = self.given() | {id(t): self._save(t) for t in self.states}
        self.replay.compute(self.body, given, self._save)
        seeds = {id(self.returned[i]): t for i, t in entering.items()}
        for i, (result, dy) in enumerate(zip(self.stacked, self.dys[self.count :], strict=True)):
            if dy is not None:
                seeds[id(result)] = self.row(dy.tensor, result, i)
        elements = self.elements()
        wanted = [*(self.states[i] for i in carry), *elements.values(), *around.values()]
        differentiated = self.replay.differentiate(seeds, wanted)
        found = {t.name: g for t, g in zip(wanted, differentiated, strict=True)}
        carried = [self._flow(i, t, found[self.states[i].name]) for i, t in entering.items()]
        behind: dict[int, Sum] = {}
        for at, tensor in around.items():
            if (part := found[tensor.name]) is None:
                continue
            if (total := self._sum_behind(part, entering)) is not None:
                behind[at] = total
            else:
                carried.append(self._sum(at, tensor, part))
        dealt = {at: g for at, t in elements.items() if (g := found[t.name])}
        if not carried and not dealt and not behind:
            return []
        rows = {row.tensor.name: row for total in behind.values() for row in total.rows}
        stacks = {name: stack for name, row in rows.items() if (stack := self.stack_of(row.tensor))}
        new = [row for name, row in rows.items() if name not in stacks]
        made = self.append(carried, dealt, new)
        at_ends = [*(c.operand for c in carried), *dealt]
        known = {name: self.v.builder.value(stack) for name, stack in stacks.items()}
        known |= zip((row.tensor.name for row in new), made[len(at_ends) :], strict=True)
        results = dict(zip(at_ends, made, strict=False))
        results |= {at: total.total(known) for at, total in behind.items()}
        self._hand_out()
        return at_positions(self.v, results)

    def _sum_behind(self, part: Value, entering: Mapping[int, gs.Tensor]) -> Sum | None:
        """The sum over the steps of a part of a gradient, where it is better had behind them."""
        if not self.length():
            return None
        made = [t for node in self.replay.graph.nodes for t in node.outputs]
        return sum_behind(part, {t.name for t in (*made, *entering.values(), *self.handed())})

    def _flow(self, state: int, inner: gs.Tensor, result: Value | None) -> Carried:
        """The gradient of a carried value."""
        start = self.dys[state] or zeros_like(self.v.builder, self.states[state])
        result = result or zeros_like(self.replay.builder, inner)
        return Carried(self.first + state, inner, start, result)

    def _sum(self, operand: int, tensor: gs.Tensor, part: Value) -> Carried:
        """The gradient of what all steps read, summed over them."""
        total = new_like(self.replay.builder, tensor)
        result = self.replay.builder.value(total) + part
        return Carried(operand, total, zeros_like(self.v.builder, tensor), result)

    def _carried(self) -> list[int]:
        """The carried values through which gradients flow from step to step."""
        nodes, given = self.body.nodes, range(self.count)
        ins, outs = [t.name for t in self.states], [t.name for t in self.returned]
        sources = {t.name for t in (*read_around(self.v).values(), *self.elements().values())}
        moving = {i for i in given if self.v.wanted[self.first + i]}
        heard = {i for i in given if self.dys[i] is not None}
        ends = {t.name for t, dy in zip(self.stacked, self.dys[self.count :], strict=True) if dy}
        for _ in given:
            reached = reached_from(nodes, sources | {ins[i] for i in moving})
            moving |= {i for i in given if outs[i] in reached}
            ends |= {outs[i] for i in heard}
            heard |= {i for i in given if ends & reached_from(nodes, [ins[i]])}
        for i in moving & heard:
            self._check(self.states[i])
        return sorted(moving & heard)

    def _save(self, tensor: gs.Tensor) -> gs.Tensor:
        """A row, for the copy of a step, of what a tensor of the forward body is in all steps."""
        shape, stack = tensor_shape(tensor), self._stack(tensor)
        is_known = shape is not None and None not in shape
        row = self.row(stack, tensor) if is_known else new_like(self.replay.builder, tensor)
        self.saved.append(_Saved(tensor, stack, row))
        return row

    def _stack(self, row: gs.Tensor) -> gs.Tensor:
        """A new tensor of a row for each step."""
        shape = [self.length(), *(tensor_shape(row) or ())]
        return gs.Variable(self.v.builder.fresh("rows"), row.dtype, shape)

    def _hand_out(self) -> None:
        """Makes the forward pass hand out what the gradient reads."""
        for saved in self.saved:
            if saved.row.outputs or saved.stack.outputs:
                self._check(saved.tensor)
                self.stack(saved.tensor, saved.stack)

    def stack(self, tensor: gs.Tensor, rows: gs.Tensor) -> None:
        """Makes the forward pass hand out a tensor of its body, stacked along a first dimension."""
        missing = len(self.body.outputs) - self.back - len(self.node.outputs)
        self.node.outputs.extend(
            gs.Variable(self.v.builder.fresh("unread"), t.dtype)
            for t in self.body.outputs[len(self.body.outputs) - missing :]
        )
        hand_out(self.body, tensor)
        self.node.outputs.append(rows)

    def _check(self, tensor: gs.Tensor) -> None:
        shape = tensor_shape(tensor)
        if shape is None or None in shape:
            raise ModelError(
                f"{self.node.op} '{self.node.name}': the carried value '{tensor.name}' changes its "
                f"shape from turn to turn ({tensor.shape}), so its values make no stack for the "
                f"gradient; give it one shape, padded to the largest"
            )
