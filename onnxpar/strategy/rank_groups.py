"""Groups of ranks in a manual program (a model for one rank): by mesh axes, by a list of ranks, or
by name.

A rank that is in no list runs the node, too, because all ranks run one program: this rank is alone
in its group, and keeps its operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from onnxpar.base.errors import StrategyError
from onnxpar.layout.mesh import Axes, Mesh
from onnxpar.strategy.standard_shardings import parse_axes
from onnxpar.strategy.strategy import Groups

GroupOf = Callable[[int], tuple[int, ...]]
"""A function from a rank to the ranks of its group."""


def group_of(
    what: str, attrs: Mapping[str, Any], mesh: Mesh, named: Mapping[str, Groups]
) -> GroupOf:
    """Returns the groups of a node with these attributes, as a function from a rank to its group.
    The attributes have `axes`, or `group` (ranks, or a name in `named`), or neither, for one group
    of all ranks. Errors: StrategyError that begins with `what`."""
    axes, group = attrs.get("axes"), attrs.get("group")
    if axes is not None and group is not None:
        raise StrategyError(f"{what}: has both axes and group; give one of them")
    if axes is not None:
        return partial(mesh.group, axes_of(what, axes, mesh))
    if group is None or group == []:
        everyone = tuple(range(mesh.size))
        return lambda rank: everyone
    if isinstance(group, (str, bytes)):
        name = group.decode() if isinstance(group, bytes) else group
        if name not in named:
            known = f"the groups are {', '.join(named)}" if named else "the strategy has no groups"
            raise StrategyError(
                f"{what}: there is no group {name!r}; {known}; add it under groups, as in "
                f"groups: {{{name}: [0, 1]}}"
            )
        return of_lists(f"{what}: group {name!r}", named[name], mesh)
    return of_lists(what, (tuple(group),), mesh)


def of_lists(what: str, lists: Groups, mesh: Mesh) -> GroupOf:
    """Returns the groups in these lists of ranks, as a function from a rank to its group. Errors:
    StrategyError if a list is empty, or if a rank does not exist or is named twice."""
    groups: dict[int, tuple[int, ...]] = {}
    for members in lists:
        shown = list(members)
        if not members:
            raise StrategyError(f"{what}: {shown} has no ranks")
        for rank in members:
            if not 0 <= rank < mesh.size:
                raise StrategyError(
                    f"{what}: {shown} has rank {rank}, but the mesh {mesh} has ranks 0 to "
                    f"{mesh.size - 1}"
                )
            if rank in groups or members.count(rank) > 1:
                raise StrategyError(f"{what}: rank {rank} is named twice; name each rank once")
        groups |= dict.fromkeys(members, members)
    return lambda rank: groups.get(rank, (rank,))


def axes_of(what: str, names: Sequence[str | bytes], mesh: Mesh) -> Axes:
    """Returns the mesh axes with these names. Errors: StrategyError that begins with `what`."""
    texts = [name.decode() if isinstance(name, bytes) else name for name in names]
    try:
        return tuple(a for axes in parse_axes(texts, mesh) for a in axes)
    except StrategyError as error:
        raise StrategyError(f"{what}: axes={texts}: {error}") from None
