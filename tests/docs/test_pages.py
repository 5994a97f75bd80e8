"""What the pages of documentation tell to do works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.blocks import ROOT, SHOWN, blocks, matches, run, shown_commands

from onnxpar.cli.parser import parser

PAGES = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
RUN = ("README.md", *(page for page in PAGES if blocks(ROOT / page)))
FIRST = "README.md"
"""What a new user reads; the other pages take minutes."""
REPOSITORY = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md")
"""Pages that are read in the repository, not on the site."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page == FIRST else pytest.mark.slow) for page in RUN]
)
def test_page(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    in_process = not request.config.getoption("zoo")
    for name in ("models", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in blocks(ROOT / page):
        try:
            run(block, tmp_path, in_process)
        except AssertionError as error:
            raise AssertionError(f"{page}:{block.line}: {error}") from None


@pytest.mark.parametrize("page", RUN)
def test_commands_that_are_only_shown_can_be_given(page: str) -> None:
    for block in blocks(ROOT / page):
        for arguments in shown_commands(block) if block.kind in SHOWN else ():
            parser().parse_args(arguments)  # exits where an argument is unknown


@pytest.mark.parametrize("page", REPOSITORY)
def test_links_of_the_repository_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_matching() -> None:
    assert matches("a\n...\nc", "a\nb\nb\nc\n")
    assert matches("...", "anything")
    assert not matches("a\n...\nc", "a\nb\nd\n")
    assert not matches("", "something")
    assert matches("error 6.2e-07", "error 5.1e-07\n")
    assert not matches("error 6.2e-07", "error nan")


def test_a_block_that_needs_what_is_missing_leaves_its_files(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs no_such_module; else made/a.md = README.md -->\n```python\n1 / 0\n```\n"
        "- and\n\n    ```python\n    if True:\n        print(1)\n    ```\n"
    )
    first, second = blocks(page)
    assert first.missing == ["no_such_module"] and first.line == 2
    assert second.text == "if True:\n    print(1)\n" and not second.missing
    run(first, tmp_path)
    assert (tmp_path / "made/a.md").read_text() == (ROOT / "README.md").read_text()


def test_a_command_may_have_several_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo 'a\nb' \\\n  c\na\nb c\n$ echo d  # it's d\nd\n```\n")
    run(blocks(page)[0], tmp_path)
    page.write_text("```console\n$ echo 'a\nb'\nb\na\n```\n")
    with pytest.raises(AssertionError, match="instead of"):
        run(blocks(page)[0], tmp_path)
