"""Whether a plan keeps what its user asks for: entries of a strategy, and annotations of the model.

An entry that cannot be kept is refused where it is read, as far as one entry alone can tell. What
only the whole plan tells, such as entries that contradict each other, is found here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onnxpar.errors import StrategyError
from onnxpar.layout.mesh import Axes, merge_axes
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState
from onnxpar.strategy.standard_shardings import axes_text
from onnxpar.strategy.strategy import Annotation, NodeAnnotation, TensorAnnotation


def check_requested(
    annotations: Collection[Annotation],
    sharding: ShardingState,
    states: Sequence[tuple[str, str]] = (),
) -> None:
    """Errors: StrategyError where a node or a tensor is not split as these ask, naming it, what is
    asked, what it would get and why. `states` are pairs of an input and the output that is fed back
    as it."""
    fed_by = {result: source for source, result in states}
    for annotation in annotations:
        if isinstance(annotation, NodeAnnotation):
            _check_node(annotation.op, annotation.axes, sharding)
        if isinstance(annotation, TensorAnnotation) and annotation.pin:
            _check_tensor(annotation, sharding, fed_by)
        if isinstance(annotation, (NodeAnnotation, TensorAnnotation)):
            _check_sizes(annotation, sharding)


def _check_node(op: OpFactors, axes: Mapping[int, Axes], sharding: ShardingState) -> None:
    what = f"{op.node.op} '{op.node.name}'"
    given = sharding.op_axes(op)
    for leaf, asked in axes.items():
        if merge_axes(asked) != merge_axes(given[leaf]):
            raise StrategyError(
                f"{what}: its factor {op.leaves[leaf].factor} is asked to be split over "
                f"{axes_text(asked, sharding.mesh)}, but {_why_not(op, leaf, sharding)}"
            )


def _why_not(op: OpFactors, leaf: int, sharding: ShardingState) -> str:
    """Why a node cannot split a leaf alone, and what to do."""
    fused = [o.node for o, _ in sharding.factors.bonded(op, leaf) if o is not op]
    if fused:
        others = " and ".join(f"{node.op} '{node.name}'" for node in fused)
        return f"onnxruntime makes one node of it and {others}; split these alike"
    tied = {
        op.leaves[i].factor for group in op.co_sharded if leaf in group for i in group if i != leaf
    }
    if tied:
        others = " and ".join(sorted(tied))
        return f"that goes only together with {others}; split these alike, or leave them whole"
    factor = op.leaves[leaf].factor
    if factor in op.rule.contiguous:
        return (
            "a rank must hold it in one run, with no elements of others in between; leave it whole"
        )
    return "only some of its segments are; split all of them, or leave them whole"


def _check_tensor(
    annotation: TensorAnnotation, sharding: ShardingState, fed_by: Mapping[str, str]
) -> None:
    given = sharding.tensor_sharding(annotation.tensor).leaves
    grown = {source: result for result, source in fed_by.items()}
    mesh = sharding.mesh
    for leaf, asked in enumerate(annotation.axes):
        if asked is None or merge_axes(asked) == given[leaf]:
            continue
        why = "another entry or the model's annotations say otherwise"
        if annotation.tensor in grown:
            why = (
                f"'{grown[annotation.tensor]}' is fed back as it, and what grows from run to run "
                "is whole; leave it whole, or give --only-given-states"
            )
        if annotation.tensor in fed_by:
            source = fed_by[annotation.tensor]
            why = f"it is fed back as '{source}', which has that layout; ask for both"
        dim = sharding.factors.tensors[annotation.tensor].dim_of_leaf[leaf]
        raise StrategyError(
            f"tensor '{annotation.tensor}' dimension {dim}: asked to be split over "
            f"{axes_text(asked, mesh)}, it would be split over {axes_text(given[leaf], mesh)}: "
            f"{why}"
        )


def _check_sizes(annotation: NodeAnnotation | TensorAnnotation, sharding: ShardingState) -> None:
    """Errors: StrategyError where two entries give other sizes by hand for what is one factor."""
    if isinstance(annotation, NodeAnnotation):
        what = f"{annotation.op.node.op} '{annotation.op.node.name}'"
        atoms = [leaf.atom for leaf in annotation.op.leaves]
    else:
        what = f"tensor '{annotation.tensor}'"
        atoms = [leaf.atom for leaf in sharding.factors.tensors[annotation.tensor].leaves]
    for leaf, sizes in annotation.parts.items():
        axes = annotation.axes[leaf]
        have = sharding.parts.get((atoms[leaf], axes or ()))
        if have is not None and have != sizes:
            raise StrategyError(
                f"{what}: sizes by hand {list(sizes)} over {axes_text(axes or (), sharding.mesh)}; "
                f"another entry says {list(have)} of the same elements; give one of them"
            )
