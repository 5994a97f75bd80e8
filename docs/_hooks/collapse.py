"""Divides long pages into groups that open by a click, below a box that filters their entries.

The box appears where filter.js runs; without scripts, the groups are there all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

BOX = (
    '<p class="filter" hidden><label>Filter <input type="search" autocomplete="off"></label> '
    '<span role="status"></span></p>'
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with the text of every page."""
    divide = PAGES.get(page.file.src_uri)
    return divide(markdown) if divide is not None else markdown


def of_table(markdown: str) -> str:
    """A page with one table: a group for each initial of ONNX's ops, and for each other domain."""
    match = re.search(r"(^\|.*\n)(^\|[ :|-]*\n)((?:^\|.*\n)+)", markdown, re.MULTILINE)
    assert match is not None, "the page has no table"
    rows = match[3].splitlines()
    groups = [
        group(f"{name} ({len(members)})", "\n".join((match[1] + match[2].rstrip(), *members)))
        for name, members in ((n, list(m)) for n, m in groupby(rows, _initial_or_domain))
    ]
    return f"{markdown[: match.start()]}{BOX}\n\n{''.join(groups)}\n{markdown[match.end() :]}"


def _initial_or_domain(row: str) -> str:
    op = row.split("`")[1]
    domain, _, name = op.rpartition(".")
    return domain or name[0].upper()


def of_lists(markdown: str) -> str:
    """A page with a list in each section: a group for each of these lists."""
    head, *parts = re.split(r"^(?=## )", markdown, flags=re.MULTILINE)
    return f"{head}{BOX}\n\n{''.join(map(_folded, parts))}"


def _folded(section: str) -> str:
    heading, text = section.split("\n", 1)
    count = len(re.findall(r"^- ", text, re.MULTILINE))
    return f"{heading}\n\n{group(f'{count} entries', text.strip())}"


def group(summary: str, markdown: str) -> str:
    """A group that is closed at first."""
    opening = f'<details class="group" markdown="1"><summary>{summary}</summary>'
    return f"{opening}\n\n{markdown}\n\n</details>\n\n"


PAGES: dict[str, Callable[[str], str]] = {
    "reference/ops.md": of_table,
    "explanation/decisions.md": of_lists,
}
"""How each page is divided."""
