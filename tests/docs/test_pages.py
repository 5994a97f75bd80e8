"""What the pages of documentation tell to do works as printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.blocks import ROOT, blocks, matches, run

PAGES = (
    "README.md",
    "docs/extending.md",
    "docs/hvd.md",
    "docs/manual.md",
    "docs/profiling.md",
    "docs/python.md",
    "docs/search.md",
    "docs/training.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, tmp_path: Path) -> None:
    for name in ("models", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks(ROOT / page):
        try:
            run(block, tmp_path)
        except AssertionError as error:
            raise AssertionError(f"{page}:{block.line}: {error}") from None


def test_matching() -> None:
    assert matches("a\n...\nc", "a\nb\nb\nc\n")
    assert matches("...", "anything")
    assert not matches("a\n...\nc", "a\nb\nd\n")
    assert not matches("", "something")
    assert matches("error 6.2e-07", "error 5.1e-07\n")
    assert not matches("error 6.2e-07", "error nan")
