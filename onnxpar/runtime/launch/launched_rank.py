"""A session whose ranks a launcher started, seen from one of them: this process is one rank."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import OnnxparError, RankError, RunError
from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.profile.profile import Record, host_id
from onnxpar.runtime.ranks.arena import Heap
from onnxpar.runtime.ranks.collectives import barrier, gather_bytes
from onnxpar.runtime.ranks.cores import Share, own_cores, share_beside
from onnxpar.runtime.ranks.executor import Executor
from onnxpar.runtime.ranks.fetch import complete
from onnxpar.runtime.ranks.groups import World
from onnxpar.runtime.ranks.log import describe
from onnxpar.runtime.ranks.planned_run import KeptShapes, Request
from onnxpar.runtime.ranks.ranks import PartsOf
from onnxpar.runtime.ranks.redirect import redirect_output, write_log
from onnxpar.runtime.session.bundle import Bundle, Port, Sizes
from onnxpar.runtime.session.checks import check_table_dir
from onnxpar.runtime.session.gather import Gather
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.shards import PortParts, Rows, Shards
from onnxpar.runtime.states.state_files import Origin

_worlds = itertools.count()
_BY_A_RANK = re.compile(r"rank \d+( \(host [^)]*\))? failed: ")
"""The start of the message of a rank that failed by itself, and not because another rank had
failed."""
_LONGEST_RECORD = 1 << 30
"""The largest profile of a rank that is accepted, in bytes. onnxruntime records at most a million
events, which need less."""


def _unpacked(data: bytes) -> bytes:
    """Returns the decompressed profile of another rank. Errors: RankError if it is too long or
    damaged."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, _LONGEST_RECORD)
    except zlib.error as error:
        raise RankError(f"the record of a rank cannot be read: {error}") from None
    if not reader.eof:
        raise RankError(f"the record of a rank is cut off, or above {_LONGEST_RECORD} bytes")
    return text


