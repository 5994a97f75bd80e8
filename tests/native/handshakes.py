"""The handshake of a connection, as `onnxpar/native/handshake.h` describes it."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
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


def damaged(wire: socket.socket, key: str, dice: random.Random) -> bool:
    """Answers a challenge as one who has the key, with one to three changes, in pieces; returns
    whether the other end takes it."""
    first, second = read(wire, len(MAGIC) + NONCE)[len(MAGIC) :], dice.randbytes(NONCE)
    identity = dice.choice(["", "1 0", "x" * 255])
    good = second + bytes([len(identity)]) + identity.encode()
    good += proof(key, "connects", "hub", first, second, identity)
    answer = bytearray(good)
    changes = dice.randint(1, 3)
    while changes > 0 or answer == good:
        changes -= 1
        where = dice.randrange(len(answer))
        match dice.randrange(4):
            case 0:
                answer[where] ^= 1 << dice.randrange(8)
            case 1:
                answer[NONCE] = dice.randrange(256)
            case 2:
                del answer[max(where, NONCE + 1) :]
            case 3:
                answer[where:where] = dice.randbytes(dice.randrange(1, 300))
    cut = dice.randrange(len(answer))
    wire.settimeout(0.05)
    try:
        wire.sendall(answer[:cut])
        wire.sendall(answer[cut:])
        return read(wire, NONCE) == proof(key, "accepts", "hub", first, second, identity)
    except (OSError, Refused):
        return False


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


def accept(wire: socket.socket, key: str, purpose: str = "hub") -> str:
    """Shakes hands as the end that listens; returns the identity of the other one."""
    first = os.urandom(NONCE)
    wire.sendall(MAGIC + first)
    second = read(wire, NONCE)
    identity = read(wire, read(wire, 1)[0]).decode()
    assert read(wire, NONCE) == proof(key, "connects", purpose, first, second, identity)
    wire.sendall(proof(key, "accepts", purpose, first, second, identity))
    return identity
