"""Converts values to bytes and back: None, bool, int, float, complex, str, bytes, NumPy arrays and
scalars, and lists, tuples and dicts of these.

Bytes are read as data, never as code, so that untrusted bytes cause at worst an error: they yield
only these types, in memory proportional to their length.

The bytes of a value are a letter for its type, followed by its data; counts and lengths take eight
bytes, little-endian.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from onnxpar.base.arrays import Array

_COUNT = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")
_DEPTH = 100
"""Most levels of nested lists, tuples and dicts."""
_DIMENSIONS = 32
_INT_BYTES = 1 << 16

_NATIVE = ("bool", *(f"{s}int{n}" for s in ("", "u") for n in (8, 16, 32, 64)))
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_OTHERS = (
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
)
_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in (*_NATIVE, *_FLOATS)},
    **{n: np.dtype(getattr(ml_dtypes, n)) for n in _OTHERS if hasattr(ml_dtypes, n)},
}
"""Dtypes whose elements have a fixed size, by name."""

ALLOWED = (
    "None, bool, int, float, complex, str, bytes, NumPy arrays and scalars, and lists, tuples and "
    "dicts of these"
)


def to_bytes(value: Any) -> bytes:
    """The bytes of a value. Errors: TypeError that names an unsupported type and its position;
    ValueError if values are nested too deeply."""
    parts: list[bytes] = []
    _write(parts, value, "the value", 0)
    return b"".join(parts)


def of_bytes(data: bytes | memoryview) -> Any:
    """Returns the value that `to_bytes` converted to these bytes; arrays are copies. Errors:
    ValueError for malformed bytes."""
    reader = _Reader(memoryview(data))
    value = reader.value(0)
    reader.end()
    return value


def _write(parts: list[bytes], value: Any, where: str, depth: int) -> None:
    if depth > _DEPTH:
        raise ValueError(f"{where[:200]} is nested in more than {_DEPTH} lists or dicts")
    kind = type(value)
    if value is None:
        parts.append(b"N")
    elif kind is bool:
        parts.append(b"T" if value else b"F")
    elif kind is int:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > _INT_BYTES:
            raise TypeError(f"{where} is an int of {len(data)} bytes; the limit is {_INT_BYTES}")
        parts += [b"i", _COUNT.pack(len(data)), data]
    elif kind is float:
        parts += [b"f", _FLOAT.pack(value)]
    elif kind is complex:
        parts += [b"c", _COMPLEX.pack(value.real, value.imag)]
    elif kind is str:
        _write_bytes(parts, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind in (bytes, bytearray):
        _write_bytes(parts, b"b", bytes(value))
    elif kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        _write_array(parts, value, where)
    elif kind is list and _is_table(value):
        _write_table(parts, value, where, depth)
    elif kind in (list, tuple):
        parts += [b"l" if kind is list else b"t", _COUNT.pack(len(value))]
        for index, item in enumerate(value):
            _write(parts, item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        parts += [b"d", _COUNT.pack(len(value))]
        for key, item in value.items():
            _write(parts, key, f"a key of {where}", depth + 1)
            _write(parts, item, f"{where}[{key!r:.40}]", depth + 1)
    else:
        raise TypeError(
            f"{where[:200]} is a {kind.__module__}.{kind.__qualname__}, which ranks do not "
            f"exchange; give {ALLOWED}"
        )


def _is_table(rows: list[Any]) -> bool:
    """True for two or more dicts that all have the same keys in the same order. `_write_table`
    writes their keys once."""
    if len(rows) < 2 or type(rows[0]) is not dict or not rows[0]:
        return False
    keys = list(rows[0])
    if any(type(row) is not dict or list(row) != keys for row in rows):
        return False
    return _are_plain(key for row in rows for key in row)


def _are_plain(keys: Iterable[Any]) -> bool:
    """True if all keys are str or int. Keys of other types may be equal across types: 1, True and
    1.0."""
    return {*map(type, keys)} <= {str, int}


def _write_table(parts: list[bytes], rows: list[dict[Any, Any]], where: str, depth: int) -> None:
    """Writes the keys of equal dicts once, and then the values of all, as one array if all are
    floats."""
    parts += [b"m", _COUNT.pack(len(rows))]
    _write(parts, list(rows[0]), where, depth + 1)
    values = [value for row in rows for value in row.values()]
    is_array = all(type(value) is float for value in values)
    _write(parts, np.array(values) if is_array else values, where, depth + 1)


def _write_bytes(parts: list[bytes], letter: bytes, data: bytes) -> None:
    parts += [letter, _COUNT.pack(len(data)), data]


def _write_array(parts: list[bytes], value: Any, where: str) -> None:
    array = np.asarray(value)
    name = array.dtype.name
    if name == "object":
        items = array.reshape(-1).tolist()
        if not all(type(item) is str for item in items):
            raise TypeError(f"{where[:200]} has objects other than str; give {ALLOWED}")
        lengths = np.array([len(item) for item in items], "<u8")
        data = lengths.tobytes() + "".join(items).encode("utf-8", "surrogatepass")
    else:
        if array.dtype.kind in "US":
            name = array.dtype.newbyteorder("<").str
        elif name not in _DTYPES:
            raise TypeError(f"{where[:200]} is of {array.dtype}, which ranks do not exchange")
        data = array.astype(_dtype(name), order="C", copy=False).tobytes()
    _write_bytes(parts, b"g" if isinstance(value, np.generic) else b"a", name.encode())
    parts += [_COUNT.pack(count) for count in (array.ndim, *array.shape, len(data))]
    parts.append(data)


def _dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype with this name: one of _DTYPES, or str or bytes of a fixed width, such as
    "<U7". Errors: ValueError for other names, also for width 0: many such elements take no bytes in
    a message, but memory once read."""
    if re.fullmatch(r"(<U|\|S)[1-9]\d{0,8}", name):
        return np.dtype(name)
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is not a dtype of arrays")
    return _DTYPES[name]


