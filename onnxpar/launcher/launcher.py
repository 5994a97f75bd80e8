"""Starts the same command as ranks on several hosts, over ssh, and ends them together."""

from __future__ import annotations

import base64
import json
import os
import secrets
import selectors
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from onnxpar.base.interrupts import Terminated
from onnxpar.errors import RankError
from onnxpar.launcher.agent import GRACE as AGENT_GRACE
from onnxpar.launcher.slots import Slots, ranks_of

GRACE = 5.0
"""Seconds that other ranks get to end by themselves, after one has failed: they know why."""
END = 10.0
"""Seconds that hosts get to end their ranks."""
TICK = 0.1
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
"""Asks for no password, and notices within 15 seconds that a host is gone."""
PASSED_ON = ("ONNXPAR_", "OMP_")
"""Environment variables of these names go to all ranks."""


@dataclass
class _Agent:
    """What runs the ranks of a host."""

    slots: Slots
    process: subprocess.Popen[bytes]
    ranks: set[int]
    lines: bytes = b""
    said: bytes = b""  # on its standard error
    has_started: bool = False
    running: set[int] = field(default_factory=set)

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # how it ends says why
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()


class Launcher:
    """A launch. `command` runs on each host of `slots` once for each of its ranks, in the folder
    `folder`, with the variables `environment` in addition to those of ssh's login; `python` is the
    Python with onnxpar on these hosts. The output of all ranks goes to that of this process. After
    a signal, ranks have `grace` seconds to end."""

    def __init__(
        self,
        slots: Sequence[Slots],
        command: Sequence[str],
        *,
        folder: str,
        environment: Mapping[str, str],
        python: str = sys.executable,
        grace: float = AGENT_GRACE,
    ) -> None:
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._failure: tuple[int, int] | None = None  # a rank, and its status
        self._until: float | None = None
        size = sum(each.count for each in slots)
        secret = {"ONNXPAR_KEY": os.environ.get("ONNXPAR_KEY") or secrets.token_hex(16)}
        asked = {"command": list(command), "folder": folder, "size": size}
        asked["environment"] = {**environment, **secret}
        self._agents: list[_Agent] = []
        for each, ranks in zip(slots, ranks_of(slots), strict=True):
            agent = _Agent(each, _start(each.host, python), set(ranks), running=set(ranks))
            self._agents.append(agent)
            for pipe in (agent.process.stdout, agent.process.stderr):
                assert pipe is not None
                self._selector.register(pipe, selectors.EVENT_READ, agent)
            agent.send({**asked, "ranks": ranks})

    def wait(self) -> int:
        """Returns 0 when all ranks have ended so; else the status of the first rank that failed,
        after the others have ended. Errors: RankError if a host cannot be reached or is lost."""
        grace = AGENT_GRACE
        try:
            while any(agent.running for agent in self._agents):
                for key, _ in self._selector.select(TICK):
                    self._read(key)
                if self._until is not None and time.monotonic() > self._until:
                    break
        except (KeyboardInterrupt, Terminated):
            grace = self._grace
            raise
        finally:
            self._end(grace)
        if self._failure is None:
            return 0
        rank, status = self._failure
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        host = next(each.slots.host for each in self._agents if rank in each.ranks)
        print(f"onnxpar: rank {rank} on host {host} {how}", file=sys.stderr)
        return status if status > 0 else 128 - status

    def _read(self, key: selectors.SelectorKey) -> None:
        agent: _Agent = key.data
        data = os.read(key.fd, 65536)
        if key.fileobj is agent.process.stderr:
            agent.said = (agent.said + data)[-4096:]
        if not data:
            self._selector.unregister(key.fileobj)
            if key.fileobj is agent.process.stdout and agent.running:
                self._lose(agent)
            return
        if key.fileobj is agent.process.stdout:
            *lines, agent.lines = (agent.lines + data).split(b"\n")
            for line in lines:
                self._handle(agent, line)

    def _lose(self, agent: _Agent) -> None:
        """Errors: RankError, always."""
        agent.process.wait(END)
        assert agent.process.stderr is not None
        os.set_blocking(agent.process.stderr.fileno(), False)
        said = (agent.said + (agent.process.stderr.read() or b"")).decode(errors="replace").strip()
        host, ranks = agent.slots.host, ", ".join(map(str, sorted(agent.running)))
        why = said.splitlines()[-1] if said else "the connection ended"
        if agent.has_started:
            raise RankError(f"host {host}, with rank {ranks}, is lost: {why}")
        raise RankError(
            f"host {host}, for rank {ranks}, cannot be reached: {why}; `ssh {host}` must work "
            "without a password, and Python with onnxpar must be there (--python)"
        )

    def _handle(self, agent: _Agent, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:  # printed by a login script
            return
        agent.has_started = True
        if "error" in message:
            raise RankError(message["error"])
        if "hub" in message:
            for other in self._agents:
                if other is not agent:
                    other.send({"hub": message["hub"]})
        if "text" in message:
            stream = sys.stdout if message["stream"] == 1 else sys.stderr
            stream.write(base64.b64decode(message["text"]).decode(errors="backslashreplace"))
            stream.flush()
        if "ended" in message:
            self._note_end(agent, message["ended"], message["status"])

    def _note_end(self, agent: _Agent, rank: int, status: int) -> None:
        agent.running.discard(rank)
        if status != 0 and self._failure is None:
            self._failure = rank, status
            self._until = time.monotonic() + GRACE

    def _end(self, grace: float) -> None:
        """Ends all ranks that still run, and passes on what they print meanwhile."""
        for agent in self._agents:
            agent.send({"end": True, "grace": grace})
        end = time.monotonic() + END + grace
        while any(agent.running for agent in self._agents) and time.monotonic() < end:
            for key, _ in self._selector.select(TICK):
                try:
                    self._read(key)
                except RankError:  # it is being ended anyway
                    key.data.running.clear()
        for agent in self._agents:
            assert agent.process.stdin is not None
            with suppress(BrokenPipeError):
                agent.process.stdin.close()
        for agent in self._agents:
            try:
                agent.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()


def is_here(host: str) -> bool:
    """True if a name of a host means this one."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def passed_on() -> dict[str, str]:
    """Returns the variables of this process that go to all ranks."""
    return {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}


def _start(host: str, python: str) -> subprocess.Popen[bytes]:
    """Starts an agent on a host."""
    words = [python, "-m", "onnxpar.launcher.agent"]
    if path := os.environ.get("PYTHONPATH"):
        words = ["env", f"PYTHONPATH={path}", *words]
    command = words if is_here(host) else [*SSH, host, shlex.join(words)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise RankError(
            f"host {host} cannot be reached, because there is no {command[0]} here (on Debian and "
            "Ubuntu: apt install openssh-client)"
        ) from error
