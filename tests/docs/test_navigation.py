"""The how-to pages have the same groups on the site and in README, and every page is in one."""

from __future__ import annotations

import re
from typing import Any

import yaml
from docs.blocks import ROOT


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose own tags name Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation() -> dict[str, Any]:
    """The sections of the site."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    return {name: what for entry in nav for name, what in entry.items()}


def groups() -> dict[str, list[str]]:
    """The pages of each group of how-tos, in the order of the site."""
    return {
        name: [page for entry in pages for page in entry.values()]
        for group in navigation()["How to"]
        for name, pages in group.items()
    }


def test_readme_has_the_groups_of_the_site() -> None:
    rows = re.findall(r"^\| How to: ([^|]+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.M)
    assert {name: re.findall(r"\(docs/([^)]+)\)", links) for name, links in rows} == groups()


def test_every_how_to_is_in_one_group() -> None:
    listed = [page for pages in groups().values() for page in pages]
    there = [f"how-to/{page.name}" for page in (ROOT / "docs/how-to").glob("*.md")]
    assert sorted(listed) == sorted(there)
