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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from onnxpar.base.errors import RankError
from onnxpar.runtime.launch.supervision import AGAIN, HOST_GONE
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.ranks.redirect import HEAD_START
from onnxpar.runtime.session.bundle_files import ranks_text

GRACE = HEAD_START / 2
"""Seconds that other ranks get to end by themselves after one has failed. Fewer than HEAD_START: a
rank that fails for the same reason as rank 0 is ended before it repeats the report."""
END = 5.0
"""Seconds that agents get to end, after the grace period of their ranks."""
TICK = 0.1
SILENCE = 2.0
"""Seconds after which `Launcher.close` says which ranks it waits for."""
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
"""The ssh command: asks for no password, and notices within 15 seconds that a host is gone."""
PASSED_ON = ("ONNXPAR_", "OMP_")
"""Environment variables whose names begin like this go to all ranks."""


@dataclass(frozen=True)
class Command:
    """The command that each rank runs.

    words        the command and its arguments
    folder       where it runs; the same path on each host
    environment  variables added to the variables of the ssh login
    python       the Python on the hosts that has onnxpar
    grace        seconds from SIGTERM to SIGKILL for ranks that must end
    """

    words: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    python: str = sys.executable
    grace: float = 40.0


@dataclass
class _Agent:
    """The agent, a process on a host that runs the host's ranks for the launcher.

    ranks        their numbers
    lines        the beginning of an unfinished line of the agent's output
    said         the end of its standard error
    has_started  True once it has sent a message
    running      the ranks that still run
    lost         the reason if the host is lost, else empty
    """

    host: str
    process: subprocess.Popen[bytes]
    ranks: Sequence[int]
    lines: bytes = b""
    said: bytes = b""  # on its standard error
    has_started: bool = False
    running: set[int] = field(default_factory=set)
    lost: str = ""

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to the agent; does nothing if the agent has ended."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:
            return
        with suppress(BrokenPipeError):  # the end of the process says why
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()


