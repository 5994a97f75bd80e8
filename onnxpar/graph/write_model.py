"""Writes a model file and its data file; weights are copied in blocks from their files, without
loading them as a whole."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.base.errors import OnnxparError
from onnxpar.base.interrupts import uninterrupted
from onnxpar.base.own_folder import OwnFolder, own_name, remove_left
from onnxpar.base.write_file import PREFIX, cause, put
from onnxpar.graph.interchange import default_of, export_graph
from onnxpar.graph.lazy_values import StackedValues
from onnxpar.graph.stored import external_location, stored_bytes, stored_tensors

ALIGN = 4096
"""Weights in the data file start at multiples of this many bytes, so that a runtime can map
them."""
INLINE = 1 << 16
"""If there is a data file, weights of at most this many bytes still stay in the model file."""
MOST = 1 << 30
"""With more bytes of weights, a data file is written even if the original model had none."""
CHUNK = 8 << 20


@dataclass(frozen=True)
class NewValue:
    """A new value of a weight that need not be in memory: `fill` writes it into an array of this
    dtype and shape, which may be mapped from a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fill: Callable[[Array], None]

    @property
    def nbytes(self) -> int:
        """The size of the value in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def array(self) -> Array:
        """Returns the value as an array in memory."""
        whole: Array = np.empty(self.shape, self.dtype)
        self.fill(whole)
        return whole


Values = Callable[[str], Array | NewValue | None]
"""Returns the new value of a weight, by name; None for a weight that keeps its value."""


def write_model(
    model: onnx.ModelProto, source: Path, output: Path, values: Values = lambda name: None
) -> None:
    """Writes a model to `output`, and its large weights to `output`.data.

    source  the folder of the model's external data
    values  new values of weights

    Errors: OnnxparError; nothing is left half-written.
    """
    if output.exists() and not output.is_file():
        raise OnnxparError(f"{output} exists and is not a file; choose another name")
    tensors = list(stored_tensors(model.graph))
    is_external = any(t.data_location == TensorProto.EXTERNAL for t in tensors)
    location = output.name + ".data"
    try:
        with OwnFolder(PREFIX, output.parent) as folder:
            data: dict[str, Path] = {}
            if is_external or sum(map(stored_bytes, tensors)) > MOST:
                data[location] = folder / "data"
                with data[location].open("wb") as sink:
                    for tensor in tensors:
                        value = values(tensor.name)
                        if isinstance(value, NewValue) and value.nbytes > INLINE:
                            _write_new(tensor, value, sink, location)
                            continue
                        _replace(tensor, value)
                        if goes_apart(tensor):
                            move_data(tensor, source, sink, location)
            else:
                for tensor in tensors:
                    _replace(tensor, values(tensor.name))
            put_model(model, output, folder, data)
    except OSError as error:
        raise OnnxparError(f"cannot write {output}: {cause(error)}") from error


def _replace(tensor: TensorProto, value: Array | NewValue | None) -> None:
    """Replaces the value of a tensor, in the model itself; None: keeps it."""
    if value is not None:
        array = value.array() if isinstance(value, NewValue) else value
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _write_new(tensor: TensorProto, value: NewValue, sink: BinaryIO, location: str) -> None:
    """Appends the new value of a tensor to the open data file `sink`, and makes the tensor refer to
    it there; `location` is the file's final name."""
    start = sink.tell() + -sink.tell() % ALIGN
    sink.flush()
    os.posix_fallocate(sink.fileno(), start, value.nbytes)  # a hole without room ends the process
    value.fill(np.memmap(sink.name, value.dtype, "r+", start, value.shape))
    sink.seek(0, os.SEEK_END)
    tensor.CopyFrom(TensorProto(name=tensor.name, dims=value.shape))
    tensor.data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
    _refer(tensor, location, (start, value.nbytes))


