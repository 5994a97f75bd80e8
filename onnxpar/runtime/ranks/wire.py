"""Messages between the session and its ranks, over a local socket; each is a length and then
JSON."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")

CHUNK = 65536

Message = dict[str, Any]


@dataclass(frozen=True)
class Packed:
    """An encoded message, so that one encoding serves several ranks."""

    data: bytes


def pack(message: Message) -> Packed:
    """Encodes a message: 8 bytes with its length, then JSON."""
    body = json.dumps(message).encode()
    return Packed(_LENGTH.pack(len(body)) + body)


class Closed(Exception):
    """The other end has closed the connection, or does not take a message in time."""


class Wire:
    """One end of a connection that carries messages in both directions."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._read = bytearray()

    def fileno(self) -> int:
        """Returns the file descriptor, for `poll`."""
        return self._socket.fileno()

    def send(self, message: Message | Packed) -> None:
        """Sends a message; returns before the other end has read it. Errors: Closed if the
        connection is closed."""
        data = message.data if isinstance(message, Packed) else pack(message).data
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> Message:
        """Waits for the next message; returns it. Errors: Closed if the connection is closed.

        Further messages may end up in a buffer that `poll` does not see. So each end must wait for
        an answer before it sends another message.
        """
        self._fill(_LENGTH.size)
        end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
        self._fill(end)
        message: Message = json.loads(self._read[_LENGTH.size : end])
        del self._read[:end]
        return message

    def limit(self, seconds: float) -> None:
        """Makes any call that blocks for `seconds` raise Closed."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Closes this end; the other end then gets Closed."""
        self._socket.close()

    def _fill(self, length: int) -> None:
        """Reads until the buffer has `length` bytes. Errors: Closed if the connection is closed."""
        while len(self._read) < length:
            try:
                more = self._socket.recv(max(CHUNK, length - len(self._read)))
            except OSError as error:
                raise Closed(str(error)) from error
            if not more:
                raise Closed("end of file")
            self._read += more


def pair() -> tuple[Wire, socket.socket]:
    """Returns (a wire, the socket of its other end), the latter to be handed to another process."""
    own, other = socket.socketpair()
    return Wire(own), other
