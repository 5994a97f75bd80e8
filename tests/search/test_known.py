"""What searches share is what each would have computed alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from committed import MODELS
from training.steps import write_step

from onnxpar.base.errors import StrategyError
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.load.load import Model
from onnxpar.planner.context import load_model
from onnxpar.planner.options import Options
from onnxpar.search.known import Known, OnMesh
from onnxpar.search.known_compute import KnownCompute
from onnxpar.search.objective import Objective
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import partial_kinds, strategies_of
from onnxpar.search.ports import Port, PortShardings
from onnxpar.search.problem import Problem
from onnxpar.search.repeats import signs
from onnxpar.search.solver.limits import TooMuch, Undecided
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.state import FactorSharding, ShardingState

TWO = Topology.of(
    {
        "levels": [
            {"name": "host", "size": 2, "latency": "5 us", "bandwidth": "8 GB/s"},
            {"name": "rack", "latency": "50 us", "bandwidth": "1 GB/s"},
        ]
    }
)
MESHES = ("tp=8", "dp=2,tp=4", "dp=4,tp=2", "dp=2,tp=2")
PERCEPTRON = """perceptron (float[64,99] x, float[99,99] v, float[99,99] w) => (float[64,99] y)
{ p = MatMul(x, v)  q = Tanh(p)  y = MatMul(q, w) }"""
SLOW = Topology.of(
    {
        "levels": [
            {"name": "host", "size": 1, "latency": "5 us", "bandwidth": "8 GB/s"},
            {"name": "network", "latency": "20 us", "bandwidth": "100 MB/s"},
        ],
        "device": {"flops": "1 GFLOP/s", "memory_bandwidth": "8 GB/s", "launch": "1 us"},
    }
)
MODEL, SMALL = (MODELS / f"{name}.legacy.static.onnx" for name in ("bert", "gpt2"))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", ["bert.legacy.static", "resnet.legacy.static", "moe.legacy.training"]
)
@pytest.mark.parametrize("topology", [Topology.default(), TWO], ids=["one host", "hosts"])
def test_costs_of_nodes_on_other_meshes(name: str, topology: Topology) -> None:
    graph = load_model(MODELS / f"{name}.onnx", Options(devices=8)).graph
    factors, known, numbers = analyse(graph), {}, {}
    kinds, checked = partial_kinds(factors.ops), 0
    for mesh in MESHES[:3]:
        sharding = ShardingState.open(Mesh.parse(mesh), factors, topology)
        for op, sign in zip(factors.ops, signs(sharding, kinds, numbers), strict=True):
            shared = KnownCompute(op, sharding, sign, known)
            for strategy in strategies_of(op, sharding, kinds)[::3]:
                assert shared.cost(strategy) == op_cost(op, strategy, sharding)
                checked += 1
    assert 0 < len(known) < checked / 2


def test_shardings_at_ports() -> None:
    graph = load_model(MODEL, Options(devices=8)).graph
    factors = analyse(graph)
    sharding = ShardingState.open(Mesh.parse("dp=2,tp=4"), factors)
    kinds = partial_kinds(factors.ops)
    for op in factors.ops:
        strategies = strategies_of(op, sharding, kinds)
        found = PortShardings(strategies, op)
        for i in range(len(op.node.inputs)):
            port = Port(op, i)
            assert found.at(port, reads=True) == tuple(map(port.required, strategies))
        for i in range(len(op.node.outputs)):
            port = Port(op, i)
            assert found.at(port, reads=False) == tuple(map(port.produced, strategies))


def outcome(model: Model, state: ShardingState, goal: Objective) -> tuple[float, ...]:
    """Seconds and bound of the best strategy; or the bytes that every strategy needs."""
    try:
        found = Problem(model.graph, state, model.states, objective=goal).solve()
    except (TooMuch, Undecided) as error:
        return (error.least, error.found)
    return (found.seconds, found.bound)


@pytest.mark.slow
def test_a_search_after_others() -> None:
    """On other meshes and machines, without a limit, within one that nothing keeps, and within one
    in which ranks must communicate."""
    shared = Known()
    default = Topology.default()
    for mesh, topology in (("dp=2,tp=4", default), ("tp=8", default), ("dp=2,tp=4", TWO)):
        for memory in (None, 60_000.0, 120_000.0):
            model = load_model(SMALL, Options(devices=8))  # read again, as for each plan
            state = ShardingState.open(Mesh.parse(mesh), analyse(model.graph), topology)
            alone, after = (
                outcome(model, state, Objective(memory=memory, known=known))
                for known in (Known(), shared)
            )
            assert after == pytest.approx(alone, rel=1e-12)


def test_a_search_that_hides_sums_after_one_that_does_not(tmp_path: Path) -> None:
    """Sums of gradients between hosts then cost less, so nothing of them is shared."""
    model = load_model(write_step(PERCEPTRON, tmp_path, loss="mse"), Options(devices=2))
    state = ShardingState.open(Mesh.parse("dp=2"), analyse(model.graph, model.states), SLOW)
    shared, found = Known(), []
    for hides in (False, True):
        for known in (Known(), shared):
            goal = Objective(hides_sums=hides, known=known)
            problem = Problem(model.graph, state, model.states, objective=goal, step=model.step)
            found.append(problem.solve().seconds)
    assert found[0] == found[1] > found[2] == found[3]


@pytest.mark.slow
def test_a_mesh_is_given_up_by_the_costs_of_nodes() -> None:
    model = load_model(MODEL, Options(devices=8))
    state = ShardingState.open(Mesh.parse("dp=2,tp=4"), analyse(model.graph))
    best = Problem(model.graph, state, model.states).solve()
    floor = Problem(model.graph, state, model.states, below=best.seconds).floor
    assert 0 < floor <= best.seconds
    given_up = Problem(model.graph, state, model.states, below=floor * 0.998)
    assert not any(given_up.sums)
    found = given_up.solve()
    assert found.seconds > best.seconds and found.bound == floor
    tried = Problem(model.graph, state, model.states, below=floor)
    assert any(tried.sums) and tried.solve().bound >= floor * (1 - 1e-12)


@pytest.mark.slow
def test_meshes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known, model = Known(), load_model(MODEL, Options(devices=8))
    factors = analyse(model.graph)
    states = [ShardingState.open(Mesh.parse(mesh), factors) for mesh in MESHES[1:3]]
    monkeypatch.setattr("onnxpar.search.known.MOST_ENTRIES", 1)
    for state in states:
        Problem(model.graph, state, model.states, objective=Objective(known=known))
    first, last = (known.on(state.costs) for state in reversed(states))
    assert first.entries > 1 and last.entries == 0
    assert isinstance(last, OnMesh)


def test_shardings_in_another_process() -> None:
    """Their hashes are those of names, which differ from process to process."""
    one = FactorSharding(((Axis("dp", 2),), ()), (Axis("tp", 2),))
    other = pickle.loads(pickle.dumps(one))
    assert other == one and hash(other) == hash(one)
    assert b"_hash" not in pickle.dumps(one)


def test_strategies_that_do_not_agree_are_refused() -> None:
    model = load_model(MODEL, Options(devices=8))
    state = ShardingState.open(Mesh.parse("tp=8"), analyse(model.graph))
    known = Known()
    Problem(model.graph, state, model.states, objective=Objective(known=known))
    axis = state.mesh.axis("tp")
    op = next(op for op in state.factors.ops if any(leaf.size % 8 for leaf in op.leaves))
    leaf = next(i for i, leaf in enumerate(op.leaves) if leaf.size % 8)
    state.ops[op.node.name][leaf] = (axis,)
    with pytest.raises(StrategyError, match="cannot be split"):
        Problem(model.graph, state, model.states, objective=Objective(known=known))
