"""The blocks of a page of documentation, which are run in their order in one folder.

```python    runs; where the first line is `# file: NAME`, it is written to that file instead
```console   lines from `$ ` on are commands, the others what they print; `...` stands for anything
```yaml      is written to the file that its first line names, as above
Other blocks (text, toml, sh) only show something: commands in them are parsed, but not run.

A comment before a block, which no page shows, says what it needs beside onnxpar, and which files of
the repository take the place of those that it would write where that is not installed:

<!-- needs torch, transformers; else llama.onnx = models/llama.dynamo.static.onnx -->
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from onnxpar.cli.command_line import main

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^ *<!-- needs (?P<needs>[^;>]*?)(?:; else (?P<files>[^>]*?))? -->\n)?"
    r"^(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"# file: (\S+)\n")
_ERROR_TEXT = r"\d\.\de[-+]\d\d"
_ERROR = re.compile(r"\d\\\.\de\\-\d\d")
SHOWN = {"text", "toml", "cpp", "json", "sh"}
"""Kinds of blocks that are not run."""
TIMEOUT = 300.0
"""Seconds for one command."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, its text and the line of the page that it begins on; the modules or
    programs that it needs, and files that stand in for those that it would write without them."""

    kind: str
    text: str
    line: int
    needs: tuple[str, ...] = ()
    stand_ins: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Which of what it needs is not installed."""
        return [need for need in self.needs if not shutil.which(need) and not _is_package(need)]


def _is_package(name: str) -> bool:
    """Whether a module is installed; a folder of tests with its name is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    return [_block(match, text) for match in _FENCE.finditer(text)]


def _block(match: re.Match[str], page: str) -> Block:
    needs = tuple(need.strip() for need in (match["needs"] or "").split(",") if need.strip())
    pairs = [pair.split(" = ") for pair in (match["files"] or "").split(",") if pair]
    line = page[: match.start("kind")].count("\n") + 1
    stand_ins = {name.strip(): source.strip() for name, source in pairs}
    return Block(match["kind"], textwrap.dedent(match["text"]), line, needs, stand_ins)


def run(block: Block, folder: Path, in_process: bool = False) -> None:
    """Runs a block in a folder; fails where a command fails or prints something else. With
    `in_process`, plain commands of onnxpar need no process."""
    named = _FILE.match(block.text)
    if named is not None and block.kind != "console":
        (folder / named[1]).write_text(block.text)
    elif block.missing:
        for name, source in block.stand_ins.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, folder / name)
    elif block.kind == "python":
        _run([sys.executable, "-c", block.text], folder)
    elif block.kind == "console":
        for command, printed in commands(block.text):
            is_plain = in_process and re.match(r"onnxpar [^|<>&;$]*(#|$)", command)
            found = _main(command, folder) if is_plain else _run(["bash", "-c", command], folder)
            assert matches(printed, found), f"$ {command}\n{found}\ninstead of\n{printed}"
    else:
        assert block.kind in SHOWN, f"a block of kind {block.kind!r} is neither run nor shown"


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        end = next(i for i in range(len(lines)) if not _goes_on(lines[: i + 1]))
        yield "\n".join(lines[: end + 1]), "\n".join(lines[end + 1 :])


def _goes_on(lines: list[str]) -> bool:
    """Whether a command has more lines: after a backslash, or within quotes."""
    try:
        shlex.split("\n".join(lines), comments=True)
    except ValueError:
        return True
    return lines[-1].endswith("\\")


def shown_commands(block: Block) -> Iterator[list[str]]:
    """The arguments of each call of onnxpar in a block that is shown but not run."""
    text = block.text.replace("\\\n", " ")
    for match in re.finditer(r"^(?:\$ )?(?:[^#\n$]*\s)?onnxpar (?P<rest>[a-z].*)$", text, re.M):
        yield shlex.split(match["rest"].rstrip("'"), comments=True)


def matches(printed: str, found: str) -> bool:
    """Whether a text is as printed, where `...` stands for anything, and a rounding error such as
    6.2e-07 for any other."""
    parts = [re.escape(part.strip()) for part in printed.strip().split("...")]
    parts = [_ERROR.sub(lambda _: _ERROR_TEXT, part) for part in parts]
    return re.fullmatch(r"(?s:\s*.*?\s*)".join(parts), found.strip()) is not None


def _main(command: str, folder: Path) -> str:
    """What a command of onnxpar prints; it fails where the command does."""
    before, printed, complaints = Path.cwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with redirect_stdout(printed), redirect_stderr(complaints):
            status = main(shlex.split(command, comments=True)[1:])
    finally:
        os.chdir(before)
    assert status == 0, f"{command}\n{printed.getvalue()}{complaints.getvalue()}"
    return printed.getvalue()


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert not done.returncode, f"{command[-1]}\n{done.stdout}{done.stderr}"
    return done.stdout


def _environment(folder: Path) -> Mapping[str, str]:
    """One where `onnxpar` and `python` are those that run the tests, modules of the folder can be
    imported, nothing is downloaded, and mpirun may run as root."""
    here = str(Path(sys.executable).parent)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    return {**os.environ, **root, **path, "HF_HUB_OFFLINE": "1"}
