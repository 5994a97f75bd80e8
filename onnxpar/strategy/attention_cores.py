"""Finds the cores of attention: the nodes (scores, softmax, weighted sum) that relate each position
of a sequence to all other positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from onnxpar.sharding.factors import OpFactors, TensorFactors
from onnxpar.sharding.graph_factors import GraphFactors


@dataclass
class Core:
    """The core of one attention: nodes that need all positions of a sequence.

    ops    the nodes, in graph order
    keys   (node name, leaf) for each leaf (a part of a dimension) of the positions that queries
           attend to; a factor that the node keeps whole has no leaf
    masks  (node, leaf) for each leaf of the keys' positions in the nodes outside that compute masks
    """

    ops: list[OpFactors]
    keys: set[tuple[str, int]] = field(default_factory=set)
    masks: list[tuple[OpFactors, int]] = field(default_factory=list)


class Cores:
    """Finds the attention cores of a graph.

    atoms     the atoms (parts of dimensions) that number positions of sequences
    computed  the names of activations: tensors that are worth splitting, unlike masks and positions
    """

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
        """Returns the indices of a node's leaves (parts of dimensions) that number positions of a
        sequence."""
        return [i for i, leaf in enumerate(op.leaves) if leaf.atom in self.atoms]

    def find(self) -> list[Core]:
        """Returns all attention cores, in graph order."""
        cores: list[Core] = []
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
            cores.append(core)
        return cores

    def is_computed(self, op: OpFactors) -> bool:
        """True for a node that computes activations; False for a node that computes only masks or
        positions."""
        return any(t.name in self.computed for t in op.node.outputs)

    def _factors(self, op: OpFactors) -> Iterator[tuple[int, str]]:
        """Yields (leaf, factor of the rule) for each leaf (a part of a dimension) of a node that
        numbers positions."""
        return ((i, op.leaves[i].factor) for i in self.positions(op))

    def _needs_whole(self, op: OpFactors) -> bool:
        """True if a node needs the sequence of an operand whole."""
        for tensor, links in zip(op.node.inputs, op.inputs, strict=True):
            factors = self.factors.tensors.get(tensor.name)
            if factors is not None and tensor.name in self.computed:
                pairs = zip(factors.leaves, links, strict=True)
                if any(leaf.atom in self.atoms and link is None for leaf, link in pairs):
                    return True
        return False

    def _spread(self, start: OpFactors, keys: list[int]) -> Core:
        """Returns the core around a node that reduces its leaves (parts of dimensions) `keys`: all
        nodes that tensors over pairs of positions, such as scores, connect with this node. Nodes
        that compute masks belong to the core, but the search does not go through them to other
        layers that read the same mask."""
        roles: set[tuple[str, int]] = set()
        members: dict[str, OpFactors] = {}
        todo: list[tuple[OpFactors, int]] = [(start, i) for i in keys]
        while todo:
            op, key = todo.pop()
            same = {i for i, f in self._factors(op) if f == op.leaves[key].factor}
            if (op.node.name, key) in roles:
                continue
            roles |= {(op.node.name, i) for i in same}
            members[op.node.name] = op
            for tensor, links in op.operands():
                if not _has_pairs(self.factors.tensors.get(tensor.name), self.atoms):
                    continue
                at = [j for j, link in enumerate(links) if link in same]
                for other, other_links in self.by_tensor[tensor.name] if at else ():
                    enters = tensor.name in self.computed or not self.is_computed(other)
                    if other.node.name in self.pairs and enters:
                        todo += [(other, link) for j in at if (link := other_links[j]) is not None]
        core = Core([op for op in self.factors.ops if op.node.name in members], roles)
        core.masks = self._masks(core)
        return core

    def _masks(self, core: Core) -> list[tuple[OpFactors, int]]:
        """Returns (node, leaf) for the positions of keys in the nodes outside a core that compute
        its masks."""
        todo = [(op, i) for op in core.ops for i in range(len(op.leaves))]
        todo = [(op, i) for op, i in todo if (op.node.name, i) in core.keys]
        seen = set(core.keys)
        masks: list[tuple[OpFactors, int]] = []
        while todo:
            op, key = todo.pop()
            for tensor, links in zip(op.node.inputs, op.inputs, strict=True):
                maker = self.factors.find(tensor.inputs[0].name) if tensor.inputs else None
                if maker is None or self.is_computed(maker):
                    continue
                at = next(i for i, t in enumerate(maker.node.outputs) if t is tensor)
                for link, produced in zip(links, maker.outputs[at], strict=True):
                    if (
                        link == key
                        and produced is not None
                        and (maker.node.name, produced) not in seen
                    ):
                        seen.add((maker.node.name, produced))
                        masks.append((maker, produced))
                        todo.append((maker, produced))
        return masks


def reduces(op: OpFactors, leaf: int) -> bool:
    """True if a node adds up over this leaf (a part of a dimension), or normalizes along it, as a
    softmax does."""
    return op.reduction(leaf) is not None or op.leaves[leaf].factor in op.rule.communicating


def _has_pairs(factors: TensorFactors | None, atoms: Collection[int]) -> bool:
    """True if two dimensions of a tensor number positions, as in scores [query, key]."""
    numbered = zip(factors.leaves, factors.dim_of_leaf, strict=True) if factors is not None else ()
    return len({dim for leaf, dim in numbered if leaf.atom in atoms}) > 1
