"""Feeds for a model's inputs: random arrays, or the arrays of an .npz file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.base.write_file import new_file
from onnxpar.runtime.session.npz import read_npz

InputSpec = tuple[str, str, Sequence[int]]
"""(name, dtype, shape) of an input. The dtype is NumPy's or ml_dtypes' name, or for other types
onnxruntime's text, such as seq(tensor(float))."""
WORDS = ("", "a", "b", "ab", "ba", "onnx")
"""The strings in random feeds."""

DEFAULT_RANGE = (0, 1)
"""The range [low, high) of random integers by default: 0 is a valid index of any table."""


def make_feeds(
    inputs: Sequence[InputSpec], ranges: Mapping[str, tuple[int, int]], seed: int = 0
) -> dict[str, Array]:
    """Returns random feeds by name. The feed of an input depends only on its name, dtype and shape,
    and on the seed, not on other inputs.

    Floats are standard normal, bools equally likely, integers uniform in [low, high) of `ranges`,
    by input name, and strings from WORDS. Errors: InputError for a range that is empty or of an
    unknown input.
    """
    unknown = ranges.keys() - {name for name, _, _ in inputs}
    if unknown:
        raise InputError(
            f"a range is given for {sorted(unknown)[0]!r}, but the model has no such input"
        )
    feeds = {}
    for name, dtype, shape in inputs:
        source = np.random.default_rng([seed, *name.encode()])
        if "(" in dtype:
            raise InputError(
                f"input {name!r} is a {dtype}, which cannot be random; {_remedy(dtype)}"
            )
        feeds[name] = _random(name, np.dtype(dtype), tuple(shape), ranges.get(name), source)
    return feeds


def read_feeds(path: str | os.PathLike[str], inputs: Sequence[InputSpec]) -> dict[str, Any]:
    """Returns the arrays of an .npz file, by input name. The file names the arrays of an input `s`
    that is a sequence `s.0`, `s.1` ...

    A dtype that NumPy lacks (bfloat16, float8) is taken from the input if the item size agrees.
    Errors: InputError for a file that is missing or not an .npz file, and for a missing or unknown
    array.
    """
    return _fed(Path(path), read_npz(Path(path)), inputs, [name for name, _, _ in inputs])


def _fed(
    file: Path, arrays: dict[str, Array], inputs: Sequence[InputSpec], known: Sequence[str]
) -> dict[str, Any]:
    """Returns the value of each input, from the arrays of `file`. Errors: InputError unless each
    input has an array and each array belongs to an input. `known` lists all inputs of the model,
    for the message."""
    lists = {name: _take_list(name, arrays, dtype) for name, dtype, _ in inputs if "(" in dtype}
    dtypes = {name: np.dtype(dtype) for name, dtype, _ in inputs if name not in lists}
    for name in dtypes:
        if name not in arrays:
            raise InputError(f"{file} has no array for input {name!r}; its arrays: {_list(arrays)}")
    for name in arrays:
        if name not in dtypes:
            raise InputError(
                f"{file} has an array {name!r}, but the model has no such input; its inputs: "
                f"{', '.join(known)}"
            )
    return lists | {name: _typed(arrays[name], dtype) for name, dtype in dtypes.items()}


def read_given(path: str | os.PathLike[str], inputs: Sequence[InputSpec]) -> dict[str, Any]:
    """Like `read_feeds`, for a file that may have only some of the inputs: returns these. Errors:
    InputError, also for an unknown array."""
    arrays = read_npz(Path(path))
    selected = [i for i in inputs if i[0] in arrays or ("(" in i[1] and f"{i[0]}.0" in arrays)]
    return _fed(Path(path), arrays, selected, [name for name, _, _ in inputs])


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> None:
    """Writes an .npz file that `read_feeds` reads. Errors: InputError if it cannot be written."""
    # Not numpy.savez: it adds a suffix to the file name, and cannot store an array named `file`.
    with new_file(path) as written, zipfile.ZipFile(written, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                plain = np.asanyarray(array)
                plain = plain.astype(str) if plain.dtype == object else plain
                np.lib.format.write_array(member, plain, allow_pickle=False)


def _take_list(name: str, arrays: dict[str, Array], type_: str) -> list[Array] | None:
    """Takes the arrays of a sequence out of `arrays`; returns them as a list, or None for an
    optional input without arrays. Errors: InputError for another type."""
    if not type_.removeprefix("optional(").startswith("seq(tensor("):
        raise InputError(f"input {name!r} is a {type_}; {_remedy(type_)}")
    items: list[Array] = []
    while (key := f"{name}.{len(items)}") in arrays:
        items.append(arrays.pop(key))
    return None if type_.startswith("optional(") and not items else items


def _remedy(type_: str) -> str:
    """Returns what users can do about an input that is no tensor, for an error."""
    if type_.removeprefix("optional(").startswith("seq(tensor("):
        return "give its arrays as NAME.0, NAME.1 ... in --inputs FILE.npz"
    return "run the model from Python: onnxpar.InferenceSession takes it as onnxruntime does"


def _random(
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    range_: tuple[int, int] | None,
    source: np.random.Generator,
) -> Array:
    """A random feed: as `make_feeds` says."""
    if dtype.kind == "O":
        return source.choice(np.array(WORDS, object), shape)
    if dtype == np.bool_:
        return source.integers(0, 2, shape).astype(np.bool_)
    if np.issubdtype(dtype, np.integer):
        low, high = DEFAULT_RANGE if range_ is None else range_
        if low >= high:
            raise InputError(f"input {name!r}: the range [{low}, {high}) is empty")
        return source.integers(low, high, shape, np.int64).astype(dtype)
    return np.asarray(source.standard_normal(shape)).astype(dtype)


def _typed(array: Array, dtype: np.dtype[Any]) -> Array:
    """Returns an array from a file in the input's dtype: NumPy stores dtypes of ml_dtypes as void
    bytes, and strings at a fixed length."""
    if dtype.kind == "O":
        return array.astype(object)
    nameless = array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize
    return array.view(dtype) if nameless else array


def _list(names: Mapping[str, object]) -> str:
    """The names as text for an error."""
    return ", ".join(names) or "nothing"
