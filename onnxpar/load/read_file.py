"""Reads the file of a model, and checks its stored tensors."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from onnx import parser as onnx_text

from onnxpar.base.errors import ModelError
from onnxpar.base.unreadable import cannot_read
from onnxpar.graph.stored import (
    check_attributes,
    check_bodies,
    check_constants,
    check_sparse,
    check_stored,
    sparse_tensors,
    stored_tensors,
)

_NO_MODEL = (DecodeError, json_format.ParseError, text_format.ParseError, onnx_text.ParseError)
"""The exceptions of onnx for a file that is no model, by its format: binary, or a text, by its
name."""


def read_proto(path: Path) -> onnx.ModelProto:
    """Returns the model in a file, without its external data. Errors: ModelError, naming the file,
    if it cannot be read or is no model."""
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except IsADirectoryError:
        raise ModelError(f"{path} is {_kind_of_folder(path)}") from None
    except OSError as error:
        raise ModelError(cannot_read(path, error)) from None
    except (*_NO_MODEL, ValueError) as error:
        raise ModelError(
            f"{path}: not an ONNX model, or truncated ({error}); export or copy it again"
        ) from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(
            f"{path}: not an ONNX model, or truncated (no graph or no opset); export or copy it "
            "again"
        )
    return proto


def _kind_of_folder(folder: Path) -> str:
    """Returns what a folder is that was given as a model, and the remedy, for an error."""
    if (folder / "plan.json").exists():
        return (
            "a sharded model; give the .onnx file that it was made from, or see `onnxpar inspect`"
        )
    models = sorted(folder.glob("*.onnx"))
    return "a folder; give an .onnx file" + (f", such as {models[0]}" if models else "")


def check_all_stored(proto: onnx.ModelProto, path: Path) -> None:
    """Errors: ModelError for a stored tensor whose data cannot be used."""
    for tensor in stored_tensors(proto.graph):
        check_stored(tensor, path)
    check_attributes(proto.graph, path)
    check_constants(proto.graph, path)
    check_bodies(proto.graph, path)
    for sparse in sparse_tensors(proto.graph):
        check_sparse(sparse, path)
