"""A file appears whole, or what was there stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxpar.base.errors import InputError
from onnxpar.base.write_file import whole_file


def test_what_fails_midway_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt), whole_file(file) as sink:
        sink.write("half")
        raise KeyboardInterrupt
    assert file.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [file]
    with whole_file(file) as sink:
        sink.write("behind")
    assert file.read_text(encoding="utf-8") == "behind"
    assert list(tmp_path.iterdir()) == [file]


def test_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder"), whole_file(tmp_path / "folder") as sink:
        sink.write("text")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
