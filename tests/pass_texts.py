"""The text of a small model after each pass, and the golden files that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_graphsurgeon as gs
import pytest
from small_models import write_text
from watching import Watching

from onnxpar.base.write_digested import DigestedFolder
from onnxpar.compiler.graph_text import graph_text
from onnxpar.compiler.pass_ import Pass, PassContext, Stage
from onnxpar.graph.per_rank import PerRank
from onnxpar.load.load import Model
from onnxpar.passes.write.split_ranks import SplitRanks
from onnxpar.planner.context import load_model, prepare
from onnxpar.planner.convert_options import options_of
from onnxpar.planner.default_passes import passes_of
from onnxpar.planner.option_table import PlanOptions
from onnxpar.planner.pass_registry import parse_passes
from onnxpar.planner.run_passes import run_passes
from onnxpar.training import grad

GOLDEN = Path(__file__).parent / "golden"
HEAD = '<ir_version: 8, opset_import: ["" : 18, "onnxpar" : 1]>\n'


@dataclass(frozen=True)
class Example:
    """A model, how its training step is written if it becomes one, and how it is sharded. Inputs
    of which the name starts with `w` become weights. The text may begin with versions, in <>."""

    model: str
    shard: Mapping[str, Any]
    grad: Mapping[str, Any] | None = None

    def texts(self, folder: Path) -> dict[str, dict[str, str]]:
        """The graphs after each pass, those of ranks last, and before the first, by their names;
        `folder` is empty."""
        text = self.model if self.model.lstrip().startswith("<") else HEAD + self.model
        path = write_text(text, folder / "model.onnx")
        if self.grad is not None:
            grad(path, folder / "step.onnx", **self.grad)
            path = folder / "step.onnx"
        options = options_of({**self.shard, "check_layouts": True}, kind=PlanOptions)
        model = load_model(path, options)
        texts = {"": _graphs(model, prepare(model, options, []))}

        def watch(step: Pass, model: Model, ctx: PassContext) -> None:
            texts[step.name] = _graphs(model, ctx)

        steps = passes_of(options, model)
        ctx = prepare(model, options, steps, Watching(watch))
        later = [step for step in steps if step.stage is not Stage.REWRITE]
        run_passes(model, ctx, later, Watching(watch), check=True)
        (folder / "par").mkdir()
        SplitRanks(DigestedFolder(folder / "par")).run(model.graph, ctx)
        files = sorted((folder / "par").glob("rank_*.onnx"))
        return {**texts, SplitRanks.name: {file.name: _rank_text(file, ctx) for file in files}}


def _graphs(model: Model, ctx: PassContext) -> dict[str, str]:
    """The graph, and those that are computed apart."""
    apart = {name: graph_text(graph, ctx) for name, graph in ctx.lowered.programs.items()}
    return {"": graph_text(model.graph, ctx), **apart}


def _rank_text(file: Path, ctx: PassContext) -> str:
    """The graph that one rank runs, with the values of its small weights."""
    graph = gs.import_onnx(onnx.load(file))
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant):
            tensor.values = tensor.values  # read from its file
    return graph_text(graph, replace(ctx, lowered=replace(ctx.lowered, per_rank=PerRank())))


def joined(graphs: Mapping[str, str]) -> str:
    """Several graphs in one text; a line above each but the main one has its name."""
    return "\n".join((f"// {name}\n" if name else "") + text for name, text in graphs.items())


def texts_after(passes: str, model: Model, ctx: PassContext) -> list[str]:
    """The graph after each pass, below a line with the pass's name; layouts are verified."""
    shown: list[str] = []

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        shown.append(f"// after {step.name}\n{graph_text(model.graph, ctx)}")

    run_passes(model, ctx, parse_passes(passes), Watching(watch), check=True)
    return shown


def compare_golden(name: str, found: str, request: pytest.FixtureRequest) -> None:
    """Holds a text against its file, or writes it anew with --update-golden."""
    golden = GOLDEN / f"{name}.onnxtxt"
    if request.config.getoption("--update-golden"):
        golden.write_text(found)
    assert found == golden.read_text(), "review with --update-golden and git diff"
