"""Infers the shapes in a graph with open sizes, for several bindings of its symbols, node by node.

A node is folded away if its results are known, and either are the same at all bindings, or are
sizes: integers with a closed form. Such results become constants, which may differ between the
bindings; in the compiled graphs, a few nodes compute them from the sizes of a run. All other nodes
that depend on sizes stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TypeProto

from onnxpar.base.arrays import Array
from onnxpar.model.shapes import Walk, known_sizes
from onnxpar.open_sizes.equal_sizes import EVEN, Place, Shapes, equal_sizes
from onnxpar.open_sizes.exact import FRACTION, ROUND, agree, has_exact_scales, is_exact, is_float
from onnxpar.open_sizes.reshape_sizes import equal_symbols, is_possible
from onnxpar.symbols.fits import ENOUGH, fit
from onnxpar.symbols.quotients import AFAR, applied, find_quotient
from onnxpar.symbols.symbols import Binding, Polynomial, Quotient, Variable, quotient, rounded_up
from onnxpar.symbols.ties import solve_tie

MOST = 64
"""Most elements of a tensor of sizes."""

Strides = dict[tuple[str, int, str, int], tuple[int, int, int]]
"""The numbers (a, b, c) that `find_quotient` found for a result's size, by the names and axes of
the result and of the operand on whose size it depends."""


@dataclass(frozen=True)
class Unsolved:
    """A node that needs two sizes to be equal, where that equation cannot be solved for a
    symbol."""

    node: NodeProto
    first: Polynomial
    second: Polynomial


class Lockstep:
    """Walks over the nodes of a graph once for each binding of its symbols; all walks are always at
    the same node.

    Arguments: `inputs` has the types of the inputs at each binding. Where several symbols could be
    replaced to make two sizes equal, the last in `symbols` is. `strides` are known from earlier
    walks; this one adds those that it finds. `closed` symbols have no sizes other than the samples.

    live        indices of the bindings at which the model is valid so far
    kept        nodes that are not folded away
    varies      names of tensors whose values differ between bindings
    quotients   quotients that closed forms contain
    conflicts   nodes that are not valid for their operands
    tie         a symbol and its replacement, which makes two sizes equal, as a node requires; the
                walk ends at that node
    is_certain  True if the tie follows from an op's attributes, or from a weight that is not
                broadcast
    found       all open sizes
    void        open sizes of operands of nodes with an empty result
    unsolved    nodes with sizes that must be equal, but cannot be tied
    lost        names of results (the first of each node) with data-dependent sizes
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
        """Walks over all nodes, up to the first tie."""
        for node in self.model.graph.node:
            self.tie = self._tie(node)
            if self.tie is not None:
                return
            self._step(node)

    @property
    def variables(self) -> dict[Variable, list[int]]:
        """Values of symbols and quotients at the live bindings."""
        if not self._variables:
            bindings = [self.bindings[i] for i in self.live]
            self._variables.update({s: [b[s] for b in bindings] for s in bindings[0]})
            self._variables.update({q: [q.at(b) for b in bindings] for q in self.quotients})
        return self._variables

    def size(self, name: str, axis: int) -> Polynomial | None:
        """The closed form of the size of a tensor's dimension; None if the size has none, or is
        unknown."""
        shapes = [self.walks[i].shape(name) for i in self.live]
        if any(s is None or axis >= len(s) for s in shapes):
            return None
        return self._fit([s[axis] for s in shapes if s is not None])

    def value(self, name: str) -> Polynomial | None:
        """The closed form of the integer in a tensor of one element; None if the integer has none,
        or is unknown."""
        each = [self.walks[i].values.get(name) for i in self.live]
        known = [int(np.reshape(v, -1)[0]) for v in each if v is not None and np.size(v) == 1]
        return self._fit(known) if len(known) == len(each) else None

    def sizes(self, name: str) -> list[Polynomial | None]:
        """The closed forms of all sizes of a tensor; None for a size that has none, or is
        unknown."""
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
        """Adds the quotients that a size contains to `quotients`, so that further closed forms may
        use them."""
        new = [q for q in size.quotients if q not in self.quotients]
        if new:
            self.quotients += new
            self._variables = {}
            self._known = {k: v for k, v in self._known.items() if v is not None}

    def _tie(self, node: NodeProto) -> tuple[str, Polynomial] | None:
        """Looks for two sizes that the node requires to be equal but that differ. Returns a symbol
        and its replacement that make the first such pair equal; None if there is no such pair, or
        none can be made equal. Sets `is_certain`."""
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
        return self._reshape_tie(node) if node.op_type == "Reshape" else None

    def _reshape_tie(self, node: NodeProto) -> tuple[str, Polynomial] | None:
        """Two symbols that must be equal for a Reshape to be possible at the live bindings."""
        shapes = [self.walks[i].shape(node.input[0]) for i in self.live]
        targets = [self.walks[i].values.get(node.input[1]) for i in self.live]
        both = zip(shapes, targets, strict=True)
        pairs = [(s, [*map(int, t)]) for s, t in both if s and t is not None]
        if len(pairs) < len(self.live) or all(is_possible(*pair) for pair in pairs):
            return None
        target = [self._fit(column) for column in zip(*(t for _, t in pairs), strict=True)]
        wanted = [size if pairs[0][1][i] > 0 else None for i, size in enumerate(target)]
        found = equal_symbols(self.sizes(node.input[0]), wanted) or ()
        ordered = sorted(found, key=self.symbols.index)
        return (ordered[1], Polynomial.variable(ordered[0])) if ordered else None

    def _is_stored(self, *names: str) -> bool:
        return any(tensor.name in names for tensor in self.model.graph.initializer)

    def _in_closed_form(self, node: NodeProto, place: Place | int) -> Polynomial | None:
        """The size of an operand's dimension in closed form."""
        if isinstance(place, int):
            return Polynomial.constant(place)
        operand, axis = place
        return self.size(node.input[operand], axis)

    def _step(self, node: NodeProto) -> None:
        """Folds a node, or keeps it and infers its results, at all live bindings."""
        walks = [self.walks[i] for i in self.live]
        found = [walk.evaluate(node) for walk in walks]
        results = [f for f in found if f is not None]
        is_known = len(results) == len(found)
        exact = self._is_exact(node, results if is_known else [])
        if is_known and exact and self._are_sizes(node, results):
            for walk, values in zip(walks, results, strict=True):
                walk.fold(node, values)
            if not agree(results):
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
        """Drops the bindings at which the node is not valid for its operands; if too few would be
        left, records the node as a conflict instead."""
        odd = [i for i in self.live if self.walks[i].conflicts[-1:] == [node]]
        if len(self.live) - len(odd) >= ENOUGH and self.live[0] not in odd:
            if odd:
                self.live = [i for i in self.live if i not in odd]
                self._known.clear()
                self._variables = {}
        elif odd:
            self.conflicts.append(node)

    def _explain(self, node: NodeProto, name: str) -> None:
        """Finds a closed form, which may be a number, for every size of a result; makes the size
        unknown in all walks if there is none."""
        shapes = [self.walks[i].sizes(name) for i in self.live]
        if any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
            for i in self.live:
                self.walks[i].forget(name)
            return
        for axis, column in enumerate(zip(*(s or () for s in shapes), strict=True)):
            values = [v for v in column if v is not None]
            if values and min(values) < 1:
                self.void += [size for *_, size in self._open_operands(node)]
            if len(values) == len(column):
                size = self._closed_form(node, name, axis, values)
                if size is not None:
                    if size.variables:
                        self.found[size] = None
                    continue
                self._add_lost(node)
            for i in self.live:
                self.walks[i].forget_size(name, axis)

    def _closed_form(
        self, node: NodeProto, name: str, axis: int, values: Sequence[int]
    ) -> Polynomial | None:
        """The closed form of a result's size; None if it is data-dependent. `values` has the size
        at each binding. A size that is the same at all bindings may still depend on an open size:
        the windows of a pool may be larger than the difference between the samples."""
        if len(set(values)) > 1:
            size = self._fit(values) or self._discover(node, name, axis, values)
            if size is not None:
                self._known[tuple(values)] = size
            return size
        if self._depends(node, name, axis, values[0]):
            size = self._discover(node, name, axis, values)
            if size is None or not self.closed.issuperset(size.variables):
                return None  # unknown: the samples are too small to show the quotient
        return Polynomial.constant(values[0])

    def _depends(self, node: NodeProto, name: str, axis: int, value: int) -> bool:
        """True if a size of the result changes when an open size of an operand grows a lot."""
        moves_along = node.op_type == "Reshape" and node.input[1] in self.varies
        if node.op_type in EVEN or moves_along:  # a target that grows, too, cannot be probed
            return False
        return any(
            self._probe(node, name, axis, operand, at, own + AFAR) not in (None, value)
            for operand, at, own, _ in self._open_operands(node)
        )

    def _add_lost(self, node: NodeProto) -> None:
        """Adds the node to `lost`: its results have data-dependent sizes."""
        if node.output[0] not in self.lost:
            self.lost.append(node.output[0])

    def _discover(
        self, node: NodeProto, name: str, axis: int, values: Sequence[int]
    ) -> Polynomial | None:
        """A result's size as a quotient of an operand's size, found by inferring the node with
        other sizes of the operand; None if there is no such quotient."""
        if not has_exact_scales(node, self.walks[self.live[0]].values):
            return None
        for operand, at, own, size in self._open_operands(node):
            key = (name, axis, operand, at)
            found = self.strides.get(key) or find_quotient(partial(self._probe, node, *key), own)
            if found is None or found[2] == 1:
                continue
            self.strides[key] = found
            made = applied(found, size)
            if [made.at(self.bindings[i]) for i in self.live] == list(values):
                self._learn(made)
                return made
        return None

    def _open_operands(self, node: NodeProto) -> Iterator[tuple[str, int, int, Polynomial]]:
        """The open dimensions of a node's operands: name, axis, size at the first binding, and the
        size in closed form."""
        walk = self.walks[self.live[0]]
        for operand in dict.fromkeys(node.input):
            for at, own in enumerate(walk.sizes(operand) or ()):
                size = self.size(operand, at) if own is not None else None
                if own is not None and size is not None and size.variables:
                    yield operand, at, own, size

    def _probe(
        self, node: NodeProto, name: str, axis: int, operand: str, at: int, size: int
    ) -> int | None:
        """The size that a result's dimension would have if an operand's dimension had the given
        size."""
        types = self.walks[self.live[0]].probe(node, operand, at, size)
        sizes = known_sizes(types.get(name))
        return sizes[axis] if sizes is not None and axis < len(sizes) else None

    def _is_exact(self, node: NodeProto, results: Sequence[Sequence[Any]]) -> bool:
        """True if results that agree at the bindings, or have a closed form there, do so at any
        sizes."""
        operands = [n for n in node.input if n]
        if not any(n in self.varies for n in operands):
            return True
        values = [[self.walks[i].values.get(n) for n in operands] for i in self.live]
        return is_exact(node.op_type, values, results)

    def _are_sizes(self, node: NodeProto, results: Sequence[Sequence[Any]]) -> bool:
        """True if the results are the same at all bindings, or are integers with closed forms. Adds
        these closed forms to `found`."""
        if agree(results):
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
        """Adds the quotients that a division or a rounding node computes to `quotients`."""
        if node.op_type not in ("Div", "Mod") and node.op_type not in ROUND:
            return
        values = [[self.walks[i].values[n] for n in node.input if n] for i in self.live]
        if node.op_type in ("Div", "Mod") and not is_float(values[0][0]):
            above, below = ([np.broadcast_arrays(*row)[k] for row in values] for k in (0, 1))
            columns = zip(_columns(above), _columns(below), strict=True)
            for over, by in columns:
                size = self._fit(over) if len(set(by)) == 1 and by[0] > 0 else None
                if size is not None:
                    self._learn(quotient(size, int(by[0])))
        elif node.op_type in ROUND and is_float(values[0][0]):
            scaled = [(row[0].astype(np.float64) * FRACTION).astype(np.int64) for row in values]
            for column in _columns(scaled):
                common = math.gcd(FRACTION, *column)
                size = self._fit([v // common for v in column])
                if size is not None:
                    make = rounded_up if node.op_type == "Ceil" else quotient
                    self._learn(make(size, FRACTION // common))


def _columns(arrays: Sequence[Array]) -> list[list[int]]:
    """For each element, its values at all bindings; an empty list if the arrays differ in shape or
    have more than MOST elements."""
    if any(a.shape != arrays[0].shape or a.size > MOST for a in arrays):
        return []
    columns: list[list[int]] = np.stack([a.reshape(-1) for a in arrays], 1).tolist()
    return columns


def _size_at(shapes: Shapes, place: Place | int) -> int | None:
    """The size of an operand's dimension; if `place` is a number, that number."""
    if isinstance(place, int):
        return place
    operand, axis = place
    return (shapes[operand] or ())[axis]
