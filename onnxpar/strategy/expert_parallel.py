"""The preset expert-parallel: splits tokens and experts of a mixture of experts over the same axes.

Lepikhin et al., "GShard" (2020): tokens are split like a batch. Between dispatch and combination,
each rank computes for its own experts: one all-to-all comes before, and another after.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import constants
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.rules.contrib_experts import EXPERT_WEIGHTS
from onnxpar.sharding.factors import OpFactors, TensorFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.contraction import convolves, is_contraction
from onnxpar.strategy.strategy import Annotation, TensorAnnotation
from onnxpar.strategy.token_dispatch import exchanged_mixtures

EXPERT = "expert-parallel"


def expert_annotations(
    graph: gs.Graph, sharding: ShardingState, axes: Axes, beside: Mapping[int, Axes],
    batch: Mapping[int, Axes],
) -> list[SplitExperts]:  # fmt: skip
    """Returns annotations that split nodes with experts' weights by expert over `axes`. Ranks
    either gather all tokens, or exchange rows, whichever is cheaper.

    beside  the atoms (parts of dimensions) of samples that the nodes with experts' weights split,
            too, with their axes
    batch   the atoms of samples, with their axes in all other nodes if ranks exchange rows

    If every layer has fewer experts than there are shards, some ranks have none. Errors:
    StrategyError if the model has no experts.
    """
    atoms = expert_atoms(graph, sharding)
    inside = tuple(beside.items())
    annotations = [SplitExperts(atom, tuple(ops), axes, inside) for atom, ops in atoms.items()]
    token_axes = next(iter(beside.values()), ())
    for mixture in exchanged_mixtures(sharding, axes, token_axes) if batch else ():
        names = tuple(node.name for node in mixture.at_experts)
        for i, annotation in enumerate(annotations):
            if {*names}.issuperset(op.node.name for op in annotation.ops):
                annotations[i] = replace(annotation, part=names, tokens=tuple(batch.items()))
    fitting = [s for s in annotations if s.size >= parts_over(axes)] or [
        s for s in annotations if s.size > 1
    ]
    if not fitting:
        has = "only one expert" if annotations else "no weight with a matrix for each expert"
        raise StrategyError(f"{EXPERT} over {parts_over(axes)}: the model has {has}")
    return fitting


def apart_annotations(sharding: ShardingState, axes: Axes) -> Iterator[Annotation]:
    """Yields annotations for the weights of experts that a training step stores one by one. Each
    annotation splits a weight inside the expert's matrix: a rank stores its share of every expert,
    and an all-to-all gives it the whole matrices of its own experts."""
    for op in sharding.factors.ops:
        for weight in _stacked_weights(op.node):
            factors = sharding.factors.tensors.get(weight.name)
            if factors is not None and factors.leaves:
                sizes = [leaf.size for leaf in factors.leaves]
                at = next((i for i, n in enumerate(sizes) if n >= parts_over(axes)), 0)
                split: list[Axes | None] = [axes if i == at else None for i in range(len(sizes))]
                yield TensorAnnotation(weight.name, split)


def _stacked_weights(node: gs.Node) -> list[gs.Tensor]:
    """Returns the weights that a Concat stacks along a new axis, one matrix for each expert; none
    for any other node."""
    reshapes = [t.inputs[0] for t in node.inputs if t.inputs] if node.op == "Concat" else []
    weights = [r.inputs[0] for r in reshapes if r.op == "Reshape" and is_weight(r.inputs[0])]
    axis = node.attrs.get("axis", 0)
    is_stack = len(weights) == len(node.inputs) and all(t.shape[axis] == 1 for t in node.inputs)
    return weights if is_stack else []


def expert_atoms(graph: gs.Graph, sharding: ShardingState) -> dict[int, list[OpFactors]]:
    """Returns the atoms (parts of dimensions) that number experts, each with the products that have
    a matrix for each expert."""
    weights = {t.name for t in [*graph.inputs, *constants(graph)] if is_weight(t)}
    for op in sharding.factors.ops:  # weights in bodies and in the backward pass are copies
        keeps = op.node.op in ("Cast", "DequantizeLinear", "Identity", "Transpose")
        if (keeps and op.node.inputs[0].name in weights) or _stacked_weights(op.node):
            weights.add(op.node.outputs[0].name)
    atoms: dict[int, list[OpFactors]] = defaultdict(list)
    for op in sharding.factors.ops:
        for atom in _batched(op, weights):
            atoms[atom].append(op)
    return atoms


def _batched(op: OpFactors, weights: set[str]) -> Iterator[int]:
    """Yields the atoms (parts of dimensions) that number the matrices of a product's weight, if the
    other operand and the result have these atoms, too: e of [e, row, k] x [e, k, n]. In
    onnxruntime's mixture ops, these are the atoms of the factor of experts. The groups of a
    convolution do not count: groups are channels."""
    if op.node.op in EXPERT_WEIGHTS:
        yield from (leaf.atom for leaf in op.leaves if leaf.factor == "e")
        return
    if not is_contraction(op) or convolves(op) or len(op.inputs) < 2:
        return
    for this, other in ((0, 1), (1, 0)):
        if op.node.inputs[this].name in weights:
            shared = {*op.inputs[this]} & {*op.inputs[other]} & {*op.outputs[0]} - {None}
            yield from (op.leaves[link].atom for link in shared if link is not None)


@dataclass(frozen=True)
class SplitExperts:
    """The annotation that splits nodes by expert: the nodes `ops`, and all nodes connected to them
    whose operands and results all have the atom (a part of a dimension) of experts.

    atom    the atom of experts
    beside  axes of other atoms that are split inside these nodes, too
    part    if ranks exchange rows, the names of the nodes at the experts; of all nodes that read or
            write tokens, only these are split by expert
    tokens  if ranks exchange rows, the axes of the batch's atoms before and after the exchange
    """

    atom: int
    ops: tuple[OpFactors, ...]
    axes: Axes
    beside: tuple[tuple[int, Axes], ...] = ()
    part: tuple[str, ...] = ()
    tokens: tuple[tuple[int, Axes], ...] = ()

    @property
    def size(self) -> int:
        """The number of experts."""
        return next(leaf.size for leaf in self.ops[0].leaves if leaf.atom == self.atom)

    def apply(self, sharding: ShardingState) -> bool:
        """Splits the leaves (parts of dimensions) of nodes that compute separately for each expert.
        Tensors between these nodes and other nodes are split by tokens, so the atom of experts
        stays whole there. If ranks exchange rows, such tensors without rows (gradients of weights)
        are split by expert. True if there are such nodes."""
        inside = self._inside(sharding)
        touched: dict[str, set[bool]] = defaultdict(set)
        for op in sharding.factors.ops:
            for tensor, _ in op.operands():
                touched[tensor.name].add(op.node.name in inside)
        for op in inside.values():
            for i, op_leaf in enumerate(op.leaves):
                axes = (
                    self.axes if op_leaf.atom == self.atom else dict(self.beside).get(op_leaf.atom)
                )
                if axes:
                    sharding.assign_op(op, i, axes)
        for name, sides in touched.items():
            factors = sharding.factors.tensors.get(name)
            if factors is None or True not in sides:
                continue
            for i, leaf in enumerate(factors.leaves):
                if leaf.atom == self.atom:
                    if len(sides) == 1 or (self.part and not self._has_tokens(factors)):
                        sharding.assign_tensor(name, i, self.axes)
                    elif sharding.tensors[name][i] is None:
                        sharding.tensors[name][i] = ()
                elif len(sides) > 1 and leaf.atom in dict(self.tokens):
                    sharding.assign_tensor(name, i, dict(self.tokens)[leaf.atom])
        return bool(inside)

    def _inside(self, sharding: ShardingState) -> dict[str, OpFactors]:
        """Returns the nodes that compute separately for each expert, by name."""
        by_tensor: dict[str, list[OpFactors]] = defaultdict(list)
        for op in sharding.factors.ops:
            for tensor, _ in op.operands():
                by_tensor[tensor.name].append(op)
        inside = {op.node.name: op for op in self.ops}
        todo = list(self.ops)
        while todo:
            for tensor, links in todo.pop().operands():
                for op in by_tensor[tensor.name] if links else ():
                    if op.node.name not in inside and self._is_of_experts(op, sharding):
                        inside[op.node.name] = op
                        todo.append(op)
        return inside

    def _is_of_experts(self, op: OpFactors, sharding: ShardingState) -> bool:
        """True if a node computes separately for each expert: all its tensors have the atom (a part
        of a dimension) of experts, or the tensors without it are smaller than a shard of the
        tensors with it. A Where that writes tokens into the rows of each expert is such a node;
        each rank needs its tensors without the atom whole.

        A product with an operand without the atom is not: it dispatches tokens to the rows of
        experts, which ranks exchange.
        """
        is_outside = bool(self.part) and op.node.name not in self.part
        sizes = {True: 0, False: 0}
        for tensor, links in op.operands():
            factors = sharding.factors.tensors.get(tensor.name)
            if is_outside and factors is not None and self._has_tokens(factors):
                return False
            read = any(link is not None for link in links) or not isinstance(tensor, gs.Constant)
            if factors is not None and factors.leaves and read:  # axes and shapes do not count
                has = self.atom in {leaf.atom for leaf in factors.leaves}
                sizes[has] += math.prod(leaf.size for leaf in factors.leaves)
        whole = sizes[False] * parts_over(self.axes)
        return sizes[True] > 0 and (sizes[True] >= whole if not is_contraction(op) else not whole)

    def _has_tokens(self, factors: TensorFactors) -> bool:
        """True for a tensor with an atom (a part of a dimension) of the batch that is split before
        and after the exchange of rows."""
        tokens = dict(self.tokens)
        return any(leaf.atom in tokens for leaf in factors.leaves)
