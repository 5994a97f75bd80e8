"""Finds the nodes that relate each position of a sequence to the others: the core of attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from onnxpar.sharding.factors import GraphFactors, OpFactors, TensorFactors


@dataclass
class Core:
    """Nodes that need all positions of a sequence.

    ops    the nodes, in graph order
    keys   (node, leaf) of the positions that each query attends to; a factor that the node keeps
           whole has no leaf
    masks  leaves of the nodes outside that make masks of the keys
    """

    ops: list[OpFactors]
    keys: set[tuple[str, int]] = field(default_factory=set)
    masks: list[tuple[OpFactors, int]] = field(default_factory=list)


class Cores:
    """The cores of a graph. `atoms` number positions of sequences; `computed` are the tensors that
    are worth splitting."""

    def __init__(
        self, factors: GraphFactors, atoms: Collection[int], computed: Collection[str]
    ) -> None:
        self.factors = factors
        self.atoms = atoms
        self.by_tensor: dict[str, list[tuple[OpFactors, tuple[int | None, ...]]]]
        self.by_tensor = defaultdict(list)
        for op in factors.ops:
            for tensor, links in op.operands():
                self.by_tensor[tensor.name].append((op, links))
        self.pairs = {
            op.node.name for op in factors.ops if len({f for _, f in self._factors(op)}) > 1
        }
        self.computed = computed

    def positions(self, op: OpFactors) -> list[int]:
        """The leaves of a node that number positions of a sequence."""
        return [i for i, leaf in enumerate(op.leaves) if leaf.atom in self.atoms]

    def find(self) -> list[Core]:
        """All cores, in graph order."""
        found: list[Core] = []
        seen: set[str] = set()
        for op in self.factors.ops:
            if op.node.name in seen or not self.is_computed(op):
                continue
            reduced = [i for i in self.positions(op) if reduces(op, i)]
            if op.node.name in self.pairs and reduced:
                core = self._spread(op, reduced)
            elif op.node.name not in self.pairs and self._needs_whole(op):
                core = Core([op])
            else:
                continue
            seen |= {op.node.name for op in core.ops if self.is_computed(op)}
            found.append(core)
        return found

    def is_computed(self, op: OpFactors) -> bool:
        """False for a node that only makes masks or positions."""
        return any(t.name in self.computed for t in op.node.outputs)

    def _factors(self, op: OpFactors) -> Iterator[tuple[int, str]]:
        return ((i, op.leaves[i].factor) for i in self.positions(op))

    def _needs_whole(self, op: OpFactors) -> bool:
        """True if the node keeps the sequence of an operand whole."""
        for tensor, links in zip(op.node.inputs, op.inputs, strict=True):
            factors = self.factors.tensors.get(tensor.name)
            if factors is not None and tensor.name in self.computed:
                pairs = zip(factors.leaves, links, strict=True)
                if any(leaf.atom in self.atoms and link is None for leaf, link in pairs):
                    return True
        return False

    def _spread(self, start: OpFactors, keys: list[int]) -> Core:
        """The core around a node that reduces its leaves `keys`: all nodes that are connected with
        it by tensors over pairs of positions. Masks belong to it, but do not connect it with other
        layers that read them."""
        roles: set[tuple[str, int]] = set()
        found: dict[str, OpFactors] = {}
        todo: list[tuple[OpFactors, int]] = [(start, i) for i in keys]
        while todo:
            op, key = todo.pop()
            same = {i for i, f in self._factors(op) if f == op.leaves[key].factor}
            if (op.node.name, key) in roles:
                continue
            roles |= {(op.node.name, i) for i in same}
            found[op.node.name] = op
            for tensor, links in op.operands():
                if not _has_pairs(self.factors.tensors.get(tensor.name), self.atoms):
                    continue
                at = [j for j, link in enumerate(links) if link in same]
                for other, its in self.by_tensor[tensor.name] if at else ():
                    enters = tensor.name in self.computed or not self.is_computed(other)
                    if other.node.name in self.pairs and enters:
                        todo += [(other, link) for j in at if (link := its[j]) is not None]
        core = Core([op for op in self.factors.ops if op.node.name in found], roles)
        core.masks = self._masks(core)
        return core

    def _masks(self, core: Core) -> list[tuple[OpFactors, int]]:
        """The leaves of nodes outside a core that make its masks of keys."""
        todo = [(op, i) for op in core.ops for i in range(len(op.leaves))]
        todo = [(op, i) for op, i in todo if (op.node.name, i) in core.keys]
        seen = set(core.keys)
        found: list[tuple[OpFactors, int]] = []
        while todo:
            op, key = todo.pop()
            for tensor, links in zip(op.node.inputs, op.inputs, strict=True):
                maker = self.factors.find(tensor.inputs[0].name) if tensor.inputs else None
                if maker is None or self.is_computed(maker):
                    continue
                at = next(i for i, t in enumerate(maker.node.outputs) if t is tensor)
                for link, made in zip(links, maker.outputs[at], strict=True):
                    if link == key and made is not None and (maker.node.name, made) not in seen:
                        seen.add((maker.node.name, made))
                        found.append((maker, made))
                        todo.append((maker, made))
        return found


def reduces(op: OpFactors, leaf: int) -> bool:
    """True if the node adds up over a leaf, or normalizes along it."""
    return op.reduction(leaf) is not None or op.leaves[leaf].factor in op.rule.communicating


def _has_pairs(factors: TensorFactors | None, atoms: Collection[int]) -> bool:
    """True if two dimensions of a tensor number positions."""
    each = zip(factors.leaves, factors.dim_of_leaf, strict=True) if factors is not None else ()
    return len({dim for leaf, dim in each if leaf.atom in atoms}) > 1
