"""A rank that has the key, joins, and then sends others what they do not wait for."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from native.frames import KEY, Kind, frame, hello
from native.handshakes import connect, read

from onnxpar.errors import OnnxparError
from onnxpar.runtime import collectives
from onnxpar.runtime.groups import World

SEND_BUFFER, SEND, SEND_READY, RECEIVE_READY = range(4)
START = struct.Struct("<6Q")
"""The start of a message of Gloo: its bytes, kind, slot, offset, length and remote offset."""


class FalseRank:
    """Rank 1 of 2, on a host of its own as it says, connected to rank 0."""

    def __init__(self, port: int) -> None:
        self._hub = connect(port, KEY)
        self._hub.sendall(hello(1, 2))
        self._set("memory/1", "0" * 32)
        self._set("memory/reached/1", "-")
        self._set("address/1", "127.0.0.1 1 none elsewhere")
        _, listens, purpose, _ = self._get("address/0").split()
        self.wire = connect(int(listens), KEY, purpose, "1 0")

    def _set(self, key: str, value: str) -> None:
        self._hub.sendall(frame(Kind.SET, f"stream 0/{key}", value))

    def _get(self, key: str) -> str:
        self._hub.sendall(frame(Kind.GET, f"stream 0/{key}"))
        while True:
            (size,) = struct.unpack("<I", read(self._hub, 4))
            body = read(self._hub, size)
            if body[0] == Kind.VALUE:
                (length,) = struct.unpack_from("<Q", body, 1)
                if body[9 : 9 + length].decode() == f"stream 0/{key}":
                    return body[17 + length :].decode()

    def asked(self) -> tuple[int, int]:
        """The slot and the length of what rank 0 wants to receive first."""
        while True:
            _, kind, slot, _, length, _ = START.unpack(read(self.wire, START.size))
            if kind == RECEIVE_READY:
                return slot, length

    def send(self, kind: int, slot: int, length: int, data: bytes = b"", size: int = -1) -> None:
        size = START.size + length if size < 0 else size
        self.wire.sendall(START.pack(size, kind, slot, 0, length, 0) + data)

    def close(self) -> None:
        self.wire.close()
        self._hub.close()


Says = Callable[[FalseRank], None]


def what_rank_0_says(says: Says) -> str:
    """Its error in an all-reduce of three numbers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            World.create, f"false/{port}", 0, 2, f"tcp://127.0.0.1:{port}#{KEY}", timeout=5
        )
        false = pool.submit(_once_it_listens, port).result()
        world = first.result()
        running = pool.submit(collectives.all_reduce, world, np.ones(3, np.float32))
        says(false)
        with pytest.raises(OnnxparError) as error:
            running.result()
        false.close()
        world.close()
    return str(error.value)


def _once_it_listens(port: int) -> FalseRank:
    while True:
        try:
            return FalseRank(port)
        except ConnectionRefusedError:
            continue


@pytest.fixture(scope="module", autouse=True)
def by_gloo(medium: str) -> None:
    if medium != "gloo":
        pytest.skip("the false rank has no shared memory")


def too_long(false: FalseRank) -> None:
    slot, length = false.asked()
    false.send(SEND, slot, length + 4, b"x" * (length + 4))


def too_short(false: FalseRank) -> None:
    slot, length = false.asked()
    false.send(SEND, slot, length - 4, b"x" * (length - 4))


def sizes_that_differ(false: FalseRank) -> None:
    slot, length = false.asked()
    false.send(SEND, slot, length, b"x" * 100, size=2**63)


def enormous(false: FalseRank) -> None:
    slot, _ = false.asked()
    false.send(SEND, slot, 2**63 - 1, b"x" * 100)


def another_slot(false: FalseRank) -> None:
    slot, length = false.asked()
    false.send(SEND, slot + 1, length, b"x" * length)


def twice(false: FalseRank) -> None:
    slot, length = false.asked()
    for _ in range(2):
        false.send(SEND, slot, length, b"x" * length)


def a_bound_buffer(false: FalseRank) -> None:
    """A kind of message that Gloo writes wherever its slot says."""
    false.asked()
    false.send(SEND_BUFFER, 0, 2**20, b"x" * 100)


def an_unknown_kind(false: FalseRank) -> None:
    false.send(99, 0, 0)


@pytest.mark.parametrize(
    "says",
    [
        *(too_long, too_short, sizes_that_differ, enormous, another_slot, twice),
        *(a_bound_buffer, an_unknown_kind),
    ],
)
def test_messages_that_nobody_waits_for(says: Says) -> None:
    """The collective fails, and the process lives."""
    assert "rank 1" in what_rank_0_says(says)


@pytest.mark.parametrize("seed", range(10))
def test_random_messages(seed: int) -> None:
    dice = random.Random(seed)

    def says(false: FalseRank) -> None:
        slot, length = false.asked()
        for _ in range(20):
            kind = dice.choice(
                [SEND_BUFFER, SEND, SEND_READY, RECEIVE_READY, dice.randrange(2**64)]
            )
            slots = [slot, dice.randrange(2**64)]
            lengths = [length, 0, 2**63, dice.randrange(100)]
            sizes = [-1, 0, START.size, 2**64 - 1]
            data = dice.randbytes(dice.choice([0, length]))
            size = dice.choice(sizes)
            try:
                false.send(kind, dice.choice(slots), dice.choice(lengths) % 2**32, data, size)
            except OSError:  # rank 0 has had enough
                break
        false.wire.close()

    assert "rank 1" in what_rank_0_says(says)
