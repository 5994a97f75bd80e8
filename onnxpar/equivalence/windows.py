"""Proves by sampling: some nodes of the model, and the nodes of ranks that read the same tensors,
compute the same on drawn values.

A window is what lies between tensors that are related already and one that is not yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxpar.base.arrays import Array
from onnxpar.equivalence.draws import Draws
from onnxpar.equivalence.evaluate import SUPPORTED, Evaluator, NotComputed, Values
from onnxpar.equivalence.held import Held, Partial, Relations
from onnxpar.equivalence.program import Node, Program, captured, default, schema_of
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks, communicates
from onnxpar.equivalence.spans import Families, covers
from onnxpar.equivalence.weights import Weights

DRAWS, MOST_DRAWS = 4, 512
"""The least and the most draws of a window: more if results have few different values."""
_BITS = 96
"""What draws must tell of a result: a wrong relation holds with a probability of 2 to the power of
minus this number."""
_STAGES = ((False, 40), (False, 400), (True, 60), (True, 400))
"""The windows of ranks that are tried: whether they have collectives, and their most nodes."""
_DISCRETE = frozenset(
    [
        TensorProto.BOOL, TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8,
        TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32, TensorProto.UINT32,
        TensorProto.INT64, TensorProto.UINT64, TensorProto.STRING,
    ]
)  # fmt: skip
"""The element types of integers and the like."""
_NARROW = frozenset([TensorProto.FLOAT16, TensorProto.BFLOAT16])
"""The element types of real numbers that have fewer bits than float32."""
_DAMAGED = 0.9
"""If more than this share of the numbers of a constant are the model's, all must be."""
_DEFINED = frozenset(("", op) for op in ("Attention", "LinearAttention", "CausalConvWithState"))
"""Ops of which float64 does not tell more: onnxruntime computes them by their definitions, which
cast to float32."""
_LOOKUPS = ("Gather", "GatherND", "GatherElements")
MOST_UNKNOWN = 64
"""The most elements of a table of ranks that is not one of the model's: draws reach them all."""
MOST_COMPARED = 1 << 22
"""The most elements of a constant of the model among which numbers of ranks are looked for."""
MOST_COUNTED = 1 << 16
"""About the most values of a result that are counted as evidence."""
MOST_KEPT = 200
"""The most nodes of ranks in a window that is kept."""
MOST_ELEMENTS = 1 << 26
"""The most elements of all tensors that a window reads."""
_MOST_WAYS = 400
_FEW = 4
"""The most different values of reals that are counted like whole numbers."""


class Disagreement(NotComputed):
    """Ranks compute something else than the model, on drawn values."""


class _Evidence:
    """How much the values of a result tell on all draws, in bits: a result that is the same
    everywhere agrees with everything. Of whole numbers, truths and texts, and of reals that have
    few values, each element counts that is not the commonest of its draw; of single ones, each
    draw."""

    def __init__(self) -> None:
        self.values: set[object] = set()
        self.single = Counter[object]()
        self.bits = 0.0
        self.is_empty = False

    def add(self, value: Array) -> None:
        """Adds the value of a draw."""
        flat = _some(value.reshape(-1))
        self.is_empty = not flat.size
        if flat.size == 1 and value.dtype.kind in "biuO":
            self.single[flat[0]] += 1
            self.bits = float(self.single.total() - max(self.single.values()))
            return
        if value.dtype.kind == "b":
            self.bits += min(int(flat.sum()), int(flat.size - flat.sum()))
            return
        own = flat
        if value.dtype.kind not in "iuO" and flat.size:
            wide = flat.astype(np.float64)
            own = flat[np.isfinite(wide) & (np.abs(wide) <= ordinary(wide))]
        counts = np.unique(own, return_counts=True)[1]
        if len(own) and (value.dtype.kind in "iuO" or len(counts) <= _FEW):
            self.bits += len(own) - int(counts.max())
        if 2 * len(own) >= flat.size:
            fresh = {*np.unique(own)[:64].tolist()} - self.values
            self.bits += (16.0 if value.dtype.kind not in "iuO" else 3.0) * len(fresh)
            self.values |= fresh

    @property
    def is_any(self) -> bool:
        """False for a result that tells nothing: it is not a number everywhere, or the same."""
        return self.is_empty or self.bits > 0

    @property
    def is_enough(self) -> bool:
        """True if agreement is no accident."""
        return self.is_empty or self.bits >= _BITS


