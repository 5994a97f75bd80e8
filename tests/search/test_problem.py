"""The search finds what trying every strategy finds, and the compiler makes what it predicts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from search.small_graphs import graphs, save, topologies

from onnxpar.factors import OpFactors
from onnxpar.mesh import Mesh
from onnxpar.passes.insert_collectives import InsertCollectives
from onnxpar.passes.pass_ import PassContext
from onnxpar.passes.propagate_layouts import PropagateLayouts
from onnxpar.pipeline import Options, load_model, make_context, run_passes
from onnxpar.plan import element_bytes, part_bytes
from onnxpar.reshard import Tensor, cost, plan_steps
from onnxpar.search.choices import Choice
from onnxpar.search.predict import predict
from onnxpar.search.problem import Problem
from onnxpar.search.work import work_seconds
from onnxpar.sharding import Placement, Sharding
from onnxpar.strategy import NodeSeed
from onnxpar.subgraphs import constants
from onnxpar.topology import Topology

MOST = 20_000


class BruteForce:
    """Seconds of a strategy, from the cost of single reshards alone, without any table."""

    def __init__(self, graph: gs.Graph, sharding: Sharding) -> None:
        self.sharding = sharding
        self.outputs = {t.name for t in graph.outputs}
        self.fed = {t.name for t in graph.inputs}
        self.weights = {t.name for t in constants(graph)}
        self.known: dict[tuple[object, ...], float] = {}

    def seconds(self, chosen: Mapping[str, Choice]) -> float:
        total = 0.0
        made: dict[str, Placement] = {}
        needs: dict[str, list[Placement]] = {}
        tensors: dict[str, gs.Tensor] = {}
        for op in self.sharding.factors.ops:
            choice = chosen[op.node.name]
            total += self.work(op, choice)
            for i, t in enumerate(op.node.inputs):
                needs.setdefault(t.name, []).append(choice.operand(op, i))
                tensors[t.name] = t
            for i, t in enumerate(op.node.outputs):
                made[t.name] = choice.result(op, i)
                tensors[t.name] = t
        for name, tensor in tensors.items():
            if name in self.weights:
                continue
            goals = needs.get(name, [])
            if name in self.fed:
                plain = [g for g in goals if not g.partial] + [
                    Placement(((),) * len(goals[0].leaves))
                ]
                total += min(self.tree(tensor, start, goals) for start in plain)
                continue
            start = made[name]
            if name in self.outputs:
                total += self.path(tensor, start, start.reduced())
                start = start.reduced()
            total += self.tree(tensor, start, goals)
        return total

    def work(self, op: OpFactors, choice: Choice) -> float:
        key = (op.node.name, choice)
        if key not in self.known:
            self.known[key] = work_seconds(op, choice, self.sharding)
        return self.known[key]

    def tree(self, tensor: gs.Tensor, start: Placement, goals: Sequence[Placement]) -> float:
        best = math.inf
        for order in permutations(dict.fromkeys(g for g in goals if g != start)):
            have, total = [start], 0.0
            for goal in order:
                sources = [s for s in have if s is start or not s.partial or goal.partial]
                total += min(self.path(tensor, s, goal) for s in sources)
                have.append(goal)
            best = min(best, total)
        return best

    def path(self, tensor: gs.Tensor, start: Placement, goal: Placement) -> float:
        key = (tensor.name, start, goal)
        if key not in self.known:
            sharding = self.sharding

            def size(placement: Placement) -> float:
                return part_bytes(tensor, sharding.layout(tensor, placement), sharding.mesh)

            factors = sharding.factors.tensors[tensor.name]
            about = Tensor(factors, sharding.costs, element_bytes(tensor))
            steps = plan_steps(start, goal, about)
            self.known[key] = cost(steps, size, sharding.costs)
        return self.known[key]


def context(path: Path, mesh: str, topology: Topology) -> tuple[gs.Graph, PassContext]:
    options = Options(mesh=Mesh.parse(mesh), preset="tensor-parallel", topology=topology)
    model = load_model(path, options)
    return model.graph, make_context(model, options)


def assignments(problem: Problem) -> Iterator[dict[str, Choice]]:
    names = list(problem.choices)
    for combination in product(*problem.choices.values()):
        yield dict(zip(names, combination, strict=True))


def compiled(path: Path, mesh: str, topology: Topology, chosen: Mapping[str, Choice]) -> float:
    """What the compiler's own graph takes."""
    graph, ctx = context(path, mesh, topology)
    ops = ctx.sharding.factors.ops
    ctx.seeds = [[NodeSeed(op, dict(enumerate(chosen[op.node.name].axes)), {}) for op in ops]]
    run_passes(ctx.model, ctx, [PropagateLayouts(), InsertCollectives()], check=True)
    return predict(graph, ctx.sharding).total


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(graphs(), st.sampled_from(["tp=2", "tp=3", "dp=2,tp=2"]), topologies())
def test_no_strategy_is_faster(model: onnx.ModelProto, mesh: str, topology: Topology) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(model, Path(folder) / "m.onnx")
        graph, ctx = context(path, mesh, topology)
        problem = Problem(graph, ctx.sharding)
        assume(math.prod(map(len, problem.choices.values())) <= MOST)
        seconds, chosen, _ = problem.solve()
        judge = BruteForce(graph, ctx.sharding)
        least = min(map(judge.seconds, assignments(problem)))
        assert seconds == pytest.approx(least, rel=1e-9)
        assert judge.seconds(chosen) == pytest.approx(least, rel=1e-9)
        assert compiled(path, mesh, topology, chosen) <= least * (1 + 1e-9)
