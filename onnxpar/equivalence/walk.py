"""Walks through the nodes of a model, and relates each result to tensors of ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import islice, product, zip_longest
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import ModelError
from onnxpar.equivalence.bodies import Bodies
from onnxpar.equivalence.collectives import Collectives
from onnxpar.equivalence.contrib import CONTRIB
from onnxpar.equivalence.evaluate import NotComputed, communicate
from onnxpar.equivalence.flat_scatters import FlatScatters, is_zero
from onnxpar.equivalence.fold import Known, fold
from onnxpar.equivalence.held import Held, Relations
from onnxpar.equivalence.lemma import LEMMAS, Case, Lemma, NotShown, check_opsets, whole
from onnxpar.equivalence.lookups import Lookups
from onnxpar.equivalence.moves import MOVES
from onnxpar.equivalence.program import (
    MOST_FOLDED,
    Constants,
    Node,
    Program,
    Shape,
    captured,
    infer,
)
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks
from onnxpar.equivalence.spans import Families
from onnxpar.equivalence.trace import Trace
from onnxpar.equivalence.verification import Failure
from onnxpar.equivalence.weights import Weights
from onnxpar.equivalence.windows import Disagreement, Sampler, Window

MOST_REFUSED = 24
"""The most nodes, one after the other, that are sampled in vain."""
MOST_WAITING = 400
"""The most refused nodes that are compared for which to sample next; those behind them depend on
them, as a rule."""
_ABOVE = (0, 2, 6, 14)
"""How many related nodes above a node windows have, one after the other."""
MOST_INSIDE = 400
"""The most nodes of the model in a window."""
_SIZED_BY_DATA = frozenset(
    ("", op) for op in ("Compress", "NonMaxSuppression", "NonZero", "Unique")
)
"""Ops with results whose size data decide."""
_MOST_FREE = 1 << 16
"""The most positions of a dimension whose size data decide."""
MOST_TRIES = 64
"""The most choices of what operands are that are tried for a pair of nodes."""


@dataclass(frozen=True)
class Refusal:
    """A node of the model that no node of ranks computes; `reasons` has why, by node of ranks."""

    node: Node
    reasons: Mapping[str, str] = field(default_factory=dict)


_SECOND = """
ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceSumSquare ReduceL1 ReduceL2
ReduceLogSumExp Squeeze Unsqueeze Split Reshape Expand Tile Gather GatherND GatherElements
TopK CumSum
"""
BY_VALUE = {
    **dict.fromkeys(_SECOND.split(), (1,)),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 2, 3),
    "Dropout": (1, 2),
    "Resize": (1, 2, 3),
}
"""Operands that are sizes, axes or positions: rules compare them by value, and ranks may have
others than the model."""
VERSIONED = BY_VALUE.keys() - {
    "Gather", "GatherND", "GatherElements", "Expand", "Tile", "TopK", "CumSum", "Dropout", "Resize",
}  # fmt: skip
"""Ops that have an attribute in some versions, and an operand in its place in others."""


class Walk:
    """Relates the tensors of a model to those of ranks.

    proved   how each node was proved, by name of its first result; `assumed` if ranks add up its
             result in fewer bits
    refused  nodes that are not
    """

    def __init__(
        self, model: Program, ranks: Ranks, families: Families,
        weights: Weights, seed: int, ranges: Mapping[str, tuple[int, int]],
        states: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.weights = weights
        self.notes: dict[str, str] = {}
        self.readers: dict[str, list[int]] = defaultdict(list)
        self._todo: list[int] = []
        self._wrong: set[int] = set()
        """Nodes that ranks compute in another way: no window may hide them."""
        self._queued: set[int] = set()
        self.model, self.ranks, self.families = model, ranks, families
        self.relations = Relations()
        self.collectives = Collectives(ranks, families)
        self.trace = Trace(model, ranks, families, self.relations, self.collectives, states)
        self.lookups = Lookups(ranks, families, self.relations)
        self.flat = FlatScatters(ranks, families, self.relations)
        self.proved: dict[str, str] = {}
        self.refused: dict[str, Refusal] = {}
        self._origins: dict[str, list[RankNode]] = defaultdict(list)
        """Nodes of ranks, by the name of the node of the model that they name as their origin."""
        for local in ranks.nodes:
            self._origins[local.first.origin].append(local)
        self.sampler = Sampler(model, ranks, families, self.relations, weights, seed, ranges)
        self.sampler.avoided |= self.trace.narrowed
        self._makers = {name: node for node in model.nodes for name in node.outputs}
        for node in model.nodes:
            if node.kind == ("", "Identity") and node.inputs[0] in self._makers:
                source = self._makers[node.inputs[0]]
                self._origins[source.name] += self._origins.get(node.name, [])

    def inside(self, model: Program, ranks: Ranks) -> Walk:
        """The walk through a body of the model, and that of a node of ranks."""
        weights, sampler = self.weights.inside(model, ranks), self.sampler
        return Walk(model, ranks, self.families, weights, sampler.seed, sampler.draw_ranges, {})

    def fold(self) -> None:
        """Computes the tensors of ranks that depend on constants alone, also what ranks send each
        other of these. Errors: ModelError if onnxruntime cannot compute one."""
        todo, computed = True, Known()
        while todo:
            for program in self.ranks.programs:
                try:
                    fold(program, keeps=True, infers=False, computed=computed)
                except NotComputed as error:
                    raise ModelError(f"{program.path} cannot run: {error}") from None
            self.ranks.forget()
            todo = False
            for node in self.ranks.nodes:
                todo |= self._fold_sent(node)

    def _fold_sent(self, node: RankNode) -> bool:
        """Computes the result of a collective of small constants; False if it is none, or known."""
        inputs = [name for name in node.first.inputs if self.ranks.is_constant(name)]
        is_sent = node.first.domain == PLUGIN and node.is_alike
        if not is_sent or not inputs or node.first.inputs[0] != inputs[0]:
            return False
        shapes = self.ranks.constant_shapes(inputs[0])
        if sum(map(math.prod, shapes)) * 8 > MOST_FOLDED:
            return False
        values = [{n: p.constants[n] for n in inputs} for p in self.ranks.programs]
        try:
            result = self.collectives.result(node)
            if self.ranks.is_constant(result):
                return False
            self.collectives.attributes(node)
            communicate(node, values)
        except (NotShown, NotComputed, KeyError, IndexError):
            return False
        for program, value in zip(self.ranks.programs, values, strict=True):
            is_rounded = program.constants.is_rounded(inputs[0])
            program.constants.add(result, value[node.first.outputs[0]], is_rounded)
        self.ranks.forget()
        return True

    def hold(self, held: Held) -> None:
        """Adds a relation, and all that follows by collectives and by what ranks copy and cut."""
        todo = [held]
        while todo:
            each = todo.pop()
            if not self.relations.add(each):
                continue
            for number in self.readers.get(each.term, ()):
                self._push(number)
            for node in self.ranks.readers.get(each.name, ()):
                try:
                    todo += self.collectives.after(node, each)
                except (NotShown, IndexError, ValueError, TypeError, KeyError):
                    continue  # a rank's file may have any positions and sizes

    def run(self) -> None:
        """Proves nodes in order; again if there is more to know of their operands. Samples the
        first node that no lemma proves, and goes on."""
        for number, node in enumerate(self.model.nodes):
            for name in dict.fromkeys((*node.inputs, *sorted(captured(node.proto)))):
                self.readers[name].append(number)
            self._push(number)
        self._relate_sent()
        sampled: set[tuple[str, int]] = set()
        while True:
            while self._todo:
                number = heappop(self._todo)
                self._queued.discard(number)
                self._prove(self.model.nodes[number])
            for held in list(self.trace.run()):
                self.hold(held)
            if not self._todo and not self._sample_next(sampled):
                break
        for term in self.trace.terms:
            if term in self._makers:
                self.proved[self._makers[term].key] = "assumed"

    def _relate_sent(self) -> None:
        """Relates the constants that ranks send each other, or parts of."""
        terms = {name: term for term, names in self.weights.copies.items() for name in names}
        for node in self.ranks.nodes:
            if node.first.domain != PLUGIN or not node.first.inputs:
                continue
            name = self._source(node.first.inputs[0])
            term = terms.get(name, name)
            if term in self.model.constants and self.ranks.is_constant(name):
                for held in self.weights.relate(term, name):
                    self.hold(held)

    def _source(self, name: str) -> str:
        """The tensor of ranks whose elements they moved to make this one."""
        maker = self.ranks.makers.get(name)
        while maker is not None and maker.first.domain == "" and maker.first.op in MOVES:
            name = maker.first.inputs[0]
            maker = self.ranks.makers.get(name)
        return name

    def _push(self, number: int) -> None:
        if number not in self._queued:
            self._queued.add(number)
            heappush(self._todo, number)

    def _sample_next(self, sampled: set[tuple[str, int]]) -> bool:
        """Samples refused nodes until one is related; False if none of the first is. Nodes that
        ranks can compute from what is related come first, in order."""
        keys = (node.key for node in self.model.nodes if node.key in self.refused)
        refused = list(islice(keys, MOST_WAITING))
        refused.sort(key=lambda key: self._distance(self.refused[key].node))
        tries = 0
        for key in refused:
            node = self.refused[key].node
            known = sum(len(self.relations.by_term.get(name, ())) for name in node.inputs)
            if (key, known) not in sampled:
                sampled.add((key, known))
                if self._sample(node, key):
                    return True
                tries += bool(self._anchors(node)) or not self.ranks.has_origins
                if tries == MOST_REFUSED:
                    break
        return False

    def _distance(self, node: Node) -> int:
        """How far ranks are from computing a node: 0 if its nodes of ranks read nothing unknown, 2
        if they wait for a collective of other nodes, else 1."""
        own = self._anchors(node)
        made = {name for local in own for name in local.first.outputs}
        read = {name for local in own for name in local.first.inputs if name}
        read -= made | self.ranks.tokens
        unknown = [
            name
            for name in read
            if name not in self.relations.by_name and not self.ranks.is_constant(name)
        ]
        if not own or unknown:
            return 2 if any(map(self._is_sent, unknown)) else 1
        return 0

    def _anchors(self, node: Node) -> list[RankNode]:
        """The nodes of ranks that name a node of the model as their origin; of one without a name,
        those that compute tensors with the names of its results."""
        if node.proto.name:
            return self._origins.get(node.name, [])
        makers = (self.ranks.makers.get(name) for name in node.outputs if name)
        return [maker for maker in makers if maker is not None]

    def is_anchored(self, node: Node) -> bool:
        """True if ranks name a node as the origin of some of theirs."""
        return bool(self._anchors(node))

    def _is_sent(self, name: str) -> bool:
        """True if an unknown tensor comes from a collective, by nodes that move elements."""
        maker = self.ranks.makers.get(self._source(name))
        return maker is not None and maker.first.domain == PLUGIN

    def _prove(self, node: Node) -> None:
        key = node.key
        reasons: dict[str, str] = {}
        if node.op == "Identity" and node.domain == "":
            for source in list(self.relations.by_term.get(node.inputs[0], ())):
                self.hold(replace(source, term=node.outputs[0]))
                self.proved.setdefault(key, "arithmetic")
        for local in self._candidates(node):
            for held in islice(self._operands(node, local), MOST_TRIES):
                found = self._show(node, local, held, reasons)
                if found is not None:
                    self.proved.setdefault(key, found)
        if key not in self.proved and node.kind == ("", "Gather"):
            self._look_up(node)
        if key not in self.proved and node.kind == ("", "ScatterElements"):
            self._scatter(node)
        if key in self.proved:
            self.refused.pop(key, None)
        else:
            self.refused[key] = Refusal(node, reasons)

    def _look_up(self, node: Node) -> None:
        """Relates the result of a Gather whose rows ranks have parts of."""
        table, indices = (self.shape(name) for name in node.inputs)
        if not table or indices is None:
            return
        if node.inputs[0] in self.model.constants:
            self._relate_constant(node.inputs[0])
        tables = self.relations.by_term.get(node.inputs[0], ())
        axis = int(node.attrs.get("axis", 0)) % len(table)
        for held in list(self.lookups.relate(node, tables, (table, indices), axis)):
            self.model.shapes.setdefault(held.term, (*table[:axis], *indices, *table[axis + 1 :]))
            self.hold(held)
            self.proved.setdefault(node.key, "lemma")

    def _scatter(self, node: Node) -> None:
        """Relates the result of a ScatterElements that adds to rows that ranks have parts of."""
        shapes = [self.shape(name) for name in node.inputs]
        if node.inputs[0] in self.model.constants:
            self._relate_constant(node.inputs[0])
        if any(not shape for shape in shapes):
            return
        known = [shape or () for shape in shapes]
        for data in list(self.relations.by_term.get(node.inputs[0], ())):
            for held in list(self.lookups.scattered(node, data, known)):
                self._hold_sum(node, held, known[0])
        source = self._makers.get(node.inputs[1])
        zeros = self.model.constants.get(node.inputs[0])
        if source is None or source.kind != ("", "Expand") or zeros is None or not is_zero(zeros):
            return
        column = (known[1][0], *[1] * (len(known[1]) - 1))
        is_row = known[1] == known[2] and known[1][1:] == known[0][1:]
        adds = node.attrs.get("reduction") == "add" and node.attrs.get("axis", 0) == 0
        if is_row and adds and self.shape(source.inputs[0]) == column:
            for held in self.flat.relate(node, source.inputs[0], known, self._anchors(node)):
                self._hold_sum(node, held, known[0])
                self.proved.setdefault(source.key, "lemma")  # ranks need not have its result
                self.refused.pop(source.key, None)

    def _hold_sum(self, node: Node, held: Held, shape: Shape) -> None:
        self.model.shapes.setdefault(held.term, shape)
        self.hold(held)
        self.proved.setdefault(node.key, "lemma")

    def _sample(self, node: Node, key: str) -> bool:
        """Relates the results of a node, and of the nodes before it that are not proved, on drawn
        values."""
        is_port = any(name in self.model.outputs for name in node.outputs)
        if self.ranks.has_origins and not self._anchors(node) and not is_port:
            return False
        seen: set[int] = set()
        for above in _ABOVE:
            window = self._window(node, above)
            if window is None or len(window.nodes) in seen:
                continue
            seen.add(len(window.nodes))
            try:
                named, added = set[str](), set[str]()
                if self._is_independent(window):
                    named, added = self._named(node)
                found = self.sampler.relate(window, named, added)
            except Disagreement as error:
                self.notes[key] = str(error)
                self._wrong.add(id(node))
                return False
            except NotComputed as error:
                self.notes[key] = str(error)
                continue
            for held in found:
                self.hold(held)
            if found:
                for inner in window.nodes:
                    if inner is not node and self._makes_unknown_output(inner):
                        continue
                    self.refused.pop(inner.key, None)
                    self.proved.setdefault(inner.key, "sampled")
                return True
        return False

    def _makes_unknown_output(self, node: Node) -> bool:
        ports = {*node.outputs} & {*self.model.outputs}
        return any(not self.relations.by_term.get(name) for name in ports)

    def _is_independent(self, window: Window) -> bool:
        """True if no tensor that a window reads depends on another: drawn values then are values
        that the model may have."""
        reads = {name for name in window.reads if name not in self.model.constants}
        todo, seen = [self._makers[name] for name in reads if name in self._makers], set[int]()
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if reads & {*node.inputs}:
                return False
            todo += [self._makers[name] for name in node.inputs if name in self._makers]
        return True

    def _named(self, node: Node) -> tuple[set[str], set[str]]:
        """The results of nodes of ranks that have a node of the model as their origin, its op, and
        operands that stand for its operands. If a collective adds them up, they may be parts of
        sums: then its results, which come second."""
        own = [local for local in self._candidates(node) if local.first.origin == node.name]
        names = {name for local in own for name in local.first.outputs if name}
        readers = [reader for name in names for reader in self.ranks.readers.get(name, ())]
        added = {
            reader.number: reader
            for reader in readers
            if reader.first.domain == PLUGIN
            and reader.first.op.removeprefix("Start") in ("AllReduce", "ReduceScatter")
        }
        if not added:
            return names, set()
        with suppress(NotShown):
            return set(), {self.collectives.result(reader) for reader in added.values()}
        return set(), set()

    def _window(self, node: Node, above: int) -> Window | None:
        """The node, and those before it whose results are not related; and `above` nodes more, one
        before the other, whose results are related, but which ranks compute in another way."""
        inside: dict[int, Node] = {}
        reads: dict[str, None] = {}
        todo = [(node, above)]
        depths: dict[int, int] = {}
        while todo:
            each, left = todo.pop()
            if depths.get(id(each), -1) >= left:
                continue
            inside[id(each)], depths[id(each)] = each, left
            if len(inside) > MOST_INSIDE or id(each) in self._wrong:
                return None
            for name in (*each.inputs, *sorted(captured(each.proto))):
                if not name:
                    continue
                is_known = bool(self.relations.by_term.get(name))
                is_source = name in self.model.constants or name not in self._makers
                if is_source or (is_known and left == 0):
                    reads[name] = None
                else:
                    todo.append((self._makers[name], left - is_known))
        nodes = tuple(n for n in self.model.nodes if id(n) in inside)
        made = {name for n in nodes for name in n.outputs}
        for name in made & reads.keys():
            del reads[name]
        for name in reads:
            if name in self.model.constants:
                self._relate_constant(name)
        return Window(nodes, tuple(reads))

    def window_of(self, key: str) -> tuple[Window, list[RankNode]]:
        """The nodes of the model that compute a tensor which is not related, from tensors that are,
        and the nodes of ranks behind these, as far as what they compute comes from that node.
        Errors: NotComputed."""
        node = self.refused[key].node
        self._wrong.discard(id(node))
        window = self._window(node, 0)
        own = self._anchors(node) or self._candidates(node)
        if window is None or not own:
            raise NotComputed(f"no node of ranks comes from {node.name!r}")
        return window, self.sampler.before(window, own)

    def _relate_constant(self, term: str) -> None:
        """Relates a constant to the constant of ranks with the same name, or its copies; where
        ranks do not tell names of the model, to all that have its content."""
        names = (term, *self.weights.copies.get(term, ()))
        for name in names if self.ranks.has_origins else self.ranks.all_constants:
            if self.ranks.is_constant(name):
                for held in self.weights.relate(term, name):
                    self.relations.add(held)

    def failure(self, key: str) -> Failure:
        """Why a node is not proved: what ranks hold of its operands, and the broken rule."""
        node, reasons = self.refused[key].node, self.refused[key].reasons
        details = []
        for term in dict.fromkeys(n for n in node.inputs if n and n not in self.model.constants):
            shape = self.shape(term)
            for held in self.relations.by_term.get(term, ())[:2] if shape is not None else ():
                details.append(f"ranks   {held.name}: {_holdings(held, shape or ())}")
        for local, reason in list(reasons.items())[:2]:
            details.append(f"rule    {local}: {reason}")
        if key in self.notes:
            details.append(f"sampled {self.notes[key]}")
        readers = [
            n.name or n.key for n in self.model.nodes if any(t in n.inputs for t in node.outputs)
        ]
        if readers:
            more = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
            details.append(f"readers {readers[0]}{more}")
        text = f"no node of ranks is shown to compute {node.op} {node.name or key!r}"
        return Failure("node", key, text, tuple(details))

    def _candidates(self, node: Node) -> list[RankNode]:
        """The nodes of ranks with the same op that read what stands for the operands."""
        found: dict[int, RankNode] = {}
        names = [n for n in dict.fromkeys(node.inputs) if n]
        variable = [n for n in names if n not in self.model.constants]
        if not names and not node.has_body:  # such as an empty sequence
            own = self.ranks.makers.get(node.outputs[0])
            return [own] if own and own.first.kind == node.kind and own.is_alike else []
        for name in variable or names:
            if not variable:
                self._relate_constant(name)
            for held in self.relations.by_term.get(name, ()):
                for local in self.ranks.readers.get(held.name, ()):
                    if local.first.kind == node.kind and local.is_alike:
                        found[local.number] = local
            break
        return [found[number] for number in sorted(found)]

    def _operands(self, node: Node, local: RankNode) -> Iterator[tuple[Held | None, ...]]:
        """Yields what the operands may be."""
        choices: list[Sequence[Held | None]] = []
        by_value = BY_VALUE.get(node.op, ()) if node.domain == "" else ()
        names: Sequence[str] = local.first.inputs
        if node.bodies:  # which may have tokens, too
            names = [name for name in names if name not in self.ranks.tokens]
        pairs = zip_longest(node.inputs, names, fillvalue="")
        for index, (term, name) in enumerate(pairs):
            if not term or not name:
                if (term or name) and not (node.op in VERSIONED and node.domain == ""):
                    return
                choices.append([None])
            elif term in self.model.constants and self.ranks.is_constant(name):
                related: Sequence[Held | None] = self.weights.relate(term, name)
                choices.append(related or ([None] if index in by_value else []))
            else:
                choices.append(self.relations.of(term, name))
        yield from product(*choices)

    def _show(
        self, node: Node, local: RankNode, held: tuple[Held | None, ...], reasons: dict[str, str]
    ) -> str | None:
        """Tries to prove a node; returns how."""
        names = [*node.inputs, *[""] * (len(held) - len(node.inputs))]
        shapes = [self.shape(name) for name in names]
        if any(shape is None for shape in shapes):
            reasons[local.first.name] = "the shape of an operand is unknown"
            return None
        case = Case(
            node, local, held, [s or () for s in shapes], self.model, self.ranks, self.families
        )
        for name in node.outputs:
            self.shape(name)
        if node.bodies:
            return self._show_bodies(node, local, held, reasons)
        for how, lemma in _lemmas(node):
            try:
                check_opsets(case)
                results = lemma(case)
            except NotShown as error:
                reasons.setdefault(local.first.name, str(error))
                continue
            except (IndexError, ValueError, TypeError, KeyError) as error:
                reasons[local.first.name] = f"{type(error).__name__}: {error}"
                continue
            for result in results:
                term, name = node.outputs[result.index], local.first.outputs[result.index]
                if term and name:
                    self.model.shapes.setdefault(term, tuple(result.shape))
                    self.hold(Held(term, name, result.dims, result.partial))
            return how
        return None

    def _show_bodies(
        self, node: Node, local: RankNode, held: Sequence[Held | None], reasons: dict[str, str]
    ) -> str | None:
        """Tries to prove a node by its bodies; returns how."""
        bodies = Bodies(self, node, local, held)
        try:
            results = bodies.show()
        except NotShown as error:
            reasons.setdefault(local.first.name, str(error))
            return None
        names = [name for name in local.first.outputs if name not in self.ranks.tokens]
        for result in results:
            term, name = node.outputs[result.index], names[result.index]
            if term and name:
                self.model.shapes.setdefault(term, tuple(result.shape))
                self.hold(Held(term, name, result.dims, result.partial))
        return bodies.how

    @cached_property
    def _free(self) -> int:
        """The size of a dimension that data decide: more than any number with which nodes cut it,
        so that what ranks hold of it they hold at any size."""
        largest = 10
        for program in (self.model, *self.ranks.programs):
            for value in _numbers(program.nodes, program.constants):
                own = np.asarray(value)
                if own.dtype.kind == "i" and own.size < 10:
                    small = np.abs(own[np.abs(own) < _MOST_FREE])
                    largest = max(largest, int(small.max(initial=0)))
        return largest + 1

    def shape(self, name: str) -> Shape | None:
        """The shape of a tensor of the model; None if it is unknown."""
        if not name:
            return ()
        if name in self.model.constants:
            return self.model.constants.shape(name)
        if name not in self.model.shapes and name in self._makers:
            node = self._makers[name]
            infer(node, self.model, self._free if node.kind in _SIZED_BY_DATA else None)
        return self.model.shapes.get(name)


def _lemmas(node: Node) -> Iterator[tuple[str, Lemma]]:
    if node.domain == "" and node.op in MOVES:
        yield "arithmetic", MOVES[node.op]
    lemma = LEMMAS.get(node.kind) or CONTRIB.get(node.kind)
    if lemma is not None:
        yield "lemma", lemma
    if node.domain != PLUGIN:
        yield "whole", whole


def _numbers(nodes: Sequence[Node], constants: Constants) -> Iterator[int | list[Any] | Array]:
    """Yields the attributes and constant operands that may be numbers, also those inside of
    bodies."""
    for node in nodes:
        for value in node.attrs.values():
            if isinstance(value, int | list | np.ndarray):
                yield value
        for name in node.inputs[1:]:
            if name in constants and len(constants.shape(name)) < 2:
                yield constants[name]
        for body in node.bodies.values():
            yield from _numbers(body.nodes, constants.inside(body))


def _holdings(held: Held, shape: Shape) -> str:
    """What ranks hold of a tensor, for people."""
    parts = []
    for axis, (family, size) in enumerate(zip(held.dims, shape, strict=True)):
        if not family.is_whole(size):
            last = len(family.spans) - 1
            parts.append(
                f"dimension {axis}: rank 0 holds {family.text(0)}, rank {last} {family.text(last)}"
            )
    for part in held.partial:
        parts.append(f"a part of a {part.op} over {part.size} positions")
    return "; ".join(parts) or "the whole tensor"
