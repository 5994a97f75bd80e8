"""Splits weights into the ranks' shards, and writes them, block by block, so that no weight is ever
whole in memory.

Every distinct shard is written once. Shards with the same holders share a file: all ranks
(`shared.weights`), several ranks (`shared_0001.weights` and so on) or one rank
(`rank_0000.weights`). So a rank reads its files completely. The ranks' graphs refer to shards by
file, offset and length.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, TensorProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.base.bundle_names import SHARED, rank_name, shared_name
from onnxpar.base.packing import pack, unpack
from onnxpar.base.write_digested import DigestedFile, DigestedFolder
from onnxpar.graph.stored import element_bits, external_location, stored_bytes, stored_tensors
from onnxpar.layout.layout import Factor, Layout, indices, neutral
from onnxpar.layout.mesh import Mesh

CHUNK = 8 << 20
"""Bytes read at a time."""
ALIGN = mmap.ALLOCATIONGRANULARITY
"""Alignment of shards in files, so that a runtime can map them."""
INLINE = 1024
"""Shards of up to this many bytes are stored in the graph itself."""


@dataclass
class Shard:
    """A shard of a weight: in the file `location`, from byte `offset` on, or, as `data`, in the
    graph itself."""

    shape: tuple[int, ...]
    location: str = ""
    offset: int = 0
    length: int = 0
    data: bytearray | None = None

    def proto(self, name: str, weight: TensorProto) -> TensorProto:
        """Returns the initializer called `name` that holds the shard, or refers to its file; with
        the weight's doc string and metadata."""
        tensor = TensorProto(name=name, data_type=weight.data_type, dims=self.shape)
        tensor.doc_string = weight.doc_string
        tensor.metadata_props.extend(weight.metadata_props)
        if self.data is not None:
            tensor.raw_data = bytes(self.data)
            return tensor
        tensor.data_location = TensorProto.EXTERNAL
        for key in ("location", "offset", "length"):
            tensor.external_data.add(key=key, value=str(getattr(self, key)))
        return tensor


