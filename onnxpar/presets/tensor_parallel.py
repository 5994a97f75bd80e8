"""tensor-parallel: which index variables to split so that every large weight is, at the least cost.

Weights are edges between the atoms of their dimensions, and an atom costs the collectives that it
causes wherever it is reduced or must be whole. The cheapest set of atoms that covers all weights
is what people know as column-then-row, whole heads and vocabulary-split embeddings; no name is
looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

import onnx_graphsurgeon as gs

from onnxpar.ir.subgraphs import constants
from onnxpar.ir.tensors import dtype_of
from onnxpar.layout.layout import Concat, Dim, Factor, leaves
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.model.interchange import is_weight
from onnxpar.presets.covering import covering
from onnxpar.presets.recurrences import MOVES, Recurrences, recurrences
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState
from onnxpar.strategy.spread import nest
from onnxpar.strategy.strategy import Annotation, TensorAnnotation

LARGE = 1024
"""Elements above which a weight should not be held whole."""
SLACK = 0.03
"""Share of all weights that may stay whole rather than cost a collective of their own."""
LOCAL_COVER = 1.5
"""Collectives that a weight is taken to cost where it is split for its own readers alone."""

_CONTRACT = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "FusedMatMul", "TransposeMatMul"}
_WEIGHT = {
    **dict.fromkeys(("MatMulInteger", "ConvInteger", "MatMulNBits", "Attention", "QAttention"), 1),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv", "QGemm"), 3),
}
"""Where the weight stands among scales and zero points."""
_LOOK_UP = {"Gather", "GatherND", "GatherElements"}
_PACKED = {"int8", "uint8", "int4", "uint4", "int2", "uint2"}

SMALL_COVER = 0.6
"""The same for a weight of few elements: not worth a collective of its own."""

Event = tuple[str, str]


def is_contraction(op: OpFactors) -> bool:
    """Whether the node multiplies and reduces two operands."""
    multiplies = op.node.op in _CONTRACT or op.node.op in _WEIGHT
    return multiplies and bool(op.rule.reduce or op.rule.communicating)


def convolves(op: OpFactors) -> bool:
    """Whether the node slides windows over an image."""
    return "Conv" in op.node.op


def tensor_parallel_rounds(
    graph: gs.Graph, sharding: ShardingState, axes: Axes
) -> list[list[Annotation]]:
    """Seeds on the weights: first the covering atoms, then weights that no such atom covers."""
    if parts_over(axes) == 1:
        return []
    cover = _Cover(graph, sharding, axes)
    chosen = cover.choose()
    cover.companion = cover.companions(chosen)
    units = list(cover.recurrences.annotations(chosen, axes))
    first = [s for w in cover.weights for s in cover.annotations(w, chosen, axes)]
    free = cover.free_atoms(chosen)
    small = [s for w in cover.small for s in cover.annotations(w, free, axes)]
    rest: list[Annotation] = [SplitAlone(w.name, axes) for w in cover.worth_splitting()]
    return [[*units], first, small, [CloseOpen(), *rest]]


class _Cover:
    """Minimum-cost cover of the weights by atoms: all atoms, then the dearest that can go."""

    def __init__(self, graph: gs.Graph, sharding: ShardingState, axes: Axes) -> None:
        self.sharding = sharding
        self.parts = parts_over(axes)
        self.companion: dict[int, int] = {}
        self.events: dict[int, set[Event]] = defaultdict(set)
        self.times: dict[Event, int] = {}
        self.conflicts: dict[int, Counter[int]] = defaultdict(Counter)
        self.recurrences = Recurrences(sharding.factors, sharding.costs, axes)
        self.readers: dict[str, list[tuple[OpFactors, int]]] = defaultdict(list)
        for op in sharding.factors.ops:
            self._note(op)
        known = sharding.factors.tensors
        stored = [
            t
            for t in [*graph.inputs, *constants(graph)]
            if is_weight(t) and t.name in known and _is_number(t)
        ]
        self.large = [t for t in stored if self.size_of(t) > LARGE]
        self.weights = [t for t in stored if is_contracted(t)]
        self.small = [t for t in self.weights if self.size_of(t) <= LARGE]

    def free_atoms(self, chosen: set[int]) -> set[int]:
        """Atoms of small weights that cost nothing to split, given the chosen ones."""
        taken = {e for a in chosen for e in self.events[a]}
        return chosen | {
            leaf.atom
            for w in self.small
            for i, leaf in enumerate(self.sharding.factors.tensors[w.name].leaves)
            if leaf.size >= self.parts
            and self.events[leaf.atom] <= taken
            and self._splits(w.name, i)
        }

    def worth_splitting(self) -> list[gs.Constant]:
        """Large weights, less the smallest that together are a negligible share."""
        total = sum(map(self.size_of, self.large))
        contracted = {w.name for w in self.weights}
        out: list[gs.Constant] = []
        skipped = 0
        for weight in sorted(self.large, key=self.size_of):
            if weight.name in contracted or skipped + self.size_of(weight) > SLACK * total:
                out.append(weight)
            else:
                skipped += self.size_of(weight)
        return out

    def size_of(self, weight: gs.Constant) -> int:
        """Elements of a weight."""
        return prod(int(s) for s in weight.shape)

    def _note(self, op: OpFactors) -> None:
        """Which collectives the splitting of each atom causes at this node."""
        if op.node.name in self.recurrences.ops:
            self.times["reduce", op.node.name] = self.recurrences.talk(op)
        for i, leaf in enumerate(op.leaves):
            if op.reduction(i) or leaf.factor in op.rule.communicating:
                self.events[leaf.atom].add(("reduce", op.node.name))
            for j, other in enumerate(op.leaves if is_contraction(op) else ()):
                if i != j and leaf.atom != other.atom and (i, j) not in op.apart:
                    self.conflicts[leaf.atom][other.atom] += 1
        for i, (tensor, links) in enumerate(zip(op.node.inputs, op.inputs, strict=True)):
            factors = self.sharding.factors.tensors.get(tensor.name)
            if is_weight(tensor):
                self.readers[tensor.name].append((op, i))
                continue
            for held, link in zip(factors.leaves if factors else (), links, strict=True):
                if link is None:
                    self.events[held.atom].add(("gather", tensor.name))

    def _segments(self, weight: gs.Constant) -> Iterator[tuple[int, frozenset[int]]]:
        """(elements, atoms that split them) of each piece that must be covered by itself."""
        factors = self.sharding.factors.tensors[weight.name]
        atoms = [
            leaf.atom if self._splits(weight.name, i) else -1
            for i, leaf in enumerate(factors.leaves)
        ]
        at = 0
        pieces: list[tuple[int, set[int]]] = [(1, set())]
        for dim in factors.dims:
            mine = list(_pieces(dim, at, atoms))
            at += sum(leaf.size > 1 for leaf in leaves(dim))
            pieces = [(a * b, p | q) for a, p in pieces for b, q in mine]
        for size, found in pieces:
            yield size, frozenset(found - {-1})

    def _splits(self, weight: str, leaf: int) -> bool:
        """Whether every reader can work on a part of that leaf."""
        return all(op.inputs[i][leaf] is not None for op, i in self.readers[weight])

    def capacity(self, atom: int, size: int) -> int:
        """Into how many parts an atom of this size can be split."""
        return self.parts if size >= self.parts else gcd(size, self.parts)

    def choose(self) -> set[int]:
        """The covering atoms: prune all of them greedily, then try each that went once more. Of two
        orders, the dearest first and the dearest for what it covers first, the cheaper end counts.
        """
        sizes = {
            leaf.atom: leaf.size
            for w in self.weights
            for leaf in self.sharding.factors.tensors[w.name].leaves
        }
        usable = {a for a, s in sizes.items() if self.capacity(a, s) > 1}
        pieces = self._pieces_to_cover()
        ends = []
        for by_cover in (False, True):
            state = CoverState(self.events, self.conflicts, pieces, usable, self.times)
            state.improve(state.order(by_cover))
            ends.append(state)
        return min(ends, key=lambda state: state.cost).chosen

    def _pieces_to_cover(self) -> list[tuple[float, frozenset[int]]]:
        """(cost of leaving it uncovered, atoms that cover it) for each segment of each weight."""
        small = {w.name for w in self.small}
        out = []
        for weight in self.weights:
            cost = SMALL_COVER if weight.name in small else LOCAL_COVER
            cost *= len(self.readers[weight.name])
            cost = (self.recurrences.price(weight) or cost) / self.size_of(weight)
            out += [(cost * size, atoms) for size, atoms in self._segments(weight)]
        return out

    def annotations(
        self, weight: gs.Constant, chosen: set[int], axes: Axes
    ) -> Iterator[Annotation]:
        """Axes for the leaves of one weight: one dimension of it, the reduced one where both
        could."""
        factors = self.sharding.factors.tensors[weight.name]
        candidates = []
        for dim in range(len(factors.dims)):
            at = [i for i, d in enumerate(factors.dim_of_leaf) if d == dim]
            if any(factors.leaves[i].atom in chosen for i in at):
                given = self._dim_axes(weight.name, at, chosen, axes)
                parts = max((parts_over(a) for a in given.values()), default=1)
                if parts > 1:
                    candidates.append((parts, self._reduces(weight.name, at, chosen), dim, given))
        if not candidates:
            return
        given = max(candidates, key=lambda c: c[:3])[3]
        yield TensorAnnotation(weight.name, [given.get(i) for i in range(len(factors.leaves))])

    def companions(self, chosen: set[int]) -> dict[int, int]:
        """For each chosen atom that is too small, the one that takes the rest of the axes beside
        it.

        With 4 key/value heads on 8 ranks the 2 query heads of each take the remaining 2: of the
        atoms that stand in a dimension with it and cause no new collective, the one in the most
        weights.
        """
        taken = {e for a in chosen for e in self.events[a]}
        beside: dict[int, Counter[int]] = defaultdict(Counter)
        for weight in self.weights:
            factors = self.sharding.factors.tensors[weight.name]
            for i, leaf in enumerate(factors.leaves):
                if leaf.atom not in chosen or self.capacity(leaf.atom, leaf.size) == self.parts:
                    continue
                rest = self.parts // self.capacity(leaf.atom, leaf.size)
                for j, other in enumerate(factors.leaves):
                    same_dim = factors.dim_of_leaf[i] == factors.dim_of_leaf[j]
                    free = other.atom not in chosen and self.events[other.atom] <= taken
                    if i != j and same_dim and free and gcd(other.size, rest) > 1:
                        beside[leaf.atom][other.atom] += self.size_of(weight)
        return {atom: min(others, key=lambda o: (-others[o], o)) for atom, others in beside.items()}

    def _dim_axes(self, name: str, at: list[int], chosen: set[int], axes: Axes) -> dict[int, Axes]:
        """A chosen leaf takes the axes; one that is too small shares them with its companion."""
        factors = self.sharding.factors.tensors[name]
        given: dict[int, Axes] = {}
        for i in at:
            leaf = factors.leaves[i]
            if leaf.atom not in chosen:
                continue
            own = self.capacity(leaf.atom, leaf.size)
            if own == self.parts:
                given[i] = axes
                continue
            companion = self.companion.get(leaf.atom)
            major, rest = nest([own, self.parts // own], axes) or [(), ()]
            given[i] = major
            for j in at:
                other = factors.leaves[j]
                if other.atom == companion and rest:
                    share = gcd(other.size, self.parts // own)
                    given[j] = (nest([share, self.parts // own // share], rest) or [()])[0]
        return given

    def _reduces(self, name: str, at: list[int], chosen: set[int]) -> bool:
        factors = self.sharding.factors.tensors[name]
        for op, index in self.readers[name]:
            for i in at:
                link = op.inputs[index][i]
                if link is not None and factors.leaves[i].atom in chosen and op.reduction(link):
                    return True
        return False


def _is_number(tensor: gs.Tensor) -> bool:
    """Whether the elements are numbers to compute with, quantized ones included."""
    dtype = str(dtype_of(tensor))
    return "float" in dtype or dtype in _PACKED


def is_contracted(weight: gs.Tensor) -> bool:
    """Whether a product, a convolution, a lookup or a recurrence reads it, moved or cast at
    most."""
    if any(recurrences(weight)):
        return True
    for node in weight.outputs:
        position = next(i for i, t in enumerate(node.inputs) if t is weight)
        if node.op in _CONTRACT or (node.op in _LOOK_UP and position == 0):
            return True
        if _WEIGHT.get(node.op) == position:
            return True
        moves = node.op in MOVES or (node.op == "DequantizeLinear" and position == 0)
        if moves and any(is_contracted(t) for t in node.outputs):
            return True
    return False


class CoverState:
    """A set of atoms, and what it costs: its collectives, the contractions in which two of them
    meet (only one can take the axes there), and the pieces it leaves uncovered. `times` has the
    events that are several collectives."""

    def __init__(
        self,
        events: Mapping[int, set[Event]],
        conflicts: Mapping[int, Mapping[int, int]],
        pieces: Sequence[tuple[float, frozenset[int]]],
        usable: set[int],
        times: Mapping[Event, int],
    ) -> None:
        self.events = events
        self.times = times
        self.conflicts = conflicts
        self.price = [price for price, _ in pieces]
        self.holders: dict[int, list[int]] = defaultdict(list)
        for i, (_, atoms) in enumerate(pieces):
            for atom in atoms & usable:
                self.holders[atom].append(i)
        self.chosen: set[int] = set()
        self.caused: Counter[Event] = Counter()
        self.covered: Counter[int] = Counter()
        for atom in self.holders:
            self._add(atom)

    def size(self, atom: int) -> float:
        """What the pieces that an atom covers would cost uncovered."""
        return sum(self.price[i] for i in self.holders[atom])

    @property
    def cost(self) -> float:
        """What is caused, what meets, and what is left uncovered."""
        met = sum(
            n for a in self.chosen for o, n in self.conflicts.get(a, {}).items() if o in self.chosen
        )
        uncovered = sum(price for i, price in enumerate(self.price) if not self.covered[i])
        caused = sum(self.times.get(e, 1) for e, n in self.caused.items() if n > 0)
        return caused + met / 2 + uncovered

    def order(self, by_cover: bool) -> list[int]:
        """All atoms, those first that cause the most, for what they cover or at all."""

        def key(atom: int) -> tuple[float, float, int]:
            count = sum(self.times.get(e, 1) for e in self.events.get(atom, ()))
            size = self.size(atom)
            return -count / ((size or 1) if by_cover else 1), size, atom

        return sorted(self.holders, key=key)

    def improve(self, order: Sequence[int]) -> None:
        """Prunes, and tries what went once more, until nothing gets cheaper."""
        self.prune(order)
        improved = True
        while improved:
            improved = any([self.try_adding(a) for a in order if a not in self.chosen])

    def _add(self, atom: int) -> None:
        self.chosen.add(atom)
        self.caused.update(self.events.get(atom, ()))
        self.covered.update(self.holders[atom])

    def _remove(self, atom: int) -> None:
        self.chosen.discard(atom)
        self.caused.subtract(self.events.get(atom, ()))
        self.covered.subtract(self.holders[atom])

    def gain(self, atom: int) -> float:
        """What removing a chosen atom saves."""
        events = self.events.get(atom, ())
        saved: float = sum(self.times.get(e, 1) for e in events if self.caused[e] == 1)
        saved += sum(n for o, n in self.conflicts.get(atom, {}).items() if o in self.chosen)
        return saved - sum(self.price[i] for i in self.holders[atom] if self.covered[i] == 1)

    def prune(self, order: Iterable[int]) -> list[int]:
        """Removes, in this order, what costs more than it covers, and what covers nothing alone."""
        gone = []
        for atom in order:
            if atom in self.chosen and self.gain(atom) >= 0:
                self._remove(atom)
                gone.append(atom)
        return gone

    def try_adding(self, atom: int) -> bool:
        """Keeps an atom if, with what it makes superfluous removed, the whole costs less."""
        neighbours = {
            a for a in self.chosen if not set(self.holders[a]).isdisjoint(self.holders[atom])
        }
        self._add(atom)
        change = self.gain(atom)
        removed = []
        for other in sorted(neighbours, key=lambda a: (-self.gain(a), self.size(a), a)):
            gain = self.gain(other)
            if gain >= 0:
                change -= gain
                self._remove(other)
                removed.append(other)
        if change < -1e-9:
            return True
        for other in removed:
            self._add(other)
        self._remove(atom)
        return False


def _pieces(dim: Dim, at: int, atoms: list[int]) -> Iterator[tuple[int, set[int]]]:
    """Segments of a dimension with the atoms that split each."""
    if isinstance(dim, Factor):
        yield dim.size, {atoms[at]} if dim.size > 1 else set()
        return
    inner = []
    for child in dim.children:
        inner.append(list(_pieces(child, at, atoms)))
        at += sum(leaf.size > 1 for leaf in leaves(child))
    if isinstance(dim, Concat):
        yield from (piece for pieces in inner for piece in pieces)
        return
    for combination in product(*inner):
        yield prod(size for size, _ in combination), set().union(*(a for _, a in combination))


@dataclass(frozen=True)
class CloseOpen:
    """Ends propagation: activations that nothing reached so far stay whole."""

    def apply(self, sharding: ShardingState) -> bool:
        """Closes every open leaf of tensors that some node makes."""
        for op in sharding.factors.ops:
            for tensor in [*op.node.outputs, *op.node.inputs]:
                if isinstance(tensor, gs.Variable) and tensor.name in sharding.tensors:
                    have = sharding.tensors[tensor.name]
                    sharding.tensors[tensor.name] = [() if a is None else a for a in have]
        return False


@dataclass(frozen=True)
class SplitAlone:
    """Splits a weight that nothing reached, for its own reader: by the columns of a product, or
    only in storage (gathered in each run) where that moves fewer bytes."""

    tensor: str
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Chooses a leaf of the weight, and splits or closes the reader's."""
        if any(sharding.tensors[self.tensor]):
            return False
        readers = [op for op in sharding.factors.ops if _reads(op, self.tensor)]
        chosen = self._leaves(sharding)
        if not chosen:
            return False
        links = [(o, link) for o in readers for i in chosen for link in _links(o, self.tensor, i)]
        if any(_packs(op, self.tensor) for op in readers):
            return self._split_readers(sharding, links, chosen)
        reader, link = links[0]
        is_one = len(links) == links.count(links[0])
        if is_one and link is not None and _moves_less(sharding, reader, link, self.tensor):
            return sharding.assign_op(reader, link, self.axes) and self._store(sharding, chosen)
        for op, link in links:
            if link is not None:
                sharding.close(op, link)
        sharding.pinned.add(self.tensor)
        return self._store(sharding, chosen)

    def _split_readers(
        self,
        sharding: ShardingState,
        links: Sequence[tuple[OpFactors, int | None]],
        chosen: Sequence[int],
    ) -> bool:
        """Splits what reads a weight that is not to be gathered; leaves it whole where that cannot
        be."""
        found = {(op.node.name, link): (op, link) for op, link in links}.values()
        if not all(
            link is not None and sharding.assign_op(op, link, self.axes) for op, link in found
        ):
            return False
        return self._store(sharding, chosen)

    def _store(self, sharding: ShardingState, chosen: Sequence[int]) -> bool:
        return all([sharding.assign_tensor(self.tensor, i, self.axes) for i in chosen])

    def _leaves(self, sharding: ShardingState) -> list[int]:
        """Those of the dimension that splits best: evenly, else the longest."""
        factors = sharding.factors.tensors[self.tensor]
        n = parts_over(self.axes)
        first, choices = 0, []
        for dim in factors.dims:
            chosen = list(covering(dim, first, n))
            sizes = [factors.leaves[i].size for i in chosen]
            if chosen:
                choices.append((any(s % n for s in sizes), -sum(sizes), chosen))
            first += sum(leaf.size > 1 for leaf in leaves(dim))
        return min(choices, default=(False, 0, []))[2]


