"""Sessions whose ranks are threads of this process instead of processes, for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import RankError, RunError
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.ranks import groups
from onnxpar.runtime.ranks.arena import Heap
from onnxpar.runtime.ranks.executor import Executor
from onnxpar.runtime.ranks.log import describe
from onnxpar.runtime.ranks.planned_run import KeptShapes, Request
from onnxpar.runtime.ranks.ranks import PartsOf, common_shapes
from onnxpar.runtime.session.bundle import Bundle, Sizes
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.session import Session
from onnxpar.runtime.session.shards import PortParts, Rows
from onnxpar.runtime.states.state_files import Origin

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxpar.runtime.ranks.arena import Slot

T = TypeVar("T")


class ThreadSession(Session):
    """A session whose ranks are threads of this process; it starts quickly and is meant for tests.
    A crash in native code ends this process.

    worlds  worlds to run in, one for each rank, which the session leaves open for other sessions,
            unless a call fails; None: the session creates its own
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str],
        sess_options: ort.SessionOptions | None = None,
        *,
        timeout: float = 60.0,
        worlds: Sequence[groups.World] | None = None,
    ) -> None:
        bundle = Bundle.load(path_or_bytes)
        ranks = ThreadRanks(bundle, SessionSpec.of(sess_options), timeout, worlds)
        super().__init__(bundle, ranks, sess_options=sess_options)


