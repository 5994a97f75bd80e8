"""Sends files of a sharded model between the ranks of a world, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.bundle_names import inner_path
from onnxpar.base.errors import ModelError
from onnxpar.base.write_file import cause
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.ranks.collectives import barrier, broadcast
from onnxpar.runtime.ranks.groups import Group, World
from onnxpar.runtime.ranks.received_file import ReceivedFile
from onnxpar.runtime.ranks.transfers import PIECE, Transfer, waves
from onnxpar.runtime.session.bundle_files import BundleFiles


class FileTraffic(Closing):
    """Sends files of a sharded model to other ranks, and receives files.

    files   the files of the model
    folder  where arriving files are written; None: none arrives here
    ends    a text that names each rank, for errors
    """

    def __init__(
        self, files: BundleFiles, world: World, folder: Path | None, ends: Sequence[str]
    ) -> None:
        self._files, self._world, self._folder, self._ends = files, world, folder, ends
        self._rank = world.rank
        self._arriving: dict[str, ReceivedFile] = {}
        self._groups: dict[tuple[int, ...], Group] = {}
        self._stack = ExitStack()
        self._sent = np.empty(PIECE, np.uint8)
        # One buffer is written to a file while the next piece arrives in the other.
        self._received = [np.empty(PIECE, np.uint8) for _ in range(2)]
        self._writing: list[Future[None] | None] = [None, None]
        self._writer = ThreadPoolExecutor(1, "onnxpar-fetch")

    def close(self) -> None:
        """Waits for what is still written, and closes the files that have arrived. Errors: OSError
        if a write failed."""
        self._writer.shutdown()
        self._stack.close()

    def move(self, transfers: Sequence[Transfer]) -> None:
        """Sends and receives the files of these transfers; all ranks call this with the same list.
        Errors: ModelError, naming both ends, for bytes that contradict the digests, or if a file
        cannot be read; RankError; OSError."""
        for one in transfers:
            if self._rank in one.receivers:
                self._arriving[one.name] = self._new_file(one.name)
        for number, wave in enumerate(waves(transfers)):
            for one, at, length in wave:
                self._move(one, at, length, number % 2)
            # No rank is ahead of another by more than a wave, so none waits until its timeout.
            others = f" and {len(wave) - 1} more" if len(wave) > 1 else ""
            barrier(self._world, self._way(wave[0][0]) + others)
        for writing in filter(None, self._writing):
            writing.result()

    def _new_file(self, name: str) -> ReceivedFile:
        """Creates the file to which file `name` arrives."""
        assert self._folder is not None, "a rank that lacks files has a folder for them"
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        file = ReceivedFile(path, self._files.listed[name])
        self._stack.callback(file.close)
        return file

    def _move(self, one: Transfer, at: int, length: int, turn: int) -> None:
        """Sends or receives bytes [at, at + length) of a file, if this rank takes part. `turn`, 0
        or 1, is the buffer to receive in: the other one may still be on its way to the disk."""
        receives = self._rank in one.receivers
        if not receives and self._rank != one.source:
            return
        part = (self._received[turn] if receives else self._sent)[:length]
        writing = self._writing[turn]
        if receives and writing is not None:
            writing.result()
        way = self._way(one)
        if self._rank == one.source:
            _read(inner_path(self._files.folder, one.name), at, part, way)
        others = [rank for rank in one.receivers if rank != one.source]
        if others:
            broadcast(self._group((one.source, *others)), part, 0, way, out=part)
        if receives:
            self._writing[turn] = self._writer.submit(self._write, one.name, part, way)

    def _way(self, one: Transfer) -> str:
        """Returns a text for errors: the file, its source and its receivers."""
        to = " and ".join(self._ends[rank] for rank in one.receivers)
        return f"{one.name} from {self._ends[one.source]} to {to}"

    def _write(self, name: str, part: Array, way: str) -> None:
        """Writes a piece that has arrived. Errors: ModelError if a block contradicts its digest."""
        try:
            self._arriving[name].append(part.data)
        except ModelError as error:
            raise ModelError(
                f"fetching {way}: {error}; the first has a file that has changed since it was "
                "written: check its folder with `onnxpar inspect --verify`, and copy it again"
            ) from None

    def _group(self, ranks: tuple[int, ...]) -> Group:
        """The group of these ranks, made once."""
        if ranks not in self._groups:
            self._groups[ranks] = self._stack.enter_context(Group(self._world, ranks))
        return self._groups[ranks]


def _read(path: Path, at: int, part: Array, way: str) -> None:
    """Fills `part` with the bytes of a file from `at` on. Errors: ModelError, in which `way` names
    the file, its source and its receivers."""
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            while done < len(part):
                count = os.preadv(file.fileno(), [part[done:].data], at + done)
                if not count:
                    raise ModelError(f"fetching {way}: {path} has become shorter; copy it again")
                done += count
    except OSError as error:
        raise ModelError(f"fetching {way}: cannot read {path}: {cause(error)}") from error
