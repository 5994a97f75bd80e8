"""Reads weights from safetensors files, as libraries of Hugging Face write them, into a training
step."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.graph.training_spec import IN_MODEL, Step
from onnxpar.graph.write_model import NewValue, Values
from onnxpar.trainer.export_weights import INDEX, library


def read_values(place: str | os.PathLike[str], step: Step, model: onnx.ModelProto) -> Values:
    """Returns the values of a step's parameters and statistics from the safetensors file `place`,
    or from the files of a folder. Weights that the files lack are added to the step's cautions.

    A weight is looked up by its name in torch, if the exporter recorded it, else in the model. All
    names of one side may begin with further modules, such as `network.` of a wrapper. Errors:
    InputError.
    """
    files = _keys(Path(place))
    slots = {slot.input: slot for slot in step.slots if slot.kind in IN_MODEL}
    wanted = {name: list(slot.torch) or [name] for name, slot in slots.items()}
    more, less = _prefixes([n for names in wanted.values() for n in names], files)
    key_of: dict[str, str] = {}
    read: set[str] = set()
    for weight, names in wanted.items():
        keys = [more + name.removeprefix(less) for name in names if name.startswith(less)]
        keys = [key for key in keys if key in files]
        _check_equal(weight, keys, files)
        read.update(keys)
        if keys:
            key_of[weight] = keys[0]
    if not key_of:
        some = ", ".join(sorted(names[0] for names in wanted.values())[:3])
        raise InputError(
            f"--weights {place}: none of its {len(files)} tensors, such as {min(files)!r}, has the "
            f"name of a weight of the step: {some}; give the weights of the same network"
        )
    missing = [name for name in wanted if name not in key_of]
    if missing:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        step.cautions.append(
            f"{place} lacks {len(missing)} of {len(wanted)} weights of the step, which keep the "
            f"values of the model: {some}"
        )
    if unread := sorted(files.keys() - read):
        some = ", ".join(unread[:5]) + (", ..." if len(unread) > 5 else "")
        step.cautions.append(
            f"the step has no weight for {len(unread)} tensors of {place}: {some}; where modules "
            "share a vector in the file, --untie gives each its own"
        )
    stored = {t.name: t for t in model.graph.initializer}

    def value(name: str) -> NewValue | None:
        if name not in key_of:
            return None
        key, shape = key_of[name], tuple(stored[name].dims)
        with _opened(files[key]) as file:
            own = tuple(file.get_slice(key).get_shape())
        is_transposed = slots[name].transposed
        if own != (shape[::-1] if is_transposed else shape):
            raise InputError(
                f"--weights: {key!r} in {files[key]} has the shape {list(own)}, but the model's "
                f"{name!r} has {list(shape)}; give the weights of the same network"
            )
        dtype = helper.tensor_dtype_to_np_dtype(stored[name].data_type)
        return NewValue(dtype, shape, partial(_fill, files[key], key, is_transposed))

    return value


def _check_equal(weight: str, keys: Sequence[str], files: Mapping[str, Path]) -> None:
    """Checks that the tensors `keys` of the files are equal, since all of them are the step's one
    weight `weight`. Errors: InputError."""
    if len(keys) < 2:
        return
    values = []
    for key in keys:
        with _opened(files[key]) as file:
            values.append(file.get_tensor(key))
    for key, value in zip(keys[1:], values[1:], strict=True):
        if not np.array_equal(values[0], value):
            raise InputError(
                f"--weights: {keys[0]!r} and {key!r} differ in {files[key]}, but they are one "
                f"weight of the step, {weight!r}; export the network with these weights"
            )


def _fill(file: Path, key: str, is_transposed: bool, target: Array) -> None:
    """Copies the tensor `key` of a file, or its transpose, to the array `target`."""
    with _opened(file) as opened:
        value = opened.get_tensor(key)
    target[...] = value.T if is_transposed else value


def _prefixes(wanted: Iterable[str], files: Mapping[str, Path]) -> tuple[str, str]:
    """Returns (the prefix that names in the files have and the step's names lack, the prefix that
    the step's names have and names in the files lack): the pair with which most names agree. One of
    both is empty: ("network.", "") if the files have `network.fc.weight` for `fc.weight`."""
    matches: Counter[tuple[str, str]] = Counter()
    ends: dict[str, list[str]] = {}
    for key in files:
        for end in _ends(key):
            ends.setdefault(end, []).append(key.removesuffix(end))
    for name in wanted:
        for end in _ends(name):
            less = name.removesuffix(end)
            for more in ends.get(end, ()):
                if not more or not less:
                    matches[more, less] += 1
    return max(matches, key=lambda pair: (matches[pair], -len("".join(pair))), default=("", ""))


def _ends(name: str) -> list[str]:
    """Returns a name without its first 0, 1, 2 ... modules: `a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _keys(place: Path) -> dict[str, Path]:
    """Returns the file of each tensor in a safetensors file or folder, by the tensor's name.
    Errors: InputError."""
    index = place / INDEX
    if place.is_file():
        names = [place]
    elif index.is_file():
        try:
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = [place / name for name in sorted({*listed.values()})]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"--weights: cannot read {index}: {error}") from None
    else:
        names = sorted(place.glob("*.safetensors"))
    if not names:
        raise InputError(
            f"--weights {place}: no such file or folder, or a folder without .safetensors files; "
            "save_pretrained writes such a folder"
        )
    by_name: dict[str, Path] = {}
    for name in names:
        with _opened(name) as file:
            by_name |= dict.fromkeys(file.keys(), name)
    return by_name


def _opened(path: Path) -> Any:
    """Opens a safetensors file. Errors: InputError, ModelError."""
    safetensors = library("safetensors")
    try:
        return safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"--weights: cannot read {path}: {error}") from None
