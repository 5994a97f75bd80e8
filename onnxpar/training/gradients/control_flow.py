"""Gradients of If, Loop and Scan: the same op with bodies that compute gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, tensor_shape
from onnxpar.training.gradients.bodies import (
    Replay,
    add_with_bodies,
    at_positions,
    hand_out,
    is_true,
    new_like,
    read_around,
    zeros_like,
)
from onnxpar.training.gradients.steps import Carried, Steps
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("If")
def if_(v: Vjp) -> Grads:
    """The gradient rule of If: adds an If on the same condition, whose branches compute the
    gradients of the branches."""
    around = read_around(v)
    keys = ("then_branch", "else_branch")
    branches = [_branch(v, keys[i], keys[1 - i], list(around.values())) for i in range(2)]
    pairs = dict(zip(around, zip(*(grads for _, grads in branches), strict=True), strict=True))
    used = [at for at in around if any(g is not None for g in pairs[at])]
    if not used:
        return []
    for i, (replay, _) in enumerate(branches):
        replay.close([pairs[at][i] or zeros_like(replay.builder, around[at]) for at in used])
    attrs = {key: replay.graph for key, (replay, _) in zip(keys, branches, strict=True)}
    results = add_with_bodies(v.builder, "If", [v.x.tensor], [around[at] for at in used], attrs)
    return at_positions(v, dict(zip(used, results, strict=True)))


def _branch(
    v: Vjp, key: str, other: str, wanted: Sequence[gs.Tensor]
) -> tuple[Replay, list[Value | None]]:
    """Returns a graph that computes the branch `key` and its gradients, and the gradients with
    respect to `wanted` (None for a tensor without one). `other` is the other branch, which must
    return zeros in place of this branch's random numbers."""
    body, none = v.node.attrs[key], v.node.attrs[other]
    replay = Replay(v.builder.fresh(key), body.opset)
    results = zip(body.outputs, v.dys, strict=False)
    seeds = {id(result): dy.tensor for result, dy in results if dy is not None}

    def drawn(tensor: gs.Tensor) -> gs.Tensor:
        """Returns a new result of the node: the value of a tensor of this branch, or zeros if the
        other branch runs."""
        outer = gs.Variable(v.builder.fresh("drawn"), tensor.dtype, tensor.shape)
        hand_out(body, tensor)
        none.outputs.append(zeros_like(Builder(none, f"{outer.name}/none"), tensor).tensor)
        v.node.outputs.append(outer)
        return outer

    replay.compute(body, {}, drawn)
    return replay, replay.differentiate(seeds, wanted)


