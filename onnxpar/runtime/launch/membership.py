"""The places for ranks, called slots, as hosts leave and join between generations of ranks.

All ranks of a generation start together and end together; the next generation has the slots that
exist then. The process that starts ranks keeps a `Membership`: the parent of ranks on one host, or
a launcher, which outlives its ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from onnxpar.base.errors import InputError, RankError

MAX_RESTARTS = 3
"""How often ranks that died start again, by default."""


@dataclass(frozen=True, order=True)
class Slot:
    """A place for a rank: a host, and the number of the slot on the host, from 0."""

    host: str
    index: int

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"


def slots_of(hosts: Mapping[str, int]) -> list[Slot]:
    """Returns the slots of hosts: {"a": 2} has a:0 and a:1."""
    return [Slot(host, index) for host, count in hosts.items() for index in range(count)]


@dataclass(frozen=True)
class Generation:
    """Ranks that run together: rank i runs in `slots[i]`. `number` counts generations from 0."""

    number: int
    slots: tuple[Slot, ...]


class Membership:
    """The slots for the next generation of ranks.

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
        """The slots that the next generation of ranks will have."""
        return tuple(self._slots)

    def begin(self, ranks: int | None = None) -> Generation:
        """Returns the next generation, on the first `ranks` slots, or on all if `ranks` is None.
        Errors: RankError if fewer than `min_ranks` are left."""
        if len(self._slots) < self.min_ranks:
            raise RankError(
                f"ranks left: {len(self._slots)}, fewer than --min-ranks {self.min_ranks}"
            )
        self._begun += 1
        return Generation(self._begun - 1, self.slots[:ranks])

    def lose(self, died: Collection[Slot]) -> bool:
        """Called when the ranks of these slots died, which ended a generation. Returns True if new
        ranks may start in them, False if the slots are given up."""
        self.restarts += 1
        if self.restarts <= self.max_restarts:
            return True
        self.leave(died)
        return False

    def leave(self, gone: Collection[Slot]) -> None:
        """Removes slots, such as all slots of a lost host. Unlike `lose`, this uses up no
        restart."""
        self._slots = [slot for slot in self._slots if slot not in gone]

    def join(self, come: Iterable[Slot]) -> None:
        """Adds slots, such as all slots of a host that has returned."""
        self._slots = list(dict.fromkeys([*self._slots, *come]))
