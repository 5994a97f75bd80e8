"""Shows onnxpar's docstrings as they are meant: names in a column, with what they are beside them,
become a list; `Errors:` and blocks that are indented stand out.

    model    a file, or bytes            - **model**: a file, or bytes that
             that hold a model     ->      hold a model
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROW = re.compile(r"(?P<name>[`\w][\w`, .*-]*?)(?P<gap> {2,})(?P<text>\S.*)")
_ERRORS = re.compile(r"(?<![\w`])Errors: ")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this with every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    lines = [line for block in _blocks(text) for line in block]
    return _ERRORS.sub("**Errors**: ", "\n".join(lines))


def _blocks(text: str) -> Iterator[list[str]]:
    """The paragraphs of a docstring, each as Markdown and with an empty line after it."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        rows = _rows(lines)
        if rows is not None:
            yield ["", *(f"- `{name.strip('`')}`: {what}" for name, what in rows), ""]
        elif len(lines) > 1 and any(line.startswith("    ") for line in lines):
            first = next(i for i, line in enumerate(lines) if line.startswith("    "))
            yield [*lines[:first], "", *lines[first:], ""]
        else:
            yield [*lines, ""]


def _rows(lines: list[str]) -> list[tuple[str, str]] | None:
    """(name, text) of a paragraph in two columns; None where it is none."""
    head = _ROW.fullmatch(lines[0])
    if head is None:
        return None
    column, rows = head.start("text"), []
    for line in lines:
        row = _ROW.fullmatch(line)
        if row is not None and row.start("text") == column:
            rows.append((row["name"].strip(), row["text"]))
        elif not line[:column].strip():
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            return None
    return rows
