"""Files whose size nobody vouches for are read with a limit, and without waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxpar.base.read_bounded import MOST, read_bounded


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    os.mkfifo(file)


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (endless, "not a file"),
    (pipe, "not a file"),
    (huge, f"has 1,099,511,627,776 bytes; such a file has at most {MOST:,}"),
]


@pytest.mark.parametrize(("make", "why"), WRONG)
@pytest.mark.timeout(20)
def test_what_has_no_end_is_refused(make: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    make(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=why):
        read_bounded(tmp_path / "plan.json")


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_bounded(tmp_path / "a") == b"abc"
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "b")
