"""The plan's page in a browser: as wide as a phone and a desk, light, dark and printed; and its
search box."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, DESKTOP, PHONE, Browser, browser
from pages import Page, of_steps, synthetic
from small_models import HEAD, write_text

from onnxpar.planner.options import Options
from onnxpar.report.explain import COLLECTIVE, CUT, NODE, Explained, explain
from onnxpar.report.report_page import page, write_page
from onnxpar.report.walk import walk
from onnxpar.strategy.strategy import Strategy

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")

LONG = "network.transformer.layers.0.self_attention.query_key_value.a_name_without_end.weight"
TEXT = f"""m (float[8,4,16] x, float[16,32] "{LONG}", float[32,16] w2)
  => (float[8,4,16] y, float[8,4,32] m)
{{ a = MatMul(x, "{LONG}")  b = Relu(a)  c = MatMul(b, w2)  s = Softmax(c)
  y = Add(s, x)  m = Softmax(a) }}"""
STRATEGY = {
    "mesh": {"tp": 2},
    "shard": {"Relu_b": [[None, None, "tp"]], "Softmax_m": [[None, None, "tp"]]},
}
TEXT_CONTRAST, SHAPE_CONTRAST = 4.5, 3.0
"""What WCAG AA asks of text, and of what a chart draws."""


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explained:
    """A plan with an all-reduce, an all-gather, communication inside a Softmax, and long names."""
    model = write_text(HEAD + TEXT, tmp_path_factory.mktemp("page") / "m.onnx")
    return explain(model, Options(strategy=Strategy.of(STRATEGY)))


@pytest.fixture(scope="module")
def file(explained: Explained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "r.html"
    write_page(path, explained, None)
    return path


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with passes and ranks, of which the second holds less."""
    folder = tmp_path_factory.mktemp("walked")
    text = "m (float[4,6] x, float[6,5] w) => (float[4,5] y) { h = MatMul(x, w) y = Relu(h) }"
    split = Strategy.of({"mesh": {"tp": 2}, "shard": {"MatMul_h": [[1, 1], [1, 2]]}})
    explained, seen = walk(write_text(HEAD + text, folder / "m.onnx"), Options(strategy=split))
    write_page(folder / "r.html", explained, None, seen)
    return folder / "r.html"


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 40 blocks, of 300 nodes in all."""
    kinds = (NODE, COLLECTIVE, CUT)
    steps = [
        synthetic(f"layers.{i // 8}.n{i}", f"layers.{i // 8}", i + 1, kind=kinds[i % 3])
        for i in range(300)
    ]
    path = tmp_path_factory.mktemp("blocks") / "r.html"
    write_page(path, of_steps(steps), None)
    return path


@pytest.mark.slow
def test_a_browser_shows_all_of_it(tab: Browser, explained: Explained, file: Path) -> None:
    tab.open(file)
    assert (
        Page(tab.run("document.documentElement.outerHTML")).nodes() == Page(page(explained)).nodes()
    )


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("width", [320, PHONE, 768, DESKTOP])
def test_nothing_is_wider_than_the_window(tab: Browser, file: Path, width: int) -> None:
    tab.open(file, width)
    tab.run("document.querySelectorAll('details').forEach(it => it.open = true)")
    assert tab.run("document.documentElement.scrollWidth") == width
    outside = tab.run(
        f"""[...document.querySelectorAll("body *")].filter(it => !it.closest(".wide *"))
        .filter(it => it.getBoundingClientRect().right > {width} && !it.closest("tr"))
        .map(it => it.outerHTML.slice(0, 99))"""
    )
    assert outside == []


@pytest.mark.slow
def test_tables_scroll_on_a_phone_beside_their_first_column(tab: Browser, file: Path) -> None:
    tab.open(file, PHONE)
    places = tab.run(
        """(() => {
          const box = [...document.querySelectorAll(".wide")].find(it =>
            it.textContent.includes("MatMul"));
          const cells = box.querySelector("tbody tr").cells;
          const left = () => [cells[0], cells[2]].map(it => it.getBoundingClientRect().left);
          const before = left();
          box.scrollLeft = 150;
          return [box.clientWidth, box.scrollWidth, before, left()];
        })()"""
    )
    shown, wide, before, after = places
    assert wide > shown + 150
    assert after == [before[0], before[1] - 150]
    # A column with the name of a tensor leaves room for others.
    tensor = "document.querySelector('#collectives td').getBoundingClientRect().width"
    assert tab.run(tensor) < PHONE / 2


@pytest.mark.matrix
@pytest.mark.parametrize("width", [320, PHONE, DESKTOP])
@pytest.mark.parametrize("total", [0.0, 0.6, 1.0, 1000.0, 123456.0])
def test_charts_can_be_read(tab: Browser, tmp_path: Path, width: int, total: float) -> None:
    """Labels keep their size, lie apart from each other, and stand in the window, in one line."""
    steps = [synthetic("a", ms=total / 2), synthetic("b", kind=COLLECTIVE, ms=total / 2)]
    (tmp_path / "r.html").write_text(page(of_steps(steps)))
    tab.open(tmp_path / "r.html", width)
    labels = tab.run(
        """[...document.querySelectorAll(".chart")].map(chart =>
          [...chart.querySelectorAll("b, i")].filter(it => it.textContent).map(it => {
            const box = it.getBoundingClientRect();
            return [it.textContent, parseFloat(getComputedStyle(it).fontSize),
                    box.left, box.right, box.top, box.bottom];
        }))"""
    )
    assert len(labels) == 2
    for chart in labels:
        assert len(chart) >= (4 if total else 2)
        assert all(size >= 12 for _, size, *_ in chart)
        assert all(bottom - top < 2 * size for _, size, _, _, top, bottom in chart)  # one line
        assert all(left >= 0 and right <= width for _, _, left, right, _, _ in chart)
        for i, one in enumerate(chart):
            for other in chart[:i]:
                apart = one[2] >= other[3] or one[3] <= other[2]
                assert apart or one[4] >= other[5] or one[5] <= other[4], (one, other)
    drawn = tab.run(
        "[...document.querySelectorAll('.chart svg')].map(it => it.getBoundingClientRect().width)"
    )
    assert min(drawn) > 0.8 * min(width, 1000)


def test_what_is_touched_is_large_enough(tab: Browser, file: Path) -> None:
    tab.open(file, PHONE)
    heights = tab.run(
        """[...document.querySelectorAll("summary, input")].map(it =>
          it.getBoundingClientRect().height)"""
    )
    assert len(heights) > 5 and min(heights) >= 44


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_contrast(tab: Browser, file: Path, blocks: Path, walked: Path, dark: bool) -> None:
    for each in (file, blocks, walked):
        tab.open(each, dark=dark)
        tab.run("document.querySelectorAll('details').forEach(it => it.open = true)")
        paper = colour(tab.run("getComputedStyle(document.body).backgroundColor"))[:3]
        assert (luminance(paper) < 0.05) == dark and (luminance(paper) > 0.9) != dark
        found = tab.run(_COLOURS)
        assert len(found) > 20
        for text, inks, papers in found:
            behind = over(papers, paper)
            assert contrast(over(inks, behind), behind) >= TEXT_CONTRAST, text
        kinds = ("rect.compute", "rect.communication", "path.memory") if each == file else ()
        for kind in kinds:
            drawn = f"getComputedStyle(document.querySelector('{kind}'))"
            ink = colour(tab.run(f"{drawn}.{'stroke' if 'path' in kind else 'fill'}"))
            assert contrast(ink[:3], paper) >= SHAPE_CONTRAST


_COLOURS = """[...document.querySelectorAll(
    "td, th, p, dt, dd, b, i, code, summary, label, h1, h2, ins, del")].map(it => {
    const inks = [getComputedStyle(it).color], papers = [];
    let opacity = 1;
    for (let at = it; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      opacity *= style.opacity;
      papers.unshift(style.backgroundColor);
    }
    return [it.outerHTML.slice(0, 80), [[inks[0], opacity]], papers.map(it => [it, 1])];
  })"""


def colour(text: str) -> list[float]:
    """Red, green, blue and alpha, from 0 to 1."""
    red, green, blue, *alpha = map(float, re.findall(r"[\d.]+", text))
    return [red / 255, green / 255, blue / 255, *(alpha or [1.0])]


def over(layers: list[Any], paper: list[float]) -> list[float]:
    """The colour of layers of (CSS colour, opacity), one over the other."""
    for text, opacity in layers:
        *ink, alpha = colour(text)
        alpha *= opacity
        paper = [alpha * i + (1 - alpha) * p for i, p in zip(ink, paper, strict=True)]
    return paper


def luminance(rgb: list[float]) -> float:
    """The relative luminance of WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: list[float], other: list[float]) -> float:
    """From 1, for the same colour, to 21."""
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_counted_as_wcag_does() -> None:
    black, white, grey = (
        colour("rgb(0, 0, 0)"),
        colour("rgb(255, 255, 255)"),
        colour("rgb(119,119,119)"),
    )
    assert contrast(black[:3], white[:3]) == pytest.approx(21)
    assert contrast(grey[:3], white[:3]) == pytest.approx(4.48, abs=0.01)
    assert over([["rgba(0, 0, 0, 0.5)", 0.5]], [1.0, 1.0, 1.0]) == [0.75, 0.75, 0.75]


