"""Runs the ranks of one host for `onnxpar launch`: `python -m onnxpar.runtime.launch.agent`.

Reads and writes lines of JSON. The first line of the input says what to run; it carries the secret
of the launch, which therefore appears on no command line. The agent reports what ranks print and
how they end, and sends them signals. At the end of its input, it ends its ranks. Rank 0 writes the
address of its hub to the agent's folder; the launcher passes it on to the agents of other hosts.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxpar.base.own_folder import OwnFolder
from onnxpar.base.write_file import unread

TICK = 0.05
DRAIN = 1.0
"""Longest time, in seconds, to read the pipe of an ended rank that another process holds open."""
HUB = "onnxpar-hub"
LONGEST_LINE = 65536
"""A line of more bytes is passed on in parts."""
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs the ranks that the first line of the input asks for. Returns 0 when all have ended, or 2
    if the host cannot start them."""
    lines = b""
    while b"\n" not in lines:
        data = os.read(0, 65536)
        if not data:
            return 2
        lines += data
    first, rest = lines.split(b"\n", 1)
    try:
        with OwnFolder() as folder:
            Agent(json.loads(first), rest, Path(folder)).run()
    except OSError as error:
        name = f": {os.fsdecode(error.filename)}" if error.filename else ""
        why = f"host {socket.gethostname()} cannot start its ranks: {unread(error)}{name}"
        _say({"error": why})
        return 2
    return 0


class Agent:
    """Runs the ranks of this host for a launcher, which it talks to over its standard input and
    output.

    asked   the first line of the input: command, environment, folder, ranks, size, grace
    rest    the bytes that were read after that line
    folder  where the ranks of this host find the address of rank 0's hub, to which all ranks
            connect
    """

    def __init__(self, asked: Mapping[str, Any], rest: bytes, folder: Path) -> None:
        self._hub = folder / HUB
        self._grace = float(asked.get("grace", 0.0))
        self._has_first = 0 in asked["ranks"]
        self._told = ""
        self._lines = b""
        self._ending: float | None = None
        self._drained: dict[int, float] = {}  # when to stop reading an ended rank's output
        self._unfinished: dict[tuple[int, int], bytes] = {}  # the last line of a rank's stream
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, None)
        self._ranks = {rank: self._start(rank, asked, folder) for rank in asked["ranks"]}
        self._take(rest)
        _say({"started": sorted(self._ranks)})

    def run(self) -> None:
        """Passes on output, messages and ends of ranks until all ranks have ended."""
        while self._ranks:
            for key, _ in self._selector.select(TICK):
                if key.data is None:
                    self._listen()
                else:
                    self._pass_on(key)
            self._tell_hub()
            self._look_at_ranks()

    def _start(self, rank: int, asked: Mapping[str, Any], folder: Path) -> subprocess.Popen[bytes]:
        """Starts the command as one rank, with the environment by which onnxpar knows its number.
        Errors: FileNotFoundError if the launch's folder is not on this host."""
        path = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join(path),
            **asked["environment"],
            "ONNXPAR_RANK": str(rank),
            "ONNXPAR_WORLD_SIZE": str(asked["size"]),
            "ONNXPAR_LOCAL_WORLD_SIZE": str(len(asked["ranks"])),
            "ONNXPAR_STORE": f"file:{folder}",
        }
        if not os.path.isdir(asked["folder"]):
            text = "no folder (a launch runs in the folder of the same name on each host)"
            raise FileNotFoundError(errno.ENOENT, text, asked["folder"])
        process = subprocess.Popen(
            asked["command"],
            cwd=asked["folder"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        for number, pipe in ((1, process.stdout), (2, process.stderr)):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, (rank, number))
        return process

    def _listen(self) -> None:
        """Reads messages of the launcher; when the input ends, ends the ranks."""
        data = os.read(0, 65536)
        if not data:
            self._selector.unregister(0)
            return self._end()
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Obeys each whole line of the input: a new address of the hub, signals to ranks, the order
        to end."""
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "hub" in message:
                self._write_hub(message["hub"])
            for rank, number in message.get("signals", ()):
                if rank in self._ranks:
                    _kill(self._ranks[rank], number)
            if message.get("end"):
                self._end()

    def _write_hub(self, text: str) -> None:
        """Writes the address of rank 0's hub to the file in which this host's ranks look for it;
        removes the file if the text is empty."""
        draft = self._hub.with_name("draft")
        draft.touch(0o600)
        draft.write_text(text)
        draft.rename(self._hub)
        if not text:
            self._hub.unlink()

    def _tell_hub(self) -> None:
        """Sends the address of rank 0's hub to the launcher when it changes: each start of rank 0's
        world has its own address, which stays in the file until all ranks have joined."""
        if not self._has_first:
            return
        text = ""
        with suppress(FileNotFoundError):
            text = self._hub.read_text()
        if text != self._told:
            self._told = text
            _say({"hub": text})

    def _pass_on(self, key: selectors.SelectorKey) -> None:
        """Passes on a rank's output in whole lines, so that lines of ranks do not mix."""
        data = os.read(key.fd, 65536)
        if not data:
            return self._close(key)
        text = self._unfinished.get(key.data, b"") + data
        end = 1 + max(text.rfind(b"\n"), text.rfind(b"\r"))
        if len(text) - end > LONGEST_LINE:
            end = len(text)
        self._unfinished[key.data] = text[end:]
        self._tell(key.data, text[:end])

    def _close(self, key: selectors.SelectorKey) -> None:
        """Passes on the unfinished last line of a stream, and reads no more of it."""
        self._selector.unregister(key.fileobj)
        self._tell(key.data, self._unfinished.pop(key.data, b""))

    def _tell(self, stream: tuple[int, int], text: bytes) -> None:
        """Sends output of a rank to the launcher; `stream` is (rank, 1 for stdout or 2 for
        stderr)."""
        if text:
            rank, number = stream
            _say({"rank": rank, "stream": number, "text": base64.b64encode(text).decode()})

    def _look_at_ranks(self) -> None:
        """Reports ranks that have ended, and kills processes that they leave behind. Kills ranks
        that do not end in time."""
        if self._ending is not None and time.monotonic() > self._ending:
            for process in self._ranks.values():
                _kill(process, signal.SIGKILL)
        for rank, process in list(self._ranks.items()):
            if process.poll() is None:
                continue
            if rank not in self._drained:
                self._drained[rank] = time.monotonic() + DRAIN
                _kill(process, signal.SIGKILL)
            pipes = [k for k in self._selector.get_map().values() if k.data and k.data[0] == rank]
            if pipes and time.monotonic() < self._drained[rank]:
                continue
            for pipe in pipes:
                self._close(pipe)
            del self._ranks[rank]
            _say({"ended": rank, "status": process.returncode})

    def _end(self) -> None:
        """Asks all ranks to end (SIGTERM); after the grace period, `_look_at_ranks` kills the ranks
        that still run."""
        if self._ending is not None:
            return
        self._ending = time.monotonic() + self._grace
        for process in self._ranks.values():
            _kill(process, signal.SIGTERM)


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends signal `number` to a rank and to all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_with_parent() -> None:
    """Runs in a rank's process: makes Linux send it SIGTERM when the agent ends for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _say(message: Mapping[str, Any]) -> None:
    """Sends a message to the launcher; does nothing if the launcher has ended."""
    data = json.dumps(message).encode() + b"\n"
    try:
        _write(data)
    except BrokenPipeError:
        return


def _write(data: bytes) -> None:
    """Writes all of `data` to standard output."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    sys.exit(main())
