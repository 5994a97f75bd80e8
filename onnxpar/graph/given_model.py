"""Models as Python callers pass them: a path, bytes or a ModelProto."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError

from onnxpar.base.errors import ModelError, OnnxparError
from onnxpar.base.own_folder import OwnFolder
from onnxpar.graph.model_folder import model_at
from onnxpar.graph.stored import stored_tensors

Source = str | os.PathLike[str] | bytes | onnx.ModelProto
"""A model file, a folder of a language model, a name on the hub of Hugging Face, the bytes of a
model, or a ModelProto."""


@contextmanager
def model_file(model: Source) -> Iterator[Path]:
    """A block during which a model is a file; yields its path: the caller's own, or for a model in
    memory a temporary one, named after the graph.

    Errors: ModelError if it is unclear which model of a folder is meant, if bytes are not a model,
    or if a model in memory has external data.
    """
    if isinstance(model, (str, os.PathLike)):
        yield model_at(Path(model))
        return
    if not isinstance(model, (bytes, onnx.ModelProto)):
        raise ModelError(
            f"{type(model).__name__} is not a model; give a path, bytes or an onnx.ModelProto"
        )
    data, proto = _parsed(model)
    for tensor in stored_tensors(proto.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelError(
                f"initializer {tensor.name!r} of the model in memory has its data in an external "
                "file, whose folder is unknown; give the model's path instead, or a model that "
                "onnx.load has read with its external data"
            )
    with OwnFolder() as folder:
        file = folder / f"{_name(proto.graph.name)}.onnx"
        file.write_bytes(data)
        try:
            yield file
        except OnnxparError as error:
            # The folder is gone when the user reads the message; the file name is enough.
            error.args = (str(error).replace(f"{folder}/", ""), *error.args[1:])
            raise


def _parsed(model: bytes | onnx.ModelProto) -> tuple[bytes, onnx.ModelProto]:
    if isinstance(model, bytes):
        try:
            return model, onnx.load_model_from_string(model)
        except DecodeError:
            raise ModelError("the bytes given are not an ONNX model") from None
    try:
        return model.SerializeToString(), model
    except (EncodeError, ValueError):  # protobuf's limit on a message
        raise ModelError(
            "a model in memory can have at most 2 GiB; write it with onnx.save(model, path, "
            "save_as_external_data=True), and give that path"
        ) from None


def _name(graph: str) -> str:
    """Returns the graph's name as a file name; never `model.onnx`, because for that, messages would
    name our temporary folder instead (see model_name.py)."""
    name = re.sub(r"[^\w.-]", "_", graph)[:60].strip(".")
    return name if name not in ("", "model") else "unnamed"
