"""Whether a plan keeps what its user asks for: entries of a strategy, and annotations of the model.

An entry that cannot be kept is refused where it is read, as far as one entry alone can tell. What
only the whole plan tells, such as entries that contradict each other, is found here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onnxpar.errors import StrategyError
from onnxpar.layout.mesh import Axes, merge_axes
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import Sharding
from onnxpar.strategy.standard_shardings import axes_text
from onnxpar.strategy.strategy import NodeSeed, Seed, TensorSeed


def check_asked(
    seeds: Collection[Seed], sharding: Sharding, states: Sequence[tuple[str, str]] = ()
) -> None:
    """Errors: StrategyError where a node or a tensor is not split as these ask, naming it, what is
    asked, what it would get and why. `states` are pairs of an input and the output that is fed back
    as it."""
    fed_by = {result: source for source, result in states}
    for seed in seeds:
        if isinstance(seed, NodeSeed):
            _check_node(seed.op, seed.axes, sharding)
        if isinstance(seed, TensorSeed) and seed.pin:
            _check_tensor(seed, sharding, fed_by)
        if isinstance(seed, (NodeSeed, TensorSeed)):
            _check_sizes(seed, sharding)


def _check_node(op: OpFactors, axes: Mapping[int, Axes], sharding: Sharding) -> None:
    what = f"{op.node.op} '{op.node.name}'"
    given = sharding.op_axes(op)
    for leaf, asked in axes.items():
        if merge_axes(asked) != merge_axes(given[leaf]):
            raise StrategyError(
                f"{what}: its factor {op.leaves[leaf].factor} is asked to be split over "
                f"{axes_text(asked, sharding.mesh)}, but {_why_not(op, leaf, sharding)}"
            )


def _why_not(op: OpFactors, leaf: int, sharding: Sharding) -> str:
    """Why a node cannot split a leaf alone, and what to do."""
    fused = [o.node for o, _ in sharding.factors.bonded(op, leaf) if o is not op]
    if fused:
        others = " and ".join(f"{node.op} '{node.name}'" for node in fused)
        return f"onnxruntime makes one node of it and {others}; split these alike"
    tied = {op.leaves[i].factor for group in op.ties if leaf in group for i in group if i != leaf}
    if tied:
        others = " and ".join(sorted(tied))
        return f"that goes only together with {others}; split these alike, or leave them whole"
    factor = op.leaves[leaf].factor
    if factor in op.rule.runs:
        return (
            "a rank must hold it in one run, with no elements of others in between; leave it whole"
        )
    return "only some of its segments are; split all of them, or leave them whole"


def _check_tensor(seed: TensorSeed, sharding: Sharding, fed_by: Mapping[str, str]) -> None:
    given = sharding.tensor_placement(seed.tensor).leaves
    grown = {source: result for result, source in fed_by.items()}
    mesh = sharding.mesh
    for leaf, asked in enumerate(seed.axes):
        if asked is None or merge_axes(asked) == given[leaf]:
            continue
        why = "another entry or the model's annotations say otherwise"
        if seed.tensor in grown:
            why = (
                f"'{grown[seed.tensor]}' is fed back as it, and what grows from run to run is "
                "whole; leave it whole, or give --only-given-states"
            )
        if seed.tensor in fed_by:
            why = f"it is fed back as '{fed_by[seed.tensor]}', which has that layout; ask for both"
        dim = sharding.factors.tensors[seed.tensor].dim_of_leaf[leaf]
        raise StrategyError(
            f"tensor '{seed.tensor}' dimension {dim}: asked to be split over "
            f"{axes_text(asked, mesh)}, it would be split over {axes_text(given[leaf], mesh)}: "
            f"{why}"
        )


def _check_sizes(seed: NodeSeed | TensorSeed, sharding: Sharding) -> None:
    """Errors: StrategyError where two entries give other sizes by hand for what is one factor."""
    if isinstance(seed, NodeSeed):
        what = f"{seed.op.node.op} '{seed.op.node.name}'"
        atoms = [leaf.atom for leaf in seed.op.leaves]
    else:
        what = f"tensor '{seed.tensor}'"
        atoms = [leaf.atom for leaf in sharding.factors.tensors[seed.tensor].leaves]
    for leaf, sizes in seed.parts.items():
        axes = seed.axes[leaf]
        have = sharding.parts.get((atoms[leaf], axes or ()))
        if have is not None and have != sizes:
            raise StrategyError(
                f"{what}: sizes by hand {list(sizes)} over {axes_text(axes or (), sharding.mesh)}; "
                f"another entry says {list(have)} of the same elements; give one of them"
            )
