"""Gives a page without headings the room of its table of contents: a long table needs it."""

from __future__ import annotations

import re
from typing import Any

_HEADING = re.compile(r"^##+ |^::: ", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with the text of every page."""
    if not _HEADING.search(markdown):
        page.meta["hide"] = ["toc"]
    return markdown
