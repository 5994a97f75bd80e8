"""The blocks of a page of documentation, which are run in their order in one folder.

```python    runs; where the first line is `# file: NAME`, it is written to that file instead
```console   lines from `$ ` on are commands, the others what they print; `...` stands for anything
```yaml      is written to the file that its first line names, as above
Other blocks (text, toml, sh) only show something.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# file: (\S+)\n")
_ERROR_TEXT = r"\d\.\de[-+]\d\d"
_ERROR = re.compile(r"\d\\\.\de\\-\d\d")
SHOWN = {"text", "toml", "cpp", "json", "sh"}
"""Kinds of blocks that are not run."""
TIMEOUT = 300.0
"""Seconds for one command."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, its text and the line of the page that it begins on."""

    kind: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 1) for m in _FENCE.finditer(text)]


def run(block: Block, folder: Path) -> None:
    """Runs a block in a folder; fails where a command fails or prints something else."""
    named = _FILE.match(block.text)
    if named is not None and block.kind != "console":
        (folder / named[1]).write_text(block.text)
    elif block.kind == "python":
        _run([sys.executable, "-c", block.text], folder)
    elif block.kind == "console":
        for command, printed in commands(block.text):
            found = _run(["bash", "-c", command], folder)
            assert matches(printed, found), f"$ {command}\n{found}\ninstead of\n{printed}"
    else:
        assert block.kind in SHOWN, f"a block of kind {block.kind!r} is neither run nor shown"


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        end = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        yield "\n".join(lines[: end + 1]), "\n".join(lines[end + 1 :])


def matches(printed: str, found: str) -> bool:
    """Whether a text is as printed, where `...` stands for anything, and a rounding error such as
    6.2e-07 for any other."""
    parts = [re.escape(part.strip()) for part in printed.strip().split("...")]
    parts = [_ERROR.sub(lambda _: _ERROR_TEXT, part) for part in parts]
    return re.fullmatch(r"(?s:\s*.*?\s*)".join(parts), found.strip()) is not None


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
    """One where `onnxpar` and `python` are those that run the tests, and modules of the folder can
    be imported."""
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
