"""The pictures of the plan's page: those of the documentation are there, and can be taken again."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from browser import BROWSER
from docs.screenshots import IMAGES, SHOTS, take

LARGEST = 200_000
"""Bytes of a picture."""


def check(folder: Path) -> None:
    """Each picture is a small PNG of the size of its window."""
    assert {path.name for path in folder.glob("plan-*.png")} == {shot.file for shot in SHOTS}
    for shot in SHOTS:
        data = (folder / shot.file).read_bytes()
        assert data.startswith(b"\x89PNG") and 10_000 < len(data) < LARGEST
        assert struct.unpack(">II", data[16:24]) == (
            shot.width * shot.scale,
            shot.height * shot.scale,
        )


def test_the_documentation_has_them() -> None:
    check(IMAGES)


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.slow
def test_they_can_be_taken_again(tmp_path: Path) -> None:
    take(tmp_path)
    check(tmp_path)
