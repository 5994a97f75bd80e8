"""Gradients of recurrent networks.

First, the gates of all steps are computed again from X and Y, in one product for all steps. The
backward pass through the steps is then linear: it multiplies the gradient of the state by factors
that are already known. Finally, the gradients of weights are matrix products that sum over all
steps and the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any

from onnxpar.rules.cell_activations import activations_of
from onnxpar.training.gradients.directions import (
    Direction,
    Passed,
    frozen,
    join,
    linear,
    plus,
    product,
)
from onnxpar.training.gradients.gates import Gate
from onnxpar.training.gradients.value import Value
from onnxpar.training.gradients.vjp import Grads, Vjp, vjp


@vjp("RNN", trained=(1, 2, 3))
def rnn(v: Vjp) -> Grads:
    return _gradients(v, _of_rnn)


@vjp("GRU", trained=(1, 2, 3))
def gru(v: Vjp) -> Grads:
    return _gradients(v, _of_gru)


@vjp("LSTM", trained=(1, 2, 3, 7))
def lstm(v: Vjp) -> Grads:
    return _gradients(v, _of_lstm)


def _of_rnn(direction: Direction) -> Passed:
    """Returns the gradients of one direction of an RNN: H = f(x W + h R)."""
    beside_w, beside_r = direction.biases
    z = linear(direction.x, direction.w, beside_w) + linear(direction.before, direction.r, beside_r)
    gate = Gate.of(direction.acts[0], z)
    slope = direction.masked(gate.back(direction.v.builder.constant(1, z.dtype).expand(z.shape)))

    def step(dh: Value, dy: Value, slope: Value, *valid: Value) -> tuple[list[Value], Value]:
        total = dh + dy
        dz = total * slope
        return [frozen(total, dz @ direction.r, valid)], dz

    dz, ends = direction.back(step, [direction.dh], direction.dy, slope, *direction.masks)
    return Passed(dz, dz, product(dz, direction.before), ends[0])


def _of_gru(direction: Direction) -> Passed:
    """Returns the gradients of one direction of a GRU: H = (1 - z) n + z h. The reset gate r scales
    the contribution of h to n: after h's product with R (`linear_before_reset`), or before it."""
    f, g = direction.acts
    units = direction.r.shape[1]
    beside_w, beside_r = direction.biases
    xz, xr, xn = direction.gates(linear(direction.x, direction.w, beside_w))
    (r_gates, r_new), (b_gates, b_new) = _cut(direction.r, 2 * units), _cut(beside_r, 2 * units)
    hz, hr = direction.gates(linear(direction.before, r_gates, b_gates))
    z, r = Gate.of(f, xz + hz), Gate.of(f, xr + hr)
    resets_after = direction.v.attr("linear_before_reset") != 0
    read = direction.before if resets_after else r.y * direction.before
    hn = linear(read, r_new, b_new)
    n = Gate.of(g, xn + r.y * hn if resets_after else xn + hn)
    of_z, of_n = (direction.masked(d) for d in (z.back(direction.before - n.y), n.back(1.0 - z.y)))
    of_r = r.back(hn if resets_after else direction.before)

    def step(
        dh: Value, dy: Value, keep: Value, of_z: Value, of_n: Value, of_r: Value, r: Value
    ) -> tuple[list[Value], Value]:
        total = dh + dy
        dn = total * of_n
        reset = dn * r if resets_after else dn
        through = reset @ r_new
        dz, dr = total * of_z, (dn if resets_after else through) * of_r
        before = total * keep + (through if resets_after else through * r)
        return [before + join(-1, dz, dr) @ r_gates], join(-1, dz, dr, dn)

    sequences = (direction.dy, direction.masked(z.y, 1.0), of_z, of_n, of_r, r.y)
    gates, ends = direction.back(step, [direction.dh], *sequences)
    dz, dr, dn = direction.gates(gates)
    recurrent = join(-1, dz, dr, dn * r.y) if resets_after else gates
    dn = dn * r.y if resets_after else dn
    of_r_weights = join(0, product(join(-1, dz, dr), direction.before), product(dn, read))
    return Passed(gates, recurrent, of_r_weights, ends[0])


def _cut(weight: Value | None, at: int) -> tuple[Any, Any]:
    """Returns the first `at` rows of a weight, and the others; (None, None) without a weight."""
    if weight is None:
        return None, None
    return weight.slice(0, at, 0), weight.slice(at, weight.shape[0], 0)


