"""Starts of the search are the best that one axis alone can make of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from search.small_graphs import graphs, save, topologies
from search.test_problem import context

from onnxpar.base.arrays import Array
from onnxpar.cost.topology import Topology
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.search.problem import Problem
from onnxpar.search.solver.elimination import Table, diagonal, minimize
from onnxpar.search.solver.pruning import NEAR, among
from onnxpar.search.starts import AlongAxes, Values


def problem_of(model: onnx.ModelProto, mesh: str, topology: Topology) -> Problem:
    with tempfile.TemporaryDirectory() as folder:
        graph, ctx = context(save(model, Path(folder) / "m.onnx"), mesh, topology)
        return Problem(graph, ctx.sharding)


def strategies_in(problem: Problem) -> dict[int, list[OpStrategy]]:
    return {v: problem.strategies[name] for name, v in problem.variable.items()}


def tables_of(problem: Problem) -> list[Table]:
    return [diagonal(table) for table in problem.sums[0]]


def least(problem: Problem, kept: Mapping[int, Array]) -> float:
    """The least sum among these values of some variables."""
    every = {v: kept.get(v, np.arange(size)) for v, size in enumerate(problem.sizes)}
    tables = among(tables_of(problem), every)
    return minimize([len(every[v]) for v in range(len(problem.sizes))], tables)[0]


def only(values: Values) -> dict[int, Array]:
    return {v: np.array([value]) for v, value in values.items()}


@pytest.mark.slow
@given(graphs(), topologies())
def test_no_axis_alone_makes_it_faster(model: onnx.ModelProto, topology: Topology) -> None:
    problem = problem_of(model, "dp=2,tp=3", topology)
    strategies = strategies_in(problem)
    found = AlongAxes(strategies, ["dp", "tp"])(problem.sizes, tables_of(problem))
    seconds = least(problem, only(found))
    for axis in ("dp", "tp"):
        same = {
            v: np.array([i for i, s in enumerate(each) if s.beside(axis) == here])
            for v, each in strategies.items()
            for here in [each[found[v]].beside(axis)]
        }
        assert seconds <= least(problem, same) / (1 - NEAR)
    assert seconds >= problem.solve().seconds * (1 - 1e-12)


def test_both_axes_are_used() -> None:
    """Rows and columns: either alone leaves a product that takes longer."""
    text = "m (float[64,64] x, float[64,64] w) => (float[64,64] y) { y = MatMul(x, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    host = {"name": "host", "latency": 1e-9, "bandwidth": 1e12}
    device = {"flops": 1e6, "memory_bandwidth": 1e12, "launch": 1e-9}
    problem = problem_of(model, "dp=2,tp=2", Topology.of({"levels": [host], "device": device}))
    strategies = strategies_in(problem)
    found = AlongAxes(strategies, ["dp", "tp"])(problem.sizes, tables_of(problem))
    assert least(problem, only(found)) == pytest.approx(problem.solve().seconds)
    (product,) = (strategies[v][value] for v, value in found.items())
    assert {axis.name for over in product.axes for axis in over} == {"dp", "tp"}
    whole = AlongAxes(strategies, ["dp"])(problem.sizes, tables_of(problem))
    (product,) = (strategies[v][value] for v, value in whole.items())
    assert not any(product.axes)
