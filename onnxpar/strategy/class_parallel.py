"""The preset class-parallel: splits the classes of a large classifier and the batch over the same
axes.

An et al., "Killing Two Birds with One Stone: Efficient and Robust Training of Face Recognition CNNs
by Partial FC" (2022): the network before the classifier is data-parallel. Ranks gather the
embeddings of all samples, and each rank computes the scores of its own classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.interchange import is_weight
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.tensors import numel, numpy_dtype
from onnxpar.graph.training_spec import Step
from onnxpar.layout.layout import Concat, leaves
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import Leaf, OpFactors, TensorFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.contraction import convolves, is_contracted, is_contraction
from onnxpar.strategy.recurrences import MOVES

CLASS = "class-parallel"
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


def class_annotations(
    graph: gs.Graph, sharding: ShardingState, axes: Axes, step: Step | None
) -> list[SplitClasses]:
    """Returns the annotation that splits the classes of the model's largest classifier over `axes`;
    none for one rank. `step` is the training step, if the model is one. Errors: StrategyError if
    the model has no classifier, or fewer classes than ranks."""
    parts = parts_over(axes)
    if parts == 1:
        return []
    largest = max(_classifiers(graph, sharding, step), default=None)
    if largest is None:
        raise StrategyError(
            f"{CLASS} over {parts}: the model has no classifier, a product with a weight that "
            "alone has the classes of a loss (or of an output); use data-parallel"
        )
    _, _, size, atoms, name = largest
    if size < parts:
        raise StrategyError(
            f"{CLASS} over {parts}: {name!r} has only {size} classes, or groups of classes to "
            f"sample from; use at most {size} ranks, or give more --sample-groups to grad"
        )
    return [SplitClasses(atoms, axes)]


def _classifiers(
    graph: gs.Graph, sharding: ShardingState, step: Step | None
) -> Iterator[tuple[int, int, int, tuple[int, ...], str]]:
    """Yields (elements, products, classes, atoms of the classes, name) for each weight that is a
    classifier. `products` is the number of products whose results have the classes.

    A loss or an output reads the classes of a classifier; no input and no other weight of two or
    more dimensions has them. If a step samples classes, the atoms (parts of dimensions) number
    groups of classes, because more products keep the groups than the positions in a group. Groups
    of two sizes are two segments, each with its own atom.
    """
    known = sharding.factors.tensors
    slots = {slot.input for slot in step.slots} if step else set()
    data = [t for t in graph.inputs if not is_weight(t) and t.name not in slots]
    of_data = {leaf.atom for t in data if t.name in known for leaf in known[t.name].leaves}
    products_of = Counter(atom for op in sharding.factors.ops for atom in _kept_atoms(op))
    scored = _scored(graph, sharding, step)
    stored = [t for t in [*graph.inputs, *constants(graph)] if is_weight(t)]
    weights = [t for t in stored if t.name in known and len(t.shape) > 1 and is_contracted(t)]
    for weight in weights:
        other_atoms = {
            leaf.atom for t in weights if t is not weight for leaf in known[t.name].leaves
        }
        fitting = (products_of.keys() & scored) - other_atoms - of_data
        for segments in _segments(known[weight.name]):
            best = [
                max(((products_of[x.atom], x.size, x.atom) for x in candidates), default=None)
                for candidates in ([x for x in some if x.atom in fitting] for some in segments)
            ]
            classes = [segment for segment in best if segment is not None]
            if classes:
                products, sizes, atoms = zip(*classes, strict=True)
                yield numel(weight.shape), max(products), sum(sizes), atoms, str(weight.name)


def _segments(factors: TensorFactors) -> Iterator[list[list[Leaf]]]:
    """Yields, for each dimension of a tensor, a list of its segments. A segment is a list of the
    leaves (parts of dimensions) of one child of a concatenation; any other dimension is one
    segment."""
    numbers = iter(factors.leaves)
    for dim in factors.dims:
        children = dim.children if isinstance(dim, Concat) else (dim,)
        yield [[next(numbers) for leaf in leaves(child) if leaf.is_leaf] for child in children]


def _scored(graph: gs.Graph, sharding: ShardingState, step: Step | None) -> set[int]:
    """Returns the atoms (parts of dimensions) of the classes for which a loss reads scores. For a
    model that is no training step, also the atoms of the last dimension of each output."""
    known = sharding.factors.tensors
    scores = [(op.node.inputs[0], 1) for op in sharding.factors.ops if op.node.op in _LOSSES]
    if step is None:
        scores += [(t, len(t.shape) - 1) for t in graph.outputs if t.shape]
    return {
        leaf.atom
        for tensor, axis in scores
        if (factors := known.get(tensor.name)) is not None
        for leaf, dim in zip(factors.leaves, factors.dim_of_leaf, strict=True)
        if dim == axis
    }


def _kept_atoms(op: OpFactors) -> Iterator[int]:
    """Yields the atoms (parts of dimensions) that the result of a product has in common with
    exactly one of its two operands: m and n of a MatMul [m, k] x [k, n]."""
    if not is_contraction(op) or convolves(op) or len(op.inputs) < 2:
        return
    for this, other in ((0, 1), (1, 0)):
        links_of_one = ({*op.inputs[this]} & {*op.outputs[0]}) - {*op.inputs[other]} - {None}
        yield from (op.leaves[link].atom for link in links_of_one if link is not None)


@dataclass(frozen=True)
class SplitClasses:
    """The annotation that splits all nodes and tensors along the atoms (parts of dimensions) of
    classes.

    Labels, nodes that compute from labels alone, and nodes that only move embeddings stay whole, so
    that ranks gather each of these tensors once, at its source.
    """

    atoms: tuple[int, ...]
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Splits the undecided leaves (parts of dimensions) of these atoms, and makes the undecided
        leaves of nodes whole that must stay whole. True if a leaf was split."""
        changed = False
        ops = sharding.factors.ops
        split = [op for op in ops if any(leaf.atom in self.atoms for leaf in op.leaves)]
        for op in split:
            for i, op_leaf in enumerate(op.leaves):
                if op_leaf.atom in self.atoms:
                    changed |= sharding.assign_op(op, i, self.axes)
        for name, factors in sharding.factors.tensors.items():
            for i, leaf in enumerate(factors.leaves):
                if leaf.atom in self.atoms:
                    changed |= sharding.assign_tensor(name, i, self.axes)
        inside = {op.node.name for op in split}
        read = {t.name for op in split for t in op.node.inputs}
        for op in [*_moved(ops, inside, read), *_from_labels(ops, inside, read, sharding)]:
            for i in range(len(op.leaves)):
                sharding.close(op, i)
        return changed


