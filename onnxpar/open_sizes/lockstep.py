"""Infers a graph with open sizes at several bindings in step.

A node is folded away where all bindings agree, or where its results are sizes: whole numbers that
have a closed form. They become constants that differ between the bindings, and in the end small
computations on the sizes that a run has. Whatever else depends on sizes stays a node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TypeProto

from onnxpar.base.arrays import Array
from onnxpar.model.shapes import Walk, known_sizes
from onnxpar.open_sizes.equal_sizes import EVEN, Place, Shapes, equal_sizes
from onnxpar.symbols.fits import ENOUGH, fit
from onnxpar.symbols.quotients import AFAR, applied, find_quotient
from onnxpar.symbols.symbols import Binding, Polynomial, Quotient, Variable, quotient, rounded_up
from onnxpar.symbols.ties import solve_tie

MOST = 64
"""Elements of a tensor of sizes."""

_EXACT = frozenset(
    [
        "Shape",
        "Size",
        "Constant",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Mod",
        "Floor",
        "Ceil",
        "Neg",
        "Concat",
        "Gather",
        "GatherElements",
        "GatherND",
        "Slice",
        "Squeeze",
        "Unsqueeze",
        "Cast",
        "CastLike",
        "Identity",
        "Reshape",
        "Flatten",
        "ReduceProd",
        "ReduceSum",
        "Split",
        "Expand",
        "Tile",
        "Transpose",
        "ConstantOfShape",
        "ScatterND",
        "ScatterElements",
        "Where",
        "Max",
        "Min",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "And",
        "Or",
        "Not",
    ]
)
"""Ops whose results are polynomials where their operands are, with exceptions: see `_is_exact`."""
_SAME = frozenset(("Max", "Min"))
_COMPARE = frozenset(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"))
_ROUND = frozenset(("Floor", "Ceil", "Cast"))
_FRACTION = 1 << 10
"""Floats that are multiples of 1 / _FRACTION, and not too large, are exact sizes."""


Strides = dict[tuple[str, int, str, int], tuple[int, int, int]]
"""How a result's size depends on an operand's (`find_quotient`), by result, axis, operand, axis."""


@dataclass(frozen=True)
class Unsolved:
    """A node that needs two sizes to be equal, for which no symbol can be written otherwise."""

    node: NodeProto
    first: Polynomial
    second: Polynomial


class Lockstep:
    """Walks over one graph, one for each binding of the symbols, which are in order; `strides` are
    those known from other walks, to which more are added; `closed` symbols have no other sizes
    than are sampled.

    `live` are the bindings that the model still fits. What of a result's size differs between them
    is told in closed form, by quotients too (`quotients`), or taken for a size that data decides.
    Where two sizes must be equal that are not, `tie` is what makes them so, a symbol and what to
    write for it: the walk ends there; `is_certain` says that an op's attributes give the size, or
    a weight that is not repeated.
    `found` are all open sizes, `void` those of operands of which nothing is left.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Sequence[Mapping[str, TypeProto]],
        bindings: Sequence[Binding],
        symbols: Sequence[str],
        strides: Strides | None = None,
        closed: Collection[str] = (),
    ) -> None:
        self.model = model
        self.bindings = bindings
        self.symbols = symbols
        self.strides = {} if strides is None else strides
        self.closed = frozenset(closed)
        self.walks = [Walk(model, types) for types in inputs]
        self.live = list(range(len(bindings)))
        self.kept: list[NodeProto] = []
        self.varies: set[str] = set()
        self.quotients: list[Quotient] = []
        self.conflicts: list[NodeProto] = []
        self.tie: tuple[str, Polynomial] | None = None
        self.is_certain = False
        self.found: dict[Polynomial, None] = {}
        self.void: list[Polynomial] = []
        self.unsolved: list[Unsolved] = []
        self.lost: list[str] = []
        self._variables: dict[Variable, list[int]] = {}
        self._known: dict[tuple[int, ...], Polynomial | None] = {}

    def run(self) -> None:
        """Goes through all nodes."""
        for node in self.model.graph.node:
            self.tie = self._tie(node)
            if self.tie is not None:
                return
            self._step(node)

    @property
    def variables(self) -> dict[Variable, list[int]]:
        """The symbols' and quotients' values at the live bindings."""
        if not self._variables:
            bindings = [self.bindings[i] for i in self.live]
            self._variables.update({s: [b[s] for b in bindings] for s in bindings[0]})
            self._variables.update({q: [q.at(b) for b in bindings] for q in self.quotients})
        return self._variables

    def size(self, name: str, axis: int) -> Polynomial | None:
        """A dimension of a tensor in closed form, None where it has none or is not known."""
        shapes = [self.walks[i].shape(name) for i in self.live]
        if any(s is None or axis >= len(s) for s in shapes):
            return None
        return self._fit([s[axis] for s in shapes if s is not None])

    def value(self, name: str) -> Polynomial | None:
        """The number that a tensor of one element holds, in closed form; None where it has none or
        is not known."""
        each = [self.walks[i].values.get(name) for i in self.live]
        known = [int(np.reshape(v, -1)[0]) for v in each if v is not None and np.size(v) == 1]
        return self._fit(known) if len(known) == len(each) else None

    def sizes(self, name: str) -> list[Polynomial | None]:
        """The dimensions of a tensor in closed form, None for those that have none or are not
        known."""
        each = [self.walks[i].sizes(name) or () for i in self.live]
        known = [
            [size for size in column if size is not None] for column in zip(*each, strict=False)
        ]
        return [self._fit(column) if len(column) == len(each) else None for column in known]

    def _fit(self, values: Sequence[int]) -> Polynomial | None:
        key = tuple(values)
        if key not in self._known:
            self._known[key] = fit(key, self.variables)
        return self._known[key]

    def _learn(self, size: Polynomial) -> None:
        """Takes note of the quotients in a size."""
        new = [q for q in size.quotients if q not in self.quotients]
        if new:
            self.quotients += new
            self._variables = {}
            self._known = {k: v for k, v in self._known.items() if v is not None}

    def _tie(self, node: NodeProto) -> tuple[str, Polynomial] | None:
        """What makes sizes equal that the node needs to be."""
        ends = [self.walks[i] for i in (self.live[0], self.live[-1])]
        one, two = shapes = [[walk.sizes(name) for name in node.input] for walk in ends]
        needs = zip(equal_sizes(node, one), equal_sizes(node, two), strict=False)
        for (place, other, repeats), (_, again, _) in needs:
            sizes = [(_size_at(at, place), _size_at(at, other)) for at in shapes]
            equal = all(a == b or (repeats and 1 in (a, b)) for a, b in sizes)
            if equal or any(None in pair for pair in sizes) or other != again:
                continue
            first, second = self._in_closed_form(node, place), self._in_closed_form(node, other)
            if first is None or second is None or not (first - second).variables:
                continue
            tie = solve_tie(first, second, self.symbols)
            if tie is not None:
                self.is_certain = isinstance(other, int) or (
                    not repeats and self._is_stored(node.input[place[0]], node.input[other[0]])
                )
                return tie
            self.unsolved.append(Unsolved(node, first, second))
        return None

    def _is_stored(self, *names: str) -> bool:
        return any(tensor.name in names for tensor in self.model.graph.initializer)

    def _in_closed_form(self, node: NodeProto, place: Place | int) -> Polynomial | None:
        if isinstance(place, int):
            return Polynomial.constant(place)
        operand, axis = place
        return self.size(node.input[operand], axis)

    def _step(self, node: NodeProto) -> None:
        walks = [self.walks[i] for i in self.live]
        found = [walk.evaluate(node) for walk in walks]
        results = [f for f in found if f is not None]
        is_known = len(results) == len(found)
        exact = self._is_exact(node, results if is_known else [])
        if is_known and exact and self._are_sizes(node, results):
            for walk, values in zip(walks, results, strict=True):
                walk.fold(node, values)
            if not _agree(results):
                self.varies.update(node.output)
            return
        self.kept.append(node)
        if any(name in self.varies for name in node.input):
            self.varies.update(node.output)
        small = all(np.size(v) <= MOST and np.ndim(v) <= 1 for r in results for v in r)
        for walk, values_ in zip(walks, found, strict=True):
            if is_known and small and exact:
                walk.know(node, values_ or [])
            else:
                walk.infer(node)
        self._check(node)
        for name in node.output:
            if name:
                self._explain(node, name)

    def _check(self, node: NodeProto) -> None:
        """Notes whether the node fits its operands; bindings at which it does not are dropped."""
        odd = [i for i in self.live if self.walks[i].conflicts[-1:] == [node]]
        if len(self.live) - len(odd) >= ENOUGH and self.live[0] not in odd:
            if odd:
                self.live = [i for i in self.live if i not in odd]
                self._known.clear()
                self._variables = {}
        elif odd:
            self.conflicts.append(node)

    def _explain(self, node: NodeProto, name: str) -> None:
        """Sees to it that every size of a result is a number, has a closed form or is unknown."""
        shapes = [self.walks[i].sizes(name) for i in self.live]
        if any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
            for i in self.live:
                self.walks[i].forget(name)
            return
        for axis, column in enumerate(zip(*(s or () for s in shapes), strict=True)):
            values = [v for v in column if v is not None]
            if values and min(values) < 1:
                self.void += self._open_sizes(node)
            if len(values) == len(column):
                size = self._told(node, name, axis, values)
                if size is not None:
                    if size.variables:
                        self.found[size] = None
                    continue
                self._lose(node)
            for i in self.live:
                self.walks[i].forget_size(name, axis)

    def _told(
        self, node: NodeProto, name: str, axis: int, values: Sequence[int]
    ) -> Polynomial | None:
        """A size in closed form; what is one number at all bindings may still depend on an open
        size, where a window is larger than the samples differ."""
        if len(set(values)) > 1:
            size = self._fit(values) or self._discover(node, name, axis, values)
            if size is not None:
                self._known[tuple(values)] = size
            return size
        if self._depends(node, name, axis, values[0]):
            size = self._discover(node, name, axis, values)
            if size is None or not self.closed.issuperset(size.variables):
                return None  # larger samples, for which the quotient asks, will tell
        return Polynomial.constant(values[0])

    def _depends(self, node: NodeProto, name: str, axis: int, value: int) -> bool:
        """Whether a size changes with an open one of the operands that no other result's has."""
        if node.op_type in EVEN:
            return False
        walk = self.walks[self.live[0]]
        for operand in dict.fromkeys(node.input):
            for at, own in enumerate(walk.sizes(operand) or ()):
                size = self.size(operand, at) if own is not None else None
                if own is None or size is None or not size.variables:
                    continue
                other = self._probe(node, name, axis, operand, at, own + AFAR)
                if other is not None and other != value:
                    return True
        return False

    def _lose(self, node: NodeProto) -> None:
        """Notes a node of whose results only a run can tell the sizes."""
        if node.output[0] not in self.lost:
            self.lost.append(node.output[0])

    def _open_sizes(self, node: NodeProto) -> list[Polynomial]:
        """The open sizes of a node's operands."""
        walk = self.walks[self.live[0]]
        axes = [(n, i) for n in node.input for i, _ in enumerate(walk.sizes(n) or ())]
        sizes = [self.size(name, axis) for name, axis in axes]
        return [size for size in sizes if size is not None and size.variables]

    def _discover(
        self, node: NodeProto, name: str, axis: int, values: Sequence[int]
    ) -> Polynomial | None:
        """A size as a quotient of an operand's size, by asking for the results of others."""
        if not _has_exact_scales(node, self.walks[self.live[0]].values):
            return None
        walk = self.walks[self.live[0]]
        for operand in dict.fromkeys(node.input):
            for at, own in enumerate(walk.sizes(operand) or ()):
                size = self.size(operand, at) if own is not None else None
                if own is None or size is None or not size.variables:
                    continue
                key = (name, axis, operand, at)
                found = self.strides.get(key) or find_quotient(
                    partial(self._probe, node, *key), own
                )
                if found is None or found[2] == 1:
                    continue
                self.strides[key] = found
                made = applied(found, size)
                if [made.at(self.bindings[i]) for i in self.live] == list(values):
                    self._learn(made)
                    return made
        return None

    def _probe(
        self, node: NodeProto, name: str, axis: int, operand: str, at: int, size: int
    ) -> int | None:
        types = self.walks[self.live[0]].probe(node, operand, at, size)
        sizes = known_sizes(types.get(name))
        return sizes[axis] if sizes is not None and axis < len(sizes) else None

    def _is_exact(self, node: NodeProto, results: Sequence[Sequence[Any]]) -> bool:
        """Whether equal results at all bindings are so at any, and fitting ones fit at any."""
        operands = [n for n in node.input if n]
        if not any(n in self.varies for n in operands):
            return True
        if node.op_type in ("Shape", "Size"):
            return True
        if node.op_type not in _EXACT:
            return False
        values = [[self.walks[i].values.get(n) for n in operands] for i in self.live]
        if any(v is None for row in values for v in row):
            return False
        if any(_is_float(v) for row in (*values, *results) for v in row):
            return all(_is_fraction(v) for row in (*values, *results) for v in row)
        if node.op_type in ("Div", "Mod"):
            return all(_rounds_down(node.op_type, a, b) for a, b in values)
        if node.op_type in _SAME:
            return all(_agree([[row[0]], [v]]) for row in values for v in row[1:])
        if node.op_type in _COMPARE:
            return _compare_alike([[v for v in row if v is not None] for row in values])
        return True

    def _are_sizes(self, node: NodeProto, results: Sequence[Sequence[Any]]) -> bool:
        """Whether the results agree or are sizes in closed form."""
        if _agree(results):
            return True
        self._learn_division(node)
        for arrays in zip(*results, strict=True):
            first = np.asarray(arrays[0])
            if first.size > MOST or not np.issubdtype(first.dtype, np.integer):
                return False
            if any(np.shape(a) != first.shape for a in arrays):
                return False
            columns = np.stack([np.asarray(a).reshape(-1) for a in arrays], 1).tolist()
            sizes = [self._fit(column) for column in columns]
            if None in sizes:
                return False
            for size in sizes:
                self.found.update({size: None} if size is not None and size.variables else {})
        return True

    def _learn_division(self, node: NodeProto) -> None:
        """Takes note of the quotients that a division or a rounding makes."""
        if node.op_type not in ("Div", "Mod") and node.op_type not in _ROUND:
            return
        values = [[self.walks[i].values[n] for n in node.input if n] for i in self.live]
        if node.op_type in ("Div", "Mod") and not _is_float(values[0][0]):
            above, below = ([np.broadcast_arrays(*row)[k] for row in values] for k in (0, 1))
            columns = zip(_columns(above), _columns(below), strict=True)
            for over, by in columns:
                size = self._fit(over) if len(set(by)) == 1 and by[0] > 0 else None
                if size is not None:
                    self._learn(quotient(size, int(by[0])))
        elif node.op_type in _ROUND and _is_float(values[0][0]):
            scaled = [(row[0].astype(np.float64) * _FRACTION).astype(np.int64) for row in values]
            for column in _columns(scaled):
                common = math.gcd(_FRACTION, *column)
                size = self._fit([v // common for v in column])
                if size is not None:
                    make = rounded_up if node.op_type == "Ceil" else quotient
                    self._learn(make(size, _FRACTION // common))


def _columns(arrays: Sequence[Array]) -> list[list[int]]:
    """The elements of arrays of one shape, each at all bindings."""
    if any(a.shape != arrays[0].shape or a.size > MOST for a in arrays):
        return []
    columns: list[list[int]] = np.stack([a.reshape(-1) for a in arrays], 1).tolist()
    return columns


def _has_exact_scales(node: NodeProto, values: Mapping[str, Array]) -> bool:
    """Whether a size of the result is not rounded from a float that is itself rounded."""
    if node.op_type not in ("Resize", "Upsample"):
        return True
    scales = [values[n] for n in node.input[1:] if n in values and _is_float(values[n])]
    return all(_is_fraction(s) for s in scales)


def _is_float(value: Any) -> bool:
    return bool(np.asarray(value).dtype.kind == "f")


def _is_fraction(value: Any) -> bool:
    """Whether a float is exact, and so is what follows from it for sizes in all reason."""
    array = np.asarray(value).astype(np.float64)
    return bool((array * _FRACTION % 1 == 0).all() and (np.abs(array) * _FRACTION < 2**40).all())


def _agree(results: Sequence[Sequence[Any]]) -> bool:
    return all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
        for other in results[1:]
        for a, b in zip(results[0], other, strict=True)
    )


def _size_at(shapes: Shapes, place: Place | int) -> int | None:
    """The size of a dimension, or the number that stands for it."""
    if isinstance(place, int):
        return place
    operand, axis = place
    return (shapes[operand] or ())[axis]


def _rounds_down(op: str, a: Any, b: Any) -> bool:
    """Whether a division of whole numbers rounds towards the smaller one: onnxruntime rounds
    towards zero."""
    above_zero = bool((np.asarray(b) > 0).all())
    return above_zero and (op == "Mod" or bool((np.asarray(a) >= 0).all()))


def _compare_alike(values: Sequence[Sequence[Array]]) -> bool:
    """Whether two tensors, given at all bindings, compare alike at any: each pair of elements is as
    far apart everywhere, or one is a size, which is never negative, and the other below zero."""
    if any(np.asarray(v).dtype.kind not in "biu" for row in values for v in row):
        return _agree(values)
    rows = [np.broadcast_arrays(*row) for row in values]
    if any(row[0].shape != rows[0][0].shape for row in rows):
        return False
    first, second = (np.stack([row[k] for row in rows]).astype(np.int64) for k in (0, 1))
    alike = (first - second == first[:1] - second[:1]).all(0)
    apart = ((first >= 0) & (second < 0)).all(0) | ((second >= 0) & (first < 0)).all(0)
    return bool((alike | apart).all())
