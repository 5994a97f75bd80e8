"""A checkpoint and the model that it trains become a plain model again."""

from __future__ import annotations

import os
from pathlib import Path

from onnxpar.errors import ModelError, OnnxparError
from onnxpar.model import read_proto
from onnxpar.stored import check_external, stored_tensors
from onnxpar.training.checkpoint import Checkpoint
from onnxpar.write_model import Array, write_model

IN_MODEL = ("parameter", "statistic")
"""Kinds of slots that are weights of the model, by the same name."""


def merge(
    checkpoint: str | os.PathLike[str],
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
) -> int:
    """Writes a model with the weights that a checkpoint has, be it of any mesh; returns how many.

    `checkpoint` may be a folder of them: the newest counts. Errors: ModelError where the model
    lacks a weight of the checkpoint or has it in another shape.
    """
    path, target = Path(model), Path(output)
    found = Checkpoint.load(checkpoint)
    proto = read_proto(path)
    if not target.parent.is_dir():
        raise OnnxparError(f"{target.parent}: no such folder for the output")
    tensors = {t.name: t for t in stored_tensors(proto.graph)}
    trained = [slot.input for slot in found.slots if slot.kind in IN_MODEL]
    for name in trained:
        if name not in tensors:
            raise ModelError(f"{path}: has no weight {name!r}, which {found.path} has trained")
    for tensor in tensors.values():
        check_external(tensor, path)

    def value(name: str) -> Array | None:
        if name not in trained:
            return None
        array = found.states.read(name)
        if list(array.shape) != list(tensors[name].dims):
            raise ModelError(
                f"{path}: {name!r} is {list(tensors[name].dims)}, {found.path} has "
                f"{list(array.shape)}"
            )
        return array

    write_model(proto, path.parent, target, value)
    return len(trained)
