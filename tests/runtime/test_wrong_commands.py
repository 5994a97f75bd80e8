"""Commands that no rank could run: they are told once, before any rank starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from onnxpar.base.errors import InputError, RankError
from onnxpar.cli.command_line import main
from onnxpar.runtime.launch.launcher import Command, Launcher
from onnxpar.runtime.session.checks import CROWD, check_threads

LAUNCH = ["launch", "--hosts", "localhost:2", "--"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["runn", "m.par"], "onnxpar: error: there is no program runn (did you mean run?)\n"),
        (
            ["run", "m.par", "--inputs", "in.npz", "--outptus", "x.npz"],
            "onnxpar: error: run: there is no --outptus (did you mean --outputs?); see `onnxpar "
            "run --help`\n",
        ),
        (
            ["run", "m.par"],
            "onnxpar: error: run: give --inputs or --random; see `onnxpar run --help`\n",
        ),
    ],
)
def test_words_that_are_wrong(
    words: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main([*LAUNCH, *words])
    except SystemExit as end:
        status = end.code
    assert (status, *capfd.readouterr()) == (2, "", text)


def test_a_program_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH, "no-such-program"]) == 2
    text = f"host {os.uname().nodename} cannot start its ranks: no such file or directory"
    assert f"onnxpar: error: {text}: no-such-program\n" in capfd.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """As on another host: it must have the folder of the launch."""
    command = Command(["true"], str(tmp_path / "gone"), {}, sys.executable, 1.0)
    text = rf"no folder \(a launch runs in the folder of the same name .*\): {tmp_path}/gone"
    with pytest.raises(RankError, match=text), Launcher({"localhost": [0]}, command) as launcher:
        launcher.wait()


def test_threads_that_would_take_minutes_to_start() -> None:
    most = CROWD * (os.cpu_count() or 1)
    assert check_threads(most, most) == most
    with pytest.raises(InputError, match=f"threads {most + 1}: give at most {most}"):
        check_threads(most + 1, most)