class _Scan(Steps):
    """A Scan, and its gradient under construction: a Scan in the opposite direction, over the same
    sequences and over stacks of values that the forward pass saves. The methods are described in
    `Steps`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        none = [0] * len(self.node.inputs[self.count :])
        self.axes: list[int] = self.node.attrs.get("scan_input_axes") or none
        self.reversed: list[int] = self.node.attrs.get("scan_input_directions") or none
        self.rows: list[tuple[gs.Tensor, gs.Tensor, int, int]] = []

    def length(self) -> int | None:
        shape = tensor_shape(self.node.inputs[self.count])
        return None if shape is None else shape[self.axes[0]]

    def given(self) -> dict[int, gs.Tensor]:
        elements = self.body.inputs[self.count :]
        sequences = self.node.inputs[self.count :]
        return {
            id(element): self._read(sequence, element, axis, 1 - is_reversed)
            for element, sequence, axis, is_reversed in zip(
                elements, sequences, self.axes, self.reversed, strict=True
            )
        }

    def row(self, stack: gs.Tensor, like: gs.Tensor, result: int | None = None) -> gs.Tensor:
        axis, is_reversed = self._stacking()[result] if result is not None else (0, 0)
        return self._read(stack, like, axis, 1 - is_reversed)

    def _read(self, stack: gs.Tensor, like: gs.Tensor, axis: int, is_reversed: int) -> gs.Tensor:
        inner = new_like(self.replay.builder, like)
        self.rows.append((stack, inner, axis, is_reversed))
        return inner

    def _stacking(self) -> list[tuple[int, int]]:
        """Returns (axis, direction) of each stacked result."""
        none = [0] * len(self.stacked)
        axes = self.node.attrs.get("scan_output_axes") or none
        return list(zip(axes, self.node.attrs.get("scan_output_directions") or none, strict=True))

    def elements(self) -> dict[int, gs.Tensor]:
        ports = self.body.inputs
        return {i: ports[i] for i in range(self.count, len(ports)) if self.v.wanted[i]}

    def handed(self) -> list[gs.Tensor]:
        return [inner for _, inner, _, _ in self.rows]

    def stack_of(self, row: gs.Tensor) -> gs.Tensor | None:
        matches = [r for r in self.rows if r[1] is row and r[2:] == (0, 1)]
        return matches[0][0] if matches else None

    def append(
        self, carried: Sequence[Carried], elements: Mapping[int, Value], rows: Sequence[Value]
    ) -> list[Value]:
        self.replay.close([*(c.result for c in carried), *elements.values(), *rows])
        read = [row for row in self.rows if row[1].outputs] or self.rows[:1]
        self.replay.graph.inputs = [
            *(c.inner for c in carried),
            *(inner for _, inner, _, _ in read),
        ]
        at = [i - self.count for i in elements]
        attrs = {
            "body": self.replay.graph,
            "num_scan_inputs": len(read),
            "scan_input_axes": [axis for _, _, axis, _ in read],
            "scan_input_directions": [is_reversed for _, _, _, is_reversed in read],
        }
        if at or rows:
            attrs["scan_output_axes"] = [*(self.axes[i] for i in at), *(0 for _ in rows)]
            directions = [*(1 - self.reversed[i] for i in at), *(1 for _ in rows)]
            attrs["scan_output_directions"] = directions
        operands = [*(c.start.tensor for c in carried), *(stack for stack, _, _, _ in read)]
        like = [*(c.inner for c in carried), *(self.node.inputs[i] for i in elements)]
        like += [self._stack(row.tensor) for row in rows]
        return add_with_bodies(self.v.builder, "Scan", operands, like, attrs)

    def stack(self, tensor: gs.Tensor, rows: gs.Tensor) -> None:
        for key in ("scan_output_axes", "scan_output_directions"):
            if key in self.node.attrs:
                self.node.attrs[key] = [*self.node.attrs[key], 0]
        super().stack(tensor, rows)


class _Loop(Steps):
    """A Loop, and its gradient under construction: a Loop that reads rows of stacks, which the
    forward pass saves, by Gather. The methods are described in `Steps`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        add = self.replay.builder
        self.iterations = self._iterations()
        self.counter = gs.Variable(add.fresh("iteration"), np.int64, [])
        self.iteration = add.value(self.iterations.tensor) - 1 - add.value(self.counter)

    def length(self) -> int | None:
        shapes = [shape for t in self.node.outputs[self.count :] if (shape := tensor_shape(t))]
        if shapes and shapes[0][0] is not None:
            return shapes[0][0]
        count, start = (constant(t) if t.name else None for t in self.node.inputs[:2])
        starts = not self.node.inputs[1].name or (start is not None and bool(start.all()))
        if count is None or not starts or not self._goes_on():
            return None
        return max(0, int(count.reshape(-1)[0]))

    def _goes_on(self) -> bool:
        """True if the body always returns a true condition."""
        tensor = self.body.outputs[0]
        while tensor.inputs and tensor.inputs[0].op == "Identity":
            tensor = tensor.inputs[0].inputs[0]
        return tensor.name == self.body.inputs[1].name or is_true(tensor)

    def _iterations(self) -> Value:
        """Returns the number of iterations of the forward pass: a constant, or the number of rows
        of a stacked result. Adds such a result to the forward Loop if it has none."""
        add, length = self.v.builder, self.length()
        if length is not None:
            return add.constant(length, np.int64)
        stacks = [t for t in self.node.outputs[self.count :] if t.name and t.shape is not None]
        if not stacks:
            number = self.body.inputs[0]
            shape = [None, *(tensor_shape(number) or ())]
            stacks = [gs.Variable(add.fresh("iterations"), np.int64, shape)]
            self.stack(number, stacks[0])
        return add.value(stacks[0]).op("Shape", start=0, end=1).reshape([])

    def given(self) -> dict[int, gs.Tensor]:
        number, goes_on = self.body.inputs[:2]
        add = self.replay.builder
        always = add.constant(np.ones(tensor_shape(goes_on) or (), np.bool_))
        iteration = self.iteration.reshape([1] * len(tensor_shape(number) or ()))
        return {id(number): iteration.tensor, id(goes_on): always.tensor}

    def row(self, stack: gs.Tensor, like: gs.Tensor, result: int | None = None) -> gs.Tensor:
        return self.replay.builder.value(stack).op("Gather", self.iteration, axis=0).tensor

    def append(
        self, carried: Sequence[Carried], elements: Mapping[int, Value], rows: Sequence[Value]
    ) -> list[Value]:
        add = self.replay.builder
        goes_on = gs.Variable(add.fresh("goes_on"), np.bool_, [])
        always = add.value(goes_on).op("Identity")
        self.replay.close([always, *(c.result for c in carried), *rows])
        self.replay.graph.inputs = [self.counter, goes_on, *(c.inner for c in carried)]
        operands = [self.iterations.tensor, gs.Variable.empty(), *(c.start.tensor for c in carried)]
        attrs = {"body": self.replay.graph}
        like = [*(c.inner for c in carried), *(self._stack(row.tensor) for row in rows)]
        return add_with_bodies(self.v.builder, "Loop", operands, like, attrs)


@vjp("Scan")
def scan(v: Vjp) -> Grads:
    """The gradient rule of Scan: adds a Scan over the same elements in the opposite direction."""
    return _Scan(v, len(v.node.inputs) - v.node.attrs["num_scan_inputs"], 0, 0).gradients()


@vjp("Loop")
def loop(v: Vjp) -> Grads:
    """The gradient rule of Loop: adds a Loop over the same iterations in the opposite order."""
    return _Loop(v, len(v.node.attrs["body"].inputs) - 2, 2, 1).gradients()
