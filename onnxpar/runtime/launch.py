"""What makes a process a rank: mpirun and its like start all ranks, each of which is one process.

Read from the environment, as the native library does: ONNXPAR_RANK and ONNXPAR_WORLD_SIZE, or Open
MPI's OMPI_COMM_WORLD_RANK and _SIZE; ONNXPAR_STORE, where the ranks find each other (`file:/dir`
or `tcp://host:port`; mpirun on one host needs none); ONNXPAR_BIND, the address to listen on.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxpar.errors import RankError
from onnxpar.runtime.bundle import Bundle, Port
from onnxpar.runtime.cores import own_cores
from onnxpar.runtime.executor import Executor, Heap, Request
from onnxpar.runtime.gather import Gather
from onnxpar.runtime.groups import World
from onnxpar.runtime.log import Log, describe
from onnxpar.runtime.options import SessionSpec
from onnxpar.runtime.parts import Array, Parts
from onnxpar.runtime.ranks import PartsOf

_worlds = itertools.count()


@dataclass(frozen=True)
class Launched:
    """The rank that this process is, of how many in all and on this host, and their store."""

    rank: int
    size: int
    local_size: int
    store: str


def launched_rank(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """What the environment says this process is; None where it is no rank.

    Errors: RankError where it says half of it.
    """
    rank = _number(environment, "ONNXPAR_RANK", "OMPI_COMM_WORLD_RANK")
    if rank is None:
        return None
    size = _number(environment, "ONNXPAR_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
    if size is None or not 0 <= rank < size:
        raise RankError(f"this process is rank {rank} of {size}; set ONNXPAR_WORLD_SIZE")
    local = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") or size
    store = environment.get("ONNXPAR_STORE", "")
    if not store and (folder := environment.get("PMIX_SERVER_TMPDIR")) and local == size:
        store = f"file:{folder}/onnxpar"
    if not store and size > 1:
        raise RankError(
            "the ranks do not know where to find each other; set ONNXPAR_STORE to file:/dir, a "
            "folder that all see, or to tcp://host:port, where rank 0 can listen"
        )
    return Launched(rank, size, local, store or "hash:alone")


def bind_address(environment: Mapping[str, str] = os.environ) -> str:
    """Where ranks listen: ONNXPAR_BIND, else loopback."""
    return environment.get("ONNXPAR_BIND") or "127.0.0.1"


def redirect_output(log_dir: str | os.PathLike[str], rank: int) -> None:
    """Sends what this process writes to `rank.N/stdout.log` and `stderr.log` from now on."""
    log = Log.open(log_dir, rank)
    for stream, file, number in ((sys.stdout, log.stdout, 1), (sys.stderr, log.stderr, 2)):
        stream.flush()
        os.dup2(file.fileno(), number)
    log.close()


class LaunchedRank:
    """The rank that this process is. Every process gets the parts of all, so that all can assemble.

    All processes must make the same calls with the same feeds. After a failure on any of them, each
    raises RankError, and every later call says why.
    """

    def __init__(
        self,
        bundle: Bundle,
        spec: SessionSpec,
        launched: Launched,
        timeout: float,
        log_dir: str | os.PathLike[str] | None = None,
        address: str | None = None,
    ) -> None:
        size, rank = bundle.mesh.size, launched.rank
        if launched.size != size:
            raise RankError(
                f"{bundle.path} has {size} ranks, but {launched.size} processes were started; "
                f"start {size} (mpirun -n {size} ...), or shard the model for {launched.size}"
            )
        if log_dir is not None:
            redirect_output(log_dir, rank)
        self._bundle = bundle
        self._rank = rank
        self._closed: str | None = None
        self._parts = {n: Parts(p.layout, bundle.mesh) for n, p in _ports(bundle).items()}
        self._world = World.create(
            f"launched-{next(_worlds)}",
            rank,
            size,
            launched.store,
            address or bind_address(),
            timeout,
        )
        with self._failing_together("the start"):
            threads, spin = _threads(launched.local_size)
            self._executor = Executor(bundle, self._world, spec, threads, spin, everywhere=True)
            self._gather = Gather(self._world)
        self.providers: Sequence[str] = self._executor.session.get_providers()

    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf:
        """Runs this rank and gathers. Errors: RankError, on every rank."""
        with self._failing_together("the run"):
            parts = {n: self._parts[n].take(array, self._rank) for n, array in feeds.items()}
            slots = self._executor.run(request, parts, Heap())
            return self._gather_parts(request.fetch, {n: s.array for n, s in slots.items()})

    def read_state(self, name: str) -> PartsOf:
        """The parts of a kept state."""
        with self._failing_together(f"reading state {name!r}"):
            slots = self._executor.read_state(name, Heap())
            return self._gather_parts([name], {n: s.array for n, s in slots.items()})

    def write_state(self, name: str, array: Array) -> None:
        """Keeps this rank's part of an array as a state."""
        with self._failing_together(f"writing state {name!r}"):
            self._executor.write_state(name, self._parts[name].take(array, self._rank))

    def reset_states(self) -> None:
        """Forgets all states."""
        self._executor.reset_states()

    def check_usable(self) -> None:
        """Errors: RankError after a failure, or after close."""
        if self._closed is not None:
            raise RankError(f"this session is closed: {self._closed}; make a new one")

    def close(self) -> None:
        """Leaves the world."""
        if self._closed is None:
            self._leave("close() was called")

    def _gather_parts(self, names: Sequence[str], own: Mapping[str, Array]) -> PartsOf:
        """Adds the other ranks' parts to this rank's; what all have whole needs none."""
        split = [name for name in names if not self._parts[name].is_whole]
        found: PartsOf = {name: {0: own[name]} for name in names if name not in split}
        if not split:
            return found
        sizes = [self._bytes(split, rank) for rank in range(self._bundle.mesh.size)]
        bytes_ = [own[name].reshape(-1).view(np.uint8) for name in split if name in own]
        rows = self._gather(np.concatenate(bytes_ or [np.empty(0, np.uint8)]), max(sizes))
        for rank, row in enumerate(rows):
            start = 0
            for name in split:
                dtype, shape, count = self._extent(name, rank)
                if rank in self._parts[name].sources:
                    part = row[start : start + count].view(dtype).reshape(shape)
                    found.setdefault(name, {})[rank] = part
                    start += count
        return found

    def _bytes(self, names: Sequence[str], rank: int) -> int:
        return sum(self._extent(n, rank)[2] for n in names if rank in self._parts[n].sources)

    def _extent(self, name: str, rank: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Dtype, shape and bytes of a rank's part of a split tensor."""
        dtype, shape = _ports(self._bundle)[name].dtype, self._parts[name].local_shape(rank)
        assert shape is not None, "what is split has a layout"
        return dtype, shape, dtype.itemsize * math.prod(shape)

    @contextmanager
    def _failing_together(self, what: str) -> Iterator[None]:
        self.check_usable()
        try:
            yield
        except Exception as error:  # the outermost boundary of a rank: the others wait for it
            text = describe(error)
            self._world.abort(f"rank {self._rank} failed: {text}")
            self._leave(text)
            raise RankError(f"{what} of {self._bundle.path}, rank {self._rank}: {text}") from error

    def _leave(self, reason: str) -> None:
        self._closed = reason
        self._world.close()


def _ports(bundle: Bundle) -> dict[str, Port]:
    return {**bundle.inputs, **bundle.outputs}


def _threads(local_size: int) -> tuple[int, bool]:
    """How many threads this rank runs, and whether they may spin.

    A launcher that binds its processes to cores has shared them out already.
    """
    own, present = len(own_cores()), os.cpu_count() or 1
    if own < present:
        return own, True
    return max(1, own // local_size), local_size <= own


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if text := environment.get(name):
            if not text.isdigit():
                raise RankError(f"{name}={text!r} in the environment is no number")
            return int(text)
    return None
