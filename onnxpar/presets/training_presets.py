"""Presets of training steps: what of the state each rank holds, beside how it computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.errors import StrategyError
from onnxpar.ir.tensors import numpy_dtype
from onnxpar.ir.training_spec import Step
from onnxpar.layout.layout import leaves
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.presets.covering import covering
from onnxpar.sharding.factors import Leaf, OpFactors
from onnxpar.sharding.state import ShardingState, overlaps
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
    """Splits the second dimension of the first input wherever tensor parallelism adds up parts of
    an activation, and from there on. Errors: StrategyError where there is no such dimension."""
    leaf = _second_dimension(_first_input(graph, step), sharding)
    if leaf is None:
        raise StrategyError(
            f"{SEQUENCE} over {parts_over(axes)}: the first input has no sequence as its second "
            "dimension"
        )
    return [SplitSums(leaf.atom, axes)]


def sequence_atom(graph: gs.Graph, sharding: ShardingState, step: Step | None) -> int | None:
    """What numbers the places of a sequence, where the first input has one: of token ids, or of
    features for each place."""
    first = _first_input(graph, step)
    leaf = _second_dimension(first, sharding)
    if first is None or leaf is None:
        return None
    is_ids = len(first.shape) == 2 and np.issubdtype(numpy_dtype(first), np.integer)
    return leaf.atom if is_ids or len(first.shape) == 3 else None


def _first_input(graph: gs.Graph, step: Step | None) -> gs.Variable | None:
    """The first input of more than one dimension that is data."""
    data = (t for t in graph.inputs if step is None or t.name in step.data)
    return next((t for t in data if len(t.shape or ()) > 1), None)


def _second_dimension(tensor: gs.Variable | None, sharding: ShardingState) -> Leaf | None:
    """Its leaf, where it is one."""
    factors = sharding.factors.tensors.get(tensor.name) if tensor is not None else None
    at = [i for i, dim in enumerate(factors.dim_of_leaf) if dim == 1] if factors else []
    return factors.leaves[at[0]] if factors is not None and len(at) == 1 else None


@dataclass(frozen=True)
class SplitSums:
    """Splits what is pending over axes along an atom, so that it is reduced to parts: behind the
    ops that only move it, or add it to other such sums."""

    atom: int
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Decides the leaves of that atom that are still open. Errors: StrategyError where nothing
        pending has it."""
        changed = found = False
        for name in self._ends(sharding):
            for i, leaf in enumerate(sharding.factors.tensors[name].leaves):
                if leaf.atom == self.atom:
                    found = True
                    changed |= sharding.assign_tensor(name, i, self.axes)
        if not found and parts_over(self.axes) > 1:
            raise StrategyError(
                f"{SEQUENCE}: nothing that tensor-parallel adds up has the first input's second "
                "dimension; use tensor-parallel"
            )
        return changed

    def _ends(self, sharding: ShardingState) -> list[str]:
        """Pending tensors that are not added to others; what leads to such a sum is closed."""
        first: dict[str, str] = {}
        moved: dict[str, list[OpFactors]] = {}
        for op in sharding.factors.ops:
            known = [t.name for t in op.node.outputs if t.name in sharding.factors.tensors]
            read = [t.name for t in op.node.inputs if len(t.outputs) == 1 and t.name in first]
            pending, _ = sharding.own_partial(op)
            if overlaps(pending, self.axes):
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
        for op in ops:
            for i, leaf in enumerate(op.leaves):
                if leaf.atom == self.atom:
                    sharding.close(op, i)


def zero_rounds(
    graph: gs.Graph, sharding: ShardingState, step: Step | None, preset: str, axes: Axes
) -> tuple[list[Annotation], list[Annotation]]:
    """Seeds that must come first, and those that come behind all that splits the computation.

    Stages 1 and 2 hold each parameter whole and its state and update in parts, 3 the parameter too.
    Of one step they are the same program: the gradient is reduced to parts in both. Errors:
    StrategyError where the model is no training step.
    """
    if step is None:
        raise StrategyError(f"{preset} is for training steps, which `onnxpar grad` writes")
    outputs = {t.name: t for t in graph.outputs}
    first: list[Annotation] = []
    last: list[Annotation] = []
    for slot in step.parameters:
        parts = [s.input for s in step.slots if s.of == slot.of and s.kind != slot.kind]
        parts.append(outputs[slot.output].inputs[0].inputs[0].name)
        if ZERO_STAGES[preset] == 3:
            parts.insert(0, slot.input)
        else:
            first.append(Closed(slot.input))
        last.append(SplitTogether(tuple(parts), axes))
    return first, last


@dataclass(frozen=True)
class Closed:
    """Keeps what is still open of a tensor whole."""

    tensor: str

    def apply(self, sharding: ShardingState) -> bool:
        """Closes its open leaves, once nothing of higher priority can reach them."""
        have = sharding.tensors[self.tensor]
        sharding.tensors[self.tensor] = [() if axes is None else axes for axes in have]
        return False


@dataclass(frozen=True)
class SplitTogether:
    """Splits tensors of one shape along the same dimension: that which splits best."""

    tensors: tuple[str, ...]
    axes: Axes

    def apply(self, sharding: ShardingState) -> bool:
        """Takes the dimension that divides most evenly, else the longest, of those that are open in
        all and long enough: of each of its segments one factor."""
        factors = sharding.factors.tensors[self.tensors[0]]
        first = 0
        choices = []
        for dim in factors.dims:
            count = sum(leaf.size > 1 for leaf in leaves(dim))
            chosen = list(covering(dim, first, parts_over(self.axes)))
            if chosen and all(not sharding.tensors[t][i] for t in self.tensors for i in chosen):
                rest = sum(factors.leaves[i].size % parts_over(self.axes) for i in chosen)
                choices.append((rest, -dim.size, chosen))
            first += count
        for _, _, chosen in sorted(choices):
            if all([self._assign(sharding, t, i) for t in self.tensors for i in chosen]):
                return True
        return False

    def _assign(self, sharding: ShardingState, tensor: str, leaf: int) -> bool:
        sharding.tensors[tensor][leaf] = None
        return sharding.assign_tensor(tensor, leaf, self.axes)
