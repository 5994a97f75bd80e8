"""What pages say that onnxpar cannot do is what no option does."""

from __future__ import annotations

import argparse

import pytest
from docs.blocks import ROOT

from onnxpar.cli.parser import parser
from onnxpar.presets.presets import PRESETS

PAGES = ("docs/explanation/limits.md", "docs/comparison.md")
CLAIMS = {
    "no pipeline": lambda: any("pipeline" in name for name in (*PRESETS, *options())),
    "Ranks do not communicate while they compute": lambda: "--overlap" in options(),
    "communication always adds": lambda: "--overlap" in options(),
}
"""Words of a page, and whether something does what they deny."""


def options() -> set[str]:
    """The options of all commands."""
    (commands,) = [
        action.choices.values()
        for action in parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return {flag for command in commands for a in command._actions for flag in a.option_strings}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("claim", CLAIMS)
def test_claims(claim: str, page: str) -> None:
    assert not (claim in (ROOT / page).read_text() and CLAIMS[claim]()), claim
