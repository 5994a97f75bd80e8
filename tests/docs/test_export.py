"""Every export that the page on frameworks shows works, where its exporter is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.blocks import ROOT, Block, blocks, run

PAGE = ROOT / "docs/how-to/export.md"
FILES = [block for block in blocks(PAGE) if block.text.startswith("# file: ")]
EXPORTS = [block for block in blocks(PAGE) if block.kind == "console"]


def test_every_program_is_one_of_python() -> None:
    for block in FILES:
        compile(block.text, f"{PAGE.name}:{block.line}", "exec")


def test_every_export_says_what_it_needs() -> None:
    assert EXPORTS and all(block.needs for block in EXPORTS)


@pytest.mark.parametrize(
    "export", EXPORTS, ids=lambda block: f"{'-'.join(block.needs)}-{block.line}"
)
def test_export(export: Block, tmp_path: Path) -> None:
    if export.missing:
        pytest.skip(f"{', '.join(export.missing)} not installed")
    (tmp_path / "models").symlink_to(ROOT / "models")
    for block in (*FILES, export):
        run(block, tmp_path)
