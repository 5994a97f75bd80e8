"""Values other than tensors of numbers: strings, sequences, maps and optionals.

Every rank has the whole value. As in onnxruntime's Python API, values are object arrays of str,
lists, dicts and None; between processes, they are sent as byte arrays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxpar.base import typed_bytes
from onnxpar.base.arrays import Array
from onnxpar.base.errors import RankError
from onnxpar.runtime.session.tensors import dtype_of

BYTES = np.dtype(np.uint8)
"""The dtype of an array with an encoded value."""
_STRING = "tensor(string)"


def is_value(type_: str) -> bool:
    """True for every type of onnxruntime, such as `seq(tensor(float))`, except tensors of
    numbers."""
    return not type_.startswith("tensor(") or type_ == _STRING


def is_optional(type_: str) -> bool:
    """True if an input of this type need not be fed."""
    return type_.startswith("optional(")


def to_bytes(value: Any) -> Array:
    """Returns a value as an array of bytes, for another process."""
    return np.frombuffer(typed_bytes.to_bytes(value), np.uint8)


def of_bytes(data: Array) -> Any:
    """Returns the value in an array of bytes from `to_bytes`. Errors: RankError if the bytes do not
    encode one."""
    try:
        return typed_bytes.of_bytes(data.tobytes())
    except ValueError as error:
        raise RankError(f"another process sent bytes that are not a value: {error}") from error


def arrays_in(name: str, value: Any, type_: str = "") -> dict[str, Array]:
    """Returns the arrays that make up the value `name`, by name: `s.0`, `s.1` ... for a list,
    `m.keys` and `m.values` for a map.

    A list of maps with equal keys gives the same two arrays, with a row of values per map. `type_`,
    onnxruntime's type of the value, gives the values of a map their dtype.
    """
    if value is None:
        return {}
    if isinstance(value, list) and _is_table(value):
        each = [arrays_in(name, item, type_) for item in value]
        rows = np.stack([arrays[f"{name}.values"] for arrays in each])
        return {**each[0], f"{name}.values": rows}
    if isinstance(value, list):
        items = [arrays_in(f"{name}.{i}", item, type_) for i, item in enumerate(value)]
        return {key: array for item in items for key, array in item.items()}
    if isinstance(value, dict):
        element = re.search(r"map\(\w+,(tensor\(\w+\))\)", type_)
        dtype = dtype_of(element[1]) if element else None
        keys, values = np.array(list(value)), np.array(list(value.values()), dtype)
        return {f"{name}.keys": keys, f"{name}.values": values}
    return {name: np.asarray(value)}


def _is_table(items: list[Any]) -> bool:
    """True for a list of maps that have the same keys in the same order, as ZipMap makes it."""
    return bool(items) and all(
        isinstance(item, dict) and list(item) == list(items[0]) for item in items
    )


def checked_value(type_: str, value: Any) -> Any:
    """Returns the value in the form that onnxruntime accepts for this type. Errors: TypeError,
    whose message describes the expected value."""
    if type_ == _STRING:
        return _checked_strings(value)
    kind, inner = re.fullmatch(r"(\w+)\((.*)\)", type_).groups()  # type: ignore[union-attr]
    if kind == "optional":
        return None if value is None else checked_value(inner, value)
    if kind == "seq":
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"a list for {type_}, not {type(value).__name__}")
        return [checked_value(inner, item) for item in value]
    if kind == "map":
        key, _, item = inner.partition(",")
        return _checked_map(key, item, value)
    dtype = dtype_of(type_)
    array = np.asarray(value)
    if dtype is None or array.dtype != dtype:
        raise TypeError(f"arrays of {dtype or type_}, not {array.dtype}")
    return array


def _checked_strings(value: Any) -> Array:
    """Returns the value as an object array of str. Errors: TypeError if an element is not a str."""
    array = np.asarray(value)
    if array.dtype.kind not in "UO" or not all(isinstance(s, str) for s in array.flat):
        raise TypeError(f"str, not {array.dtype}")
    return array.astype(object)


def _checked_map(key: str, element: str, value: Any) -> dict[Any, Any]:
    """Returns the value as a dict with keys and values of these types. Errors: TypeError if it has
    others, or is no mapping."""
    kind = str if key == "string" else int
    if not isinstance(value, Mapping) or not all(isinstance(k, kind) for k in value):
        raise TypeError(f"a dict with keys of {kind.__name__}, not {value!r:.60}")
    plain = str if element == _STRING else (int, float)
    for item in value.values():
        if not isinstance(item, plain):
            raise TypeError(f"values of {element} in it, not {item!r:.60}")
    return dict(value)
