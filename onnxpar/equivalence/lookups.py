"""Proves lookups of a table whose rows ranks have parts of, and sums that are added to such rows,
for every index that the model allows.

Ranks turn an index into one of their own rows, look it up, and put zero in its place where they do
not have the row. All that is elementwise in the indices: so it is computed here for each index
that there is. The rows that a rank then has must be the model's; the others must be zero. Where
ranks add to rows, they turn the index of a row that they do not have into one behind their rows,
and drop what is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from onnx import helper

from onnxpar.base.arrays import Array
from onnxpar.equivalence.evaluate import Evaluator, NotComputed
from onnxpar.equivalence.held import Held, Partial, Relations
from onnxpar.equivalence.lemma import POINTWISE, NotShown, place_of
from onnxpar.equivalence.moves import slice_positions
from onnxpar.equivalence.program import Node, Shape, default
from onnxpar.equivalence.ranks import RankNode, Ranks
from onnxpar.equivalence.spans import Families

MOST_NODES = 64
"""The most nodes of ranks between indices and a result."""
MOST_INDICES = 1 << 24
"""The most indices of all ranks together."""


@dataclass(frozen=True, eq=False)
class _Of:
    """What a tensor of ranks is for each index: by rank, its value, or that times the row of the
    table at the place `rows`.

    ones  the dimensions of one element behind those of the indices
    """

    values: Sequence[Array]
    rows: Sequence[Array] | None = None
    data: Held | None = None
    ones: int = 0


class Lookups:
    """Relates results of a Gather."""

    def __init__(self, ranks: Ranks, families: Families, relations: Relations) -> None:
        self.ranks, self.families, self.relations = ranks, families, relations
        self.evaluator = Evaluator()

    def relate(
        self, node: Node, tables: Sequence[Held], shapes: Sequence[Shape], axis: int
    ) -> Iterator[Held]:
        """Yields what tensors of ranks are, of the result of a Gather along a dimension; `tables`
        are the ways in which ranks hold the table, and `shapes` those of the operands."""
        count = shapes[0][axis]
        if 2 * count * self.ranks.size > MOST_INDICES or not count:
            return
        for indices in self.relations.by_term.get(node.inputs[1], ()):
            if indices.partial:
                continue
            for local, own in self._functions(indices, count, tables, shapes, axis):
                held = self._held(
                    node.outputs[0], local.first.outputs[0], own, indices, count, axis
                )
                if held is not None:
                    yield held

    def _functions(
        self, indices: Held, count: int, tables: Sequence[Held], shapes: Sequence[Shape], axis: int
    ) -> Iterator[tuple[RankNode, _Of]]:
        """Yields the nodes of ranks behind indices, with what their results are for each index."""
        known = {indices.name: _Of([np.arange(-count, count)] * self.ranks.size)}
        behind = self._behind(indices.name)
        left = Counter(name for local in behind for name in local.first.inputs)
        for local in behind:
            try:
                own = self._follow(local, known, indices, tables, shapes, axis)
            except (NotShown, NotComputed):
                continue
            finally:
                left.subtract(local.first.inputs)
                for name in local.first.inputs:
                    if not left[name]:
                        known.pop(name, None)
            name = local.first.outputs[0]
            if left[name]:
                known[name] = own
            yield local, own

    def scattered(self, node: Node, data: Held, shapes: Sequence[Shape]) -> Iterator[Held]:
        """Yields what tensors of ranks are, of the result of a ScatterElements that adds to rows of
        `data`; `shapes` are those of the operands."""
        axis = int(node.attrs.get("axis", 0)) % len(shapes[0])
        count, others = shapes[0][axis], [i for i in range(len(shapes[0])) if i != axis]
        if node.attrs.get("reduction") != "add" or data.partial or not count:
            return
        if any(shapes[1][i] != shapes[0][i] for i in others) or shapes[1] != shapes[2]:
            return  # to some elements of a row nothing is added
        if 2 * count * self.ranks.size > MOST_INDICES:
            return
        for indices in self.relations.by_term.get(node.inputs[1], ()):
            is_whole = indices.dims[axis].is_whole(shapes[1][axis])
            same = all(indices.dims[i] is data.dims[i] for i in others)
            if indices.partial or not is_whole or not same:
                continue
            for local, rows in self._functions(indices, count, (), shapes, axis):
                for reader in self.ranks.readers.get(local.first.outputs[0], ()):
                    first = reader.first
                    if first.kind != node.kind or first.inputs[1] != local.first.outputs[0]:
                        continue
                    added = self.relations.of(node.inputs[2], first.inputs[2])
                    if any(h.dims == indices.dims and not h.partial for h in added):
                        with suppress(NotShown):
                            name = self._kept(reader, data, rows, axis, count)
                            yield Held(node.outputs[0], name, data.dims)

    def _kept(self, local: RankNode, data: Held, rows: _Of, axis: int, count: int) -> str:
        """The tensor of ranks that has their rows after a ScatterElements, if what it adds to the
        others is dropped. NotShown if there is none."""
        programs, pad = self.ranks.programs, self.ranks.makers.get(local.first.inputs[0])
        axes = {int(own or 0) % len(data.dims) for own in local.attrs("axis", programs)}
        if axes != {axis} or {*local.attrs("reduction", programs)} != {"add"} or rows.ones:
            raise NotShown("it adds to something else")
        more = [0] * self.ranks.size
        if local.first.inputs[0] != data.name:
            if pad is None or pad.first.kind != ("", "Pad") or pad.first.inputs[0] != data.name:
                raise NotShown("it adds to something else")
            more = [self._padded(pad, rank, axis, len(data.dims)) for rank in range(len(more))]
        for span, own, extra in zip(data.dims[axis].spans, rows.values, more, strict=True):
            place = np.full(count, -1)
            place[span] = np.arange(len(span))
            wanted, size = np.tile(place, 2), len(span) + extra
            if own.dtype.kind != "i" or len(np.unique(span)) < len(span):
                raise NotShown("rows are held twice")
            if not size or own.min() < -size or own.max() >= size:
                raise NotShown("a row that there is not")
            if not np.where(wanted < 0, own % size >= len(span), own % size == wanted).all():
                raise NotShown("another row")
        name = local.first.outputs[0]
        return self._cut(name, data, more, axis) if any(more) else name

    def _padded(self, pad: RankNode, rank: int, axis: int, count: int) -> int:
        """How many positions a Pad of a rank adds at the end of a dimension, and nowhere else.
        NotShown if it does something else."""
        if not pad.is_alike:
            raise NotShown("ranks have other nodes")
        node, constants = pad.nodes[rank], self.ranks.programs[rank].constants
        pads = constants.get(node.inputs[1]) if len(node.inputs) in (2, 3) else None
        if (
            pads is None
            or pads.shape != (2 * count,)
            or node.attrs.get("mode", "constant") != "constant"
        ):
            raise NotShown("another Pad")
        more = int(pads[count + axis])
        if more < 0 or np.count_nonzero(pads) != (more > 0):
            raise NotShown("another Pad")
        return more

    def _cut(self, name: str, data: Held, more: Sequence[int], axis: int) -> str:
        """The result of a Slice that drops so many positions from the end of a dimension."""
        for local in self.ranks.readers.get(name, ()):
            if (
                local.first.kind == ("", "Slice")
                and local.is_alike
                and local.first.inputs[0] == name
            ):
                sizes = zip(*(family.sizes for family in data.dims), strict=True)
                if all(
                    self._is_cut(local, rank, own, more[rank], axis)
                    for rank, own in enumerate(sizes)
                ):
                    return local.first.outputs[0]
        raise NotShown("nothing drops the other rows")

    def _is_cut(self, local: RankNode, rank: int, sizes: Shape, more: int, axis: int) -> bool:
        constants, names = self.ranks.programs[rank].constants, local.nodes[rank].inputs[1:]
        values = [constants.get(name) if name else None for name in names]
        if any(name and value is None for name, value in zip(names, values, strict=True)):
            return False
        padded = (*sizes[:axis], sizes[axis] + more, *sizes[axis + 1 :])
        chosen = slice_positions([*values, *[None] * (4 - len(values))], padded)
        wanted = {i: np.arange(size) for i, size in enumerate(sizes)}
        return axis in chosen and all(np.array_equal(own, wanted[i]) for i, own in chosen.items())

    def _behind(self, name: str) -> list[RankNode]:
        """The first nodes of ranks that depend on a tensor, in order."""
        found, todo = dict[int, RankNode](), [name]
        while todo and len(found) < MOST_NODES:
            for reader in self.ranks.readers.get(todo.pop(0), ()):
                if reader.number not in found and reader.first.domain == "" and reader.is_alike:
                    found[reader.number] = reader
                    todo += reader.first.outputs
        return [found[number] for number in sorted(found)]

    def _follow(
        self, local: RankNode, known: Mapping[str, _Of], indices: Held, tables: Sequence[Held],
        shapes: Sequence[Shape], axis: int,
    ) -> _Of:  # fmt: skip
        """What the result of a node of ranks is. NotShown if that is no function of the index."""
        first = local.first
        if first.op == "Gather":
            return self._gathered(local, known, tables, shapes, axis)
        operands = [known.get(name) for name in first.inputs]
        if first.op == "Unsqueeze":
            return self._unsqueezed(local, operands[0], len(indices.dims))
        if first.op not in POINTWISE:
            raise NotShown("not elementwise")
        own = [operand for operand in operands if operand is not None]
        looked_up = [operand for operand in own if operand.rows is not None]
        ones = len(shapes[0]) - 1 - axis if looked_up else max((o.ones for o in own), default=0)
        if any(operand.ones != ones for operand in own if operand.rows is None):
            raise NotShown("operands meet other dimensions")
        if len(looked_up) > 1 or (looked_up and first.op not in ("Mul", "Where", "Identity")):
            raise NotShown("not linear in the row")
        results = [
            self._computed(local, rank, operands, len(indices.dims))
            for rank in range(self.ranks.size)
        ]
        if not looked_up:
            return _Of(results, ones=ones)
        if first.op == "Where" and operands[0] in looked_up:
            raise NotShown("a row is a condition")
        return _Of(results, looked_up[0].rows, looked_up[0].data)

    def _computed(
        self, local: RankNode, rank: int, operands: Sequence[_Of | None], most: int
    ) -> Array:
        """The values of an elementwise node for each index, of rows the factor."""
        node, program = local.nodes[rank], self.ranks.programs[rank]
        values = {}
        for name, operand in zip(node.inputs, operands, strict=True):
            if operand is not None:
                values[name] = operand.values[rank]
                continue
            value = program.constants.get(name)
            if value is None or value.size != 1 or value.ndim > most:
                raise NotShown(f"{name!r} is no number")
            values[name] = value.reshape(())
        is_row = any(operand is not None and operand.rows is not None for operand in operands)
        if is_row and node.op == "Where":
            for name, operand in zip(node.inputs[1:], operands[1:], strict=True):
                if (operand is None or operand.rows is None) and values[name].any():
                    raise NotShown("what takes the place of a row is not zero")
        return self.evaluator.run([node], values, program, node.outputs[:1])[0]

    def _unsqueezed(self, local: RankNode, operand: _Of | None, rank: int) -> _Of:
        """Indices with more dimensions behind them, of one element."""
        if operand is None or operand.rows is not None:
            raise NotShown("no indices")
        axes = [
            node.attrs.get("axes") or program.constants[node.inputs[1]].tolist()
            for node, program in zip(local.nodes, self.ranks.programs, strict=True)
        ]
        total = rank + operand.ones + len(axes[0])
        if any({int(a) % total for a in own} & {*range(rank)} for own in axes):
            raise NotShown("a dimension before those of the indices")
        if any(len(own) != len(axes[0]) for own in axes):
            raise NotShown("ranks have other dimensions")
        return _Of(operand.values, ones=operand.ones + len(axes[0]))

    def _gathered(
        self, local: RankNode, known: Mapping[str, _Of], tables: Sequence[Held],
        shapes: Sequence[Shape], axis: int,
    ) -> _Of:  # fmt: skip
        data, index = local.first.inputs
        rows = known.get(index)
        table = next((held for held in tables if held.name == data), None)
        if table is None or rows is None or rows.rows is not None or rows.ones:
            raise NotShown("another lookup")
        axes = {
            place_of(int(default(node, "axis", program.opsets) or 0), len(shapes[0]))
            for node, program in zip(local.nodes, self.ranks.programs, strict=True)
        }
        if axes != {axis}:
            raise NotShown("another dimension")
        places = []
        for rank, own in enumerate(rows.values):
            size = table.dims[axis].sizes[rank]
            if own.dtype.kind != "i" or own.min() < -size or own.max() >= size:
                raise NotShown(f"rank {rank} looks up a row that it does not have")
            places.append(own % size)
        kind = helper.tensor_dtype_to_np_dtype(self.ranks.programs[0].types.get(data, 1))
        ones = [np.ones(len(own), kind) for own in places]
        return _Of(ones, places, table)

    def _held(
        self, term: str, name: str, own: _Of, indices: Held, count: int, axis: int
    ) -> Held | None:
        """What a tensor of ranks is of the model's result; None if it is something else."""
        if own.rows is None or own.data is None:
            return None
        family = own.data.dims[axis]
        numbers = np.arange(-count, count) % count
        has = []
        for span, factors, rows in zip(family.spans, own.values, own.rows, strict=True):
            is_row, is_zero = factors == 1, factors == 0
            right = span[rows] == numbers
            if not (is_zero | (is_row & right)).all():
                return None
            if not np.array_equal(is_row[:count], is_row[count:]):
                return None
            has.append(np.flatnonzero(is_row[:count]))
        dims = (*own.data.dims[:axis], *indices.dims, *own.data.dims[axis + 1 :])
        if own.data.partial:
            return None
        rows_of = self.families.of(has)
        part = () if rows_of.is_whole(count) else (Partial("sum", rows_of, count),)
        return Held(term, name, dims, part)
