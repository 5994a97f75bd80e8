"""Which nodes of a mixture run at the ranks of experts, and which rows cross."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_graphsurgeon as gs
import pytest

from onnxpar.sharding.expert_cut import between_exchanges, moved_tensors, nodes_at_experts
from onnxpar.sharding.expert_rows import ExpertRows, Shapes
from onnxpar.sharding.find_expert_rows import find_expert_rows

EXPERTS, ROWS, WIDTH = 3, 6, 4
TEXT = """<ir_version: 8, opset_import: ["" : 18, "onnxpar" : 1]>
m (float[6,4] x, bool[3,6,1] chosen, bool[3,6,1] again, float[3,6,1] weight) => (float[6,4] y)
<float zero = {0}, int64[1] first = {0}> {
  a = Where(chosen, x, zero)
  LINES
  d = Where(chosen, m, zero)
  y = ReduceSum<keepdims = 0>(d, first)
}"""
THERE = "onnxpar.AllToAll<split_axis = 0, concat_axis = 1>"
BACK = "onnxpar.AllToAll<split_axis = 1, concat_axis = 0>"


def find(lines: str) -> tuple[list[ExpertRows], Shapes]:
    """The mixtures of a graph with a matrix w and values p [row, column] of each expert; all rows
    have four columns."""
    model = onnx.parser.parse_model(TEXT.replace("LINES", lines))
    for name, rows in (("w", WIDTH), ("p", ROWS)):
        value = np.ones((EXPERTS, rows, WIDTH), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    graph = gs.import_onnx(model)
    shapes = {t.name: tuple(t.shape) for t in (*graph.tensors().values(),) if t.shape is not None}
    for node in graph.nodes:
        for tensor in node.outputs:
            shapes.setdefault(tensor.name, (EXPERTS, ROWS, WIDTH))
            tensor.dtype = np.float16 if node.attrs.get("to") == 10 else np.float32
    return list(find_expert_rows(graph, shapes)), shapes


def cut(lines: str) -> tuple[str, str]:
    """The results of the nodes at the experts, and the tensors that cross."""
    (rows,), shapes = find(lines)
    nodes = nodes_at_experts(rows, shapes)
    moved = moved_tensors(rows, nodes)
    return " ".join(t.name for n in nodes for t in n.outputs), " ".join(t.name for t in moved)


def inside(lines: str) -> set[str] | None:
    """The nodes of a rank's graph whose results are at the experts."""
    (rows,), shapes = find(lines)
    found = between_exchanges(rows, shapes)
    names = {t.name for n in rows.nodes if found and id(n) in found for t in n.outputs}
    return None if found is None else names


@pytest.mark.parametrize(
    ("lines", "nodes", "moved"),
    [
        # tokens there, results back
        ("h = MatMul(a, w) t = Tanh(h) b = MatMul(t, w) m = Mul(b, weight)", "h t b", "a b"),
        # in half precision
        (
            """c = Cast<to = 10>(a) e = Cast<to = 1>(c) h = MatMul(e, w) b = Cast<to = 10>(h)
            n = Cast<to = 1>(b) m = Mul(n, weight)""",
            "e h b",
            "c b",
        ),
        # two values of one tensor: the one
        (
            """s = Relu(a) c = Neg(a) h = MatMul(s, w) k = MatMul(c, w) n = Tanh(k) v = Add(h, n)
            m = Tanh(v)""",
            "s c h k n v",
            "a v",
        ),
        # one value of two tensors: the value
        ("u = Mul(a, weight) s = Add(a, u) h = MatMul(s, w) m = Tanh(h)", "h", "s h"),
        # an activation behind the router's weight, before other experts' matrices
        (
            "h = MatMul(a, w) k = Mul(h, weight) t = Tanh(k) m = MatMul(t, w)",
            "h t m",
            "a h k m",
        ),
        # a node that needs a stored value of its expert for its row
        ("s = Add(a, p) m = MatMul(s, w)", "", ""),
    ],
)
def test_sides(lines: str, nodes: str, moved: str) -> None:
    assert cut(lines) == (nodes, moved)


def test_nodes_between_exchanges() -> None:
    lines = f"b = {THERE}(a) h = MatMul(b, w) t = Tanh(h) n = {BACK}(t) m = Mul(n, weight)"
    assert inside(lines) == {"b", "h", "t"}


@pytest.mark.parametrize(
    "lines",
    [
        f"b = {THERE}(a) h = MatMul(b, w) s = Mul(h, weight) m = {BACK}(s)",  # weights of rows
        f"b = {THERE}(a) h = MatMul(b, w) s = Add(h, a) m = {BACK}(s)",  # rows of both sides
        f"h = MatMul(a, w) b = {THERE}(h) m = {BACK}(b)",  # a product at the tokens
        f"b = {BACK}(a) h = MatMul(b, w) m = {THERE}(h)",  # the wrong way round
        f"b = {THERE}(a) m = MatMul(b, w)",  # a sum at the experts
    ],
)
def test_chosen_rows_alone_cannot_travel(lines: str) -> None:
    assert inside(lines) is None


def test_no_node_is_in_two_mixtures() -> None:
    """The second mask chooses rows by other decisions; a node reads rows of both."""
    first, second = find(
        """g = Where(again, x, zero) h = MatMul(a, w) m = Mul(h, g) k = MatMul(g, w)
        e = Where(again, k, zero) z = ReduceSum<keepdims = 0>(e, first)"""
    )[0]
    assert not first.roles.keys() & second.roles.keys()
