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
    """Reacts to the session while the rank computes: answers pings, aborts collectives, stops a
    run, and ends with the parent."""

    def __init__(self, control: Wire, rank: int) -> None:
        self.rank = rank
        self.stop: Callable[[int], None] | None = None
        self._control = control
        self._world: World | None = None
        self._aborted: str | None = None
        self._lock = threading.Lock()

    def join(self, world: World) -> None:
        """Sets the world that `abort` acts on; applies an abort that came earlier."""
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
        """Answers the session's messages; ends the process when the session closes its end."""
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