@pytest.mark.parametrize("dark", [False, True])
def test_charts_are_drawn_in_their_colours(tab: Browser, file: Path, dark: bool) -> None:
    images = pytest.importorskip("PIL.Image")
    tab.open(file, dark=dark)
    with images.open(BytesIO(tab.screenshot())) as image:
        colours = {found: n for n, found in image.convert("RGB").getcolors(1 << 24)}
    for bars in ((0x3F, 0x7F, 0xBF), (0xD9, 0x60, 0x2B)):
        assert colours.get(bars, 0) > 100


@pytest.mark.slow
def test_printed(tab: Browser, file: Path) -> None:
    tab.open(file, dark=True)
    tab.media("print")
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert tab.run(style.format(".search", "display")) == "none"
    assert colour(tab.run(style.format("body", "backgroundColor"))) == [1, 1, 1, 1]
    assert luminance(colour(tab.run(style.format("body", "color")))[:3]) < 0.05
    assert tab.run(style.format(".wide", "overflowX")) == "visible"
    tab.media("")
    assert tab.printed().startswith(b"%PDF")


def searched(tab: Browser, text: str) -> tuple[str, list[str]]:
    """Types into the box; what it counts, and the rows that are in sight in unfolded blocks."""
    found: list[Any] = tab.run(
        f"""(() => {{
          const box = document.querySelector(".search input");
          box.value = {text!r};
          box.dispatchEvent(new Event("input"));
          box.form.requestSubmit();
          const rows = [...document.querySelectorAll(".block tbody tr")];
          return [document.querySelector(".search output").textContent,
                  rows.filter(it => it.checkVisibility() && it.closest("details").open)
                    .map(it => it.textContent)];
        }})()"""
    )
    return found[0], found[1]


