"""The documentation site: it builds without a warning, and its reference is complete."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from browser import BROWSER, DESKTOP, PHONE, browser
from docs.blocks import ROOT

import onnxpar
from onnxpar.cli.parser import parser

REFERENCE = ROOT / "docs" / "reference"
SHOWN_OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
WITHOUT_MEMBERS = re.compile(
    r"^::: (\S+)\n    options:(?:\n      .+)*?\n      members: false$", re.MULTILINE
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Any warning, such as a link that leads nowhere, fails."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_it_needs_nothing_from_elsewhere(site: Path) -> None:
    """No page loads a font, a script, a style or a picture from another host."""
    loaded = re.compile(
        r"<(?:script|img|link rel=\"stylesheet\")[^>]*?(?:src|href)=\"?https?:[^>]*>"
    )
    for page in site.rglob("*.html"):
        assert not loaded.findall(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?https?:", style.read_text()), style


@pytest.mark.slow
def test_each_page_has_its_markdown_and_a_line_in_llms_txt(site: Path) -> None:
    pages = {path.with_suffix(".md") for path in site.rglob("*.html")} - {site / "404.md"}
    assert {path for path in site.rglob("*.md")} == pages
    listing = (site / "llms.txt").read_text()
    assert listing.startswith("# onnxpar\n\n> ")
    links = {site / link for link in re.findall(r"^- \[[^]]+\]\(([^)]+)\)", listing, re.M)}
    assert links == pages | {site / "tutorials/first.ipynb"}
    assert (site / "tutorials/first.ipynb").is_file()
    for page in pages:
        text = page.read_text()
        assert text.strip() and not re.search(r"^::: |<!-- commands", text, re.M), page
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+\.md)", text):
            assert (page.parent / target).resolve() in pages, (page, target)


def test_llms_txt_has_a_section_for_each_group() -> None:
    pytest.importorskip("griffe")
    module = hook("twins")

    def page(title: str, address: str) -> SimpleNamespace:
        return SimpleNamespace(
            title=title, children=None, file=SimpleNamespace(dest_uri=f"{address}.html")
        )

    group = SimpleNamespace(title="Hosts", children=[page("Ray", "ray")])
    nav = [page("Start", "index"), SimpleNamespace(title="How to", children=[group])]
    pages = {
        "index.html": "# A\n\nSplits [a](b.md) model, e.g. `m.onnx`. More.\n",
        "ray.html": "# Ray\n\n<!-- x -->\n```sh\nray\n```\n",
    }
    assert module.llms_text("onnxpar", "It splits.", nav, pages) == (
        "# onnxpar\n\n> It splits.\n\n## Overview\n\n"
        "- [Start](index.md): Splits a model, e.g. `m.onnx`.\n\n"
        "## How to: Hosts\n\n- [Ray](ray.md)\n"
    )


@pytest.mark.slow
def test_the_command_line_has_every_command_and_option(site: Path) -> None:
    text = (site / "reference" / "command-line.html").read_text()
    flags = set(re.findall(r"<code>([^<]*)</code>", text))
    for command in commands(parser()):
        assert f">{command.prog}<" in text
        for action in command._actions:
            for flag in action.option_strings:
                assert flag == "-h" or any(
                    flag in shown.replace(",", " ").split() for shown in flags
                )


def hook(name: str) -> Any:
    """A module of docs/_hooks."""
    spec = spec_from_file_location(name, ROOT / f"docs/_hooks/{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(of: Any) -> Iterator[Any]:
    """The commands of a parser, and the commands of commands instead of those."""
    for action in of._actions:
        if action.__class__.__name__ == "_SubParsersAction":
            for each in action.choices.values():
                yield from list(commands(each)) or [each]


def shown_objects(pattern: re.Pattern[str] = SHOWN_OBJECT) -> list[str]:
    """What the reference shows, by name."""
    return [n for page in sorted(REFERENCE.glob("*.md")) for n in pattern.findall(page.read_text())]


def test_the_reference_shows_the_whole_public_interface() -> None:
    shown = set(shown_objects())
    assert not {f"onnxpar.{name}" for name in onnxpar.__all__} - shown
    from onnxpar import training

    assert not {f"onnxpar.training.{name}" for name in training.__all__} - shown


@pytest.mark.slow
def test_all_that_the_reference_shows_has_a_docstring() -> None:
    griffe = pytest.importorskip("griffe")
    package = griffe.load("onnxpar", search_paths=[str(ROOT)], resolve_aliases=True)
    alone = set(shown_objects(WITHOUT_MEMBERS))
    lacking = []
    for name in shown_objects():
        shown = package[name.removeprefix("onnxpar.")]
        if name not in alone:
            lacking += list(without_docstring(shown))
        elif not shown.has_docstring:
            lacking.append(name)
    assert not lacking


def without_docstring(shown: Any) -> Iterator[str]:
    """The object and its public members that say nothing of themselves. Fields of a dataclass are
    described by the docstring of the class."""
    if not shown.has_docstring:
        yield shown.canonical_path
    inherited = shown.inherited_members if shown.is_class else {}
    for name, member in {**shown.members, **inherited}.items():
        if member.is_alias and not member.resolved:  # of a module that griffe has not read
            continue
        is_code = member.is_function or member.is_class or "property" in member.labels
        is_shown = shown.is_class or name in (shown.exports or ())
        if not name.startswith("_") and is_code and is_shown:
            yield from without_docstring(member)


def test_the_pictures_show_the_layouts_of_today() -> None:
    for name, drawn in hook("pictures").pictures().items():
        assert (ROOT / "docs/images" / name).read_text() == drawn, "run docs/_hooks/pictures.py"


def test_plan_json_is_described(tmp_path: Path) -> None:
    onnxpar.shard(
        ROOT / "models/dlrm.dynamo.static.onnx",
        tmp_path / "m.par",
        mesh="tp=2",
        preset="tensor-parallel",
    )
    plan = json.loads((tmp_path / "m.par" / "plan.json").read_text())
    text = (REFERENCE / "plan-json.md").read_text()

    def keys(head: str) -> list[str]:
        section = text[text.index(f"\n## {head}\n") + 1 :]
        cells = re.findall(r"^\| (`[^|]*`) \|", section.split("\n## ")[0], re.MULTILINE)
        return [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]

    assert set(keys("Keys")) == set(plan)
    assert set(keys("Ports")) == {*plan["inputs"][0], "default"}
    assert set(keys("Training steps")) == set(onnxpar.training.Step.__dataclass_fields__)
    assert plan["collectives"] and set(keys("Collectives")) == set(plan["collectives"][0])


def test_the_first_page_counts_the_ops() -> None:
    ops = re.findall(r"^\| `([^`]+)` \|", (REFERENCE / "ops.md").read_text(), re.MULTILINE)
    others = sum(not op.startswith("onnxpar.") for op in ops)
    assert f"For {others} ops of ONNX and of onnxruntime" in (ROOT / "docs/index.md").read_text()


def test_every_op_of_the_plugin_is_described() -> None:
    source = (ROOT / "onnxpar/native/op_registry.cc").read_text()
    ops = set(re.findall(r'\{"(\w+)", \d', source))
    text = (REFERENCE / "plugin-ops.md").read_text()
    assert ops and ops == set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_type_checkers_see_the_types() -> None:
    assert files("onnxpar").joinpath("py.typed").is_file()


FOLDED = {"reference/ops": "Softmax", "explanation/decisions": "partial layout"}
"""Pages that are divided into groups, and words in an entry of each."""
FILTER = """(() => {
  const input = document.querySelector(".filter input");
  input.value = %r;
  input.dispatchEvent(new Event("input"));
  return document.querySelector(".filter [role=status]").textContent;
})()"""
SHOWN = """[...document.querySelectorAll("details.group tbody tr, details.group > ul > li")]
  .filter((entry) => entry.checkVisibility()).map((entry) => entry.textContent)"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("dark", [False, True])
