"""Which rank this process is: init, shutdown, and what all calls run on."""

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
    """One rank's membership of all ranks; `host` is equal on those that share one."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.agreed: set[str] = set()
        """Layouts of fused tensors on which the ranks have found to agree."""
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
        """What `work` returns, done behind what has begun."""
        if self._last is None or self._last.done():
            return work()
        return self.begin(work).result()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Has another thread do `work`, one piece after another."""
        if self._queue is None:
            self._queue = ThreadPoolExecutor(1, thread_name_prefix="onnxpar-hvd")
        future = self._queue.submit(work)
        self._last = future  # type: ignore[assignment]
        return future

    def close(self) -> None:
        """Leaves the world; what has begun fails."""
        self.world.close()
        if self._queue is not None:
            self._queue.shutdown()


class _Ranks(threading.local):
    """The rank that a thread is, where ranks are threads."""

    own: Communicator | None = None


_ranks = _Ranks()
_process: Communicator | None = None


def init(timeout: float | None = None) -> None:
    """Joins the other processes that mpirun, srun or torchrun started, or the variables of
    `onnxpar.runtime.launch.HELP` name; a process that none started is a world of one.

    `timeout`, in seconds, bounds this and every later wait for another rank; ONNXPAR_TIMEOUT gives
    its default, 60 where that is not set. Does nothing where this process has joined.
    Errors: RankError where the others do not come.
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
    """Leaves the others, who must not wait for this rank any more."""
    global _process
    if _process is not None:
        _process.close()
        _process = None


def is_initialized() -> bool:
    """Whether this process, or this thread of `run_on_threads`, is a rank."""
    return _ranks.own is not None or _process is not None


def current() -> Communicator:
    """What this process or thread is. Errors: RankError before init."""
    found = _ranks.own or _process
    if found is None:
        raise RankError("this process has joined no others; call onnxpar.hvd.init() first")
    return found


def rank() -> int:
    """This rank, from 0."""
    return current().rank


def size() -> int:
    """How many ranks there are."""
    return current().size


def local_rank() -> int:
    """This rank among those on its host."""
    return current().local_rank


def local_size() -> int:
    """How many ranks are on this host."""
    return current().local_size


def cross_rank() -> int:
    """This host among those that have this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """How many hosts have this local rank."""
    return current().cross_size


def run_on_threads(
    function: Callable[[], T],
    ranks: int,
    timeout: float = 60.0,
    hosts: Sequence[str] | None = None,
) -> list[T]:
    """What `function` returns on each of `ranks` ranks, threads of this process, for notebooks and
    tests; `hosts` names the host that each is to count as.

    Where one raises, the others fail, and what it raised is raised here.
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
        raise InputError(f"ONNXPAR_TIMEOUT={text!r} is no number of seconds")
    return seconds


def _this_host() -> str:
    """What processes share that run on one host, and no others do."""
    return socket.gethostname() + Path("/proc/sys/kernel/random/boot_id").read_text()
