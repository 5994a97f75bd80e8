"""The page's walk through the passes, and a rank's graph beside the model's: a wrong split is seen
there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import onnx_graphsurgeon as gs
import pytest
from pages import Page
from small_models import HEAD, write_text
from watching import Watching

from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.load.load import Model
from onnxpar.planner import sharder
from onnxpar.planner.loader import Loader
from onnxpar.planner.options import Options
from onnxpar.report.explain import Explained
from onnxpar.report.pass_steps import ADDED, CHANGED, KEPT, REMOVED, PassSteps
from onnxpar.report.rank_graph import MOST
from onnxpar.report.report_page import page
from onnxpar.report.walk import Walk, walk
from onnxpar.strategy.strategy import Strategy

LAYERS = 9
ODD = 5
"""The layer that is split in another way."""


def deep(folder: Path) -> Path:
    """Writes a model of equal layers."""
    lines, now = [], "x"
    for i in range(LAYERS):
        lines.append(f"a{i} = MatMul({now}, v{i}) b{i} = Relu(a{i}) c{i} = MatMul(b{i}, w{i})")
        lines.append(f"d{i} = Add(c{i}, {now})")
        now = f"d{i}"
    weights = ", ".join(f"float[8,12] v{i}, float[12,8] w{i}" for i in range(LAYERS))
    text = f"m (float[4,8] x, {weights}) => (float[4,8] d{LAYERS - 1}) {{ {' '.join(lines)} }}"
    return write_text(HEAD + text, folder / "m.onnx")


def strategy(odd: bool) -> Strategy:
    """Splits the hidden units of every layer, or of one the samples."""
    each = {f"MatMul_a{i}": [[1, 1], [1, 2]] for i in range(LAYERS)}
    if odd:
        each[f"MatMul_a{ODD}"] = [[2, 1], [1, 1]]
    return Strategy.of({"mesh": {"tp": 2}, "shard": each})


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Explained, Walk]:
    model = deep(tmp_path_factory.mktemp("deep"))
    return walk(model, Options(strategy=strategy(True)))


def rows(found: Page, walked: Walk, name: str) -> list[tuple[str, list[str]]]:
    """The rows of a pass."""
    number = [step.name for step in walked.steps].index(name)
    return found.table(f"pass-{number}")


def test_a_wrong_split_stands_out(seen: tuple[Explained, Walk]) -> None:
    explained, walked = seen
    found = Page(page(explained, None, walked))
    for name in ("propagate-layouts", "insert-collectives"):
        told = "\n".join(" ".join(texts) for _, texts in rows(found, walked, name))
        assert re.search(rf"\b[a-d]{ODD}\b", told)
        assert len({*re.findall(r"\bc\d\b", told)}) < LAYERS
        assert "repetitions, with other names" in told
    (odd,) = [
        texts
        for _, texts in rows(found, walked, "propagate-layouts")
        if texts[1:2] == [f"MatMul_a{ODD}"]
    ]
    assert odd[0] == f"MatMul\n{CHANGED}" and odd[2].split("\n")[1].split() == [f"v{ODD}"]
    assert odd[3] == f"a{ODD} whole → [tp, -]"
    asked = [texts[1] for _, texts in rows(found, walked, "annotate-strategy") if texts[1:]]
    assert f"MatMul_a{ODD}" in asked


def test_without_it_all_layers_are_one(tmp_path: Path) -> None:
    explained, walked = walk(deep(tmp_path), Options(strategy=strategy(False)))
    found = Page(page(explained, None, walked))
    told = "\n".join(" ".join(texts) for _, texts in rows(found, walked, "propagate-layouts"))
    assert f"{LAYERS} repetitions" in told and f"MatMul_a{ODD}" not in told


def test_counts_of_passes(seen: tuple[Explained, Walk]) -> None:
    explained, walked = seen
    (inserted,) = [step for step in walked.steps if step.name == "insert-collectives"]
    reshards = sum(step.kind != "node" for step in explained.steps)
    assert inserted.count(ADDED) == reshards > LAYERS
    assert inserted.count(REMOVED) == 0
    assert inserted.count(CHANGED) + inserted.count(KEPT) == 4 * LAYERS
    text = Page(page(explained, None, walked)).text
    assert f"insert-collectives: {reshards} added" in text
    assert "Changed nothing: " in text and "compress-collectives" in text
    assert "<h2>Passes" not in page(explained)


class _Planted(Pass):
    name: ClassVar[str] = "planted"
    stage = Stage.LOWER

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        """Removes a node, renames another and splits the result of a third in another way."""
        nodes = {node.name: node for node in graph.nodes}
        graph.nodes.remove(nodes["Relu_b0"])
        nodes["Relu_b1"].name = "other"
        ctx.layouts["c2"] = replace(ctx.layouts["c2"], partial=())
        graph.nodes.append(graph.nodes.pop(0))
        return True


def test_what_a_pass_did_is_seen(tmp_path: Path) -> None:
    passes = PassSteps()

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        passes.passed(step, model, ctx)
        if step.name == "insert-collectives":
            graph, layouts = model.graph, dict(ctx.layouts)
            nodes, renamed = list(graph.nodes), next(n for n in graph.nodes if n.name == "Relu_b1")
            planted = _Planted()
            planted.run(graph, ctx)
            passes.passed(planted, model, ctx)
            graph.nodes, ctx.layouts, renamed.name = nodes, layouts, "Relu_b1"

    path, options = deep(tmp_path), Options(strategy=strategy(False))
    sharder.plan(path, options, Watching(watch), Loader(path, passes.loading))
    (step,) = [step for step in passes.steps if step.name == "planted"]
    changed = {c.before.name: c for c in step.changes if c.before and c.kind == CHANGED}
    removed = [c.before.name for c in step.changes if c.before and c.kind == REMOVED]
    assert removed == ["Relu_b0"] and step.count(ADDED) == 0 and step.reordered
    renamed = changed.pop("Relu_b1").after
    assert renamed is not None and renamed.name == "other"
    product = changed.pop("MatMul_c2")
    assert product.before is not None and product.after is not None
    assert product.before.results[0].layout == "[-, -] sum(tp)"
    assert product.after.results[0].layout == ""
    assert not changed, changed


def test_each_rank_beside_the_model(tmp_path: Path) -> None:
    text = "m (float[4,6] x, float[6,5] w) => (float[4,5] y) { h = MatMul(x, w) y = Relu(h) }"
    model = write_text(HEAD + text, tmp_path / "m.onnx")
    split = Strategy.of({"mesh": {"tp": 2}, "shard": {"MatMul_h": [[1, 1], [1, 2]]}})
    explained, walked = walk(model, Options(strategy=split))
    html = page(explained, None, walked)
    found = Page(html)
    (product, *_) = found.table("rank-0")
    op, node, in_model, on_rank = product[1]
    assert (op, node) == ("MatMul", "MatMul_h")
    assert in_model.split("\n")[1] == "w 6x5 [-, tp]" and "→ h 4x5 [-, tp]" in in_model
    assert "w 6x3 [:, 0:3] [-, tp]" in on_rank and "→ h 4x3" in on_rank
    (lists,) = re.findall(r'class="texts">(.*?)</script>', html)
    assert ["6x3", "6x2"] in json.loads(lists) and ["[:, 0:3]", "[:, 3:5]"] in json.loads(lists)
    choices = [given["value"] for tag, given in found.tags if tag == "option"]
    assert choices == ["0", "1"]


def test_many_ranks_do_not_make_the_page_large(tmp_path: Path) -> None:
    sizes = []
    for count in (4, 256):
        split = Strategy.of({"mesh": {"tp": count}, "tensors": {"w0": ["tp", None]}})
        explained, walked = walk(deep(tmp_path), Options(strategy=split))
        html = page(explained, None, walked)
        sizes.append(len(html))
        assert html.count("<option") == min(count, MOST)
    assert sizes[1] < 1.5 * sizes[0]
    assert f"of 256; the page has the first {MOST}" in html
