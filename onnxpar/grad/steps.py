"""Gradients of Loop and Scan: another one from the other end, whose steps differentiate theirs.

A step is computed anew from what it started from, which the forward pass hands out, a row for each
step; the gradient of a Loop takes as many turns as there are rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.errors import ModelError
from onnxpar.grad.bodies import (
    Replay,
    add_with_bodies,
    at_positions,
    hand_out,
    is_true,
    new_like,
    read_around,
    zeros_like,
)
from onnxpar.grad.reverse import reached_from
from onnxpar.grad.value import Value
from onnxpar.grad.vjp import Grads, Vjp
from onnxpar.rules.rule import constant, tensor_shape


@dataclass
class _Carried:
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
class _Steps:
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

    def given(self) -> dict[str, gs.Tensor]:
        """What the copy of a step is handed but for the carried values, by the body's names."""
        raise NotImplementedError

    def row(self, stack: gs.Tensor, like: gs.Tensor, result: int | None = None) -> gs.Tensor:
        """What a step of the gradient reads of a stack, which is in the order of the forward steps,
        or as this one of the `stacked` results."""
        raise NotImplementedError

    def elements(self) -> dict[int, gs.Tensor]:
        """What a step is handed of wanted operands, by position."""
        return {}

    def append(self, carried: Sequence[_Carried], elements: Mapping[int, Value]) -> list[Value]:
        """Adds the gradient's node; returns what is carried at its end, and then the gradients of
        operands of whose elements these are."""
        raise NotImplementedError

    def gradients(self) -> Grads:
        """The gradients of all that the node reads."""
        carry, around = self._carried(), read_around(self.v)
        entering = {i: new_like(self.replay.builder, self.states[i]) for i in carry}
        given = self.given() | {t.name: self._save(t) for t in self.states}
        self.replay.compute(self.body, given, self._save)
        seeds = {self.returned[i].name: t for i, t in entering.items()}
        for i, (result, dy) in enumerate(zip(self.stacked, self.dys[self.count :], strict=True)):
            if dy is not None:
                seeds[result.name] = self.row(dy.tensor, result, i)
        elements = self.elements()
        wanted = [*(self.states[i] for i in carry), *elements.values(), *around.values()]
        differentiated = self.replay.differentiate(seeds, wanted)
        found = {t.name: g for t, g in zip(wanted, differentiated, strict=True)}
        carried = [self._flow(i, t, found[self.states[i].name]) for i, t in entering.items()]
        carried += [self._sum(at, t, g) for at, t in around.items() if (g := found[t.name])]
        dealt = {at: g for at, t in elements.items() if (g := found[t.name])}
        if not carried and not dealt:
            return []
        made = self.append(carried, dealt)
        self._hand_out()
        return at_positions(
            self.v, dict(zip([*(c.operand for c in carried), *dealt], made, strict=True))
        )

    def _flow(self, state: int, inner: gs.Tensor, result: Value | None) -> _Carried:
        """The gradient of a carried value."""
        start = self.dys[state] or zeros_like(self.v.builder, self.states[state])
        result = result or zeros_like(self.replay.builder, inner)
        return _Carried(self.first + state, inner, start, result)

    def _sum(self, operand: int, tensor: gs.Tensor, part: Value) -> _Carried:
        """The gradient of what all steps read, summed over them."""
        total = new_like(self.replay.builder, tensor)
        result = self.replay.builder.value(total) + part
        return _Carried(operand, total, zeros_like(self.v.builder, tensor), result)

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
        shape, name = tensor_shape(tensor), self.v.builder.fresh("rows")
        stack = gs.Variable(name, tensor.dtype, [self.length(), *(shape or ())])
        is_known = shape is not None and None not in shape
        row = self.row(stack, tensor) if is_known else new_like(self.replay.builder, tensor)
        self.saved.append(_Saved(tensor, stack, row))
        return row

    def _hand_out(self) -> None:
        """Makes the forward pass hand out what the gradient reads."""
        for saved in self.saved:
            if saved.row.outputs:
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