def _of_lstm(direction: Direction) -> Passed:
    """Returns the gradients of one direction of an LSTM: C = f c + i n, H = o h(C). With peepholes,
    i and f read c, and o reads C."""
    cell = _Cell(direction)
    beside_w, beside_r = direction.biases
    pre = linear(direction.x, direction.w, beside_w) + linear(
        direction.before, direction.r, beside_r
    )
    zi, zo, zf, zn = direction.gates(pre)

    update = cell(cell.before(direction, zi, zf, zn), zi, zf, zn)
    peep_i, peep_o, peep_f = cell.peepholes
    out = Gate.of(cell.f, plus(zo, update.after, peep_o))
    shown = Gate.of(cell.h, update.after)
    of_i, of_f, of_n = update.back()
    of_o = out.back(shown.y)
    factors = direction.masked(join(-1, of_i, of_o, of_f, of_n))
    into = direction.masked(plus(shown.back(out.y), of_o, peep_o))
    carry = direction.masked(plus(plus(update.keep, of_i, peep_i), of_f, peep_f), 1.0)

    def step(
        dh: Value, dc: Value, dy: Value, factors: Value, into: Value, carry: Value, *valid: Value
    ) -> tuple[list[Value], Value]:
        total = dh + dy
        dc = dc + total * into
        dz = join(-1, dc, total, dc, dc) * factors
        return [frozen(total, dz @ direction.r, valid), dc * carry], dz

    sequences = (direction.dy, factors, into, carry, *direction.masks)
    dz, (of_h0, of_c0) = direction.back(step, [direction.dh, direction.dc], *sequences)
    di, do, df, _ = direction.gates(dz)
    of_peepholes = join(-1, di * update.c, do * update.after, df * update.c).sum([0, 1])
    return Passed(dz, dz, product(dz, direction.before), of_h0, of_c0, of_peepholes)


class _Cell:
    """The update of an LSTM's cells, for one step or for all steps at once. A call takes the cells
    before, and the operands of the gates i, f and n."""

    def __init__(self, direction: Direction) -> None:
        self.f, self.g, h = direction.acts
        self.h = replace(h, clip=None)  # as in onnxruntime
        self.is_coupled = bool(direction.v.attr("input_forget"))
        peepholes = direction.peepholes
        self.peepholes = [None] * 3 if peepholes is None else direction.gates(peepholes)

    def __call__(self, c: Value, zi: Value, zf: Value, zn: Value) -> _CellStep:
        peep_i, _, peep_f = self.peepholes
        i = Gate.of(self.f, plus(zi, c, peep_i))
        f = None if self.is_coupled else Gate.of(self.f, plus(zf, c, peep_f))
        return _CellStep(c, i, f, Gate.of(self.g, zn))

    def before(self, direction: Direction, *gates: Value) -> Value:
        """Returns the cells before each step, by a Scan. `gates` are the operands of i, f and n for
        all steps."""

        def step(states: list[Value], z: list[Value]) -> tuple[list[Value], list[Value]]:
            after = self(states[0], *z[:3]).after
            return [z[3].where(after, states[0]) if z[3:] else after], states

        scanned = direction.v.builder.scan(
            step, [direction.c0], [*gates, *direction.masks], direction.backwards
        )
        return scanned[1][0]


@dataclass
class _CellStep:
    """The cells `c` before a step, and the gates of the step: input i, forget f and new n. If f is
    None, it is 1 - i (`input_forget`)."""

    c: Value
    i: Gate
    f: Gate | None
    n: Gate

    @property
    def keep(self) -> Value:
        """The factor by which the step keeps the cells."""
        return 1.0 - self.i.y if self.f is None else self.f.y

    @cached_property
    def after(self) -> Value:
        """The cells after the step."""
        return self.keep * self.c + self.i.y * self.n.y

    def back(self) -> tuple[Value, Value, Value]:
        """Returns the derivatives of the cells after the step with respect to the operands of i, f
        and n."""
        of_n = self.n.back(self.i.y)
        if self.f is None:
            zeros = of_n.builder.zeros(of_n.shape, of_n.dtype)
            return self.i.back(self.n.y - self.c), zeros, of_n
        return self.i.back(self.n.y), self.f.back(self.c), of_n


def _gradients(v: Vjp, passed: Callable[[Direction], Passed]) -> Grads:
    """Returns the gradients of a recurrent node's operands, joined from the gradients of each
    direction, which `passed` computes."""
    _add_y(v)
    directions = [Direction(v, acts, i) for i, acts in enumerate(activations_of(v.node))]
    passes = [passed(direction) for direction in directions]
    dx = reduce(
        add, [p.gates @ direction.w for p, direction in zip(passes, directions, strict=True)]
    )
    dw = _stacked(
        [product(p.gates, direction.x) for p, direction in zip(passes, directions, strict=True)]
    )
    db = _stacked([join(0, p.gates.sum([0, 1]), p.recurrent.sum([0, 1])) for p in passes])
    dr, dp = _stacked([p.of_r for p in passes]), _stacked([p.of_peepholes for p in passes])
    dh, dc = _stacked([p.of_h0 for p in passes]), _stacked([p.of_c0 for p in passes])
    if v.attr("layout"):
        dx = dx.swap(0, 1)
        dh, dc = (None if d is None else d.swap(0, 1) for d in (dh, dc))
    return dx, dw, dr, db, None, dh, dc, dp


def _add_y(v: Vjp) -> None:
    """Makes the node return Y, the hidden states of all steps, if it does not yet: the gradient
    reads Y."""
    count = v.operands[1].shape[0]
    shape = [*v.x.shape[:2], v.operands[2].shape[-1]]
    shape.insert(2 if v.attr("layout") else 1, count)
    v.output(0, v.x.dtype, shape)


def _stacked(values: Sequence[Value | None]) -> Value | None:
    """Stacks the directions' tensors along a new first dimension; None if the directions have
    none."""
    rows = [value.unsqueeze([0]) for value in values if value is not None]
    return join(0, *rows) if rows else None
