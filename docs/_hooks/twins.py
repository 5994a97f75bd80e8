"""Writes the Markdown of each page beside its HTML, and llms.txt, which lists them (llmstxt.org).

Programs read these instead of pages. Links between pages are relative, so they lead from one
Markdown file to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe

_ROOT = Path(__file__).parents[2]
_OBJECT = re.compile(r"^::: (?P<name>[\w.]+)\n(?P<options>(?:    .*\n?)*)", re.MULTILINE)
_HIDDEN = re.compile(r"<!--.*?-->\n?|<[^>]+>", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_SENTENCE = re.compile(r"(.+?(?<!e\.g)[.:!?])(?=\s|$)")

_pages: dict[str, str] = {}
"""The Markdown of each page of this build, by the address of its HTML."""
_nav: list[Any] = []


def on_nav(nav: Any, **_: Any) -> Any:
    """MkDocs calls this with the navigation, once a build."""
    _pages.clear()
    _nav[:] = nav.items
    return nav


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """MkDocs calls this with the text of every page."""
    _pages[page.file.dest_uri] = _OBJECT.sub(_described, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """MkDocs calls this when all pages are written."""
    site = Path(config["site_dir"])
    for address, markdown in _pages.items():
        (site / twin(address)).write_text(markdown, encoding="utf-8")
    text = llms_text(config["site_name"], config["site_description"], _nav, _pages)
    (site / "llms.txt").write_text(text, encoding="utf-8")


def twin(address: str) -> str:
    """The address of a page's Markdown."""
    return str(Path(address).with_suffix(".md"))


def llms_text(name: str, summary: str, nav: list[Any], pages: dict[str, str]) -> str:
    """A title, a summary, and a list of links for each section."""
    lines = [f"# {name}", "", f"> {summary}"]
    for section, members in sections(nav):
        lines += ["", f"## {section}", ""]
        for page in members:
            address = page.file.dest_uri
            link = twin(address) if address in pages else address  # a file that is no page
            said = first_sentence(pages.get(address, ""))
            lines.append(f"- [{page.title}]({link}){f': {said}' if said else ''}")
    return "\n".join(lines) + "\n"


def sections(nav: list[Any], above: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The pages of each section, and first those that are in none."""
    alone = [item for item in nav if hasattr(item, "file")]
    if alone:
        yield above or "Overview", alone
    for item in nav:
        if item.children:
            yield from sections(item.children, f"{above}: {item.title}" if above else item.title)


def first_sentence(markdown: str) -> str:
    """What a page says of itself in its first paragraph, without links."""
    text = _HIDDEN.sub("", markdown)
    blocks = (block.strip() for block in text.split("\n\n"))
    prose = next((b for b in blocks if b and not b.startswith(("#", "```", "!", "|", "-"))), "")
    found = _SENTENCE.match(" ".join(_LINK.sub(r"\1", prose).split()))
    return found[1].rstrip(":") if found else ""


def _described(match: re.Match[str]) -> str:
    """A class or a function that a page shows: its signature, and its docstring."""
    package, _, inner = match["name"].partition(".")
    shown = _package(package)[inner]
    lines = [f"### {match['name']}", "", *_entry(inner, shown)]
    if shown.is_class and "members: false" not in match["options"]:
        for member in {**shown.inherited_members, **shown.members}.values():
            is_code = member.is_function or "property" in member.labels
            if not member.name.startswith("_") and is_code:
                lines += [f"#### {match['name']}.{member.name}", "", *_entry(member.name, member)]
    return "\n".join(lines) + "\n"


@cache
def _package(name: str) -> Any:
    """The package as its source says, without an import: not all of it can be imported here."""
    return griffe.load(name, search_paths=[str(_ROOT)], resolve_aliases=True)


def _entry(name: str, shown: Any) -> Iterator[str]:
    if shown.is_function or shown.is_class:
        parameters = shown.signature().partition("(")[2]  # before it, the name in its module
        yield from ("```python", f"{name}({parameters}", "```", "")
    if shown.has_docstring:
        yield from ("```text", shown.docstring.value, "```", "")
