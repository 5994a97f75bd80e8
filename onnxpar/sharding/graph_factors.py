"""The factors of all tensors and nodes of a graph: which parts of their dimensions can be split.
`analysis.py` finds the factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import onnx_graphsurgeon as gs

from onnxpar.graph.interchange import is_weight
from onnxpar.layout.layout import Dim, Layout
from onnxpar.layout.layout import leaves as leaves_of
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.bonds import edges_of, groups
from onnxpar.sharding.factors import Chosen, OpFactors, TensorFactors
from onnxpar.sharding.fused_loops import InLoop, in_loops
from onnxpar.sharding.in_convolutions import in_convolutions
from onnxpar.sharding.lifetimes import lifetimes
from onnxpar.sharding.mixtures import Mixture


@dataclass(eq=False)
class GraphFactors:
    """The factors of all tensors, by name, and of all nodes.

    ops         in graph order; nodes of a body come before the node that has the body
    open_atoms  atoms (parts of dimensions) whose size is data-dependent
    fused       tensors between nodes that onnxruntime fuses, and weights in attributes; they are
                never resharded
    on_host     embedding tables that stay in files on the host, and the results that replace them
    in_file     the names in the file of tensors that the loader has renamed
    mixtures    the mixtures of experts

    `in_convolutions` has the names of nodes that onnxruntime runs inside convolutions; `lifetimes`
    has the bytes that are written while a tensor lives, by name of the tensor.
    """

    tensors: dict[str, TensorFactors]
    ops: list[OpFactors]
    open_atoms: frozenset[int] = frozenset()
    fused: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()
    in_file: Mapping[str, str] = field(default_factory=dict)
    mixtures: Sequence[Mixture] = ()

    def op(self, name: str) -> OpFactors:
        """Returns the factors of the node of that name. Errors: KeyError."""
        return self._by_name[name]

    @property
    def file_names(self) -> dict[str, str]:
        """The current names of tensors that the loader has renamed, by name in the file. A name in
        the file that another tensor now has is left out."""
        renamed = ((old, new) for new, old in self.in_file.items() if new in self.tensors)
        return {old: new for old, new in renamed if old not in self.tensors}

    def find(self, name: str) -> OpFactors | None:
        """Returns the factors of the node of that name; None if there is no such node."""
        return self._by_name.get(name)

    def __post_init__(self) -> None:
        self._by_name = {op.node.name: op for op in self.ops}
        self.in_convolutions = in_convolutions(op.node for op in self.ops)
        self.lifetimes = lifetimes((op.node for op in self.ops), self.tensors)
        self._shares = {
            tensor.name: op.chosen.share
            for op in self.ops
            if op.chosen is not None
            for tensor in op.node.outputs
            if self.is_of_experts(tensor, op.chosen)
        }
        self._bonded: dict[tuple[str, int], list[tuple[OpFactors, int]]] = {}
        for group in groups(self.ops, edges_of(self.ops, self.fused)):
            members = [(self.ops[n], leaf) for n, leaf in sorted(group)]
            self._bonded |= {(op.node.name, leaf): members for op, leaf in members}

    @cached_property
    def in_loops(self) -> Mapping[str, InLoop]:
        """The memory accesses of nodes that run in a fused elementwise loop, by node name."""
        return in_loops(self.ops, self.tensors)

    def bonded(self, op: OpFactors, leaf: int) -> Sequence[tuple[OpFactors, int]]:
        """Returns all leaves (parts of dimensions) that must be split over the same axes as a leaf
        of the node `op`, including this leaf, as (node, index of the leaf)."""
        return self._bonded.get((op.node.name, leaf)) or [(op, leaf)]

    def share(self, name: str, layout: Layout) -> float:
        """Returns the share of a tensor's elements that ranks compute in this layout: less than 1
        for rows of a mixture of experts, if each rank has an expert. `name` may be the name of a
        copy in another layout ("x@2" is a copy of x)."""
        share = self._shares.get(name) or self._shares.get(name.rpartition("@")[0]) or 1.0
        return share if share < 1 and all(map(min, _parts(layout.dims[0]))) else 1.0

    def share_over(self, name: str, axes: Sequence[Axes]) -> float:
        """Like `share`, for a tensor whose leaves (parts of dimensions) are split over `axes` (axes
        of each leaf)."""
        share = self._shares.get(name, 1.0)
        fits = share == 1 or parts_over(axes[0]) <= self.tensors[name].leaves[0].size
        return share if fits else 1.0

    def is_of_experts(self, tensor: gs.Tensor, chosen: Chosen) -> bool:
        """True if a tensor has rows of experts: its first dimension is the dimension of experts,
        and it is neither a weight nor the gradient of a weight."""
        factors = self.tensors.get(tensor.name)
        if factors is None or is_weight(tensor) or not factors.leaves:
            return False
        if chosen.rows.isdisjoint(leaf.atom for leaf in factors.leaves) and chosen.rows:
            return False
        return factors.leaves[0].atom == chosen.atom and factors.dim_of_leaf[0] == 0

    def opened(self, other: GraphFactors) -> GraphFactors:
        """Returns these factors with more open atoms (parts of dimensions): the atoms that have
        another size in `other`, the factors of the same graph at other values of its open sizes
        (known only at run time)."""
        sizes = {leaf.atom: leaf.size for op in other.ops for leaf in op.leaves}
        leaves = [leaf for op in self.ops for leaf in op.leaves]
        atoms = frozenset(x.atom for x in leaves if sizes.get(x.atom, x.size) != x.size)
        tensors = {name: replace(t, open=_open(t, atoms)) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, open_atoms=atoms)


def _parts(dim: Dim) -> list[tuple[int, ...]]:
    """Returns the part sizes of each leaf (a part of a dimension) of a dimension."""
    return [leaf.part_sizes() for leaf in leaves_of(dim)]


def _open(tensor: TensorFactors, atoms: frozenset[int]) -> frozenset[int]:
    """Returns the indices of a tensor's leaves (parts of dimensions) whose dimension contains one
    of the open `atoms`."""
    pairs = list(zip(tensor.leaves, tensor.dim_of_leaf, strict=True))
    dims = {dim for leaf, dim in pairs if leaf.atom in atoms}
    return frozenset(i for i, (_, dim) in enumerate(pairs) if dim in dims)
