"""Connects to every socket on which a process listens, again and again, as strangers do.

`python -m native.strangers KIND PID KEY` goes on until its input ends, and says how many
connections it has made after each hundred of them.
"""

from __future__ import annotations

import os
import random
import resource
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from native.handshakes import MAGIC, NONCE, Refused, proof, read

HELD = 400
"""The largest number of connections that a stranger holds open."""

BURST = 30
"""How often to connect to each socket before it looks for others."""

Target = int | bytes
"""A port on loopback, or the name of an abstract Unix socket."""


def listening(pid: int) -> list[Target]:
    """Where a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            text = os.readlink(descriptor)
            if text.startswith("socket:["):
                inodes.add(text[8:-1])
    found: list[Target] = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.append(int(fields[1].split(":")[1], 16))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[3] == "00010000" and fields[6] in inodes:
            found.append(b"\0" + fields[7][1:].encode())
    return found


def reach(target: Target) -> socket.socket:
    if isinstance(target, bytes):
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    else:
        wire = socket.socket()
    wire.settimeout(0.2)
    wire.connect(target if isinstance(target, bytes) else ("127.0.0.1", target))
    return wire


def closes(wire: socket.socket, key: str) -> bool:
    return False


def resets(wire: socket.socket, key: str) -> bool:
    """As a port scanner does."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def holds(wire: socket.socket, key: str) -> bool:
    return True


def garbage(wire: socket.socket, key: str) -> bool:
    text = random.choice([b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\xff" * 5000])
    wire.sendall(random.choice([text, random.randbytes(random.randrange(1, 400))]))
    return random.random() < 0.3


def begins(wire: socket.socket, key: str) -> bool:
    """Sends the start of a handshake, and no more."""
    wire.sendall(random.randbytes(NONCE) + b"\x03")
    return True


def wrong_key(wire: socket.socket, key: str) -> bool:
    first, second = read(wire, len(MAGIC) + NONCE)[len(MAGIC) :], random.randbytes(NONCE)
    own = proof(key[::-1], "connects", "hub", first, second, "1 0")
    wire.sendall(second + b"\x031 0" + own)
    return False


recorded: list[bytes] = []


def replays(wire: socket.socket, key: str) -> bool:
    """Sends what one who has the key has once sent to a hub, which took it."""
    if recorded:
        wire.sendall(recorded[0])
        return True
    first, second = read(wire, len(MAGIC) + NONCE)[len(MAGIC) :], random.randbytes(NONCE)
    own = second + b"\0" + proof(key, "connects", "hub", first, second, "")
    wire.sendall(own)
    read(wire, NONCE)
    recorded.append(own)
    return False


KINDS: dict[str, Callable[[socket.socket, str], bool]] = {
    each.__name__: each for each in (closes, resets, holds, garbage, begins, wrong_key, replays)
}


def main(kind: str, pid: int, key: str) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held: deque[socket.socket] = deque(maxlen=HELD)
    ends = selectors.DefaultSelector()
    ends.register(sys.stdin, selectors.EVENT_READ)
    made = 0
    while not ends.select(0):
        for target in BURST * listening(pid):
            with suppress(OSError, Refused):
                wire = reach(target)
                made += 1
                if made % 100 == 0:
                    print(made, flush=True)
                if KINDS[kind](wire, key):
                    held.append(wire)
                else:
                    wire.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