class LaunchedRank:
    """All ranks of a session, where this process runs one of them. Every process gets the output
    shards of all ranks, to assemble outputs. A rank whose folder lacks files of the sharded model
    first fetches them from other ranks.

    All processes must make the same calls with the same feeds. If a call fails on one process, all
    raise the same RunError and can continue; after a RankError, every later call fails with the
    same reason.
    """

    def __init__(
        self,
        path: Path,
        spec: SessionSpec,
        launched: Launched,
        timeout: float,
        log_dir: str | os.PathLike[str] | None = None,
        address: str | None = None,
    ) -> None:
        rank = launched.rank
        if log_dir is not None:
            redirect_output(log_dir, launched)
        self._path = path
        self._rank = rank
        self._name = launched.name
        self._closed: str | None = None
        self.kept_shapes: KeptShapes = {}
        self._parts: Mapping[str, Shards] = {}
        self._world = World.create(
            f"launched-{next(_worlds)}",
            rank,
            launched.size,
            launched.store,
            launched.bind_address if address is None else address,
            timeout,
        )
        with self._failing_together("the start", is_start=True):
            self.bundle = bundle = complete(path, self._world)
            self._all_parts = PortParts(bundle)
            spec = replace(spec, table_dir=check_table_dir(bundle, spec.table_dir))
            share = _share(self._world)
            self._executor = Executor(
                bundle, self._world, spec, share.threads, share.spin, everywhere=True
            )
            self._gather = Gather(self._world)
        self.facts = self._executor.facts()

    def memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns an array whose contents are arbitrary, for a feed or an output."""
        return np.empty(shape, dtype)

    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf:
        """Runs this rank with its shards of `feeds`, which are global arrays; returns the output
        shards of all ranks, by name and rank. Errors, on every rank if on one: RunError if the
        ranks can continue, else RankError."""
        with self._failing_together("the run"):
            self._parts = self._all_parts.at(request.sizes)
            parts = {n: self._parts[n].take(array, self._rank) for n, array in feeds.items()}
            slots = self._executor.run(request, parts, Heap())
            self.kept_shapes = self._executor.kept_shapes
            own = {n: s.array for n, s in slots.items()}
            if not request.carried:
                return self._gather_parts(request.fetch, own)
            each = [
                self._gather_parts(request.fetch, {n: a[i] for n, a in own.items()})
                for i in range(request.times)
            ]
            return {n: {r: np.stack([p[n][r] for p in each]) for r in each[0][n]} for n in each[0]}

    def read_state(self, name: str, sizes: Sizes, rows: Rows = None) -> PartsOf:
        """Returns all ranks' shards of a state, by name and rank; with `rows` (start, end), only
        these rows of each shard. `sizes` are the values of open sizes."""
        with self._failing_together(f"reading state {name!r}"):
            self._parts = self._all_parts.at(sizes)
            slots = self._executor.read_state(name, Heap(), sizes, rows)
            return self._gather_parts([name], {n: s.array for n, s in slots.items()}, rows)

    def write_state(self, name: str, array: Array, sizes: Sizes) -> None:
        """Makes this rank's shard of a global array its value of a state."""
        with self._failing_together(f"writing state {name!r}"):
            parts = self._all_parts.at(sizes)[name]
            self._executor.write_state(name, parts.take(array, self._rank))
            self._agree()

    def clear_state(self, name: str, sizes: Sizes) -> None:
        """Fills this rank's shard of a state with zeros."""
        with self._failing_together(f"clearing state {name!r}"):
            self._executor.clear_state(name, sizes)
            self._agree()

    def save_states(self, folder: str, sizes: Sizes) -> dict[str, Digests]:
        """Writes this rank's shards of all states to a folder that all ranks share. Returns after
        all ranks have written; the digests of all ranks' files, by file name."""
        with self._failing_together(f"saving states to {folder}"):
            self._agree()  # rank 0 may only now have made the folder
            files = self._executor.save_states(Path(folder), sizes)
            each = gather_bytes(self._world, json.dumps(files).encode(), "digests")
        return {name: digests for text in each for name, digests in json.loads(text).items()}

    def save_states_later(self, folder: str, sizes: Sizes) -> None:
        """Copies this rank's shards of all states, and writes the copies to the folder in the
        background. Returns after all ranks have copied their shards."""
        with self._failing_together(f"copying states for {folder}"):
            self._executor.save_states_later(Path(folder), sizes)
            self._agree()

    def load_states(
        self, folder: str, names: Sequence[str], sizes: Sizes, origin: Origin | None = None
    ) -> None:
        """Reads this rank's shards of these states from a folder. `origin` says how the states in
        the folder are split, if not as in this session."""
        with self._failing_together(f"loading states from {folder}"):
            self._executor.load_states(Path(folder), names, sizes, origin)
            self._agree()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the `payload` of every process, by rank; all processes must call this."""
        with self._failing_together("an exchange"):
            return gather_bytes(self._world, payload, "exchange")

    def reset_states(self) -> None:
        """Forgets all states, so that the next run starts from initial values."""
        self._executor.settle()
        self._executor.reset_states()

    def undo_states(self) -> None:
        """Returns all states to their values before the last run."""
        self._executor.undo()

    def end_profile(self) -> Sequence[Record]:
        """Ends the recording. Returns the records of all ranks on rank 0, and only a rank's own
        record on others."""
        with self._failing_together("the profile"):
            record = self._executor.end_profile()
            packed = zlib.compress(json.dumps(record).encode())
            each = gather_bytes(self._world, packed, "profile")
            return [record] if self._rank else [json.loads(_unpacked(data)) for data in each]

    def write_log(self, text: str) -> None:
        """Adds text to this rank's log file, if its output goes to one."""
        write_log(text)

    def check_usable(self) -> None:
        """Raises a RankError if the session is closed, by a failure or by `close`."""
        if self._closed is not None:
            raise RankError(f"this session is closed: {self._closed}; make a new one")

    def check_alive(self) -> None:
        """Like `check_usable`: only a call of the session notices that another rank has died."""
        self.check_usable()

    def close(self) -> None:
        """Leaves the session. While an error is handled, as at the end of a `with`, tells the error
        to the ranks that wait for this one."""
        if self._closed is None:
            error = sys.exc_info()[1]
            if isinstance(error, Exception):
                self._world.explain(describe(error))
            self._leave("close() was called")

    def _gather_parts(
        self, names: Sequence[str], own: Mapping[str, Array], rows: Rows = None
    ) -> PartsOf:
        """Returns the shards of these tensors from all ranks, by name and rank; with `rows`, only
        these rows of each. `own` has this rank's shards. Tensors that each rank has whole are not
        exchanged."""
        split = [name for name in names if not self._parts[name].is_whole]
        parts: PartsOf = {name: {0: own[name]} for name in names if name not in split}
        if not split:
            self._agree()
            return parts
        ranks = range(self.bundle.mesh.size)
        shapes = self._shapes(split, own)
        if rows is not None:
            shapes = [{n: _cut(s, *rows) for n, s in each.items()} for each in shapes]
        extents = [{n: self._extent(n, shapes[rank][n]) for n in split} for rank in ranks]
        sent = [[n for n in split if rank in self._parts[n].sources] for rank in ranks]
        sizes = [sum(extents[rank][n][2] for n in sent[rank]) for rank in ranks]
        bytes_ = [own[name].reshape(-1).view(np.uint8) for name in split if name in own]
        payload = np.concatenate(bytes_ or [np.empty(0, np.uint8)])
        for rank, row in enumerate(self._gather(payload, max(sizes))):
            start = 0
            for name in sent[rank]:
                dtype, shape, count = extents[rank][name]
                part = row[start : start + count].view(dtype).reshape(shape)
                parts.setdefault(name, {})[rank] = part
                start += count
        return parts

    def _shapes(
        self, names: Sequence[str], own: Mapping[str, Array]
    ) -> list[dict[str, tuple[int, ...]]]:
        """Returns the shapes of the shards of these tensors: a dict by name for each rank. They
        come from the layouts or, if a size is data-dependent, from an exchange between the
        ranks."""
        ranks = range(self.bundle.mesh.size)
        planned = [{n: self._parts[n].local_shape(rank) for n in names} for rank in ranks]
        if all(shape is not None for shapes in planned for shape in shapes.values()):
            return [{n: s for n, s in shapes.items() if s is not None} for shapes in planned]
        dims = [len(_ports(self.bundle)[name].shape or ()) for name in names]
        mine = [own[n].shape if n in own else (0,) * d for n, d in zip(names, dims, strict=True)]
        sizes = np.array([size for shape in mine for size in shape], np.int64)
        rows = self._gather(sizes.view(np.uint8), sizes.nbytes).view(np.int64)
        ends = np.cumsum([0, *dims])
        return [
            {n: tuple(row[a:b].tolist()) for n, a, b in zip(names, ends, ends[1:], strict=False)}
            for row in rows
        ]

    def _extent(
        self, name: str, shape: tuple[int, ...]
    ) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Returns (dtype, shape, number of bytes) of a shard of tensor `name` with this shape."""
        dtype = _ports(self.bundle)[name].dtype
        return dtype, shape, dtype.itemsize * math.prod(shape)

    def _agree(self) -> None:
        """Waits until all ranks have reached this point; fails on all ranks if one of them has
        failed before it."""
        barrier(self._world, "agreement")

    @contextmanager
    def _failing_together(self, what: str, is_start: bool = False) -> Iterator[None]:
        """Context of a call, named `what` for errors: an error of this rank becomes an error of all
        ranks. The start of a session fails for good; after a failed call, ranks may be able to
        continue."""
        self.check_usable()
        if not is_start:
            self._executor.settle()
            self._world.begin()
        try:
            yield
        except Exception as error:  # the outermost boundary of a rank: the others wait for it
            is_common = isinstance(error, OnnxparError) and error.is_common
            reason = f"{'' if is_common else f'{self._name} failed: '}{describe(error)}"
            fail = self._failed_start if is_start else self._failure
            raise fail(f"{what} of {self._path}", reason) from error

    def _failed_start(self, what: str, reason: str) -> RankError:
        """Ends the session; returns the error that all ranks raise. Its reason is the reason of the
        first rank that failed by itself, if that is known, else this rank's own."""
        told = self._world.failure()
        reason = told if _BY_A_RANK.match(told) else reason
        self._world.abort(reason)
        self._leave(reason)
        return RankError(f"{what}: {reason}" if _BY_A_RANK.match(reason) else reason)

    def _failure(self, what: str, reason: str) -> RankError:
        """Undoes the call on all ranks. Returns the error that all raise: RunError if they are
        ready for the next call, RankError if the session is now closed."""
        try:
            self._world.interrupt(reason)
            self._executor.undo()
            reason = self._world.renew()
        except RankError as error:
            self._world.abort(reason)
            self._leave(str(error))
            return RankError(f"{what}, {self._name}: {error}")
        return RunError(f"{what}: {reason}")

    def _leave(self, reason: str) -> None:
        """Marks the session closed for this reason, and disconnects from the other ranks."""
        self._closed = reason
        self._world.close()


def _cut(shape: tuple[int, ...], start: int, end: int) -> tuple[int, ...]:
    """Returns the shape of rows [start, end) of a tensor of this shape."""
    return (max(min(end, shape[0]) - start, 0), *shape[1:])


def _ports(bundle: Bundle) -> dict[str, Port]:
    """All inputs and outputs, by name."""
    return {**bundle.inputs, **bundle.outputs}


def _share(world: World) -> Share:
    """Returns this rank's share of the cores that its launcher allows, for its threads. Ranks of
    one host that may use the same cores divide them: the cores of the host, of a container or of a
    NUMA node."""
    cores = own_cores()
    mine = f"{host_id()} {cores}".encode()
    return share_beside(gather_bytes(world, mine, "cores").count(mine), cores)
