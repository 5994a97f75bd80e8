"""Finds the cheapest set of atoms that covers all weights of a graph: if each atom of the set is
split, each weight is split."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from math import gcd, prod
from statistics import median

import onnx_graphsurgeon as gs

from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.tensors import dtype_of, numel, tensor_shape
from onnxpar.layout.layout import Concat, Dim, Factor
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.contraction import is_contracted, is_contraction
from onnxpar.strategy.recurrences import Recurrences
from onnxpar.strategy.spread import nest
from onnxpar.strategy.strategy import Annotation, TensorAnnotation
from onnxpar.strategy.weight_cover_state import CoverState, Event

LARGE = 1024
"""Weights of up to this many elements may be whole on every rank."""
SLACK = 0.03
"""Fraction of all weights' elements that may stay whole, to save the collectives of splitting
them."""
LOCAL_COVER = 1.5
"""The cost, in collectives, of a weight that is split only for its own readers."""

SMALL_COVER = 0.6
"""The cost, in collectives, of a small weight that is split only for its own readers; less than the
cost of a collective."""

OUTLIER = 16.0
"""A sum or a weight with at least this many times the elements of the median product costs as many
collectives as this multiple."""

_PACKED = {"int8", "uint8", "int4", "uint4", "int2", "uint2"}


class WeightCover:
    """The search for the set of atoms (parts of dimensions) with the least cost that covers all
    weights. It starts from all atoms and removes the most expensive ones.

    events     the collectives that a split of each atom causes
    times      the cost of an event, if not 1
    conflicts  for each atom, the number of products that could split it or another atom, not both
    readers    the nodes that read each weight, each with the index of the operand
    companion  for each chosen atom that is too small for the mesh, the atom that takes the other
               axes
    """

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
            self._add_events(op)
        self.middle = self._weigh_large_sums()
        known = sharding.factors.tensors
        stored = [
            t
            for t in [*graph.inputs, *constants(graph)]
            if is_weight(t) and t.name in known and _is_number(t)
        ]
        self.large = [t for t in stored if _size(t) > LARGE]
        self.weights = [t for t in stored if is_contracted(t)]
        self.small = [t for t in self.weights if _size(t) <= LARGE]

    def free_atoms(self, chosen: set[int]) -> set[int]:
        """Returns the chosen atoms (parts of dimensions), and the atoms of small weights whose
        split causes no collective beyond the collectives of the chosen atoms."""
        caused = {e for a in chosen for e in self.events[a]}
        return chosen | {
            leaf.atom
            for w in self.small
            for i, leaf in enumerate(self.sharding.factors.tensors[w.name].leaves)
            if leaf.size >= self.parts
            and self.events[leaf.atom] <= caused
            and self._splits(w.name, i)
        }

    def worth_splitting(self) -> list[gs.Constant]:
        """Returns the large weights without the smallest of them, which together have a negligible
        fraction of all elements."""
        total = sum(map(_size, self.large))
        contracted = {w.name for w in self.weights}
        out: list[gs.Constant] = []
        skipped = 0
        for weight in sorted(self.large, key=_size):
            if weight.name in contracted or skipped + _size(weight) > SLACK * total:
                out.append(weight)
            else:
                skipped += _size(weight)
        return out

    def _add_events(self, op: OpFactors) -> None:
        """Records the collectives that splitting each atom (a part of a dimension) causes at this
        node."""
        if op.node.name in self.recurrences.ops:
            self.times["reduce", op.node.name] = self.recurrences.collectives(op)
        # the sum of a single number, such as a norm, costs next to nothing
        is_number = numel(tensor_shape(op.node.outputs[0]) or ()) == 1
        for i, leaf in enumerate(op.leaves):
            reduces = op.reduction(i) and not is_number
            if reduces or leaf.factor in op.rule.communicating:
                self.events[leaf.atom].add(("reduce", op.node.name))
            for j, other in enumerate(op.leaves if is_contraction(op) else ()):
                if i != j and leaf.atom != other.atom and (i, j) not in op.apart:
                    self.conflicts[leaf.atom][other.atom] += 1
        for i, (tensor, links) in enumerate(zip(op.node.inputs, op.inputs, strict=True)):
            factors = self.sharding.factors.tensors.get(tensor.name)
            if is_weight(tensor):
                self.readers[tensor.name].append((op, i))
                continue
            for factor, link in zip(factors.leaves if factors else (), links, strict=True):
                if link is None:
                    self.events[factor.atom].add(("gather", tensor.name))

    def _weigh_large_sums(self) -> float:
        """Raises the cost of sums whose results are far larger than the results of most products,
        such as the scores of millions of classes. Returns the number of elements of the median
        product's result."""
        sizes = {
            op.node.name: numel(tensor_shape(op.node.outputs[0]) or ())
            for op in self.sharding.factors.ops
            if is_contraction(op) or any(map(op.reduction, range(len(op.leaves))))
        }
        products = [op.node.name for op in self.sharding.factors.ops if is_contraction(op)]
        middle = max(median([sizes[name] for name in products] or [1]), 1)
        for name, size in sizes.items():
            if size >= OUTLIER * middle:
                self.times.setdefault(("reduce", name), round(size / middle))
        return middle

    def _segments(self, weight: gs.Constant) -> Iterator[tuple[int, frozenset[int]]]:
        """Yields (elements, atoms that split it) for each segment of a weight (Q, K and V of a
        fused QKV weight); each segment needs a cover of its own."""
        factors = self.sharding.factors.tensors[weight.name]
        atoms = (
            leaf.atom if self._splits(weight.name, i) else -1
            for i, leaf in enumerate(factors.leaves)
        )
        segments: list[tuple[int, set[int]]] = [(1, set())]
        for dim in factors.dims:
            of_dim = _segments_of(dim, atoms)
            segments = [(a * b, p | q) for a, p in segments for b, q in of_dim]
        for size, covering in segments:
            yield size, frozenset(covering - {-1})

    def _splits(self, weight: str, leaf: int) -> bool:
        """True if every reader of a weight can compute with a shard of this leaf (a part of a
        dimension)."""
        return all(op.inputs[i][leaf] is not None for op, i in self.readers[weight])

    def capacity(self, atom: int, size: int) -> int:
        """Returns the number of shards into which this mesh can split an atom (a part of a
        dimension) of this size: 4 for 4 heads over 8 ranks."""
        return self.parts if size >= self.parts else gcd(size, self.parts)

    def choose(self) -> set[int]:
        """Returns the atoms (parts of dimensions) to split. Prunes all atoms greedily, then tries
        to add each removed atom again. Does so in two orders, by cost and by cost relative to the
        segments that an atom covers, and takes the cheaper result."""
        sizes = {
            leaf.atom: leaf.size
            for w in self.weights
            for leaf in self.sharding.factors.tensors[w.name].leaves
        }
        usable = {a for a, s in sizes.items() if self.capacity(a, s) > 1}
        segments = self._segments_to_cover()
        results = []
        for by_cover in (False, True):
            state = CoverState(self.events, self.conflicts, segments, usable, self.times)
            state.improve(state.order(by_cover))
            results.append(state)
        return min(results, key=lambda state: state.cost).chosen

    def _segments_to_cover(self) -> list[tuple[float, frozenset[int]]]:
        """Returns (cost of leaving the segment uncovered, atoms that cover it) for each segment of
        each weight."""
        small = {w.name for w in self.small}
        out = []
        for weight in self.weights:
            cost = SMALL_COVER if weight.name in small else LOCAL_COVER
            cost *= len(self.readers[weight.name])
            price = self.recurrences.price(weight)  # includes the effect of the weight's size
            if not price and _size(weight) >= OUTLIER * self.middle:
                cost *= _size(weight) / self.middle
            cost = (price or cost) / _size(weight)
            out += [(cost * size, atoms) for size, atoms in self._segments(weight)]
        return out

    def annotations(
        self, weight: gs.Constant, chosen: set[int], axes: Axes
    ) -> Iterator[Annotation]:
        """Yields the annotation that splits one dimension of a weight over `axes`: a dimension that
        has an atom (a part of a dimension) in `chosen`; of several, the contracted dimension."""
        factors = self.sharding.factors.tensors[weight.name]
        candidates = []
        for dim in range(len(factors.dims)):
            at = [i for i, d in enumerate(factors.dim_of_leaf) if d == dim]
            if any(factors.leaves[i].atom in chosen for i in at):
                over = self._dim_axes(weight.name, at, chosen, axes)
                parts = max((parts_over(a) for a in over.values()), default=1)
                if parts > 1:
                    candidates.append((parts, self._reduces(weight.name, at, chosen), dim, over))
        if not candidates:
            return
        over = max(candidates, key=lambda c: c[:3])[3]
        yield TensorAnnotation(weight.name, [over.get(i) for i in range(len(factors.leaves))])

    def companions(self, chosen: set[int]) -> dict[int, int]:
        """Returns, for each chosen atom (a part of a dimension) that is too small for the mesh,
        another atom that takes the remaining axes.

        With 4 key/value heads on 8 ranks, the 2 query heads of each take the remaining factor of 2.
        The companion shares a dimension with the chosen atom and causes no new collective; of
        several, it is the atom in the most weights.
        """
        caused = {e for a in chosen for e in self.events[a]}
        beside: dict[int, Counter[int]] = defaultdict(Counter)
        for weight in self.weights:
            factors = self.sharding.factors.tensors[weight.name]
            for i, leaf in enumerate(factors.leaves):
                if leaf.atom not in chosen or self.capacity(leaf.atom, leaf.size) == self.parts:
                    continue
                rest = self.parts // self.capacity(leaf.atom, leaf.size)
                for j, other in enumerate(factors.leaves):
                    same_dim = factors.dim_of_leaf[i] == factors.dim_of_leaf[j]
                    free = other.atom not in chosen and self.events[other.atom] <= caused
                    if i != j and same_dim and free and gcd(other.size, rest) > 1:
                        beside[leaf.atom][other.atom] += _size(weight)
        return {
            atom: min(candidates, key=lambda o: (-candidates[o], o))
            for atom, candidates in beside.items()
        }

    def _dim_axes(self, name: str, at: list[int], chosen: set[int], axes: Axes) -> dict[int, Axes]:
        """Returns the axes for the leaves (parts of dimensions) `at` of one dimension of the weight
        `name`, by index. A chosen leaf takes all axes; if it is too small, its companion takes the
        rest."""
        factors = self.sharding.factors.tensors[name]
        over: dict[int, Axes] = {}
        for i in at:
            leaf = factors.leaves[i]
            if leaf.atom not in chosen:
                continue
            capacity = self.capacity(leaf.atom, leaf.size)
            if capacity == self.parts:
                over[i] = axes
                continue
            companion = self.companion.get(leaf.atom)
            major, rest = nest([capacity, self.parts // capacity], axes) or [(), ()]
            over[i] = major
            for j in at:
                other = factors.leaves[j]
                if other.atom == companion and rest:
                    share = gcd(other.size, self.parts // capacity)
                    over[j] = (nest([share, self.parts // capacity // share], rest) or [()])[0]
        return over

    def _reduces(self, name: str, at: list[int], chosen: set[int]) -> bool:
        """True if a reader of a weight contracts one of the leaves (parts of dimensions) `at` whose
        atom is chosen."""
        factors = self.sharding.factors.tensors[name]
        for op, index in self.readers[name]:
            for i in at:
                link = op.inputs[index][i]
                if link is not None and factors.leaves[i].atom in chosen and op.reduction(link):
                    return True
        return False


def _size(weight: gs.Constant) -> int:
    """Returns the number of elements of a weight."""
    return numel(weight.shape)


def _is_number(tensor: gs.Tensor) -> bool:
    """True for floats, and for integers of at most 8 bits (quantized weights); False for indices,
    masks and strings."""
    dtype = str(dtype_of(tensor))
    return "float" in dtype or dtype in _PACKED


def _segments_of(dim: Dim, atoms: Iterator[int]) -> list[tuple[int, set[int]]]:
    """Returns (elements, atoms that split it) for each segment of a dimension; `atoms` yields the
    atoms (parts of dimensions) of the dimension's leaves."""
    if isinstance(dim, Factor):
        return [(dim.size, {next(atoms)} if dim.size > 1 else set())]
    inner = [_segments_of(child, atoms) for child in dim.children]
    if isinstance(dim, Concat):
        return [segment for segments in inner for segment in segments]
    return [
        (prod(size for size, _ in combination), set().union(*(a for _, a in combination)))
        for combination in product(*inner)
    ]