class ScanSteps(_Steps):
    """A Scan, of which the gradient is handed stacks from the other end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.node.inputs[self.count :]
        self.axes: list[int] = self.node.attrs.get("scan_input_axes") or [0] * len(given)
        self.turned: list[int] = self.node.attrs.get("scan_input_directions") or [0] * len(given)
        self.rows: list[tuple[gs.Tensor, gs.Tensor, int, int]] = []

    def length(self) -> int | None:
        shape = tensor_shape(self.node.inputs[self.count])
        return None if shape is None else shape[self.axes[0]]

    def given(self) -> dict[str, gs.Tensor]:
        parts = self.body.inputs[self.count :]
        given = self.node.inputs[self.count :]
        return {
            part.name: self._read(stack, part, axis, 1 - turned)
            for part, stack, axis, turned in zip(parts, given, self.axes, self.turned, strict=True)
        }

    def row(self, stack: gs.Tensor, like: gs.Tensor, result: int | None = None) -> gs.Tensor:
        axis, turned = self._stacking()[result] if result is not None else (0, 0)
        return self._read(stack, like, axis, 1 - turned)

    def _read(self, stack: gs.Tensor, like: gs.Tensor, axis: int, turned: int) -> gs.Tensor:
        inner = new_like(self.replay.builder, like)
        self.rows.append((stack, inner, axis, turned))
        return inner

    def _stacking(self) -> list[tuple[int, int]]:
        """Axis and direction by stacked result."""
        none = [0] * len(self.stacked)
        axes = self.node.attrs.get("scan_output_axes") or none
        return list(zip(axes, self.node.attrs.get("scan_output_directions") or none, strict=True))

    def elements(self) -> dict[int, gs.Tensor]:
        ports = self.body.inputs
        return {i: ports[i] for i in range(self.count, len(ports)) if self.v.wanted[i]}

    def append(self, carried: Sequence[_Carried], elements: Mapping[int, Value]) -> list[Value]:
        self.replay.close([*(c.result for c in carried), *elements.values()])
        rows = [row for row in self.rows if row[1].outputs] or self.rows[:1]
        self.replay.graph.inputs = [
            *(c.inner for c in carried),
            *(inner for _, inner, _, _ in rows),
        ]
        at = [i - self.count for i in elements]
        attrs = {
            "body": self.replay.graph,
            "num_scan_inputs": len(rows),
            "scan_input_axes": [axis for _, _, axis, _ in rows],
            "scan_input_directions": [turned for _, _, _, turned in rows],
        }
        if at:
            attrs["scan_output_axes"] = [self.axes[i] for i in at]
            attrs["scan_output_directions"] = [1 - self.turned[i] for i in at]
        operands = [*(c.start.tensor for c in carried), *(stack for stack, _, _, _ in rows)]
        like = [*(c.inner for c in carried), *(self.node.inputs[i] for i in elements)]
        return add_with_bodies(self.v.builder, "Scan", operands, like, attrs)

    def stack(self, tensor: gs.Tensor, rows: gs.Tensor) -> None:
        for key in ("scan_output_axes", "scan_output_directions"):
            if key in self.node.attrs:
                self.node.attrs[key] = [*self.node.attrs[key], 0]
        super().stack(tensor, rows)


class LoopSteps(_Steps):
    """A Loop, of which each turn of the gradient gathers its rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        add = self.replay.builder
        self.turns = self._turns()
        self.counter = gs.Variable(add.fresh("turn"), np.int64, [])
        self.turn = add.value(self.turns.tensor) - 1 - add.value(self.counter)

    def length(self) -> int | None:
        known = [shape for t in self.node.outputs[self.count :] if (shape := tensor_shape(t))]
        if known and known[0][0] is not None:
            return known[0][0]
        count, start = (constant(t) if t.name else None for t in self.node.inputs[:2])
        starts = not self.node.inputs[1].name or (start is not None and bool(start.all()))
        if count is None or not starts or not self._goes_on():
            return None
        return max(0, int(count.reshape(-1)[0]))

    def _goes_on(self) -> bool:
        """Whether no turn says that it is the last."""
        tensor = self.body.outputs[0]
        while tensor.inputs and tensor.inputs[0].op == "Identity":
            tensor = tensor.inputs[0].inputs[0]
        return tensor.name == self.body.inputs[1].name or is_true(tensor)

    def _turns(self) -> Value:
        """How many turns the forward pass took."""
        add, length = self.v.builder, self.length()
        if length is not None:
            return add.constant(length, np.int64)
        stacks = [t for t in self.node.outputs[self.count :] if t.name and t.shape is not None]
        if not stacks:
            number = self.body.inputs[0]
            shape = [None, *(tensor_shape(number) or ())]
            stacks = [gs.Variable(add.fresh("turns"), np.int64, shape)]
            self.stack(number, stacks[0])
        return add.value(stacks[0]).op("Shape", start=0, end=1).reshape([])

    def given(self) -> dict[str, gs.Tensor]:
        number, goes_on = self.body.inputs[:2]
        add = self.replay.builder
        always = add.constant(np.ones(tensor_shape(goes_on) or (), np.bool_))
        turn = self.turn.reshape([1] * len(tensor_shape(number) or ()))
        return {number.name: turn.tensor, goes_on.name: always.tensor}

    def row(self, stack: gs.Tensor, like: gs.Tensor, result: int | None = None) -> gs.Tensor:
        return self.replay.builder.value(stack).op("Gather", self.turn, axis=0).tensor

    def append(self, carried: Sequence[_Carried], elements: Mapping[int, Value]) -> list[Value]:
        add = self.replay.builder
        goes_on = gs.Variable(add.fresh("goes_on"), np.bool_, [])
        self.replay.close([add.value(goes_on).op("Identity"), *(c.result for c in carried)])
        self.replay.graph.inputs = [self.counter, goes_on, *(c.inner for c in carried)]
        operands = [self.turns.tensor, gs.Variable.empty(), *(c.start.tensor for c in carried)]
        attrs = {"body": self.replay.graph}
        return add_with_bodies(self.v.builder, "Loop", operands, [c.inner for c in carried], attrs)
