"""Random programs of nested If, Loop and Scan, split at random, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit
from onnx import TensorProto, helper, numpy_helper

from onnxpar.planner import sharder

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SHAPE = (6, 8)
"""Of every tensor that a step reads and makes, at any depth."""
DEEPEST = 3
PRESETS = ("data-parallel 2", "data-parallel 3", "tensor-parallel 2", "hybrid dp=2,tp=2")


class Program:
    """Draws the nodes of a graph and of the bodies in it; `products` are those that strategies
    name."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.products: list[str] = []
        self.names = 0

    def pick(self, *options: Any) -> Any:
        return options[int(self.random.integers(len(options)))]

    def fresh(self) -> str:
        self.names += 1
        return f"t{self.names}"

    def values(self, *shape: int) -> Any:
        return self.random.standard_normal(shape).astype(np.float32) / 3

    def feeds(self, predicate: bool) -> dict[str, Any]:
        counts = {"n": np.array(int(self.random.integers(0, 4))), "two": np.array(2)}
        given = {"p": np.array(predicate), "yes": np.array(True)}
        return {"x": self.values(*SHAPE), "y": self.values(*SHAPE), **given, **counts}


class Scope:
    """A graph while it is drawn; `have` are tensors that its nodes may read."""

    def __init__(self, program: Program, have: list[str], depth: int) -> None:
        self.program = program
        self.have = list(have)
        self.depth = depth
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []

    def read(self) -> str:
        return str(self.program.pick(*self.have))

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        result = self.program.fresh()
        self.nodes.append(helper.make_node(op, inputs, [result], f"{op}_{result}", **attrs))
        return result

    def constant(self, value: Any) -> str:
        name = self.program.fresh()
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def draw(self, count: int) -> None:
        steps = [self.product, self.product, self.pointwise, self.sum, self.softmax, self.centre]
        steps += [self.choice, self.loop, self.scan] * (2 if self.depth < DEEPEST else 0)
        for _ in range(count):
            self.have.append(self.program.pick(*steps)())

    def inner(self, *given: str) -> Scope:
        scope = Scope(self.program, [*self.have, *given], self.depth + 1)
        scope.draw(int(self.program.random.integers(1, 4)))
        return scope

    def graph(self, given: dict[str, Any], results: dict[str, Any]) -> onnx.GraphProto:
        ports = [
            [helper.make_tensor_value_info(name, *type_) for name, type_ in some.items()]
            for some in (given, results)
        ]
        return helper.make_graph(self.nodes, "body", ports[0], ports[1], self.weights)

    def product(self) -> str:
        rows, columns = SHAPE
        if self.program.pick(True, False):
            result = self.add(
                "MatMul", self.read(), self.constant(self.program.values(columns, columns))
            )
        else:
            result = self.add("MatMul", self.constant(self.program.values(rows, rows)), self.read())
        self.program.products.append(self.nodes[-1].name)
        return result

    def pointwise(self) -> str:
        return self.add(self.program.pick("Tanh", "Sigmoid", "Neg"), self.read())

    def sum(self) -> str:
        return self.add(self.program.pick("Add", "Sub", "Mul"), self.read(), self.read())

    def softmax(self) -> str:
        return self.add("Softmax", self.read(), axis=self.program.pick(0, 1))

    def centre(self) -> str:
        x = self.read()
        return self.add(
            "Sub", x, self.add("ReduceMean", x, self.constant([self.program.pick(0, 1)]))
        )

    def condition(self) -> str:
        if self.program.pick(True, False):
            return "p"
        size = self.add(self.program.pick("ReduceMax", "ReduceSum"), self.read(), keepdims=0)
        return self.add("Greater", size, self.constant(self.program.values()))

    def choice(self) -> str:
        branches = {}
        for key in ("then_branch", "else_branch"):
            branch = self.inner()
            last = branch.add("Identity", branch.have[self.program.pick(0, -1)])
            branches[key] = branch.graph({}, {last: (FLOAT, SHAPE)})
        return self.add("If", self.condition(), **branches)

    def loop(self) -> str:
        turn, go, carried = (self.program.fresh() for _ in range(3))
        body = self.inner(carried)
        goes_on = self.program.pick(go, body.condition())
        results = [
            body.add("Identity", goes_on),
            body.add("Tanh", body.have[-1]),
            body.add("Identity", body.read()),
        ]
        types: list[Any] = [(BOOL, []), (FLOAT, SHAPE), (FLOAT, SHAPE)]
        given = {turn: (INT, []), go: (BOOL, []), carried: (FLOAT, SHAPE)}
        graph = body.graph(given, dict(zip(results, types, strict=True)))
        count = self.program.pick("n", "two")
        last, rows = self.program.fresh(), self.program.fresh()
        operands = [count, self.program.pick("", "yes"), self.read()]
        self.nodes.append(helper.make_node("Loop", operands, [last, rows], last, body=graph))
        return self.add("Add", last, self.add("ReduceSum", rows, self.constant([0]), keepdims=0))

    def scan(self) -> str:
        axis = self.program.pick(0, 1)
        state, part = self.program.fresh(), self.program.fresh()
        body = Scope(self.program, self.have, self.depth + 1)
        whole = body.add("Unsqueeze", part, body.constant([axis]))
        body.have += [state, body.add("Add", state, whole)]
        body.draw(2)
        last = body.add("Tanh", body.have[-1])
        part_type = (FLOAT, [SHAPE[1 - axis]])
        made = body.add("ReduceMean", body.have[-1], body.constant([axis]), keepdims=0)
        given = {state: (FLOAT, SHAPE), part: part_type}
        graph = body.graph(given, {last: (FLOAT, SHAPE), made: part_type})
        results = [self.program.fresh(), self.program.fresh()]
        attrs: dict[str, Any] = {"num_scan_inputs": 1, "scan_output_axes": [axis]}
        attrs["scan_input_axes"] = [axis - self.program.pick(0, 2)]
        attrs["scan_input_directions"] = [self.program.pick(0, 1)]
        operands = [self.read(), self.read()]
        scan = helper.make_node("Scan", operands, results, results[0], body=graph, **attrs)
        self.nodes.append(scan)
        return self.add("Add", *results)