@dataclass(frozen=True)
class Window:
    """Nodes of the model, in order, and what they read: tensors that are related, and constants."""

    nodes: tuple[Node, ...]
    reads: tuple[str, ...]


class Sampler:
    """Relates results of nodes that no lemma proves."""

    def __init__(
        self, model: Program, ranks: Ranks, families: Families, relations: Relations,
        weights: Weights, seed: int, ranges: Mapping[str, tuple[int, int]],
    ) -> None:  # fmt: skip
        self.weights, self.draw_ranges = weights, ranges
        self.model, self.ranks, self.families, self.relations = model, ranks, families, relations
        self.seed = seed
        self.evaluator, self.wide = Evaluator(), Evaluator(is_wide=True)
        self._of_model: dict[tuple[int, str, bool], bool] = {}
        """Whether a window has the numbers of a constant of ranks."""
        self.computed: set[str] = set()
        """Of the tensors of ranks in a window, those with the sizes of parts of the result."""
        self.avoided: set[str] = set()
        """Tensors of ranks that are in no window: numbers of fewer bits than the model has."""

    def relate(
        self, window: Window, named: Collection[str], added: Collection[str] = ()
    ) -> list[Held]:
        """What tensors of ranks are, of the results of the last node; empty if none is related.
        Errors: NotComputed; Disagreement if ranks compute the tensors `named` from what the window
        reads, and these are something else: a larger window could only hide that. So it is with
        the sums over ranks `added`, unless ranks compute the result from them."""
        wanted = [name for name in window.nodes[-1].outputs if name]
        self._of_model.clear()
        self._check_kept(window)
        found: list[Held] = []
        before: list[RankNode] = []
        computed: set[str] = set()
        for with_collectives, most in _STAGES:
            nodes = self._closure(window, with_collectives, most)
            candidates = self._results(nodes)
            if not candidates or nodes == before:
                continue
            before = nodes
            found += self._compare(window, nodes, candidates, wanted)
            if not found and self.computed & {*named}:
                raise Disagreement("ranks compute another value")
            computed |= self.computed
            wanted = [name for name in wanted if not self._is_found(name, found)]
            if not wanted:
                break
        if not found and computed & {*added}:
            raise Disagreement("ranks add up another value")
        return found

    def _is_found(self, name: str, found: Sequence[Held]) -> bool:
        """True if a result is related; an output of the model, to the tensor of ranks with its
        name."""
        is_port = name in self.model.outputs and name in self.ranks.makers
        return any(held.term == name and (held.name == name or not is_port) for held in found)

    def _check_kept(self, window: Window) -> None:
        """Integers and Booleans tell little of the real numbers that they are made from: these must
        be related, or reach the result as real numbers, too. Errors: NotComputed."""
        reach = {name for name in window.nodes[-1].outputs if self._is_real(name)}
        for node in reversed(window.nodes):
            if reach & {*node.outputs}:
                reach |= {name for name in node.inputs if self._is_real(name)}
        for node in window.nodes:
            if any(self._is_real(name) for name in node.outputs if name):
                continue
            for name in node.inputs:
                is_made = name and name not in self.model.constants
                is_lost = is_made and self._is_real(name) and name not in reach
                if is_lost and not self.relations.by_term.get(name):
                    raise NotComputed(f"what it reads, {name!r}, is not related")

    def _is_real(self, name: str) -> bool:
        return self.model.types.get(name, 0) not in _DISCRETE

    def _is_of_model(self, window: Window, name: str, is_table: bool) -> bool:
        key = id(window), name, is_table
        if key not in self._of_model:
            self._of_model[key] = self._has_numbers(window, name, is_table)
        return self._of_model[key]

    def _has_numbers(self, window: Window, name: str, is_table: bool) -> bool:
        """True for a constant of ranks whose numbers draws tell, or are the model's to the bit:
        draws do not reach all rows of a table, and a few numbers that are a little different, such
        as an epsilon, would pass for rounding."""
        count = max(math.prod(shape) for shape in self.ranks.constant_shapes(name))
        constants = [term for term in window.reads if term in self.model.constants]
        if count > MOST_UNKNOWN:
            is_free = not is_table and self.ranks.has_origins
            return (is_free and not self._is_damaged(window, name)) or any(
                self.weights.relate(term, name) for term in constants
            )
        values = self.ranks.constants(name) or []
        if values[0].dtype.kind != "f":
            return True
        own = np.unique(np.concatenate([value.reshape(-1) for value in values]))
        own = own[np.isfinite(own) & ~np.isin(own, self._numbers(window, values[0].dtype))]
        if all(self._is_share(window, float(number)) for number in own):
            return True
        return any(self.weights.relate(term, name) for term in constants)

    def _is_damaged(self, window: Window, name: str) -> bool:
        """True for a constant with a few numbers that are not the model's, beside many that are,
        not counting 0, 1 and -1, which masks have."""
        values = [value.reshape(-1) for value in self.ranks.constants(name) or ()]
        if not values or values[0].dtype.kind != "f":
            return False
        known = self._numbers(window, values[0].dtype)
        telling = [value[~np.isin(value, (0, 1, -1))] for value in values]
        shares = [float(np.isin(value, known).mean()) for value in telling if value.size]
        return any(_DAMAGED < share < 1 for share in shares)

    def _numbers(self, window: Window, dtype: np.dtype[Any]) -> Array:
        """The numbers of constants and attributes of the model in a window, 1 and 0, and the ends
        of the type, which stand for infinity."""
        floats = [0.0, 1.0, float(np.finfo(dtype).max), *self._attributes(window)]
        found = [np.array([*floats, *(-number for number in floats)], dtype)]
        for term in window.reads:
            is_small = term in self.model.constants and (
                math.prod(self.model.constants.shape(term)) <= MOST_COMPARED
            )
            if is_small and self.model.constants[term].dtype == dtype:
                found.append(self.model.constants[term].reshape(-1))
        return np.concatenate(found)

    def _attributes(self, window: Window) -> Iterator[float]:
        """Yields the numbers that are attributes of the window's nodes, or defaults of these."""
        for node in window.nodes:
            schema = schema_of(node, self.model.opsets)
            for name in {*node.attrs, *(schema.attributes if schema else ())}:
                value = default(node, name, self.model.opsets)
                given = value if isinstance(value, list) else [value]
                yield from (number for number in given if isinstance(number, float))

    def _is_share(self, window: Window, number: float) -> bool:
        """True for a whole part of the size of a dimension, or of all elements, that the window
        reads: a mean of some elements counts for as many. So is 1 by the root of a divisor: the
        scale of heads of so many elements."""
        sizes: set[int] = set()
        for term in window.reads:
            shape = self.model.shapes.get(term, ())
            sizes |= {*shape, math.prod(shape), *map(math.prod, pairwise(shape))}
        shares = (number * size for size in sizes)
        root = number**-2 if number > 0 else 0.0
        is_root = 1 <= root < MOST_ELEMENTS and abs(root - round(root)) < 1e-6 * root
        return (is_root and any(size % round(root) == 0 for size in sizes)) or any(
            share and abs(share - round(share)) < 1e-6 * abs(share) for share in shares
        )

    def _closure(self, window: Window, with_collectives: bool, most: int) -> list[RankNode]:
        """The first nodes of ranks that compute from the tensors which the window reads, and from
        constants, alone."""
        known = {
            held.name for term in window.reads for held in self.relations.by_term.get(term, ())
        }
        seeds, nodes = {*known}, list[RankNode]()
        todo = sorted({r.number for name in known for r in self.ranks.readers.get(name, ())})
        seen = {*todo}
        while todo and len(nodes) < most:
            number = todo.pop(0)
            node = self.ranks.nodes[number]
            if not self._is_computed(window, node, known, with_collectives):
                seen.discard(number)
                continue
            nodes.append(node)
            known |= {name for name in node.first.outputs if name}
            fresh = {r.number for n in node.first.outputs for r in self.ranks.readers.get(n, ())}
            todo = sorted({*todo, *(fresh - seen)})
            seen |= fresh
        return [node for node in nodes if not {*node.first.outputs} <= seeds]

    def _is_computed(
        self, window: Window, node: RankNode, known: set[str], with_collectives: bool
    ) -> bool:
        if not self.avoided.isdisjoint(node.first.outputs):
            return False
        first = node.first
        if not node.is_alike or self._is_large(node):
            return False
        if first.domain == PLUGIN:
            data = first.inputs[:3] if first.op == "AllToAllV" else first.inputs[:1]
            return with_collectives and first.op in SUPPORTED and {*data} <= known
        if communicates(first) and not with_collectives:
            return False
        return all(
            name in known
            or name in self.ranks.tokens
            or (
                self.ranks.is_constant(name)
                and self._is_of_model(window, name, first.op in _LOOKUPS and index == 0)
            )
            for index, name in enumerate((*first.inputs, *captured(first.proto)))
            if name
        )

    def _is_large(self, node: RankNode) -> bool:
        """True if a result is known to be too large to compute."""
        shapes = [
            program.shapes.get(name, ())
            for own, program in zip(node.nodes, self.ranks.programs, strict=True)
            for name in own.outputs
        ]
        return any(math.prod(shape) > MOST_ELEMENTS for shape in shapes)

    def before(self, window: Window, last: Sequence[RankNode]) -> list[RankNode]:
        """These nodes of ranks, and those before them, up to what stands for what the window
        reads."""
        known = {
            held.name for term in window.reads for held in self.relations.by_term.get(term, ())
        }
        found: dict[int, RankNode] = {}
        todo = list(last)
        while todo:
            node = todo.pop()
            if node.number in found:
                continue
            found[node.number] = node
            if len(found) > MOST_KEPT:
                raise NotComputed(f"ranks compute it with more than {MOST_KEPT} nodes")
            read = {n for each in node.nodes for n in (*each.inputs, *captured(each.proto))} - known
            if node.first.domain == PLUGIN:
                read &= {name for each in node.nodes for name in each.inputs[:1]}
            todo += [self.ranks.makers[name] for name in read if name in self.ranks.makers]
        return [found[number] for number in sorted(found)]

    def values(self, window: Window, nodes: Sequence[RankNode]) -> tuple[Values, list[Values]]:
        """What a window reads and computes on drawn values, and what ranks do. Errors:
        NotComputed."""
        draws = Draws(self.model, window.nodes, self._edges(window), self.seed, self.draw_ranges)
        values = self._model_values(window, draws, 0)
        own = self._rank_values(window, values, nodes, draws, 0)
        self.evaluator.run_ranks(nodes, own, self.ranks)
        return values, own

    def _results(self, nodes: Sequence[RankNode]) -> list[str]:
        """The results of nodes, without tokens."""
        found: list[str] = []
        for node in nodes:
            results = node.first.outputs
            found += results[:1] if node.first.domain == PLUGIN else results
        return [name for name in found if name]

    def _compare(
        self, window: Window, nodes: Sequence[RankNode], candidates: Sequence[str],
        wanted: Sequence[str],
    ) -> list[Held]:  # fmt: skip
        """Runs both sides on draws, and keeps the relations that hold on all of them."""
        self.computed = set()
        kept: list[Held] | None = None
        draws = Draws(self.model, window.nodes, self._edges(window), self.seed, self.draw_ranges)
        draws.is_exact &= all(self._is_whole(name) for name in window.reads)
        evidence: dict[str, _Evidence] = {name: _Evidence() for name in wanted}
        for number in range(MOST_DRAWS):
            values, results = self._computed(window, draws, number, wanted)
            whole = dict(zip(wanted, results, strict=True))
            for term, value in whole.items():
                evidence[term].add(value)
            for term, value in whole.items():
                self.model.shapes.setdefault(term, value.shape)
            own = self._rank_values(window, values, nodes, draws, number)
            self.evaluator.run_ranks(nodes, own, self.ranks)
            if kept is None:
                self.computed = {name for name in candidates if all(name in v for v in own)}
                computed = [name for name in candidates if name in self.computed]
                kept = list(self._guesses(window, computed, whole, own))
                self.computed &= {held.name for held in kept}
            is_exact = draws.is_exact
            scales = {term: _largest(value) for term, value in whole.items()}
            kept = [
                h
                for h in kept
                if _has(whole[h.term], h)
                and not self._is_far(h, whole[h.term], own, scales[h.term])
                and self._agrees(h, whole[h.term], own, is_exact)
            ]
            if not kept:
                return []
            told = [evidence[h.term] for h in kept if evidence[h.term].is_any]
            if number + 1 >= DRAWS and all(each.is_enough for each in told):
                break
        self.computed -= {held.name for held in kept or ()}
        found = [h for h in kept or [] if evidence[h.term].is_enough and self._is_all(h)]
        wrong = self._refuted(window, nodes, found, draws)
        self.computed |= {held.name for held in wrong}
        return [h for h in found if h not in wrong]

    def _is_whole(self, name: str) -> bool:
        """False for a constant of the model that has other numbers than whole ones."""
        constants = self.model.constants
        if name not in constants or self.weights.is_believed(constants, name):
            return True
        value = constants[name]
        return value.dtype.kind != "f" or bool((value == np.round(value)).all())

    def _refuted(
        self, window: Window, nodes: Sequence[RankNode], found: Sequence[Held], draws: Draws
    ) -> list[Held]:
        """Of relations that hold but for rounding in float32, those that do not in float64: there,
        a term much smaller than another one is not lost. Only where ranks have no other numbers
        than the model, which may be rounded, and where there are kernels."""
        kinds = {each.attrs.get("to") for each in (*window.nodes, *(n.first for n in nodes))}
        kinds |= {self.model.types.get(name, 1) for name in window.reads}
        exact = [h for h in found if self._has_exact_numbers(window, h)]
        is_rounded = any(node.kind in _DEFINED for node in window.nodes)
        if draws.is_exact or kinds & _NARROW or is_rounded or not exact:
            return []
        wrong: dict[int, Held] = {}
        for number in range(MOST_DRAWS, MOST_DRAWS + 3):
            terms = list(dict.fromkeys(held.term for held in exact))
            try:
                values = self._model_values(window, draws, number)
                whole = dict(
                    zip(terms, self.wide.run(window.nodes, values, self.model, terms), strict=True)
                )
            except NotComputed:
                return []
            values = {name: self.wide.fed(value) for name, value in values.items()}
            own = self._rank_values(window, values, nodes, draws, number)  # parts in float64, too
            self.wide.run_ranks(nodes, own, self.ranks)
            for held in exact:
                is_run = all(held.name in each for each in own)
                if is_run and not self._agrees(held, whole[held.term], own, False):
                    wrong[id(held)] = held
        return list(wrong.values())

    def _has_exact_numbers(self, window: Window, held: Held) -> bool:
        """True if ranks compute a tensor from numbers of the model alone."""
        try:
            nodes = self.before(window, [self.ranks.makers[held.name]])
        except NotComputed:
            return False
        names = {name for node in nodes for name in _read_by(node)}
        return all(self._is_exact(window, name) for name in names if self.ranks.is_constant(name))

    def _is_exact(self, window: Window, name: str) -> bool:
        terms = [term for term in window.reads if term in self.model.constants]
        if any(self.weights.relate(term, name) for term in terms):
            return True
        values = self.ranks.constants(name) or []
        if not values or values[0].dtype.kind != "f":
            return True
        known = self._numbers(window, values[0].dtype)
        return all(bool(np.isin(value, known).all()) for value in values)

    def _is_all(self, held: Held) -> bool:
        """True if ranks together hold all elements: less may be a tensor by accident, of which the
        model's is a longer one."""
        shape = self.model.shapes.get(held.term)
        if shape is not None and len(shape) != len(held.dims):
            return False  # an If whose branches have results of other ranks
        return shape is None or covers(held.dims, shape, self.ranks.size)

    def _computed(
        self, window: Window, draws: Draws, number: int, wanted: Sequence[str]
    ) -> tuple[Values, list[Array]]:
        """What a window reads and computes, on a draw that it can compute: if whole numbers are
        out of its range, they are drawn from a smaller one. Errors: NotComputed."""
        while True:
            values = self._model_values(window, draws, number)
            try:
                return values, self.evaluator.run(window.nodes, values, self.model, wanted)
            except NotComputed:
                if not draws.narrow():
                    raise

    def _edges(self, window: Window) -> list[int]:
        """Positions at the ends of what ranks hold of any tensor that the window reads."""
        found = set()
        for term in window.reads:
            for held in self.relations.by_term.get(term, ()):
                for family in held.dims:
                    for span in family.spans:
                        if len(span):
                            found |= {
                                int(span[0]),
                                int(span[-1]),
                                int(span[-1]) + 1,
                                int(span[0]) - 1,
                            }
        return sorted(found)

    def _model_values(self, window: Window, draws: Draws, number: int) -> Values:
        values: Values = {}
        for name in window.reads:
            constants = self.model.constants
            if name in constants and not self.weights.is_believed(constants, name):
                values[name] = constants[name]
            else:
                shape = self.model.shapes.get(name)
                if shape is None or math.prod(shape) > MOST_ELEMENTS:
                    raise NotComputed(f"{name} is too large, or has no known shape")
                kind = self.model.types.get(name, 1)
                if not kind:
                    raise NotComputed(f"{name} is no tensor")
                values[name] = draws.value(name, shape, kind, number)
        return values

    def _rank_values(
        self, window: Window, values: Values, nodes: Sequence[RankNode], draws: Draws, number: int
    ) -> list[Values]:
        """What ranks hold of the values that the window reads, and their constants."""
        own: list[Values] = [{} for _ in range(self.ranks.size)]
        first = self.ranks.programs[0].constants
        read = {
            name
            for name in {n for node in nodes for n in _read_by(node)}
            if self.ranks.is_constant(name) and not self.weights.is_believed(first, name)
        }
        for term in window.reads:
            for held in self.relations.by_term.get(term, ()):
                if held.name in read:
                    continue
                parts = parts_of(held, values[term], self.ranks.size, draws, number)
                for rank, part in enumerate(parts):
                    own[rank].setdefault(held.name, part)
        for name in read:
            for rank, each in enumerate(self.ranks.constants(name) or ()):
                own[rank].setdefault(name, each)
        return own

    def _guesses(
        self, window: Window, candidates: Sequence[str], whole: Mapping[str, Array],
        own: Sequence[Values],
    ) -> Iterator[Held]:  # fmt: skip
        """Yields relations whose sizes fit."""
        parts = self._possible_sums(window)
        for term, value in whole.items():
            for name in candidates:
                shapes = [values[name].shape for values in own]
                if any(len(shape) != value.ndim for shape in shapes):
                    continue
                if own[0][name].dtype != value.dtype:
                    continue
                sizes = [tuple(shape[axis] for shape in shapes) for axis in range(value.ndim)]
                choices = [
                    self.families.possible(size, own)
                    for size, own in zip(value.shape, sizes, strict=True)
                ]
                for dims in islice(product(*choices), _MOST_WAYS):
                    yield Held(term, name, dims)
                    for part in parts if value.dtype != bool else ():
                        yield Held(term, name, dims, (part,))

    def _possible_sums(self, window: Window) -> list[Partial]:
        found: dict[Partial, None] = {}
        for term in window.reads:
            shape = self.model.shapes.get(term)
            if term in self.model.constants:
                shape = self.model.constants.shape(term)
            for held in self.relations.by_term.get(term, ()):
                found |= dict.fromkeys(held.partial)
                for family, size in zip(held.dims, shape or (), strict=True):
                    if not family.is_whole(size):
                        found[Partial("sum", family, size)] = None
        return list(found)

    def _is_far(self, held: Held, whole: Array, own: Sequence[Values], scale: float) -> bool:
        """True if the last element of what rank 0 holds is far from that of the result: most
        guesses end here."""
        spans = [family.spans[0] for family in held.dims]
        if not scale or not all(map(len, spans)) or held.name not in own[0]:
            return False
        group = group_of(held, 0, self.ranks.size) if held.partial else [0]
        parts = [own[m][held.name] for m in group or () if held.name in own[m]]
        if any(part.ndim != whole.ndim or not part.size for part in parts):
            return False
        got = sum(float(part[(-1,) * part.ndim]) for part in parts)
        return abs(got - float(whole[tuple(int(span[-1]) for span in spans)])) > 0.01 * scale

    def _agrees(self, held: Held, whole: Array, own: Sequence[Values], is_exact: bool) -> bool:
        if not all(held.name in v for v in own):
            return False
        values = [v[held.name] for v in own]
        for rank in range(self.ranks.size):
            wanted = whole[np.ix_(*(f.spans[rank] for f in held.dims))] if held.dims else whole
            got = values[rank]
            if held.partial:
                group = group_of(held, rank, self.ranks.size)
                if group is None or any(values[m].shape != got.shape for m in group):
                    return False
                got = np.sum([values[m] for m in group], axis=0, dtype=wanted.dtype)
            if got.shape != wanted.shape or not same(got, wanted, is_exact):
                return False
        return True


