"""Reads and writes the files of states. Of ranks that have the same shard, the first writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.digests import Digests, DigestWriter
from onnxpar.base.errors import ModelError
from onnxpar.base.packing import stored_bits
from onnxpar.base.write_file import durable_file, writing
from onnxpar.layout.layout import Layout, indices
from onnxpar.layout.mesh import Mesh
from onnxpar.runtime.session.bundle import Port
from onnxpar.runtime.session.shards import Shards
from onnxpar.runtime.session.tensors import is_packed
from onnxpar.runtime.states.host_table import HostTable, row_blocks, unmap, unmap_written

Origin = Mapping[str, Any]
"""How states in files are split: the mesh of the ranks that wrote them, and the layout of each
state, as JSON."""

ALIGN = 64
"""The alignment of tensors in a file of states, in bytes."""


def write_parts(
    folder: Path, rank: int, parts: Iterable[tuple[str, Array | HostTable]]
) -> dict[str, Digests]:
    """Writes a rank's shards of states, (name, shard), to two files in a folder: the tensors, and
    an index. Returns the files' digests, by file name, when the data are on disk. Errors:
    OnnxparError if a file cannot be written."""
    with writing(folder):
        index: dict[str, Any] = {}
        states, list_ = _names(rank)
        with durable_file(folder / states) as sink:
            of_states = DigestWriter(sink)
            for name, part in parts:
                index[name] = _write_part(of_states, part)
        with durable_file(folder / list_) as sink:
            of_list = DigestWriter(sink)
            of_list.write(json.dumps(index).encode())
    return {states: of_states.digests, list_: of_list.digests}


def remove_parts(folder: Path, rank: int) -> None:
    """Removes the files that `write_parts` writes for a rank; ignores errors."""
    for name in _names(rank):
        with suppress(OSError):
            (folder / name).unlink()


def _names(rank: int) -> tuple[str, str]:
    """Returns the names of a rank's two files: (tensors, index)."""
    return f"rank_{rank:04d}.bin", f"rank_{rank:04d}.json"


def _write_part(sink: DigestWriter, part: Array | HostTable) -> dict[str, Any]:
    """Appends a shard to the file of tensors; returns its entry for the index."""
    blocks: Iterable[Array] = [part] if isinstance(part, np.ndarray) else part.blocks()
    whole = part if isinstance(part, np.ndarray) else part.array
    assert not is_packed(whole.dtype), "states are computed"
    sink.write(bytes(-sink.size % ALIGN))
    entry = {"offset": sink.size, "dtype": whole.dtype.name, "shape": list(whole.shape)}
    for block in blocks:
        sink.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return entry


