"""Sums of which ranks send two bits of each element, and keep what they have not sent for the next
run: finds them in the graphs of ranks, and computes them on drawn values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.equivalence.evaluate import Evaluator, Values
from onnxpar.equivalence.ranks import PLUGIN, RankNode, Ranks

DRAWS = 4
MOST_NODES = 200
"""The most nodes of ranks that compute such sums."""
_ROWS = ("Concat", "Reshape", "Identity")


@dataclass(frozen=True)
class TwoBitSum:
    """Sums that ranks compute together.

    parts   the tensor of ranks with the elements of their parts, one behind the other
    kept    that with what they kept of the run before
    next    the outputs that they keep for the next run, which together are as long
    gather  the collective
    nodes   the nodes of ranks from these on
    unit    what a code stands for, in the type of the elements
    """

    parts: str
    kept: str
    next: tuple[str, ...]
    gather: RankNode
    nodes: tuple[RankNode, ...]
    unit: Array

    def results(
        self, ranks: Ranks, sizes: Sequence[int], groups: Sequence[Sequence[int]]
    ) -> list[str]:
        """The tensors of ranks that are the sums over groups, whenever each part is a multiple of
        `unit` that has a code; and that in any run, with what ranks keep, are all that there was.
        `sizes` has the elements of each rank's row. Empty if the sums are something else."""
        if any(sizes[member] != sizes[group[0]] for group in groups for member in group):
            return []
        evaluator, draw = Evaluator(), np.random.default_rng(len(sizes))
        found: set[str] | None = None
        for number in range(2 * DRAWS):
            values = self._values(ranks, sizes, draw, is_exact=number < DRAWS)
            sent = [own[self.parts] + own[self.kept] for own in values]
            evaluator.run_ranks(self.nodes, values, ranks)
            if any(name not in own for own in values for name in self.next):
                return []
            rests = [np.concatenate([own[n].reshape(-1) for n in self.next]) for own in values]
            if [len(rest) for rest in rests] != [*sizes]:
                return []
            if number >= DRAWS:
                sent = [whole - rest for whole, rest in zip(sent, rests, strict=True)]
            wanted = [np.sum([sent[m] for m in group], 0) for group in groups]
            same = {
                name
                for node in self.nodes
                for name in node.first.outputs
                if self._is_same(name, values, wanted)
            }
            found = same if found is None else found & same
        return sorted(found or ())

    def _values(
        self, ranks: Ranks, sizes: Sequence[int], draw: np.random.Generator, *, is_exact: bool
    ) -> list[Values]:
        read = {name for node in self.nodes for name in node.first.inputs}
        values: list[Values] = []
        for program, size in zip(ranks.programs, sizes, strict=True):
            constants = program.constants
            own: Values = {name: constants[name] for name in read if name in constants}
            rows = [draw.integers(-1, 2, size), np.zeros(size)]
            if not is_exact:
                rows = [draw.uniform(-3, 3, size) for _ in rows]
            for name, row in zip((self.parts, self.kept), rows, strict=True):
                own[name] = (row * self.unit).astype(self.unit.dtype)
            values.append(own)
        return values

    def _is_same(self, name: str, values: Sequence[Values], wanted: Sequence[Array]) -> bool:
        pairs = [(own.get(name), row) for own, row in zip(values, wanted, strict=True)]
        return all(
            value is not None
            and value.shape == row.shape
            and value.dtype == self.unit.dtype
            and np.allclose(value, row, rtol=0, atol=1e-4 * float(self.unit))
            for value, row in pairs
        )


def two_bit_sums(
    ranks: Ranks, inputs: Collection[str], states: Mapping[str, str]
) -> Iterator[TwoBitSum]:
    """Yields the sums of ranks that read states which the model, with these `inputs`, has not;
    `states` has the output of each state that starts with zeros."""
    own = {name: states[name] for name in ranks.programs[0].inputs if name in states}
    kept = {name: after for name, after in own.items() if name not in inputs}
    for node in ranks.nodes if kept else ():
        if node.first.kind != ("", "Add") or not node.is_alike:
            continue
        for parts, row in (node.first.inputs, node.first.inputs[::-1]):
            sources = [*_sources(ranks, row)]
            if sources and {*sources} <= kept.keys():
                found = _sum_of(ranks, parts, row, [kept[name] for name in sources])
                if found is not None:
                    yield found


def _sources(ranks: Ranks, name: str) -> Iterator[str]:
    """The tensors whose elements a row has, in order."""
    maker = ranks.makers.get(name)
    if maker is None or maker.first.domain or maker.first.op not in _ROWS:
        yield name
        return
    own = maker.first.inputs
    for each in own if maker.first.op == "Concat" else own[:1]:
        yield from _sources(ranks, each)


def _sum_of(ranks: Ranks, parts: str, kept: str, after: Sequence[str]) -> TwoBitSum | None:
    """The sum of these rows; None if ranks do not gather codes of them in one collective."""
    known, nodes, gathers = {parts, kept}, list[RankNode](), list[RankNode]()
    for node in ranks.nodes:
        first = node.first
        data = [n for n in first.inputs if n and not ranks.is_constant(n)]
        if first.domain == PLUGIN:
            data = data[:1]
        if not data or not {*data} <= known or not node.is_alike or len(nodes) == MOST_NODES:
            continue
        if first.domain == PLUGIN:
            if gathers or first.op != "AllGather":
                continue
            gathers.append(node)
        known |= {name for name in first.outputs if name}
        nodes.append(node)
    units = [unit for node in nodes for unit in _units(ranks, node)]
    if len(gathers) != 1 or not units or any(unit != units[0] for unit in units):
        return None
    return TwoBitSum(parts, kept, tuple(after), gathers[0], tuple(nodes), units[0])


def _units(ranks: Ranks, node: RankNode) -> Iterator[Array]:
    """The number with which a node compares elements, on each rank."""
    if node.first.kind == ("", "GreaterOrEqual"):
        for value in ranks.constants(node.first.inputs[1]) or ():
            if value.size == 1:
                yield value.reshape(())