class _Reader:
    """Reads values from bytes, from front to back. Each value takes at least one byte, so a list
    that claims more values than bytes are left is refused before any memory is allocated."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data.cast("B")
        self._readers: dict[bytes, Callable[[int], Any]] = {
            b"N": lambda _: None,
            b"T": lambda _: True,
            b"F": lambda _: False,
            b"i": lambda _: int.from_bytes(self._sized(_INT_BYTES), "little", signed=True),
            b"f": lambda _: _FLOAT.unpack(self._take(_FLOAT.size))[0],
            b"c": lambda _: complex(*_COMPLEX.unpack(self._take(_COMPLEX.size))),
            b"s": lambda _: str(self._sized(), "utf-8", "surrogatepass"),
            b"b": lambda _: bytes(self._sized()),
            b"a": lambda _: self._array(),
            b"g": lambda _: self._scalar(),
            b"l": self._list,
            b"t": lambda depth: tuple(self._list(depth)),
            b"d": self._dict,
            b"m": self._table,
        }

    def value(self, depth: int) -> Any:
        """Reads the next value. `depth` is the number of lists and dicts around it."""
        letter = bytes(self._take(1))
        if letter not in self._readers:
            raise ValueError(f"no value begins with {letter!r}")
        if depth > _DEPTH:
            raise ValueError(f"values are nested more than {_DEPTH} levels deep")
        return self._readers[letter](depth)

    def end(self) -> None:
        """Checks that no bytes are left. Errors: ValueError."""
        if self._rest:
            raise ValueError(f"{len(self._rest)} bytes follow the value")

    def _take(self, size: int) -> memoryview:
        if size > len(self._rest):
            raise ValueError("the bytes end before the value")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def _count(self) -> int:
        return int(_COUNT.unpack(self._take(_COUNT.size))[0])

    def _sized(self, longest: int | None = None) -> memoryview:
        size = self._count()
        if longest is not None and size > longest:
            raise ValueError(f"{size} bytes where at most {longest} can be")
        return self._take(size)

    def _list(self, depth: int) -> list[Any]:
        count = self._count()
        if count > len(self._rest):
            raise ValueError("the bytes end before the list")
        return [self.value(depth + 1) for _ in range(count)]

    def _dict(self, depth: int) -> dict[Any, Any]:
        count = self._count()
        if count > len(self._rest):
            raise ValueError("the bytes end before the dict")
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            try:
                hash(key)
            except TypeError:
                raise ValueError(f"a {type(key).__name__} cannot be a key of a dict") from None
            found[key] = self.value(depth + 1)
        if len(found) != count:
            raise ValueError("a dict has a key twice")
        return found

    def _table(self, depth: int) -> list[dict[Any, Any]]:
        count, keys, values = self._count(), self.value(depth + 1), self.value(depth + 1)
        if type(keys) is not list or not _are_plain(keys) or len({*keys}) < max(len(keys), 1):
            raise ValueError("a table without keys, or with a key twice")
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if type(values) is not list or len(values) != count * len(keys):
            raise ValueError(f"a table of {count} rows has another number of values")
        width = len(keys)
        return [
            dict(zip(keys, values[i : i + width], strict=True))
            for i in range(0, len(values), width)
        ]

    def _array(self) -> Array:
        name, ndim = str(self._sized(_DIMENSIONS), "ascii"), self._count()
        if ndim > _DIMENSIONS:
            raise ValueError(f"an array of {ndim} dimensions")
        shape = tuple(self._count() for _ in range(ndim))
        count, data = math.prod(shape), self._sized()
        array = _texts(count, data) if name == "object" else _numbers(_dtype(name), count, data)
        try:
            return array.reshape(shape)
        except OverflowError:
            raise ValueError(f"an array of shape {shape}") from None

    def _scalar(self) -> Any:
        array = self._array()
        if array.ndim:
            raise ValueError(f"a scalar with {array.ndim} dimensions")
        return array[()]


def _numbers(dtype: np.dtype[Any], count: int, data: memoryview) -> Array:
    if count * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {count} elements of {dtype}")
    array = np.empty(count, dtype)
    array.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    if dtype.kind == "b" and (array.view(np.uint8) > 1).any():
        raise ValueError("an array of bool with values other than 0 and 1")
    if dtype.kind == "U" and (array.view("<u4") > sys.maxunicode).any():
        raise ValueError("an array of str with an invalid character")
    return array


def _texts(count: int, data: memoryview) -> Array:
    size = count * _COUNT.size
    if size > len(data):
        raise ValueError("the bytes end before the array")
    text = str(data[size:], "utf-8", "surrogatepass")
    lengths = np.frombuffer(data[:size], "<u8")
    if (lengths > len(text)).any() or int(lengths.sum()) != len(text):
        raise ValueError("the texts of an array have other lengths")
    ends = np.cumsum(lengths).tolist()
    array = np.empty(count, object)
    array[:] = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return array
