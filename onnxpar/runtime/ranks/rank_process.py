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

from onnxpar.base.errors import RankError
from onnxpar.base.memory_file import make_file
from onnxpar.runtime.ranks.doorbell import Doorbell
from onnxpar.runtime.ranks.log import Log
from onnxpar.runtime.ranks.wire import Closed, Message, Wire, pair

T = TypeVar("T")

BOOT = """
import sys
sys.path[:] = filter(None, sys.path)
from importlib import import_module
from importlib.util import find_spec, module_from_spec
sys.modules["onnxpar"] = module_from_spec(find_spec("onnxpar"))
import_module("onnxpar.MODULE").main()
"""
"""The script with which a process runs a module of this package. It does not run
`onnxpar/__init__.py`, which saves 0.4 s and the compiler's memory on each rank. It imports nothing
from the working folder, as if PYTHONSAFEPATH of Python 3.11 were set."""


def command(module: str) -> list[str]:
    """Returns the command that runs the `main` of a module of this package in a new process."""
    return [sys.executable, "-c", BOOT.replace("MODULE", module)]


@dataclass
class RankProcess:
    """A rank's process, and the session's connections to it.

    work     the connection for calls
    control  the connection to its watch thread
    outputs  the file descriptor of the shared memory for its outputs
    log      the files of its output
    silence  seconds since its last message
    reply    its answer to the current call, once it has arrived
    """

    process: subprocess.Popen[bytes]
    work: Wire
    control: Wire
    outputs: int
    log: Log
    silence: float = 0.0
    reply: Message | None = None

    @staticmethod
    def start(rank: int, log: Log, bell: Doorbell, inputs: int, lasting: int) -> RankProcess:
        """Starts a process, which then waits for its first message. `inputs` and `lasting` are the
        file descriptors of the shared memory for inputs."""
        outputs = make_file("onnxpar-outputs")
        work, its_work = pair()
        control, its_control = pair()
        with its_work, its_control:
            ends = [its_work.fileno(), its_control.fileno()]
            handed = [*ends, bell.fd, inputs, lasting, outputs]
            numbers = [os.getpid(), *handed, rank, bell.ranks, int(bell.spins)]
            process = subprocess.Popen(
                [*command("runtime.ranks.worker"), *map(str, numbers)],
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=log.stdout,
                stderr=log.stderr,
                env=environment(),
            )
        return RankProcess(process, work, control, outputs, log)

    def limit(self, seconds: float) -> None:
        """Makes it an error if a message cannot be sent within `seconds`."""
        self.work.limit(seconds)
        self.control.limit(seconds)

    def send_control(self, message: Message) -> None:
        """Sends a message to the rank's watch thread. Ignores a closed connection, which the next
        read from `work` reports."""
        try:
            self.control.send(message)
        except Closed:
            return

    def fate(self) -> str | None:
        """Returns a text that says how the process ended, or that a signal has stopped it; None
        while it runs."""
        code = self.process.poll()
        if code is None:
            return "is stopped by a signal" if self._is_stopped() else None
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in {*signal.Signals} else "a signal"
        return f"was killed by {name} (signal {-code})"

    def wait(self, seconds: float) -> bool:
        """Waits for the end of the process, at most `seconds`. Returns True if it has ended."""
        try:
            self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def release(self) -> None:
        """Closes the connections, the shared memory and the log of a rank that has ended."""
        self.work.close()
        self.control.close()
        os.close(self.outputs)
        self.log.close()

    def _is_stopped(self) -> bool:
        """True if a signal such as SIGSTOP has stopped the process."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"


def call_in_lasting_thread(function: Callable[[], T], end: threading.Event) -> T:
    """Calls the function in a new thread, which lives until `end` is set; returns its result.

    Processes that a thread starts must not be started by a thread of the user: Linux sends them
    their parent-death signal when that thread ends, even if this process continues. Errors:
    RankError for an OSError.
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


def environment() -> dict[str, str]:
    """Returns the environment for a rank's process: this process's environment, with its import
    path as PYTHONPATH."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
