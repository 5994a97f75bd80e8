"""The kinds of collectives, in one table for all modules that distinguish kinds.

A new kind needs a row here, its op in the plugin (`native/kernels.cc`, `native/op_registry.cc`)
and its gradient (`training/gradients/collectives.py`). It may need a formula in `cost/cost.py`; if
reshards use it, it needs a lowering in `lowering/lower_reshard.py`. `compiler/check_layouts.py` and
`testing/simulate.py` check the other modules, so both say themselves what each kind does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DOMAIN = "onnxpar"
"""The domain of the plugin's ops."""

State = Literal["whole", "split", "partial"]
"""The state of a tensor over some mesh axes: equal on all ranks, split, or partial (each rank has a
term of a sum, maximum, ...)."""
WHOLE: State = "whole"
SPLIT: State = "split"
PARTIAL: State = "partial"


@dataclass(frozen=True)
class Along:
    """The names of the attributes for a dimension along which an op joins or cuts: `axis` for the
    dimension, `sizes` for the size of each member's shard."""

    axis: str
    sizes: str


@dataclass(frozen=True)
class Kind:
    """One kind of collective, or of local step between two layouts. A member is a rank of the
    group.

    name           the op
    change         the tensor's state over the axes of a reshard, before and after it; None if
                   reshards do not use this kind
    traffic        bytes that a rank sends in a ring of n ranks, divided by (n-1)/n of the tensor
                   where it is largest; 0 if there is no ring
    by_message     True if each rank sends its whole shard in one message, unchanged
    joins, cuts    the dimension along which the op concatenates the members' shards, and along
                   which it cuts its operand; None if it does not
    shapes         the attribute for the shape of each member's operand; None if there is none
    lists          other attributes with an entry for each member
    awaits         the members whose arrival a rank's result needs: the whole group, the neighbors,
                   the root, or the source of the rank's shard; None if the nodes of just two ranks
                   meet
    ends_together  True if all members end at the same moment, so that profiles can align their
                   clocks
    by_data        True if the data decide how many bytes each rank sends
    is_late        True if it should run right before its first reader, not as early as possible
    is_fused       True if several tensors may share one such collective
    is_started     True if a thread of the plugin may run it, between a Start and a Complete
    is_measured    True if `onnxpar calibrate` measures it
    has_link       True if a topology may give it a link of its own
    by_hand        True if users may write it into a manual program
    """

    name: str
    change: tuple[State, State] | None = None
    traffic: float = 0.0
    by_message: bool = False
    joins: Along | None = None
    cuts: Along | None = None
    shapes: str | None = None
    lists: tuple[str, ...] = ()
    awaits: Literal["group", "neighbors", "root", "source"] | None = "group"
    ends_together: bool = False
    by_data: bool = False
    is_late: bool = False
    is_fused: bool = False
    is_started: bool = False
    is_measured: bool = False
    has_link: bool = True
    by_hand: bool = True

    @property
    def reduces(self) -> bool:
        """True if it combines the terms of a partial tensor: sum, maximum, ..."""
        return self.change is not None and self.change[0] == PARTIAL

    @property
    def by_member(self) -> tuple[str, ...]:
        """The names of all attributes with an entry for each member of the group."""
        return (*(a.sizes for a in (self.joins, self.cuts) if a), *self.lists)

    @property
    def makes_whole(self) -> bool:
        """True if every rank holds the whole result, but not the whole operand."""
        return self.change in ((SPLIT, WHOLE), (PARTIAL, WHOLE))

    @property
    def is_local(self) -> bool:
        """True if no rank sends anything: each rank has the whole tensor, and keeps its shard of
        it."""
        return self.change in ((WHOLE, SPLIT), (WHOLE, PARTIAL))


_ROWS = (
    Kind(
        "AllReduce",
        (PARTIAL, WHOLE),
        traffic=2.0,
        ends_together=True,
        is_fused=True,
        is_started=True,
        is_measured=True,
    ),
    Kind(
        "AllGather",
        (SPLIT, WHOLE),
        traffic=1.0,
        joins=Along("axis", "sizes"),
        ends_together=True,
        is_late=True,
        is_fused=True,
        is_started=True,
        is_measured=True,
    ),
    Kind(
        "ReduceScatter",
        (PARTIAL, SPLIT),
        traffic=1.0,
        cuts=Along("axis", "sizes"),
        is_fused=True,
        is_started=True,
        is_measured=True,
    ),
    Kind(
        "AllToAll",
        (SPLIT, SPLIT),
        traffic=1.0,
        joins=Along("concat_axis", "concat_sizes"),
        cuts=Along("split_axis", "split_sizes"),
        is_fused=True,
        is_started=True,
        is_measured=True,
    ),
    Kind(
        "AllToAllV",
        traffic=1.0,
        by_data=True,
        is_started=True,
        by_hand=False,  # nodes compute its sizes
    ),
    Kind(
        "CollectivePermute",
        (SPLIT, SPLIT),
        by_message=True,
        shapes="shapes",
        lists=("sources", "shapes"),
        awaits="source",
        is_measured=True,
    ),
    Kind(
        "Broadcast",
        (WHOLE, WHOLE),
        traffic=1.0,
        awaits="root",
        is_late=True,
        is_measured=True,
    ),
    Kind("Send", awaits=None),
    Kind("Recv", awaits=None, has_link=False),  # the link is the sender's
    Kind("NeighborExchange", lists=("before", "after"), awaits="neighbors"),
    Kind("HaloExchange", by_hand=False),  # lowering computes its bounds
    Kind("LocalSlice", (WHOLE, SPLIT), has_link=False, by_hand=False),
    Kind("Select", (WHOLE, PARTIAL), has_link=False, by_hand=False),
)
KINDS = {kind.name: kind for kind in _ROWS}
"""All kinds, by the name of their op."""

LOCAL_STEPS = tuple(kind.name for kind in _ROWS if kind.is_local)
"""Kinds of reshard steps that send nothing. They become ordinary ops; the plugin does not have
them."""

START, COMPLETE = "Start", "Complete"
"""The ops of a collective in two parts: `Start` and the kind (StartAllReduce) begins it on another
thread, and Complete waits for its result."""


def kind_of(op: str) -> str:
    """Returns the kind of collective that an op runs or starts: `StartAllReduce` gives `AllReduce`.
    For another op, its own name."""
    return op.removeprefix(START)


FUSED_ELEMENTWISE = "FusedElementwise"
"""The op that runs several elementwise nodes in one loop; it does not communicate, and has no
token."""

AFTER = "After"
"""The op that passes a token on only after its operand has been computed."""

RANK_CONSTANTS = ("Rank", "GroupSize")
"""Ops of the plugin that compute a constant of the rank and do not communicate."""
