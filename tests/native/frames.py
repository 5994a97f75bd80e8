"""Frames of the control channel, as `onnxpar/native/messages.h` has them, and damaged ones."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

KEY = "0123456789abcdef0123456789abcdef"
PROTOCOL = 6
EXTREMES = [0, 1, 2, 3, 7, 255, 2**20, 2**30, 2**31, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1]


class Kind(IntEnum):
    HELLO = 0
    SET = 1
    GET = 2
    WAITING = 3
    OVERDUE = 4
    STATUS = 5
    ABORT = 6
    INTERRUPT = 7
    READY = 8
    LEAVE = 9
    ACCEPT = 10
    REFUSE = 11
    WELCOME = 12
    VALUE = 13
    ASK = 14
    FAIL = 15
    STOP = 16
    RENEWED = 17
    GOODBYE = 18


Field = int | str | Sequence[int]

REPORT = "nlnnnllttn"
ENDING = {  # what ends a run or the world, by design, where it is well formed
    Kind.ABORT: "t",
    Kind.INTERRUPT: "nnt",
    Kind.WAITING: REPORT,
    Kind.OVERDUE: REPORT,
}


def frame(kind: int, *fields: Field) -> bytes:
    """A frame as it is sent; fields are numbers, texts and lists."""
    body = bytes([kind])
    for field in fields:
        if isinstance(field, int):
            body += struct.pack("<Q", field)
        elif isinstance(field, str):
            body += struct.pack("<Q", len(field.encode())) + field.encode()
        else:
            body += struct.pack("<Q", len(field)) + struct.pack(f"<{len(field)}q", *field)
    return with_length(body)


def with_length(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def hello(rank: int, size: int) -> bytes:
    return frame(Kind.HELLO, PROTOCOL, rank, size, "pid 1", socket.gethostname(), 30_000, 30_000)


def from_rank(rank: int, size: int) -> list[bytes]:
    """One good frame of each kind that a rank sends."""
    report = (
        0,
        list(range(size)),
        0,
        3,
        99,
        [1] * size,
        [1] * size,
        "AllReduce 'x'",
        "AllReduce",
        1,
    )
    return [
        hello(rank, size),
        frame(Kind.SET, f"key of {rank}", "value" * 20),
        frame(Kind.GET, "a key that nobody sets"),
        frame(Kind.WAITING, *report),
        frame(Kind.OVERDUE, *report),
        frame(Kind.STATUS, 1, 1, "in AllReduce", 0),
        frame(Kind.ABORT, "the reason"),
        frame(Kind.INTERRUPT, 0, 0, "the reason"),
        frame(Kind.READY, 0),
        frame(Kind.LEAVE, "the reason", [0, 1, 2], 0, 4, [0, rank], 1, 2),
    ]


def from_hub(rank: int, size: int) -> list[bytes]:
    """One good frame of each kind that the hub sends."""
    return [
        frame(Kind.ACCEPT),
        frame(Kind.REFUSE, "the reason", 1),
        frame(Kind.WELCOME, "rank 0 (pid 1)"),
        frame(Kind.VALUE, "key", "value" * 20),
        frame(Kind.ASK, 1, list(range(size)), 0, 3),
        frame(Kind.FAIL, "the reason"),
        frame(Kind.STOP, 0, 0, "the reason"),
        frame(Kind.RENEWED, 1, "the reason"),
        frame(Kind.GOODBYE),
    ]


def random_frame(random: random.Random) -> bytes:
    """The length is right; the rest is random bytes, or random fields of random sizes."""
    kind = random.choice([random.randrange(20), random.randrange(256)])
    if random.random() < 0.3:
        return with_length(bytes([kind]) + random.randbytes(random.randrange(80)))
    body = bytes([kind])
    for _ in range(random.randrange(8)):
        body += struct.pack("<Q", random.choice(EXTREMES))
        body += random.randbytes(random.choice([0, 0, 1, 2, 7, 8, 24]))
    return with_length(body)


def mutated_frame(random: random.Random, good: Sequence[bytes]) -> bytes:
    """A good frame with one to three changes; its length is right again."""
    body = bytearray(random.choice(good)[4:])
    for _ in range(random.randint(1, 3)):
        where = random.randrange(len(body)) if body else 0
        match random.randrange(6) if body else 4:
            case 0:
                body[where] ^= 1 << random.randrange(8)
            case 1:
                where = 1 + where // 8 * 8
                body[where : where + 8] = struct.pack("<Q", random.choice(EXTREMES))
            case 2:
                del body[where:]
            case 3:
                body[0] = random.randrange(20)
            case 4:
                body += random.randbytes(random.randrange(1, 20))
            case 5:
                del body[where : where + random.randrange(1, 9)]
    return with_length(bytes(body))


def ends_something(data: bytes, rank: int, size: int) -> bool:
    """Whether this is a frame by which a rank may end a run or the world."""
    body = data[4:]
    if not body or body[0] not in [*ENDING, Kind.LEAVE]:
        return False
    layout = ENDING.get(Kind(body[0]))
    rest = body[1:]
    if layout is None:
        rest = _after("t", rest, rank, size)
        while rest:
            rest = _after("lnn", rest, rank, size)
        return rest == b""
    return _after(layout, rest, rank, size) == b""


def _after(layout: str, rest: bytes, rank: int, size: int) -> bytes | None:
    """What follows the fields of a layout; None where these are malformed."""
    for index, kind in enumerate(layout):
        if len(rest) < 8:
            return None
        (count,) = struct.unpack_from("<Q", rest)
        rest = rest[8:]
        width = {"n": 0, "t": 1, "l": 8}[kind] * count
        if len(rest) < width:
            return None
        if kind == "l" and index in (0, 1):
            ranks = struct.unpack_from(f"<{count}q", rest)
            if len({*ranks}) < count or rank not in ranks or not {*ranks} <= {*range(size)}:
                return None
        rest = rest[width:]
    return rest


def sockets(port: int, hub_side: bool) -> list[socket.socket]:
    """Copies of this process's sockets that are connected to a hub of that port, or are its."""
    found: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            end = socket.socket(fileno=os.dup(int(name)))
            own, other = end.getsockname(), end.getpeername()
            if end.family == socket.AF_UNIX:  # of two ranks
                continue
            if (own if hub_side else other)[1] == port:
                end.settimeout(5)  # not blocking: the flag is shared with the original
                found.append(end)
    return found
