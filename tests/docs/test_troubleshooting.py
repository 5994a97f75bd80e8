"""Every message that the page on troubleshooting quotes is one of the source, in the same words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from docs.blocks import ROOT

PAGE = ROOT / "docs/reference/troubleshooting.md"
MESSAGES = re.findall(r"^`([^`\n]+)`\n:   ", PAGE.read_text(), re.MULTILINE)
_PLACEHOLDER = re.compile(r"<[^<>]*>")


@cache
def texts() -> str:
    """All strings of the package, in Python with a space for each value in them."""
    found: list[str] = []
    for path in (ROOT / "onnxpar").rglob("*.py"):
        found += python_texts(ast.parse(path.read_text()))
    for path in (ROOT / "onnxpar/native").glob("*.cc"):
        found.append(re.sub(r'"\s*\+?\s*"', "", path.read_text()))
    return plain("\n".join(found))


def python_texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a module; the parts of a formatted string as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else " " for each in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def plain(text: str) -> str:
    """A text without quotation marks and repeated spaces."""
    return re.sub(r"\s+", " ", re.sub(r"[`'\"]", "", text))


def fixed_words(message: str) -> list[str]:
    """The parts of a message between its placeholders."""
    parts = [plain(part).strip(" ,;:()[]") for part in _PLACEHOLDER.split(message)]
    return [part for part in parts if part]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_source_has_its_words(message: str) -> None:
    words = fixed_words(message)
    assert max(len(part.split()) for part in words) >= 2, "too few words to find it by"
    for part in words:
        assert part in texts(), part


def test_every_entry_is_read() -> None:
    assert len(MESSAGES) == len(re.findall(r"^:   ", PAGE.read_text(), re.MULTILINE)) > 30


def test_words_that_are_nowhere_are_found_out() -> None:
    assert fixed_words("`<file>: no such (<reason>); buy 'it'`") == ["no such", "buy it"]
    assert "a message that no one has written" not in texts()
