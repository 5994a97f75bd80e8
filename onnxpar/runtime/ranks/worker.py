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
from onnxpar.runtime.ranks.watch import Watch
from onnxpar.runtime.ranks.wire import Closed, Wire

if TYPE_CHECKING:
    pass

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves the session at the other end of the inherited sockets, until the session closes
    them."""
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
            from onnxpar.runtime.ranks.rank_loop import serve

        line = Line(wire, Doorbell(bell, ranks, bool(spins)), rank)
        serve(line, watch, files)
    except Closed:
        sys.exit(0)
    except Exception as error:  # the outermost boundary: the session must get any error
        log(error)
        watch.abort(f"rank {watch.rank} failed: {describe(error)}")
        _report(wire, describe(error))
        sys.exit(1)


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
