"""The script for a shell: bash reads it, and completes what a user begins to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar.cli.command_line import main

pytest.importorskip("shtab")


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", shell])
    return capsys.readouterr().out


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_onnxpar; "
    ask += 'printf "%s\\n" "${COMPREPLY[@]}"'
    bash = subprocess.run(["bash", "-c", ask], cwd=script.parent, capture_output=True, text=True)
    assert (bash.returncode, bash.stderr) == (0, "")
    return set(bash.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sha"], {"shard"}),
        (["checkpoint", "m"], {"merge"}),
        (["shard", "--pres"], {"--preset"}),
        (["shard", "model.onnx", "--preset", "zero"], {"zero1", "zero2", "zero3"}),
        (["shard", "mo"], {"model.onnx", "models"}),
        (["shard", "model.onnx", "--strategy", "st"], {"strategy.yaml"}),
        (["run", "mo"], {"models"}),
        (["run", "models", "--inputs", "st"], {"strategy.yaml"}),
        (["shard", "model.onnx", "--devices", "mo"], set()),
    ],
)
def test_bash_completes(
    words: list[str], offered: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.bash"
    script.write_text(printed("bash", capsys))
    (tmp_path / "models").mkdir()
    (tmp_path / "model.onnx").touch()
    (tmp_path / "strategy.yaml").touch()
    assert completed(script, "onnxpar", *words) == offered


def test_each_shell_has_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.bash"
    script.write_text(printed("bash", capsys))
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
    assert printed("zsh", capsys).startswith("#compdef onnxpar")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bash"], "--print-completion needs shtab: pip install 'onnxpar[completion]'"),
        (["fish"], "'fish' is not a choice"),
        ([], "--print-completion: expected one argument"),
    ],
)
def test_errors(
    arguments: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", *arguments])
    assert named in capsys.readouterr().err
