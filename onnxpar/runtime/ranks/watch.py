"""A thread of a rank that listens to the session while the rank computes."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from onnxpar.runtime.ranks.wire import Closed, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnxpar.runtime.ranks.groups import World


class Watch:
    """A thread of a rank that listens to the session while the rank computes: answers pings, aborts
    collectives, stops a run, and ends the process when the session has ended.

    stop  ends the run of a call, by its number; None: no run can be ended
    """

    def __init__(self, control: Wire, rank: int) -> None:
        self.rank = rank
        self.stop: Callable[[int], None] | None = None
        self._control = control
        self._world: World | None = None
        self._aborted: str | None = None
        self._lock = threading.Lock()

    def join(self, world: World) -> None:
        """Tells this thread the rank's world, in which `abort` makes collectives fail; an abort
        that came earlier is applied now."""
        with self._lock:
            self._world = world
            if self._aborted is not None:
                world.abort(self._aborted)

    def abort(self, message: str) -> None:
        """Makes the rank's collectives, running and later, fail with this message."""
        with self._lock:
            self._aborted = message
            if self._world is not None:
                self._world.abort(message)

    def run(self) -> None:
        """The function of the thread: answers the session's messages; ends the process when the
        session closes its end of the connection."""
        try:
            while True:
                message = self._control.receive()
                stop = self.stop
                if message["do"] == "abort":
                    self.abort(message["message"])
                elif message["do"] == "stop" and stop is not None:
                    stop(message["call"])
                self._control.send({"alive": True})
        except Closed:
            os._exit(0)
