"""Ports for ranks of launchers, which meet at the port after that of torch's own store."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def server_before_a_free_port() -> socket.socket:
    """Below the ports that connections get, of which other tests have many."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000, 2):
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no port is free")