def test_search(tab: Browser, explained: Explained, file: Path) -> None:
    tab.open(file)
    said, before = searched(tab, "")
    assert said == "" and len(before) > 10
    plan = explained.plan
    total = len(Page(page(explained)).nodes()) + len(plan.collectives)
    total += sum(map(len, (plan.inputs, plan.outputs, plan.weights)))
    said, rows = searched(tab, "matmul")  # by kind, in any case
    assert said == f"{len(rows)} of {total} rows"
    assert rows and all("matmul" in row.lower() for row in rows)
    said, rows = searched(tab, "AllReduce sum(tp)")  # all words
    assert rows and all("AllReduce" in row and "sum(tp)" in row for row in rows)
    said, rows = searched(tab, "[-, -, tp]")  # by layout
    assert rows and all("[-, -, tp]" in row for row in rows)
    said, rows = searched(tab, "self_attention.query")  # by name: the weight, and who reads it
    assert len(rows) >= 2 and all(LONG in row for row in rows)
    said, rows = searched(tab, "nowhere")
    assert (said, rows) == (f"0 of {total} rows", [])
    assert tab.run("document.body.innerText").endswith(said)
    headings = "[...document.querySelectorAll('section h2')].map(it => it.innerText.split(',')[0])"
    searched(tab, "AllReduce_c")
    assert tab.run(headings.replace("map(", "filter(it => it.checkVisibility()).map(")) == ["Nodes"]
    said, after = searched(tab, " ")
    assert (said, after) == ("", before)


