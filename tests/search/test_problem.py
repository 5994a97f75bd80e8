"""The search finds what trying every strategy finds, and the compiler makes what it predicts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import helper
from search.small_graphs import graphs, save, topologies
from tiny_models import model, port, write

from onnxpar.compiler.pass_ import PassContext
from onnxpar.cost.topology import Topology
from onnxpar.graph.collectives import LOCAL_STEPS
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.tensors import element_bytes
from onnxpar.layout.mesh import Mesh
from onnxpar.passes.decide.propagate_layouts import PropagateLayouts
from onnxpar.passes.lower.insert_collectives import InsertCollectives
from onnxpar.planner.context import load_model, make_context
from onnxpar.planner.options import Options
from onnxpar.planner.run_passes import run_passes
from onnxpar.search.objective import LATENCY, OBJECTIVES, Objective
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import Kept, OpStrategy
from onnxpar.search.predict import predict
from onnxpar.search.problem import Problem
from onnxpar.search.reshard_costs import faster
from onnxpar.search.solver.column_generation import NEAR
from onnxpar.search.solver.elimination import LIMIT
from onnxpar.search.solver.limits import Limit, TooMuch
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.reshard_planner import ReshardedTensor, cost, plan_steps
from onnxpar.sharding.shard_bytes import largest_shard_bytes
from onnxpar.sharding.state import FactorSharding, ShardingState
from onnxpar.strategy.strategy import NodeAnnotation

MOST = 4_000
"""Strategies of a graph of which every one is tried."""


Chosen = Mapping[str, OpStrategy]
Fed = dict[str, FactorSharding]


class BruteForce:
    """What a strategy costs, from the cost of single reshards alone, without any table."""

    def __init__(self, graph: gs.Graph, sharding: ShardingState) -> None:
        self.sharding = sharding
        self.ops = sharding.factors.ops
        self.outputs = {t.name for t in graph.outputs}
        self.fed = [t.name for t in graph.inputs]
        self.weights = {t.name for t in constants(graph)}
        self.tensors = {t.name: t for op in self.ops for t, _ in op.operands()}
        self.known: dict[tuple[object, ...], tuple[float, float]] = {}

    def strategies(
        self, choices: Mapping[str, Sequence[OpStrategy]]
    ) -> Iterator[tuple[Chosen, Fed]]:
        """Every way to split the nodes, with every way to feed what some node could read so."""
        fed = list(self.ways_to_feed(choices))
        for combination in product(*choices.values()):
            for one in fed:
                yield dict(zip(choices, combination, strict=True)), one

    def ways_to_feed(self, choices: Mapping[str, Sequence[OpStrategy]]) -> Iterator[Fed]:
        fed = []
        for name in self.fed:
            reads = [
                (op, i) for op in self.ops for i, t in enumerate(op.node.inputs) if t.name == name
            ]
            required = [c.operand(op, i) for op, i in reads for c in choices[op.node.name]]
            fed.append({self.whole(name), *(need for need in required if not need.partial)})
        for factor_shardings in product(*fed):
            yield dict(zip(self.fed, factor_shardings, strict=True))

    def whole(self, name: str) -> FactorSharding:
        return FactorSharding(tuple(() for _ in self.sharding.factors.tensors[name].leaves))

    def seconds(self, chosen: Chosen, fed: Fed) -> tuple[float, float]:
        """Seconds of computing and of talking."""
        produced, required = self.factor_shardings(chosen, fed)
        spent = [self.op_cost(op, chosen[op.node.name]) for op in self.ops]
        for name, goals in required.items():
            if name in self.weights:
                continue
            start = produced[name]
            if name in self.outputs:
                spent.append(self.path(name, start, start.reduced()))
                start = start.reduced()
            spent.append(self.tree(name, start, goals))
        compute, talk = zip(*spent, strict=True)
        return sum(compute), sum(talk)

    def factor_shardings(
        self, chosen: Chosen, fed: Fed
    ) -> tuple[dict[str, FactorSharding], dict[str, list[FactorSharding]]]:
        """How tensors are made, and how each reader needs them."""
        produced = dict(fed)
        required: dict[str, list[FactorSharding]] = {name: [] for name in self.tensors}
        for op in self.ops:
            choice = chosen[op.node.name]
            for i, t in enumerate(op.node.inputs):
                required[t.name].append(choice.operand(op, i))
            for i, t in enumerate(op.node.outputs):
                produced[t.name] = choice.result(op, i)
        return produced, required

    def holds(self, chosen: Chosen, fed: Fed) -> list[float]:
        """Bytes that a rank holds at each step."""
        produced, required = self.factor_shardings(chosen, fed)
        at = {op.node.name: step for step, op in enumerate(self.ops)}
        held = [0.0] * len(self.ops)
        for name in self.tensors:
            steps = [at[op.node.name] for op in self.ops for t in op.node.inputs if t.name == name]
            if name in self.weights:
                self.hold(held, 0, len(held) - 1, self.stored(name, required))
                continue
            maker = next(
                (at[o.node.name] for o in self.ops for t in o.node.outputs if t.name == name), 0
            )
            stays = name in self.outputs or name in fed
            requested = produced[name].reduced() if name in self.outputs else produced[name]
            self.hold(
                held, maker, len(held) - 1 if stays else max(steps), self.size(name, requested)
            )
            if requested != produced[name]:
                self.hold(held, maker, maker, self.size(name, produced[name]))
            reads = [*zip(steps, required[name], strict=True)]
            for i, (step, need) in enumerate(reads):
                if need != requested and (i == 0 or reads[i - 1] != (step, need)):
                    self.hold(held, step, step, self.size(name, need))
            for (step, need), (then, other) in pairwise(reads):
                if need == other != requested:
                    self.hold(held, step + 1, then - 1, self.size(name, need))
        return held

    def stored(self, name: str, required: Mapping[str, Sequence[FactorSharding]]) -> float:
        """Bytes of a weight that a rank stores."""
        return sum(self.size(name, need) for need in set(required[name]))

    def weight_bytes(self, chosen: Chosen, fed: Fed) -> float:
        """Bytes of all weights that a rank stores."""
        required = self.factor_shardings(chosen, fed)[1]
        return sum(self.stored(name, required) for name in self.tensors if name in self.weights)

    @staticmethod
    def hold(held: list[float], first: int, last: int, size: float) -> None:
        for step in range(first, last + 1):
            held[step] += size

    def op_cost(self, op: OpFactors, choice: OpStrategy) -> tuple[float, float]:
        key = (op.node.name, choice)
        if key not in self.known:
            self.known[key] = op_cost(op, choice, self.sharding)
        return self.known[key]

    def tree(
        self, name: str, start: FactorSharding, goals: Sequence[FactorSharding]
    ) -> tuple[float, float]:
        best = (math.inf, 0.0)
        for order in permutations(dict.fromkeys(g for g in goals if g != start)):
            have, local, talk = [start], 0.0, 0.0
            for goal in order:
                sources = [s for s in have if s is start or not s.partial or goal.partial]
                step = min((self.path(name, s, goal) for s in sources), key=sum)
                local, talk = local + step[0], talk + step[1]
                have.append(goal)
            best = min(best, (local, talk), key=sum)
        return best

    def path(self, name: str, start: FactorSharding, goal: FactorSharding) -> tuple[float, float]:
        key = (name, start, goal)
        if key not in self.known:
            factors = self.sharding.factors.tensors[name]
            about = ReshardedTensor(factors, self.sharding.costs, element_bytes(self.tensors[name]))
            steps = plan_steps(start, goal, about)
            local, talk = (
                cost(
                    [s for s in steps if (s.kind in LOCAL_STEPS) == is_local],
                    lambda at: self.size(name, at),
                    self.sharding.costs,
                )
                for is_local in (True, False)
            )
            self.known[key] = local, talk
        return self.known[key]

    def size(self, name: str, factor_sharding: FactorSharding) -> float:
        tensor = self.tensors[name]
        return largest_shard_bytes(tensor, self.sharding.layout(tensor, factor_sharding))


def context(path: Path, mesh: str, topology: Topology) -> tuple[gs.Graph, PassContext]:
    options = Options(mesh=Mesh.parse(mesh), preset="tensor-parallel", topology=topology)
    model = load_model(path, options)
    return model.graph, make_context(model, options)


def compiled(path: Path, mesh: str, topology: Topology, chosen: Chosen) -> float:
    """What the compiler's own graph takes."""
    graph, ctx = context(path, mesh, topology)
    ops = ctx.sharding.factors.ops
    ctx.annotations = [
        [NodeAnnotation(op, dict(enumerate(chosen[op.node.name].axes)), {}) for op in ops]
    ]
    run_passes(ctx.model, ctx, [PropagateLayouts(), InsertCollectives()], check=True)
    return predict(graph, ctx.sharding).total


