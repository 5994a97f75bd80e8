"""The preset tensor-parallel: the cheapest set of atoms whose split splits every large weight.

An atom covers a weight if it is in one of its dimensions. It costs the collectives that its split
causes wherever it is reduced or must be whole. The cheapest set that covers all weights gives the
well-known column-then-row products, whole heads, and vocabulary-split embeddings, without looking
at names.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxpar.layout.mesh import Axes, parts_over
from onnxpar.presets.split_alone import CloseOpen, SplitAlone
from onnxpar.presets.weight_cover import WeightCover
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.strategy import Annotation


def tensor_parallel_rounds(
    graph: gs.Graph, sharding: ShardingState, axes: Axes
) -> list[list[Annotation]]:
    """Annotations of the weights: first by covering atoms, then of weights that none covers."""
    if parts_over(axes) == 1:
        return []
    cover = WeightCover(graph, sharding, axes)
    chosen = cover.choose()
    cover.companion = cover.companions(chosen)
    units = list(cover.recurrences.annotations(chosen, axes))
    first = [s for w in cover.weights for s in cover.annotations(w, chosen, axes)]
    free = cover.free_atoms(chosen)
    small = [s for w in cover.small for s in cover.annotations(w, free, axes)]
    rest: list[Annotation] = [SplitAlone(w.name, axes) for w in cover.worth_splitting()]
    return [[*units], first, small, [CloseOpen(), *rest]]
