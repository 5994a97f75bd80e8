"""Random feeds and .npz files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxpar.base.errors import InputError
from onnxpar.runtime.session.feeds import make_feeds, read_feeds, write_arrays

INPUTS = [
    ("ids", "int64", [50, 4]),
    ("mask", "int32", [50]),
    ("x", "float32", [40, 30]),
    ("h", "bfloat16", [3]),
    ("flag", "bool", [100]),
    ("scale", "float16", []),
    ("none", "float32", [0, 2]),
    ("bytes", "uint8", [500]),
]
RANGES = {"ids": (0, 7), "mask": (0, 2), "bytes": (0, 256)}


def test_random_feeds() -> None:
    feeds = make_feeds(INPUTS, RANGES)
    assert [(n, a.dtype.name, list(a.shape)) for n, a in feeds.items()] == INPUTS
    assert set(np.unique(feeds["ids"])) == set(range(7))
    assert set(np.unique(feeds["mask"])) == {0, 1}
    assert feeds["bytes"].max() > 200
    assert 0 < feeds["flag"].sum() < 100
    assert abs(feeds["x"].mean()) < 0.1
    assert abs(feeds["x"].std() - 1) < 0.1


def test_integers_without_a_range_are_zero() -> None:
    feeds = make_feeds([("at", "int64", [9])], {})
    assert not feeds["at"].any()


def test_seeds() -> None:
    feeds, same, other = (make_feeds(INPUTS, RANGES, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(feeds["x"], same["x"])
    assert not np.array_equal(feeds["x"], other["x"])
    twins = make_feeds([("a", "float32", [9]), ("b", "float32", [9])], {})
    assert not np.array_equal(twins["a"], twins["b"])
    alone = make_feeds([("x", "float32", [40, 30])], {}, 3)
    np.testing.assert_array_equal(feeds["x"], alone["x"])


def test_bad_ranges() -> None:
    with pytest.raises(InputError, match=r"input 'ids': the range \[3, 3\) is empty"):
        make_feeds(INPUTS, {"ids": (3, 3)})
    with pytest.raises(
        InputError, match="a range is given for 'q', but the model has no such input"
    ):
        make_feeds(INPUTS, {"q": (0, 1)})


def test_files(tmp_path: Path) -> None:
    feeds = make_feeds(INPUTS, RANGES)
    write_arrays(tmp_path / "feeds.npz", feeds)
    again = read_feeds(tmp_path / "feeds.npz", INPUTS)
    for name, array in feeds.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)


def test_names_that_numpy_takes_for_its_own(tmp_path: Path) -> None:
    write_arrays(tmp_path / "feeds", {"file": np.ones(2), "a/b": np.zeros(1), "x.npy": np.ones(3)})
    inputs = [("file", "float64", [2]), ("a/b", "float64", [1]), ("x.npy", "float64", [3])]
    assert set(read_feeds(tmp_path / "feeds", inputs)) == {"file", "a/b", "x.npy"}


def test_files_that_are_wrong(tmp_path: Path) -> None:
    one, two = [("a", "float32", [2])], [("a", "float32", [2]), ("b", "float32", [2])]
    file = tmp_path / "feeds.npz"
    with pytest.raises(InputError, match=r"there is no file .*feeds\.npz"):
        read_feeds(file, one)
    file.write_bytes(b"PK no zip")
    with pytest.raises(InputError, match=r"feeds\.npz is not a \.npz file"):
        read_feeds(file, one)
    with file.open("wb") as stream:
        np.save(stream, np.ones(2))
    with pytest.raises(InputError, match="is a single array"):
        read_feeds(file, one)
    np.savez(file, a=np.ones(2, np.float32))
    with pytest.raises(InputError, match="has no array for input 'b'; its arrays: a"):
        read_feeds(file, two)
    np.savez(file, a=np.ones(2), b=np.ones(2), c=np.ones(2))
    with pytest.raises(
        InputError, match="has an array 'c', but the model has no such input; its inputs: a, b"
    ):
        read_feeds(file, two)
    np.savez(file, a=np.array([None], object))
    with pytest.raises(InputError, match=r"array 'a' of .*feeds\.npz .* holds Python objects"):
        read_feeds(file, one)
    with pytest.raises(InputError, match=r"/dev/null is not a \.npz file: No data left in file"):
        read_feeds("/dev/null", one)
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07 neither a zip nor an array")
    with pytest.raises(InputError, match=r"model\.onnx is not a \.npz file; write it with numpy"):
        read_feeds(tmp_path / "model.onnx", one)
    with pytest.raises(InputError, match="cannot write"):
        write_arrays(tmp_path / "no" / "folder.npz", {})