def strategy(program: Program, mesh: str) -> dict[str, Any]:
    """Splits some of the products, and inputs."""
    splits = ((None, "tp", None), ("tp", None, None), (None, None, "tp"))
    asked = {}
    for name in program.products:
        rows, inner, columns = program.pick(*splits)
        asked[name] = [[rows, inner], [inner, columns]]
    kept = {name: ask for name, ask in asked.items() if program.pick(True, True, False)}
    axis = "dp" if "dp" in mesh else program.pick("tp", None)
    return {"shard": kept, "tensors": {"x": [axis, None]}}


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(20))
def test_random_bodies(tmp_path: Path, seed: int) -> None:
    program = Program(seed)
    main = Scope(program, ["x", "y"], 0)
    main.have.append(program.pick(main.choice, main.loop, main.scan)())
    main.draw(2)
    given: dict[str, Any] = {"x": (FLOAT, SHAPE), "y": (FLOAT, SHAPE), "p": (BOOL, [])}
    given |= {"yes": (BOOL, []), "n": (INT, []), "two": (INT, [])}
    results = {name: (FLOAT, SHAPE) for name in main.have[2:]}
    opsets = [helper.make_opsetid("", 18)]
    model = tmp_path / "m.onnx"
    graph = main.graph(given, results)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), model)
    mesh = program.pick("tp=2", "tp=3", "tp=4", "dp=2,tp=2", "")
    how = (
        options(mesh, strategy=strategy(program, mesh)) if mesh else options(program.pick(*PRESETS))
    )
    sharder.shard(model, tmp_path / "m.par", how)
    for predicate in (True, False):
        feeds = program.feeds(predicate)
        got = run_ranks(tmp_path / "m.par", feeds)
        check_outputs(got, run_unsplit(model, feeds), list(results))
