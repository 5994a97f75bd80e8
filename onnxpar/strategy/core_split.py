"""Decides how ranks split the core of an attention (`attention_cores.py`): by queries, after
gathering all keys and values, or by heads, after exchanging positions for heads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import onnx_graphsurgeon as gs

from onnxpar.layout.layout import Factor
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import Links, OpFactors
from onnxpar.sharding.shard_bytes import mean_bytes
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.attention_cores import Core, Cores, reduces
from onnxpar.strategy.contraction import is_contraction


@dataclass(frozen=True)
class _Option:
    """One way to split an attention core.

    heads    the atom (a part of a dimension) of the heads that are split; None to split queries
    ring     True if keys are split like queries, and travel around a ring
    moved    nodes around the core that are split like the core, because ranks then communicate a
             smaller tensor
    seconds  seconds of the collectives for tensors that enter or leave the core
    """

    heads: int | None
    moved: tuple[OpFactors, ...] = ()
    seconds: float = 0.0
    ring: bool = False


class CoreSplit:
    """Chooses the cheaper way to split one attention core over `axes`.

    batch  the atoms (parts of dimensions) of samples, which are never heads
    ring   True if the keys of ops that support it travel around a ring of ranks
    """

    def __init__(
        self,
        core: Core,
        cores: Cores,
        sharding: ShardingState,
        axes: Axes,
        batch: frozenset[int],
        ring: bool = False,
    ) -> None:
        self.core = core
        self.cores = cores
        self.sharding = sharding
        self.axes = axes
        self.batch = batch
        self.ring = ring
        self.inside = {op.node.name for op in core.ops}

    def decide(self) -> set[str]:
        """Splits the leaves (parts of dimensions) of the core in the cheapest way, and the
        leaves of the nodes around the core that are split like it. Returns the names of all
        these nodes."""
        best = min(self._options(), key=attrgetter("seconds"))
        for op in (*self.core.ops, *best.moved):
            for i in self.cores.positions(op):
                is_open = best.heads is None and op.node.name in self.inside
                if is_open and (best.ring or not self._is_key(op, i)):
                    self.sharding.assign_op(op, i, self.axes)
                else:
                    self.sharding.close(op, i)
            leaf = self._leaf(op, best.heads)
            if leaf is not None:
                self.sharding.fix(op, leaf, self._axes_of(op, leaf))
        for op, i in self.core.masks:
            self.sharding.close(op, i)
        return self.inside | {op.node.name for op in best.moved}

    def _options(self) -> list[_Option]:
        """Returns the possible ways to split the core: by each atom (a part of a dimension) of
        heads, and by queries if the core has queries or no heads."""
        if self.ring and all(op.rings for op in self.core.ops):
            return [_Option(None, ring=True)]
        options = [self._option(atom) for atom in self._heads]
        has_queries = any(
            not self._is_key(op, i) for op in self.core.ops for i in self.cores.positions(op)
        )
        return options if options and not has_queries else [*options, self._option(None)]

    def _is_key(self, op: OpFactors, leaf: int) -> bool:
        """True if a leaf (a part of a dimension) numbers the positions of keys (to which queries
        attend)."""
        return (op.node.name, leaf) in self.core.keys

    def _leaf(self, op: OpFactors, atom: int | None) -> int | None:
        """Returns the index of a node's first leaf (a part of a dimension) with this atom; None if
        it has none."""
        return next((i for i, leaf in enumerate(op.leaves) if leaf.atom == atom), None)

    def _axes_of(self, op: OpFactors, leaf: int) -> Axes:
        """Returns the axes for a leaf (a part of a dimension) of heads: first the axes that split
        it so far, then the axes of the sequence."""
        return (*(self.sharding.ops[op.node.name][leaf] or ()), *self.axes)

    @cached_property
    def _heads(self) -> list[int]:
        """The atoms (parts of dimensions) that number heads: every product of the core has them,
        and they divide evenly among the ranks."""
        common: set[int] | None = None
        for op in self.core.ops:
            if len(self.core.ops) == 1 or (is_contraction(op) and self.cores.is_computed(op)):
                own = set(self._heads_of(op))
                common = own if common is None else common & own
        return sorted(common or ())

    def _heads_of(self, op: OpFactors) -> Iterator[int]:
        """Yields the atoms (parts of dimensions) of a node that could number heads: dimensions of
        its result that are neither positions nor samples, and divide evenly among the ranks."""
        results = {link for links in op.outputs[:1] for link in links}
        positions = self.cores.positions(op)
        for i, leaf in enumerate(op.leaves):
            if i not in results or i in positions or leaf.atom in self.batch or reduces(op, i):
                continue
            if leaf.size % parts_over(self._axes_of(op, i)) == 0 and self._exchanges(op, i):
                yield leaf.atom

    def _exchanges(self, op: OpFactors, leaf: int) -> bool:
        """True if the node's first operand has both a sequence and this leaf (a part of a
        dimension), so that ranks can exchange positions for heads. An Attention with one operand
        for queries, keys and values has no leaf of heads, because the columns of values are not in
        the queries."""
        tensor, links = op.node.inputs[0], op.inputs[0]
        factors = self.sharding.factors.tensors.get(tensor.name)
        is_sequence = factors and any(x.atom in self.cores.atoms for x in factors.leaves)
        return bool(is_sequence) and tensor.name in self.cores.computed and leaf in links

    def _option(self, heads: int | None) -> _Option:
        """Returns the option that splits the atom (a part of a dimension) `heads` (None:
        queries), with its cost: the collectives for all tensors at the border of the core, each
        counted once."""
        seconds, moved = 0.0, dict[str, OpFactors]()
        sent: dict[str, str] = {}
        for op, tensor, links, is_read in self._borders():
            kind = self._collective(op, tensor, links, heads, is_read)
            if kind is None or tensor.name in sent:
                continue
            border, through = self._smallest(tensor, heads, is_read, sent)
            moved |= {each.node.name: each for each in through}
            if border.name not in sent:
                seconds += self._seconds(kind, border)
                sent[border.name] = kind
        return _Option(heads, tuple(moved.values()), seconds)

    def _borders(self) -> Iterator[tuple[OpFactors, gs.Tensor, Links, bool]]:
        """Yields each tensor that connects the core with nodes outside, as (node inside, tensor,
        the node's links of the tensor, True if the node reads the tensor)."""
        for op in self.core.ops:
            sides = ((op.node.inputs, op.inputs, True), (op.node.outputs, op.outputs, False))
            for tensors, links, is_read in sides:
                for tensor, tensor_links in zip(tensors, links, strict=True):
                    if self._crosses(tensor, is_read):
                        yield op, tensor, tensor_links, is_read

    def _crosses(self, tensor: gs.Tensor, is_read: bool) -> bool:
        """True for an activation with a sequence that connects the core with nodes outside.
        `is_read` is True for an operand of a node inside, False for a result."""
        factors = self.sharding.factors.tensors.get(tensor.name)
        if factors is None or tensor.name not in self.cores.computed:
            return False
        if not any(leaf.atom in self.cores.atoms for leaf in factors.leaves):
            return False
        neighbours = tensor.inputs if is_read else tensor.outputs
        return not neighbours or any(node.name not in self.inside for node in neighbours)

    def _collective(
        self, op: OpFactors, tensor: gs.Tensor, links: Links, heads: int | None, is_read: bool
    ) -> str | None:
        """Returns the collective for a tensor at the border of the core, if `heads` (None: queries)
        are split inside and positions outside; None if the tensor needs none. `links` are those of
        the node `op` inside, which reads the tensor (`is_read`) or produces it."""
        factors = self.sharding.factors.tensors[tensor.name]
        leaves = factors.leaves
        at = [
            link for leaf, link in zip(leaves, links, strict=True) if leaf.atom in self.cores.atoms
        ]
        if heads is not None:
            numbered = zip(leaves, factors.dim_of_leaf, strict=True)
            dims = {dim for leaf, dim in numbered if leaf.atom in self.cores.atoms}
            is_plain = all(isinstance(factors.dims[dim], Factor) for dim in dims)
            if is_plain and any(i is not None and op.leaves[i].atom == heads for i in links):
                return "AllToAll"
            return "AllGather" if is_read or not is_plain else None
        if all(link is not None and not self._is_key(op, link) for link in at):
            return None
        return "AllGather" if is_read else "ReduceScatter"

    def _smallest(
        self, tensor: gs.Tensor, heads: int | None, is_read: bool, sent: Collection[str]
    ) -> tuple[gs.Tensor, list[OpFactors]]:
        """Returns (the tensor that ranks communicate in place of a tensor at the border, the nodes
        between both). It is the smallest tensor on the path, such as keys before they are repeated
        for the query heads that share them. A tensor in `sent` comes first: the backward pass reads
        it again."""
        best, through = tensor, list[OpFactors]()
        at, passed = tensor, list[OpFactors]()
        while (step := self._next(at, heads, is_read)) is not None:
            op, at = step
            passed.append(op)
            if at.name in sent:
                return at, passed
            if self._bytes(at) < self._bytes(best):
                best, through = at, list(passed)
        return best, through

    def _next(
        self, tensor: gs.Tensor, heads: int | None, is_read: bool
    ) -> tuple[OpFactors, gs.Tensor] | None:
        """Returns the only node outside the core that produces (`is_read`) or reads a tensor, and
        the tensor on the node's other side. None if there are several nodes, or if the node does
        more than move the tensor."""
        nodes = tensor.inputs if is_read else tensor.outputs
        op = self.sharding.factors.find(nodes[0].name) if len(nodes) == 1 else None
        if op is None or op.node.name in self.inside or is_contraction(op) or op.bodies:
            return None
        if heads is not None and self._leaf(op, heads) is None:
            return None
        ends = op.node.inputs if is_read else op.node.outputs
        beyond = [t for t in ends if t.name in self.cores.computed]
        if len(beyond) != 1 or len(op.node.outputs) != 1 or not self.cores.positions(op):
            return None
        if any(reduces(op, i) for i in self.cores.positions(op)):
            return None
        return op, beyond[0]

    def _bytes(self, tensor: gs.Tensor) -> float:
        """Returns the bytes of a tensor as it is sharded so far, on the rank with the largest
        shard."""
        whole = self.sharding.tensor_sharding(tensor.name).reduced()
        return mean_bytes(tensor, whole, self.sharding)

    def _seconds(self, kind: str, tensor: gs.Tensor) -> float:
        """Returns the seconds of a collective on a tensor at the border of the core."""
        size = self._bytes(tensor)
        if kind == "AllToAll":
            size /= parts_over(self.axes)
        return self.sharding.costs.collective(kind, self.axes, size)
