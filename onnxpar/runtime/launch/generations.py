"""Starts a command as ranks on several hosts again and again, while hosts are lost and return. A
generation is one such start, with the hosts that are there at that time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from onnxpar.runtime.launch.launch import GENERATION
from onnxpar.runtime.launch.launcher import Command, Launcher, start_agent
from onnxpar.runtime.launch.membership import Generation, Membership, slots_of
from onnxpar.runtime.launch.slots import Slots
from onnxpar.runtime.launch.supervision import Supervisor

FIRST_PROBE = 5.0
"""Seconds until a lost host is probed for the first time; they double each time that the host is
lost."""
LONGEST_PROBE = 30.0
"""The most seconds until a lost host is probed."""


@dataclass(frozen=True)
class _Rank:
    """A rank of a launch, with the part of Popen's interface that `Supervisor` calls."""

    launch: Launcher
    number: int

    def poll(self) -> int | None:
        self.launch.look()
        return self.launch.ends.get(self.number)

    def terminate(self) -> None:
        self.launch.send_signal(self.number, signal.SIGTERM)

    def kill(self) -> None:
        self.launch.send_signal(self.number, signal.SIGKILL)


@dataclass
class _LostHost:
    """A host that was lost and may return.

    times  how often it was lost
    at     when to probe it next (time.monotonic)
    probe  the probe that runs now; None: none does
    """

    times: int = 0
    at: float = 0.0
    probe: subprocess.Popen[bytes] | None = None


class Generations:
    """Runs a command as ranks on hosts; when ranks die, starts it again in the remaining slots.

    slots         how many ranks each host has room for
    command       what to run
    min_ranks     the least number of ranks to go on with
    max_restarts  how often to restart ranks that die

    Errors: InputError for limits out of range.
    """

    def __init__(
        self, slots: Sequence[Slots], command: Command, min_ranks: int, max_restarts: int
    ) -> None:
        self._counts = {each.host: each.count for each in slots}
        self._command = command
        self._members = Membership(slots_of(self._counts), min_ranks, max_restarts)
        self._lost: dict[str, _LostHost] = {}

    def run(self) -> int:
        """Runs generations until one is done. Returns 0 if all ranks of that generation are done,
        or the status of a rank that failed. Errors: RankError if too few ranks are left, or a host
        cannot start its ranks."""
        supervisor = Supervisor(
            self._members,
            self._launched,
            look=self._look,
            tell=_tell,
            grace=self._command.grace,
        )
        try:
            return supervisor.run()
        finally:
            for host in self._lost.values():
                _drop(host)

    @contextmanager
    def _launched(self, generation: Generation) -> Iterator[Sequence[_Rank]]:
        """Context with the running ranks of a generation, which find each other through their
        hosts' agents."""
        ranks: dict[str, list[int]] = {}
        for rank, slot in enumerate(generation.slots):
            ranks.setdefault(slot.host, []).append(rank)
        variables = {**self._command.environment, GENERATION: str(generation.number)}
        command = replace(self._command, environment=variables)
        with Launcher(ranks, command, self._note_loss) as launch:
            yield [_Rank(launch, rank) for rank in range(len(generation.slots))]

    def _note_loss(self, host: str, why: str) -> None:
        """Tells the user that a host is lost, and sets the time of its next probe."""
        _tell(f"{why}; the other ranks have {self._command.grace:g} s (--grace) to end")
        lost = self._lost.setdefault(host, _LostHost())
        lost.at = time.monotonic() + min(FIRST_PROBE * 2**lost.times, LONGEST_PROBE)
        lost.times += 1

    def _look(self, members: Membership) -> None:
        """Probes lost hosts; a host that answers joins the next generation."""
        there = {slot.host for slot in members.slots}
        for name, host in self._lost.items():
            if name in there:
                continue
            if host.probe is None:
                if time.monotonic() > host.at:
                    host.probe = self._probe(name)
            elif host.probe.poll() is not None:
                has_answered = host.probe.returncode == 0
                _drop(host)
                host.at = time.monotonic() + FIRST_PROBE
                if has_answered:
                    members.join(slots_of({name: self._counts[name]}))

    def _probe(self, host: str) -> subprocess.Popen[bytes]:
        """Starts an agent without ranks on a host; its exit status 0 says that the host is
        there."""
        probe = start_agent(host, self._command.python)
        assert probe.stdin is not None
        with suppress(BrokenPipeError):
            probe.stdin.write(b'{"ranks": []}\n')
            probe.stdin.close()
        return probe


def _drop(host: _LostHost) -> None:
    """Ends the probe of a host, if one runs."""
    if host.probe is not None:
        host.probe.kill()
        host.probe.wait()
        host.probe = None


def _tell(text: str) -> None:
    print(f"onnxpar: {text}", file=sys.stderr, flush=True)
