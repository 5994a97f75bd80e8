"""Tables that would be too large become smaller ones that say the same; where even these are too
many, nodes have fewer choices, and keep to what is asked for."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import helper
from search.small_graphs import graphs, save, topologies
from search.test_problem import SETTINGS, context
from tiny_models import model, port, write

from onnxpar.compiler.pass_ import PassContext
from onnxpar.cost.topology import Topology
from onnxpar.search import problem as problems
from onnxpar.search import shared_reshards
from onnxpar.search.objective import LATENCY, THROUGHPUT, Objective
from onnxpar.search.op_strategies import partial_kinds, strategies_of
from onnxpar.search.patience import Patience
from onnxpar.search.problem import Problem
from onnxpar.search.solver.limits import TooMuch

MOST = 1 << 16
"""Assignments that are all tried."""
LONG = 600.0
"""Seconds, so that no search is cut short on a busy machine."""


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """No readers of a tensor have one table together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reshards, "MOST_TOGETHER", 0)
        yield


def solved(
    graph: gs.Graph, ctx: PassContext, objective: Objective, dense: int, exhaustively: bool = False
) -> float:
    """The least that is found, infinite where nothing is within the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reshards, "MOST_DENSE", dense)
        problem = Problem(graph, ctx.sharding, objective=objective)
        if exhaustively:
            assume(math.prod(problem.sizes) <= MOST)
        try:
            return problem.solve(exhaustively).seconds
        except TooMuch:
            return math.inf


@pytest.mark.slow
@SETTINGS
@given(
    graphs(4),
    st.sampled_from(["tp=2", "tp=3", "dp=2,tp=2"]),
    topologies(),
    st.sampled_from([None, 0.2, 0.5, 0.9]),
)
def test_pairs_have_the_same_least_sum(
    model: onnx.ModelProto, mesh: str, topology: Topology, share: float | None
) -> None:
    """As one table over maker, reader and what is common, and as trying everything."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(model, Path(folder) / "m.onnx")
        graph, ctx = context(path, mesh, topology)
    memory = None
    if share is not None:
        demands = Problem(graph, ctx.sharding, objective=Objective(memory=1.0)).timeline.demands
        memory = share * sum(float(d.table.values.max()) for d in demands)
    objective = Objective(LATENCY, memory, patience=Patience(LONG))
    least = solved(graph, ctx, objective, 1 << 20)
    assert solved(graph, ctx, objective, 0) == pytest.approx(least, rel=1e-9)
    assert solved(graph, ctx, objective, 0, exhaustively=True) == pytest.approx(least, rel=1e-9)


def fan(folder: Path, readers: int, rows: int = 6) -> Path:
    """A product that so many nodes read, each of which likes it split in another way."""
    ops = ["Softmax", "Relu", "MatMul", "Transpose", "ReduceSum"][:readers]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "mm")]
    weights = {"w": np.ones((8, 8), np.float32), "v": np.ones((8, 4), np.float32)}
    ends = []
    for i, op in enumerate(ops):
        more = {"MatMul": ["v"]}.get(op, [])
        attributes = {"ReduceSum": {"keepdims": 0}, "Softmax": {"axis": i % 2}}.get(op, {})
        nodes.append(helper.make_node(op, ["h", *more], [f"y{i}"], f"y{i}", **attributes))
        shape = {"MatMul": [rows, 4], "Transpose": [8, rows], "ReduceSum": []}.get(op, [rows, 8])
        ends.append(port(f"y{i}", shape))
    return write(model(nodes, [port("x", [rows, 8])], ends, weights), folder)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("readers", [2, 3, 5])
def test_many_readers(readers: int, mesh: str, tmp_path: Path) -> None:
    graph, ctx = context(fan(tmp_path, readers), mesh, Topology.default())
    for memory in (None, 400.0, 1000.0):
        objective = Objective(memory=memory, patience=Patience(LONG))
        least = solved(graph, ctx, objective, 1 << 20)
        assert solved(graph, ctx, objective, 0) == pytest.approx(least, rel=1e-9)
    objective = Objective(
        THROUGHPUT
    )  # the source that makes the longer one less counts, not the faster one
    assert solved(graph, ctx, objective, 0) <= solved(graph, ctx, objective, 1 << 20) * (1 + 1e-9)


def test_no_table_is_over_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reshards, "MOST_DENSE", 0)
    graph, ctx = context(fan(tmp_path, 5), "dp=2,tp=2", Topology.default())
    problem = Problem(graph, ctx.sharding, objective=Objective(memory=1000.0))
    tables = [*problem.sums[0], *(demand.table for demand in problem.timeline.demands)]
    assert max(len(set(table.scope)) for table in tables) == 2
    assert sum(table.values.size for table in problem.sums[0]) == problem.tables.entries


@pytest.mark.parametrize("most", [1 << 12, 1 << 9, 1])
def test_fewer_choices(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded tables, and something nearly as fast in these."""
    graph, ctx = context(fan(tmp_path, 5), "dp=2,tp=2", Topology.default())
    least = Problem(graph, ctx.sharding).solve().seconds
    monkeypatch.setattr(problems, "MOST_ENTRIES", most)
    problem = Problem(graph, ctx.sharding)
    largest = max(map(len, problem.strategies.values()))
    assert problem.tables.entries <= most or largest <= problems.FEWEST_STRATEGIES
    assert least <= problem.solve().seconds <= 2 * least


def test_what_is_asked_for_is_among_few_choices(tmp_path: Path) -> None:
    """Also where it is what comes last."""
    _, ctx = context(fan(tmp_path, 5), "dp=2,tp=2", Topology.default())
    ops = ctx.sharding.factors.ops
    kinds = partial_kinds(ops)
    for op in ops:
        for requested in strategies_of(op, ctx.sharding, kinds):
            for leaves in itertools.product([False, True], repeat=len(op.leaves)):
                decided = [a if d else None for a, d in zip(requested.axes, leaves, strict=True)]
                ctx.sharding.ops[op.node.name] = list(decided)
                few = strategies_of(op, ctx.sharding, kinds, most=1)
                assert len(few) <= 1
                if all(leaves) and not requested.passed:
                    assert [c.axes for c in few] == [requested.axes]
        ctx.sharding.ops[op.node.name] = [None] * len(op.leaves)
