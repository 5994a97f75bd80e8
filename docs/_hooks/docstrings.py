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

from onnxpar import LayoutOptions, PlanOptions
from onnxpar.training import GradOptions, TrainOptions

TABLES = {kind.__name__: kind for kind in (LayoutOptions, PlanOptions, GradOptions, TrainOptions)}
"""The tables of options."""
_ROW = re.compile(r"(?P<name>[`\w][\w`, .*-]*?)(?P<gap> {2,})(?P<text>\S.*)")
_ERRORS = re.compile(r"(?<![\w`])Errors: ")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Griffe calls this with every class, before `on_instance`; it reads sources, in which the
        table of options is no docstring."""
        if cls.name in TABLES:
            cls.docstring = griffe.Docstring(TABLES[cls.name].__doc__, parent=cls)

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
        while lines:
            rows, count = _rows(lines)
            if rows:
                yield ["", *(f"- `{name.strip('`')}`: {what}" for name, what in rows), ""]
            else:
                count = next((i for i in range(1, len(lines)) if _rows(lines[i:])[0]), len(lines))
                yield [*_apart(lines[:count]), ""]
            lines = lines[count:]


def _rows(lines: list[str]) -> tuple[list[tuple[str, str]], int]:
    """(name, text) of the lines in two columns that come first, and how many lines these are. One
    row alone is none: two spaces may stand in a sentence."""
    rows: list[tuple[str, str]] = []
    column = count = 0
    for line in lines:
        row = _ROW.fullmatch(line)
        if row is not None and (row.start("text") == column or not rows):
            column = row.start("text")
            rows.append((row["name"].strip(), row["text"]))
        elif rows and not line[:column].strip() and line.strip():
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            break
        count += 1
    return (rows, count) if len(rows) > 1 or count > 1 else ([], 0)


def _apart(lines: list[str]) -> list[str]:
    """Lines of which the indented ones become a block of code."""
    first = next((i for i, line in enumerate(lines) if line.startswith("    ")), 0)
    return [*lines[:first], "", *lines[first:]] if first else lines
