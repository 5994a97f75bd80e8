"""The page of a plan: what stands in it is the plan's, it stands alone, and a browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from small_models import HEAD, write_text

import onnxpar
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import Plan
from onnxpar.errors import OnnxparError, StrategyError
from onnxpar.layout.mesh import Mesh
from onnxpar.pipeline.pipeline import Options
from onnxpar.report.charts import Bar, memory_curve, merged, timeline
from onnxpar.report.explain import COLLECTIVE, NODE, UPDATE, Explained, Operand, Step, explain
from onnxpar.report.report import size_text
from onnxpar.report.report_page import page, write_page
from onnxpar.search.predict import Prediction
from onnxpar.strategy.strategy import Strategy

TEXT = """m (float[8,4,16] x, float[16,32] w1, float[32,16] w2)
  => (float[8,4,16] y, float[8,4,32] m)
{ a = MatMul(x, w1)  b = Relu(a)  c = MatMul(b, w2)  s = Softmax(c)
  y = Add(s, x)  m = Softmax(a) }"""
STRATEGY = {
    "mesh": {"tp": 2},
    "shard": {"Relu_b": [[None, None, "tp"]], "Softmax_m": [[None, None, "tp"]]},
}
VOID = {"meta", "br"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


class Page(HTMLParser):
    """Tables by id (rows of (class, texts)), the text of everything, and how often tags stand."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[tuple[str, list[tuple[str, list[str]]]]] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.tags.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append((given.get("id", ""), []))
        elif tag == "tr":
            self.tables[-1][1].append((given.get("class", ""), []))
        elif tag in ("td", "th"):
            self.tables[-1][1][-1][1].append("")
        elif tag == "br" and "td" in self.open:
            self.tables[-1][1][-1][1][-1] += "\n"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[-1][1][-1][1][-1] += data

    def table(self, name: str) -> list[tuple[str, list[str]]]:
        """Rows of a table, but for its head."""
        ((_, rows),) = [t for t in self.tables if t[0] == name]
        return rows[1:]

    def nodes(self) -> list[tuple[str, list[str]]]:
        """Rows of all nodes."""
        return [row for name, rows in self.tables if not name for row in rows[1:]]

    def of(self, tag: str, kind: str) -> list[dict[str, str]]:
        """The attributes of tags of a class."""
        return [given for t, given in self.tags if t == tag and given.get("class") == kind]


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explained:
    """A plan with an all-reduce, an all-gather, and talk within a Softmax."""
    model = write_text(HEAD + TEXT, tmp_path_factory.mktemp("page") / "m.onnx")
    return explain(model, Options(strategy=Strategy.of(STRATEGY)))


def test_the_page_has_the_plan(explained: Explained) -> None:
    plan, found = explained.plan, Page(page(explained))
    assert f"2 ranks, mesh {plan.mesh}" in found.text
    assert f"predicted: {explained.predicted.total * 1e3:.3f} ms a run" in found.text
    for key in ("weights", "activations"):
        assert f"{key} of a rank: {size_text(plan.memory[f'{key}_per_rank'])}" in found.text
    rows = found.nodes()
    assert [texts[1] for _, texts in rows] == [step.name for step in explained.steps]
    for (kind, texts), step in zip(rows, explained.steps, strict=True):
        assert kind == ("" if step.kind == NODE else step.kind)
        assert texts[0] == step.op
        reads = [f"{o.name} {o.shape} {o.layout}" for o in step.operands]
        assert texts[2].split("\n") == reads
        assert texts[4] == f"{step.predicted.total * 1e3:.4f}"
    relu = next(texts for _, texts in rows if texts[0] == "Relu")
    assert relu[2:4] == ["a 8x4x32 [-, -, tp]", "b 8x4x32 [-, -, tp]"]


