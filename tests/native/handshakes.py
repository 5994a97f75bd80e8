"""The handshake of a connection, as `onnxpar/native/handshake.h` describes it."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket

MAGIC = b"onnxpar4"
NONCE = 32


class Refused(Exception):
    """The other end has closed the connection."""


def proof(key: str, role: str, purpose: str, first: bytes, second: bytes, identity: str) -> bytes:
    """What only one who has the key can say about these nonces."""
    fields = [role.encode(), purpose.encode(), first, second, identity.encode(), b""]
    message = b"".join(str(len(each)).encode() + b":" + each for each in fields)
    return hmac.digest(key.encode(), message, hashlib.sha256)


def read(wire: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = wire.recv(count - len(found))
        if not more:
            raise Refused
        found += more
    return found


def connect(
    port: int, key: str, purpose: str = "hub", identity: str = "", host: str = "127.0.0.1"
) -> socket.socket:
    """A connection to what listens on a port, which it has proved to both ends."""
    wire = socket.create_connection((host, port), 5)
    shake_hands(wire, key, purpose, identity)
    return wire


def shake_hands(wire: socket.socket, key: str, purpose: str = "hub", identity: str = "") -> None:
    challenge = read(wire, len(MAGIC) + NONCE)
    assert challenge[: len(MAGIC)] == MAGIC
    first, second = challenge[len(MAGIC) :], os.urandom(NONCE)
    own = proof(key, "connects", purpose, first, second, identity)
    wire.sendall(second + bytes([len(identity)]) + identity.encode() + own)
    try:
        answer = read(wire, NONCE)
    except ConnectionResetError as error:
        raise Refused from error
    assert answer == proof(key, "accepts", purpose, first, second, identity)
