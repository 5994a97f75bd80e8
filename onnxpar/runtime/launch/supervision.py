"""Runs generations of ranks that are separate processes, for a launcher that outlives the hosts of
its ranks.

The end of a rank's process tells the launcher what to do:

    exit status 0       it is done, or was not needed
    AGAIN               other ranks are lost, or SIGTERM has asked it to make room: it has left a
                        checkpoint from which the next generation goes on
    killed by a signal  it is lost: its slot may get a new rank
    HOST_GONE           the host of the rank is lost
    any other           the run has failed, and would fail again
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from onnxpar.base.errors import RankError
from onnxpar.runtime.launch.membership import Generation, Membership, Slot

AGAIN = 75
"""The exit status of a rank that asks for the next generation: EX_TEMPFAIL of sysexits.h."""
HOST_GONE = 256
"""Stands for the exit status of a rank whose host is lost. No process ends with this number."""
_BY_SIGNAL = 128
"""A shell exits with this number plus the signal that killed its command."""
_SIGNALS = range(_BY_SIGNAL + 1, _BY_SIGNAL + signal.NSIG)
_LOOK = 0.05
"""Seconds between two looks at the processes."""


class Process(Protocol):
    """A process that runs a rank, such as a `subprocess.Popen`."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[Generation], AbstractContextManager[Sequence[Process]]]
"""A function that starts the ranks of a generation, which find each other and no rank of an earlier
generation. Its context ends after the ranks."""


class Supervisor:
    """Starts generations of ranks, one after the other, until one has done the run.

    members  the slots for ranks, and the limits of restarts
    launch   starts a generation
    look     called again and again; it may let slots of the membership join or leave
    tell     called with a line of text when a generation ends before the run is done
    grace    seconds that ranks get to end after the loss of other ranks, or after SIGTERM; then
             they are killed, and count as lost
    """

    def __init__(
        self,
        members: Membership,
        launch: Launch,
        *,
        look: Callable[[Membership], None] = lambda members: None,
        tell: Callable[[str], None] = lambda text: None,
        grace: float = 60.0,
    ) -> None:
        self._members, self._launch = members, launch
        self._look, self._tell, self._grace = look, tell, grace

    def run(self) -> int:
        """Returns 0 when all ranks of a generation have ended with 0, or the exit status of a rank
        that failed. Errors: RankError if too few slots are left, or generations end for no known
        reason."""
        while True:
            generation = self._members.begin()
            with self._launch(generation) as processes:
                ends = self._run(generation, processes)
            failed = [end.status for end in ends if end.has_failed]
            if failed or all(end.status == 0 for end in ends):
                return failed[0] if failed else 0
            self._prepare_next(generation, ends)

    def _run(self, generation: Generation, processes: Sequence[Process]) -> Sequence[_End]:
        """Waits for the end of a generation; returns how each of its ranks ended."""
        try:
            while _run_on(processes) and not self._has_changed(generation, processes):
                time.sleep(_LOOK)
        finally:
            asked, stuck = self._stop(processes)
        return [
            _End(slot, process.poll() or 0, process in asked, process in stuck)
            for slot, process in zip(generation.slots, processes, strict=True)
        ]

    def _has_changed(self, generation: Generation, processes: Sequence[Process]) -> bool:
        """True if a rank has ended with a status other than 0, or if slots have joined or left: the
        generation must then end."""
        self._look(self._members)
        slots = self._members.slots
        return any(process.poll() for process in processes) or set(slots) != set(generation.slots)

    def _stop(self, processes: Sequence[Process]) -> tuple[Sequence[Process], Sequence[Process]]:
        """Sends SIGTERM to the ranks that still run, and SIGKILL to each rank that outlives the
        grace period. Returns (the ranks that got SIGTERM, the ranks that got SIGKILL). Errors:
        RankError if a rank cannot be killed."""
        asked = _run_on(processes)
        for process in asked:
            process.terminate()
        _wait_for(processes, self._grace)
        stuck = _run_on(processes)
        for process in stuck:
            process.kill()
        _wait_for(processes, self._grace)
        if left := _run_on(processes):
            raise RankError(f"{len(left)} ranks have not ended {self._grace:g} s after SIGKILL")
        return asked, stuck

    def _prepare_next(self, generation: Generation, ends: Sequence[_End]) -> None:
        """Called after a generation that has not done the run: gives up lost slots, and tells the
        user. A rank that had to be killed counts as lost only if nothing else explains the end of
        the generation. Errors: RankError without an explanation or a restart left."""
        members = self._members
        gone = {end.slot.host for end in ends if end.status == HOST_GONE and not end.was_stuck}
        members.leave([slot for slot in members.slots if slot.host in gone])
        killed = [e.slot for e in ends if e.was_killed and e.slot.host not in gone]
        stuck = [e.slot for e in ends if e.was_stuck and not (killed or gone)]
        lost = killed + stuck
        has_changed = set(members.slots) != set(generation.slots)
        has_room = members.lose(lost) if lost or not has_changed else True
        if not (lost or has_changed or has_room):
            raise RankError(
                f"generation {generation.number} has ended without a lost rank, and --max-restarts "
                f"{members.max_restarts} is used up; the logs of the ranks say why"
            )
        joined = [slot for slot in members.slots if slot not in generation.slots]
        each = [f"the rank of slot {slot} died" for slot in lost]
        each += [f"{host} is lost" for host in sorted(gone)]
        each += [f"{slot} joins" for slot in joined]
        left = len(members.slots)
        self._tell(
            f"generation {generation.number} has ended: {', '.join(each) or 'no slot is lost'}; "
            f"{left} slot{' goes' if left == 1 else 's go'} on"
        )


@dataclass(frozen=True)
class _End:
    """How a rank ended.

    slot       where it ran
    status     its exit status
    was_asked  True if it got SIGTERM from the supervisor
    was_stuck  True if it outlived the grace period, and was killed
    """

    slot: Slot
    status: int
    was_asked: bool
    was_stuck: bool

    @property
    def was_killed(self) -> bool:
        """True if a signal that the supervisor did not send killed the rank, on whatever host."""
        is_signal = self.status < 0 or self.status in _SIGNALS
        return is_signal and not self.was_stuck and not self._has_obeyed

    @property
    def has_failed(self) -> bool:
        """True if the rank failed for a reason of its own, so that a restart would fail again."""
        is_known = self.status in (0, AGAIN, HOST_GONE) or self._has_obeyed
        return not (is_known or self.was_killed or self.was_stuck)

    @property
    def _has_obeyed(self) -> bool:
        """True if SIGTERM from the supervisor killed the rank, which happens before the rank
        handles that signal."""
        by_signal = (-signal.SIGTERM, _BY_SIGNAL + signal.SIGTERM)
        return self.was_asked and self.status in by_signal


def _run_on(processes: Sequence[Process]) -> list[Process]:
    """The processes that still run."""
    return [process for process in processes if process.poll() is None]


def _wait_for(processes: Sequence[Process], seconds: float) -> None:
    """Waits until all processes have ended, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while _run_on(processes) and time.monotonic() < deadline:
        time.sleep(_LOOK)
