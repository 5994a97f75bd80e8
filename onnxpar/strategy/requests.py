"""Reads the layouts that the model itself and the user's strategy request, and checks that a plan
meets them.

An entry that is impossible by itself is refused when it is read. The check of the whole plan finds
other mistakes, such as entries that contradict each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onnxpar.base.errors import StrategyError
from onnxpar.graph.annotations import Configuration
from onnxpar.layout.mesh import Axes, merge_axes
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.annotated_strategy import check_agreement, onnx_annotations
from onnxpar.strategy.derived_annotations import with_derived
from onnxpar.strategy.entries import annotations_of
from onnxpar.strategy.standard_shardings import axes_text
from onnxpar.strategy.strategy import Annotation, NodeAnnotation, Strategy, TensorAnnotation

Rounds = list[list[Annotation]]
"""Annotations in rounds of falling priority."""


def requests(
    annotated: Configuration | None, strategy: Strategy | None, sharding: ShardingState
) -> tuple[list[Annotation], Rounds]:
    """Returns all annotations that the model and the user request, and the rounds in which they
    apply: first the model's, then the user's. The rounds also have annotations of nodes that a
    training step derives from annotated nodes (gradients, copies).

    annotated  the model's own annotations; None if there are none
    strategy   the user's strategy; None if there is none

    Errors: StrategyError if model and user split a node differently.
    """
    requested: list[Annotation] = []
    rounds: Rounds = []
    if annotated is not None:
        requested += onnx_annotations(annotated, sharding)
        rounds.append(with_derived(requested, sharding))
    if strategy is not None:
        of_user = annotations_of(strategy, sharding)
        check_agreement(rounds[0] if rounds else [], of_user, sharding.mesh)
        rounds.append(with_derived(of_user, sharding))
        requested += of_user
    return requested, rounds


def check_requested(
    annotations: Collection[Annotation],
    sharding: ShardingState,
    states: Sequence[tuple[str, str]] = (),
) -> None:
    """Checks that all nodes and tensors are split as the annotations request. `states` are the
    pairs (input, output that is fed back to it). Errors: StrategyError that names the node or
    tensor, both layouts, and the reason."""
    fed_by = {result: source for source, result in states}
    for annotation in annotations:
        if isinstance(annotation, NodeAnnotation):
            _check_node(annotation.op, annotation.axes, sharding)
        if isinstance(annotation, TensorAnnotation) and annotation.pin:
            _check_tensor(annotation, sharding, fed_by)
        if isinstance(annotation, (NodeAnnotation, TensorAnnotation)):
            _check_sizes(annotation, sharding)


def _check_node(op: OpFactors, axes: Mapping[int, Axes], sharding: ShardingState) -> None:
    """Checks that a node's leaves (parts of dimensions) have the requested axes (by index of the
    leaf). Errors: StrategyError."""
    what = f"{op.node.op} '{op.node.name}'"
    planned = sharding.op_axes(op)
    for leaf, requested in axes.items():
        if merge_axes(requested) != merge_axes(planned[leaf]):
            raise StrategyError(
                f"{what}: its factor {op.leaves[leaf].factor} cannot be split over "
                f"{axes_text(requested, sharding.mesh)} {_why_not(op, leaf, sharding)}"
            )


def _why_not(op: OpFactors, leaf: int, sharding: ShardingState) -> str:
    """Returns the reason why a node cannot split this leaf (a part of a dimension) alone, and the
    remedy, for an error."""
    fused = [o.node for o, _ in sharding.factors.bonded(op, leaf) if o is not op]
    if fused:
        partners = " and ".join(f"{node.op} '{node.name}'" for node in fused)
        return f"because onnxruntime fuses the node with {partners}; split them the same way"
    tied = {
        op.leaves[i].factor for group in op.co_sharded if leaf in group for i in group if i != leaf
    }
    if tied:
        partners = " and ".join(sorted(tied))
        return (
            f"because it must be split together with {partners}; split them the same way, or leave "
            "them whole"
        )
    factor = op.leaves[leaf].factor
    if factor in op.rule.contiguous:
        return "because each rank must hold a contiguous range of it; leave it whole"
    return "because only some of its segments are split; split all of them, or none"


def _check_tensor(
    annotation: TensorAnnotation, sharding: ShardingState, fed_by: Mapping[str, str]
) -> None:
    """Checks that a tensor's leaves (parts of dimensions) have the requested axes. `fed_by` has the
    input to which each output is fed back. Errors: StrategyError with the reason."""
    planned = sharding.tensor_sharding(annotation.tensor).leaves
    grown = {source: result for result, source in fed_by.items()}
    mesh = sharding.mesh
    for leaf, requested in enumerate(annotation.axes):
        if requested is None or merge_axes(requested) == planned[leaf]:
            continue
        why = "another entry or an annotation of the model contradicts this one"
        if annotation.tensor in grown:
            why = (
                f"'{grown[annotation.tensor]}' is fed back to it, and a dimension that grows from "
                "run to run stays whole; leave it whole, or give --only-given-states"
            )
        if annotation.tensor in fed_by:
            source = fed_by[annotation.tensor]
            why = f"it is fed back to '{source}', which has that layout; request it for both"
        dim = sharding.factors.tensors[annotation.tensor].dim_of_leaf[leaf]
        raise StrategyError(
            f"tensor '{annotation.tensor}' dimension {dim}: requested over "
            f"{axes_text(requested, mesh)}, but it would be split over "
            f"{axes_text(planned[leaf], mesh)}: {why}"
        )


def _check_sizes(annotation: NodeAnnotation | TensorAnnotation, sharding: ShardingState) -> None:
    """Checks that no two entries give different sizes by hand for shards of the same elements.
    Errors: StrategyError."""
    if isinstance(annotation, NodeAnnotation):
        what = f"{annotation.op.node.op} '{annotation.op.node.name}'"
        atoms = [leaf.atom for leaf in annotation.op.leaves]
    else:
        what = f"tensor '{annotation.tensor}'"
        atoms = [leaf.atom for leaf in sharding.factors.tensors[annotation.tensor].leaves]
    for leaf, sizes in annotation.parts.items():
        axes = annotation.axes[leaf]
        present = sharding.parts.get((atoms[leaf], axes or ()))
        if present is not None and present != sizes:
            raise StrategyError(
                f"{what}: the sizes {list(sizes)} over {axes_text(axes or (), sharding.mesh)}, "
                f"but another entry gives {list(present)} for the same elements; give the sizes "
                "once"
            )