def _largest(value: Array) -> float:
    """The largest magnitude of a result in real numbers; 0 for others, and if it is not finite."""
    largest = float(np.abs(value).max(initial=0)) if value.dtype.kind == "f" else 0.0
    return largest if np.isfinite(largest) else 0.0


def _read_by(node: RankNode) -> set[str]:
    """What a node, and the bodies in it, read."""
    return ({*node.first.inputs} | captured(node.first.proto)) - {""}


def group_of(held: Held, rank: int, ranks: int) -> list[int] | None:
    """Ranks that together have all parts of a sum, `rank` among them, and the same positions."""
    part, *others = held.partial
    group, seen = [rank], {id(part.family.spans[rank])}
    for other in range(ranks):
        if (
            other != rank
            and held.at(other) == held.at(rank)
            and id(part.family.spans[other]) not in seen
        ):
            group.append(other)
            seen.add(id(part.family.spans[other]))
    is_all = all(p.family.covers(group, p.size) for p in (part, *others))
    return group if is_all else None


def parts_of(held: Held, value: Array, ranks: int, draws: Draws, number: int) -> list[Array]:
    """What each rank holds of a value; parts of a sum are drawn. Empty for parts of another
    reduction, and of a sum that no ranks have together."""
    wholes = [
        value[np.ix_(*(f.spans[rank] for f in held.dims))] if held.dims else value
        for rank in range(ranks)
    ]
    if not held.partial:
        return wholes
    if any(part.op != "sum" for part in held.partial) or value.dtype == bool:
        return []
    parts: dict[int, Array] = {}
    for rank in range(ranks):
        if rank in parts:
            continue
        group = group_of(held, rank, ranks)
        if group is None:
            return []
        for member in group[1:]:
            parts[member] = draws.like(wholes[member], f"{held.name}.{member}", number)
        rest = np.sum([parts[m] for m in group[1:]], axis=0, dtype=value.dtype) if group[1:] else 0
        parts[rank] = np.asarray(wholes[rank] - rest, value.dtype)
    return [parts[rank] for rank in range(ranks)]