class Launcher(Closing):
    """Runs a command as ranks on several hosts, each by an agent, over ssh.

    ranks    the numbers of the ranks on each host
    on_loss  called with each host that is lost, and the reason

    The output of ranks goes to the output of this process. The end of the `with` block ends the
    ranks.
    """

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        command: Command,
        on_loss: Callable[[str, str], None] = lambda host, why: None,
    ) -> None:
        self.ends: dict[int, int] = {}
        """The exit status of each rank that has ended: -N after signal N, or HOST_GONE."""
        self._selector = selectors.DefaultSelector()
        self._agents: list[_Agent] = []
        self._grace = command.grace
        self._on_loss = on_loss
        secret = {"ONNXPAR_KEY": os.environ.get("ONNXPAR_KEY") or secrets.token_hex(16)}
        asked = {
            "command": list(command.words),
            "folder": command.folder,
            "size": sum(map(len, ranks.values())),
            "environment": {**command.environment, **secret},
            "grace": command.grace,
        }
        for host, own in ranks.items():
            agent = _Agent(host, start_agent(host, command.python), own, running=set(own))
            self._agents.append(agent)
            for pipe in (agent.process.stdout, agent.process.stderr):
                assert pipe is not None
                self._selector.register(pipe, selectors.EVENT_READ, agent)
            agent.send({**asked, "ranks": list(own)})

    @property
    def lost(self) -> dict[str, str]:
        """For each lost host, by name, the reason for its loss."""
        return {agent.host: agent.lost for agent in self._agents if agent.lost}

    def look(self, seconds: float = 0.0) -> None:
        """Waits at most `seconds` for messages of agents, and handles them. Errors: RankError if a
        host cannot start its ranks."""
        for key, _ in self._selector.select(seconds):
            self._read(key)

    def send_signal(self, rank: int, number: int) -> None:
        """Makes the rank's agent send it signal `number`, if the rank still runs."""
        agent = next(agent for agent in self._agents if rank in agent.ranks)
        if rank in agent.running:
            agent.send({"signals": [[rank, number]]})

    def wait(self) -> int:
        """Waits for all ranks. Returns 0 if all end with 0; else the exit status of the first rank
        that failed, after the others have ended. Errors: RankError if a host cannot be reached or
        is lost."""
        until = None
        while any(agent.running for agent in self._agents):
            self.look(TICK)
            for reason in self.lost.values():
                raise RankError(reason)
            if until is None and any(self.ends.values()):
                until = time.monotonic() + GRACE
            if until is not None and time.monotonic() > until:
                break
        failed = ((rank, status) for rank, status in self.ends.items() if status != 0)
        rank, status = next(failed, (0, 0))
        if status == 0:
            return 0
        self.close()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        host = next(agent.host for agent in self._agents if rank in agent.ranks)
        if status == AGAIN:
            how += "; with --min-ranks, the ranks that are left start again"
        print(f"onnxpar: rank {rank} on host {host} ended first, {how}", file=sys.stderr)
        return status if status > 0 else 128 - status

    def _read(self, key: selectors.SelectorKey) -> None:
        """Reads output of an agent, and handles each whole line; notices its end."""
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
        """Records that an agent's host is lost, with the last line of its standard error as the
        reason."""
        try:
            agent.process.wait(END)
        except subprocess.TimeoutExpired:
            agent.process.kill()
        assert agent.process.stderr is not None
        os.set_blocking(agent.process.stderr.fileno(), False)
        said = (agent.said + (agent.process.stderr.read() or b"")).decode(errors="replace").strip()
        host, ranks = agent.host, ranks_text(sorted(agent.running))
        why = said.splitlines()[-1].rstrip(".") if said else "the connection ended"
        if agent.has_started:
            agent.lost = f"host {host}, with {ranks}, is lost: {why}"
        else:
            agent.lost = (
                f"host {host}, for {ranks}, cannot be reached: {why}; `ssh {host}` must work "
                "without a password, and Python with onnxpar must be there (--python)"
            )
        self.ends |= dict.fromkeys(sorted(agent.running), HOST_GONE)
        agent.running.clear()
        self._on_loss(host, agent.lost)

    def _handle(self, agent: _Agent, line: bytes) -> None:
        """Handles a message of an agent: passes on the address of the hub and output of ranks,
        notes the ends of ranks. Errors: RankError if the agent cannot start its ranks."""
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):  # printed by a login script
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
            stream.flush()
            stream.buffer.write(base64.b64decode(message["text"]))
            stream.buffer.flush()
        if "ended" in message:
            agent.running.discard(message["ended"])
            self.ends.setdefault(message["ended"], message["status"])

    def close(self) -> None:
        """Ends all ranks that still run, and passes on their last output."""
        try:
            for agent in self._agents:
                agent.send({"end": True})
                assert agent.process.stdin is not None
                with suppress(BrokenPipeError):
                    agent.process.stdin.close()
            start, has_told = time.monotonic(), False
            while self._selector.get_map() and time.monotonic() < start + self._grace + END:
                with suppress(RankError):
                    self.look(TICK)
                if not has_told and time.monotonic() > start + SILENCE:
                    has_told = True
                    self._tell_who_runs()
        finally:
            for agent in self._agents:
                if self._selector.get_map():
                    agent.process.kill()
                agent.process.wait()

    def _tell_who_runs(self) -> None:
        """Prints which ranks `close` waits for."""
        each = [
            f"{ranks_text(sorted(agent.running))} on host {agent.host}"
            for agent in self._agents
            if agent.running
        ]
        if each:
            print(
                f"onnxpar: waiting up to {self._grace:g} s (--grace) for {' and '.join(each)} to "
                "end",
                file=sys.stderr,
                flush=True,
            )


def is_here(host: str) -> bool:
    """True if a host name stands for this host."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def passed_on() -> dict[str, str]:
    """Returns the environment variables of this process that go to all ranks."""
    return {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}


def start_agent(host: str, python: str) -> subprocess.Popen[bytes]:
    """Starts an agent on a host, through ssh unless that is this host; returns its process. Errors:
    RankError if it cannot be started."""
    words = [python, "-m", "onnxpar.runtime.launch.agent"]
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
    except OSError as error:
        if is_here(host):
            raise RankError(f"cannot run {python}: {error.strerror}; see --python") from error
        raise RankError(
            f"host {host} cannot be reached: {error.strerror}: {command[0]} (on Debian and Ubuntu: "
            "apt install openssh-client)"
        ) from error
