"""The page on environment variables lists those that the package reads, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from docs.blocks import ROOT

PAGE = ROOT / "docs/reference/environment.md"
_FAMILIES = re.compile(
    r"(ONNXPAR|HOROVOD|OMPI|OMP|OPENBLAS|PMIX|SLURM|MASTER|TORCHELASTIC|XDG)_[A-Z0-9_]*[A-Z0-9]"
    r"|(LOCAL_)?WORLD_SIZE|RANK|PYTHON[A-Z]+"
)
"""Names of variables, wherever a module that reads the environment has them as a whole text."""
_READ = re.compile(r"(?:environ(?:\.get|\.pop)?[\[(]|getenv\()\s*\"([A-Z][A-Z0-9_]*)\"")
"""Names of other variables, where one is read."""


def in_source() -> Iterator[str]:
    """Every variable of the package and of its plugin."""
    for path in (ROOT / "onnxpar").rglob("*.py"):
        text = path.read_text()
        if "environ" in text:
            yield from _READ.findall(text)
            for node in ast.walk(ast.parse(text)):
                value = node.value if isinstance(node, ast.Constant) else None
                if isinstance(value, str) and _FAMILIES.fullmatch(value):
                    yield value
    for path in (ROOT / "onnxpar/native").glob("*.cc"):
        text = path.read_text()
        if "getenv" in text:
            yield from _READ.findall(text)
            yield from filter(_FAMILIES.fullmatch, re.findall(r'"([^"\n]*)"', text))


def test_the_page_lists_all_and_no_others() -> None:
    cells = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(), re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(in_source())
