"""The entry point of a rank's process, which a session starts.

Imports nothing large before the watch thread runs, so that the rank ends with its parent even while
it starts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from onnxpar.base.quick_imports import quick_imports
from onnxpar.runtime.ranks.log import describe, log
from onnxpar.runtime.ranks.wire import Closed, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnxpar.runtime.ranks.groups import World

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves the session at the other end of the inherited sockets until the session closes the
    sockets."""
    parent, work, control, bell, *files, rank, ranks, spins = map(int, sys.argv[1:])
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # which may go to all processes of a job
        signal.signal(number, signal.SIG_IGN)  # the parent handles them
    watch = Watch(Wire(socket.socket(fileno=control)), rank)
    threading.Thread(target=watch.run, daemon=True, name="onnxpar-watch").start()
    wire = Wire(socket.socket(fileno=work))
    try:
        with quick_imports():
            from onnxpar.runtime.ranks.doorbell import Doorbell, Line
            from onnxpar.runtime.ranks.server import serve

        line = Line(wire, Doorbell(bell, ranks, bool(spins)), rank)
        serve(line, watch, files)
    except Closed:
        sys.exit(0)
    except Exception as error:  # the outermost boundary: the session must get any error
        log(error)
        watch.abort(f"rank {watch.rank} failed: {describe(error)}")
        _report(wire, describe(error))
        sys.exit(1)


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


def _die_with(parent: int) -> None:
    """Makes Linux kill this process, even if it is stopped by a signal, when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _report(wire: Wire, text: str) -> None:
    """Sends an error to the session, and waits until the session closes the connection."""
    try:
        wire.send({"error": text})
        wire.receive()
    except Closed:
        return