def _moved(ops: Sequence[OpFactors], inside: set[str], read: set[str]) -> Iterator[OpFactors]:
    """Yields the nodes outside the classifier that only move tensors which the classifier reads.
    `inside` has the names of the classifier's nodes, `read` the names of the tensors that they
    read."""
    needed = set(read)
    for op in reversed(ops):
        if op.node.op in MOVES and op.node.name not in inside and op.node.outputs[0].name in needed:
            needed.add(op.node.inputs[0].name)
            yield op


def _from_labels(
    ops: Sequence[OpFactors], inside: set[str], read: set[str], sharding: ShardingState
) -> Iterator[OpFactors]:
    """Yields the nodes outside the classifier that compute tensors for it from integer inputs
    (labels) alone. Makes the undecided leaves (parts of dimensions) of these inputs whole. `inside`
    and `read` are those of `_moved`."""
    produced = {t.name for op in ops for t in op.node.outputs}
    source: dict[str, set[str]] = {}
    candidates: list[OpFactors] = []
    for op in ops:
        tensors = [t for t in op.node.inputs if isinstance(t, gs.Variable) and t.name]
        large = [t for t in tensors if numel(t.shape or ()) != 1]
        for t in large:
            if t.name not in produced and numpy_dtype(t).kind == "i":
                source.setdefault(t.name, {t.name})
        if large and all(t.name in source for t in large) and op.node.name not in inside:
            candidates.append(op)
            of = set().union(*(source[t.name] for t in large))
            source.update((t.name, of) for t in op.node.outputs)
    labels = set().union(*(source.get(name, set()) for name in read))
    for name in labels:
        sharding.close_tensor(name)
    for op in candidates:
        if source[op.node.outputs[0].name] <= labels:
            yield op