SETTINGS = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.slow
@SETTINGS
@given(graphs(), st.sampled_from(["tp=2", "tp=3", "dp=2,tp=2"]), topologies())
def test_no_strategy_is_faster(model: onnx.ModelProto, mesh: str, topology: Topology) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(model, Path(folder) / "m.onnx")
        graph, ctx = context(path, mesh, topology)
        problem = Problem(graph, ctx.sharding)
        judge = BruteForce(graph, ctx.sharding)
        assume(math.prod(map(len, problem.strategies.values())) <= MOST)
        found = problem.solve()
        seconds, chosen = found.seconds, found.chosen
        everything = list(judge.strategies(problem.strategies))
        least = min(sum(judge.seconds(*strategy)) for strategy in everything)
        assert seconds == pytest.approx(least, rel=1e-9)
        own = [strategy for strategy in everything if strategy[0] == chosen]
        assert min(sum(judge.seconds(*s)) for s in own) == pytest.approx(least, rel=1e-9)
        assert compiled(path, mesh, topology, chosen) <= least * (1 + 1e-9)


@pytest.mark.slow
@SETTINGS
@given(
    graphs(),
    st.sampled_from(["tp=2", "tp=3", "dp=2,tp=2"]),
    topologies(),
    st.sampled_from(OBJECTIVES),
    st.floats(0, 1),
)
def test_no_strategy_that_fits_is_better(
    model: onnx.ModelProto, mesh: str, topology: Topology, objective: str, share: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(model, Path(folder) / "m.onnx")
        graph, ctx = context(path, mesh, topology)
    judge = BruteForce(graph, ctx.sharding)
    choices = Problem(graph, ctx.sharding).strategies
    assume(math.prod(map(len, choices.values())) <= MOST // 2)
    everything = list(judge.strategies(choices))
    measured = [(judge.seconds(*s), max(judge.holds(*s))) for s in everything]
    peaks = sorted({peak for _, peak in measured})
    limit = peaks[int(share * (len(peaks) - 1))] if share else peaks[0] - 1
    value = sum if objective == LATENCY else max
    fitting = [value(seconds) for seconds, peak in measured if peak <= limit]
    for exhaustively in (False, True):
        problem = Problem(graph, ctx.sharding, objective=Objective(objective, limit))
        assume(not exhaustively or math.prod(problem.sizes) <= LIMIT)
        if not fitting:
            with pytest.raises(TooMuch):
                problem.solve(exhaustively)
            continue
        found = problem.solve(exhaustively)
        seconds, chosen = found.seconds, found.chosen
        assert found.bound <= min(fitting) * (1 + 1e-9)
        assert min(fitting) * (1 - 1e-9) <= seconds <= min(fitting) * (1 + NEAR)
        own = [m for (c, _), m in zip(everything, measured, strict=True) if c == chosen]
        best = min(value(s) for s, peak in own if peak <= limit)
        assert best == pytest.approx(seconds, rel=1e-9)


@pytest.mark.slow
@SETTINGS
@given(
    graphs(4),
    st.sampled_from(["tp=2", "tp=3", "dp=2,tp=2"]),
    topologies(),
    st.sampled_from([0.05, 1.0, 100.0]),
)
def test_holding_weights_costs(
    model: onnx.ModelProto, mesh: str, topology: Topology, holding: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(model, Path(folder) / "m.onnx")
        graph, ctx = context(path, mesh, topology)
    judge = BruteForce(graph, ctx.sharding)
    problem = Problem(graph, ctx.sharding, objective=Objective(holding=holding))
    assume(math.prod(map(len, problem.strategies.values())) <= MOST // 2)
    price = holding / topology.device.memory_bandwidth
    least = min(
        sum(judge.seconds(*strategy)) + price * judge.weight_bytes(*strategy)
        for strategy in judge.strategies(problem.strategies)
    )
    assert problem.solve().seconds == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("shards", [1, 2])
def test_holding_states_costs(shards: int, tmp_path: Path) -> None:
    """Where holding costs more than all else, ranks hold shards; a state with a requested layout
    costs what that holds."""
    one = np.ones((1, 4), np.float32)
    nodes = [helper.make_node("Add", ["s", "one"], ["after"], "add")]
    path = write(model(nodes, [port("s", [6, 4])], [port("after", [6, 4])], {"one": one}), tmp_path)
    topology = Topology.default()
    graph, ctx = context(path, "tp=2", topology)
    if shards == 1:
        ctx.sharding.pinned.add("s")
        ctx.sharding.tensors["s"] = [(), ()]

    def seconds(holding: float) -> float:
        states, objective = [("s", "after")], Objective(holding=holding)
        return Problem(graph, ctx.sharding, states=states, objective=objective).solve().seconds

    held = (seconds(2e9) - seconds(1e9)) * topology.device.memory_bandwidth / 1e9
    assert held == pytest.approx(6 * 4 * 4 / shards + one.nbytes / 2, rel=1e-6)


def check_held(graph: gs.Graph, sharding: ShardingState, decide: Callable[[int], int]) -> None:
    """What a strategy holds at each step, of which `decide` says a number below that of choices."""
    problem = Problem(graph, sharding, objective=Objective(memory=1.0))
    judge = BruteForce(graph, sharding)
    drawn = {v: decide(problem.sizes[v]) for v in problem.variable.values()}
    chosen = {n: problem.strategies[n][drawn[v]] for n, v in problem.variable.items()}
    limit = Limit(1.0, problem.timeline.steps, problem.timeline.demands)
    every = product(*([drawn[v]] if v in drawn else range(n) for v, n in enumerate(problem.sizes)))
    tables = problem.sums[0]
    legal = (values for values in every if all(math.isfinite(t.at(values)) for t in tables))
    fed = judge.ways_to_feed(problem.strategies)
    assert {tuple(limit.held(v)) for v in legal} == {tuple(judge.holds(chosen, f)) for f in fed}


@pytest.mark.slow
@SETTINGS
@given(graphs(), st.sampled_from(["tp=2", "tp=3", "dp=2,tp=2"]), st.data())
def test_what_any_strategy_holds(model: onnx.ModelProto, mesh: str, data: st.DataObject) -> None:
    """Also of those that are never the best: copies that stay from one reader to a later one."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(model, Path(folder) / "m.onnx")
        graph, ctx = context(path, mesh, Topology.default())
    check_held(graph, ctx.sharding, lambda size: data.draw(st.integers(0, size - 1)))


def test_a_weight_that_several_read_is_stored_once_for_each_way(tmp_path: Path) -> None:
    ends = [port(name, [6, 4]) for name in "xabc"]
    nodes = [helper.make_node("MatMul", [x, "w"], [y], y) for x, y in pairwise("xabc")]
    path = write(model(nodes, ends[:1], ends[1:], {"w": np.ones((4, 4), np.float32)}), tmp_path)
    graph, ctx = context(path, "tp=2", Topology.default())
    for number in range(64):
        digits = (number // 4**i % 4 for i in range(3))
        check_held(graph, ctx.sharding, lambda size, digits=digits: next(digits) % size)


def test_a_sum_that_many_readers_scatter(tmp_path: Path) -> None:
    """What is kept of dp leaves no placement of it whole."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "mm")]
    nodes += [helper.make_node("Relu", ["h"], [f"y{i}"], f"y{i}") for i in range(6)]
    ends = [port(f"y{i}", [4, 4]) for i in range(6)]
    weights = {"w": np.ones((4, 4), np.float32)}
    path = write(model(nodes, [port("x", [4, 4])], ends, weights), tmp_path)
    graph, ctx = context(path, "dp=2,tp=2", Topology.default())
    dp = (ctx.sharding.mesh.axis("dp"),)
    kept = {
        op.node.name: OpStrategy(tuple(dp if leaf.factor == wanted else () for leaf in op.leaves))
        for op in ctx.sharding.factors.ops
        for wanted in [op.leaves[0].factor if op.node.op == "Relu" else next(iter(op.rule.reduce))]
    }
    problem = Problem(graph, ctx.sharding, kept=Kept(frozenset({"dp"}), kept))
    found = problem.solve()
    seconds, chosen = found.seconds, found.chosen
    assert compiled(path, "dp=2,tp=2", Topology.default(), chosen) == pytest.approx(seconds)


def test_rows_of_seconds_belong_together() -> None:
    """Of two ways the one that is faster in all counts, not what each is faster in."""
    one, other = np.array([[1.0, 5.0], [4.0, 0.0]]), np.array([[3.0, 3.0], [1.0, 6.0]])
    assert faster(one, other).tolist() == [[3.0, 5.0], [1.0, 0.0]]
