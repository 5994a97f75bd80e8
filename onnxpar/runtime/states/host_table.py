"""A table on the host: a state that stays in a file instead of in memory, and whose rows runs
change a few at a time, such as a large embedding.

The file has no name, so it vanishes with its process, and a kill leaves nothing behind. The
operating system keeps the rows that are used in memory, up to a limit, and writes the others to the
disk.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxpar.base.arrays import Array
from onnxpar.base.copy_part import copy_part
from onnxpar.base.errors import InputError, ModelError
from onnxpar.base.write_file import cause, unread
from onnxpar.runtime.session.tensors import ELEMENTS, view_of

BLOCK = 8 << 20
"""Bytes that are copied at a time."""
_PAUSE = 0.002
"""Seconds between two looks at how much memory rows take."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class RowUpdate:
    """New values of some rows of a rank's shard of a table.

    indices  int64 of shape [count, 1]; the number of rows of the shard stands for a row of another
             rank
    rows     of shape [count, ...] and the table's dtype; rows with equal indices are equal
    """

    indices: ort.OrtValue
    rows: ort.OrtValue

    def write(self, table: Array) -> None:
        """Replaces these rows of `table`, the rank's shard."""
        index = view_of(self.indices, np.dtype(np.int64)).reshape(-1)
        rows = view_of(self.rows, table.dtype)
        index = np.where(index < 0, index + len(table), index)
        own = index < len(table)
        table[index[own]] = rows[own]


class HostTable:
    """The state `name` in a memory-mapped file, which is made in `folder` and begins as zeros.
    Errors: InputError if the folder has no room for it, or cannot be written."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._name = name
        self._folder = folder
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)  # the map keeps the content
            if size:  # in a sparse file, a write to a full disk would kill the process
                os.posix_fallocate(self._file.fileno(), 0, size)
            self._map = mmap.mmap(self._file.fileno(), size) if size else None
        except OSError as error:
            raise InputError(
                f"cannot make the file of {size:,} bytes for {name!r} in {folder}: {cause(error)} "
                "with --table-dir (table_dir)"
            ) from None
        if self._map is not None:
            self._map.madvise(mmap.MADV_RANDOM)
        memory = np.frombuffer(self._map, np.uint8) if self._map else np.empty(0, np.uint8)
        self.array: Array = memory.view(dtype).reshape(shape)

    @cached_property
    def value(self) -> ort.OrtValue:
        """The table as an OrtValue that shares its mapped memory."""
        if self.array.dtype.isbuiltin == 1:
            return ort.OrtValue.ortvalue_from_numpy(self.array)
        bits = self.array.view(np.dtype(f"uint{8 * self.array.itemsize}"))
        number, _ = ELEMENTS[self.array.dtype.name]
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, number)

    def duplicate(self) -> HostTable:
        """Returns a copy of the table, in a new file in the same folder. Errors: InputError if the
        folder has no room for it."""
        table = HostTable(self._folder, self._name, self.array.dtype, self.array.shape)
        try:
            table._fill(self._file.fileno(), 0)
        except OSError as error:
            raise InputError(
                f"cannot copy the table {self._name!r} in {self._folder}: {cause(error)}"
            ) from None
        return table

    def copy_from(self, path: Path, offset: int) -> None:
        """Fills the table from a file, in which it starts at `offset`; file systems that can share
        blocks between files do. Errors: ModelError if the file cannot be read."""
        try:
            with path.open("rb") as source:
                self._fill(source.fileno(), offset)
        except OSError as error:
            raise ModelError(f"cannot read {self._name!r} from {path}: {unread(error)}") from None

    def _fill(self, source: int, offset: int) -> None:
        """Fills the table from an open file, in which it starts at `offset`. Errors: OSError if the
        file cannot be read or is too short."""
        done, size = 0, self.array.nbytes
        while done < size:
            count = copy_part(source, self._file.fileno(), size - done, offset + done, done)
            if not count:
                raise OSError(f"it ends after {offset + done:,} bytes")
            done += count

    def copy(self, part: Array) -> None:
        """Fills the table from an array of its shape, block by block, so that little of it is in
        memory."""
        for rows in self._blocks():
            self.array[rows] = part[rows]
            self.release()
            unmap(part)

    def copy_rows(self, at: Sequence[Array], of: Sequence[Array], part: Array) -> None:
        """Copies elements of a mapped array into the table, block by block: the elements at the
        positions `of` (indices in each dimension of `part`) go to the positions `at` of the
        table."""
        count = max(BLOCK * len(self.array) // max(self.array.nbytes, 1), 1)
        for start in range(0, len(at[0]), count):
            rows = slice(start, start + count)
            block = part[np.ix_(of[0][rows], *of[1:])]
            self.array[np.ix_(at[0][rows], *at[1:])] = block
            self.release()
            unmap(part)

    def blocks(self) -> Iterator[Array]:
        """Yields the table in blocks of rows; after each block, its memory is released."""
        for rows in self._blocks():
            yield self.array[rows]
            self.release()

    def _blocks(self) -> Iterator[slice]:
        """The blocks as slices of rows."""
        return row_blocks(self.array.shape, self.array.dtype)

    def release(self) -> None:
        """Takes the rows out of this process's memory; the operating system still caches the rows,
        and writes changed rows to the file."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


class RowCache:
    """Keeps the rows that tables have in this process's memory below `limit` bytes; only on
    Linux."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._least = mapped_bytes()

    def trim(self, tables: Sequence[HostTable]) -> None:
        """Releases the tables if this process has more of mapped files in memory than the limit
        allows."""
        if tables and mapped_bytes() - self._least > self._limit:
            for table in tables:
                table.release()
            self._least = mapped_bytes()

    @contextmanager
    def watching(self, tables: Sequence[HostTable]) -> Iterator[None]:
        """Context in which a thread trims the tables again and again: where a row is read, the
        system also maps cached pages around it."""
        if not tables:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(tables, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, tables: Sequence[HostTable], over: threading.Event) -> None:
        """Trims the tables at regular intervals until `over` is set; a thread does this during a
        run."""
        while not over.wait(_PAUSE):
            self.trim(tables)


def row_blocks(shape: Sequence[int], dtype: np.dtype[Any]) -> Iterator[slice]:
    """Yields the rows of a tensor in slices of at most BLOCK bytes, but of one row at least."""
    row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    step = max(BLOCK // max(row, 1), 1)
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def unmap(array: Array) -> None:
    """Releases the memory of an array from `numpy.memmap`: its pages remain in the file and in the
    system's cache."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and not isinstance(owner.base, mmap.mmap):
        owner = owner.base
    if isinstance(owner, np.ndarray) and isinstance(owner.base, mmap.mmap):
        owner.base.madvise(mmap.MADV_DONTNEED)


def unmap_written(array: Array) -> None:
    """Like `unmap`, if `array` is from `numpy.memmap` and writes to it go to the file; does nothing
    for any other array."""
    if isinstance(array, np.memmap) and array.mode in ("r+", "w+"):
        unmap(array)


def mapped_bytes() -> int:
    """The bytes of mapped files that are in this process's memory; 0 where that is unknown."""
    try:
        return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0
