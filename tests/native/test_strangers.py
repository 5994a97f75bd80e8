"""Strangers that connect while ranks start and while they run: they change nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from native.frames import KEY
from native.handshakes import MAGIC, NONCE, Refused, connect, proof, read, shake_hands
from native.strangers import KINDS

from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.ranks import collectives
from onnxpar.runtime.ranks.groups import Hub, World

TESTS = Path(__file__).parent.parent
SIZE = 3
COUNT = 1000
"""Connections of each kind, during starts and during runs."""


class Strangers:
    """Those who connect to whatever this process listens on; `count` is how often they have."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "native.strangers", kind, str(os.getpid()), KEY],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._said = b""

    @property
    def count(self) -> int:
        assert self._process.stdout is not None
        assert self._process.poll() is None
        self._said += self._process.stdout.read() or b""
        lines = self._said.split()
        return int(lines[-1]) if lines else 0

    def end(self) -> None:
        self._process.communicate(timeout=10)


@contextmanager
def strangers(kind: str) -> Iterator[Strangers]:
    made = Strangers(kind)
    try:
        yield made
    finally:
        made.end()


def start(number: int) -> list[World]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = f"tcp://127.0.0.1:{server.getsockname()[1]}#{KEY}"

    def join(rank: int) -> World:
        return World.create(f"strangers/{number}/{rank}", rank, SIZE, store, timeout=30)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(join, range(SIZE)))


def on_all(worlds: list[World], body: object) -> list[object]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(body, worlds))  # type: ignore[arg-type]


def check(worlds: list[World]) -> None:
    ones = np.ones(70_000, np.float32)
    for total in on_all(worlds, lambda world: collectives.all_reduce(world, ones)):
        np.testing.assert_array_equal(total, SIZE * ones)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_starts(kind: str) -> None:
    """No start fails, whatever comes to the hub, to ranks that connect, and to their sockets."""
    number = 0
    with strangers(kind) as those:
        end = time.monotonic() + 60
        while number < 5 or (those.count < COUNT and time.monotonic() < end):
            number += 1
            worlds = start(number)
            check(worlds)
            for world in worlds:
                world.close()
        assert those.count >= COUNT


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_runs(kind: str) -> None:
    """Collectives go on, and the world begins anew after an interrupt."""
    worlds = start(0)
    with strangers(kind) as those:
        end = time.monotonic() + 60
        runs = 0
        while runs < 5 or (those.count < COUNT and time.monotonic() < end):
            runs += 1
            check(worlds)
            worlds[0].interrupt("a test")
            assert on_all(worlds, World.renew) == ["a test"] * SIZE
        assert those.count >= COUNT
    check(worlds)
    for world in worlds:
        world.close()


def test_who_has_the_key_of_another_world() -> None:
    with Hub() as hub, pytest.raises(Refused):
        connect(int(hub.store.split("#")[0].split(":")[-1]), KEY)


def test_a_hub_that_has_not_the_key() -> None:
    """A rank gives nothing away to it, and says what is wrong."""
    heard: list[bytes] = []

    def false_hub(server: socket.socket) -> None:
        while True:
            try:
                wire, _ = server.accept()
            except OSError:
                return
            wire.sendall(b"onnxpar4" + bytes(32))
            heard.append(wire.recv(4096))
            wire.sendall(bytes(32))
            heard.append(wire.recv(4096))
            wire.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=false_hub, args=[server], daemon=True).start()
        store = f"tcp://127.0.0.1:{server.getsockname()[1]}#{KEY}"
        with pytest.raises(OnnxparError, match=r"has another key \(ONNXPAR_KEY\).*: another key"):
            World.create("false", 1, 2, store, timeout=0.5)
    assert len(heard[0]) == 32 + 1 + 32  # a nonce, no identity, and a proof
    assert heard[1] == b""


def test_a_proof_is_for_one_purpose() -> None:
    """What proves the key to a hub proves nothing to ranks, and the reverse."""
    with Hub() as hub:
        port, key = hub.store.split(":")[-1].split("#")
        with socket.create_connection(("127.0.0.1", int(port)), 5) as wire, pytest.raises(Refused):
            shake_hands(wire, key, purpose="x" * 32, identity="1 0")


def test_what_was_recorded_is_refused() -> None:
    """What a hub has taken once, it does not take again."""
    with Hub() as hub:
        port, key = hub.store.split(":")[-1].split("#")
        with socket.create_connection(("127.0.0.1", int(port)), 5) as wire:
            first, second = read(wire, len(MAGIC) + NONCE)[len(MAGIC) :], os.urandom(NONCE)
            sent = second + b"\0" + proof(key, "connects", "hub", first, second, "")
            wire.sendall(sent)
            assert read(wire, NONCE) == proof(key, "accepts", "hub", first, second, "")
        with socket.create_connection(("127.0.0.1", int(port)), 5) as wire:
            assert read(wire, len(MAGIC) + NONCE)[len(MAGIC) :] != first
            wire.sendall(sent)
            with pytest.raises((Refused, ConnectionResetError)):
                read(wire, NONCE)
