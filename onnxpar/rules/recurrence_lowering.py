"""Lowers recurrent networks with split hidden units: in every step, ranks gather the state of all
units, which the gates read.

The contribution of X to the gates (X W) is computed for all steps at once, before a Scan. In the
Scan's body, the first dimension of each tensor is the direction: one Scan, with one collective per
step, serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import given
from onnxpar.rules.cell_activations import Activation, activations_of
from onnxpar.rules.communicate import has_output, held_positions, like
from onnxpar.rules.rule import Local, Lowering

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
"""The number of gates of a unit, by op."""


def lower(build: Lowering) -> None:
    """Replaces a recurrent node on a rank that holds a shard of the hidden units."""
    _Network(build).lower()


class _Network:
    """Builds the nodes in place of one recurrent node. The node's operands 0 to 7 are X, W, R, B,
    sequence_lens, initial_h, initial_c and P in the letters of the ONNX standard."""

    def __init__(self, build: Lowering) -> None:
        self.build = build
        self.node = node = build.local.node
        self.gates = GATES[node.op]
        self.by_batch = bool(node.attrs.get("layout"))
        self.resets_product = node.attrs.get("linear_before_reset", 0) != 0
        self.directions = build.local.size("d")
        self.activations = activations_of(node)
        self.peepholes: list[gs.Variable] = []
        direction = node.attrs.get("direction", "forward")
        self.flags = {"forward": [0], "reverse": [1]}.get(direction, [0, 1])

    def lower(self) -> None:
        """Adds the products of all steps with W, the Scan over the steps, and nodes that put its
        results in the node's form."""
        build = self.build
        states = [self._state(5)] + ([self._state(6)] if self.node.op == "LSTM" else [])
        if given(self.node, 7) is not None:
            peepholes = build.add("Unsqueeze", [build.input(7)], axes=[1])
            self.peepholes = self._split(peepholes, 3)
        self.recurrent = self._recurrent_weight()
        self.recurrent_bias = self._recurrent_bias()
        lengths = self._lengths()
        sequences = self._sequences(lengths)
        per_direction = len(sequences) // self.directions
        ends, ys = build.scan(
            self._step,
            states,
            sequences,
            scan_input_directions=lambda local: self._directions(local, per_direction),
            scan_output_directions=lambda local: self._directions(local, 1),
        )
        if has_output(build, 0):
            y = self._joined([build.add("Unsqueeze", [y], axes=[1]) for y in ys], 1)
            build.finish("Transpose", [y], perm=[2, 0, 1, 3] if self.by_batch else [0, 1, 2, 3])
        for output, end in enumerate(ends, 1):
            if has_output(build, output):
                self._finish_end(end, lengths, output)

    def _directions(self, local: Local, count: int) -> list[int]:
        """Returns the scan direction (0 forward, 1 reverse) of each of the rank's sequences; each
        direction of the network has `count` sequences."""
        return [self.flags[d] for d in local.positions("d").tolist() for _ in range(count)]

    def _state(self, operand: int) -> gs.Tensor:
        """Returns the initial state that is operand `operand`, [directions, batch, units]; zeros
        without the operand."""
        if given(self.node, operand) is not None:
            return self._transposed(self.build.input(operand))

        def shape(local: Local) -> Any:
            return np.array([local.size("d"), local.size("b"), local.size("h")], np.int64)

        zero = like(self.build.input(0), [[[0]]])
        return self.build.add("Expand", [zero, self.build.per_rank(shape)])

    def _transposed(self, x: gs.Tensor) -> gs.Tensor:
        """Swaps dimensions 0 and 1 of a state, direction and batch, if the attribute `layout` puts
        the batch first."""
        return self.build.add("Transpose", [x], perm=[1, 0, 2]) if self.by_batch else x

    def _recurrent_weight(self) -> list[gs.Tensor]:
        """Returns R transposed, the right operand of products with a gathered state: one tensor
        [directions, all units, rows of gates]; two if the last gate reads another state than the
        others."""
        build, weight = self.build, self.build.input(2)
        order = build.gathered("h")
        if not np.array_equal(order, np.arange(len(order))):
            weight = build.add("Gather", [weight, order], axis=2)
        transposed = build.add("Transpose", [weight], perm=[0, 2, 1])
        if self.node.op != "GRU" or self.resets_product:
            return [transposed]

        def sizes(local: Local) -> list[int]:
            return [2 * local.size("h"), local.size("h")]

        return [*build.add_each("Split", [transposed], 2, axis=2, split=sizes)]

    def _recurrent_bias(self) -> gs.Tensor | None:
        """Returns the bias of R if it must be added in the Scan, because a gate scales it; else
        None."""
        if self.node.op != "GRU" or not self.resets_product or given(self.node, 3) is None:
            return None
        return self.build.add("Unsqueeze", [self._biases()[1]], axes=[1])

    def _biases(self) -> list[gs.Variable]:
        """Returns the biases of W and of R, each [directions, rows of gates]."""

        def sizes(local: Local) -> list[int]:
            return [self.gates * local.size("h")] * 2

        return self.build.add_each("Split", [self.build.input(3)], 2, axis=1, split=sizes)

    def _lengths(self) -> gs.Tensor | None:
        """Returns the number of steps of each sequence, [1, batch, 1]; None if all sequences have
        all steps."""
        if given(self.node, 4) is None:
            return None
        lengths = self.build.add("Cast", [self.build.input(4)], to=7)
        return self.build.add("Unsqueeze", [lengths], axes=[0, 2])

    def _sequences(self, lengths: gs.Tensor | None) -> list[gs.Tensor]:
        """Returns the sequences that the Scan reads. For each direction: X W plus bias, and if
        sequences differ in length, a mask that is True for the steps of a sequence."""
        build, x = self.build, self.build.input(0)
        if self.by_batch:
            x = build.add("Transpose", [x], perm=[1, 0, 2])
        bias = None
        if given(self.node, 3) is not None:
            of_w, of_r = self._biases()
            is_apart = self.recurrent_bias is not None
            bias = of_w if is_apart else build.add("Add", [of_w, of_r])
        masks: list[gs.Tensor] = []
        if lengths is not None:
            masks = [build.add("Less", [held_positions(build, "s", 0, 3), lengths])]
        sequences: list[gs.Tensor] = []
        for i in range(self.directions):
            weight = build.add("Transpose", [self._of_direction(build.input(1), i)], perm=[1, 0])
            product: gs.Tensor = build.add("MatMul", [x, weight])
            if bias is not None:
                product = build.add("Add", [product, self._of_direction(bias, i)])
            sequences += [product, *masks]
        return sequences

    def _of_direction(self, x: gs.Tensor, i: int) -> gs.Tensor:
        """Element `i` of the first dimension of `x`."""
        return self.build.add("Gather", [x, np.array(i, np.int64)], axis=0)

    def _joined(self, parts: Sequence[gs.Tensor], axis: int) -> gs.Tensor:
        """Concatenates tensors along `axis`."""
        return parts[0] if len(parts) == 1 else self.build.add("Concat", parts, axis=axis)

    def _stacked(self, parts: Sequence[gs.Tensor]) -> gs.Tensor:
        """The tensors of all directions, stacked along a new first dimension."""
        return self._joined([self.build.add("Unsqueeze", [p], axes=[0]) for p in parts], 0)

    def _step(
        self, states: list[gs.Tensor], elements: list[gs.Tensor]
    ) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
        """Adds the body of the Scan for one step: from (states, elements of the sequences) to (new
        states, the element of Y for each direction)."""
        count = len(elements) // self.directions
        cells: dict[str, Callable[..., list[gs.Tensor]]]
        cells = {"RNN": self._rnn, "GRU": self._gru, "LSTM": self._lstm}
        ends = cells[self.node.op](self._stacked(elements[::count]), *states)
        y = ends[0]
        if count > 1:
            valid = self._stacked(elements[1::count])
            ends = [self._op("Where", valid, *pair) for pair in zip(ends, states, strict=True)]
            y = self._op("Where", valid, y, like(y, 0))
        return ends, [self._of_direction(y, i) for i in range(self.directions)]

    def _rnn(self, x: gs.Tensor, h: gs.Tensor) -> list[gs.Tensor]:
        """Returns the new state H = f(x + h R)."""
        return [self._activated(0, self._op("Add", x, self._product(self._whole(h))))]

    def _gru(self, x: gs.Tensor, h: gs.Tensor) -> list[gs.Tensor]:
        """Returns the new state H = (1 - z) n + z h, where r scales h in n, or with
        `linear_before_reset` the product of h and R."""
        whole = self._whole(h)
        xz, xr, xn = self._split(x, 3)
        if self.resets_product:
            product = self._product(whole)
            if self.recurrent_bias is not None:
                product = self._op("Add", product, self.recurrent_bias)
            hz, hr, hn = self._split(product, 3)
            r = self._activated(0, self._op("Add", xr, hr))
            hn = self._op("Mul", r, hn)
        else:
            hz, hr = self._split(self._product(whole), 2)
            r = self._activated(0, self._op("Add", xr, hr))
            hn = self._product(self._whole(self._op("Mul", r, h)), 1)
        z = self._activated(0, self._op("Add", xz, hz))
        n = self._activated(1, self._op("Add", xn, hn))
        return [self._op("Add", n, self._op("Mul", z, self._op("Sub", h, n)))]

    def _lstm(self, x: gs.Tensor, h: gs.Tensor, c: gs.Tensor) -> list[gs.Tensor]:
        """Returns the new states H = o h(C), where h is an activation, and C = f c + i n. With
        peepholes, i and f also read the old c, and o reads the new C."""
        gates = self._split(self._op("Add", x, self._product(self._whole(h))), 4)
        i = self._activated(0, self._seeing(gates[0], c, 0))
        if self.node.attrs.get("input_forget"):
            f = self._op("Sub", like(i, 1), i)
        else:
            f = self._activated(0, self._seeing(gates[2], c, 2))
        n = self._activated(1, gates[3])
        after = self._op("Add", self._op("Mul", f, c), self._op("Mul", i, n))
        o = self._activated(0, self._seeing(gates[1], after, 1))
        return [self._op("Mul", o, self._activated(2, after, is_bound=False)), after]

    def _whole(self, h: gs.Tensor) -> gs.Tensor:
        """Returns the state of all units, gathered from the ranks."""
        return self.build.all_gather(h, "h", 2, lambda local: local.size("h"))

    def _product(self, whole: gs.Tensor, part: int = 0) -> gs.Variable:
        """Returns the product of `whole`, the state of all units, with R for the rank's gates.
        `part` is the index of R's tensor in `self.recurrent`."""
        return self._op("MatMul", whole, self.recurrent[part])

    def _split(self, x: gs.Tensor, count: int) -> list[gs.Variable]:
        """Splits the last dimension of `x` into `count` gates of the rank's units."""

        def sizes(local: Local) -> list[int]:
            return [local.size("h")] * count

        return self.build.add_each("Split", [x], count, axis=2, split=sizes)

    def _seeing(self, gate: gs.Tensor, c: gs.Tensor, peephole: int) -> gs.Tensor:
        """Adds c times a peephole weight to a gate, if the node has peepholes."""
        if not self.peepholes:
            return gate
        return self._op("Add", gate, self._op("Mul", c, self.peepholes[peephole]))

    def _activated(self, which: int, x: gs.Tensor, is_bound: bool = True) -> gs.Tensor:
        """Applies activation number `which` to `x`, with its limit (`clip`) if `is_bound`. If the
        directions have different activations, each rank computes both and selects one: ranks with
        different directions run the same nodes."""
        kinds = dict.fromkeys(of_direction[which] for of_direction in self.activations)
        results = [self._function(k if is_bound else replace(k, clip=None), x) for k in kinds]
        if len(results) == 1:
            return results[0]

        def is_second(local: Local) -> Any:
            return (local.positions("d") == 1).reshape(-1, 1, 1)

        return self._op("Where", self.build.per_rank(is_second), results[1], results[0])

    def _function(self, activation: Activation, x: gs.Tensor) -> gs.Tensor:
        """Applies an activation, a chain of ops, to `x`."""
        for op, operands, attrs in activation.steps():
            x = self.build.add(op, [x, *(like(x, o) for o in operands)], **attrs)
        return x

    def _op(self, op: str, *operands: Any) -> gs.Variable:
        return self.build.add(op, operands)

    def _finish_end(self, end: gs.Tensor, lengths: gs.Tensor | None, output: int) -> None:
        """Makes result `output` of the node from a last state. The result is zero for sequences
        without steps, even if their initial state is not zero."""
        build = self.build
        if lengths is not None:
            has_any = build.add("Less", [np.array(0, np.int64), lengths])
            end = build.add("Where", [has_any, end, like(end, 0)])
        build.finish("Identity", [self._transposed(end)], output)
