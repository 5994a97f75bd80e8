"""Feeds for a model: random ones, and those of an .npz file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.errors import InputError
from onnxpar.runtime.parts import Array

InputSpec = tuple[str, str, Sequence[int]]
"""Name, dtype (NumPy's or ml_dtypes' name) and shape."""

DEFAULT_RANGE = (0, 1)
"""Of integers that nobody gave a range: as indices they fit any table."""


def make_feeds(
    inputs: Sequence[InputSpec], ranges: Mapping[str, tuple[int, int]], seed: int = 0
) -> dict[str, Array]:
    """Random feeds, the same for the same seed, whatever the order and number of the inputs.

    Floats are standard normal, bools even; integers come from [low, high), by input name.
    Errors: InputError for a range that is empty or has no input.
    """
    unknown = ranges.keys() - {name for name, _, _ in inputs}
    if unknown:
        raise InputError(f"a range is given for {sorted(unknown)[0]!r}, which is no input")
    feeds = {}
    for name, dtype, shape in inputs:
        source = np.random.default_rng([seed, *name.encode()])
        feeds[name] = _random(name, np.dtype(dtype), tuple(shape), ranges.get(name), source)
    return feeds


def read_feeds(path: str | os.PathLike[str], inputs: Sequence[InputSpec]) -> dict[str, Array]:
    """The arrays of an .npz file by input name.

    What NumPy cannot name (bfloat16, float8) is read as what the input says, if the sizes agree.
    Errors: InputError for a file that is missing or no .npz, a missing or an unknown key.
    """
    file = Path(path)
    dtypes = {name: np.dtype(dtype) for name, dtype, _ in inputs}
    arrays = _read_npz(file)
    for name in dtypes:
        if name not in arrays:
            raise InputError(f"{file} lacks input {name!r}; it has {_list(arrays)}")
    for name in arrays:
        if name not in dtypes:
            raise InputError(f"{file} has {name!r}, but the inputs are {_list(dtypes)}")
    return {name: _typed(arrays[name], dtype) for name, dtype in dtypes.items()}


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> None:
    """Writes an .npz file that `read_feeds` reads. Errors: InputError where it cannot."""
    try:
        # A file object, as NumPy adds a suffix to a name, and `file` and others are its keywords.
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error


def _random(
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    range_: tuple[int, int] | None,
    source: np.random.Generator,
) -> Array:
    if dtype == np.bool_:
        return source.integers(0, 2, shape).astype(np.bool_)
    if np.issubdtype(dtype, np.integer):
        low, high = DEFAULT_RANGE if range_ is None else range_
        if low >= high:
            raise InputError(f"input {name!r}: the range [{low}, {high}) is empty")
        return source.integers(low, high, shape, np.int64).astype(dtype)
    return np.asarray(source.standard_normal(shape)).astype(dtype)


def _read_npz(file: Path) -> dict[str, Array]:
    try:
        loaded = np.load(file, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise InputError(f"{file} is a single array; write a .npz with one array per input")
        with loaded as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise InputError(f"there is no file {file}") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} is not a .npz file: {error}") from error


def _typed(array: Array, dtype: np.dtype[Any]) -> Array:
    """NumPy stores ml_dtypes as nameless bytes."""
    nameless = array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize
    return array.view(dtype) if nameless else array


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "nothing"