def test_reshards_stand_between_nodes(explained: Explained) -> None:
    found = Page(page(explained))
    entries = {entry.name: entry for entry in explained.plan.collectives}
    marked = [texts for kind, texts in found.nodes() if kind == COLLECTIVE]
    assert {texts[1] for texts in marked} == {n for n in entries if "::" not in n} and marked
    for texts in marked:
        entry = entries[texts[1]]
        assert (texts[0], texts[5]) == (entry.kind, size_text(entry.bytes))
        assert texts[2].endswith(entry.before) and texts[3].endswith(entry.after)
    table = found.table("collectives")
    assert len(table) == len(explained.plan.collectives)
    for (_, texts), entry in zip(table, explained.plan.collectives, strict=True):
        layouts = f"{entry.before} → {entry.after}"
        assert texts[:3] == [entry.tensor, entry.kind, layouts]
        assert texts[4] == size_text(entry.bytes)
    told = sum(float(texts[5] or 0) for _, texts in table)
    assert told == pytest.approx(explained.predicted.communication * 1e3, abs=1e-3)


def test_the_timeline_is_to_scale(explained: Explained) -> None:
    found = Page(timeline(explained.steps))
    seconds = explained.predicted
    for kind, share in (("compute", seconds.compute), ("talk", seconds.communication)):
        widths = [float(rect["width"]) for rect in found.of("rect", kind)]
        assert sum(widths) == pytest.approx(share / seconds.total * 1000, abs=0.1 * len(widths))
    ends = [float(r["x"]) + float(r["width"]) for r in found.of("rect", "compute")]
    assert ends == sorted(ends) and max(ends) <= 1110.1


def test_memory_over_the_schedule(explained: Explained) -> None:
    peak = explained.plan.memory["activations_per_rank"]
    assert max(step.alive for step in explained.steps) == peak
    assert size_text(peak) in Page(memory_curve(explained.steps)).text
    first = explained.steps[0]
    assert first.alive == 8 * 4 * 16 * 4 + 8 * 4 * 32 * 4 // 2  # what is fed, and made in two parts
    assert size_text(0) in Page(memory_curve([])).text


def test_what_was_read_last_is_freed(tmp_path: Path) -> None:
    text = "m (float[8,16] x) => (float[8,16] y) { a = Relu(x) b = Neg(a) y = Abs(b) }"
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    found = explain(model, Options(devices=2, preset="data-parallel"))
    fed = 256
    assert [step.alive - fed for step in found.steps] == [256, 512, 512]


def test_a_short_peak_is_seen() -> None:
    steps = [synthetic("a", size=50), synthetic("b", size=100, ms=0.0), synthetic("c", size=50)]
    steps.insert(2, synthetic("d", size=50, ms=0.0))
    (path,) = Page(memory_curve(steps)).of("path", "memory")
    points = [tuple(map(float, point.split(","))) for point in path["d"].strip("MZ").split()]
    assert points[0] == (110.0, 78.0) and min(y for _, y in points) == 8.0
    assert next(x for x, y in points if y == 8.0) == 610.0


def test_the_page_stands_alone(explained: Explained) -> None:
    text = page(explained)
    found = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in found.tags}
    assert not {"src", "href"} & {key for _, given in found.tags for key in given}
    assert not re.search(r"url\(|@import|https?:", text)


def test_a_notebook_shows_the_core_alone(tmp_path: Path) -> None:
    model = write_text(HEAD + TEXT, tmp_path / "m.onnx")
    plan = onnxpar.plan(model, strategy=STRATEGY, html=tmp_path / "p")
    text = plan._repr_html_()
    assert text is not None and text in (tmp_path / "p").read_text()
    for tag in ("<html", "<head", "<body", "<script", "<!DOCTYPE"):
        assert tag not in text
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    rules = [rule for rule in style.split("}") if rule.strip()]
    assert len(rules) > 10
    for rule in rules:  # none changes what is around
        assert all(s.strip().startswith(".onnxpar") for s in rule.split("{")[0].split(","))


def synthetic(
    name: str, block: str = "", size: int = 4, op: str = "Add", kind: str = NODE, ms: float = 1.0
) -> Step:
    """A node of one operand and one result, of this size."""
    seconds = Prediction(0.0, ms / 1e3) if kind == COLLECTIVE else Prediction(ms / 1e3, 0.0)
    port = (Operand(f"{name}.x", str(size), "[tp]"),)
    return Step(name, op, kind, block, 0, port, port, seconds, size)