def _some(flat: Array) -> Array:
    """Some of many values, evenly."""
    return flat[:: max(1, len(flat) // MOST_COUNTED)]


def ordinary(values: Array) -> float:
    """The largest magnitude of values but for those far beyond most: numbers such as -1e9, which
    masks put in, are no measure of what rounding may do to the others."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if not sizes.size:
        return 0.0
    return float(min(sizes.max(), 1e3 * np.median(_some(sizes))))


def same(a: Array, b: Array, is_exact: bool) -> bool:
    """True if two results are equal: to the bit if they are `is_exact`, else but for rounding."""
    if a.dtype.kind not in "fc" and a.dtype.name != "bfloat16":
        return bool(np.array_equal(a, b))
    x, y = a.astype(np.float64), b.astype(np.float64)
    if is_exact:
        return bool(np.array_equal(x, y, equal_nan=True))
    scale = ordinary(y) or 1.0
    eps = float(np.finfo(a.dtype).eps) if a.dtype.name != "bfloat16" else 2.0**-7
    return bool(np.allclose(x, y, rtol=64 * eps, atol=64 * eps * scale, equal_nan=True))


def _has(whole: Array, held: Held) -> bool:
    """True if a value has the positions that ranks hold: data may decide its size."""
    return len(held.dims) == whole.ndim and all(
        not len(span) or span.max() < size
        for family, size in zip(held.dims, whole.shape, strict=True)
        for span in {id(s): s for s in family.spans}.values()
    )
