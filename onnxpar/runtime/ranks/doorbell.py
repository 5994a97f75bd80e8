"""Signals between a session and its ranks through shared memory: a call or an answer is there."""

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
"""The lines: two bells, the kind of the call, and from _FIRST on the answer of each rank."""
_MESSAGE, _AGAIN = range(2)
_WRAP = 1 << 32
_LONG = 10**6
"""The longest sleep of a rank, in milliseconds. Another thread of the rank notices the end of the
session."""


class Doorbell:
    """Counts the calls of a session, and the answers of its ranks. The message of a call or an
    answer goes over a `Wire`. A call or an answer that equals the one before (`again`) has no
    message: only the bell is rung.

    All ranks answer each call before the next. With `spins`, a waiting process first spins for a
    while, and then sleeps; this needs a core for the session and each rank.
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
        """Returns the session's doorbell; child processes do not inherit its file descriptor."""
        fd = make_file("onnxpar-doorbell")
        os.ftruncate(fd, (_FIRST + ranks) * _LINE)
        return Doorbell(fd, ranks, spins)

    def call(self, again: bool) -> None:
        """Tells the ranks that there is a call."""
        self._calls += 1
        self._looks = self.spins
        self._words[_KIND * _WORDS] = _AGAIN if again else _MESSAGE
        self._ring(self._call, self._calls % _WRAP)

    def wait_for_answers(self, seconds: float) -> bool:
        """Waits until all ranks have answered; returns False after about `seconds`."""
        looks, self._looks = self._looks, False
        return bool(self._wait(self._answer, self._last_answer, looks, round(seconds * 1000)))

    def is_again(self, rank: int) -> bool:
        """True if the rank has answered the call with the same answer as before."""
        return bool(self._words[(_FIRST + rank) * _WORDS] == self._calls % _WRAP)

    def all_again(self) -> bool:
        """True if all ranks have answered the call with the same answers as before."""
        return all(map(self.is_again, range(self.ranks)))

    def wait_for_call(self) -> bool:
        """Waits for the next call; returns True if it equals the call before."""
        self._calls += 1
        while not self._wait(self._call, self._calls % _WRAP, self.spins, _LONG):
            pass
        return bool(self._words[_KIND * _WORDS] == _AGAIN)

    def answer(self, rank: int, again: bool) -> None:
        """Tells the session that this rank has answered; a message must be sent before."""
        if again:
            self._words[(_FIRST + rank) * _WORDS] = self._calls % _WRAP
        self._ring(self._answer, self._last_answer)

    @property
    def _last_answer(self) -> int:
        """The count of answers when all ranks have answered the call."""
        return self._calls * self.ranks % _WRAP

    def close(self) -> None:
        """Closes the file."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Line:
    """The connection of a rank's process to its session."""

    def __init__(self, wire: Wire, bell: Doorbell, rank: int) -> None:
        self._wire, self._bell, self._rank = wire, bell, rank

    def receive(self) -> Message | None:
        """Waits for the next call and returns its message; None if it equals the call before.
        Errors: Closed."""
        return None if self._bell.wait_for_call() else self._wire.receive()

    def send(self, message: Message | None) -> None:
        """Sends the answer; None if it equals the answer before. Errors: Closed."""
        if message is not None:
            self._wire.send(message)
        self._bell.answer(self._rank, message is None)
