"""A rank that has the key, joins, and then sends others what they do not wait for."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import pytest
from native.frames import KEY, Kind, frame, hello
from native.handshakes import Refused, accept, connect, read

from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.ranks import collectives
from onnxpar.runtime.ranks.groups import World

SEND_BUFFER, SEND, SEND_READY, RECEIVE_READY = range(4)
START = struct.Struct("<6Q")
"""The start of a message of Gloo: its bytes, kind, slot, offset, length and remote offset."""


class FalseRank:
    """A rank, on a host of its own as it says."""

    wire: socket.socket

    def __init__(self, port: int, rank: int = 1, size: int = 2) -> None:
        self._rank = rank
        self._hub = connect(port, KEY)
        self._hub.sendall(hello(rank, size))
        self._set(f"memory/{rank}", "0" * 32)
        self._set(f"memory/reached/{rank}", "-" * rank)
        self._set(f"address/{rank}", "127.0.0.1 1 none elsewhere")

    def connect(self) -> None:
        """Connects to rank 0, which expects one connection; a later one takes its place."""
        _, listens, purpose, _ = self._get("address/0").split()
        self.wire = connect(int(listens), KEY, purpose, f"{self._rank} 0")

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
Made = TypeVar("Made")


def what_rank_0_says(says: Says) -> str:
    """Its error in an all-reduce of three numbers."""
    port = _free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            World.create, f"false/{port}", 0, 2, f"tcp://127.0.0.1:{port}#{KEY}", timeout=5
        )
        false = _once_it_listens(lambda: FalseRank(port))
        false.connect()
        world = first.result()
        running = pool.submit(collectives.all_reduce, world, np.ones(3, np.float32))
        says(false)
        with pytest.raises(OnnxparError) as error:
            running.result()
        false.close()
        world.close()
    return str(error.value)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _once_it_listens(make: Callable[[], Made]) -> Made:
    while True:
        try:
            return make()
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


@pytest.mark.slow
@pytest.mark.matrix
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


@pytest.mark.slow
@pytest.mark.matrix
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


def test_a_rank_that_connects_twice() -> None:
    """Its second connection is not that of another rank: rank 0 waits for rank 2, and keeps the
    second one, as the first may be one that its rank has given up."""
    port = _free_port()
    store = f"tcp://127.0.0.1:{port}#{KEY}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(World.create, f"twice/{port}", 0, 3, store, timeout=10)
        twice = _once_it_listens(lambda: FalseRank(port, 1, 3))
        once = FalseRank(port, 2, 3)
        twice.connect()
        given_up = twice.wire
        twice.connect()
        with pytest.raises(Refused):
            given_up.settimeout(5)
            read(given_up, 1)
        assert not wait([first], timeout=1).done
        once.connect()
        with first.result():
            twice.wire.settimeout(0.2)
            with pytest.raises(TimeoutError):  # it is open, and nothing was sent
                read(twice.wire, 1)
        twice.close()
        once.close()


def test_a_rank_that_says_nothing_of_its_memory() -> None:
    port = _free_port()
    store = f"tcp://127.0.0.1:{port}#{KEY}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(World.create, f"mute/{port}", 0, 2, store, timeout=1)
        with _once_it_listens(lambda: connect(port, KEY)) as hub:
            hub.sendall(hello(1, 2))
            both = (
                rf"rank 1 has not sent '.*/memory/1' to rank 0 on host {socket.gethostname()} "
                r"within 1000 ms, through rank 0 \(pid \d+\), which serves the control channel"
            )
            with pytest.raises(OnnxparError, match=both):
                first.result()


@pytest.mark.slow
def test_a_hub_that_takes_a_rank_and_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        store = f"tcp://127.0.0.1:{port}#{KEY}"
        joins = pool.submit(World.create, f"silent/{port}", 1, 2, store, timeout=1)
        with server.accept()[0] as wire:
            accept(wire, KEY)
            wire.sendall(frame(Kind.ACCEPT))
            silent = (
                rf"rank 1 on host {socket.gethostname()} has waited for 1 s to join the world: "
                rf"the hub on 127.0.0.1:{port} does not respond: "
            )
            with pytest.raises(OnnxparError, match=silent):
                joins.result()
