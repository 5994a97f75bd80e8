"""Lists of files may come from anywhere: no name in them leads out of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxpar.base.bundle_names import (
    check_inner,
    inner_path,
    is_own,
    owner_of,
    rank_name,
    shared_name,
)
from onnxpar.base.digests import check_listed
from onnxpar.base.errors import ModelError

HOSTILE = (
    *("", ".", "..", "/etc/passwd", "../other.par/rank_0000.weights", "a/../../b", "a//b", "a/"),
    *("./a", "a/.", "encoder/../..", "..\\a", "a\\b", "a\0b", "a\nb", "\x1b[2Ja", "plan.json"),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a file in the folder"):
        check_inner(name)
    with pytest.raises(ValueError, match="is not the name of a file in the folder"):
        check_listed({name: {"bytes": 0, "sha256": [""]}})


@pytest.mark.parametrize("name", ["rank_0000.onnx", "encoder/plan.json", "a..b", "..a", "a b"])
def test_names_inside(name: str) -> None:
    check_inner(name)


@pytest.mark.parametrize("ranks", [7, "0", [1.5], ["0"], {"0": 1}, None])
def test_ranks_that_are_no_numbers(ranks: object) -> None:
    with pytest.raises(TypeError, match="ranks of 'a'"):
        check_listed({"a": {"bytes": 0, "sha256": [""], "ranks": ranks}})


def test_links_out_of_the_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "m.par", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "secret").write_text("x")
    (folder / "inside").write_text("y")
    (folder / "out").symlink_to(other / "secret")
    (folder / "up").symlink_to("../other/secret")
    (folder / "encoder").symlink_to(other)
    (folder / "in").symlink_to("inside")
    for name in ("out", "up", "encoder/secret", "encoder/new"):
        with pytest.raises(ModelError, match=r"is a link to .*other.*, outside of the folder"):
            inner_path(folder, name)
    assert inner_path(folder, "in").read_text() == "y"
    linked = tmp_path / "linked.par"
    linked.symlink_to(folder)
    assert inner_path(linked, "inside").read_text() == "y"


def test_names_of_onnxpar() -> None:
    assert rank_name(3, "states.onnx") == "rank_0003.states.onnx"
    own = (
        "plan.json",
        "rewritten.onnx",
        "shared.weights",
        shared_name(12),
        rank_name(3, "evaluation.onnx"),
    )
    assert all(map(is_own, (*own, rank_name(10000, "weights"), "tokenizer.json")))
    assert not any(map(is_own, ("README.md", "shared_x.weights", "rank_1.onnx", "SHA256SUMS")))
    assert owner_of("rank_0012.onnx") == owner_of("rank_0012.states.onnx") == 12
    assert owner_of("rank_0012.weights") is owner_of("shared.weights") is None
