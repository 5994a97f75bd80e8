"""The process of one rank on this host, and the session's connections to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from onnxpar.errors import RankError
from onnxpar.runtime.arena import Arena
from onnxpar.runtime.log import Log
from onnxpar.runtime.wire import Closed, Message, Wire, pair

T = TypeVar("T")

BOOT = """
import sys
sys.path[:] = filter(None, sys.path)
from importlib.util import find_spec, module_from_spec
sys.modules["onnxpar"] = module_from_spec(find_spec("onnxpar"))
from onnxpar.runtime.worker import main
main()
"""
"""Starts a rank without `onnxpar/__init__.py`, which saves 0.4 s and the compiler's memory on each
rank. Nothing is imported from the working folder, like with PYTHONSAFEPATH of Python 3.11."""


@dataclass
class RankProcess:
    """A rank's process, its connections to the session, and the seconds that it has been silent."""

    process: subprocess.Popen[bytes]
    work: Wire
    control: Wire
    outputs: Arena
    log: Log
    silence: float = 0.0
    reply: Message | None = None

    @staticmethod
    def start(log: Log, inputs: Arena, timeout: float) -> RankProcess:
        """Starts a process, which waits for its first message. Sends fail after `timeout`
        seconds."""
        outputs = Arena.create("onnxpar-outputs")
        work, its_work = pair(timeout)
        control, its_control = pair(timeout)
        with its_work, its_control:
            handed = [its_work.fileno(), its_control.fileno(), inputs.fd, outputs.fd]
            command = [sys.executable, "-c", BOOT, str(os.getpid())]
            process = subprocess.Popen(
                [*command, *map(str, handed)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=log.stdout,
                stderr=log.stderr,
                env=_environment(),
            )
        return RankProcess(process, work, control, outputs, log)

    def send_control(self, message: Message) -> None:
        """Sends to the rank's watch thread. A lost rank is noticed on its work wire, not here."""
        try:
            self.control.send(message)
        except Closed:
            return

    def fate(self) -> str | None:
        """A text on how the process ended or that it is stopped; None while it runs."""
        code = self.process.poll()
        if code is None:
            return "is stopped by a signal" if self._is_stopped() else None
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in {*signal.Signals} else "a signal"
        return f"was killed by {name} (signal {-code})"

    def wait(self, seconds: float) -> bool:
        """Waits for at most so many seconds; True if the process has ended."""
        try:
            self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def release(self) -> None:
        """Closes the session's resources of an ended rank."""
        self.work.close()
        self.control.close()
        self.outputs.close()
        self.log.close()

    def _is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


def call_in_lasting_thread(function: Callable[[], T], end: threading.Event) -> T:
    """Calls the function in a thread that lives until `end`.

    Children get their parent-death signal when the thread that started them ends, even if the
    process continues. So a thread of the user must not start them.
    """
    results: list[T] = []
    errors: list[OSError] = []
    done = threading.Event()

    def live() -> None:
        try:
            results.append(function())
        except OSError as error:
            errors.append(error)
        finally:
            done.set()
        if not errors:
            end.wait()

    threading.Thread(target=live, daemon=True, name="onnxpar-ranks").start()
    done.wait()
    if errors:
        raise RankError(f"cannot start the ranks: {errors[0]}") from errors[0]
    return results.pop()


def _environment() -> dict[str, str]:
    """The environment of a rank: this process's, with its import path."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