class PartFiles:
    """Reads shards of states from the files that ranks wrote to a folder by `write_parts`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: dict[int, tuple[dict[str, Any], Array]] = {}

    def read(self, name: str, rank: int) -> Array:
        """Returns a rank's shard of a state, an array mapped from the file, but not read yet.
        Errors: ModelError if it is missing."""
        try:
            index, data = self._open(rank)
            entry = index[name]
            dtype, shape, start = np.dtype(entry["dtype"]), tuple(entry["shape"]), entry["offset"]
            count = int(np.prod(shape, dtype=np.int64))
            if not count:
                return np.empty(shape, dtype)
            end = start + max(count * stored_bits(dtype) // 8, 1)
            if not 0 <= start < end <= len(data):
                raise ValueError(f"the file has {len(data):,} bytes")
            part: Array = data[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
            return part
        except (OSError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            file = self._folder / f"rank_{rank:04d}.json"
            raise ModelError(
                f"{file}: state {name!r} is missing or damaged ({error}); use another checkpoint"
            ) from None

    def open(self, ranks: Iterable[int]) -> None:
        """Opens the files of these ranks, which can then be read even if they are removed. Errors:
        OSError; ValueError for an index that is not JSON."""
        for rank in ranks:
            self._open(rank)

    def _open(self, rank: int) -> tuple[dict[str, Any], Array]:
        """Returns (the index, the bytes of the tensors) of a rank."""
        if rank not in self._opened:
            file = self._folder / f"rank_{rank:04d}.json"
            index = json.loads(file.read_text(encoding="utf-8"))
            states = file.with_suffix(".bin")
            is_empty = not states.stat().st_size  # an empty file cannot be mapped
            data = np.empty(0, np.uint8) if is_empty else np.memmap(states, np.uint8, "r")
            self._opened[rank] = index, data
        return self._opened[rank]


class StateFiles:
    """Reads global states from the files of all ranks of a mesh. `layouts` says how each state is
    split over that mesh."""

    def __init__(self, folder: Path, mesh: Mesh, layouts: dict[str, Layout]) -> None:
        self._folder = folder
        self._parts = PartFiles(folder)
        self._mesh = mesh
        self._layouts = layouts

    @staticmethod
    def of(folder: Path, origin: Origin) -> StateFiles:
        """Returns the files in a folder, whose states are split as `origin` says."""
        mesh = Mesh.of((name, size) for name, size in origin["mesh"])
        layouts = {name: Layout.from_json(tree) for name, tree in origin["layouts"].items()}
        return StateFiles(folder, mesh, layouts)

    def origin(self, names: Iterable[str]) -> Origin:
        """Returns how these states are split in the files."""
        layouts = {name: self._layouts[name].to_json() for name in names}
        return {"mesh": [list(axis) for axis in self._mesh.shape], "layouts": layouts}

    def open(self) -> None:
        """Opens the files of all ranks, which can then be read even if they are removed. Errors:
        OSError; ValueError for an index that is not JSON."""
        self._parts.open(range(self._mesh.size))

    def read(self, name: str) -> Array:
        """Returns a state as a global array. Errors: ModelError if it is missing."""
        if name not in self._layouts:
            raise ModelError(f"{self._folder} has no state {name!r}")
        parts = Shards(self._layouts[name], self._mesh)
        return parts.assemble({rank: self._part(name, rank) for rank in parts.sources})

    def _part(self, name: str, rank: int) -> Array:
        """Returns a rank's shard of a state. Errors: ModelError if it is missing, or not of the
        shape that the layout says."""
        part = self._parts.read(name, rank)
        wanted = self._layouts[name].local_shape(self._mesh, rank)
        if part.shape != wanted:
            raise ModelError(
                f"{self._folder}: state {name!r} of rank {rank} has the shape {list(part.shape)}, "
                f"not {list(wanted)}; use another checkpoint"
            )
        return part

    def fill(self, name: str, whole: Array) -> None:
        """Copies a state into the global array `whole`, block by block: if `whole` is mapped from a
        file, no more than a block is in memory at a time. Errors: ModelError if the state is
        missing."""
        parts = Shards(self._layouts[name], self._mesh)
        if any(parts.rows(rank) is None for rank in parts.sources):
            whole[...] = self.read(name)
            return
        for rank in parts.sources:
            part = self._part(name, rank)
            for rows in row_blocks(part.shape, part.dtype):
                parts.place(whole, rank, rows.start, part[rows])
                unmap(part)
                unmap_written(whole)

    def copy_shard(
        self, name: str, layout: Layout, mesh: Mesh, rank: int, table: HostTable
    ) -> None:
        """Copies rank `rank`'s shard of a state into a table, where `layout` splits the state over
        `mesh`, which may differ from layout and mesh of the files. It is copied block by block, so
        that no more than a block is in memory at a time. Errors: ModelError if the state is
        missing."""
        own = [indices(dim, mesh, rank) for dim in layout.dims]
        for source in Shards(self._layouts[name], self._mesh).sources:
            part = self._part(name, source)
            theirs = [indices(dim, self._mesh, source) for dim in self._layouts[name].dims]
            both = [
                np.intersect1d(a, b, assume_unique=True, return_indices=True)[1:]
                for a, b in zip(own, theirs, strict=True)
            ]
            table.copy_rows([at for at, _ in both], [of for _, of in both], part)

    def blank(self, name: str) -> Array:
        """Returns zeros of a state's dtype and global shape, a broadcast scalar that takes no
        memory. Errors: ModelError if the state is missing."""
        if name not in self._layouts:
            raise ModelError(f"{self._folder} has no state {name!r}")
        layout = self._layouts[name]
        first = min(Shards(layout, self._mesh).sources)
        dtype = self._parts.read(name, first).dtype
        try:
            return np.broadcast_to(np.zeros((), dtype), layout.shape)
        except ValueError:
            raise ModelError(
                f"{self._folder}: state {name!r} cannot have the shape {list(layout.shape)}; the "
                "files are damaged"
            ) from None

    def has_same_shards(self, name: str, mesh: Mesh, port: Port) -> bool:
        """True if each rank of `mesh` can read its shard of a state from its own file, because
        mesh, layout and dtype are the same in the files. `port` is the state's input in the model.
        Errors: ModelError if a shard is missing."""
        layout = self._layouts.get(name)
        if layout is None or port.layout is None or mesh != self._mesh:
            return False
        if layout.normalized() != port.layout.normalized():
            return False
        sources = Shards(layout, mesh).sources
        return all(self._parts.read(name, rank).dtype == port.dtype for rank in sources)
