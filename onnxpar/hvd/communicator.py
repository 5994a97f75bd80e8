"""The connection of a rank with the others, on which all calls of the package run; the numbers of
ranks and hosts; and ranks as threads of one process."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from onnxpar.base.errors import RankError
from onnxpar.hvd.timeline import Timeline
from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.ranks import collectives
from onnxpar.runtime.ranks.groups import Group, World, thread_worlds

if TYPE_CHECKING:
    from onnxpar.hvd.cycles import Cycles

T = TypeVar("T")

_ids = itertools.count()


class Communicator:
    """One rank's connection to all ranks. `host` identifies the rank's host: ranks that pass equal
    texts are on one host."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.agreed: set[tuple[tuple[int, ...], str]] = set()
        """Pairs of ranks and a digest: these ranks have agreed on a list of fused arrays with this
        digest."""
        self.process_sets: dict[int, tuple[int, ...]] = {0: tuple(range(world.size))}
        """The ranks of each registered process set, by its number."""
        self.added = 0
        """The number of the last process set that was added."""
        self.counts: Counter[str] = Counter()
        """Counts, by name, of actions that all ranks must do equally often."""
        self.timeline: Timeline | None = None
        self.cycles: Cycles | None = None
        """The thread that runs collectives in cycles, if the ranks have cycles."""
        self._groups: dict[tuple[int, ...], World | Group] = {self.process_sets[0]: world}
        self._queue: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None
        hosts = collectives.gather_bytes(world, host.encode(), "hosts")
        places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        alike = [rank for rank, place in enumerate(places) if place == places[self.rank]]
        self.local_rank = places[self.rank]
        self.local_size = hosts.count(hosts[self.rank])
        self.cross_rank = alike.index(self.rank)
        self.cross_size = len(alike)
        self.is_homogeneous = len({hosts.count(host) for host in hosts}) == 1

    def group(self, ranks: tuple[int, ...]) -> World | Group:
        """Returns the connection to `ranks`, which include this rank; a group is created once."""
        if ranks not in self._groups:
            self._groups[ranks] = Group(self.world, ranks)
        return self._groups[ranks]

    def ordered(self, work: Callable[[], T], kind: str = "", names: Sequence[str] = ()) -> T:
        """Runs `work` after all work that was started earlier, and returns its result. The timeline
        shows `kind` and the `names` of the tensors."""
        if self.cycles is None and (self._last is None or self._last.done()):
            return self._timed(work, kind, names)()
        return self.begin(work, kind, names).result()

    def begin(self, work: Callable[[], T], kind: str = "", names: Sequence[str] = ()) -> Future[T]:
        """Starts `work` in a thread that runs one piece of work after another, and returns a future
        of its result. The timeline shows `kind` and the `names` of the tensors."""
        if self.cycles is not None:
            return self.cycles.submit([work], kind, ", ".join(names))[0]
        if self._queue is None:
            self._queue = ThreadPoolExecutor(1, thread_name_prefix="onnxpar-hvd")
        future = self._queue.submit(self._timed(work, kind, names))
        self._last = future  # type: ignore[assignment]
        return future

    def activity(self, names: Sequence[str], activity: str) -> AbstractContextManager[None]:
        """Returns a context that records its block on the timeline as `activity` of the named
        tensors."""
        return nullcontext() if self.timeline is None else self.timeline.span(names, activity)

    def _timed(self, work: Callable[[], T], kind: str, names: Sequence[str]) -> Callable[[], T]:
        """Returns `work`, extended to record its wait and its run on the timeline, if there is a
        timeline."""
        timeline = self.timeline
        return work if timeline is None or not kind else timeline.recorded(work, kind, names)

    def close(self) -> None:
        """Disconnects from the other ranks, and ends the threads and the timeline; work in progress
        fails."""
        for group in self._groups.values():
            group.close()
        if self._queue is not None:
            self._queue.shutdown()
        if self.cycles is not None:
            self.cycles.stop()
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None


class _Ranks(threading.local):
    """The communicator of each thread of `run_on_threads`; None in other threads."""

    own: Communicator | None = None


_ranks = _Ranks()
_process: Communicator | None = None


def connect(launched: Launched, timeout: float) -> None:
    """Connects this process with the other ranks. `launched` says this rank's number and how to
    reach the others. Errors: RankError if another process does not connect within `timeout`
    seconds."""
    global _process
    world = World.create(
        f"hvd-{next(_ids)}",
        launched.rank,
        launched.size,
        launched.store,
        launched.bind_address,
        timeout,
    )
    _process = Communicator(world, _this_host())


def shutdown() -> None:
    """Leaves the other ranks; their collectives fail if they still wait for this rank."""
    global _process
    if _process is not None:
        _process.close()
        _process = None


def is_initialized() -> bool:
    """Returns True if this process, or this thread of `run_on_threads`, is a rank: after `init`,
    before `shutdown`."""
    return _ranks.own is not None or _process is not None


def current() -> Communicator:
    """Returns the communicator of this process or thread. Errors: RankError before `init`."""
    communicator = _ranks.own or _process
    if communicator is None:
        raise RankError("this process is not a rank yet; call onnxpar.hvd.init() first")
    return communicator


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
    """Returns the number of this host, from 0, among the hosts that have a rank with the local rank
    of this rank: 1 on the second of two hosts."""
    return current().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have a rank with the local rank of this rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Returns True if all hosts have the same number of ranks."""
    return current().is_homogeneous


def run_on_threads(
    function: Callable[[], T],
    ranks: int,
    timeout: float = 60.0,
    hosts: Sequence[str] | None = None,
) -> list[T]:
    """Runs `function` on `ranks` threads of this process, each of which is a rank, and returns the
    results by rank. Meant for notebooks and tests.

    timeout  seconds that a rank waits for the others in a collective
    hosts    pretends that rank i runs on the host `hosts[i]`; by default, all share one host

    If a rank raises an exception, the others fail, and the call raises that exception.
    """
    worlds = thread_worlds(ranks, timeout)
    failures: list[BaseException] = []

    def run(world: World) -> T | None:
        own: Communicator | None = None
        try:
            own = _ranks.own = Communicator(world, hosts[world.rank] if hosts else "here")
            return function()
        except BaseException as error:  # the outermost boundary of a rank: the others wait for it
            failures.append(error)
            world.abort(f"rank {world.rank} failed: {type(error).__name__}: {error}")
            return None
        finally:
            _ranks.own = None
            world.close()
            if own is not None:
                own.close()

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(run, worlds))
    if failures:
        raise failures[0]
    return results  # type: ignore[return-value]


def _this_host() -> str:
    """Returns a text that is equal for all processes on this host, and different on other hosts."""
    return socket.gethostname() + Path("/proc/sys/kernel/random/boot_id").read_text()
