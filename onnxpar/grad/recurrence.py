"""Gradients of recurrent networks.

All gates of all steps are computed anew at once, from X and Y. Going back through the steps then is
linear: it carries the gradient of the state alone, by factors made before. The gradients of weights
are products over all steps and the batch, made behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any

from onnxpar.grad.directions import Passed, Way, frozen, join, linear, plus, product
from onnxpar.grad.gates import Gate
from onnxpar.grad.value import Value
from onnxpar.grad.vjp import Grads, Vjp, vjp
from onnxpar.rules.cell_activations import activations_of


@vjp("RNN", trained=(1, 2, 3))
def rnn(v: Vjp) -> Grads:
    return _gradients(v, _rnn_way)


@vjp("GRU", trained=(1, 2, 3))
def gru(v: Vjp) -> Grads:
    return _gradients(v, _gru_way)


@vjp("LSTM", trained=(1, 2, 3, 7))
def lstm(v: Vjp) -> Grads:
    return _gradients(v, _lstm_way)


def _rnn_way(way: Way) -> Passed:
    beside_w, beside_r = way.biases
    z = linear(way.x, way.w, beside_w) + linear(way.before, way.r, beside_r)
    gate = Gate.of(way.acts[0], z)
    slope = way.masked(gate.back(way.v.builder.constant(1, z.dtype).expand(z.shape)))

    def step(dh: Value, dy: Value, slope: Value, *valid: Value) -> tuple[list[Value], Value]:
        total = dh + dy
        dz = total * slope
        return [frozen(total, dz @ way.r, valid)], dz

    dz, ends = way.back(step, [way.dh], way.dy, slope, *way.masks)
    return Passed(dz, dz, product(dz, way.before), ends[0])


def _gru_way(way: Way) -> Passed:
    """H = (1 - z) n + z h, where r scales what n gets of h: behind R, or before it."""
    f, g = way.acts
    units = way.r.shape[1]
    beside_w, beside_r = way.biases
    xz, xr, xn = way.gates(linear(way.x, way.w, beside_w))
    (r_gates, r_new), (b_gates, b_new) = _cut(way.r, 2 * units), _cut(beside_r, 2 * units)
    hz, hr = way.gates(linear(way.before, r_gates, b_gates))
    z, r = Gate.of(f, xz + hz), Gate.of(f, xr + hr)
    is_behind = way.v.attr("linear_before_reset") != 0
    read = way.before if is_behind else r.y * way.before
    hn = linear(read, r_new, b_new)
    n = Gate.of(g, xn + r.y * hn if is_behind else xn + hn)
    of_z, of_n = (way.masked(d) for d in (z.back(way.before - n.y), n.back(1.0 - z.y)))
    of_r = r.back(hn if is_behind else way.before)

    def step(
        dh: Value, dy: Value, keep: Value, of_z: Value, of_n: Value, of_r: Value, r: Value
    ) -> tuple[list[Value], Value]:
        total = dh + dy
        dn = total * of_n
        reset = dn * r if is_behind else dn
        through = reset @ r_new
        dz, dr = total * of_z, (dn if is_behind else through) * of_r
        before = total * keep + (through if is_behind else through * r)
        return [before + join(-1, dz, dr) @ r_gates], join(-1, dz, dr, dn)

    given = (way.dy, way.masked(z.y, 1.0), of_z, of_n, of_r, r.y)
    gates, ends = way.back(step, [way.dh], *given)
    dz, dr, dn = way.gates(gates)
    recurrent = join(-1, dz, dr, dn * r.y) if is_behind else gates
    dn = dn * r.y if is_behind else dn
    of_r_weights = join(0, product(join(-1, dz, dr), way.before), product(dn, read))
    return Passed(gates, recurrent, of_r_weights, ends[0])


def _cut(weight: Value | None, at: int) -> tuple[Any, Any]:
    """The rows of a weight before one and from it on."""
    if weight is None:
        return None, None
    return weight.slice(0, at, 0), weight.slice(at, weight.shape[0], 0)


def _lstm_way(way: Way) -> Passed:
    """C = f c + i n, H = o h(C); with peepholes, i and f see the c before and o that behind."""
    cell = _Cell(way)
    beside_w, beside_r = way.biases
    pre = linear(way.x, way.w, beside_w) + linear(way.before, way.r, beside_r)
    zi, zo, zf, zn = way.gates(pre)

    made = cell(cell.before(way, zi, zf, zn), zi, zf, zn)
    peep_i, peep_o, peep_f = cell.peepholes
    out = Gate.of(cell.f, plus(zo, made.after, peep_o))
    shown = Gate.of(cell.h, made.after)
    of_i, of_f, of_n = made.back()
    of_o = out.back(shown.y)
    factors = way.masked(join(-1, of_i, of_o, of_f, of_n))
    into = way.masked(plus(shown.back(out.y), of_o, peep_o))
    carry = way.masked(plus(plus(made.keep, of_i, peep_i), of_f, peep_f), 1.0)

    def step(
        dh: Value, dc: Value, dy: Value, factors: Value, into: Value, carry: Value, *valid: Value
    ) -> tuple[list[Value], Value]:
        total = dh + dy
        dc = dc + total * into
        dz = join(-1, dc, total, dc, dc) * factors
        return [frozen(total, dz @ way.r, valid), dc * carry], dz

    steps = (way.dy, factors, into, carry, *way.masks)
    dz, (of_h0, of_c0) = way.back(step, [way.dh, way.dc], *steps)
    di, do, df, _ = way.gates(dz)
    of_peepholes = join(-1, di * made.c, do * made.after, df * made.c).sum([0, 1])
    return Passed(dz, dz, product(dz, way.before), of_h0, of_c0, of_peepholes)


class _Cell:
    """What an LSTM does to its cells, in one step or in all at once."""

    def __init__(self, way: Way) -> None:
        self.f, self.g, h = way.acts
        self.h = replace(h, clip=None)  # as in onnxruntime
        self.is_coupled = bool(way.v.attr("input_forget"))
        peepholes = way.peepholes
        self.peepholes = [None] * 3 if peepholes is None else way.gates(peepholes)

    def __call__(self, c: Value, zi: Value, zf: Value, zn: Value) -> _CellStep:
        peep_i, _, peep_f = self.peepholes
        i = Gate.of(self.f, plus(zi, c, peep_i))
        f = None if self.is_coupled else Gate.of(self.f, plus(zf, c, peep_f))
        return _CellStep(c, i, f, Gate.of(self.g, zn))

    def before(self, way: Way, *gates: Value) -> Value:
        """The cells before all steps."""

        def step(states: list[Value], z: list[Value]) -> tuple[list[Value], list[Value]]:
            after = self(states[0], *z[:3]).after
            return [z[3].where(after, states[0]) if z[3:] else after], states

        scanned = way.v.builder.scan(step, [way.c0], [*gates, *way.masks], way.backwards)
        return scanned[1][0]


@dataclass
class _CellStep:
    """The cells before a step and the gates between them and those behind it; f is 1 - i where it
    is None."""

    c: Value
    i: Gate
    f: Gate | None
    n: Gate

    @property
    def keep(self) -> Value:
        """How much of the cells stays."""
        return 1.0 - self.i.y if self.f is None else self.f.y

    @cached_property
    def after(self) -> Value:
        """The cells behind it."""
        return self.keep * self.c + self.i.y * self.n.y

    def back(self) -> tuple[Value, Value, Value]:
        """The gradients of the operands of i, f and n for a gradient of 1 of the cells behind."""
        of_n = self.n.back(self.i.y)
        if self.f is None:
            zeros = of_n.builder.zeros(of_n.shape, of_n.dtype)
            return self.i.back(self.n.y - self.c), zeros, of_n
        return self.i.back(self.n.y), self.f.back(self.c), of_n


def _gradients(v: Vjp, passed: Callable[[Way], Passed]) -> Grads:
    """The gradients of the operands, of all directions together."""
    _give_y(v)
    ways = [Way(v, acts, i) for i, acts in enumerate(activations_of(v.node))]
    found = [passed(way) for way in ways]
    dx = reduce(add, [p.gates @ way.w for p, way in zip(found, ways, strict=True)])
    dw = _stacked([product(p.gates, way.x) for p, way in zip(found, ways, strict=True)])
    db = _stacked([join(0, p.gates.sum([0, 1]), p.recurrent.sum([0, 1])) for p in found])
    dr, dp = _stacked([p.of_r for p in found]), _stacked([p.of_peepholes for p in found])
    dh, dc = _stacked([p.of_h0 for p in found]), _stacked([p.of_c0 for p in found])
    if v.attr("layout"):
        dx = dx.swap(0, 1)
        dh, dc = (None if d is None else d.swap(0, 1) for d in (dh, dc))
    return dx, dw, dr, db, None, dh, dc, dp


def _give_y(v: Vjp) -> None:
    """Makes the node give Y."""
    ways = v.operands[1].shape[0]
    shape = [*v.x.shape[:2], v.operands[2].shape[-1]]
    shape.insert(2 if v.attr("layout") else 1, ways)
    v.output(0, v.x.dtype, shape)


def _stacked(ways: Sequence[Value | None]) -> Value | None:
    """What the directions have, one behind the other along a new dimension; None where nothing."""
    given = [w.unsqueeze([0]) for w in ways if w is not None]
    return join(0, *given) if given else None