def test_search_unfolds_what_it_finds(tab: Browser, blocks: Path) -> None:
    tab.open(blocks)
    open_blocks = "[...document.querySelectorAll('.block')].filter(it => it.open).length"
    before = tab.run(open_blocks)
    said, rows = searched(tab, "layers.30.n2")
    assert said.startswith("8 of ") and len(rows) == 8
    assert tab.run(open_blocks) == 1
    titles = tab.run("document.querySelector('.block:not([hidden]) summary').textContent")
    assert titles.startswith("layers.30: ") and titles.endswith(" (8 found)")
    tab.run("document.querySelectorAll('details')[3].open = true")
    searched(tab, "")
    assert tab.run(open_blocks) == before
    assert "found" not in tab.run("document.body.innerText")


def test_search_in_thousands_of_rows(tab: Browser, tmp_path: Path) -> None:
    """All are counted and none is lost, but only some are unfolded."""
    many = [synthetic(f"n{i}", f"b.{i // 40}", i + 1) for i in range(4000)]
    (tmp_path / "r.html").write_text(page(of_steps(many)))
    tab.open(tmp_path / "r.html")
    said, rows = searched(tab, "n")
    assert said == "4,000 of 4,000 rows" and 300 <= len(rows) < 400
    told = "document.querySelectorAll('.block')[99].firstElementChild.textContent"
    assert tab.run(told).endswith("(40 found)")
    said, rows = searched(tab, "n3999")
    assert said == "1 of 4,000 rows" and len(rows) == 1


def test_a_chosen_rank(tab: Browser, walked: Path) -> None:
    """Its parts are shown, and the sections fit a phone."""
    tab.open(walked, PHONE)
    tab.run("document.querySelectorAll('details').forEach(it => it.open = true)")
    assert tab.run("document.documentElement.scrollWidth") == PHONE
    shown = "document.querySelector('#rank-0').innerText"
    assert "w 6x3 [:, 0:3]" in tab.run(shown)
    choose = """(() => { const choice = document.querySelector(".rank select");
        choice.value = "1"; choice.dispatchEvent(new Event("change")); })()"""
    tab.run(choose)
    assert "w 6x2 [:, 3:5]" in tab.run(shown) and "h 4x2" in tab.run(shown)
    assert tab.run("document.querySelector('.rank select').getBoundingClientRect().height") >= 44
    _, rows = searched(tab, "changed MatMul")
    assert rows and all("changed" in row and "MatMul" in row for row in rows)


def test_without_scripts(tab: Browser, explained: Explained, file: Path) -> None:
    tab.without_scripts()
    try:
        tab.open(file)
        assert tab.run("document.querySelector('.search').checkVisibility()") is False
        rows = tab.run("document.querySelectorAll('tbody tr:not([hidden])').length")
        assert rows == sum(len(found) - 1 for _, found in Page(page(explained)).tables)
    finally:
        tab.without_scripts(False)
