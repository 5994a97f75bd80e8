"""Presets of training steps: ZeRO stages and sequence-parallel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.tensors import numpy_dtype
from onnxpar.graph.training_spec import Slot, Step
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.factors import Leaf, OpFactors
from onnxpar.sharding.state import ShardingState, overlaps
from onnxpar.strategy.covering_leaves import covering_leaves
from onnxpar.strategy.strategy import Annotation

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020): optimizer state, gradients and parameters are split over the ranks of a batch."""


SEQUENCE = "sequence-parallel"
"""Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022):
between the products of a tensor-parallel layer, activations are split along the sequence."""
_MOVES = ("Reshape", "Transpose", "Identity")


def sequence_annotations(
    graph: gs.Graph, axes: Axes, sharding: ShardingState, step: Step | None
) -> list[Annotation]:
    """Returns the annotation that splits activations along the sequence (the second dimension of
    the first input) over `axes`. The split begins where tensor-parallel sums up an activation, so a
    reduce-scatter replaces the all-reduce. Errors: StrategyError if the input has no such
    dimension."""
    leaf = _second_dimension(_first_input(graph, step), sharding)
    if leaf is None:
        raise StrategyError(
            f"{SEQUENCE} over {parts_over(axes)}: the first input has no sequence as its second "
            "dimension"
        )
    return [SplitSums(leaf.atom, axes)]


def sequence_atom(graph: gs.Graph, sharding: ShardingState, step: Step | None) -> int | None:
    """Returns the atom (a part of a dimension) that numbers the positions of a sequence. None
    unless the first input is a sequence: token ids [batch, position], or features [batch, position,
    feature]."""
    first = _first_input(graph, step)
    leaf = _second_dimension(first, sharding)
    if first is None or leaf is None:
        return None
    is_ids = len(first.shape) == 2 and np.issubdtype(numpy_dtype(first), np.integer)
    return leaf.atom if is_ids or len(first.shape) == 3 else None


def _first_input(graph: gs.Graph, step: Step | None) -> gs.Variable | None:
    """Returns the first data input of more than one dimension; None if there is none."""
    data = (t for t in graph.inputs if step is None or t.name in step.data)
    return next((t for t in data if len(t.shape or ()) > 1), None)


def _second_dimension(tensor: gs.Variable | None, sharding: ShardingState) -> Leaf | None:
    """Returns the leaf (a part of a dimension) of a tensor's second dimension; None unless the
    dimension has exactly one leaf."""
    factors = sharding.factors.tensors.get(tensor.name) if tensor is not None else None
    at = [i for i, dim in enumerate(factors.dim_of_leaf) if dim == 1] if factors else []
    return factors.leaves[at[0]] if factors is not None and len(at) == 1 else None


