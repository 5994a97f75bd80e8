"""Annotations that the model itself and the user's strategy ask for."""

from __future__ import annotations

from onnxpar.model.annotations import Configuration
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.annotated_strategy import check_agreement, onnx_annotations
from onnxpar.strategy.derived_annotations import with_derived
from onnxpar.strategy.entries import annotations_of
from onnxpar.strategy.strategy import Annotation, Strategy

Rounds = list[list[Annotation]]
"""Annotations in rounds of falling priority."""


def requests(
    annotated: Configuration | None, strategy: Strategy | None, sharding: ShardingState
) -> tuple[list[Annotation], Rounds]:
    """Returns the annotations that the model and the user ask for, and rounds of these with
    annotations for derived nodes (gradients, copies): first the model's round, then the user's.
    Errors: StrategyError if both name a node and differ."""
    asked: list[Annotation] = []
    rounds: Rounds = []
    if annotated is not None:
        asked += onnx_annotations(annotated, sharding)
        rounds.append(with_derived(asked, sharding))
    if strategy is not None:
        own = annotations_of(strategy, sharding)
        check_agreement(rounds[0] if rounds else [], own, sharding.mesh)
        rounds.append(with_derived(own, sharding))
        asked += own
    return asked, rounds
