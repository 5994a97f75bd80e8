"""Worlds: sets of ranks that run collectives together, like communicators of MPI.

A `World` object is one rank's membership in a world. Ranks are processes or, in tests, threads of
one process.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
from collections.abc import Sequence

import onnxruntime as ort

from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.ranks.library import check, library, library_path

_names = itertools.count()


class World(Closing):
    """One rank's membership in a world, a set of ranks that run collectives together. The end of a
    `with` block leaves the world.

    `create` waits until all `size` ranks have joined, and raises RankError after `timeout` seconds.
    The same timeout applies to every collective.

    `store` is the place where the ranks find each other: `hash:NAME` (threads of one process),
    `file:/dir` (one host, or a shared file system) or `tcp://host:port` (rank 0 listens). A process
    needs the key of the world to join it. In a folder, rank 0 writes a random key that only its
    user can read; with `tcp://host:port`, the key follows the address (`#key`) or is ONNXPAR_KEY,
    which must be set if other hosts can reach the address. `id` is unique in this process. Ranks
    listen only on `bind_address`.

    Two ranks of one host exchange messages through shared memory, others over Gloo's TCP
    connections. With ONNXPAR_TRANSPORT=gloo, a rank uses Gloo alone; with shared-memory, `create`
    raises RankError if shared memory does not reach all ranks.
    """

    def __init__(self, id: str, rank: int, size: int) -> None:
        self.id = id
        self.rank = rank
        self.size = size
        self._open = True

    @classmethod
    def create(
        cls,
        id: str,
        rank: int,
        size: int,
        store: str,
        bind_address: str = "127.0.0.1",
        timeout: float = 60.0,
    ) -> World:
        """Joins the world as rank `rank` of `size`; returns when all ranks have joined. See the
        class for the arguments."""
        check(
            library().onnxpar_world_create(
                id.encode(),
                rank,
                size,
                store.encode(),
                bind_address.encode(),
                round(timeout * 1000),
            )
        )
        return cls(id, rank, size)

    def open_streams(self, count: int) -> None:
        """Connects the ranks by `count` streams, so that collectives of different streams can run
        at the same time. All ranks must call this. Does nothing if there are `count` streams
        already. Errors: RankError if a rank does not come within the timeout."""
        check(library().onnxpar_world_open_streams(self.id.encode(), count))

    def abort(self, message: str) -> None:
        """Makes all collectives of this world, running and later, fail on all ranks with this
        message."""
        check(library().onnxpar_world_abort(self.id.encode(), message.encode()))

    def explain(self, why: str) -> None:
        """Tells the other ranks why this rank is about to leave the world, before the other ranks
        expect that."""
        check(library().onnxpar_world_explain(self.id.encode(), why.encode()))

    def shares_memory_with(self, rank: int) -> bool:
        """True if messages to `rank` go through shared memory, not through Gloo. Errors: RankError
        if the world has no such rank."""
        shared = ctypes.c_int()
        check(library().onnxpar_world_shares_memory(self.id.encode(), rank, ctypes.byref(shared)))
        return bool(shared.value)

    def begin(self) -> None:
        """Marks the start of a call on this rank. A faster rank that fails in its next call then
        does not interrupt this call."""
        check(library().onnxpar_world_begin(self.id.encode()))

    def interrupt(self, message: str) -> None:
        """Makes all collectives of the current call fail, on all ranks, with this message. They
        work again after every rank has called `renew`."""
        check(library().onnxpar_world_interrupt(self.id.encode(), message.encode()))

    def renew(self) -> str:
        """Waits until all ranks have left the interrupted call, and connects them again. Returns
        the reason of the interruption, the same text on all ranks. Errors: RankError if a rank does
        not come within the timeout, or if the world was aborted."""
        check(library().onnxpar_world_renew(self.id.encode()))
        return _reason()

    def failure(self) -> str:
        """Returns the reason why every collective of this world now fails, on all ranks; empty if
        the world can still be used."""
        check(library().onnxpar_world_failure(self.id.encode()))
        return _reason()

    def close(self) -> None:
        """Leaves the world; collectives in this rank's sessions fail from then on."""
        if self._open:
            self._open = False
            check(library().onnxpar_world_destroy(self.id.encode()))


def _reason() -> str:
    """The text that the last call of the library in this thread left."""
    reason: bytes = library().onnxpar_reason()
    return reason.decode(errors="replace")


class Group(Closing):
    """A part of a world's ranks, for the functions of `collectives`, which take it in place of a
    world. This rank must be one of them.

    `ranks` are ranks of the world, in the order of the group; `rank` is this rank's position among
    them. A rank that fails in a group fails in the whole world.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.id = f"{world.id}, ranks {list(ranks)}"
        self.rank = list(ranks).index(world.rank)
        self.size = len(ranks)
        numbers = (ctypes.c_int64 * len(ranks))(*ranks)
        create = library().onnxpar_group_create
        check(create(world.id.encode(), self.id.encode(), numbers, len(ranks)))
        self._open = True

    def close(self) -> None:
        """Forgets the group; the world is still usable."""
        if self._open:
            self._open = False
            check(library().onnxpar_group_destroy(self.id.encode()))


class Hub(Closing):
    """The meeting point of a world's ranks, run by a process that need not be a rank.

    Without a hub, rank 0 is the meeting point. With a hub in the launcher, the other ranks notice
    the end of rank 0 like that of any rank, and the end of the launcher is an error on all ranks.
    The key of the world is random.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        bound = ctypes.c_int(port)
        self._key = secrets.token_hex(16)
        call = library().onnxpar_hub_start
        check(call(host.encode(), ctypes.byref(bound), self._key.encode()))
        self._host = host
        self._port = bound.value
        self._open = True

    @property
    def store(self) -> str:
        """The value for `store` of `World.create`, or for ONNXPAR_STORE: address and key,
        "tcp://host:port#key"."""
        return f"tcp://{self._host}:{self._port}#{self._key}"

    def close(self) -> None:
        """Stops the hub."""
        if self._open:
            self._open = False
            check(library().onnxpar_hub_stop(self._host.encode(), self._port))


def thread_worlds(n: int, timeout: float = 60.0) -> list[World]:
    """Returns the memberships of ranks 0 to n-1 in a new world, for `n` threads of this process."""
    from concurrent.futures import ThreadPoolExecutor  # ranks that are processes need no pool

    name = f"threads-{os.getpid()}-{next(_names)}"

    def join(rank: int) -> World:
        return World.create(f"{name}/{rank}", rank, n, f"hash:{name}", timeout=timeout)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(join, range(n)))


def session_options(world: World, base: ort.SessionOptions | None = None) -> ort.SessionOptions:
    """Returns options for an onnxruntime session whose graph has collectives, which run in `world`:
    `base`, changed in place, or if None, new options."""
    options = ort.SessionOptions() if base is None else base
    options.add_session_config_entry("onnxpar.world", world.id)
    options.register_custom_ops_library(str(library_path()))
    return options
