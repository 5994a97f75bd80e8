"""Starts, calls, watches and ends the processes of a session's ranks, all together."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from onnxpar.base.errors import RankError, RunError
from onnxpar.runtime.ranks.arena import Arena
from onnxpar.runtime.ranks.rank_process import RankProcess
from onnxpar.runtime.ranks.started_ranks import CLOSING, started
from onnxpar.runtime.ranks.wire import Closed, Message, Packed, Wire
from onnxpar.runtime.states.lasting_memory import LastingMemory

GRACE = 2.0
"""Seconds that the other ranks get to report what they were doing, after one rank failed."""
MOMENT = 0.01
"""Seconds after which a waiting session looks again whether a rank has ended."""
AGAIN: Message = {"again": True}
"""Stands for an answer that equals the rank's last answer."""


class Processes:
    """The processes of a session's ranks, one for each rank.

    If a call fails on one rank, all ranks abandon it and return to their state before the call. If
    a rank dies, does not respond or disagrees with others, all processes are ended, and every later
    call fails with the same reason. A rank must respond within `timeout` seconds; a thread of each
    rank responds even while the rank computes.
    """

    def __init__(
        self, path: Path, size: int, timeout: float, log_dir: str | os.PathLike[str] | None
    ) -> None:
        self._started = started(size, log_dir)
        self.ranks, self._bell = self._started.ranks, self._started.bell
        self.inputs = Arena(self._started.inputs)
        self.lasting = LastingMemory(self._started.lasting)
        self.outputs = [Arena(rank.outputs) for rank in self.ranks]
        self._path = path
        self._timeout = timeout
        self._tick = min(1.0, timeout / 8)
        self._owner = os.getpid()
        self._closed: str | None = None
        self._calls = 0
        self._poll = select.poll()
        self._wires: dict[int, tuple[RankProcess, Wire]] = {}
        for rank in self.ranks:
            rank.limit(timeout)
            for wire in (rank.work, rank.control):
                self._poll.register(wire.fileno(), select.POLLIN)
                self._wires[wire.fileno()] = rank, wire

    def call(self, messages: Sequence[Message | Packed] | None, what: str) -> list[Message]:
        """Sends each rank its message and returns the answers, both in the order of ranks; `what`
        names the call in errors. If `messages` is None, the ranks run again what they ran last, and
        the answer of a rank whose answer is as before is AGAIN.

        Errors: RunError if the call failed but the ranks can continue; else RankError, which names
        the rank that failed, the call, and what the other ranks were doing.
        """
        self.check_usable()
        complete = False
        reason = ""
        try:
            answers = self._call(messages, what)
            if any("error" in answer for answer in answers):
                renew = [{"do": "renew"}] * len(self.ranks)
                reason = self._call(renew, what)[0]["reason"]
            complete = True
        finally:
            if not complete:
                self.end(f"{what} failed")
        if reason:
            raise RunError(f"{what} of {self._path}: {reason}")
        return answers

    def check_usable(self) -> None:
        """Raises a RankError if the session is closed, or was opened by another process."""
        if os.getpid() != self._owner:
            raise RankError(
                f"this session is process {self._owner}'s; make one in process {os.getpid()} too"
            )
        if self._closed is not None:
            raise RankError(f"this session is closed: {self._closed}; make a new one")

    def check_alive(self) -> None:
        """Raises a RankError if a process has ended or is stopped; then all processes are ended."""
        self.check_usable()
        ended = next((rank for rank in self.ranks if rank.fate() is not None), None)
        if ended is not None:
            self._fail(ended, "a check")

    def close(self) -> None:
        """Ends all ranks without an error. May be called twice."""
        if self._closed is not None:
            return
        self._bell.call(again=False)
        for rank in self.ranks:
            try:
                rank.work.send({"do": "close"})
            except Closed:
                continue
        deadline = time.monotonic() + CLOSING
        for rank in self.ranks:
            rank.wait(deadline - time.monotonic())
        self.end("close() was called")

    def _call(self, messages: Sequence[Message | Packed] | None, what: str) -> list[Message]:
        """Sends messages (None: run again), and waits for the answers of all ranks. Errors:
        RankError if a rank fails or is silent for the timeout."""
        self._calls += 1
        self._bell.call(again=messages is None)  # the ranks then read while messages are sent
        if messages is None and self._bell.wait_for_answers(MOMENT) and self._bell.all_again():
            return [AGAIN] * len(self.ranks)
        for rank in self.ranks:
            rank.reply, rank.silence = None, 0.0
        for rank, message in zip(self.ranks, messages or (), strict=False):
            try:
                rank.work.send(message)
            except Closed:
                self._lose(rank, what)
        pinged = time.monotonic()
        while waiting := [rank for rank in self.ranks if rank.reply is None]:
            before = time.monotonic()
            self._read(what)
            now = time.monotonic()
            # Counts at most two ticks: this process may itself have been stopped.
            self._count_silence(waiting, min(now - before, 2 * self._tick), what)
            if now - pinged >= self._tick:
                pinged = now
                for rank in waiting:
                    rank.send_control({"do": "ping"})
        return [rank.reply or {} for rank in self.ranks]

    def _read(self, what: str) -> None:
        """Waits for answers, at most a moment, and reads the messages that have arrived. Errors:
        RankError if a rank has ended."""
        self._bell.wait_for_answers(MOMENT)
        for number, rank in enumerate(self.ranks):
            if self._bell.is_again(number):
                rank.reply = AGAIN
        if all(rank.reply is AGAIN for rank in self.ranks):
            return
        for fd, _ in self._poll.poll(0):
            rank, wire = self._wires[fd]
            try:
                message = wire.receive()
            except Closed:
                self._lose(rank, what)
            rank.silence = 0.0
            if wire is rank.work:
                rank.reply = message
                if "error" in message:
                    if not message.get("goes_on"):
                        self._fail(rank, what)
                    self._stop_others()

    def _stop_others(self) -> None:
        """Tells the ranks that have not answered to abandon the call."""
        for rank in self.ranks:
            if rank.reply is None:
                rank.send_control({"do": "stop", "call": self._calls})

    def _count_silence(self, waiting: Sequence[RankProcess], seconds: float, what: str) -> None:
        """Adds `seconds` to the silence of ranks that have not answered. Errors: RankError if one
        has been silent for the timeout."""
        for rank in waiting:
            rank.silence += seconds
            if rank.silence >= self._timeout / 2 and (
                rank.silence >= self._timeout or rank.fate() is not None
            ):
                self._fail(rank, what)

    def _lose(self, rank: RankProcess, what: str) -> NoReturn:
        """Called when a rank has closed its connection, perhaps after its answer: makes the call
        fail. Waits for the process's exit code, which follows a moment later, or much later on a
        busy host. Always raises a RankError."""
        if rank.fate() is None and not rank.wait(CLOSING):
            rank.reply = {"error": "it closed its connection, but its process still runs"}
        self._fail(rank, what)

    def _fail(self, first: RankProcess, what: str) -> NoReturn:
        """Aborts the other ranks, collects their reports, ends all processes, and raises a
        RankError with the reports.

        The error blames a rank that died or was stopped; if none was, `first`.
        """
        culprit = next((rank for rank in self.ranks if rank.fate() is not None), first)
        headline = f"{what} of {self._path}: rank {self._story(culprit)}"
        for rank in self.ranks:
            if rank is not culprit:
                rank.send_control({"do": "abort", "message": f"rank {self._story(culprit)}"})
        self._hear_out(culprit)
        is_silent = culprit.reply is None
        lost = [n for n, r in enumerate(self.ranks) if r.fate() or (r is culprit and is_silent)]
        others = [
            f"\n  rank {number}: {rank.reply['error']}"
            for number, rank in enumerate(self.ranks)
            if rank is not culprit
            and rank.reply is not None
            and rank.reply.get("error") not in (None, (culprit.reply or {}).get("error"))
        ]
        tail = culprit.log.tail()
        quoted = f"\nits log ({culprit.log.place}) ends with:\n{tail}" if tail else ""
        self.end(headline)
        error = RankError(headline + "".join(others) + quoted)
        error.lost = tuple(lost)
        raise error

    def _story(self, rank: RankProcess) -> str:
        """Returns a rank's number and fate as text: its error, its end or its silence."""
        number = self.ranks.index(rank)
        if rank.reply is not None and "error" in rank.reply:
            return f"{number} failed: {rank.reply['error']}"
        return f"{number} {rank.fate() or f'has not answered for {rank.silence:.1f} s'}"

    def _hear_out(self, culprit: RankProcess) -> None:
        """Waits until all running ranks other than `culprit` have answered, for at most GRACE
        seconds."""
        deadline = time.monotonic() + GRACE
        while (left := deadline - time.monotonic()) > 0 and any(
            rank is not culprit and rank.reply is None and rank.fate() is None
            for rank in self.ranks
        ):
            for fd, _ in self._poll.poll(left * 1000):
                rank, wire = self._wires[fd]
                try:
                    message = wire.receive()
                except Closed:
                    self._poll.unregister(fd)
                    continue
                if wire is rank.work:
                    rank.reply = message

    def end(self, reason: str) -> None:
        """Kills all processes and frees their resources. The first reason is the one that later
        calls name."""
        if self._closed is not None:
            return
        self._closed = reason
        self._started.end()
        for arena in (self.inputs, *self.outputs):
            arena.forget()
