"""tensor-parallel: which index variables to split so that every large weight is, at the least cost.

Weights are edges between the atoms of their dimensions, and an atom costs the collectives that it
causes wherever it is reduced or must be whole. The cheapest set of atoms that covers all weights is what
people know as column-then-row, whole heads and vocabulary-split embeddings; no name is looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import onnx_graphsurgeon as gs

from onnxpar.factors import OpFactors
from onnxpar.layout import Concat, Dim, Factor, leaves
from onnxpar.mesh import Axes, parts_over
from onnxpar.plan import part_bytes
from onnxpar.sharding import Placement, Sharding
from onnxpar.strategy import Seed, TensorSeed, nest

LARGE = 1024
"""Elements above which a weight should not be held whole."""
LOCAL_COVER = 1.5
"""Collectives that a weight is taken to cost where it is split for its own readers alone."""

Event = tuple[str, str]


def tensor_parallel_rounds(graph: gs.Graph, sharding: Sharding, axes: Axes) -> list[list[Seed]]:
    """Seeds on the weights: first the covering atoms, then weights that no such atom covers."""
    if parts_over(axes) == 1:
        return []
    cover = _Cover(graph, sharding, parts_over(axes))
    chosen = cover.choose()
    first = [s for w in cover.weights for s in cover.seeds(w, chosen, axes)]
    rest: list[Seed] = [SplitAlone(w.name, axes) for w in cover.weights]
    return [list(first), [CloseOpen(), *rest]]


class _Cover:
    """Minimum-cost cover of the weights by atoms: all atoms, then the dearest that can go."""

    def __init__(self, graph: gs.Graph, sharding: Sharding, parts: int) -> None:
        self.sharding = sharding
        self.parts = parts
        self.events: dict[int, set[Event]] = defaultdict(set)
        self.readers: dict[str, list[tuple[OpFactors, int]]] = defaultdict(list)
        for op in sharding.factors.ops:
            self._note(op)
        tensors = graph.tensors().values()
        self.weights = [t for t in tensors if isinstance(t, gs.Constant) and self._is_large(t)]
        self.segments = {w.name: list(self._segments(w)) for w in self.weights}

    def _is_large(self, tensor: gs.Constant) -> bool:
        factors = self.sharding.factors.tensors.get(tensor.name)
        size = 1
        for extent in tensor.shape:
            size *= extent
        return factors is not None and size > LARGE

    def _note(self, op: OpFactors) -> None:
        """Which collectives the splitting of each atom causes at this node."""
        for i, leaf in enumerate(op.leaves):
            if op.reduction(i):
                self.events[leaf.atom].add(("reduce", op.node.name))
        for i, (tensor, links) in enumerate(zip(op.node.inputs, op.inputs, strict=True)):
            factors = self.sharding.factors.tensors.get(tensor.name)
            if isinstance(tensor, gs.Constant):
                self.readers[tensor.name].append((op, i))
                continue
            for leaf, link in zip(factors.leaves if factors else (), links, strict=True):
                if link is None:
                    self.events[leaf.atom].add(("gather", tensor.name))

    def _segments(self, weight: gs.Constant) -> Iterator[tuple[int, frozenset[int]]]:
        """(elements, atoms that split them) of each piece that must be covered by itself."""
        factors = self.sharding.factors.tensors[weight.name]
        atoms = [leaf.atom for leaf in factors.leaves]
        at = 0
        common: set[int] = set()
        pieces: list[tuple[int, set[int]]] = [(1, set())]
        for dim in factors.dims:
            mine = list(_pieces(dim, at, atoms))
            at += sum(leaf.size > 1 for leaf in leaves(dim))
            pieces = [(a * b, p | q) for a, p in pieces for b, q in mine]
        for size, found in pieces:
            yield size, frozenset(found | common)

    def capacity(self, atom: int, size: int) -> int:
        """Into how many parts an atom of this size can be split."""
        return self.parts if size >= self.parts else gcd(size, self.parts)

    def choose(self) -> set[int]:
        """The covering atoms."""
        sizes = {
            leaf.atom: leaf.size
            for w in self.weights
            for leaf in self.sharding.factors.tensors[w.name].leaves
        }
        usable = {a for a, s in sizes.items() if self.capacity(a, s) > 1}
        covered: Counter[int] = Counter()
        holders: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for name, segments in self.segments.items():
            for i, (size, atoms) in enumerate(segments):
                for atom in atoms & usable:
                    covered[atom] += size
                    holders[atom].append((name, i))
        chosen = {a for a in usable if covered[a]}
        count: Counter[Event] = Counter(e for a in chosen for e in self.events[a])
        cover: Counter[tuple[str, int]] = Counter(h for a in chosen for h in holders[a])
        totals = {n: sum(s for s, _ in segments) for n, segments in self.segments.items()}

        def gain(atom: int) -> float:
            """Collectives saved, less those that weights left uncovered will cost."""
            saved = sum(count[e] == 1 for e in self.events[atom])
            lost = sum(
                LOCAL_COVER * len(self.readers[n]) * self.segments[n][i][0] / totals[n]
                for n, i in holders[atom]
                if cover[n, i] == 1
            )
            return saved - lost

        for atom in sorted(chosen, key=lambda a: (-len(self.events[a]), covered[a], a)):
            if gain(atom) > 0 or not any(cover[h] == 1 for h in holders[atom]):
                chosen.discard(atom)
                count.subtract(self.events[atom])
                cover.subtract(holders[atom])
        return chosen

    def seeds(self, weight: gs.Constant, chosen: set[int], axes: Axes) -> Iterator[Seed]:
        """Axes for the leaves of one weight: one dimension of it, the reduced one where both could."""
        factors = self.sharding.factors.tensors[weight.name]
        candidates = []
        for dim in range(len(factors.dims)):
            at = [i for i, d in enumerate(factors.dim_of_leaf) if d == dim]
            if any(factors.leaves[i].atom in chosen for i in at):
                given = self._dim_axes(weight.name, at, chosen, axes)
                parts = max(parts_over(a) for a in given.values())
                candidates.append((parts, self._reduces(weight.name, at, chosen), dim, given))
        if not candidates:
            return
        given = max(candidates, key=lambda c: c[:3])[3]
        yield TensorSeed(weight.name, [given.get(i) for i in range(len(factors.leaves))])

    def _dim_axes(self, name: str, at: list[int], chosen: set[int], axes: Axes) -> dict[int, Axes]:
        """A chosen leaf takes the axes; one that is too small shares them with leaves that are free."""
        factors = self.sharding.factors.tensors[name]
        taken = {e for a in chosen for e in self.events[a]}
        given: dict[int, Axes] = {}
        for i in at:
            leaf = factors.leaves[i]
            if leaf.atom not in chosen:
                continue
            if self.capacity(leaf.atom, leaf.size) == self.parts:
                given[i] = axes
                continue
            free = [i] + [
                j
                for j in at
                if j > i and j not in given and self.events[factors.leaves[j].atom] <= taken
            ]
            spread = nest([factors.leaves[j].size for j in free], axes)
            if spread is None:
                spread = nest([leaf.size, self.parts], axes) or [()]
            given |= {j: a for j, a in zip(free, spread, strict=False) if a}
        return given

    def _reduces(self, name: str, at: list[int], chosen: set[int]) -> bool:
        factors = self.sharding.factors.tensors[name]
        for op, index in self.readers[name]:
            for i in at:
                link = op.inputs[index][i]
                if link is not None and factors.leaves[i].atom in chosen and op.reduction(link):
                    return True
        return False


def _pieces(dim: Dim, at: int, atoms: list[int]) -> Iterator[tuple[int, set[int]]]:
    """Segments of a dimension with the atoms that split each."""
    if isinstance(dim, Factor):
        yield dim.size, {atoms[at]} if dim.size > 1 else set()
    elif isinstance(dim, Concat):
        for child in dim.children:
            yield from _pieces(child, at, atoms)
            at += sum(leaf.size > 1 for leaf in leaves(child))
    else:
        count = sum(leaf.size > 1 for leaf in leaves(dim))
        yield dim.size, set(atoms[at : at + count])


@dataclass(frozen=True)
class CloseOpen:
    """Ends propagation: activations that nothing reached so far stay whole."""

    def apply(self, sharding: Sharding) -> bool:
        """Closes every open leaf of tensors that some node makes."""
        for op in sharding.factors.ops:
            for tensor in [*op.node.outputs, *op.node.inputs]:
                if isinstance(tensor, gs.Variable) and tensor.name in sharding.tensors:
                    have = sharding.tensors[tensor.name]
                    sharding.tensors[tensor.name] = [() if a is None else a for a in have]
        return False


@dataclass(frozen=True)
class SplitAlone:
    """Splits a weight that nothing reached, for its own reader: by the columns of a product, or only
    in storage (gathered in each run) where that moves fewer bytes."""

    tensor: str
    axes: Axes

    def apply(self, sharding: Sharding) -> bool:
        """Chooses a leaf of the weight, and splits or closes the reader's."""
        if any(sharding.tensors[self.tensor]):
            return False
        readers = [op for op in sharding.factors.ops if _reads(op, self.tensor)]
        leaf = self._leaf(sharding)
        if leaf is None:
            return False
        links = [(op, link) for op in readers for link in _links(op, self.tensor, leaf)]
        reader, link = links[0]
        if len(links) == 1 and link is not None and _moves_less(sharding, reader, self.tensor):
            return sharding.assign_op(reader, link, self.axes) and sharding.assign_tensor(
                self.tensor, leaf, self.axes
            )
        for op, link in links:
            if link is not None and sharding.ops[op.node.name][link] is None:
                sharding.ops[op.node.name][link] = ()
        sharding.pinned.add(self.tensor)
        return sharding.assign_tensor(self.tensor, leaf, self.axes)

    def _leaf(self, sharding: Sharding) -> int | None:
        """The leaf that splits best: evenly, else the longest."""
        sizes = [leaf.size for leaf in sharding.factors.tensors[self.tensor].leaves]
        n = parts_over(self.axes)
        fits = [i for i, s in enumerate(sizes) if s >= n]
        return min(fits, key=lambda i: (sizes[i] % n != 0, -sizes[i]), default=None)


def _reads(op: OpFactors, tensor: str) -> bool:
    return any(t.name == tensor for t in op.node.inputs)


def _links(op: OpFactors, tensor: str, leaf: int) -> Iterator[int | None]:
    """The op leaf behind a leaf of the tensor, for each operand that it is."""
    for operand, links in zip(op.node.inputs, op.inputs, strict=True):
        if operand.name == tensor:
            yield links[leaf]


def _moves_less(sharding: Sharding, op: OpFactors, weight: str) -> bool:
    """Whether gathering the node's result moves fewer bytes than gathering the weight."""
    result = op.node.outputs[0]
    stored = next(t for t in op.node.inputs if t.name == weight)
    whole = Placement(tuple(() for _ in sharding.factors.tensors[weight].leaves))
    made = sharding.operand_placement(op, op.outputs[0])
    return part_bytes(result, sharding.layout(result, made), sharding.mesh) <= part_bytes(
        stored, sharding.layout(stored, whole), sharding.mesh
    )
