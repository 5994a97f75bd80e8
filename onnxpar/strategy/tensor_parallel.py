"""The preset tensor-parallel: finds the cheapest set of atoms (parts of dimensions that no op
divides further) whose split splits every large weight.

An atom covers a weight if a dimension of the weight has it. An atom costs the collectives that its
split causes, where it is reduced or must be whole. The cheapest set that covers all weights gives
the well-known column-then-row products, whole heads, and vocabulary-split embeddings, without a
look at names.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.graph.training_spec import Step
from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.split_alone import CloseOpen, SplitAlone, SplitUpdate
from onnxpar.strategy.strategy import Annotation
from onnxpar.strategy.training_presets import updated_with
from onnxpar.strategy.weight_cover import WeightCover


def tensor_parallel_rounds(
    graph: gs.Graph, sharding: ShardingState, axes: Axes, step: Step | None
) -> list[list[Annotation]]:
    """Returns the annotations that split weights over `axes`, in rounds: first the atoms (parts of
    dimensions) that cover the weights, then weights that these atoms do not split. In a training
    `step`, annotations of a parameter also split its optimizer states."""
    if parts_over(axes) == 1:
        return []
    cover = WeightCover(graph, sharding, axes)
    chosen = cover.choose()
    cover.companion = cover.companions(chosen)
    units = list(cover.recurrences.annotations(chosen, axes))
    first = [s for w in cover.weights for s in cover.annotations(w, chosen, axes)]
    free = cover.free_atoms(chosen)
    small = [s for w in cover.small for s in cover.annotations(w, free, axes)]
    slots = {slot.input: slot for slot in step.parameters} if step is not None else {}
    rest: list[Annotation] = []
    for weight in cover.worth_splitting():
        if step is not None and weight.name in slots:
            parts = updated_with(graph, step, slots[weight.name])
            rest.append(SplitUpdate((weight.name, *parts), axes))
        else:
            rest.append(SplitAlone(weight.name, axes))
    return [[*units], first, small, [CloseOpen(), *rest]]
