"""Signals between a session and its ranks through shared memory: that a call, or an answer, is
there."""

from __future__ import annotations

import ctypes
import mmap
import os

from onnxpar.base.memory_file import make_file
from onnxpar.runtime.ranks.library import library
from onnxpar.runtime.ranks.wire import Message, Wire

_LINE = 64
"""Bytes between words that different processes write: a cache line, the size of a bell."""
_WORDS = _LINE // 4
_CALLS, _ANSWERS, _KIND, _FIRST = range(4)
"""The lines of the shared memory: two bells, the kind of the call, and from _FIRST on the answer of
each rank."""
_MESSAGE, _AGAIN = range(2)
_WRAP = 1 << 32
_LONG = 10**6
"""The longest sleep of a rank, in milliseconds. Another thread of the rank notices the end of the
session."""


class Doorbell:
    """Counts the calls of a session, and the answers of its ranks, in memory that all of them
    share. The message of a call or an answer goes over a `Wire`. A call or answer that equals the
    one before (`again`) has no message: only the bell is rung.

    fd     the file descriptor of the shared memory
    ranks  the number of ranks
    spins  True if a waiting process first spins for a while, and only then sleeps; this needs a
           core for the session and each rank

    All ranks answer each call before the next.
    """

    def __init__(self, fd: int, ranks: int, spins: bool) -> None:
        self.fd = fd
        self.ranks = ranks
        self.spins = spins
        self._calls = 0
        self._looks = spins
        memory = mmap.mmap(fd, (_FIRST + ranks) * _LINE)
        self._words = (ctypes.c_uint32 * (len(memory) // 4)).from_buffer(memory)
        start = ctypes.addressof(self._words)
        self._call, self._answer = (ctypes.c_void_p(start + n * _LINE) for n in (_CALLS, _ANSWERS))
        self._ring, self._wait = library().onnxpar_bell_ring, library().onnxpar_bell_wait

    @staticmethod
    def create(ranks: int, spins: bool) -> Doorbell:
        """Returns a new doorbell, for the session; child processes do not inherit its file
        descriptor."""
        fd = make_file("onnxpar-doorbell")
        os.ftruncate(fd, (_FIRST + ranks) * _LINE)
        return Doorbell(fd, ranks, spins)

    def call(self, again: bool) -> None:
        """Tells the ranks that there is a call: one that equals the last (`again`), or one with a
        message."""
        self._calls += 1
        self._looks = self.spins
        self._words[_KIND * _WORDS] = _AGAIN if again else _MESSAGE
        self._ring(self._call, self._calls % _WRAP)

    def wait_for_answers(self, seconds: float) -> bool:
        """Waits until all ranks have answered. Returns True, or False after about `seconds`."""
        looks, self._looks = self._looks, False
        return bool(self._wait(self._answer, self._last_answer, looks, round(seconds * 1000)))

    def is_again(self, rank: int) -> bool:
        """True if the rank's answer to this call equals its answer to the last one."""
        return bool(self._words[(_FIRST + rank) * _WORDS] == self._calls % _WRAP)

    def all_again(self) -> bool:
        """True if every rank's answer to this call equals its answer to the last one."""
        return all(map(self.is_again, range(self.ranks)))

    def wait_for_call(self) -> bool:
        """Waits, on a rank, for the next call. Returns True if the call equals the last one, so
        that there is no message."""
        self._calls += 1
        while not self._wait(self._call, self._calls % _WRAP, self.spins, _LONG):
            pass
        return bool(self._words[_KIND * _WORDS] == _AGAIN)

    def answer(self, rank: int, again: bool) -> None:
        """Tells the session that this rank has answered: as the last time (`again`), or with a
        message, which must be sent before."""
        if again:
            self._words[(_FIRST + rank) * _WORDS] = self._calls % _WRAP
        self._ring(self._answer, self._last_answer)

    @property
    def _last_answer(self) -> int:
        """The count of answers that is reached when all ranks have answered the current call."""
        return self._calls * self.ranks % _WRAP

    def close(self) -> None:
        """Closes the file descriptor; the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Line:
    """A rank's end of the connection to its session: messages over a wire, signals by a
    doorbell."""

    def __init__(self, wire: Wire, bell: Doorbell, rank: int) -> None:
        self._wire, self._bell, self._rank = wire, bell, rank

    def receive(self) -> Message | None:
        """Waits for the next call. Returns its message; None if the call equals the last one.
        Errors: Closed if the session has ended."""
        return None if self._bell.wait_for_call() else self._wire.receive()

    def send(self, message: Message | None) -> None:
        """Sends the answer; None stands for one that equals the last. Errors: Closed if the session
        has ended."""
        if message is not None:
            self._wire.send(message)
        self._bell.answer(self._rank, message is None)
