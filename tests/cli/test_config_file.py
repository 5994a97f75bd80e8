"""Options of a command from a file: those of the command line come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxpar.cli.command_line import arguments

FILE = """
# of a server
port: 8123
host: 0.0.0.0
kv-memory: 4GB
request-timeout: 2.5
cors-origin: [https://a.example.com, https://b.example.com]
no-access-log: true
verify: false
"""


def parsed(*args: str) -> dict[str, Any]:
    return vars(arguments(["serve", "llama.par", *args]))


def test_a_file_and_arguments_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(FILE)
    named = {"config": file}
    written = ["--port", "8123", "--host", "0.0.0.0", "--kv-memory", "4GB", "--request-timeout=2.5"]
    written += ["--cors-origin", "https://a.example.com", "--cors-origin", "https://b.example.com"]
    wanted = parsed(*written, "--no-access-log") | named
    assert parsed("--config", str(file)) == parsed(f"--conf={file}") == wanted
    for args in (["--config", str(file), "--port", "1"], ["--port", "1", "--config", str(file)]):
        assert parsed(*args) == wanted | {"port": 1}
    file.write_text("{}")
    assert parsed("--config", str(file)) == parsed() | named


@pytest.mark.parametrize(
    "text,named",
    [
        ("", "it has no options; write lines such as port: 8001"),
        ("- port", "it has no options"),
        ("port: [", "not YAML: line 1"),
        ("prot: 5", "there is no option 'prot'; leave it out"),
        ("5: 5", "there is no option 5; leave it out"),
        ("config: x.yaml", "there is no option 'config'"),
        ("help: true", "there is no option 'help'"),
        ("par: x", "there is no option 'par'"),
        ("port: true", "port is True; give a text or a number"),
        ("port:", "port is None; give a text or a number"),
        ("port: [1]", "port is [1]; give a text or a number"),
        ("no-access-log: 1", "no-access-log is 1; give true or false"),
        ("cors-origin: x", "cors-origin is 'x'; give a list"),
        ("cors-origin: [[x]]", "cors-origin is [['x']]; give a list"),
        ("port: x", "'x' is not a whole number"),
        ("port: 5.5", "'5.5' is not a whole number"),
    ],
)
def test_files_that_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as found:
        parsed("--config", str(file))
    printed = capsys.readouterr().err
    assert found.value.code == 2 and named in printed and printed.count("\n") == 1


def test_a_file_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--config", "/no/such.yaml"], ["--config"], ["--config="]):
        with pytest.raises(SystemExit):
            parsed(*args)
        assert capsys.readouterr().err.startswith("onnxpar: error: serve: --config")
