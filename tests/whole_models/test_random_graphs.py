"""Random graphs under random layouts compute what the unsplit graphs do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from agreement import run_ranks, run_unsplit
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors
from random_graphs.builder import MAKERS, Builder, Value
from random_graphs.graphs import MESHES, build, seeds
from random_graphs.shrink import Draw, Recorded, Replayed, Unsuitable, failure, shrink
from watching import Watching

from onnxpar.base.write_digested import DigestedFolder
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.compiler.plan import write_plan
from onnxpar.cost.cost import Costs
from onnxpar.graph.reshards import is_reshard
from onnxpar.layout.layout import Product, dim_axes, leaves
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import load
from onnxpar.passes.decide.annotate_strategy import AnnotateStrategy
from onnxpar.passes.lower.insert_collectives import InsertCollectives
from onnxpar.passes.write.split_ranks import SplitRanks
from onnxpar.planner.context import make_context
from onnxpar.planner.default_passes import DEFAULT_PASSES
from onnxpar.planner.options import Options
from onnxpar.planner.run_passes import run_passes
from onnxpar.rules.rule import registered
from onnxpar.strategy.strategy import Strategy


@dataclass
class Coverage:
    """What the graphs so far have exercised."""

    graphs: int = 0
    made: set[str] = field(default_factory=set)
    features: Counter[str] = field(default_factory=Counter)
    reshards: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    splits: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, graph: gs.Graph, ctx: PassContext) -> None:
        """Counts a graph behind insert-collectives."""
        self.graphs += 1
        self.features.update(_features(graph, ctx))
        self.reshards.update(node.op for node in graph.nodes if is_reshard(node))
        for op in ctx.sharding.factors.ops:
            self.ops[op.node.op] += 1
            for what in _splits(op, ctx):
                self.splits[op.node.op, what] += 1

    def lines(self) -> Iterator[str]:
        """The table of op x kind of split."""
        yield f"{self.graphs} graphs: {dict(self.features)}"
        yield f"reshards: {dict(self.reshards)}"
        columns = ("split", "uneven", "reduces", "passes")
        yield f"{'op':24}{'nodes':>7}" + "".join(f"{c:>9}" for c in columns)
        for op, nodes in sorted(self.ops.items()):
            counts = "".join(f"{self.splits[op, c] or '-':>9}" for c in columns)
            yield f"{op:24}{nodes:>7}{counts}"


def _features(graph: gs.Graph, ctx: PassContext) -> set[str]:
    found = set()
    for tensor in graph.tensors().values():
        layout = ctx.layouts.get(tensor.name)
        if layout is None:
            continue
        for dim in layout.dims:
            if isinstance(dim, Product) and dim_axes(dim):
                found.add("merged dimensions")
        if layout.partial:
            found.add("partial values")
            found.add(f"partial {layout.reduce}")
        if len(tensor.outputs) > 1 and layout.axes:
            found.add("several consumers")
    return found


def _splits(op: Any, ctx: PassContext) -> set[str]:
    found = set()
    layouts = [ctx.layouts[t.name] for t, _ in op.operands() if t.name in ctx.layouts]
    if any(dim_axes(d) for layout in layouts for d in layout.dims):
        found.add("split")
    if any(len(set(f.part_sizes())) > 1 for x in layouts for d in x.dims for f in leaves(d)):
        found.add("uneven")
    if ctx.sharding.own_partial(op)[0]:
        found.add("reduces")
    elif any(ctx.layouts[t.name].partial for t in op.node.inputs if t.name in ctx.layouts):
        found.add("passes")
    return found


COVERAGE = Coverage()
RESHARDS = {"AllReduce", "AllGather", "ReduceScatter", "AllToAll", "LocalSlice", "Select"}


@contextmanager
def any_cost(seed: int) -> Iterator[None]:
    """Under random costs every reshard and every place of a reduction is the cheapest once."""
    source = np.random.default_rng(seed)

    def seconds(costs: Costs, *of: object) -> float:
        return float(source.random())

    with patch.multiple(Costs, step=seconds, collective=seconds, local=seconds):
        yield


def shard_randomly(model: Path, ops: Sequence[str], b: Builder, folder: Path) -> None:
    """Writes the model split over a mesh as the builder's draws have it."""
    loaded = load(model)
    ctx = make_context(loaded, Options(mesh=Mesh.parse(b.choose(MESHES)), strategy=Strategy()))
    ctx.annotations = list(seeds(b, ctx.sharding, ops))

    def watch(step: Pass, _: object, ctx: PassContext) -> None:
        if isinstance(step, InsertCollectives):
            COVERAGE.note(loaded.graph, ctx)

    passes = [p() for p in DEFAULT_PASSES if p is not AnnotateStrategy]
    with any_cost(b.seed) if b.coin() else nullcontext():
        plan = run_passes(loaded, ctx, passes, Watching(watch), check=True)
    assert plan is not None
    SplitRanks(DigestedFolder(folder)).run(loaded.graph, ctx)
    write_plan(folder, plan.to_json())


def check_values(got: list[np.ndarray], wanted: list[np.ndarray], outputs: list[Value]) -> None:
    """Exact values are equal; others differ by their noise at most."""
    for value, a, b in zip(outputs, got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, value
        if value.is_exact:
            np.testing.assert_array_equal(a, b, value.name)
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=value.noise, err_msg=value.name)


def check_random_graph(draw: Draw, number: int, folder: Path) -> None:
    """Builds graph `number`, shards it, and compares."""
    ops = sorted(MAKERS)
    ops = [ops[(3 * number + i) % len(ops)] for i in range(3)]
    b = Builder(draw, number)
    build(b, ops)
    COVERAGE.made.update(node.op_type for node in b.nodes)
    model, outputs = b.model()
    path = folder / "model.onnx"
    onnx.save(model, path)
    try:
        wanted = run_unsplit(path, b.feeds)
    except ort_errors.Fail:  # its own shape inference fails behind some GroupNormalizations
        raise Unsuitable from None
    par = folder / "model.par"
    par.mkdir()
    shard_randomly(path, ops, b, par)
    check_values(run_ranks(par, b.feeds), wanted, outputs)


def test_random_graphs(request: pytest.FixtureRequest, tmp_path_factory: Any) -> None:
    for number in range(request.config.getoption("--random-graphs")):

        def check(draw: Draw, number: int = number) -> None:
            check_random_graph(draw, number, tmp_path_factory.mktemp("graph"))

        draw = Recorded(number)
        if failure(check, draw):
            folder = tmp_path_factory.mktemp("smallest")
            decisions = shrink(check, draw.drawn)
            try:
                check_random_graph(Replayed(decisions), number, folder)
            finally:
                print(f"graph {number} fails; what is left of it with the decisions {decisions}:")
                print(onnx.printer.to_text(onnx.load(folder / "model.onnx")))
    check_coverage()


def check_coverage() -> None:
    """Every op that the generator knows was drawn, and often enough what is hard."""
    print("\n".join(COVERAGE.lines()))
    print("no maker:", *sorted(op for d, op in registered() if not d and op not in MAKERS))
    missing = sorted(MAKERS.keys() - COVERAGE.made)
    assert not missing
    for feature in ("merged dimensions", "several consumers", "partial values"):
        assert 3 * COVERAGE.features[feature] >= COVERAGE.graphs, feature
    undone = RESHARDS - COVERAGE.reshards.keys()
    assert not undone
