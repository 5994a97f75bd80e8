"""Infers the shapes in a graph with open sizes, at several bindings (sizes of its symbols) at once,
node by node.

A node is folded (becomes constants) if its results are known, and either do not depend on sizes, or
are integers computed from sizes, whose closed form follows from the op's definition. Such constants
may differ between bindings; in the compiled graphs, a few nodes compute them from the sizes of a
run. All other nodes that depend on sizes stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TypeProto

from onnxpar.graph.closed_forms import MOST, ClosedForms
from onnxpar.graph.equal_sizes import EVEN, Multiple, Shapes, Size, equal_sizes
from onnxpar.graph.infer_model import infer_bodies
from onnxpar.graph.kernel_sizes import known_sizes
from onnxpar.graph.reshape_sizes import is_possible, proportion
from onnxpar.graph.result_sizes import Sizes
from onnxpar.graph.scopes import is_control
from onnxpar.graph.shape_inference import Walk
from onnxpar.graph.size_arithmetic import (
    HEAVIEST,
    Forms,
    Limit,
    NotFollowed,
    exact_range,
    nonzero_range,
    scaled,
)
from onnxpar.layout.fits import ENOUGH, fit, fits
from onnxpar.layout.quotients import AFAR, applied, find_quotient
from onnxpar.layout.symbols import (
    Atom,
    Binding,
    Minimum,
    Polynomial,
    Variable,
    minimum,
    quotient,
    rounded_up,
)
from onnxpar.layout.ties import solve_tie

PROBES = 4
"""A closed form that fits the samples must also hold at this many further sizes."""
Strides = dict[tuple[str, int, str, int], tuple[int, int, int]]
"""For a size of a result, as (result, axis, operand, axis of the operand on which it depends): the
formula (a, b, c) that `find_quotient` returned."""


@dataclass(frozen=True)
class Unsolved:
    """A node that requires two sizes to be equal, where no symbol can be replaced to make them
    equal."""

    node: NodeProto
    first: Polynomial
    second: Polynomial


class Lockstep:
    """Infers the nodes of a graph one after the other, at each of several bindings (sizes of its
    symbols) at once.

    inputs    the types of the inputs at each binding
    symbols   all symbols; if several could be replaced to make two sizes equal, the last one is
    strides   formulas that earlier inference found; this object adds its own
    closed    symbols that have no sizes other than the samples
    dims      the open dimensions of inputs in closed form; None for inference at a single binding
    edges     number of bindings at the end of the list that may make results empty

    Results, as attributes:

    live        indices of the bindings at which the model has been valid so far
    kept        nodes that are not folded
    forms       closed forms of sizes and values
    atoms       the minima and quotients of sizes that closed forms contain
    conflicts   nodes that are not valid for their operands
    tie         (symbol, replacement) that makes two sizes equal, as a node requires; inference
                stops there
    is_certain  True if `tie` follows from an op's attributes, or from a weight that is not
                broadcast
    found       all open sizes
    limits      pairs of sizes: where the first is greater than the second, the model is not valid
    void        open sizes of empty results; if unknown, the open sizes of the operands
    unsolved    nodes with sizes that must be equal, but that no replacement of a symbol makes equal
    lost        first results of nodes whose results have data-dependent sizes
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Sequence[Mapping[str, TypeProto]],
        bindings: Sequence[Binding],
        symbols: Sequence[str],
        strides: Strides | None = None,
        closed: Collection[str] = (),
        dims: Mapping[tuple[str, int], Polynomial] | None = None,
        edges: int = 0,
    ) -> None:
        self.model = model
        self.bindings = bindings
        self.symbols = symbols
        self.strides = {} if strides is None else strides
        self.closed = frozenset(closed)
        self.edges = frozenset(range(len(bindings) - edges, len(bindings)))
        self.walks = [Walk(model, types) for types in inputs]
        self.live = list(range(len(bindings)))
        self.kept: list[NodeProto] = []
        opset = next((o.version for o in model.opset_import if not o.domain), 1)
        self.forms = ClosedForms(dims or {}, inputs[0], opset)
        self.atoms: list[Atom] = []
        self.conflicts: list[NodeProto] = []
        self.tie: tuple[str, Polynomial] | None = None
        self.is_certain = False
        self.found: dict[Polynomial, None] = {}
        self.limits: list[Limit] = []
        self.void: list[Polynomial] = []
        self.unsolved: list[Unsolved] = []
        self.lost: list[str] = []
        self._ranges: dict[str, list[Limit]] = {}
        self._variables: dict[Variable, list[int]] = {}
        self._known: dict[tuple[int, ...], Polynomial | None] = {}

    def run(self) -> None:
        """Infers all nodes; stops before a node that requires two different sizes to be equal, and
        sets `tie`."""
        for node in self.model.graph.node:
            self.tie = self._tie(node)
            if self.tie is not None:
                return
            self._step(node)

    @property
    def variables(self) -> dict[Variable, list[int]]:
        """The values of symbols, quotients and minima at the sample sizes in `live`."""
        if not self._variables:
            bindings = [self.bindings[i] for i in self.live]
            self._variables.update({s: [b[s] for b in bindings] for s in bindings[0]})
            self._variables.update({a: [a.at(b) for b in bindings] for a in self.atoms})
        return self._variables

    def size(self, name: str, axis: int) -> Polynomial | None:
        """Returns the closed form of one size of a tensor; None if it has none, or is unknown."""
        sizes = self.sizes(name)
        return sizes[axis] if axis < len(sizes) else None

    def value(self, name: str) -> Polynomial | None:
        """Returns the closed form of the integer in a tensor of one element; None if it has none,
        or is unknown."""
        forms = self.forms.value(self.walks[self.live[0]], name)
        return forms.reshape(-1)[0] if forms is not None and forms.size == 1 else None

    def sizes(self, name: str) -> Sizes:
        """Returns the closed forms of all sizes of a tensor, with None for a size that has none or
        is unknown; empty if even the number of dimensions is unknown."""
        return self.forms.size(self.walks[self.live[0]], name) or []

    def fixed_sizes(self, name: str) -> list[int | None]:
        """Returns the sizes of a tensor as numbers, with None for open ones."""
        numbers = [None if size is None else size.number for size in self.sizes(name)]
        return [None if n is None else int(n) for n in numbers]

    def _fit(self, values: Sequence[int]) -> Polynomial | None:
        key = tuple(values)
        if key not in self._known:
            self._known[key] = fit(key, self.variables)
        return self._known[key]

    def _learn(self, size: Polynomial) -> None:
        """Records an open size and its minima and quotients, so that later closed forms may contain
        them."""
        if not size.variables:
            return
        self.found[size] = None
        new = [atom for atom in size.atoms if atom not in self.atoms]
        if new:
            self.atoms += new
            self._variables = {}
            self._known = {k: v for k, v in self._known.items() if v is not None}

    def _tie(self, node: NodeProto) -> tuple[str, Polynomial] | None:
        """Returns (symbol, replacement) that makes two sizes equal which the node requires to be
        equal but which differ; None if there are no such sizes, or no such symbol. Sets
        `is_certain`."""
        usual = [i for i in self.live if i not in self.edges]
        edges = [i for i in self.live if i in self.edges]
        ends = [self.walks[i] for i in (usual[0], usual[-1])]
        one, two = shapes = [[walk.sizes(name) for name in node.input] for walk in ends]
        needs = zip(equal_sizes(node, one), equal_sizes(node, two), strict=False)
        for (place, other, repeats), (_, again, _) in needs:
            sizes = [(_size_at(at, place), _size_at(at, other)) for at in shapes]
            equal = all(a == b or (repeats and 1 in (a, b)) for a, b in sizes)
            if any(None in pair for pair in sizes) or other != again or (equal and not edges):
                continue
            first, second = self._in_closed_form(node, place), self._in_closed_form(node, other)
            if first is None or second is None or not (first - second).variables:
                continue
            if equal:  # at edges where sizes differ, the model does not run
                pairs = {
                    i: (first.at(self.bindings[i]), second.at(self.bindings[i])) for i in edges
                }
                self._drop(
                    [i for i, (a, b) in pairs.items() if a != b and not (repeats and 1 in (a, b))]
                )
                continue
            tie = solve_tie(first, second, self.symbols)
            if tie is not None:
                self.is_certain = not repeats and (
                    isinstance(other, int | Multiple)
                    or self._is_stored(node.input[place[0]], node.input[other[0]])
                )
                return tie
            self.unsolved.append(Unsolved(node, first, second))
        return self._reshape_tie(node) if node.op_type == "Reshape" else None

    def _reshape_tie(self, node: NodeProto) -> tuple[str, Polynomial] | None:
        """Returns (symbol, replacement) without which a Reshape is impossible, because the numbers
        of elements differ at the sample sizes; None if it is possible, or if there is no such
        symbol."""
        shapes = [self.walks[i].shape(node.input[0]) for i in self.live]
        targets = [self.walks[i].values.get(node.input[1]) for i in self.live]
        both = zip(shapes, targets, strict=True)
        pairs = [(s, [*map(int, t)]) for s, t in both if s and t is not None]
        if len(pairs) < len(self.live) or all(is_possible(*pair) for pair in pairs):
            return None
        target = self.forms.value(self.walks[self.live[0]], node.input[1])
        if target is None:
            return None
        wanted = [size if pairs[0][1][i] > 0 else None for i, size in enumerate(target)]
        ratio = proportion(self.sizes(node.input[0]), wanted)
        if ratio is None:
            return None
        first, second, multiple = ratio
        ways = [(first, second, multiple), (second, first, 1 / multiple)]
        whole = [way for way in ways if way[2].denominator == 1]
        last = max(whole, key=lambda way: self.symbols.index(way[0]), default=None)
        return last and (last[0], scaled(Polynomial.variable(last[1]), last[2]))

    def _is_stored(self, *names: str) -> bool:
        return any(tensor.name in names for tensor in self.model.graph.initializer)

    def _in_closed_form(self, node: NodeProto, of: Size) -> Polynomial | None:
        """Returns the closed form of a size in the form in which `equal_sizes` states it: a number,
        a dimension of an operand, or a Multiple; None if there is none."""
        if isinstance(of, int):
            return Polynomial.constant(of)
        if isinstance(of, Multiple):
            size = self._in_closed_form(node, of.place)
            return None if size is None else Polynomial.constant(of.of) * quotient(size, of.of)
        operand, axis = of
        return self.size(node.input[operand], axis)

    def _step(self, node: NodeProto) -> None:
        """Folds a node, or else keeps it and infers its results, at all sample sizes at which the
        model is valid."""
        walks = [self.walks[i] for i in self.live]
        evaluated = [walk.evaluate(node) for walk in walks]
        results = [f for f in evaluated if f is not None]
        forms = self._followed(node, results) if len(results) == len(evaluated) else None
        limits = self._exact_range(node, forms, results[0]) if forms is not None else None
        if limits is None:
            forms = None
        if forms is not None and all(
            _is_folded(f, r) for f, r in zip(forms, results[0], strict=True)
        ):
            for walk, values in zip(walks, results, strict=True):
                walk.fold(node, values)
            self.limits += [limit for limit in limits or () if limit not in self.limits]
            self._record(node, forms)
            for size in (size for each in forms for size in each.reshape(-1)):
                self._learn(size)
            return
        self.kept.append(node)
        is_open = self.forms.is_open(walks[0], node)
        for position in self.forms.positions(walks[0], node) if is_open else ():
            if position.weight <= HEAVIEST:
                self._learn(position)
        if any(name in self.forms.varies for name in node.input):
            self.forms.varies.update(node.output)
        if forms is not None:
            self._record(node, forms)
        for i, walk in enumerate(walks):
            if forms is not None:
                walk.know(node, results[i])
            elif is_control(node):
                infer_bodies(walk, node)
            else:
                walk.infer(node)
        self._check(node)
        self._explain(node, is_open)

    def _followed(self, node: NodeProto, results: Sequence[Sequence[Any]]) -> list[Forms] | None:
        """Returns the closed forms of a node's results, with an empty array for a result that does
        not depend on sizes; None if there are none. They must have the values that were computed at
        all sample sizes, because the runtime may round, or overflow.

        results  the values of the node's results at each of the sample sizes
        """
        walk = self.walks[self.live[0]]
        if node.op_type not in ("Shape", "Size") and not any(
            name in self.forms.varies for name in node.input
        ):
            return [np.empty(0, object) for _ in node.output] if _agree(results) else None
        try:
            followed = self.forms.follow(walk, node)
        except NotFollowed:
            return None
        for forms, *arrays in zip(followed, *results, strict=True):
            for i, array in zip(self.live, arrays, strict=True):
                if np.shape(array) != forms.shape or np.size(array) > MOST:
                    return None
                elements = zip(forms.reshape(-1), np.reshape(array, -1), strict=True)
                if any(form.exactly_at(self.bindings[i]) != value for form, value in elements):
                    return None
        return followed

    def _exact_range(
        self, node: NodeProto, forms: Sequence[Forms], values: Sequence[Any]
    ) -> list[Limit] | None:
        """Returns limits on sizes within which a node's results, and the values from which they are
        computed, are exact in their dtypes, and no float is divided by 0; None if results are
        rounded or overflow even at usual sizes.

        forms   the closed form of each result
        values  the value of each result at the first sample sizes
        """
        try:
            own = [
                limit
                for each, value in zip(forms, values, strict=True)
                for form in each.reshape(-1)
                for limit in exact_range(form, np.asarray(value).dtype)
            ]
            if node.op_type == "Div" and np.asarray(values[0]).dtype.kind == "f":
                divisors = self.forms.values.get(node.input[1], np.empty(0, object))
                own += [limit for form in divisors.reshape(-1) for limit in nonzero_range(form)]
        except NotFollowed:
            return None
        limits = [limit for name in node.input for limit in self._ranges.get(name, ())] + own
        if limits:
            self._ranges.update((name, list(dict.fromkeys(limits))) for name in node.output)
        return limits

    def _record(self, node: NodeProto, forms: Sequence[Forms]) -> None:
        """Records the closed forms of the results of a node that depend on sizes."""
        for name, each in zip(node.output, forms, strict=True):
            if any(form.variables for form in each.reshape(-1)):
                self.forms.values[name] = each
                self.forms.varies.add(name)

    def _check(self, node: NodeProto) -> None:
        """Drops the sample sizes at which the node is not valid for its operands. If too few would
        be left, or the first would go, records the node in `conflicts` instead."""
        for i in self.live:
            sizes = [s for name in node.output for s in self.walks[i].sizes(name) or ()]
            if any(s is not None and s < 0 for s in sizes):
                self.walks[i].conflicts.append(node)
        odd = [i for i in self.live if self.walks[i].conflicts[-1:] == [node]]
        if len(self.live) - len(odd) >= ENOUGH and self.live[0] not in odd:
            self._drop(odd)
        elif odd:
            self.conflicts.append(node)

    def put_first(self) -> None:
        """Puts the sample sizes first at which the fewest open sizes are 0 or 1."""

        def trivial(i: int) -> tuple[bool, int]:
            return i in self.edges, sum(size.at(self.bindings[i]) <= 1 for size in self.found)

        self.live.sort(key=trivial)
        self._known.clear()
        self._variables = {}

    def _drop(self, odd: Collection[int]) -> None:
        """Drops the sample sizes with these indices, at which the model is not valid."""
        if odd:
            self.live = [i for i in self.live if i not in odd]
            self._known.clear()
            self._variables = {}

    def _explain(self, node: NodeProto, is_open: bool) -> None:
        """Finds a closed form, which may be a number, for every size of a node's results; where
        there is none, makes the size unknown at all sample sizes. `is_open` is False if no operand
        depends on open sizes."""
        names = [name for name in node.output if name]
        if not is_open:
            return
        known: dict[str, Sizes] | None = None
        try:
            results = self.forms.results(self.walks[self.live[0]], node, self._divide)
            if results is not None:
                known = dict(zip(node.output, results, strict=True))
        except NotFollowed:
            known = {name: [] for name in names}
        if (piece := self._piece(node)) is not None:
            known = {node.output[0]: piece}
        for name in names:
            shapes = [self.walks[i].sizes(name) for i in self.live]
            if any(s is None or len(s) != len(shapes[0] or ()) for s in shapes):
                for i in self.live:
                    self.walks[i].forget(name)
                continue
            rank = len(shapes[0] or ())
            if known is not None:
                proposed = [*known[name], *[None] * rank][:rank]
                sizes = [self._agreeing(p, self._column(name, i)) for i, p in enumerate(proposed)]
            else:
                sizes = self._explained(node, name, rank)
            self._set_sizes(node, name, sizes)

    def _piece(self, node: NodeProto) -> Sizes | None:
        """Returns the sizes of one piece of a SplitToSequence of an open dimension, where pieces
        are equal except for a smaller last one; None for any other node."""
        walk = self.walks[self.live[0]]
        split = walk.splits.get(node.input[0]) if node.op_type == "SequenceAt" else None
        if split is None or len(split.input) < 2 or node.input[1] not in walk.values:
            return None
        whole, step = list(self.sizes(split.input[0])), walk.values.get(split.input[1])
        attributes = {a.name: a.i for a in split.attribute}
        if step is None or step.ndim or not whole or not attributes.get("keepdims", 1):
            return None
        axis = attributes.get("axis", 0) % len(whole)
        size, number = whole[axis], int(walk.values[node.input[1]])
        if size is None or not size.variables:
            return None
        place, full = Polynomial.constant(number), Polynomial.constant(int(step))
        if number < 0:
            place += rounded_up(size, int(step))
        left = size - full * place
        self.limits.append((Polynomial.constant(1), left))
        whole[axis] = minimum(full, left)
        return whole

    def _column(self, name: str, axis: int) -> list[int | None]:
        """Returns the size of a tensor's dimension at each of the sample sizes in `live`."""
        return [(self.walks[i].sizes(name) or ())[axis] for i in self.live]

    def _set_sizes(self, node: NodeProto, name: str, sizes: Sequence[Polynomial | None]) -> None:
        """Records the closed forms of the sizes of the result `name`; None: the size has none."""
        for axis, size in enumerate(sizes):
            column = self._column(name, axis)
            usual = zip(self.live, column, strict=True)
            if any(v is not None and v < 1 and i not in self.edges for i, v in usual):
                if size is not None and size.variables:
                    self.void.append(size)
                else:
                    self.void += [open_ for *_, open_ in self._open_operands(node)]
            if size is not None:
                self._learn(size)
                continue
            if None not in column:
                self._add_lost(node)
            for i in self.live:
                self.walks[i].forget_size(name, axis)
        if any(size is None or size.variables for size in sizes):
            self.forms.sizes[name] = list(sizes)

    def _agreeing(self, size: Polynomial | None, column: Sequence[int | None]) -> Polynomial | None:
        """Returns `size` if it is simple enough, and has the values in `column` at the sample sizes
        in `live`; else None."""
        if (
            size is None
            or size.weight > HEAVIEST
            or any(size.at(self.bindings[i]) != v for i, v in zip(self.live, column, strict=True))
        ):
            return None
        return size

    def _divide(self, over: Polynomial, below: Polynomial) -> Polynomial | None:
        """Returns the closed form of over / below, if it is a polynomial that divides exactly; else
        None."""
        bindings = [self.bindings[i] for i in self.live]
        values = [(over.at(b), below.at(b)) for b in bindings]
        if any(b == 0 or a % b for a, b in values):
            return None
        ratio = self._fit([a // b for a, b in values])
        return ratio if ratio is not None and ratio * below == over else None

    def _explained(self, node: NodeProto, name: str, rank: int) -> list[Polynomial | None]:
        """Returns the closed forms of a result's `rank` sizes, found from sizes of operands; None
        for a size that has none."""
        walk = self.walks[self.live[0]]
        varying = [n for n in node.input if n in self.forms.varies]
        free = known_sizes(walk.types_without(node, varying).get(name)) if varying else None
        sizes: list[Polynomial | None] = []
        for axis in range(rank):
            column = self._column(name, axis)
            values = [v for v in column if v is not None]
            if len(values) < len(column) or (varying and (free is None or free[axis] is None)):
                sizes.append(None)
            else:
                sizes.append(self._closed_form(node, name, axis, values))
        return sizes

    def _closed_form(
        self, node: NodeProto, name: str, axis: int, values: Sequence[int]
    ) -> Polynomial | None:
        """Returns the closed form of one size of a result; None if it depends on data. A size that
        is the same at all sample sizes may still depend on an open size: the windows of a pool may
        be larger than the samples' differences.

        values  the size at each of the sample sizes in `live`
        """
        if len(set(values)) > 1:
            same = (form for form, own in self._open_columns(node) if own == list(values))
            size = next(same, None)
            if size is None:
                proposed = self._proposed(node, axis, values)
                right = (form for form in proposed if self._holds(node, name, axis, form))
                size = next(right, None) or self._discover(node, name, axis, values)
            if size is not None and len(values) == len(self.live):
                self._known[tuple(values)] = size
            return size
        if self._depends(node, name, axis, values[0]):
            size = self._discover(node, name, axis, values)
            if size is None or not self.closed.issuperset(size.variables):
                return None  # unknown: the samples are too small to show the quotient
        return Polynomial.constant(values[0])

    def _proposed(self, node: NodeProto, axis: int, values: Sequence[int]) -> Iterator[Polynomial]:
        """Yields candidates for the closed form of a size with these values: an operand's size plus
        a number, the sum of the operands' sizes, and polynomials that fit."""
        for form, own in self._open_columns(node):
            apart = {v - o for v, o in zip(values, own, strict=False) if o is not None}
            if len(apart) == 1 and None not in own:
                yield form + Polynomial.constant(apart.pop())
        each = [self.size(operand, axis) for operand in node.input if operand]
        total = sum((e for e in each if e is not None), Polynomial(()))
        if self._agreeing(total, values) is not None:
            yield total
        known = self._fit(values)
        if known is not None:
            yield known
            yield from fits(tuple(values), self.variables)

    def _holds(self, node: NodeProto, name: str, axis: int, size: Polynomial) -> bool:
        """True if the result also has this size far from the samples, at PROBES sizes where the
        node is valid. A wrong form can fit the samples by chance only if it contains minima, which
        equal one operand at most samples. Values that bodies compute from sizes stay as at the
        samples."""
        if is_control(node) or not any(isinstance(atom, Minimum) for atom in self.atoms):
            return True
        source = np.random.default_rng(len(name))
        operands = [(operand, at, form) for operand, at, _, form in self._open_operands(node)]
        for _ in range(PROBES):
            drawn = {s: int(50 * 2 ** source.uniform(0, 6)) for s in self.symbols}
            sizes = {(operand, at): form.at(drawn) for operand, at, form in operands}
            if min(sizes.values(), default=1) < 1:
                continue
            probed = known_sizes(self.walks[self.live[0]].probe(node, sizes).get(name))
            if (
                probed is not None
                and axis < len(probed)
                and probed[axis] not in (None, size.at(drawn))
            ):
                return False
        return True

    def _open_columns(self, node: NodeProto) -> Iterator[tuple[Polynomial, list[int | None]]]:
        """Yields (closed form, values at the sample sizes in `live`) of each open size of a node's
        operands."""
        for operand, at, _, size in self._open_operands(node):
            yield size, self._column(operand, at)

    def _depends(self, node: NodeProto, name: str, axis: int, value: int) -> bool:
        """True if this size of the result changes when one open size of an operand grows by
        AFAR."""
        if node.op_type in EVEN:  # an operand that grows alone does not fit the others
            return False
        return any(
            self._probe(node, name, axis, operand, at, own + AFAR) not in (None, value)
            for operand, at, own, _ in self._open_operands(node)
        )

    def _add_lost(self, node: NodeProto) -> None:
        """Records that results of the node have data-dependent sizes."""
        if node.output[0] not in self.lost:
            self.lost.append(node.output[0])

    def _discover(
        self, node: NodeProto, name: str, axis: int, values: Sequence[int]
    ) -> Polynomial | None:
        """Returns a result's size as a quotient (a * size + b) // c of an operand's size, found by
        inferring the node at many sizes of the operand; None if there is none."""
        for operand, at, own, size in self._open_operands(node):
            key = (name, axis, operand, at)
            stride = self.strides.get(key) or find_quotient(partial(self._probe, node, *key), own)
            if stride is None or stride[2] == 1:
                continue
            self.strides[key] = stride
            divided = applied(stride, size)
            pairs = zip(self.live, values, strict=True)
            odd = [i for i, value in pairs if divided.at(self.bindings[i]) != value]
            low = self._lowest(node, key, stride, own)
            small = [i for i in odd if i in self.edges and size.at(self.bindings[i]) < low]
            if odd == small:
                if low > 0:
                    self.limits.append((Polynomial.constant(low), size))
                self._drop(odd)
                self._learn(divided)
                return divided
        return None

    def _lowest(
        self, node: NodeProto, key: tuple[str, int, str, int], ratio: tuple[int, int, int], own: int
    ) -> int:
        """Returns the least operand size from which on a quotient gives the result's size; 0 if it
        does so even at sizes 1 and 2, although kernels may round negative numbers towards zero.

        key    (result, axis, operand, axis)
        ratio  (a, b, c) of the quotient (a * size + b) // c
        own    an operand size at which the quotient is right
        """
        times, shift, below = ratio

        def is_right(size: int) -> bool:
            return self._probe(node, *key, size) == (times * size + shift) // below

        low = 0 if is_right(1) and is_right(2) else own
        while low > 0 and is_right(low - 1):
            low -= 1
        return low

    def _open_operands(self, node: NodeProto) -> Iterator[tuple[str, int, int, Polynomial]]:
        """Yields (name, axis, size at the first sample sizes, closed form) of each open dimension
        of a node's operands."""
        walk = self.walks[self.live[0]]
        for operand in dict.fromkeys(node.input):
            for at, own in enumerate(walk.sizes(operand) or ()):
                size = self.size(operand, at) if own is not None else None
                if own is not None and size is not None and size.variables:
                    yield operand, at, own, size

    def _probe(
        self, node: NodeProto, name: str, axis: int, operand: str, at: int, size: int
    ) -> int | None:
        """Returns the size that dimension `axis` of the result `name` would have if dimension `at`
        of `operand` had this `size`."""
        types = self.walks[self.live[0]].probe(node, {(operand, at): size})
        sizes = known_sizes(types.get(name))
        return sizes[axis] if sizes is not None and axis < len(sizes) else None


def _is_folded(forms: Forms, value: Any) -> bool:
    """True if a result may become a constant at each binding: it does not depend on sizes, or has
    integers."""
    is_open = any(form.variables for form in forms.reshape(-1))
    return not is_open or np.issubdtype(np.asarray(value).dtype, np.integer)


def _agree(results: Sequence[Sequence[Any]]) -> bool:
    """True if a node's results are equal at all sample sizes, in values and dtypes."""
    return all(
        np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")
        and np.asarray(a).dtype == np.asarray(b).dtype
        for other in results[1:]
        for a, b in zip(results[0], other, strict=True)
    )


def _size_at(shapes: Shapes, of: Size) -> int | None:
    """Returns a size in the form in which `equal_sizes` states it, for operands of these shapes;
    None if it is unknown."""
    if isinstance(of, int):
        return of
    if isinstance(of, Multiple):
        size = _size_at(shapes, of.place)
        return None if size is None else size - size % of.of
    operand, axis = of
    return (shapes[operand] or ())[axis]
