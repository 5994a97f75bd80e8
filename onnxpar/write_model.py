"""Writes a graph as a model of its own, with weights copied stream-wise from where they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, numpy_helper

from onnxpar.arrays import Array
from onnxpar.errors import OnnxparError
from onnxpar.interchange import default_of, export_graph
from onnxpar.stored import external_location, stored_bytes, stored_tensors
from onnxpar.subgraphs import all_nodes
from onnxpar.write_file import cause

ALIGN = 4096
"""Offsets of weights in the data file, so that a runtime can map them."""
INLINE = 1 << 16
"""Bytes up to which a weight stands in the model where others do not."""
MOST = 1 << 30
"""Bytes of weights up to which all stand in the model, if they did before."""
CHUNK = 8 << 20


Values = Callable[[str], Array | None]
"""New values of weights by name, None for those that stay."""


def write_model(
    model: onnx.ModelProto, source: Path, output: Path, values: Values = lambda name: None
) -> None:
    """Writes a model whose external data is in the folder `source`, to `output`; large weights to
    `output` with .data behind its name. Errors: OnnxparError; nothing is left half-written."""
    if output.exists() and not output.is_file():
        raise OnnxparError(f"{output}: is no file that a model can be written to; name another")
    tensors = list(stored_tensors(model.graph))
    is_external = any(t.data_location == TensorProto.EXTERNAL for t in tensors)
    data = output.with_name(output.name + ".data")
    try:
        with tempfile.TemporaryDirectory(prefix=".onnxpar-", dir=output.parent) as folder:
            if is_external or sum(map(stored_bytes, tensors)) > MOST:
                with (Path(folder) / "data").open("wb") as sink:
                    for tensor in tensors:
                        value = values(tensor.name)
                        if value is not None:
                            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
                        if goes_apart(tensor):
                            move_data(tensor, source, sink, data.name)
            else:
                for tensor in tensors:
                    value = values(tensor.name)
                    if value is not None:
                        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
            (Path(folder) / "model").write_bytes(model.SerializeToString())
            if (Path(folder) / "data").exists():
                os.replace(Path(folder) / "data", data)
            os.replace(Path(folder) / "model", output)
    except OSError as error:
        raise OnnxparError(f"cannot write {output}: {cause(error)}") from error


def export_model(graph: gs.Graph, header: onnx.ModelProto) -> onnx.ModelProto:
    """The model of a graph, with the default values of its inputs."""
    for node in all_nodes(graph):
        node.attrs.pop("onnxpar.opset", None)
    model = export_graph(graph, header)
    model.producer_name = model.producer_name or "onnxpar"
    for tensor in graph.inputs:
        default = default_of(tensor)
        if default is not None:
            model.graph.initializer.append(default)
            model.graph.initializer[-1].name = tensor.name
    return model


def goes_apart(tensor: TensorProto) -> bool:
    """Whether the data of a tensor goes to the data file, where there is one."""
    is_external = tensor.data_location == TensorProto.EXTERNAL
    return is_external or (stored_bytes(tensor) > INLINE and bool(tensor.raw_data))


def move_data(
    tensor: TensorProto,
    source: Path,
    sink: BinaryIO,
    location: str,
    place: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Lets a tensor refer to the data file `location`, and appends its data to `sink`, which is
    that file, unless it has a `place` there already. Returns its offset and length, in bytes."""
    length = stored_bytes(tensor)
    if place is None:
        sink.write(bytes(-sink.tell() % ALIGN))
        place = sink.tell(), length
        if tensor.data_location == TensorProto.EXTERNAL:
            _copy_external(tensor, source, sink, length)
        else:
            sink.write(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, entry in (("location", location), ("offset", place[0]), ("length", place[1])):
        tensor.external_data.add(key=key, value=str(entry))
    return place


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
