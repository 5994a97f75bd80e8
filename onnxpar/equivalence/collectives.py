"""What ranks hold after a collective, and after nodes that only ranks have: copies, slices,
masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.evaluate import SIZED
from onnxpar.equivalence.held import Held, Partial
from onnxpar.equivalence.lemma import NotShown, place_of
from onnxpar.equivalence.moves import slice_positions
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks
from onnxpar.equivalence.spans import Families, Family


class Collectives:
    """Derives relations of collectives' results. Two-op collectives have theirs at Complete."""

    def __init__(self, ranks: Ranks, families: Families) -> None:
        self.ranks, self.families = ranks, families
        self._attributes: dict[int, list[dict[str, Any]]] = {}

    def after(self, node: RankNode, held: Held) -> Iterator[Held]:
        """Yields what the result of a node of ranks is, whose first operand is `held`. NotShown if
        it is nothing of the same tensor."""
        first = node.first
        if not node.is_alike:
            raise NotShown(f"{first.name!r} reads other tensors on some ranks")
        if first.domain == PLUGIN:
            if held.name != first.inputs[0]:
                return
            if first.op == "Gate":
                yield replace(held, name=first.outputs[0])
                return
            op, result = self._collective(node)
            rule = _RULES.get(op)
            if rule is None:
                return
            dims, partial = rule(self, held, self.attributes(node))
            yield Held(held.term, result, dims, partial)
        elif first.domain == "":
            yield from self._local(node, held)

    def _collective(self, node: RankNode) -> tuple[str, str]:
        """The kind of a collective, and its result, which the Complete of one in two ops has."""
        op, result = node.first.op, node.first.outputs[0]
        if not op.startswith("Start"):
            return op, result
        complete = [r for r in self.ranks.readers[result] if r.first.op == "Complete"]
        if len(complete) != 1:
            raise NotShown(f"{len(complete)} nodes complete {node.first.name!r}")
        return op.removeprefix("Start"), complete[0].first.outputs[0]

    def result(self, node: RankNode) -> str:
        """The result of a collective."""
        return self._collective(node)[1]

    def attributes(self, node: RankNode) -> list[dict[str, Any]]:
        """The attributes of all ranks, with the group of each; all members must have it."""
        if node.number not in self._attributes:
            self._attributes[node.number] = self._read_attributes(node)
        return self._attributes[node.number]

    def _read_attributes(self, node: RankNode) -> list[dict[str, Any]]:
        found = [dict(own.attrs) for own in node.nodes]
        for rank, attrs in enumerate(found):
            attrs.setdefault("group", list(range(self.ranks.size)))
            attrs["group"] = [int(member) for member in attrs["group"]]
            if len({*attrs["group"]}) != len(attrs["group"]):
                raise NotShown(
                    f"the group of {node.first.name!r} on rank {rank} names a rank twice"
                )
            if rank not in attrs["group"] or not all(
                0 <= m < self.ranks.size for m in attrs["group"]
            ):
                raise NotShown(f"{node.first.name!r}: rank {rank} is not in its own group")
        for rank in {tuple(attrs["group"]): rank for rank, attrs in enumerate(found)}.values():
            for member in found[rank]["group"]:
                for key in ("group", "tag"):
                    if found[member].get(key) != found[rank].get(key):
                        raise NotShown(
                            f"{node.first.name!r}: ranks {rank} and {member} have other {key}s"
                        )
        sizes = [self._operand_sizes(node, rank) for rank in range(self.ranks.size)]
        for attrs, size in zip(found, sizes, strict=True):
            if size is not None:
                attrs[SIZED[node.first.op.removeprefix("Start")]] = size
        return found

    def _operand_sizes(self, node: RankNode, rank: int) -> list[int] | None:
        """The sizes that are an operand of a collective."""
        inputs = node.first.inputs
        if len(inputs) < 3 or node.first.op.removeprefix("Start") not in SIZED:
            return None
        values = self.ranks.constants(inputs[2])
        if values is None:
            raise NotShown(f"the sizes of {node.first.name!r} are not constant")
        return [int(n) for n in values[rank]]

    def all_reduce(self, held: Held, attrs: Sequence[Mapping[str, Any]]) -> _Part:
        """The parts of a reduction become its whole result."""
        self._check_reduction(held, attrs)
        return held.dims, ()

    def _check_reduction(self, held: Held, attrs: Sequence[Mapping[str, Any]]) -> None:
        """The members of each group must have all parts, each once, of the same elements."""
        if not held.partial:
            raise NotShown(f"{held.term!r} would be counted once for each member")
        groups = {(tuple(own["group"]), own.get("op", "sum")): r for r, own in enumerate(attrs)}
        for (group, op), rank in groups.items():
            if any(p.op != op for p in held.partial):
                raise NotShown(f"{held.term!r} is a partial {held.partial[0].op}")
            if any(held.at(member) != held.at(rank) for member in group):
                raise NotShown(f"members of rank {rank}'s group hold other positions")
            for part in held.partial:
                if not part.family.covers(group, part.size):
                    raise NotShown(
                        f"the members of rank {rank}'s group have not all parts of the "
                        f"{part.op}, each once"
                    )

    def all_gather(self, held: Held, attrs: Sequence[Mapping[str, Any]]) -> _Part:
        """Members get what all of them have, one behind the other."""
        axis = self._axis(held, attrs, "axis")
        family = held.dims[axis]
        spans = []
        for rank, own in enumerate(attrs):
            group = own["group"]
            self._same_but(held, rank, group, (axis,))
            sizes = own.get("sizes")
            if sizes is not None and list(sizes) != [family.sizes[m] for m in group]:
                raise NotShown(f"rank {rank} expects other sizes")
            if own.get("equal") and len({family.sizes[m] for m in group}) > 1:
                raise NotShown("members have other numbers of positions")
            spans.append(np.concatenate([family.spans[member] for member in group]))
        return self._with(held, axis, spans), self.alike(held.partial, attrs)

    def reduce_scatter(self, held: Held, attrs: Sequence[Mapping[str, Any]]) -> _Part:
        """Each member gets its shard of the whole result."""
        self._check_reduction(held, attrs)
        axis = self._axis(held, attrs, "axis")
        spans = [
            self._shard(
                held.dims[axis].spans[rank], own, own.get("sizes"), own["group"].index(rank)
            )
            for rank, own in enumerate(attrs)
        ]
        return self._with(held, axis, spans), ()

    def all_to_all(self, held: Held, attrs: Sequence[Mapping[str, Any]]) -> _Part:
        """Each member sends a shard of one dimension to each other, and joins what it gets along
        another."""
        cut, joined = (self._axis(held, attrs, f"{k}_axis") for k in ("split", "concat"))
        if cut == joined:
            return self._exchange(held, attrs, cut), self.alike(held.partial, attrs)
        left, right = [], []
        for rank, own in enumerate(attrs):
            group = own["group"]
            self._same_but(held, rank, group, (cut, joined))
            parts = [
                self._shard(
                    held.dims[cut].spans[member], attrs[member], attrs[member].get("split_sizes"),
                    group.index(rank),
                )
                for member in group
            ]  # fmt: skip
            if any(not np.array_equal(part, parts[0]) for part in parts):
                raise NotShown(f"rank {rank} gets other positions of dimension {cut} from members")
            left.append(parts[0])
            right.append(np.concatenate([held.dims[joined].spans[member] for member in group]))
        dims = list(held.dims)
        dims[cut], dims[joined] = self.families.of(left), self.families.of(right)
        return tuple(dims), self.alike(held.partial, attrs)

    def _exchange(
        self, held: Held, attrs: Sequence[Mapping[str, Any]], axis: int
    ) -> tuple[Family, ...]:
        """Each member sends a shard of a dimension to each other, and joins what it gets along the
        same one."""
        spans = []
        for rank, own in enumerate(attrs):
            group = own["group"]
            self._same_but(held, rank, group, (axis,))
            shards = [
                self._shard(
                    held.dims[axis].spans[member], attrs[member],
                    attrs[member].get("split_sizes"), group.index(rank),
                )
                for member in group
            ]  # fmt: skip
            spans.append(np.concatenate(shards))
        return self._with(held, axis, spans)

    def broadcast(self, held: Held, attrs: Sequence[Mapping[str, Any]]) -> _Part:
        """All members get what the root has."""
        sources = [own["group"][int(own.get("root", 0))] for own in attrs]
        return self._from(held, sources), self.alike(held.partial, attrs)

    def permute(self, held: Held, attrs: Sequence[Mapping[str, Any]]) -> _Part:
        """Each member gets what another has."""
        sources = []
        for rank, own in enumerate(attrs):
            index = list(own["sources"])[own["group"].index(rank)]
            if index < 0:
                raise NotShown(f"rank {rank} gets zeros")
            sources.append(own["group"][index])
        partial = tuple(
            replace(p, family=self.families.of(p.family.spans[s] for s in sources))
            for p in held.partial
        )
        return self._from(held, sources), partial

    def _from(self, held: Held, sources: Sequence[int]) -> tuple[Family, ...]:
        return tuple(self.families.of(f.spans[source] for source in sources) for f in held.dims)

    def _axis(self, held: Held, attrs: Sequence[Mapping[str, Any]], name: str) -> int:
        rank = len(held.dims)
        axes = {place_of(int(own.get(name, 0)), rank) for own in attrs}
        if len(axes) != 1:
            raise NotShown(f"ranks have other {name}s")
        return axes.pop() % rank

    def _same_but(self, held: Held, rank: int, group: Sequence[int], axes: Sequence[int]) -> None:
        """Members must hold the same positions of all other dimensions."""
        for i, family in enumerate(held.dims):
            if i not in axes and any(family.spans[m] is not family.spans[rank] for m in group):
                raise NotShown(
                    f"members of rank {rank}'s group hold other positions of dimension {i}"
                )

    def alike(
        self, partial: tuple[Partial, ...], attrs: Sequence[Mapping[str, Any]]
    ) -> tuple[Partial, ...]:
        """What parts of a sum ranks have after they exchange them: members must have the same."""
        for rank, own in enumerate(attrs):
            for part in partial:
                spans = part.family.spans
                if any(spans[m] is not spans[rank] for m in own["group"]):
                    raise NotShown("members have other parts of a sum")
        return partial

    def _shard(
        self, span: Array, attrs: Mapping[str, Any], sizes: Sequence[int] | None, index: int
    ) -> Array:
        try:
            start, end = shard_bounds(len(span), sizes, attrs)[index]
        except ValueError as error:
            raise NotShown(str(error)) from None
        return span[start:end]

    def _with(self, held: Held, axis: int, spans: Sequence[Array]) -> tuple[Family, ...]:
        return (*held.dims[:axis], self.families.of(spans), *held.dims[axis + 1 :])

    def _local(self, node: RankNode, held: Held) -> Iterator[Held]:
        """What a node holds that only ranks have: a copy, a part, or a value that one rank of each
        group keeps."""
        first = node.first
        if first.op == "Mul" and held.name in first.inputs:
            yield from self._masked(node, held)
        elif first.op == "Where" and held.name in first.inputs[1:]:
            yield from self._selected(node, held)
        if first.inputs[0] != held.name:
            return
        if first.op == "Identity":
            yield replace(held, name=first.outputs[0])
        elif first.op == "Slice":
            yield replace(held, name=first.outputs[0], dims=self._cut(node, held))
        elif first.op == "Gather" and self.ranks.is_constant(first.inputs[1]):
            values = self.ranks.constants(first.inputs[1]) or []
            given = {*node.attrs("axis", self.ranks.programs)}
            if len(given) != 1:
                raise NotShown(f"ranks have other axes of {first.name!r}")
            axis = place_of(int(given.pop()), len(held.dims))
            if all(value.ndim == 1 for value in values):
                spans = [s[v] for s, v in zip(held.dims[axis].spans, values, strict=True)]
                yield replace(held, name=first.outputs[0], dims=self._with(held, axis, spans))

    def _cut(self, node: RankNode, held: Held) -> tuple[Family, ...]:
        inputs = node.first.inputs
        constants = [
            self.ranks.constants(inputs[i]) if i < len(inputs) and inputs[i] else None
            for i in range(1, 5)
        ]
        spans: list[list[Array]] = [[] for _ in held.dims]
        for rank in range(self.ranks.size):
            shape = tuple(family.sizes[rank] for family in held.dims)
            values = [None if each is None else each[rank] for each in constants]
            chosen = slice_positions(values, shape)
            for axis, family in enumerate(held.dims):
                span = family.spans[rank]
                spans[axis].append(span[chosen[axis]] if axis in chosen else span)
        return tuple(map(self.families.of, spans))

    def _masked(self, node: RankNode, held: Held) -> Iterator[Held]:
        """A product with one on one rank of each group and zero on the others: parts of a sum. So
        is the product of a mean of some elements with their share of all elements."""
        index = 1 if node.first.inputs[0] == held.name else 0
        factors = self._scalars(node.first.inputs[index], held)
        if factors is None:
            return
        if {*factors} == {0.0, 1.0}:
            yield from self._kept(node, held, [factor == 1 for factor in factors], "sum")
        for part in held.partial if len(held.partial) == 1 else ():
            shares = [size / part.size for size in part.family.sizes]
            if part.op == "mean" and np.allclose(factors, shares, rtol=1e-6, atol=0):
                yield replace(held, name=node.first.outputs[0], partial=(replace(part, op="sum"),))

    def _selected(self, node: RankNode, held: Held) -> Iterator[Held]:
        """A choice between a value, on one rank of each group, and on the others what changes no
        result of a reduction: parts of it."""
        index = node.first.inputs.index(held.name, 1)
        chosen, others = (self._scalars(node.first.inputs[i], held) for i in (0, 3 - index))
        if chosen is None or others is None or any(other != others[0] for other in others):
            return
        kinds = [op for op, value in _NEUTRAL.items() if value == others[0]]
        keeps = [bool(choice) == (index == 1) for choice in chosen]
        if kinds and len({*keeps}) == 2:
            yield from self._kept(node, held, keeps, kinds[0])

    def _scalars(self, name: str, held: Held) -> list[float] | None:
        """The number that a constant has on each rank; None if it has none or several, or more
        dimensions than `held`."""
        if not self.ranks.is_constant(name):
            return None
        shapes = self.ranks.constant_shapes(name)
        if any(math.prod(shape) != 1 or len(shape) > len(held.dims) for shape in shapes):
            return None
        values = self.ranks.constants(name) or []
        return [float(value.reshape(())) for value in values]

    def _kept(self, node: RankNode, held: Held, keeps: Sequence[bool], op: str) -> Iterator[Held]:
        """A value of which some ranks have nothing: parts of a reduction."""
        if not held.partial:
            part = Partial(op, self.families.of(np.arange(int(keep)) for keep in keeps), 1)
            yield replace(held, name=node.first.outputs[0], partial=(part,))


_NEUTRAL = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf}
"""What changes no result of a reduction, by its op."""


def shard_bounds(
    size: int, sizes: Sequence[int] | None, attrs: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """The bounds of the members' shards, of these sizes, or of sizes as equal as possible. Errors:
    ValueError if they are not those of a dimension."""
    count = len(attrs["group"])
    if attrs.get("equal") and size % count:
        raise ValueError(f"{size} positions are not cut into {count} equal parts")
    if sizes is None:
        sizes = [size // count + (i < size % count) for i in range(count)]
    ends = list(accumulate(map(int, sizes)))
    if len(ends) != count or ends[-1] != size:
        raise ValueError(f"{size} positions are cut into {list(sizes)}")
    return list(zip([0, *ends], ends, strict=False))


_Part = tuple[tuple[Family, ...], tuple[Partial, ...]]
_RULES = {
    "AllReduce": Collectives.all_reduce,
    "AllGather": Collectives.all_gather,
    "ReduceScatter": Collectives.reduce_scatter,
    "AllToAll": Collectives.all_to_all,
    "Broadcast": Collectives.broadcast,
    "CollectivePermute": Collectives.permute,
}
"""Each collective with a rule, by op."""
