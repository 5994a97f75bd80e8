"""Follows elements through nodes that only ranks have: buckets, flattened rows, shards in other
orders.

Each element of a tensor of ranks gets a number: which tensor of the model it is of, and its place
there. Nodes that move elements move the numbers, and so do collectives. A tensor whose numbers are
those of some positions of one tensor of the model stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxpar.base.arrays import Array
from onnxpar.equivalence.collectives import Collectives, shard_bounds
from onnxpar.equivalence.held import Held, Partial, Relations
from onnxpar.equivalence.lemma import NotShown
from onnxpar.equivalence.moves import RESHAPES, shape_after, slice_positions
from onnxpar.equivalence.program import Node, Program
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks
from onnxpar.equivalence.runs import Runs
from onnxpar.equivalence.spans import Families
from onnxpar.equivalence.two_bits import TwoBitSum, two_bit_sums

MOVED = frozenset([*RESHAPES, "Transpose", "Concat", "Split", "Slice", "Gather", "Identity"])
"""The ops whose results `move` computes."""
_COLLECTIVES = (
    "AllReduce",
    "AllGather",
    "ReduceScatter",
    "AllToAll",
    "Broadcast",
    "CollectivePermute",
)
_PLACES = 1 << 40
"""Numbers of one tensor of the model: more than it has elements."""
_HALVES = {int(TensorProto.FLOAT16): "float16", int(TensorProto.BFLOAT16): "bfloat16"}
_Numbers = list[Runs]
_Kind = tuple[str, tuple[Partial, ...], str]
"""A tensor of the model, the parts of a sum that ranks have of it, and the type to which ranks cast
it before they add it up; "" for its own."""


class Trace:
    """Numbers of the elements of tensors, for each rank.

    narrowed  the tensors of ranks that only ranks cast to fewer bits
    assumed   the collectives that add up numbers of fewer bits than the model has, with the reason:
              their results are taken for the sums
    terms     the tensors of the model that ranks hold after such a collective
    """

    def __init__(
        self, model: Program, ranks: Ranks, families: Families, relations: Relations,
        collectives: Collectives, states: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.model, self.shapes = model, model.shapes
        self.ranks, self.families, self.relations = ranks, families, relations
        self.collectives = collectives
        self.kinds: list[_Kind] = []
        self.assumed: dict[str, str] = {}
        self.terms: set[str] = set()
        self._reasons: dict[tuple[str, str], dict[str, None]] = {}
        self.narrowed = {*_narrowed(model, ranks)}
        self._states = states
        self._sums: dict[int, list[TwoBitSum]] | None = None
        self._results: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        self.numbers: dict[str, _Numbers] = {}

    def run(self) -> Iterator[Held]:
        """Yields new relations of tensors that no relation has yet."""
        self.numbers.clear()
        for node in self.ranks.nodes:
            first = node.first
            for own in self._two_bit_sums().get(node.number, ()):
                with suppress(NotShown):
                    self._add_up(own)
            op = first.op.removeprefix("Start") if first.domain == PLUGIN else first.op
            is_moved = op in (*MOVED, "Gate") and first.domain in ("", PLUGIN)
            is_sent = first.domain == PLUGIN and op in _COLLECTIVES
            is_cast = first.kind == ("", "Cast") and (
                first.outputs[0] in self.narrowed or first.inputs[0] in self.numbers
            )
            if not (is_moved or is_sent or is_cast) or not node.is_alike:
                continue
            try:
                results = [self.collectives.result(node)] if is_sent else list(first.outputs)
            except NotShown:
                continue
            if first.domain == PLUGIN:
                results = results[:1]
            if all(name in self.relations.by_name for name in results):
                continue
            try:
                if is_cast:
                    moved = [self._cast(node)]
                else:
                    moved = self._sent(node, op) if is_sent else self._moved(node)
            except (NotShown, ValueError, IndexError, TypeError):
                continue
            for name, numbers in zip(results, moved, strict=True):
                self.numbers[name] = numbers
                held = self._held(name, numbers)
                if held is not None:
                    yield held

    def _of(self, name: str) -> _Numbers:
        """The numbers of a tensor. NotShown if it is not known."""
        if name in self.numbers:
            return self.numbers[name]
        held = self.relations.by_name.get(name)
        if not held:
            raise NotShown(f"{name!r} is not known")
        numbers = self._numbered(held[0])
        self.numbers[name] = numbers
        return numbers

    def _numbered(self, held: Held) -> _Numbers:
        shape = self.shapes.get(held.term)
        if shape is None or len(shape) != len(held.dims):
            raise NotShown(f"the shape of {held.term!r} is unknown")
        first = self._number((held.term, held.partial, "")) * _PLACES
        return [
            Runs.at([family.spans[rank] for family in held.dims], shape, first)
            for rank in range(self.ranks.size)
        ]

    def _number(self, kind: _Kind) -> int:
        if kind not in self.kinds:
            self.kinds.append(kind)
        return self.kinds.index(kind)

    def _two_bit_sums(self) -> Mapping[int, list[TwoBitSum]]:
        """The sums of which ranks send two bits, by the number of the collective. Ask once
        constants are folded."""
        if self._sums is None:
            self._sums = {}
            for own in two_bit_sums(self.ranks, self.model.inputs, self._states):
                self._sums.setdefault(own.gather.number, []).append(own)
        return self._sums

    def _add_up(self, own: TwoBitSum) -> None:
        """Gives the results of sums of which ranks send two bits the numbers of the sums."""
        parts = self._of(own.parts)
        attrs = self.collectives.attributes(own.gather)
        sizes = tuple(math.prod(part.shape) for part in parts)
        key = own.gather.number, sizes
        if key not in self._results:
            groups = [attr["group"] for attr in attrs]
            self._results[key] = own.results(self.ranks, sizes, groups)
        if self._results[key]:
            summed = self._reduced(parts, attrs, own.gather.first.name, "sent in 2 bits")
            self.numbers |= dict.fromkeys(self._results[key], summed)

    def _cast(self, node: RankNode) -> _Numbers:
        """Ranks cast parts of a sum to fewer bits before they add them up, and the sum back."""
        result, (to, *others) = node.first.outputs[0], {own.attrs.get("to") for own in node.nodes}
        if others or to is None:
            raise NotShown(f"ranks cast {result!r} to other types")
        changed = []
        for own in self._of(node.first.inputs[0]):
            starts, kinds = own.starts, own.starts // _PLACES
            for kind in np.unique(kinds).tolist():
                term, partial, wire = self.kinds[kind]
                if wire and not partial and to == self.model.types.get(term):
                    after: _Kind = term, (), ""
                elif not wire and partial and result in self.narrowed:
                    after = term, partial, _HALVES[to]
                else:
                    raise NotShown(f"{node.first.name!r} is no cast of a sum")
                step = (self._number(after) - kind) * _PLACES
                starts = np.where(kinds == kind, starts + step, starts)
            changed.append(Runs(own.shape, starts, own.counts))
        return changed

    def _moved(self, node: RankNode) -> list[_Numbers]:
        """The numbers of a node's results."""
        data = node.first.inputs if node.first.op == "Concat" else node.first.inputs[:1]
        operands = [self._of(name) for name in data]
        by_rank = [
            _move_runs(own, [o[rank] for o in operands], self._constants(own, rank))
            for rank, own in enumerate(node.nodes)
        ]
        return [list(each) for each in zip(*by_rank, strict=True)]

    def _constants(self, node: Node, rank: int) -> list[Array | None]:
        """The operands behind the first."""
        if node.op == "Concat" or node.domain == PLUGIN:
            return []
        values: list[Array | None] = []
        for name in node.inputs[1:]:
            if name and name not in self.ranks.programs[rank].constants:
                raise NotShown(f"{name!r} is not a constant")
            values.append(self.ranks.programs[rank].constants[name] if name else None)
        return values

    def _sent(self, node: RankNode, op: str) -> list[_Numbers]:
        """The numbers of a collective's result. A reduction takes parts of sums to their whole."""
        own = self._of(node.first.inputs[0])
        attrs = self.collectives.attributes(node)
        if op in ("AllReduce", "ReduceScatter"):
            own = self._reduced(own, attrs, node.first.name)
            if op == "AllReduce":
                return [own]
        else:
            for kind in {int(k) for each in own for k in np.unique(each.starts // _PLACES)}:
                self.collectives.alike(self.kinds[kind][1], attrs)
        received: dict[object, Runs] = {}
        for rank, attr in enumerate(attrs):
            group = tuple(map(int, attr["group"]))
            key = (group, int(attr["axis"])) if op == "AllGather" else rank  # all members get it
            if key not in received:
                received[key] = self._received(own, attrs, op, rank)
            received[rank] = received[key]
        return [[received[rank] for rank in range(self.ranks.size)]]

    def _received(
        self, own: _Numbers, attrs: Sequence[Mapping[str, Any]], op: str, rank: int
    ) -> Runs:
        """The numbers that a collective other than an AllReduce gives a rank."""
        mine, group = attrs[rank], list[int](attrs[rank]["group"])
        me, parts = group.index(rank), [own[member] for member in group]
        if op == "ReduceScatter":
            return _shard(parts[me], "axis", "sizes", mine, me)
        if op == "AllGather":
            return _joined(parts, int(mine["axis"]), mine.get("sizes"))
        if op == "AllToAll":
            cut = [
                _shard(part, "split_axis", "split_sizes", a, me)
                for part, a in zip(parts, (attrs[m] for m in group), strict=True)
            ]
            return _joined(cut, int(mine["concat_axis"]), mine.get("concat_sizes"))
        source = int(mine.get("root", 0)) if op == "Broadcast" else int(mine["sources"][me])
        if source < 0:
            raise NotShown(f"rank {rank} gets zeros")
        return parts[source]

    def _reduced(
        self, own: _Numbers, attrs: Sequence[Mapping[str, Any]], name: str, how: str = ""
    ) -> _Numbers:
        """The whole results of parts; `how` says in which way they are added up in fewer bits."""
        results = []
        for rank, attr in enumerate(attrs):
            group = [int(m) for m in attr["group"]]
            if any(not own[m].same(own[rank]) for m in group):
                raise NotShown("members reduce other elements")
            starts = own[rank].starts
            kinds = starts // _PLACES
            for kind in np.unique(kinds).tolist():
                term, partial, wire = self.kinds[kind]
                if not partial:
                    raise NotShown(f"{term!r} would be counted once for each member")
                for part in partial:
                    if part.op != attr.get("op", "sum") or not part.family.covers(group, part.size):
                        raise NotShown(f"members have not all parts of {term!r}")
                if how or wire:
                    self._assume(name, term, how or f"added up in {wire}")
                whole = self._number((term, (), wire))
                starts = np.where(kinds == kind, starts + (whole - kind) * _PLACES, starts)
            results.append(Runs(own[rank].shape, starts, own[rank].counts))
        return results

    def _assume(self, name: str, term: str, how: str) -> None:
        """Takes the result of a collective for the sum of a tensor's parts, which are added up in
        fewer bits."""
        self.terms.add(term)
        terms = self._reasons.setdefault((name, how), {})
        terms[term] = None
        self.assumed[name] = f"what is {how} is taken for the sum: {', '.join(terms)}"

    def _held(self, name: str, numbers: _Numbers) -> Held | None:
        """The relation that numbers say; None if there is none."""
        kinds = {int(k) for each in numbers for k in np.unique(each.starts // _PLACES)}
        if len(kinds) != 1:
            return None
        kind = kinds.pop()
        term, partial, wire = self.kinds[kind]
        if wire:
            return None
        shape = self.shapes[term]
        spans: list[list[Array]] = [[] for _ in shape]
        for each in numbers:
            own = each.spans(shape, kind * _PLACES)
            if own is None:
                return None
            for axis, span in enumerate(own):
                spans[axis].append(span)
        return Held(term, name, tuple(map(self.families.of, spans)), partial)


def _narrowed(model: Program, ranks: Ranks) -> Iterator[str]:
    """The results of casts to 16 bits that no node of the model makes."""
    names = {name for node in model.nodes for name in (node.name, *node.outputs)}
    for node in ranks.nodes:
        first = node.first
        is_narrow = first.kind == ("", "Cast") and first.attrs.get("to") in _HALVES
        if is_narrow and names.isdisjoint((first.origin, first.outputs[0])):
            yield first.outputs[0]


def _joined(parts: Sequence[Runs], axis: int, sizes: Sequence[int] | None) -> Runs:
    """What members send, one behind the other; it must have the sizes that the rank expects."""
    whole = Runs.join(parts, axis)
    if sizes is not None and [part.shape[axis] for part in parts] != list(sizes):
        raise NotShown("a rank expects other sizes")
    return whole


def _shard(runs: Runs, axis: str, sizes: str, attrs: Mapping[str, Any], index: int) -> Runs:
    """The shard of one member; `axis` and `sizes` are names of attributes."""
    at = int(attrs[axis])
    return runs.cut(at, *shard_bounds(runs.shape[at], attrs.get(sizes), attrs)[index])


def _move_runs(node: Node, operands: Sequence[Runs], others: Sequence[Array | None]) -> list[Runs]:
    """The results of a node that moves elements; `others` are the operands behind these."""
    x = operands[0]
    if node.op in ("Identity", "Gate"):
        return [x]
    if node.op in RESHAPES:
        return [x.reshape(tuple(shape_after(node, x.shape, others[0] if others else None)))]
    axis = int(node.attrs.get("axis", 0))
    if node.op == "Concat":
        return [Runs.join(operands, axis)]
    if node.op == "Split" and others and others[0] is not None:
        ends = np.cumsum(others[0]).tolist()
        if ends[-1] != x.shape[axis]:
            raise ValueError("a Split has other sizes")
        return [x.cut(axis, start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    if node.op == "Slice":
        values = [*others, *[None] * (4 - len(others))]
        chosen = slice_positions(values, x.shape)
        if all(len(own) and (np.diff(own) == 1).all() for own in chosen.values()):
            for place, own in chosen.items():
                x = x.cut(place, int(own[0]), int(own[-1]) + 1)
            return [x]
    return [Runs.of(each) for each in move(node, [each.numbers for each in operands], others)]


def move(node: Node, operands: Sequence[Array], others: Sequence[Array | None]) -> list[Array]:
    """The results of a node that moves elements; `others` are the operands behind these."""
    x = operands[0]
    if node.op in ("Identity", "Gate"):
        return [x]
    if node.op in RESHAPES:
        return [x.reshape(shape_after(node, x.shape, others[0] if others else None))]
    if node.op == "Transpose":
        return [x.transpose(node.attrs.get("perm"))]
    axis = int(node.attrs.get("axis", 0))
    if node.op == "Concat":
        return [np.concatenate(operands, axis)]
    if node.op == "Split":
        if not others or others[0] is None:
            raise NotShown("a Split has no sizes")
        return np.split(x, np.cumsum(others[0])[:-1], axis)
    if node.op == "Gather":
        if others[0] is None:
            raise NotShown("a Gather has no indices")
        return [np.take(x, others[0], axis)]
    values = [*others, *[None] * (4 - len(others))]
    for place, chosen in slice_positions(values, x.shape).items():
        x = np.take(x, chosen, place)
    return [x]
