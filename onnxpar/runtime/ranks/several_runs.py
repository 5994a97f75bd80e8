"""Several runs of a rank in one call, where outputs of each run are inputs of the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.runtime.ranks.arena import Room, Slot
from onnxpar.runtime.ranks.planned_run import Places, PlannedRun, Request


@dataclass
class SeveralRuns:
    """The runs of one request.

    request, given  the request, and the feeds of its first run
    once, feeds     the request and the feeds of each single run; inputs that outputs are carried to
                    are copies, because others may read the caller's memory
    planned         the record that decides whether `continued` accepts a request
    slots           the results of all runs, stacked along a first dimension
    """

    request: Request
    given: Mapping[str, Array]
    once: Request
    feeds: Mapping[str, Array]
    planned: PlannedRun
    slots: dict[str, Slot] = field(default_factory=dict)

    @staticmethod
    def of(request: Request, feeds: Mapping[str, Array]) -> SeveralRuns:
        """Returns the runs of a request, with these feeds for the first run."""
        once = replace(request, times=1)
        own = {name: feeds[name].copy() for name in request.carried}
        planned = PlannedRun.of(once, feeds, _places(request, feeds))
        return SeveralRuns(request, feeds, once, {**feeds, **own}, planned)

    def continued(self, request: Request, feeds: Mapping[str, Array]) -> SeveralRuns | None:
        """Returns the runs of another request, in the same memory; None if its single runs differ
        from these."""
        once = replace(request, times=1)
        if not self.planned.is_again(once, feeds, _places(request, feeds)):
            return None
        return replace(self, request=request, given=feeds, slots={})

    def begin(self) -> None:
        """Copies the carried inputs of the first run to where runs read them."""
        for name in self.request.carried:
            self.feeds[name][...] = self.given[name]

    def take(self, number: int, slots: Mapping[str, Slot], room: Room) -> None:
        """Copies the results of run `number` to their places among the results, in memory of `room`
        that is taken at the first run."""
        if not self.slots:
            names = [name for name in self.request.fetch if name in slots]
            arrays = [slots[name].array for name in names]
            specs = [(a.dtype, (self.request.times, *a.shape)) for a in arrays]
            self.slots = dict(zip(names, room.place(specs), strict=True))
        for name, slot in self.slots.items():
            slot.array[number] = slots[name].array

    def carry(self, outputs: Mapping[str, Array]) -> None:
        """Copies the carried outputs of a run to where the next run reads them as inputs."""
        for name, output in self.request.carried.items():
            self.feeds[name][...] = outputs[output]


def _places(request: Request, feeds: Mapping[str, Array]) -> Places:
    """Returns the addresses of the inputs that are not carried, by name: their memory is read in
    place in each run."""
    fixed = {name: a for name, a in feeds.items() if name not in request.carried}
    return {name: a.ctypes.data for name, a in fixed.items() if isinstance(a, np.ndarray)}
