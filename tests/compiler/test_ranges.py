"""Ranges of integer inputs, by what reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxpar
from onnxpar.base.errors import InputError

HEAD = '<ir_version: 8, opset_import: ["" : 17]> m '
ONE_HOT = "(int32[4] x) => (float[4,5] y) "
MODELS = {
    "compared with a list": (
        f"{ONE_HOT}<int32[1,5] all = {{2, 3, 4, 5, 6}}, int64[2] shape = {{4, 1}}>"
        " { column = Reshape(x, shape) hot = Equal(column, all) y = Cast<to = 1>(hot) }",
        (2, 7),
    ),
    "the list first": (
        f"{ONE_HOT}<int32[1,5] all = {{0, 1, 2, 3, 4}}, int64[2] shape = {{4, 1}}>"
        " { column = Reshape(x, shape) hot = Equal(all, column) y = Cast<to = 1>(hot) }",
        (0, 5),
    ),
    "one-hot": (
        f"{ONE_HOT}<int32 depth = {{5}}, float[2] values = {{0, 1}}>"
        " { y = OneHot(x, depth, values) }",
        (0, 5),
    ),
    "compared with one number": (
        "(int32[4] x) => (bool[4] y) <int32 pad = {7}> { y = Equal(x, pad) }",
        (0, 2),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_one_hot_encoding_takes(name: str, tmp_path: Path) -> None:
    text, wanted = MODELS[name]
    onnx.save(onnx.parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    assert onnxpar.plan(tmp_path / "m.onnx", devices=2).ranges == {"x": wanted}


COLUMNS = """(int64[4,5] ids, float[7,2] a, float[9,2] b) => (float[4,2] y, float[4,2,2] z)
<int64 one = {%s}, int64[1] from = {%s}, int64[1] to = {%s}, int64[1] along = {%s}>
{ column = Gather<axis = %s>(ids, one)  y = Gather(a, column)
  columns = Slice(ids, from, to, along)  z = Gather(b, columns) }"""


@pytest.mark.parametrize(
    ("dims", "found"),
    [
        (("1", "2", "4", "1", "1"), [(1, 1, 2, 1), (1, 2, 4, 1)]),
        (("-1", "-4", "-2", "-1", "-1"), [(1, -1, 2**31, 1), (1, -4, -2, 1)]),
    ],
)
def test_columns_that_are_indices(
    dims: tuple[str, ...], found: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """An index that another column may have is out of range for the column's own table."""
    onnx.save(onnx.parser.parse_model(HEAD + COLUMNS % dims), tmp_path / "m.onnx")
    first, second = onnxpar.plan(tmp_path / "m.onnx", devices=2).lookups
    assert [tuple(first.columns), tuple(second.columns)] == found
    assert (first.table, second.table) == ("a", "b")
    ids = np.full((4, 5), 1000)
    own = range(5)[slice(*found[0][1:])]
    ids[:, own] = 3
    assert first.fault(ids) is None
    ids[2, own[0]] = -8
    assert "index -8 at [2, " in (first.fault(ids) or "")
    assert "index 1000 at [0, " in (second.fault(ids) or "")


def test_parts_of_a_split_that_are_indices(tmp_path: Path) -> None:
    text = """(int64[4,3] ids, float[7,2] a, float[9,2] b) => (float[4,2,2] y, float[4,1,2] z)
    <int64[2] sizes = {2, 1}> { p, q = Split<axis = 1>(ids, sizes)
    y = Gather(a, p)  z = Gather(b, q) }"""
    onnx.save(onnx.parser.parse_model(HEAD + text), tmp_path / "m.onnx")
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, preset="data-parallel")
    feeds = {"a": np.ones((7, 2), np.float32), "b": np.ones((9, 2), np.float32)}
    feeds["ids"] = np.array([[6, 6, 8], [6, 7, 8], [0, 0, 0], [0, 0, 9]])
    with (
        onnxpar.InferenceSession(tmp_path / "m.par") as session,
        pytest.raises(InputError, match=r"'ids': index 7 at \[1, 1\] is out of range for 'a' of 7"),
    ):
        session.run(None, feeds)
