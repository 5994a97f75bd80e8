"""The interface of a session to its ranks, and the implementation by processes on this host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests
from onnxpar.base.errors import RankError
from onnxpar.base.interrupts import uninterrupted
from onnxpar.base.own_folder import OwnFolder
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.ranks.cores import shares_of_replica
from onnxpar.runtime.ranks.executor import Facts
from onnxpar.runtime.ranks.planned_run import KeptShapes, PlannedRun, Request
from onnxpar.runtime.ranks.processes import AGAIN, Processes
from onnxpar.runtime.ranks.wire import Message, pack
from onnxpar.runtime.session.bundle import Bundle, Sizes
from onnxpar.runtime.session.checks import check_table_dir
from onnxpar.runtime.session.options import SessionSpec
from onnxpar.runtime.session.shards import PortParts, Rows, Shards
from onnxpar.runtime.session.values import BYTES, of_bytes, to_bytes
from onnxpar.runtime.states.state_files import Origin

PartsOf = dict[str, dict[int, Array]]
"""Shards, by tensor name and rank. They are valid until the next call of the ranks."""


def common_shapes(reported: Sequence[KeptShapes]) -> KeptShapes:
    """Returns the shapes of kept states, which all ranks must report equally. Errors: RankError if
    they differ."""
    for rank, shapes in enumerate(reported):
        for name, shape in shapes.items():
            if shape != reported[0][name]:
                raise RankError(
                    f"state {name!r} has the shape {list(reported[0][name])} on rank 0, but "
                    f"{list(shape)} on rank {rank}: its size depends on data, which must be the "
                    "same on all ranks"
                )
    return reported[0]


class Ranks(Protocol):
    """All ranks of a sharded model, as a session calls them. The caller passes global arrays that
    are already checked; the same Request object always comes with feeds of the same dtypes and
    shapes.

    bundle       the sharded model
    facts        facts about the onnxruntime session of a rank
    kept_shapes  the global shapes of the states that the last run kept, by input
    """

    bundle: Bundle
    facts: Facts
    kept_shapes: KeptShapes

    def memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array: ...
    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf: ...
    def read_state(self, name: str, sizes: Sizes, rows: Rows = None) -> PartsOf: ...
    def write_state(self, name: str, array: Array, sizes: Sizes) -> None: ...
    def clear_state(self, name: str, sizes: Sizes) -> None: ...
    def save_states(self, folder: str, sizes: Sizes) -> dict[str, Digests]: ...
    def save_states_later(self, folder: str, sizes: Sizes) -> None: ...
    def load_states(
        self, folder: str, names: Sequence[str], sizes: Sizes, origin: Origin | None = None
    ) -> None: ...
    def exchange(self, payload: bytes) -> list[bytes]: ...
    def write_log(self, text: str) -> None: ...
    def reset_states(self) -> None: ...
    def undo_states(self) -> None: ...
    def end_profile(self) -> Sequence[Record]: ...
    def check_usable(self) -> None: ...
    def check_alive(self) -> None: ...
    def close(self) -> None: ...


class StartRanks(Protocol):
    """A function that starts all ranks of a sharded model, for a session. A wait for a rank takes
    at most `timeout` seconds. Errors: RankError if a rank does not start."""

    def __call__(self, bundle: Bundle, spec: SessionSpec, timeout: float) -> Ranks: ...


class _Piece(NamedTuple):
    """A shard of an input, and where in shared memory it is copied to.

    name   the input
    parts  how the input is split
    rank   the rank whose shard it is
    array  the array in shared memory
    """

    name: str
    parts: Shards
    rank: int
    array: Array

    def write(self, feeds: Mapping[str, Array]) -> None:
        """Copies the shard out of the input's global array to its place."""
        self.parts.write(feeds[self.name], self.rank, self.array)


@dataclass
class _Run:
    """A run that can be repeated without a message to the ranks.

    planned  the record that decides whether a later run repeats this one
    pieces   where shards of inputs are copied to
    answers  the last answers of the ranks
    outputs  the shards of the outputs
    """

    planned: PlannedRun
    pieces: Sequence[_Piece]
    answers: Sequence[Message] = ()
    outputs: PartsOf = field(default_factory=dict)

    def write(self, feeds: Mapping[str, Array]) -> None:
        """Copies the shards of the feeds to their places in shared memory."""
        for piece in self.pieces:
            piece.write(feeds)


Place = tuple[int, Sequence[int], bool]
"""(offset, shape, True if in lasting memory) of an input in shared memory."""
Places = dict[str, Place | list[Place]]
"""The places of inputs: one place if all ranks use the same shard, or else a list with one for each
rank."""


