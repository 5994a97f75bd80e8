"""Tables of patterns write nodes that compute the same, and leave all others alone."""

from __future__ import annotations

import re
import textwrap

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import GraphProto

from onnxpar.graph import patterns
from onnxpar.graph.patterns import Known, Match, Op, Table, rewrite
from onnxpar.graph.stored import nodes_of

X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)


def parsed(body: str, *outputs: str) -> onnx.ModelProto:
    results = ", ".join(f"float[3,4] {name}" for name in outputs or ("y",))
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 21]> g (float[3,4] x, bool c) => ({results})
        <float half = {{0.5}}, float third = {{0.3}}> {{ {body} }}"""
    )
    for number, node in enumerate(nodes_of(model.graph)):
        node.name = f"n{number}"
    return model


def run(model: onnx.ModelProto, c: bool = True) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options)
    feeds = {"x": X, "c": np.array(c)}
    return list(session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()}))


def text(graph: GraphProto) -> list[str]:
    """The nodes, one a line."""
    return [f"{', '.join(n.output)} = {n.op_type}({', '.join(n.input)})" for n in graph.node]


def example() -> tuple[Table, str, str]:
    """The table of the module's docstring, and the nodes before and after."""
    parts = re.split(r"\n(?:Example|Before|After):\n\n", patterns.__doc__ or "")
    code, before, after = (textwrap.dedent(part).strip() for part in parts[1:])
    names = dict(vars(patterns))
    exec(code, names)
    return names["table"], before, after


def test_the_example_of_the_module() -> None:
    table, before, after = example()
    model = parsed(before)
    wanted = run(model)
    (match,) = rewrite(model.graph, table)
    assert "\n".join(text(model.graph)) == after
    assert [n.name for n in model.graph.node] == ["n2::Add2", "n2"] and match.node.name == "n2"
    np.testing.assert_allclose(run(model)[0], wanted[0], atol=1e-6)


def test_a_node_that_another_one_reads_stays() -> None:
    """So do those in the graph around a body, which may be read there, too."""
    body = "m = Mul(t, half) y = Add(m, half) z = Neg(m)"
    model = parsed(f"t = Tanh(x) {body}", "y", "z")
    wanted = run(model)
    rewrite(model.graph, example()[0])
    assert [n.op_type for n in model.graph.node] == ["Tanh", "Mul", "Add", "Sigmoid", "Neg"]
    np.testing.assert_allclose(run(model), wanted, atol=1e-6)


@pytest.mark.parametrize("c", [True, False])
def test_bodies_and_free_names(c: bool) -> None:
    model = parsed(
        """t = Tanh(x) m = Mul(t, half) "y::taken" = Neg(x)
        y = If(c) <then_branch = a () => (float[3,4] y1) { y1 = Add(m, half) },
        else_branch = b () => (float[3,4] y2) { k = Constant<value = float {0.5}>()
          u = Add(m, k) "u::Add1" = Exp("y::taken") y2 = Mul(u, "u::Add1") }>"""
    )
    wanted = run(model, c)
    assert len(rewrite(model.graph, example()[0])) == 2
    assert sum(n.op_type == "Sigmoid" for n in nodes_of(model.graph)) == 2
    onnx.checker.check_model(model)
    np.testing.assert_allclose(run(model, c), wanted, atol=1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "t = Tanh(x) m = Mul(t, third) y = Add(m, half)",
        "t = Tanh(x) m = Mul(t, half) h = Neg(half) y = Add(m, h)",
        "t = Tanh(x) m = Mul(half, t) y = Add(m, half)",
        "t = Sinh(x) m = Mul(t, half) y = Add(m, half)",
        "m = Mul(x, half) y = Add(m, half)",
    ],
)
def test_others_stay(body: str) -> None:
    model = parsed(body)
    before = model.SerializeToString()
    assert not rewrite(model.graph, example()[0])
    assert model.SerializeToString() == before


SOFTMAX = Op("Softmax", axis=(None, -1))


@pytest.mark.parametrize(
    ("pattern", "body", "count"),
    [
        (Op("Mul", "a", "a"), "t = Neg(x) m = Mul(x, x) n = Mul(t, m) y = Add(n, t)", 1),
        (Op("Mul", "a", Op("Neg", "a")), "t = Neg(x) m = Mul(t, t) y = Mul(x, t)", 1),
        (Op(("Exp", "Neg"), name="n"), "e = Exp(x) s = Sin(e) y = Neg(s)", 2),
        (SOFTMAX, "a = Softmax(x) b = Softmax<axis = -1>(a) y = Softmax<axis = 0>(b)", 2),
        (Op("Clip", "a", "least"), 'a = Clip(x) b = Clip(a, "", half) y = Clip(b, third)', 1),
        (Op("Clip", "a", Known("least")), "h = Neg(half) a = Clip(x, h) y = Clip(a, third)", 1),
    ],
)
def test_what_a_pattern_says(pattern: Op, body: str, count: int) -> None:
    def copy(at: Match) -> None:
        at.add("Identity", [at.operand(0)])

    model = parsed(body)
    assert len(rewrite(model.graph, {pattern: copy})) == count
    assert sum(n.op_type == "Identity" for n in model.graph.node) == count


def test_the_first_pattern_whose_function_writes_nodes() -> None:
    model = parsed("y = Neg(x)")
    table: Table = {
        Op("Neg", Op("Exp")): lambda at: bool(at.add("Sin", [at.operand(0)])),
        Op("Neg"): lambda at: False,
        Op("Neg", "a"): lambda at: bool(at.add("Mul", [at["a"], np.float32(-1)])),
    }
    wanted = run(model)
    rewrite(model.graph, table)
    assert text(model.graph) == ["y = Mul(x, y::constant2)"]
    np.testing.assert_array_equal(run(model), wanted)