@dataclass(frozen=True)
class SplitSums:
    """The annotation that splits activations along an atom (a part of a dimension) where they are
    sums over ranks along `axes`, so that a reduce-scatter replaces an all-reduce. The split comes
    after ops that only move the sums, or add them to other sums over ranks."""

    atom: int
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Splits the leaves (parts of dimensions) of the atom that are still undecided. True if a
        leaf was split. Errors: StrategyError if no sum over ranks has the atom."""
        changed = found = False
        for name in self._ends(sharding):
            for i, leaf in enumerate(sharding.factors.tensors[name].leaves):
                if leaf.atom == self.atom:
                    found = True
                    changed |= sharding.assign_tensor(name, i, self.axes)
        if not found and parts_over(self.axes) > 1:
            raise StrategyError(
                f"{SEQUENCE}: tensor-parallel sums up no activation that has the second dimension "
                "of the first input; use tensor-parallel"
            )
        return changed

    def _ends(self, sharding: ShardingState) -> list[str]:
        """Returns the names of the sums over ranks, each after the last op that only moves or adds
        it. Makes the leaves (parts of dimensions) of nodes before an addition of several sums
        whole."""
        first: dict[str, str] = {}
        moved: dict[str, list[OpFactors]] = {}
        for op in sharding.factors.ops:
            known = [t.name for t in op.node.outputs if t.name in sharding.factors.tensors]
            read = [t.name for t in op.node.inputs if len(t.outputs) == 1 and t.name in first]
            partial, _ = sharding.own_partial(op)
            if overlaps(partial, self.axes):
                first.update((name, name) for name in known)
            elif op.node.op in _MOVES and known and op.node.inputs[0].name in read:
                (source, name) = (op.node.inputs[0].name, known[0])
                first[name] = first.pop(source)
                moved[name] = [*moved.get(source, ()), op]
            elif op.node.op in ("Add", "Sum") and known and len(read) == len(op.node.inputs) > 1:
                for name in read:
                    first.pop(name, None)
                    self._close(sharding, moved.get(name, ()))
                self._close(sharding, [op])
                first[known[0]] = known[0]
        return list(first.values())

    def _close(self, sharding: ShardingState, ops: Iterable[OpFactors]) -> None:
        """Makes the nodes' leaves (parts of dimensions) of the atom whole, if they are
        undecided."""
        for op in ops:
            for i, leaf in enumerate(op.leaves):
                if leaf.atom == self.atom:
                    sharding.close(op, i)


def zero_rounds(
    graph: gs.Graph, sharding: ShardingState, step: Step | None, preset: str, axes: Axes
) -> tuple[list[Annotation], list[Annotation]]:
    """Returns two lists of annotations for a ZeRO stage: the first must come before, and the second
    after, all annotations that split the computation.

    Stages 1 and 2 shard the optimizer state and the update of each parameter; stage 3 also shards
    the parameter. Stages 1 and 2 of one step are the same program, as both reduce-scatter the
    gradient. A table on the host stays whole, because a step neither gathers nor scatters all its
    rows. Errors: StrategyError if the model is not a training step.
    """
    if step is None:
        raise StrategyError(
            f"preset {preset} applies only to a training step; write one with `onnxpar grad`"
        )
    first: list[Annotation] = []
    last: list[Annotation] = []
    for slot in step.parameters:
        if slot.input in sharding.factors.on_host:
            first.append(Closed(slot.input))
            continue
        parts = updated_with(graph, step, slot)
        if ZERO_STAGES[preset] == 3:
            parts = (slot.input, *parts)
        else:
            first.append(Closed(slot.input))
        last.append(SplitTogether(parts, axes))
    return first, last


def updated_with(graph: gs.Graph, step: Step, slot: Slot) -> tuple[str, ...]:
    """Returns the names of the tensors in an optimizer's elementwise update of a parameter: the
    optimizer's states of the parameter (momentum, ...), and the parameter's next value."""
    output = next(t for t in graph.outputs if t.name == slot.output)
    shapes = {t.name: list(t.shape) for t in graph.inputs}
    states = [
        s.input
        for s in step.slots
        if s.of == slot.of and s.kind != slot.kind and shapes[s.input] == shapes[slot.input]
    ]
    return (*states, output.inputs[0].inputs[0].name)


@dataclass(frozen=True)
class Closed:
    """The annotation that keeps a tensor whole, except for leaves (parts of dimensions) that are
    decided already."""

    tensor: str

    def apply(self, sharding: ShardingState) -> bool:
        """Makes the undecided leaves (parts of dimensions) of the tensor whole."""
        sharding.close_tensor(self.tensor)
        return False


@dataclass(frozen=True)
class SplitTogether:
    """The annotation that splits tensors of the same shape along one dimension."""

    tensors: tuple[str, ...]
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Splits the dimension that divides most evenly, or else the longest one. The dimension
        must be open in all tensors, long enough, and not requested to be whole. In each of its
        segments, one factor is split. False if there is no such dimension."""
        factors = sharding.factors.tensors[self.tensors[0]]
        parts = parts_over(self.axes)
        choices = []
        for chosen in covering_leaves(factors, parts):
            decided = [(t, sharding.tensors[t][i]) for t in self.tensors for i in chosen]
            if not any(axes or (t in sharding.pinned and axes == ()) for t, axes in decided):
                rest = sum(factors.leaves[i].size % parts for i in chosen)
                size = factors.dims[factors.dim_of_leaf[chosen[0]]].size
                choices.append((rest, -size, chosen))
        for _, _, chosen in sorted(choices):
            if all([self._assign(sharding, t, i) for t in self.tensors for i in chosen]):
                return True
        return False

    def _assign(self, sharding: ShardingState, tensor: str, leaf: int) -> bool:
        """Splits a leaf (a part of a dimension) of a tensor, even if it was made whole. False if
        another leaf uses the axes."""
        sharding.tensors[tensor][leaf] = None
        return sharding.assign_tensor(tensor, leaf, self.axes)
