"""init and shutdown, the numbers of ranks and hosts, and the communicator behind all calls."""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from onnxpar.errors import InputError, RankError
from onnxpar.runtime import collectives
from onnxpar.runtime.groups import World, thread_worlds
from onnxpar.runtime.launch import Launched, bind_address, launched_rank

T = TypeVar("T")

_ids = itertools.count()


class Communicator:
    """One rank's connection to all ranks. `host` identifies the host: ranks with equal texts share
    one."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.agreed: set[str] = set()
        """Digests of lists of fused arrays that are already known to be equal on all ranks."""
        self._queue: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None
        hosts = collectives.gather_bytes(world, host.encode(), "hosts")
        places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        alike = [rank for rank, place in enumerate(places) if place == places[self.rank]]
        self.local_rank = places[self.rank]
        self.local_size = hosts.count(hosts[self.rank])
        self.cross_rank = alike.index(self.rank)
        self.cross_size = len(alike)

    def ordered(self, work: Callable[[], T]) -> T:
        """Runs `work` after all work that was started earlier, and returns its result."""
        if self._last is None or self._last.done():
            return work()
        return self.begin(work).result()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Starts `work` in the queue thread, which runs one piece of work after another; returns a
        handle for its result."""
        if self._queue is None:
            self._queue = ThreadPoolExecutor(1, thread_name_prefix="onnxpar-hvd")
        future = self._queue.submit(work)
        self._last = future  # type: ignore[assignment]
        return future

    def close(self) -> None:
        """Leaves the other ranks; work in progress fails."""
        self.world.close()
        if self._queue is not None:
            self._queue.shutdown()


class _Ranks(threading.local):
    """The communicator of each thread, if ranks are threads."""

    own: Communicator | None = None


_ranks = _Ranks()
_process: Communicator | None = None


def init(timeout: float | None = None) -> None:
    """Connects this process with the others that mpirun, srun or torchrun started, or that the
    environment variables in `onnxpar.runtime.launch.HELP` describe. Without a launcher, this
    process is the only rank.

    `timeout`, in seconds, limits this and every later wait for another rank; the default is the
    environment variable ONNXPAR_TIMEOUT, or 60. A second call does nothing. Errors: RankError if
    another process does not connect in time.
    """
    global _process
    if is_initialized():
        return
    launched = launched_rank() or Launched(0, 1, 1, "hash:alone")
    seconds = _timeout() if timeout is None else timeout
    world = World.create(
        f"hvd-{next(_ids)}",
        launched.rank,
        launched.size,
        launched.store,
        bind_address(),
        seconds,
    )
    _process = Communicator(world, _this_host())


def shutdown() -> None:
    """Leaves the other ranks; their collectives fail if they still wait for this rank."""
    global _process
    if _process is not None:
        _process.close()
        _process = None


def is_initialized() -> bool:
    """True if this process, or this thread of `run_on_threads`, is a rank: after `init`, before
    `shutdown`."""
    return _ranks.own is not None or _process is not None


def current() -> Communicator:
    """Returns the communicator of this process or thread. Errors: RankError before `init`."""
    found = _ranks.own or _process
    if found is None:
        raise RankError("this process is not a rank yet; call onnxpar.hvd.init() first")
    return found


def rank() -> int:
    """Returns the number of this rank, from 0."""
    return current().rank


def size() -> int:
    """Returns the number of ranks."""
    return current().size


def local_rank() -> int:
    """Returns the number of this rank among the ranks on its host, from 0."""
    return current().local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return current().local_size


def cross_rank() -> int:
    """Returns the number of this host among the hosts that have a rank with this local rank, from
    0."""
    return current().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have a rank with this local rank."""
    return current().cross_size


def run_on_threads(
    function: Callable[[], T],
    ranks: int,
    timeout: float = 60.0,
    hosts: Sequence[str] | None = None,
) -> list[T]:
    """Runs `function` on `ranks` threads of this process, each of which is a rank, and returns the
    results by rank. Meant for notebooks and tests.

    `hosts` pretends that each rank runs on the named host; by default, all share one host. If a
    rank raises an exception, the others fail, and the call raises that exception.
    """
    worlds = thread_worlds(ranks, timeout)
    failures: list[BaseException] = []

    def run(world: World) -> T | None:
        try:
            _ranks.own = Communicator(world, hosts[world.rank] if hosts else "here")
            return function()
        except BaseException as error:  # the outermost boundary of a rank: the others wait for it
            failures.append(error)
            world.abort(f"{type(error).__name__}: {error}")
            return None
        finally:
            _ranks.own = None
            world.close()

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, worlds))
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]


def _timeout() -> float:
    text = os.environ.get("ONNXPAR_TIMEOUT") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InputError(f"ONNXPAR_TIMEOUT={text!r}: give a number of seconds above 0")
    return seconds


def _this_host() -> str:
    """Returns a text that is the same for all processes on this host, and different on other
    hosts."""
    return socket.gethostname() + Path("/proc/sys/kernel/random/boot_id").read_text()
