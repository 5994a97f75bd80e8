"""The slots for ranks, as hosts leave and join between generations of ranks.

A slot is a place where a rank may run. All ranks of a generation start together and end together;
the next generation has the slots that exist then. The process that starts ranks keeps a
`Membership`: the parent of ranks on one host, or a launcher, which outlives its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from onnxpar.base.errors import InputError, RankError

MAX_RESTARTS = 3
"""How often ranks that died start again, unless a user says otherwise."""


@dataclass(frozen=True, order=True)
class Slot:
    """A place for a rank: a host, and the number of the slot on the host, from 0."""

    host: str
    index: int

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"


def slots_of(hosts: Mapping[str, int]) -> list[Slot]:
    """Returns the slots of hosts, given how many each has."""
    return [Slot(host, index) for host, count in hosts.items() for index in range(count)]


@dataclass(frozen=True)
class Generation:
    """Ranks that run together, by their slots in the order of ranks; `number` counts from 0."""

    number: int
    slots: tuple[Slot, ...]


class Membership:
    """The slots that the next generation has.

    slots         the slots at the start
    min_ranks     fewest ranks with which a run goes on
    max_restarts  how often a generation whose ranks died is started again with all of its slots;
                  after that, slots whose ranks die are given up

    Errors: InputError for limits out of range.
    """

    def __init__(self, slots: Iterable[Slot], min_ranks: int, max_restarts: int) -> None:
        self._slots = list(dict.fromkeys(slots))
        if max_restarts < 0:
            raise InputError(f"--max-restarts {max_restarts}: must be at least 0")
        if not 1 <= min_ranks <= len(self._slots):
            raise InputError(
                f"--min-ranks {min_ranks}: must be from 1 to {len(self._slots)}, the number of "
                "ranks at the start"
            )
        self.min_ranks, self.max_restarts = min_ranks, max_restarts
        self.restarts = 0
        """How many generations ended because ranks died."""
        self._begun = 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the next generation."""
        return tuple(self._slots)

    def begin(self, ranks: int | None = None) -> Generation:
        """Returns the next generation, on as many slots as `ranks` says, or on all. Errors:
        RankError if fewer than `min_ranks` are left."""
        if len(self._slots) < self.min_ranks:
            raise RankError(
                f"ranks left: {len(self._slots)}, fewer than --min-ranks {self.min_ranks}"
            )
        self._begun += 1
        return Generation(self._begun - 1, self.slots[:ranks])

    def lose(self, died: Collection[Slot]) -> bool:
        """Called when the ranks of these slots died, which ended a generation. Returns True if new
        ranks may start there, False if the slots are given up."""
        self.restarts += 1
        if self.restarts <= self.max_restarts:
            return True
        self.leave(died)
        return False

    def leave(self, gone: Collection[Slot]) -> None:
        """Removes slots, such as all slots of a lost host; this is no restart."""
        self._slots = [slot for slot in self._slots if slot not in gone]

    def join(self, come: Iterable[Slot]) -> None:
        """Adds slots, such as all slots of a host that has returned."""
        self._slots = list(dict.fromkeys([*self._slots, *come]))
