"""Values that travel between processes: what was written is read, and damage is an error."""

from __future__ import annotations

import os
import pickle
import random
import resource
from collections import OrderedDict, namedtuple
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar.base.typed_bytes import of_bytes, to_bytes
from onnxpar.runtime.session.tensors import ELEMENTS

DTYPES = [*ELEMENTS, "complex64", "complex128"]


def same(a: Any, b: Any) -> bool:
    """Equal in types and bits, NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return bool(a == b or (a != a and b != b))


def arrays() -> st.SearchStrategy[np.ndarray]:
    @st.composite
    def array(draw: st.DrawFn) -> np.ndarray:
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        dice = np.random.default_rng(draw(st.integers(0, 1000)))
        if dtype == np.bool_:
            return dice.integers(0, 2, shape).astype(bool)
        bits = 2 ** (8 if dtype.name[-4:] not in ("int4", "int2") else 2)
        size = (*shape, dtype.itemsize)
        raw = dice.integers(0, bits // 2, size, np.uint8)
        return raw.view(dtype).reshape(shape)

    return array()


def texts() -> st.SearchStrategy[np.ndarray]:
    items = st.lists(st.text(max_size=5), max_size=5)
    return st.tuples(items, st.sampled_from([object, str])).map(lambda t: np.array(t[0], t[1]))


KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS |= st.binary() | st.tuples(st.integers(), st.text())
LEAVES = KEYS | st.floats() | st.complex_numbers() | arrays() | texts()
LEAVES |= arrays().filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[0])
KEYS_OF_ROWS = st.lists(st.sampled_from(["a", "b", 1, 2, True, 1.0, None]), unique=True, max_size=3)
TABLES = KEYS_OF_ROWS.flatmap(
    lambda keys: st.lists(
        st.fixed_dictionaries({k: st.floats() | LEAVES for k in keys}), max_size=4
    )
)
"""Dicts with the same keys, as classifiers return them."""
VALUES = st.recursive(
    LEAVES | TABLES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(VALUES)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    assert same(of_bytes(to_bytes(value)), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(np.dtype(dtype))
    for value in (array, array[1, 2], array[::2, ::-1].T, array[:0], np.array(array[0, 0])):
        assert same(of_bytes(to_bytes(value)), np.array(value) if value.ndim else value)


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a", "", "wide \U0001f600"]),
        np.array([b"a", b"bc"]),
        np.str_("x"),
        np.array([], "U7"),
        2**5000,
        "\ud800",
        {"state": {0: {"step": 1, "exp_avg": np.ones(3)}}, "param_groups": [{"betas": (0.9, 1)}]},
    ],
)
def test_what_else_there_is(value: Any) -> None:
    assert same(of_bytes(to_bytes(value)), value)


@pytest.mark.parametrize("keys", [["a", "bc", ""], [7, -1], ["a", 1], [1.5], [True], [None]])
@pytest.mark.parametrize("items", [[0.25, float("nan"), -0.0], [1, 2, 3], ["x", 1.0, None]])
def test_maps_with_the_same_keys(keys: list[Any], items: list[Any]) -> None:
    rows = [{key: items[(i + k) % 3] for k, key in enumerate(keys)} for i in range(5)]
    assert same(of_bytes(to_bytes(rows)), rows)
    if all(type(key) in (str, int) for key in keys):
        assert to_bytes(rows)[:1] == b"m"
    mixed = [{1: 0.5}, {True: 0.5}, {1.0: 0.5}]
    assert same(of_bytes(to_bytes(mixed)), mixed)


def test_a_table_takes_memory_in_proportion_to_its_bytes() -> None:
    """It has a key and as many values as rows."""
    whole = to_bytes([{"a": 0.5}, {"a": 0.25}])
    count, keys, values = whole[1:9], to_bytes(["a"]), to_bytes(np.array([0.5, 0.25]))
    assert whole == b"m" + count + keys + values
    for bad in (
        b"m" + (1 << 40).to_bytes(8, "little") + keys + values,
        b"m" + count + to_bytes([]) + to_bytes([]),
        b"m" + count + to_bytes(["a", "a"]) + to_bytes([1, 2, 3, 4]),
        b"m" + count + to_bytes([b"a"]) + values,
        b"m" + count + to_bytes("a") + values,
        b"m" + count + keys + to_bytes("ab"),
        whole[:-1],
    ):
        with pytest.raises(ValueError):
            of_bytes(bad)


def test_other_byte_orders_and_dicts_become_ours() -> None:
    assert of_bytes(to_bytes(np.arange(3, dtype=">i4"))).tolist() == [0, 1, 2]
    assert same(of_bytes(to_bytes(OrderedDict(b=1, a=2))), {"b": 1, "a": 2})


@pytest.mark.parametrize(
    "value, named",
    [
        ({"a": [1, Fraction(1, 2)]}, r"the value\['a'\]\[1\] is a fractions.Fraction"),
        ({1, 2}, "is a builtins.set"),
        (namedtuple("Pair", "a b")(1, 2), "is a test_typed_bytes.Pair|Pair"),
        (np.array([1, None]), "has objects other than str"),
        (np.array(["2020-01-01"], "M8[D]"), r"is of datetime64\[D\], which ranks do not exchange"),
        (np.ma.masked_array([1]), "is a numpy.ma"),
        (test_arrays_of_every_type, "is a builtins.function"),
    ],
)
def test_other_types_are_named(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        to_bytes(value)


def test_too_deep() -> None:
    value: list[Any] = []
    for _ in range(150):
        value = [value]
    with pytest.raises(ValueError, match="in more than 100 lists or dicts"):
        to_bytes(value)
    with pytest.raises(ValueError, match="more than 100 levels deep"):
        of_bytes((b"l" + (1).to_bytes(8, "little")) * 100_000 + b"N")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/onnxpar-was-here",)


def test_a_pickle_is_no_value() -> None:
    with pytest.raises(ValueError, match="no value begins with"):
        of_bytes(pickle.dumps(Evil()))


GOOD = [
    {"w": np.arange(6, dtype="f4").reshape(2, 3), "n": None, 3: [True, 2.5, (1, b"x")]},
    [np.array(["one", "two"], object), np.array(["a", "bc"]), np.float32(2), 1j],
    {"b": np.ones(4, ml_dtypes.bfloat16), "t": np.array([True, False]), "i": -(2**70)},
    {"deep": [[[{"k": ("s", "t")}]]], "bytes": bytes(40)},
]


def damaged(dice: random.Random) -> bytes:
    data = bytearray(to_bytes(dice.choice(GOOD)))
    for _ in range(dice.randint(1, 4)):
        where = dice.randrange(len(data)) if data else 0
        match dice.randrange(5):
            case 0 if data:
                data[where] ^= 1 << dice.randrange(8)
            case 1:
                extreme = dice.choice([0, 1, 2**20, 2**31, 2**62, 2**63, 2**64 - 1])
                data[where : where + 8] = extreme.to_bytes(8, "little")
            case 2:
                del data[where:]
            case 3:
                data[where:where] = dice.randbytes(dice.randrange(20))
            case _:
                data[where : where + 1] = dice.choice(b"NTFifcsbagltd").to_bytes(1, "little")
    return bytes(data)


@pytest.mark.parametrize("name", ["<U0", "|S0", "<U00", "|S01"])
def test_arrays_of_text_have_a_width(name: str) -> None:
    """Elements of no bytes would be of any number, and NumPy gives each a byte or more."""
    count = (1 << 50).to_bytes(8, "little")
    one, none = (n.to_bytes(8, "little") for n in (1, 0))
    data = b"a" + len(name).to_bytes(8, "little") + name.encode() + one + count + none
    with pytest.raises(ValueError, match="not a dtype of arrays"):
        of_bytes(data)


@pytest.mark.slow
def test_damaged_bytes() -> None:
    """They are an error, or a value of these types; never much memory, never anything else."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = read = 0
    dice = random.Random(5)
    for number in range(20_000):
        data = damaged(dice) if number % 4 else dice.randbytes(dice.randrange(60))
        try:
            value = of_bytes(data)
        except ValueError:
            refused += 1
        else:
            assert same(of_bytes(to_bytes(value)), value)
            read += 1
    assert refused > 10_000
    assert read > 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
