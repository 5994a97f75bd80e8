"""Colours are on terminals alone, and change no word."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar.cli.colours import coloured

GPT2 = str(Path(__file__).parents[2] / "models" / "gpt2.dynamo.static.onnx")
RED, GREEN = "\033[31m", "\033[32m"
VARIABLES = "NO_COLOR", "FORCE_COLOR", "TERM"


def said(*arguments: str, on_terminal: tuple[str, ...] = ()) -> tuple[str, str]:
    """What a command prints on standard output and standard error, each a terminal or a pipe."""
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES} | {"TERM": "xterm"}
    pairs = {name: pty.openpty() if name in on_terminal else os.pipe() for name in ("out", "err")}
    (out, out_end), (err, err_end) = pairs.values()
    command = [sys.executable, "-m", "onnxpar", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=out_end, stderr=err_end)
    os.close(out_end)
    os.close(err_end)
    texts = _all(out), _all(err)
    process.wait()
    return texts


def _all(end: int) -> str:
    """What is read until all writers have closed their ends."""
    found = b""
    try:
        while piece := os.read(end, 65536):
            found += piece
    except OSError:  # of a terminal without writers
        pass
    os.close(end)
    return found.decode().replace("\r\n", "\n")


def test_each_stream_has_its_own_colours() -> None:
    wrong = ["inspect", "none.par"]
    plain = said(*wrong)
    assert plain[0] == "" and plain[1].startswith("onnxpar: error: ")
    assert said(*wrong, on_terminal=("out",)) == plain
    _, red = said(*wrong, on_terminal=("err",))
    assert red.startswith(f"onnxpar: {RED}error:\033[0m ")
    assert re.sub(r"\033\[\d+m", "", red) == plain[1]


def test_agreement_is_green() -> None:
    check = ["check", GPT2, "--devices", "2", "--preset", "tensor-parallel", "-q"]
    shown, _ = said(*check, on_terminal=("out",))
    assert f"\n{GREEN}all outputs agree\033[0m; the worst is " in shown
    assert shown.count("\033") == 2


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_users_decide(
    variables: dict[str, str], on_terminal: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for stream, wanted in ((_Terminal(), on_terminal), (io.StringIO(), elsewhere)):
        assert ("\033" in coloured("onnxpar: warning: x", stream)) is wanted


def test_lines_of_differences_are_red_and_notes_yellow() -> None:
    lines = {
        "logits  float32  [2]  1.0e+00  1e-05  too large": "31",
        "the outputs differ; the worst is logits: 1.0e+00": "31",
        "note: splitting does not pay": "33",
        "warning: x": "33",
        "an error: note: all outputs agree": "",
    }
    shown = coloured("\n".join(lines), _Terminal()).splitlines()
    assert ["".join(re.findall(r"\033\[([^0]+)m", line)) for line in shown] == [*lines.values()]
