"""What pages say that onnxpar cannot do, no option does; options that pages name exist."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest
from docs.blocks import ROOT

from onnxpar.cli.parser import parser
from onnxpar.strategy.presets import PRESETS

PAGES = ("docs/explanation/limits.md", "docs/comparison.md")
CLAIMS = {
    "no pipeline": lambda: any("pipeline" in name for name in (*PRESETS, *options())),
    "no beam search": lambda: any("beam" in name for name in options()),
    "Ranks do not communicate while they compute": lambda: "--overlap" in options(),
    "communication always adds": lambda: "--overlap" in options(),
    "PUs only": lambda: bool({"--providers", "--gpus", "--device"} & options()),
}
"""Words of a page, and whether something does what they deny."""


OTHERS = {
    "docs/explanation/decisions.md": {"--exclude-libs"},  # of a linker
    "docs/how-to/cores.md": {"--bind-to"},  # of mpirun
    "docs/how-to/serving.md": {"--model"},  # of a tool that measures servers
    "docs/reference/python.md": {"--flag-name"},  # stands for any
}
"""Options on a page that are not onnxpar's."""
OF_OTHERS = {"docs/systems.md", "docs/performance.md"}
"""Pages on other systems, and on programs that measure."""


def options() -> set[str]:
    """The options of all commands."""
    return set(flags(parser()))


def flags(of: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a parser and of its commands."""
    for action in of._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags(command)


@pytest.mark.parametrize(
    "page", sorted({str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")} - OF_OTHERS)
)
def test_options_that_a_page_names_exist(page: str) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    codes = re.findall(r"`(--[^`]+)`", text)
    named = {flag for code in codes for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", code)}
    assert named - options() == OTHERS.get(page, set())


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("claim", CLAIMS)
def test_claims(claim: str, page: str) -> None:
    assert not (claim in (ROOT / page).read_text() and CLAIMS[claim]()), claim
