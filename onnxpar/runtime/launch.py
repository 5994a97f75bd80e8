"""What makes a process a rank: mpirun, srun and torchrun start all ranks, each one process.

Read from the environment, as the native library does; `HELP` says which variables, in which order.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.errors import RankError, RunError
from onnxpar.files.digests import Digests
from onnxpar.runtime.bundle import Bundle, Port, Sizes
from onnxpar.runtime.collectives import barrier, gather_bytes
from onnxpar.runtime.cores import own_cores
from onnxpar.runtime.executor import Executor, Heap, Request
from onnxpar.runtime.gather import Gather
from onnxpar.runtime.groups import World
from onnxpar.runtime.log import Log, describe
from onnxpar.runtime.options import SessionSpec
from onnxpar.runtime.profile import Record
from onnxpar.runtime.ranks import KeptShapes, PartsOf
from onnxpar.runtime.shards import PortParts, Shards

_worlds = itertools.count()
_terminal: list[tuple[int, int]] = []
"""The rank of this process, and what was its standard error, if that is redirected."""
_SLURM_PORT, _SLURM_PORTS = 20000, 10000
"""Ports of steps; what follows # in a store keeps worlds apart that happen to share one."""

HELP = """under a launcher, each process is one rank and makes the same calls. Its rank and their
number are read from the first of
  ONNXPAR_RANK, ONNXPAR_WORLD_SIZE           set by hand; these win
  OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE mpirun
  SLURM_PROCID, SLURM_STEP_NUM_TASKS         srun (or SLURM_NTASKS, within a step)
  RANK, WORLD_SIZE                           torchrun
and two launchers that contradict each other are an error. The ranks meet at the first of
  ONNXPAR_STORE                   file:/dir, which all see, or tcp://host:port, where rank 0 listens
  mpirun's own directory          on one host
  MASTER_ADDR, MASTER_PORT        at the port behind it: torch's own store has that one
  a port that follows from the Slurm job and step, on one host
ONNXPAR_KEY is a secret of 16 to 512 characters, the same on all ranks, without which nobody can
join (openssl rand -hex 16 makes one). It must be set where the ranks meet at an address that other
hosts can reach; in a folder, rank 0 leaves a key of its own.
ONNXPAR_BIND is the address that ranks listen on (127.0.0.1), ONNXPAR_TIMEOUT bounds every wait of
onnxpar.hvd and of a program without Python, in seconds."""


@dataclass(frozen=True)
class _Launcher:
    """The variables that a launcher sets; srun's count only where `step` is set too."""

    rank: str
    sizes: tuple[str, ...]
    local_size: str = ""
    step: str = ""


