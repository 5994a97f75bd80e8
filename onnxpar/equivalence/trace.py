"""Follows elements through nodes that only ranks have: buckets, flattened rows, shards in other
orders.

Each element of a tensor of ranks gets a number: which tensor of the model it is of, and its place
there. Nodes that move elements move the numbers, and so do collectives. A tensor whose numbers are
those of some positions of one tensor of the model stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.collectives import Collectives
from onnxpar.equivalence.evaluate import NotComputed, communicate
from onnxpar.equivalence.held import Held, Partial, Relations
from onnxpar.equivalence.lemma import NotShown
from onnxpar.equivalence.moves import RESHAPES, shape_after, slice_positions
from onnxpar.equivalence.program import Node, Shape
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks
from onnxpar.equivalence.spans import Families, places_of, spans_of

MOST_ELEMENTS = 1 << 25
"""The most elements of all ranks' parts of a tensor that are followed."""
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
_Numbers = list[Array]


class Trace:
    """Numbers of the elements of tensors, for each rank."""

    def __init__(
        self, ranks: Ranks, families: Families, relations: Relations, collectives: Collectives,
        shapes: Mapping[str, Shape],
    ) -> None:  # fmt: skip
        self.ranks, self.families, self.relations = ranks, families, relations
        self.collectives, self.shapes = collectives, shapes
        self.kinds: list[tuple[str, tuple[Partial, ...]]] = []
        self.numbers: dict[str, _Numbers] = {}

    def run(self) -> Iterator[Held]:
        """Yields new relations of tensors that no relation has yet."""
        self.numbers.clear()
        for node in self.ranks.nodes:
            first = node.first
            op = first.op.removeprefix("Start") if first.domain == PLUGIN else first.op
            is_moved = op in (*MOVED, "Gate") and first.domain in ("", PLUGIN)
            is_sent = first.domain == PLUGIN and op in _COLLECTIVES
            if not (is_moved or is_sent) or not node.is_alike:
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
                moved = self._sent(node, op) if is_sent else self._moved(node)
            except (NotShown, NotComputed, ValueError, IndexError, TypeError):
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
        count = sum(math.prod(f.sizes[rank] for f in held.dims) for rank in range(self.ranks.size))
        if shape is None or count > MOST_ELEMENTS:
            raise NotShown(f"{held.name!r} is too large to follow")
        kind = held.term, held.partial
        if kind not in self.kinds:
            self.kinds.append(kind)
        start = self.kinds.index(kind) * _PLACES
        numbers = []
        for rank in range(self.ranks.size):
            spans = [family.spans[rank] for family in held.dims]
            numbers.append(places_of(spans, shape) + start)
        return numbers

    def _moved(self, node: RankNode) -> list[_Numbers]:
        """The numbers of a node's results."""
        data = node.first.inputs if node.first.op == "Concat" else node.first.inputs[:1]
        operands = [self._of(name) for name in data]
        by_rank = [
            move(own, [o[rank] for o in operands], self._constants(own, rank))
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
            own = self._reduced(own, attrs)
            if op == "AllReduce":
                return [own]
        values = [{node.first.inputs[0]: numbers} for numbers in own]
        communicate(node, values, None if op != "ReduceScatter" else _pick)
        return [[value[node.first.outputs[0]] for value in values]]

    def _reduced(self, own: _Numbers, attrs: Sequence[Mapping[str, object]]) -> _Numbers:
        results = []
        for rank, attr in enumerate(attrs):
            group = [int(m) for m in attr["group"]]  # type: ignore[attr-defined]
            if any(not np.array_equal(own[m], own[rank]) for m in group):
                raise NotShown("members reduce other elements")
            kinds = np.unique(own[rank] // _PLACES)
            numbers = own[rank]
            for kind in kinds.tolist():
                term, partial = self.kinds[kind]
                if not partial:
                    raise NotShown(f"{term!r} would be counted once for each member")
                for part in partial:
                    if part.op != attr.get("op", "sum") or not part.family.covers(group, part.size):
                        raise NotShown(f"members have not all parts of {term!r}")
                if (term, ()) not in self.kinds:
                    self.kinds.append((term, ()))
                whole = self.kinds.index((term, ()))
                is_of_kind = own[rank] // _PLACES == kind
                numbers = np.where(is_of_kind, numbers + (whole - kind) * _PLACES, numbers)
            results.append(np.asarray(numbers))
        return results

    def _held(self, name: str, numbers: _Numbers) -> Held | None:
        """The relation that numbers say; None if there is none."""
        kinds = {int(k) for each in numbers for k in np.unique(each // _PLACES)}
        if len(kinds) != 1:
            return None
        term, partial = self.kinds[kinds.pop()]
        shape = self.shapes[term]
        spans: list[list[Array]] = [[] for _ in shape]
        for each in numbers:
            if each.ndim != len(shape):
                return None
            own = spans_of(each % _PLACES, shape)
            if own is None:
                return None
            for axis, span in enumerate(own):
                spans[axis].append(span)
        return Held(term, name, tuple(map(self.families.of, spans)), partial)


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


def _pick(parts: Sequence[Array]) -> Array:
    """Of equal parts, one."""
    return parts[0]