def of_steps(steps: Sequence[Step]) -> Explained:
    return Explained(Plan("m", Mesh.parse("tp=2"), None, [], [], [], [], [], []), tuple(steps))


def test_thousands_of_nodes() -> None:
    kinds = (NODE, COLLECTIVE)
    many = [
        synthetic(
            f"a_long_name_of_a_node_{i}" * 3, f"b.{i // 40}", i + 1, kind=kinds[i % 2], ms=0.1
        )
        for i in range(20_000)
    ]
    text = page(of_steps(many))
    assert len(text) < 2_000_000
    found = Page(text)
    rows = found.nodes()
    left = sum(int(n) for n in re.findall(r"and (\d+) more nodes", found.text))
    assert len(rows) > 1000 and len(rows) + left == 20_000
    bars = found.of("rect", "compute")
    assert 0 < len(bars) <= 1000
    assert sum(float(r["width"]) for r in bars) == pytest.approx(1000, rel=0.05)


def test_short_neighbours_are_one_bar() -> None:
    lane = [Bar("compute", start, 0.1, [str(start)]) for start in (0.0, 0.2, 5.0)]
    long = Bar("compute", 6.0, 3.0, ["long"])
    next_to_it = Bar("compute", 9.0, 3.0, ["next"])
    found = merged([*lane, long, next_to_it], 1.0)
    assert [(b.start, round(b.start + b.seconds, 6), len(b.names)) for b in found] == [
        (0.0, 0.3, 2),
        (5.0, 9.0, 2),
        (9.0, 12.0, 1),
    ]


def test_blocks_that_repeat_stand_once() -> None:
    named = [synthetic(f"{i}.{j}", f"h.{i}", j + 1) for i in range(3) for j in range(2)]
    other = [synthetic("o.0", "h.3", 9)]
    plain = [synthetic(f"n{i}", "", i % 5 + 1) for i in range(20)]
    update = [synthetic(f"u{i}", UPDATE, i % 4 + 1) for i in range(13)]
    found = list(of_steps([*named, *other, *plain, *update]).blocks())
    told = [(b.name, b.last, b.times, [s.name for s in b.steps]) for b in found]
    assert told == [
        ("h.0", "h.2", 3, ["0.0", "0.1"]),
        ("h.3", "h.3", 1, ["o.0"]),
        ("", "", 4, ["n0", "n1", "n2", "n3", "n4"]),
        (UPDATE, UPDATE, 3, ["u0", "u1", "u2", "u3"]),
        (UPDATE, UPDATE, 1, ["u12"]),
    ]
    text = Page(page(of_steps([*named, *plain]))).text
    assert "h.0 to h.2, 3 times alike: 2 nodes, 2.000 ms each" in text
    other_layout = replace(named[2], operands=(Operand("x", "1", "[-]"),))
    assert len(list(of_steps([*named[:2], other_layout, named[3]]).blocks())) == 2


def test_names_are_escaped() -> None:
    name = "<script>&\"'</table>"
    found = Page(page(of_steps([synthetic(name, f"{name}.0", op=name)])))
    ((_, texts),) = found.nodes()
    assert texts[:2] == [name, name] and texts[2].startswith(name)


def test_a_body_counts_where_it_stands(tmp_path: Path) -> None:
    text = """m (float[8,16] x, bool c) => (float[8,16] y) { a = Relu(x)
      y = If (c) <then_branch = t () => (float[8,16] p) { q = Abs(a) p = Neg(q) },
                  else_branch = e () => (float[8,16] r) { r = Exp(a) }> }"""
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    found = explain(model, Options(devices=2, preset="data-parallel"))
    depths = {step.op: step.depth for step in found.steps}
    assert [depths[op] for op in ("Relu", "If", "Abs", "Neg", "Exp")] == [0, 0, 1, 1, 1]
    assert max(s.alive for s in found.steps) == found.plan.memory["activations_per_rank"]