def _packs(op: OpFactors, tensor: str) -> bool:
    """Whether a node computes otherwise with a weight that is gathered."""
    return any(op.node.inputs[i].name == tensor for i in op.rule.constants & _places(op))


def _places(op: OpFactors) -> frozenset[int]:
    return frozenset(range(len(op.node.inputs)))


def _reads(op: OpFactors, tensor: str) -> bool:
    return any(t.name == tensor for t in op.node.inputs)


def _links(op: OpFactors, tensor: str, leaf: int) -> Iterator[int | None]:
    """The op leaf behind a leaf of the tensor, for each operand that it is."""
    for operand, links in zip(op.node.inputs, op.inputs, strict=True):
        if operand.name == tensor:
            yield links[leaf]


def _moves_less(sharding: ShardingState, op: OpFactors, link: int, weight: str) -> bool:
    """Whether gathering the node's result moves fewer bytes than gathering the weight; not where
    the ranks would talk within the node, too."""
    if op.leaves[link].factor in op.rule.communicating:
        return False
    result = op.node.outputs[0]
    stored = next(t for t in op.node.inputs if t.name == weight)
    whole = FactorSharding(tuple(() for _ in sharding.factors.tensors[weight].leaves))
    made = sharding.operand_sharding(op, op.outputs[0])
    return mean_bytes(result, made, sharding) <= mean_bytes(stored, whole, sharding)
