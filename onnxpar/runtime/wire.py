"""Messages between the session and its ranks: JSON behind its length, over a local socket."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")

Message = dict[str, Any]


class Closed(Exception):
    """The other end is gone."""


class Wire:
    """One end of a connection that carries messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """For `selectors` and `poll`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message; it need not be read yet. Errors: Closed."""
        body = json.dumps(message).encode()
        try:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> Message:
        """The next message, as soon as it is there. Errors: Closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        message: Message = json.loads(self._read(length))
        return message

    def close(self) -> None:
        """Closes this end: the other reads Closed."""
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                more = self._socket.recv(length - len(data))
            except OSError as error:
                raise Closed(str(error)) from error
            if not more:
                raise Closed("end of file")
            data += more
        return bytes(data)


def pair(timeout: float) -> tuple[Wire, socket.socket]:
    """A wire, and the other end to hand on; what is stuck for `timeout` seconds counts as closed."""
    own, other = socket.socketpair()
    own.settimeout(timeout)
    return Wire(own), other