_OWN = _Launcher("ONNXPAR_RANK", ("ONNXPAR_WORLD_SIZE",))
_SLURM = _Launcher("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), step="SLURM_STEP_ID")
_LAUNCHERS = (
    _OWN,
    _Launcher("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _SLURM,
    _Launcher("RANK", ("WORLD_SIZE",), "LOCAL_WORLD_SIZE"),
)


@dataclass(frozen=True)
class Launched:
    """The rank that this process is, of how many in all and on this host, and their store."""

    rank: int
    size: int
    local_size: int
    store: str


def launched_rank(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """What the environment says this process is; None where it is no rank.

    Errors: RankError where it says half of it, or where two launchers contradict each other.
    """
    present = [one for one in _LAUNCHERS if _is_present(one, environment)]
    if not present:
        return None
    rank, size = _place(present[0], environment)
    for other in present[1:]:
        if present[0] is not _OWN and (rank, size) != _place(other, environment):
            first, second = (_said(one, environment) for one in (present[0], other))
            raise RankError(
                f"{first} and {second} contradict each other; unset those of the launcher that "
                "did not start this process, or set ONNXPAR_RANK and ONNXPAR_WORLD_SIZE, which win"
            )
        size = size if size is not None else _place(other, environment)[1]
    if rank is None or size is None or not 0 <= rank < size:
        raise RankError(f"this process is rank {rank} of {size}; set {present[0].sizes[0]}")
    local = next(
        (n for one in present if (n := _number(environment, one.local_size)) is not None), None
    )
    if local is None:
        local = -(-size // (_number(environment, "SLURM_STEP_NUM_NODES") or 1))
    store = _store(environment, size, local)
    if not store and size > 1:
        raise RankError(
            "the ranks do not know where to find each other; set ONNXPAR_STORE to file:/dir, a "
            "folder that all see, or to tcp://host:port, where rank 0 can listen, and then "
            "ONNXPAR_KEY to one secret on all"
        )
    return Launched(rank, size, local, store or "hash:alone")


def _is_present(one: _Launcher, environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process. A batch script of Slurm has a rank, but no step,
    and a shell of srun's is a step of one task; names as common as RANK count only together."""
    if not environment.get(one.rank):
        return False
    size = environment.get(one.sizes[0], "")
    if one is _SLURM:
        if environment.get(one.step):
            size = size or environment.get(one.sizes[1], "")
        return size not in ("", "1")
    return bool(size) or one.rank != "RANK"


def _place(one: _Launcher, environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    return _number(environment, one.rank), _number(environment, *one.sizes)


def _said(one: _Launcher, environment: Mapping[str, str]) -> str:
    size = next((name for name in one.sizes if environment.get(name)), one.sizes[0])
    return f"{one.rank}={environment[one.rank]}, {size}={environment.get(size, '')}"


def _store(environment: Mapping[str, str], size: int, local: int) -> str:
    """Where the ranks meet; empty where nothing says it."""
    if store := environment.get("ONNXPAR_STORE"):
        return store
    folder = environment.get("PMIX_SERVER_TMPDIR")
    if folder and local == size and environment.get("OMPI_COMM_WORLD_RANK"):
        return f"file:{folder}/onnxpar"
    host, port = environment.get("MASTER_ADDR"), _number(environment, "MASTER_PORT")
    if host and port:
        if _number(environment, "LOCAL_WORLD_SIZE") == size:
            host = "127.0.0.1"  # not the name that others know this host by
        return f"tcp://{host}:{port + 1}#{port}"
    job = _number(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    if _is_present(_SLURM, environment) and job is not None and local == size:
        step = _number(environment, "SLURM_STEP_ID") or 0
        return f"tcp://127.0.0.1:{_SLURM_PORT + (31 * job + step) % _SLURM_PORTS}#{job}.{step}"
    return ""


def bind_address(environment: Mapping[str, str] = os.environ) -> str:
    """Where ranks listen: ONNXPAR_BIND, else loopback."""
    return environment.get("ONNXPAR_BIND") or "127.0.0.1"


def redirect_output(log_dir: str | os.PathLike[str], rank: int, stdout: bool = True) -> None:
    """Sends what this process writes to `rank.N/stdout.log` and `stderr.log` from now on; to the
    latter alone without `stdout`."""
    log = Log.open(log_dir, rank)
    for stream, file, number in ((sys.stdout, log.stdout, 1), (sys.stderr, log.stderr, 2)):
        if number == 1 and not stdout:
            continue
        stream.flush()
        if number == 2 and not _terminal:
            _terminal.append((rank, os.dup(number)))
        os.dup2(file.fileno(), number)
    log.close()


_HEAD_START = 2.0
"""Seconds that a rank that fails leaves rank 0 to say why: launchers end all once one has ended."""


def tell_terminal(text: str) -> None:
    """Writes why a command failed to what was standard error before it was redirected, if it was.
    Other ranks than 0 leave that one the time to do so first: most failures are those of all, and
    launchers end the other ranks then."""
    for rank, descriptor in _terminal:
        if rank:
            time.sleep(_HEAD_START)
        _write(descriptor, f"onnxpar: error{f' on rank {rank}' if rank else ''}: {text}")


def tell_of_all(text: str) -> None:
    """Writes there, on rank 0, what holds for all ranks: a warning, or what a signal did."""
    for rank, descriptor in _terminal:
        if not rank:
            _write(descriptor, f"onnxpar: {text}")


def _write(descriptor: int, line: str) -> None:
    with suppress(OSError):
        os.write(descriptor, f"{line}\n".encode(errors="backslashreplace"))


_LONGEST_RECORD = 1 << 30
"""Bytes of what a rank has recorded: more than a million events, which it keeps at most, take."""


def _unpacked(data: bytes) -> bytes:
    """What another rank has compressed. Errors: RankError where it is too long, or damaged."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, _LONGEST_RECORD)
    except zlib.error as error:
        raise RankError(f"what a rank has recorded cannot be read: {error}") from None
    if not reader.eof:
        raise RankError(f"what a rank has recorded is cut off, or above {_LONGEST_RECORD} bytes")
    return text


class LaunchedRank:
    """The rank that this process is. Every process gets the parts of all, so that all can assemble.

    All processes must make the same calls with the same feeds. Where a call fails on any of them,
    each raises the same RunError, and they go on; after a RankError, every later call says why.
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
        self.kept_shapes: KeptShapes = {}
        self._all_parts = PortParts(bundle)
        self._parts: Mapping[str, Shards] = {}
        self._world = World.create(
            f"launched-{next(_worlds)}",
            rank,
            size,
            launched.store,
            address or bind_address(),
            timeout,
        )
        with self._failing_together("the start", is_start=True):
            threads, spin = _threads(launched.local_size)
            self._executor = Executor(bundle, self._world, spec, threads, spin, everywhere=True)
            self._gather = Gather(self._world)
        self.facts = self._executor.facts()

    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf:
        """Runs this rank and gathers. Errors: RunError, RankError, on every rank."""
        with self._failing_together("the run"):
            self._parts = self._all_parts.at(request.sizes)
            parts = {n: self._parts[n].take(array, self._rank) for n, array in feeds.items()}
            slots = self._executor.run(request, parts, Heap())
            self.kept_shapes = self._executor.kept_shapes
            return self._gather_parts(request.fetch, {n: s.array for n, s in slots.items()})

    def read_state(self, name: str, sizes: Sizes) -> PartsOf:
        """The parts of a kept state."""
        with self._failing_together(f"reading state {name!r}"):
            self._parts = self._all_parts.at(sizes)
            slots = self._executor.read_state(name, Heap(), sizes)
            return self._gather_parts([name], {n: s.array for n, s in slots.items()})

    def write_state(self, name: str, array: Array, sizes: Sizes) -> None:
        """Keeps this rank's part of an array as a state."""
        with self._failing_together(f"writing state {name!r}"):
            parts = self._all_parts.at(sizes)[name]
            self._executor.write_state(name, parts.take(array, self._rank))
            self._agree()

    def save_states(self, folder: str, sizes: Sizes) -> dict[str, Digests]:
        """Writes this rank's parts of all states to a folder that all ranks see; returns the
        digests of all ranks' files when all have."""
        with self._failing_together(f"saving states to {folder}"):
            self._agree()  # rank 0 may have just made the folder
            files = self._executor.save_states(Path(folder), sizes)
            each = gather_bytes(self._world, json.dumps(files).encode(), "digests")
        return {name: said for text in each for name, said in json.loads(text).items()}

    def load_states(self, folder: str, names: Sequence[str], sizes: Sizes) -> None:
        """Reads this rank's parts of states from a folder."""
        with self._failing_together(f"loading states from {folder}"):
            self._executor.load_states(Path(folder), names, sizes)
            self._agree()

    def exchange(self, payload: bytes) -> list[bytes]:
        """What every process gives, by rank."""
        with self._failing_together("an exchange"):
            return gather_bytes(self._world, payload, "exchange")

    def reset_states(self) -> None:
        """Forgets all states."""
        self._executor.reset_states()

    def end_profile(self) -> Sequence[Record]:
        """What each rank has recorded until now; on other ranks than 0, only their own record."""
        with self._failing_together("the profile"):
            record = self._executor.end_profile()
            packed = zlib.compress(json.dumps(record).encode())
            each = gather_bytes(self._world, packed, "profile")
            return [record] if self._rank else [json.loads(_unpacked(data)) for data in each]

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
            self._agree()
            return found
        ranks = range(self._bundle.mesh.size)
        shapes = self._shapes(split, own)
        extents = [{n: self._extent(n, shapes[rank][n]) for n in split} for rank in ranks]
        sent = [[n for n in split if rank in self._parts[n].sources] for rank in ranks]
        sizes = [sum(extents[rank][n][2] for n in sent[rank]) for rank in ranks]
        bytes_ = [own[name].reshape(-1).view(np.uint8) for name in split if name in own]
        rows = self._gather(np.concatenate(bytes_ or [np.empty(0, np.uint8)]), max(sizes))
        for rank, row in enumerate(rows):
            start = 0
            for name in sent[rank]:
                dtype, shape, count = extents[rank][name]
                part = row[start : start + count].view(dtype).reshape(shape)
                found.setdefault(name, {})[rank] = part
                start += count
        return found

    def _shapes(
        self, names: Sequence[str], own: Mapping[str, Array]
    ) -> list[dict[str, tuple[int, ...]]]:
        """By rank and name, the shapes of parts of split tensors: those of the layout, or, where
        data decides some size of any, as each rank tells the others."""
        ranks = range(self._bundle.mesh.size)
        said = [{n: self._parts[n].local_shape(rank) for n in names} for rank in ranks]
        if all(shape is not None for shapes in said for shape in shapes.values()):
            return [{n: s for n, s in shapes.items() if s is not None} for shapes in said]
        dims = [len(_ports(self._bundle)[name].shape or ()) for name in names]
        mine = [own[n].shape if n in own else (0,) * d for n, d in zip(names, dims, strict=True)]
        told = np.array([size for shape in mine for size in shape], np.int64)
        rows = self._gather(told.view(np.uint8), told.nbytes).view(np.int64)
        ends = np.cumsum([0, *dims])
        return [
            {n: tuple(row[a:b].tolist()) for n, a, b in zip(names, ends, ends[1:], strict=False)}
            for row in rows
        ]

    def _extent(
        self, name: str, shape: tuple[int, ...]
    ) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Dtype, shape and bytes of a part of this shape."""
        dtype = _ports(self._bundle)[name].dtype
        return dtype, shape, dtype.itemsize * math.prod(shape)

    def _agree(self) -> None:
        """Returns where all ranks have come this far: else one would go on alone."""
        barrier(self._world, "agreement")

    @contextmanager
    def _failing_together(self, what: str, is_start: bool = False) -> Iterator[None]:
        self.check_usable()
        if not is_start:
            self._executor.settle()
            self._world.begin()
        try:
            yield
        except Exception as error:  # the outermost boundary of a rank: the others wait for it
            raise self._failure(what, describe(error), is_start) from error

    def _failure(self, what: str, text: str, is_start: bool) -> RankError:
        """What all ranks raise. They are ready for the next call, or the session is closed."""
        reason = f"rank {self._rank} failed: {text}"
        try:
            if is_start:
                self._world.abort(reason)
                raise RankError(reason)
            self._world.interrupt(reason)
            self._executor.undo()
            reason = self._world.renew()
        except RankError as error:
            self._world.abort(reason)
            self._leave(str(error))
            return RankError(f"{what} of {self._bundle.path}, rank {self._rank}: {error}")
        return RunError(f"{what} of {self._bundle.path}: {reason}")

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
        if name and (text := environment.get(name)):
            if not text.isdigit():
                raise RankError(f"{name}={text!r} in the environment is no number")
            return int(text)
    return None
