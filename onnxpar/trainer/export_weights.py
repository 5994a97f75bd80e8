"""Writes the weights of a checkpoint as safetensors files, which libraries of Hugging Face read."""

from __future__ import annotations

import hashlib
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError, ModelError
from onnxpar.base.new_folder import check_place, new_folder
from onnxpar.base.write_file import writing
from onnxpar.graph.training_spec import IN_MODEL, Slot
from onnxpar.trainer.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
SHARD_SIZE = 5 * 10**9
"""Most bytes of weights in a file, by default."""


def export_weights(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    max_shard_size: int = SHARD_SIZE,
) -> int:
    """Writes the trained weights and running statistics of a checkpoint to a new folder, under the
    names that they have in the model, or in torch if the exporter recorded these. Returns the
    number of weights and statistics.

    checkpoint      a checkpoint, or a folder whose newest complete checkpoint is used
    output          the folder: `model.safetensors`, or several files and an index of them
    max_shard_size  most bytes of weights in a file; a larger weight has a file of its own

    The index, or the metadata of the only file, has the SHA-256 of the checkpoint, and the index
    that of each file. Errors: ModelError, InputError, OnnxparError.
    """
    save_file = library("safetensors.numpy").save_file
    if max_shard_size < 1:
        raise InputError(f"--max-shard-size {max_shard_size}: must be above 0")
    source = Checkpoint.load(checkpoint)
    weights = [slot for slot in source.slots if slot.kind in IN_MODEL]
    slots = {name: slot for slot in weights for name in slot.torch or [slot.input]}
    sizes = {name: source.states.blank(slot.input).nbytes for name, slot in slots.items()}
    files = _files(sizes, max_shard_size)
    place = check_place(Path(output), _foreign)
    about = {"format": "pt", "checkpoint": source.digest}
    with writing(place), new_folder(place, _foreign) as folder:
        for file, held in files.items():
            tensors = {name: _value(source, slots[name]) for name in held}
            save_file(tensors, folder / file, about)
        if len(files) > 1:
            digests = {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in files}
            metadata = {"total_size": sum(sizes.values()), "checkpoint": source.digest}
            index = {
                "metadata": {**metadata, "sha256": digests},
                "weight_map": {name: file for file, held in files.items() for name in held},
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(weights)


def library(module: str) -> Any:
    """Imports a module of the package safetensors, and returns it. Errors: ModelError if it is not
    installed."""
    try:
        return import_module(module)
    except ImportError:
        raise ModelError(
            "safetensors files need the package safetensors: pip install 'onnxpar[safetensors]'"
        ) from None


def _value(source: Checkpoint, slot: Slot) -> Array:
    """Returns the weight of a slot as torch has it: transposed if the model stores the
    transpose."""
    value = source.states.read(slot.input)
    return np.ascontiguousarray(value.T if slot.transposed else value)


def _files(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    """Divides weights of these sizes (in bytes, by name) among files of at most `most` bytes.
    Returns the names of the weights, by name of the file."""
    groups: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _foreign(folder: Path) -> str | None:
    """Returns the reason why a folder must not be replaced; None if it has only files of this
    module."""
    other = [f.name for f in folder.iterdir() if f.suffix != ".safetensors" and f.name != INDEX]
    return f"has other files, such as {other[0]}" if other else None
