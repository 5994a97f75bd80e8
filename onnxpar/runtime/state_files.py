"""States on disk: each rank writes the parts that it is the first to hold, others put them
together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.arrays import Array
from onnxpar.digests import Digests, DigestWriter
from onnxpar.errors import ModelError
from onnxpar.layout import Layout
from onnxpar.mesh import Mesh
from onnxpar.packing import stored_bits
from onnxpar.runtime.bundle import Port
from onnxpar.runtime.parts import Parts
from onnxpar.runtime.tensors import is_packed
from onnxpar.write_file import durable_file, writing

ALIGN = 64
"""Offsets of tensors in a file of states."""


def write_parts(folder: Path, rank: int, parts: Iterable[tuple[str, Array]]) -> dict[str, Digests]:
    """Writes parts of states, one after the other, to a rank's files in a folder, to stay: they
    are on disk when this returns. Returns the files' digests by name. Errors: OnnxparError."""
    with writing(folder):
        index: dict[str, Any] = {}
        states, list_ = (f"rank_{rank:04d}.{suffix}" for suffix in ("bin", "json"))
        with durable_file(folder / states) as sink:
            of_states = DigestWriter(sink)
            for name, part in parts:
                index[name] = _write_part(of_states, part)
        with durable_file(folder / list_) as sink:
            of_list = DigestWriter(sink)
            of_list.write(json.dumps(index).encode())
    return {states: of_states.digests, list_: of_list.digests}


def _write_part(sink: DigestWriter, part: Array) -> dict[str, Any]:
    """Writes a part behind others, and returns its entry in the rank's list."""
    assert not is_packed(part.dtype), "states are computed"
    sink.write(bytes(-sink.size % ALIGN))
    entry = {"offset": sink.size, "dtype": part.dtype.name, "shape": list(part.shape)}
    sink.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return entry


class PartFiles:
    """The parts of states that ranks wrote to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: dict[int, dict[str, Any]] = {}

    def read(self, name: str, rank: int) -> Array:
        """What a rank has written of a state, unread as yet. Errors: ModelError where the folder
        lacks it."""
        file = self._folder / f"rank_{rank:04d}.json"
        try:
            if rank not in self._index:
                self._index[rank] = json.loads(file.read_text(encoding="utf-8"))
            entry = self._index[rank][name]
            dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
            count = int(np.prod(shape, dtype=np.int64))
            if not count:  # no file can be mapped for no bytes, nor at its end
                return np.empty(shape, dtype)
            data = np.memmap(
                file.with_suffix(".bin"),
                np.uint8,
                "r",
                entry["offset"],
                (max(count * stored_bits(dtype) // 8, 1),),
            )
        except (OSError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ModelError(f"{file}: does not have state {name!r} ({error})") from None
        part: Array = data[: count * dtype.itemsize].view(dtype).reshape(shape)
        return part


class StateFiles:
    """The states that ranks wrote to a folder. `layouts` are those of the mesh they ran on."""

    def __init__(self, folder: Path, mesh: Mesh, layouts: dict[str, Layout]) -> None:
        self._folder = folder
        self._parts = PartFiles(folder)
        self._mesh = mesh
        self._layouts = layouts

    def read(self, name: str) -> Array:
        """A state as a global array. Errors: ModelError where the folder lacks it."""
        if name not in self._layouts:
            raise ModelError(f"{self._folder} has no state {name!r}")
        parts = Parts(self._layouts[name], self._mesh)
        return parts.assemble({rank: self._parts.read(name, rank) for rank in parts.sources})

    def blank(self, name: str) -> Array:
        """Zeros of a state's dtype and global shape, which take no memory. Errors: ModelError where
        the folder lacks it."""
        if name not in self._layouts:
            raise ModelError(f"{self._folder} has no state {name!r}")
        layout = self._layouts[name]
        first = min(Parts(layout, self._mesh).sources)
        dtype = self._parts.read(name, first).dtype
        return np.broadcast_to(np.zeros((), dtype), layout.shape)

    def is_dealt(self, name: str, mesh: Mesh, port: Port) -> bool:
        """Whether the ranks of a mesh hold just these parts of a state. Errors: ModelError where
        the folder lacks one."""
        layout = self._layouts.get(name)
        if layout is None or port.layout is None or mesh != self._mesh:
            return False
        if layout.normalized() != port.layout.normalized():
            return False
        sources = Parts(layout, mesh).sources
        return all(self._parts.read(name, rank).dtype == port.dtype for rank in sources)
