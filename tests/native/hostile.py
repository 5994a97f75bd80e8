"""A world of three ranks, threads of this process, to whose hub damaged frames are sent.

Prints what was sent and what became of it, as JSON. Where a frame ends the process, nothing is.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from native.frames import (
    KEY,
    Kind,
    ends_something,
    frame,
    from_hub,
    from_rank,
    hello,
    mutated_frame,
    random_frame,
    sockets,
)
from native.handshakes import connect, damaged, shake_hands

from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.ranks import collectives
from onnxpar.runtime.ranks.groups import World

SIZE = 3
HOSTILE = 2


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Ranks:
    """A world of threads; `wire` is the control connection of its last rank."""

    def __init__(self, size: int = SIZE, timeout: float = 30) -> None:
        self.port = free_port()
        self.pool = ThreadPoolExecutor(size)
        store = f"tcp://127.0.0.1:{self.port}#{KEY}"

        def join(rank: int) -> World:
            id = f"{self.port}/{rank}"
            return World.create(id, rank, size, store, timeout=timeout)

        joining = [self.pool.submit(join, 0)]
        while not sockets(self.port, hub_side=True):
            time.sleep(0.005)
        first = {each.getsockname() for each in sockets(self.port, hub_side=False)}
        joining.append(self.pool.submit(join, size - 1))
        while not (new := self._others(first)):
            time.sleep(0.005)
        self.wire = new[0]
        joining += [self.pool.submit(join, rank) for rank in range(1, size - 1)]
        self.worlds = sorted((each.result() for each in joining), key=lambda world: world.rank)

    def _others(self, known: set[Any]) -> list[socket.socket]:
        found = sockets(self.port, hub_side=False)
        return [each for each in found if each.getsockname() not in known]

    def hub_wire(self) -> socket.socket:
        """The hub's end of `wire`."""
        own = self.wire.getsockname()
        return next(s for s in sockets(self.port, hub_side=True) if s.getpeername() == own)

    def each(self, body: Callable[[World], Any]) -> list[Any]:
        return list(self.pool.map(body, self.worlds))

    def check(self) -> None:
        """An all-reduce has the right result on all ranks."""
        ones = np.ones(5, np.float32)
        for total in self.each(lambda world: collectives.all_reduce(world, ones)):
            np.testing.assert_array_equal(total, len(self.worlds) * ones)

    def renew(self) -> None:
        """The world begins anew, with connections that are found by the hub's values."""
        self.worlds[0].interrupt("a test")
        assert self.each(World.renew) == ["a test"] * len(self.worlds)

    def close(self) -> None:
        self.wire.close()
        for world in self.worlds:
            world.close()
        self.pool.shutdown()


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def joined(kind: str, count: int, dice: random.Random) -> dict[str, Any]:
    """Frames from a rank that has joined."""
    ranks = Ranks()
    ranks.check()
    before, skipped, checks = megabytes(), 0, 0
    good = from_rank(HOSTILE, SIZE)
    sent = 0
    while sent < count:
        data = random_frame(dice) if kind == "random" else mutated_frame(dice, good)
        if ends_something(data, HOSTILE, SIZE):
            skipped += 1
            continue
        ranks.wire.sendall(data)
        sent += 1
        if sent % 20 == 0:
            ranks.check()
            checks += 1
        if sent % 100 == 0:
            ranks.renew()
    ranks.renew()
    ranks.check()
    grown = megabytes() - before
    ranks.close()
    return {"sent": sent, "skipped": skipped, "checks": checks, "grown": grown}


def strangers(kind: str, count: int, dice: random.Random) -> dict[str, Any]:
    """Frames from connections of all sorts: with the key or without, after a damaged handshake,
    without a hello, with one of a rank that is there. Some connections stay open."""
    ranks = Ranks()
    ranks.check()
    before, checks, taken = megabytes(), 0, 0
    good = from_rank(HOSTILE, SIZE)
    kept: list[socket.socket] = []
    for sent in range(1, count + 1):
        stranger = socket.create_connection(("127.0.0.1", ranks.port))
        data = random_frame(dice) if kind == "random" else mutated_frame(dice, good)
        way = dice.random()
        if way < 0.3:
            shake_hands(stranger, KEY)
            data = hello(HOSTILE, SIZE) + data
        elif way < 0.5:
            taken += damaged(stranger, KEY, dice)
        if dice.random() < 0.2:
            data = dice.randbytes(dice.randrange(200))
        with suppress(OSError):
            stranger.sendall(data)
        if dice.random() < 0.3:
            kept.append(stranger)
        else:
            stranger.close()
        if sent % 20 == 0:
            ranks.check()
            checks += 1
    ranks.renew()
    ranks.check()
    grown = megabytes() - before
    ranks.close()
    return {"sent": count, "checks": checks, "grown": grown, "taken": taken}