def put_model(model: onnx.ModelProto, output: Path, folder: Path, data: Mapping[str, Path]) -> None:
    """Moves a model to `output`, and its data files from `folder` to their places beside it. If the
    process is killed at any time, `output` is the old model or the new one, each with its own data.
    Errors: OSError.

    data  path in `folder` of each data file, by its final name
    """
    there = output.parent
    taken = {name: own_name(f"{name}.") for name in data if (there / name).exists()}
    (folder / "model").write_bytes(_bytes_with(model, {}))
    if taken:
        (folder / "first").write_bytes(_bytes_with(model, taken))
    with uninterrupted():
        for name in data.keys() - taken.keys():
            put(data[name], there / name)
        if not taken or _puts_data(output, folder, data, taken):
            put(folder / "model", output)
            for own in taken.values():
                (there / own).unlink(missing_ok=True)
    for name in data:
        remove_left((there / name).parent, f"{Path(name).name}.")


def _puts_data(
    output: Path, folder: Path, data: Mapping[str, Path], taken: Mapping[str, str]
) -> bool:
    """Replaces the data files of an old model at `output`: first writes a model that refers to the
    new data under the temporary names in `taken`, then links this data to its final names. Returns
    False if the file system has no links."""
    there = output.parent
    try:
        for name, own in taken.items():
            put(data[name], there / own)
        put(folder / "first", output)
    except OSError:
        for own in taken.values():
            (there / own).unlink(missing_ok=True)
        raise
    try:
        for name, own in taken.items():
            os.link(there / own, folder / "link")
            os.replace(folder / "link", there / name)
    except OSError:
        for name in taken:
            (there / name).unlink(missing_ok=True)
        return False
    return True


def _bytes_with(model: onnx.ModelProto, names: Mapping[str, str]) -> bytes:
    """Returns the serialized model, in which data files have new names; `names` has these by the
    old ones."""
    entries = [
        entry
        for tensor in stored_tensors(model.graph)
        for entry in tensor.external_data
        if entry.key == "location" and entry.value in names
    ]
    before = [entry.value for entry in entries]
    for entry in entries:
        entry.value = names[entry.value]
    data = model.SerializeToString()
    for entry, name in zip(entries, before, strict=True):
        entry.value = name
    return bytes(data)


def export_model(
    graph: gs.Graph, header: onnx.ModelProto, stacks: dict[str, StackedValues] | None = None
) -> onnx.ModelProto:
    """Returns the model of a graph, with the default values of its inputs; parameters as for
    `export_graph`."""
    model = export_graph(graph, header, stacks)
    model.producer_name = model.producer_name or "onnxpar"
    for tensor in graph.inputs:
        default = default_of(tensor)
        if default is not None:
            model.graph.initializer.append(default)
            model.graph.initializer[-1].name = tensor.name
    return model


def goes_apart(tensor: TensorProto) -> bool:
    """True if a tensor's data goes into the data file: it is large, or external already."""
    is_external = tensor.data_location == TensorProto.EXTERNAL
    return is_external or (stored_bytes(tensor) > INLINE and bool(tensor.raw_data))


def move_data(
    tensor: TensorProto,
    source: Path,
    sink: BinaryIO,
    location: str,
    place: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Moves a tensor's data to the open data file `sink`, and makes the tensor refer to it there.
    Returns (offset, length) in bytes.

    source    the folder of the tensor's external data
    location  the final name of the data file
    place     (offset, length), if the data is in the file already
    """
    length = stored_bytes(tensor)
    if place is None:
        sink.write(bytes(-sink.tell() % ALIGN))
        place = sink.tell(), length
        if tensor.data_location == TensorProto.EXTERNAL:
            _copy_external(tensor, source, sink, length)
        else:
            sink.write(tensor.raw_data)
    tensor.ClearField("raw_data")
    _refer(tensor, location, place)
    return place


def _refer(tensor: TensorProto, location: str, place: tuple[int, int]) -> None:
    """Makes a tensor refer to (offset, length in bytes) in the data file `location`."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, entry in (("location", location), ("offset", place[0]), ("length", place[1])):
        tensor.external_data.add(key=key, value=str(entry))


def _copy_external(tensor: TensorProto, source: Path, sink: BinaryIO, length: int) -> None:
    file, start, _ = external_location(tensor)
    with (source / file).open("rb") as reader:
        reader.seek(start)
        left = length
        while left:
            block = reader.read(min(left, CHUNK))
            assert block, "the file was checked to be long enough"
            sink.write(block)
            left -= len(block)