def test_blocks_of_a_training_step(tmp_path: Path) -> None:
    text = """m (float[8,4] x, float[4,4] w_0, float[4,4] w_1) => (float[8,4] y)
      { a = MatMul(x, w_0) b = Tanh(a) y = MatMul(b, w_1) }"""
    step = tmp_path / "step.onnx"
    how = ["--loss", "mse", "--optimizer", "adam", "-o", str(step)]
    assert main(["grad", str(write_text(HEAD + text, tmp_path / "m.onnx")), *how]) == 0
    found = explain(step, Options(devices=2, preset="data-parallel"))
    blocks = [block.name for block in found.blocks()]
    assert blocks[0] == "" and blocks[-1] == UPDATE
    assert found.plan.step is not None
    assert (
        f"states of a rank: {size_text(found.plan.memory['states_per_rank'])}"
        in Page(page(found)).text
    )


def test_the_file_is_whole_or_not_there(explained: Explained, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    write_page(path, explained, None)
    assert path.read_text() == page(explained)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OnnxparError, match="folder"):
        write_page(tmp_path / "folder", explained, None)
    with pytest.raises(OnnxparError, match="no such folder"):
        write_page(tmp_path / "none" / "r.html", explained, None)
    assert sorted(os.listdir(tmp_path)) == ["folder", "r.html"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write_text(HEAD + TEXT, tmp_path / "m.onnx"), tmp_path / "r.html"
    how = ["plan", str(model), "--devices", "2", "--html", str(out)]
    assert main([*how, "--preset", "tensor-parallel"]) == 0
    assert f"written to {out}" in capsys.readouterr().out
    assert "mesh tp=2, tensor-parallel" in Page(out.read_text()).text
    assert main([*how, "--candidates", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = Page(out.read_text())
    winner = told["candidates"][0]
    rows = found.table("candidates")
    names = [texts[0] for _, texts in rows if texts[0] != "one rank"]
    assert names == [c["strategy"] for c in told["candidates"]] and len(rows) == len(names) + 1
    assert [texts[0] for kind, texts in rows if kind == "winner"] == names[:1]
    assert told["why"] in found.text and f", {winner['strategy']}" in found.text
    assert f"predicted: {winner['predicted']['total'] * 1e3:.3f} ms a run" in found.text
    assert main([*how, "--candidates", "--preset", "tensor-parallel"]) == 0
    assert "mesh tp=2, tensor-parallel" in Page(out.read_text()).text


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_text(HEAD + TEXT, tmp_path / "m.onnx")
    how = ["plan", str(model), "--devices", "2", "--html", str(tmp_path / "r.html")]
    assert main([*how, "--compare", "trace.json"]) == 2
    assert "leave out --candidates and --html" in capsys.readouterr().err
    with pytest.raises(StrategyError, match="of a manual program nothing is predicted"):
        explain(model, Options(devices=2, preset="manual"))
    assert os.listdir(tmp_path) == ["m.onnx"]


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_shows_it(explained: Explained, tmp_path: Path) -> None:
    write_page(tmp_path / "r.html", explained, None)
    assert BROWSER is not None
    dom = browse(BROWSER, tmp_path, "--dump-dom")
    assert Page(dom).nodes() == Page(page(explained)).nodes()
    images = pytest.importorskip("PIL.Image")
    browse(BROWSER, tmp_path, f"--screenshot={tmp_path / 'r.png'}", "--window-size=1200,1000")
    with images.open(tmp_path / "r.png") as image:
        colours = {colour: n for n, colour in image.convert("RGB").getcolors(1 << 24)}
    for bars in ((0x3F, 0x7F, 0xBF), (0xD9, 0x60, 0x2B)):
        assert colours.get(bars, 0) > 100


def browse(browser: str, folder: Path, *flags: str) -> str:
    """Opens the page in a browser without a window; returns what it prints."""
    calm = ("background-networking", "component-update", "sync", "gpu")
    how = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{it}" for it in calm)]
    how.append(f"--user-data-dir={folder / 'profile'}")
    url = (folder / "r.html").as_uri()
    done = subprocess.run(
        [browser, *how, *flags, url], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
