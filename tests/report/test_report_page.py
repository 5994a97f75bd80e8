"""The page of a plan: it has what the plan has, and it stands alone."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pages import Page, of_steps, synthetic
from small_models import HEAD, write_text

import onnxpar
from onnxpar.base.errors import OnnxparError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.graph.typical import Typical
from onnxpar.layout.layout import Concat, Factor, Layout, Product, nested_parts
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.layout.shares import Proportion
from onnxpar.planner.options import Options
from onnxpar.report.charts import TICKS, Bar, memory_curve, merged, ticks, timeline
from onnxpar.report.explain import COLLECTIVE, NODE, UPDATE, Explained, Operand, explain
from onnxpar.report.layout_key import MESH, layout_key
from onnxpar.report.plan_text import size_text
from onnxpar.report.report_page import page, write_page
from onnxpar.strategy.strategy import Strategy

TEXT = """m (float[8,4,16] x, float[16,32] w1, float[32,16] w2)
  => (float[8,4,16] y, float[8,4,32] m)
{ a = MatMul(x, w1)  b = Relu(a)  c = MatMul(b, w2)  s = Softmax(c)
  y = Add(s, x)  m = Softmax(a) }"""
STRATEGY = {
    "mesh": {"tp": 2},
    "shard": {"Relu_b": [[None, None, "tp"]], "Softmax_m": [[None, None, "tp"]]},
}


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explained:
    """A plan with an all-reduce, an all-gather, and communication inside a Softmax."""
    model = write_text(HEAD + TEXT, tmp_path_factory.mktemp("page") / "m.onnx")
    return explain(model, Options(strategy=Strategy.of(STRATEGY)))


def test_the_page_has_the_plan(explained: Explained) -> None:
    plan, found = explained.plan, Page(page(explained))
    assert f"2 ranks, mesh {plan.mesh}" in found.text
    assert found.terms["one run"] == f"{explained.predicted.total * 1e3:.3f} ms"
    for key in ("weights", "activations"):
        assert found.terms[f"{key} per rank"] == size_text(plan.memory[f"{key}_per_rank"])
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


def test_tensors_with_their_layouts(explained: Explained) -> None:
    plan, found = explained.plan, Page(page(explained))
    for kind, ports in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        layouts = [port.layout.text(plan.mesh) for port in ports if port.layout]
        assert [texts[3] for _, texts in found.table(kind)] == layouts
    assert found.table("inputs") == [("", ["x", "float32", "8x4x16", "[-, -, -]"])]
    weights = [texts for _, texts in found.table("weights")]
    assert [texts[0] for texts in weights] == [weight.name for weight in plan.weights]
    assert weights[0] == ["w1", "float32", "16x32", "[-, tp]", "2.0 kB", "1.0 kB"]
    assert "1 input" in found.text and "2 outputs" in found.text and "2 weights" in found.text


def test_shapes_are_for_the_sizes_that_costs_are_for(tmp_path: Path) -> None:
    text = "m (float[batch,16] x) => (float[batch,16] y) { a = Relu(x) y = Neg(a) }"
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    typical = Typical.from_argument({"batch": 6})
    explained = explain(model, Options(devices=2, preset="data-parallel", typical=typical))
    found = Page(page(explained))
    assert "Shapes, times and bytes are for batch=6." in found.text
    relu = next(texts for _, texts in found.nodes() if texts[0] == "Relu")
    assert relu[2:4] == ["x 6x16 [dp, -]", "a 6x16 [dp, -]"]
    assert found.table("inputs") == [("", ["x", "float32", "[batch, 16]", "[dp, -]"])]


def test_the_key_reads_layouts_as_they_are_printed() -> None:
    found = Page("".join(layout_key()))
    mesh = Mesh.parse(MESH)
    dp, tp, whole = Factor(2, (mesh.axis("dp"),)), Factor(4, (mesh.axis("tp"),)), Factor(3)
    layouts = [
        Layout((dp, whole, tp)),
        Layout((whole, whole)),
        Layout((Factor(8, (mesh.axis("dp"), mesh.axis("tp"))),)),
        Layout((Product((Factor(8), tp)),)),
        Layout((Concat((tp, tp, tp)),)),
        Layout((replace(tp, size=10, parts=(4, 4, 1, 1)),)),
        Layout((replace(dp, size=8, parts=Proportion((3, 1))),)),
        Layout((Factor(2, (Axis("tp", 2, 1),)),)),
        Layout((dp, whole), (mesh.axis("tp"),)),
    ]
    assert list(found.terms) == [layout.text(mesh) for layout in layouts]
    assert all(found.terms.values())
    named = Layout((Concat((Factor(64), tp)),)).text(mesh).strip("[]")
    assert named in found.terms["[tp+tp+tp]"]
    inner = Layout((Factor(2, (Axis("tp", 2, 2),)),)).text(mesh).strip("[]")
    assert inner in found.terms["[tp:(1)2]"]
    assert Proportion((3, 1)).sizes(8) == (6, 2) and "6 and 2" in found.terms["[dp{3:1}]"]
    assert nested_parts(10, (4,)) == (3, 3, 2, 2) and "3, 3, 2, 2" in found.terms["[tp{4,4,1,1}]"]


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
    for kind in ("compute", "communication"):
        share = getattr(seconds, kind)
        widths = [float(rect["width"]) for rect in found.of("rect", kind)]
        assert sum(widths) == pytest.approx(share / seconds.total * 1000, abs=0.1 * len(widths))
    ends = [float(r["x"]) + float(r["width"]) for r in found.of("rect", "compute")]
    assert ends == sorted(ends) and max(ends) <= 1000.1


def test_marks_of_time_are_round() -> None:
    assert [label for _, label in ticks(0.0)] == ["0 ms"]
    labels = ["0 ms", "0.05", "0.10", "0.15", "0.20", "0.25"]
    assert [label for _, label in ticks(0.25)] == labels
    for exponent in range(-24, 30):
        total = 1.37 * 1.9**exponent
        found = ticks(total)
        assert 3 <= len(found) <= TICKS + 1
        assert all(0 <= at <= 1 for at, _ in found)
        for at, label in found:  # a label has all digits of its mark
            value = float(label.removesuffix(" ms").replace(",", ""))
            assert value == pytest.approx(at * total, rel=1e-6)


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
    assert points[0] == (0.0, 72.0) and min(y for _, y in points) == 2.0
    assert next(x for x, y in points if y == 2.0) == 500.0


def test_the_page_stands_alone(explained: Explained) -> None:
    text = page(explained)
    found = Page(text)
    assert not {"link", "img", "iframe"} & {tag for tag, _ in found.tags}
    assert not {"src", "href"} & {key for _, given in found.tags for key in given}
    assert not re.search(r"url\(|@import|https?:|fetch|XMLHttp|import\(", text)


def test_a_notebook_shows_the_core_alone(tmp_path: Path) -> None:
    model = write_text(HEAD + TEXT, tmp_path / "m.onnx")
    plan = onnxpar.plan(model, strategy=STRATEGY, html=tmp_path / "p")
    text = plan._repr_html_()
    assert text is not None and text.removesuffix("\n</div>") in (tmp_path / "p").read_text()
    for tag in ("<html", "<head", "<body", "<script", "<!DOCTYPE"):
        assert tag not in text
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", re.sub(r"@media[^{]*\{", "", style))
    assert len(rules) > 10
    for rule in rules:  # none changes what is around
        assert all(s.strip(" }\n").startswith(".onnxpar") for s in rule.split(","))


@pytest.mark.slow
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
    left = sum(int(n.replace(",", "")) for n in re.findall(r"([\d,]+) more rows", found.text))
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
    assert "h.0 to h.2: 3 times 2 nodes, 2.000 ms each time" in text
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
    told = Page(page(found))
    assert told.terms["states per rank"] == size_text(found.plan.memory["states_per_rank"])
    states = [texts[0] for _, texts in told.table("states")]
    assert sorted(states) == sorted(source for source, _ in found.plan.states)
    assert "loss" in {texts[0] for _, texts in told.table("outputs")}


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
    assert "mesh tp=2, strategy tensor-parallel" in Page(out.read_text()).text
    assert main([*how, "--candidates", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = Page(out.read_text())
    winner = told["candidates"][0]
    rows = found.table("candidates")
    names = [texts[0] for _, texts in rows if texts[0] != "one rank"]
    assert names == [c["strategy"] for c in told["candidates"]] and len(rows) == len(names) + 1
    assert [texts[0] for kind, texts in rows if kind == "winner"] == names[:1]
    assert told["why"] in found.text and f"strategy {winner['strategy']}" in found.text
    assert found.terms["one run"] == f"{winner['predicted']['total'] * 1e3:.3f} ms"
    assert f"shows the plan of {winner['strategy']} dp=2." in found.text
    assert main([*how, "--candidates", "--preset", "tensor-parallel"]) == 0
    assert "shows the plan of tensor-parallel tp=2." in Page(out.read_text()).text
    assert "mesh tp=2, strategy tensor-parallel" in Page(out.read_text()).text


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_text(HEAD + TEXT, tmp_path / "m.onnx")
    how = ["plan", str(model), "--devices", "2", "--html", str(tmp_path / "r.html")]
    assert main([*how, "--compare", "trace.json"]) == 2
    assert "--compare does not go with --html" in capsys.readouterr().err
    with pytest.raises(StrategyError, match="time of a manual program cannot be predicted"):
        explain(model, Options(devices=2, preset="manual"))
    assert os.listdir(tmp_path) == ["m.onnx"]
