"""Where the ranks of a world find each other."""

from __future__ import annotations

import socket


class ReservedPort:
    """A TCP port that the system gives to nobody else while this is open; rank 0 may listen on it.

    The socket is bound but does not listen, which with SO_REUSEADDR leaves the port free to a listener.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        host, port = self._socket.getsockname()
        self.store = f"tcp://{host}:{port}"

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
