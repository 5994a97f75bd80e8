"""A rank's process, which a session starts, and nobody else.

Nothing heavy is imported here before the watch stands, so that the rank ends with its parent at any
time of its life.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from onnxpar.runtime.log import describe, log
from onnxpar.runtime.wire import Closed, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from onnxpar.runtime.groups import World

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves the session at the other end of the inherited sockets until it closes them."""
    parent, work, control, inputs, outputs = map(int, sys.argv[1:])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    watch = Watch(Wire(socket.socket(fileno=control)))
    threading.Thread(target=watch.run, daemon=True, name="onnxpar-watch").start()
    wire = Wire(socket.socket(fileno=work))
    try:
        from onnxpar.runtime.server import serve

        serve(wire, watch, inputs, outputs)
    except Closed:
        sys.exit(0)
    except Exception as error:  # the outermost boundary: whatever it is, the session must hear it
        log(error)
        watch.abort(f"rank {watch.rank} failed: {describe(error)}")
        _report(wire, describe(error))
        sys.exit(1)


class Watch:
    """What a rank hears while it is busy: pings, an abort, a stop, the end of its parent."""

    def __init__(self, control: Wire) -> None:
        self.rank = -1
        self.stop: Callable[[int], None] | None = None
        self._control = control
        self._world: World | None = None
        self._aborted: str | None = None
        self._lock = threading.Lock()

    def join(self, world: World) -> None:
        """From now on, an abort reaches this world; one that came before reaches it now."""
        with self._lock:
            self._world = world
            if self._aborted is not None:
                world.abort(self._aborted)

    def abort(self, message: str) -> None:
        """Makes the rank's collectives fail."""
        with self._lock:
            self._aborted = message
            if self._world is not None:
                self._world.abort(message)

    def run(self) -> None:
        """Answers the session; ends the process when the session has closed its end."""
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
    """Lets the kernel kill this process, even a stopped one, when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _report(wire: Wire, text: str) -> None:
    """Tells the session, and waits until it has heard."""
    try:
        wire.send({"error": text})
        wire.receive()
    except Closed:
        return