@dataclass
class WeightStore:
    """Writes the weight files of a sharded model.

    folder    the folder of the sharded model
    source    the folder of the original model
    progress  called with a number of bytes whenever so many are done
    names     the names of files that several ranks read, by these ranks
    """

    folder: DigestedFolder
    source: Path
    mesh: Mesh
    progress: Callable[[int], None] = lambda n: None
    names: dict[tuple[int, ...], str] = field(default_factory=dict)

    def cut(
        self, name: str, weight: TensorProto, layout: Layout, parts: Sequence[TensorProto] = ()
    ) -> list[TensorProto]:
        """Writes every distinct shard of a weight once; returns the initializer of each rank, in
        the order of ranks. If the weight is a stack of stored weights, `parts` are these
        weights."""
        if weight.data_type == TensorProto.STRING:
            return self._cut_strings(name, weight, layout)
        holder = self._first_holders(layout)
        placed = {r: self._place(r, weight, layout, holder) for r in sorted(set(holder))}
        shards = {rank: shard for rank, (shard, _) in placed.items()}
        with ExitStack() as stack:
            writers = [
                _Writer(
                    weight,
                    shard,
                    stack.enter_context(file.opened()) if file else None,
                    layout,
                    self.mesh,
                    rank,
                )
                for rank, (shard, file) in placed.items()
            ]
            if weight.data_location == TensorProto.EXTERNAL and not parts:
                writers = [w for w in writers if not w.copy_run(weight, self.source)]
            if not writers:
                self.progress(stored_bytes(weight))
                return [shards[r].proto(name, weight) for r in holder]
            for lead, start, block in read_blocks(weight, self.source, parts):
                for writer in writers:
                    writer.write(lead, start, block)
                self.progress(block.size * element_bits(weight.data_type) // 8)
            for writer in writers:
                writer.finish()
        return [shards[r].proto(name, weight) for r in holder]

    def cut_inner(self, graph: GraphProto, others: Collection[str] = ()) -> None:
        """Writes the tensors in subgraphs and attributes of a graph whose data are in the model's
        files, whole for every rank. Leaves out those named in `others`, which other calls write."""
        for i, tensor in enumerate(stored_tensors(graph)):
            if tensor.data_location == TensorProto.EXTERNAL and tensor.name not in others:
                name = tensor.name or f"attribute.{i}"
                tensor.CopyFrom(self.cut(name, tensor, whole_layout(tensor))[0])

    def _cut_strings(self, name: str, weight: TensorProto, layout: Layout) -> list[TensorProto]:
        """Returns the initializers of all ranks for a weight of strings, which ONNX stores only in
        the graph."""
        whole = numpy_helper.to_array(weight)
        parts = (layout.take(whole, self.mesh, rank) for rank in range(self.mesh.size))
        return [numpy_helper.from_array(part, name) for part in parts]

    def _first_holders(self, layout: Layout) -> list[int]:
        """Returns, for each rank, the first rank that holds the same shard: [0, 1, 0, 1] if ranks 0
        and 2 hold equal shards, and 1 and 3."""
        first: dict[tuple[int, ...], int] = {}
        axes = tuple(dict.fromkeys(layout.axes))
        keys = (
            tuple(self.mesh.coordinate((a,), rank) for a in axes) for rank in range(self.mesh.size)
        )
        return [first.setdefault(key, rank) for rank, key in enumerate(keys)]

    def _place(
        self, rank: int, weight: TensorProto, layout: Layout, holder: list[int]
    ) -> tuple[Shard, DigestedFile | None]:
        """Reserves the place of the shard that this rank is the first to hold; returns the shard,
        and its file, or None if it is in the graph. `holder` has, for each rank, the first rank
        that holds the same shard."""
        shape = layout.local_shape(self.mesh, rank)
        bits = element_bits(weight.data_type)
        length = -(-int(np.prod(shape, dtype=np.int64)) * bits // 8)
        if length <= INLINE:
            return Shard(shape, length=length, data=bytearray(length)), None
        holders = tuple(r for r, first in enumerate(holder) if first == rank)
        location = self._name(holders)
        is_shared = location == SHARED
        file = self.folder.file(location, None if is_shared else holders)
        file.align(ALIGN)
        return Shard(shape, location, file.size, length), file

    def _name(self, holders: tuple[int, ...]) -> str:
        """Returns the name of the file with the shards that exactly these ranks hold."""
        if len(holders) == 1:
            return rank_name(holders[0], "weights")
        if len(holders) == self.mesh.size:
            return SHARED
        return self.names.setdefault(holders, shared_name(len(self.names)))


class _Writer:
    """Writes a rank's shard of a weight, from blocks of the weight, which come in order."""

    def __init__(
        self,
        weight: TensorProto,
        part: Shard,
        file: DigestedFile | None,
        layout: Layout,
        mesh: Mesh,
        rank: int,
    ) -> None:
        self.bits = element_bits(weight.data_type)
        self.part = part
        self.file = file
        self.held = [indices(d, mesh, rank) for d in layout.dims]
        self.whole = [len(h) == d.size for h, d in zip(self.held, layout.dims, strict=True)]
        blank = layout.partial and mesh.coordinate(layout.partial, rank)
        self.fill = layout.reduce if blank else None
        self.done = 0
        self.rest = np.empty(0, np.uint8)

    def copy_run(self, weight: TensorProto, folder: Path) -> bool:
        """Copies a shard that is contiguous in the file of the weight, within the operating
        system's kernel; returns False, and copies nothing, if it is not contiguous."""
        if self.fill or self.file is None or not all(self.whole[1:]) or not self.held:
            return False
        rows = self.held[0]
        if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
            return False
        location, offset, _ = external_location(weight)
        row_bits = self.bits * int(np.prod(weight.dims[1:], dtype=np.int64))
        if int(rows[0]) * row_bits % 8 or len(rows) * row_bits % 8:
            return False
        at = offset + int(rows[0]) * row_bits // 8
        self.file.append_from(folder / location, at, self.part.length)
        return True

    def write(self, lead: tuple[int, ...], start: int, block: Array) -> None:
        """Writes the rank's elements of a block; the block has rows of the weight from number
        `start` on, within the element at the indices `lead`."""
        for at, held in zip(lead, self.held, strict=False):
            place = np.searchsorted(held, at)
            if place == len(held) or held[place] != at:
                return
        rest = self.held[len(lead) :]
        for i, held in enumerate(rest):
            if i == 0:
                low, high = np.searchsorted(held, [start, start + len(block)])
                block = _take(block, held[low:high] - start, 0)
            elif not self.whole[len(lead) + i]:
                block = _take(block, held, i)
        if self.fill:
            block = np.full_like(block, neutral(self.fill, block.dtype))
        data = np.ascontiguousarray(block).reshape(-1)
        if self.bits < 8:
            data = np.concatenate([self.rest, data])
            full = len(data) - len(data) % (8 // self.bits)
            data, self.rest = pack(data[:full], self.bits), data[full:]
        self._append(data.view(np.uint8))

    def finish(self) -> None:
        """Writes the last byte, if its bits are not all in use."""
        if len(self.rest):
            self._append(pack(self.rest, self.bits))

    def _append(self, data: Array) -> None:
        """Appends bytes to the shard."""
        if self.part.data is not None:
            self.part.data[self.done : self.done + data.nbytes] = data.tobytes()
            self.done += data.nbytes
        else:
            assert self.file is not None, "a shard is in a file or in the graph"
            self.file.append(data.tobytes())


def _take(block: Array, positions: Array, axis: int) -> Array:
    """Returns the elements of `block` at these ascending positions along `axis`; a view if they are
    contiguous."""
    n = len(positions)
    if n and positions[-1] - positions[0] + 1 == n:
        return block[(slice(None),) * axis + (slice(int(positions[0]), int(positions[0]) + n),)]
    return np.take(block, positions, axis)


def whole_layout(weight: TensorProto) -> Layout:
    """Returns the layout of a weight that every rank holds whole."""
    return Layout(tuple(Factor(size) for size in weight.dims))


def _dtype(weight: TensorProto) -> np.dtype[Any]:
    """Returns the dtype of a weight's elements in a block; uint8 for elements of less than a
    byte."""
    packed = element_bits(weight.data_type) < 8
    return np.dtype(np.uint8 if packed else helper.tensor_dtype_to_np_dtype(weight.data_type))


def read_blocks(
    weight: TensorProto, folder: Path, parts: Sequence[TensorProto] = ()
) -> Iterator[tuple[tuple[int, ...], int, Array]]:
    """Yields a weight in blocks of at most CHUNK bytes: (leading indices, index of the first row,
    rows).

    folder  the folder of external data
    parts   if the weight is a stack, the stacked weights

    A row of a large weight may itself be divided: then leading indices say which row the block is
    of.
    """
    for i, part in enumerate(parts):
        for lead, start, block in read_blocks(part, folder):
            yield (i, *lead), start, block
    if parts:
        return
    shape = tuple(weight.dims)
    bits, dtype = element_bits(weight.data_type), _dtype(weight)
    if weight.data_location != TensorProto.EXTERNAL:
        whole = numpy_helper.to_array(weight)
        yield (), 0, (whole.view(dtype) if bits < 8 else whole).reshape(shape or (1,))
        return
    location, offset, _ = external_location(weight)
    with (folder / location).open("rb", buffering=0) as source:
        yield from _Reader(source, bits, dtype).blocks(8 * offset, shape or (1,), ())


class _Reader:
    """Reads a file in blocks, all into one buffer: a block is valid until the next one is read.

    bits   the bits of an element
    dtype  the dtype of an element in a block
    """

    def __init__(self, source: FileIO, bits: int, dtype: np.dtype[Any]) -> None:
        self.source = source
        self.bits = bits
        self.dtype = dtype
        self.buffer = np.empty(CHUNK + 1, np.uint8)

    def blocks(
        self, at: int, shape: tuple[int, ...], lead: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], int, Array]]:
        """Yields the blocks of a tensor of this shape that starts at bit `at` of the file, as
        `read_blocks` does; `lead` are its leading indices."""
        row = int(np.prod(shape[1:], dtype=np.int64)) * self.bits
        if row > 8 * CHUNK and len(shape) > 1:
            for i in range(shape[0]):
                yield from self.blocks(at + i * row, shape[1:], (*lead, i))
            return
        rows = max(8 * CHUNK // max(row, 1), 1)
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            elements = self._read(at + start * row, count * row)
            yield lead, start, elements.reshape(count, *shape[1:])

    def _read(self, at: int, length: int) -> Array:
        """Returns the elements in `length` bits of the file, from bit `at` on."""
        first, skip = divmod(at, 8)
        block = self.buffer[: -(-(skip + length) // 8)]
        self.source.seek(first)
        read = 0
        while read < len(block):
            n = self.source.readinto(block[read:].data)
            assert n, "the file was checked to be long enough"
            read += n
        if self.bits >= 8:
            return block.view(self.dtype)
        return unpack(block, self.bits)[skip // self.bits : (skip + length) // self.bits]