def test_long_pages_are_folded_and_filtered(site: Path, dark: bool) -> None:
    with browser() as tab:
        for (name, words), width in itertools.product(FOLDED.items(), (PHONE, DESKTOP)):
            tab.open(site / f"{name}.html", width, dark=dark)
            scheme = tab.run("document.body.getAttribute('data-md-color-scheme')")
            assert scheme == ("slate" if dark else "default")
            assert tab.run("document.documentElement.scrollHeight") < 5000
            assert not tab.run(SHOWN)
            found = tab.run(FILTER % words)
            entries = tab.run(SHOWN)
            assert entries and found.startswith(f"{len(entries)} of ")
            assert all(w in each.lower() for each in entries for w in words.lower().split())
            assert tab.run("document.documentElement.scrollWidth") == width
            assert tab.run(FILTER % "") == "" and not tab.run(SHOWN)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_long_pages_open_without_scripts(site: Path) -> None:
    with browser() as tab:
        tab.without_scripts()
        for name in FOLDED:
            tab.open(site / f"{name}.html", PHONE)
            assert not tab.run("document.querySelector('.filter').checkVisibility()")
            assert not tab.run(SHOWN)
            tab.run("document.querySelectorAll('details.group').forEach((g) => g.open = true)")
            assert len(tab.run(SHOWN)) > 100
            assert tab.run("document.documentElement.scrollWidth") == PHONE


def test_no_entry_is_lost_in_a_group() -> None:
    module = hook("collapse")
    for name, divide in module.PAGES.items():
        text = (ROOT / "docs" / name).read_text()
        kept = [line for line in text.splitlines() if line.startswith(("| `", "- "))]
        divided = divide(text)
        assert [x for x in divided.splitlines() if x.startswith(("| `", "- "))] == kept
        assert divided.count("<details") == divided.count("</details>") > 5
