"""Several runs of a rank in one call: outputs of each are inputs of the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.arena import Room, Slot

if TYPE_CHECKING:
    from onnxpar.runtime.ranks.executor import Request


@dataclass
class SeveralRuns:
    """The runs of a request.

    asked, given  the request, and the feeds of its first run
    once, feeds   the request and the feeds of each run; carried inputs are copies, because others
                  may read the caller's memory
    slots         the results of all runs, along a first dimension
    """

    asked: Request
    given: Mapping[str, Array]
    once: Request
    feeds: Mapping[str, Array]
    slots: dict[str, Slot] = field(default_factory=dict)

    @staticmethod
    def of(request: Request, feeds: Mapping[str, Array], before: SeveralRuns | None) -> SeveralRuns:
        """Returns the runs of a request with these feeds. If only the number of runs differs from
        the runs `before`, uses their bound memory again."""
        once = replace(request, times=1)
        if before is not None and before.once == once and before._have(feeds):
            return replace(before, asked=request, given=feeds, slots={})
        own = {name: feeds[name].copy() for name in request.carried}
        return SeveralRuns(request, feeds, once, {**feeds, **own})

    def is_same(self, request: Request, feeds: Mapping[str, Array]) -> bool:
        """True if they are the runs of a request with these objects."""
        return self.asked is request and self.given is feeds

    def _have(self, feeds: Mapping[str, Array]) -> bool:
        """True if these feeds have the shapes of the feeds before and, unless they are carried, are
        in the same memory."""
        if feeds.keys() != self.feeds.keys():
            return False
        pairs = {name: (array, self.feeds[name]) for name, array in feeds.items()}
        return all(
            a.shape == b.shape and (name in self.asked.carried or a.ctypes.data == b.ctypes.data)
            for name, (a, b) in pairs.items()
        )

    def begin(self) -> None:
        """Sets the inputs of the first run."""
        for name in self.asked.carried:
            self.feeds[name][...] = self.given[name]

    def take(self, number: int, slots: Mapping[str, Slot], room: Room) -> None:
        """Keeps the results of a run, in memory of `room` taken at the first run."""
        if not self.slots:
            names = [name for name in self.asked.fetch if name in slots]
            arrays = [slots[name].array for name in names]
            specs = [(a.dtype, (self.asked.times, *a.shape)) for a in arrays]
            self.slots = dict(zip(names, room.place(specs), strict=True))
        for name, slot in self.slots.items():
            slot.array[number] = slots[name].array

    def carry(self, outputs: Mapping[str, Array]) -> None:
        """Sets the inputs of the next run; `outputs` are the carried outputs of the last one."""
        for name, output in self.asked.carried.items():
            self.feeds[name][...] = outputs[output]