def false_hub(kind: str, count: int, dice: random.Random) -> dict[str, Any]:
    """Frames to a rank from what it takes for the hub: its world fails, its process does not."""
    errors: list[str] = []
    worlds = 0
    sent = 0
    good = from_hub(1, 2)
    while sent < count:
        ranks = Ranks(2, timeout=20)
        worlds += 1
        wire = ranks.hub_wire()
        for _ in range(count - sent):
            data = random_frame(dice) if kind == "random" else mutated_frame(dice, good)
            wire.sendall(data)
            sent += 1
            time.sleep(0.002)
            try:
                ranks.check()
            except OnnxparError as error:
                errors.append(str(error))
                break
        wire.close()
        ranks.close()
    return {"sent": sent, "worlds": worlds, "errors": errors}


def flood(kind: str, count: int, dice: random.Random) -> dict[str, Any]:
    """So many strangers: each begins a frame of 16 MB, or one of few bytes, and never ends it."""
    ranks = Ranks()
    before, own = megabytes(), len(sockets(ranks.port, hub_side=True))
    size = 16 << 20 if kind == "large" else 2000
    block, kept = bytes(1 << 20), []
    for _ in range(count):
        stranger = socket.create_connection(("127.0.0.1", ranks.port))
        stranger.settimeout(0.2)
        with suppress(OSError):
            stranger.sendall(size.to_bytes(4, "little") + bytes(1))
            for _ in range(15 if kind == "large" else 0):
                stranger.sendall(block)
        kept.append(stranger)
    ranks.check()
    most = len(sockets(ranks.port, hub_side=True)) - own
    grown = megabytes() - before
    end = time.monotonic() + 30
    while len(sockets(ranks.port, hub_side=True)) > own and time.monotonic() < end:
        time.sleep(0.1)
    left = len(sockets(ranks.port, hub_side=True)) - own
    ranks.check()
    ranks.close()
    return {"grown": grown, "open": most, "left": left}


def deaf(kind: str, count: int, dice: random.Random) -> dict[str, Any]:
    """A rank that asks for a value again and again, and never reads."""
    port = free_port()
    store = f"tcp://127.0.0.1:{port}#{KEY}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(World.create, "0", 0, 2, store, timeout=20)
        while not sockets(port, hub_side=True):
            time.sleep(0.005)
        wire = connect(port, KEY)
        wire.sendall(hello(1, 2))
        wire.sendall(frame(Kind.SET, "big", "x" * 60_000))
        before = megabytes()
        wire.settimeout(2)
        asked = 0
        with suppress(OSError):
            for _ in range(count):
                wire.sendall(frame(Kind.GET, "big"))
                asked += 1
        error = first.exception()
        grown = megabytes() - before
    return {"grown": grown, "error": str(error), "asked": asked}


def starved(kind: str, count: int, dice: random.Random) -> dict[str, Any]:
    """The hub's process has no descriptor left when rank 1 comes."""
    port = free_port()
    store = f"tcp://127.0.0.1:{port}#{KEY}"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(World.create, "0", 0, 2, store, timeout=2)
        while not sockets(port, hub_side=True):
            time.sleep(0.005)
        late = socket.socket()
        taken = []
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        late.connect(("127.0.0.1", port))
        error = first.exception()
    return {"error": str(error), "taken": len(taken)}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    who, kind, count, seed = sys.argv[1:]
    cases = {f.__name__: f for f in (joined, strangers, false_hub, flood, deaf, starved)}
    print(json.dumps(cases[who](kind, int(count), random.Random(int(seed)))))