class ThreadRanks:
    """All ranks of a sharded model as threads of this process. If a call fails on one rank, all
    ranks abandon it and can continue; if a rank does not start, or if ranks disagree, every later
    call fails with the same reason."""

    def __init__(
        self,
        bundle: Bundle,
        spec: SessionSpec,
        timeout: float,
        worlds: Sequence[groups.World] | None = None,
    ) -> None:
        bundle.files.check_complete()
        size = bundle.mesh.size
        self.bundle = bundle
        self._parts = PortParts(bundle)
        self._failure: RankError | None = None
        self._closed = False
        self._executors: list[Executor] = []
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="onnxpar-rank")
        self._worlds = groups.thread_worlds(size, timeout) if worlds is None else list(worlds)
        self._lent = worlds is not None
        self.kept_shapes: KeptShapes = {}
        self._path = bundle.path
        self._executors = self._all(
            lambda rank: Executor(bundle, self._worlds[rank], spec, threads=1, spin=False),
            "the start",
        )
        self.facts = self._executors[0].facts()

    def memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns an array whose contents are arbitrary."""
        return np.empty(shape, dtype)

    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf:
        """Runs all ranks on their shards of `feeds`, which are global arrays; returns their output
        shards, by name and rank. Errors: RunError if the ranks can continue; else RankError."""
        ports = self._parts.at(request.sizes)

        def run(rank: int) -> Mapping[str, Slot]:
            parts = {n: ports[n].take(array, rank) for n, array in feeds.items()}
            return self._executors[rank].run(request, parts, Heap())

        shards = _by_name(self._all(run, "run"))
        self.kept_shapes = common_shapes([e.kept_shapes for e in self._executors])
        return shards

    def read_state(self, name: str, sizes: Sizes, rows: Rows = None) -> PartsOf:
        """Returns all ranks' shards of a state, by name and rank; with `rows` (start, end), only
        these rows of each shard."""
        slots = self._all(
            lambda r: self._executors[r].read_state(name, Heap(), sizes, rows), "reading a state"
        )
        return _by_name(slots)

    def write_state(self, name: str, array: Array, sizes: Sizes) -> None:
        """Makes each rank's shard of a global array its value of a state."""
        parts = self._parts.at(sizes)[name]
        self._all(
            lambda r: self._executors[r].write_state(name, parts.take(array, r)), "writing a state"
        )

    def clear_state(self, name: str, sizes: Sizes) -> None:
        """Fills each rank's shard of a state with zeros."""
        self._all(lambda r: self._executors[r].clear_state(name, sizes), "clearing a state")

    def save_states(self, folder: str, sizes: Sizes) -> dict[str, Digests]:
        """Makes each rank write its shards of all states to a folder; returns the digests of the
        files, by file name."""
        target = Path(folder)
        each = self._all(lambda r: self._executors[r].save_states(target, sizes), "saving states")
        return {name: digests for files in each for name, digests in files.items()}

    def save_states_later(self, folder: str, sizes: Sizes) -> None:
        """Makes each rank copy its shards of all states, and write the copies in the background.
        Returns after the copies."""
        target = Path(folder)
        self._all(lambda r: self._executors[r].save_states_later(target, sizes), "copying states")

    def load_states(
        self, folder: str, names: Sequence[str], sizes: Sizes, origin: Origin | None = None
    ) -> None:
        """Makes each rank read its shards of these states from a folder. `origin` says how the
        states in the folder are split, if not as in this session."""
        arguments = (Path(folder), names, sizes, origin)
        self._all(lambda r: self._executors[r].load_states(*arguments), "loading states")

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns [payload]: there is no other process."""
        return [payload]

    def write_log(self, text: str) -> None:
        """Does nothing: threads have no output of their own."""

    def reset_states(self) -> None:
        """Forgets all states, so that the next run starts from initial values."""
        self._all(lambda r: self._executors[r].reset_states(), "the reset of states")

    def undo_states(self) -> None:
        """Returns all states to their values before the last run."""
        for executor in self._executors:
            executor.undo()

    def end_profile(self) -> Sequence[Record]:
        """Ends the recording; returns the record of each rank."""
        return self._all(lambda r: self._executors[r].end_profile(), "the profile")

    def check_usable(self) -> None:
        """Raises a RankError if the session is closed, by a failure or by `close`."""
        if self._closed:
            cause = self._failure or "close() was called"
            raise RankError(f"this session is closed: {cause}; make a new one")

    def check_alive(self) -> None:
        """Raises a RankError if the session is closed: threads cannot end before it."""
        self.check_usable()

    def close(self) -> None:
        """Ends the threads, and leaves the worlds, unless these are the caller's."""
        if self._closed:
            return
        self._closed = True
        self._executors.clear()
        for world in () if self._lent else self._worlds:
            world.close()
        self._pool.shutdown()

    def _all(self, work: Callable[[int], T], what: str) -> list[T]:
        """Calls `work(rank)` for all ranks in parallel; returns the results, by rank. `what` names
        the work in errors. Errors: RunError if the ranks can continue, else RankError."""
        self.check_usable()
        failed: list[Exception] = []

        for executor in self._executors:
            executor.settle()

        def one(rank: int) -> T | None:
            try:
                return work(rank)
            except Exception as error:  # the outermost boundary of a rank: the others wait for it
                failed.append(error)
                if not (self._executors and self._executors[rank].stopped):
                    self._worlds[rank].interrupt(f"rank {rank} failed: {describe(error)}")
                for executor in self._executors:
                    if (run := executor.running) is not None:
                        executor.stop(run)
                return None

        results = list(self._pool.map(one, range(len(self._worlds))))
        if failed:
            raise self._recovered(what) from failed[0]
        return [result for result in results]  # type: ignore[misc]

    def _recovered(self, what: str) -> RankError:
        """Undoes a failed call. Returns the error to raise: RunError if the ranks are ready for the
        next call, RankError if the session is now closed."""

        def renew(rank: int) -> str:
            if self._executors:
                self._executors[rank].undo()
            return self._worlds[rank].renew()

        try:
            reasons = list(self._pool.map(renew, range(len(self._worlds))))
        except RankError as error:
            self._failure = RankError(f"{what} of {self._path}: {error}")
        else:
            if self._executors:
                return RunError(f"{what} of {self._path}: {reasons[0]}")
            self._failure = RankError(f"{what} of {self._path}: {reasons[0]}")
        self.close()
        return self._failure


def _by_name(slots: Sequence[Mapping[str, Slot]]) -> PartsOf:
    """The shards of all ranks, by name and rank."""
    parts: PartsOf = {}
    for rank, named in enumerate(slots):
        for name, slot in named.items():
            parts.setdefault(name, {})[rank] = slot.array
    return parts