class ProcessRanks:
    """All ranks of a sharded model as processes on this host, one for each rank. Arrays pass
    through shared memory; each distinct shard of an input is copied once, also if several ranks
    read it."""

    def __init__(
        self,
        bundle: Bundle,
        spec: SessionSpec,
        timeout: float,
        log_dir: str | os.PathLike[str] | None = None,
        bind_address: str = "127.0.0.1",
    ) -> None:
        size = bundle.mesh.size
        spec = replace(spec, table_dir=check_table_dir(bundle, spec.table_dir))
        bundle.files.check_complete()
        among = spec.replica, spec.replicas
        of_ranks = shares_of_replica(size, spec.bind, spec.ranks_per_numa, *among)
        self.bundle = bundle
        self._parts = PortParts(bundle)
        ports = (*bundle.inputs.values(), *bundle.outputs.values())
        self._has_values = any(port.is_value for port in ports)
        self._runs = 0
        self._last: _Run | None = None
        self.kept_shapes: KeptShapes = {}
        with OwnFolder() as folder, ExitStack() as failing:
            with uninterrupted():
                self._processes = Processes(bundle.path, size, timeout, log_dir)
                failing.callback(self._processes.end, "the start was interrupted")
            world = {"size": size, "store": f"file:{folder}/store", "bind_address": bind_address}
            common = {"path": str(bundle.path.resolve()), "spec": asdict(spec)}
            messages = [
                {
                    **common,
                    "world": {**world, "rank": rank, "timeout": timeout},
                    "share": asdict(share),
                }
                for rank, share in enumerate(of_ranks)
            ]
            ready = self._processes.call(messages, "the start")
            failing.pop_all()
        self.facts: Facts = ready[0]

    def memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns an array whose contents are arbitrary, for a feed: if a rank's shard of it is
        contiguous, the rank reads it in place, without a copy. Errors: RankError if the session is
        closed."""
        self.check_usable()
        return self._processes.lasting.array(dtype, shape)

    def run(self, request: Request, feeds: Mapping[str, Array]) -> PartsOf:
        """Runs all ranks on their shards of `feeds`, which are global arrays; returns their output
        shards, by name and rank. A run with the same request and the same shapes as the one before
        sends no message. Errors: RunError if the ranks can continue; else RankError, which names
        the rank and ends the session."""
        self._runs += 1
        last, self._last = self._last, None
        lasting = self._processes.lasting.places(feeds)
        if last is not None and last.planned.is_again(request, feeds, lasting):
            last.write(feeds)
            messages = None
        else:
            places, pieces = self._hand_over(feeds, request.sizes)
            last = _Run(PlannedRun.of(request, feeds, lasting), pieces)
            message = {"do": "run", "feeds": places, **self._file_sizes(), **vars(request)}
            messages = [pack(message)] * self.bundle.mesh.size
        answers = self._processes.call(messages, f"run {self._runs}")
        if any(answer is not AGAIN for answer in answers):
            last.answers = [
                before if answer is AGAIN else answer
                for before, answer in zip(last.answers or answers, answers, strict=True)
            ]
            last.outputs = self._parts_in(last.answers)
        if not self._has_values:
            self._last = last
        return last.outputs

    def read_state(self, name: str, sizes: Sizes, rows: Rows = None) -> PartsOf:
        """Returns all ranks' shards of a state, by name and rank; with `rows` (start, end), only
        these rows of each shard. `sizes` are the values of open sizes."""
        message = {"do": "read", "name": name, "sizes": sizes, "rows": rows}
        return self._ask(message, f"reading state {name!r}")

    def write_state(self, name: str, array: Array, sizes: Sizes) -> None:
        """Makes each rank's shard of a global array its value of a state."""
        places, _ = self._hand_over({name: array}, sizes)
        message = {"do": "write", "feeds": places, **self._file_sizes()}
        self._ask(message, f"writing state {name!r}")

    def clear_state(self, name: str, sizes: Sizes) -> None:
        """Fills each rank's shard of a state with zeros."""
        self._ask({"do": "clear", "name": name, "sizes": sizes}, f"clearing state {name!r}")

    def save_states(self, folder: str, sizes: Sizes) -> dict[str, Digests]:
        """Makes each rank write its shards of all states to a folder; returns the digests of the
        files, by file name."""
        ask = pack({"do": "save", "folder": folder, "sizes": sizes})
        messages = [ask] * self.bundle.mesh.size
        answers = self._processes.call(messages, f"saving states to {folder}")
        return {name: digests for a in answers for name, digests in a["files"].items()}

    def save_states_later(self, folder: str, sizes: Sizes) -> None:
        """Makes each rank copy its shards of all states, and write the copies in the background.
        Returns after the copies."""
        ask = pack({"do": "save later", "folder": folder, "sizes": sizes})
        self._processes.call([ask] * self.bundle.mesh.size, f"copying states for {folder}")

    def load_states(
        self, folder: str, names: Sequence[str], sizes: Sizes, origin: Origin | None = None
    ) -> None:
        """Makes each rank read its shards of these states from a folder. `origin` says how the
        states in the folder are split, if not as in this session."""
        message = {"do": "load", "folder": folder, "names": list(names), "sizes": sizes}
        self._ask({**message, "origin": origin}, f"loading states from {folder}")

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns [payload]: the ranks are children of this process, so no other process has a
        payload."""
        return [payload]

    def write_log(self, text: str) -> None:
        """Adds text to the file of each rank's standard output, if there is one in `log_dir`."""
        for rank in self._processes.ranks:
            rank.log.write(text)

    def reset_states(self) -> None:
        """Forgets all states, so that the next run starts from initial values."""
        self._ask({"do": "reset"}, "the reset of states")

    def undo_states(self) -> None:
        """Returns all states to their values before the last run."""
        self._ask({"do": "undo"}, "undoing a run")

    def end_profile(self) -> Sequence[Record]:
        """Ends the recording; returns the record of each rank."""
        ask = [pack({"do": "profile"})] * self.bundle.mesh.size
        return self._processes.call(ask, "the profile")

    def check_usable(self) -> None:
        """Raises a RankError if the ranks have ended."""
        self._processes.check_usable()

    def check_alive(self) -> None:
        """Raises a RankError if a process has ended or is stopped."""
        self._processes.check_alive()

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()

    def _hand_over(self, feeds: Mapping[str, Array], sizes: Sizes) -> tuple[Places, list[_Piece]]:
        """Splits each global array into shards, and copies each distinct shard once into shared
        memory; shards that lie in lasting memory stay where they are. Returns (the places of all
        shards, the copied shards)."""
        self.check_usable()
        ports, parts = self.bundle.inputs, self._parts.at(sizes)
        feeds = {n: to_bytes(v) if ports[n].is_value else v for n, v in feeds.items()}
        arena = self._processes.inputs
        arena.clear()
        by_rank: dict[str, dict[int, Place]] = {
            name: self._lasting_places(array, parts[name]) for name, array in feeds.items()
        }
        pieces = [(n, rank) for n in feeds for rank in parts[n].sources if rank not in by_rank[n]]
        shapes = [parts[n].local_shape(rank) or feeds[n].shape for n, rank in pieces]
        specs = [(feeds[n].dtype, shape) for (n, _), shape in zip(pieces, shapes, strict=True)]
        placed = []
        for (name, rank), slot in zip(pieces, arena.place(specs), strict=True):
            placed.append(_Piece(name, parts[name], rank, slot.array))
            placed[-1].write(feeds)
            by_rank[name][rank] = slot.offset, slot.array.shape, False
        places = {
            name: at[0] if len(at) == 1 else [at[rank] for rank in parts[name].origins]
            for name, at in by_rank.items()
        }
        return places, placed

    def _lasting_places(self, array: Array, parts: Shards) -> dict[int, Place]:
        """Returns the places of the shards of an array that lie in lasting memory and need no copy,
        by rank."""
        memory = self._processes.lasting
        places: dict[int, Place] = {}
        for rank in parts.sources if memory.place(array) is not None else ():
            part = parts.take(array, rank)
            at = memory.place(part)
            if at is not None:
                places[rank] = at, part.shape, True
        return places

    def _file_sizes(self) -> Message:
        """The sizes of the shared files for inputs, to which ranks must map them."""
        return {"size": self._processes.inputs.size, "lasting": self._processes.lasting.size}

    def _ask(self, message: Message, what: str) -> PartsOf:
        """Sends the same message to all ranks; returns the shards that they answer."""
        self._last = None
        return self._parts_in(self._processes.call([pack(message)] * self.bundle.mesh.size, what))

    def _parts_in(self, answers: Sequence[Message]) -> PartsOf:
        """Returns the shards whose places in shared memory are in the answers, by name and rank;
        notes the shapes of kept states."""
        parts: PartsOf = {}
        kept = [{n: tuple(s) for n, s in a.get("kept", {}).items()} for a in answers]
        self.kept_shapes = common_shapes(kept)
        arenas = self._processes.outputs
        for number, (outputs, answer) in enumerate(zip(arenas, answers, strict=True)):
            outputs.map(answer.get("size", 0))
            for name, (offset, shape) in answer.get("slots", {}).items():
                port = self.bundle.outputs.get(name) or self.bundle.inputs[name]
                dtype = BYTES if port.is_value else port.dtype
                part = outputs.view(offset, dtype, tuple(shape))
                parts.setdefault(name, {})[number] = of_bytes(part) if port.is_value else part
        return parts
