"""Process sets: subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxpar.base.errors import InputError
from onnxpar.hvd.communicator import Communicator, current, is_initialized
from onnxpar.runtime.ranks import collectives
from onnxpar.runtime.ranks.groups import Group, World


class ProcessSet:
    """A set of ranks that run collectives together: `ProcessSet([0, 2])`.

    Pass it to `init(process_sets=[...])` or to `add_process_set` on all ranks, then to collectives
    on the ranks of the set. `process_set_id` is its number, or None if it is not registered.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        ranks = sorted(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else None
        if ranks is None or not all(type(rank) is int for rank in ranks):
            raise InputError(
                f"ProcessSet({ranks_or_comm!r}): give a list of ranks; communicators of mpi4py are "
                "not supported"
            )
        self._ranks = ranks

    @property
    def ranks(self) -> list[int]:
        """The ranks of the set, in ascending order."""
        return self._ranks

    def size(self) -> int | None:
        """Returns the number of ranks in the set, or None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns the position of this rank in the set, or None if the set is not registered.
        Errors: InputError if this rank is not in the set."""
        return None if self.process_set_id is None else members_of(self, "rank").rank

    def included(self) -> bool:
        """Returns True if this rank is in the set."""
        return current().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllRanks(ProcessSet):
    """The process set 0 of all ranks, however many `init` connects."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(current().size)) if is_initialized() else []


global_process_set: ProcessSet = _AllRanks([])
"""All ranks."""


@dataclass(frozen=True)
class Members:
    """The ranks of a process set, and this rank's connection to them."""

    communicator: Communicator
    ranks: tuple[int, ...]

    @property
    def world(self) -> World | Group:
        """The connection of this rank to the ranks of the set."""
        return self.communicator.group(self.ranks)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """The position of this rank among `ranks`."""
        return self.ranks.index(self.communicator.rank)

    def subset(self, positions: Sequence[int]) -> World | Group:
        """Returns the connection to the members in these positions."""
        return self.communicator.group(tuple(self.ranks[position] for position in positions))


def members_of(process_set: ProcessSet, what: str) -> Members:
    """Returns the ranks of a set with this rank's connection to them. `what` names the call in
    errors. Errors: InputError if the set is not registered, or if this rank is not in it."""
    here = current()
    if not isinstance(process_set, ProcessSet):
        raise InputError(f"{what}: process_set={process_set!r} is not an hvd.ProcessSet")
    number, ranks = process_set.process_set_id, tuple(process_set.ranks)
    if number is None or here.process_sets.get(number) != ranks:
        raise InputError(
            f"{what}: {process_set} is not registered; pass it to hvd.init(process_sets=[...]) or "
            "hvd.add_process_set on all ranks"
        )
    if here.cycles is not None and number != 0:
        raise InputError(f"{what}: process sets have no cycles; leave HOROVOD_CYCLE_TIME out")
    if here.rank not in ranks:
        raise InputError(f"{what}: rank {here.rank} is not in {process_set}")
    return Members(here, ranks)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set, or the set of a list of ranks, and returns it. All ranks must call
    `add_process_set` with the same ranks, even ranks outside of the set.

    Errors: InputError, on every rank, if a rank of the set does not exist, if a set of these ranks
    exists already, or if ranks pass different sets.
    """
    here = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    text = str(added.ranks)
    texts = here.ordered(
        lambda: collectives.gather_bytes(here.world, text.encode(), "add_process_set")
    )
    for rank, other in enumerate(each.decode() for each in texts):
        if other != texts[0].decode():
            raise InputError(
                f"add_process_set: rank 0 adds {texts[0].decode()}, but rank {rank} adds {other}"
            )
    ranks = tuple(added.ranks)
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(here.size)):
        raise InputError(
            f"add_process_set: {text} must be different ranks from 0 to {here.size - 1}"
        )
    if ranks in here.process_sets.values():
        raise InputError(f"add_process_set: a process set of the ranks {text} exists already")
    here.added += 1
    here.process_sets[here.added] = ranks
    added.process_set_id = here.added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set and returns True; returns False if the set is not registered or is
    `global_process_set`. All ranks must call `remove_process_set`."""
    here = current()
    number: Any = process_set.process_set_id
    if number is None or number == 0:
        return False
    here.ordered(lambda: collectives.barrier(here.world, f"remove_process_set {number}"))
    process_set.process_set_id = None
    return here.process_sets.pop(number, None) is not None
