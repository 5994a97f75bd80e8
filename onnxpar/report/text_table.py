"""Text tables with aligned columns, and sizes in bytes as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

WIDTH = 100
WRAPPED = 36
"""A column of wrapped texts has at least this width."""
MANY, FEW = 20, 3
"""In tables with more rows, similar rows are joined: MANY for tables of ports and weights, FEW for
the table of nodes that run whole."""


def table(rows: Sequence[Sequence[Any]], head: Sequence[str], wraps: bool = False) -> Iterator[str]:
    """Yields the lines of a table with aligned columns, numbers to the right. If lines would be
    longer than WIDTH, the first column is cut off on the left. With `wraps`, the last column, a
    text, is first wrapped onto further lines."""
    cells = [[_cell(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    if wraps and over > 0:
        widths[-1] = max(widths[-1] - over, min(widths[-1], WRAPPED))
    room = WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, 12))
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(head))]
    for line in [list(head), *cells]:
        last, *more = (wrap(line[-1], widths[-1]) or [""]) if wraps else [line[-1]]
        out = [
            _fit(c, w).rjust(w) if right else _fit(c, w).ljust(w)
            for c, w, right in zip([*line[:-1], last], widths, numeric, strict=True)
        ]
        yield ("  ".join(out)).rstrip()
        yield from (" " * (sum(widths[:-1]) + 2 * (len(widths) - 1)) + text for text in more)


def grouped(rows: Sequence[tuple[Any, ...]], most: int = MANY) -> list[tuple[Any, ...]]:
    """Returns the rows. If there are more than `most`, rows that differ only in their first column
    are joined into one: `h.0.w and 11 more`."""
    if len(rows) <= most:
        return list(rows)
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, *rest in rows:
        names.setdefault(tuple(rest), []).append(name)
    return [(_names(found), *rest) for rest, found in names.items()]


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]


def size_text(size: float) -> str:
    """Returns a number of bytes as text with a decimal unit: 18.4 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
