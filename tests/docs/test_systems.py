"""Every row of the page on other systems: its settings, its commands and its calls work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs.blocks import ROOT, blocks, run

import onnxpar
from onnxpar import hvd
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.planner.auto_parallel_context import SETTINGS

PAGE = ROOT / "docs/systems.md"
CODE = re.compile(r"`([^`]+)`")


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of each row of the first table after a heading."""
    section = PAGE.read_text().split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    for line in [x for x in section.splitlines() if x.startswith("|")][2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


SETTING_ROWS = list(rows("Settings"))
COMMAND_ROWS = [
    (heading, *row)
    for heading in (
        "Features",
        "Horovod",
        "MXNet",
        "Megatron-LM",
        "DeepSpeed-Ulysses",
        "DLRM and TorchRec",
        "PartialFC",
    )
    for row in rows(heading)
]


def arguments(cell: str) -> dict[str, Any]:
    """The keyword arguments that a cell shows."""
    code = CODE.fullmatch(cell)
    assert code is not None, cell
    found: dict[str, Any] = eval(f"dict({code[1]})")
    return found


@pytest.mark.parametrize("setting,ours,remark", SETTING_ROWS)
def test_settings(setting: str, ours: str, remark: str) -> None:
    given = arguments(setting)
    if ours == "refused":
        words = [word.split("--")[-1] for word in CODE.findall(remark)] or [remark]
        with pytest.raises(StrategyError) as caught:
            onnxpar.auto_parallel_context(**given)
        said = str(caught.value)
        assert all(w.split()[0].split("/")[-1] in said for w in words), (said, words)
    else:
        assert onnxpar.auto_parallel_context(**given) == (
            {} if ours == "holds" else arguments(ours)
        )


def test_every_setting_has_a_row() -> None:
    named = {name for setting, *_ in SETTING_ROWS for name in arguments(setting)}
    assert named == SETTINGS.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the page makes."""
    path = tmp_path_factory.mktemp("systems")
    (path / "models").symlink_to(ROOT / "models")
    for block in blocks(PAGE):
        run(block, path, in_process=True)
    return path


@pytest.mark.matrix
@pytest.mark.parametrize("heading,theirs,ours", COMMAND_ROWS)
def test_features(
    heading: str, theirs: str, ours: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has a command or a call that works, or says no."""
    monkeypatch.chdir(folder)
    tried = 0
    for code in CODE.findall(ours):
        if code.startswith("onnxpar "):
            assert main(shlex.split(code)[1:]) == 0
            tried += 1
        elif code.startswith(("hvd.", "assert ")):
            hvd.init()
            try:
                exec(code, {"hvd": hvd, "np": np})
            finally:
                hvd.shutdown()
            tried += 1
    assert tried or ours == "no", ours
