"""One node as a rank runs it: what becomes per rank, what stays the same, what is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from numpy import array

from onnxpar.graph.per_rank import PerRank
from onnxpar.layout.layout import Factor, Layout, Product
from onnxpar.layout.mesh import Mesh
from onnxpar.lowering.localize import localize_node
from onnxpar.lowering.rank_view import NodeView, RankView
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import with_axes
from onnxpar.testing.case import Case, run

MESH = Mesh.parse("tp=2")
TP = (MESH.axis("tp"),)


def localized(case: Case, factor: str, parts: tuple[int, ...] | None = None):
    """The graph of a case after one factor was split over tp, and what depends on the rank."""
    graph = case.graph(run(case.graph(), case.values))
    factors = analyse(graph)
    op = factors.ops[0]
    split = {i: (TP, parts) for i, leaf in enumerate(op.leaves) if leaf.factor == factor}
    layouts = {}
    for tensor, links in op.operands():
        if tensor.name:
            given = iter([split.get(-1 if k is None else k, ((), None)) for k in links])
            dims = tuple(with_axes(d, given) for d in factors.tensors[tensor.name].dims)
            layouts[tensor.name] = Layout(dims)
    per_rank = PerRank()
    localize_node(graph, op, layouts, MESH, per_rank)
    return graph, per_rank


def text(graph: gs.Graph) -> list[str]:
    """One line per node."""

    def operand(tensor: gs.Tensor) -> str:
        if isinstance(tensor, gs.Constant) and "::" in tensor.name:
            return str(np.asarray(tensor.values).tolist())
        return tensor.name.removeprefix("node::")

    return [
        f"{operand(n.outputs[0])} = {n.op}({', '.join(map(operand, n.inputs))})"
        + "".join(f" {k}={v}" for k, v in n.attrs.items() if not k.startswith("onnxpar"))
        for n in graph.nodes
    ]


def test_even_parts_share_a_constant():
    graph, per_rank = localized(Case("Reshape", [(4, 6), array([4, 3, 2])]), "f0")
    assert text(graph) == ["y0 = Reshape(x0, [2, 3, 2])"]
    assert not per_rank.constants


def test_uneven_parts_have_a_constant_each():
    graph, per_rank = localized(Case("Reshape", [(5, 6), array([5, 3, 2])]), "f0")
    assert text(graph) == ["y0 = Reshape(x0, [3, 3, 2])"]
    assert [per_rank.constants["node::input1"](r).tolist() for r in (0, 1)] == [
        [3, 3, 2],
        [2, 3, 2],
    ]


def test_uneven_groups_are_an_attribute_each():
    case = Case("Conv", [(1, 6, 4), (6, 2, 3)], {"group": 3})
    graph, per_rank = localized(case, "g")
    assert text(graph) == ["y0 = Conv(x0, x1) group=2"]
    assert [per_rank.attributes["node", "group"](r) for r in (0, 1)] == [2, 1]


def test_results_that_are_left_out_have_no_layout():
    case = Case("LayerNormalization", [(4, 6), (6,), (6,)], outputs=3)
    graph = case.graph(run(case.graph(), case.values))
    graph.nodes[0].outputs[1] = gs.Variable.empty()
    factors = analyse(graph)
    layout = Layout(tuple(with_axes(d, iter([(TP, None)])) for d in factors.tensors["x0"].dims[:1]))
    layouts = {"x0": Layout((*layout.dims, *factors.tensors["x0"].dims[1:]))}
    localize_node(graph, factors.ops[0], layouts, MESH, PerRank())
    assert graph.nodes[0].op == "LayerNormalization"


def test_a_node_that_is_whole_stays_as_it_is():
    graph, per_rank = localized(Case("Reshape", [(4, 6), array([0, -1, 2])]), "none")
    assert text(graph) == ["y0 = Reshape(x0, x1)"]
    assert per_rank == PerRank()


def test_split_by_number_gets_sizes_and_loses_the_number():
    case = Case("Split", [(5, 4)], {"axis": 0, "num_outputs": 2}, outputs=2)
    graph, _ = localized(case, "s0")
    assert text(graph) == ["y0 = Split(x0, [2, 2]) axis=0"]


def test_a_lookup_masks_the_rows_that_others_hold():
    case = Case("Gather", [(7, 3), array([[6, 0], [3, 4]])], fed=[1])
    graph, per_rank = localized(case, "v")
    assert text(graph) == [
        "Add3 = Add(x1, 7)",
        "Less5 = Less(x1, 0)",
        "Where7 = Where(Less5, Add3, x1)",
        "Sub8 = Sub(Where7, 0)",
        "Greater9 = Greater(Where7, -1)",
        "Less11 = Less(Where7, 7)",
        "And13 = And(Less11, Greater9)",
        "Where14 = Where(And13, 0, 8)",
        "Greater17 = Greater(Sub8, -1)",
        "Less19 = Less(Sub8, 4)",
        "And20 = And(Less19, Greater17)",
        "Where21 = Where(And20, Sub8, Where14)",
        "Unsqueeze22 = Unsqueeze(And20, [-1])",
        "Gather24 = Gather(x0, Where21)",
        "Equal25 = Equal(Unsqueeze22, False)",
        "Where27 = Where(Unsqueeze22, 1.0, -1.0)",
        "Where30 = Where(Equal25, 0.0, Gather24)",
        "y0 = Mul(Where30, Where27)",
    ]
    values = [[v(r).tolist() for v in per_rank.constants.values()] for r in (0, 1)]
    assert values == [[0, 4], [4, 3]]
    assert graph.outputs[0].inputs == [graph.nodes[-1]]


def test_a_mean_of_uneven_parts_is_weighted():
    graph, per_rank = localized(Case("ReduceMean", [(5, 3), array([0])]), "d0")
    assert text(graph) == [
        "ReduceMean1 = ReduceMean(x0, [0])",
        "Cast4 = Cast(3) to=1",
        "Cast6 = Cast(5) to=1",
        "Max7 = Max(Cast6, 1.0)",
        "Div9 = Div(Cast4, Max7)",
        "y0 = Mul(ReduceMean1, Div9)",
    ]
    assert [v(1).tolist() for v in per_rank.constants.values()] == [2]


def test_segments_that_would_be_counted_twice_are_refused():
    case = Case("Concat", [(2, 4), (2, 6)], {"axis": 1})
    first = case.graph(run(case.graph(), case.values))
    weight = gs.Constant("w", np.ones((10, 3), np.float32))
    result = gs.Variable("z", np.float32, (2, 3))
    first.nodes.append(gs.Node("MatMul", "product", {}, [first.outputs[0], weight], [result]))
    factors = analyse(first)
    op = factors.ops[1]
    leaf = next(i for i, leaf in enumerate(op.leaves) if leaf.size == 6)
    layouts = {}
    for tensor, links in op.operands():
        given = iter([(TP, None) if k == leaf else ((), None) for k in links])
        dims = tuple(with_axes(d, given) for d in factors.tensors[tensor.name].dims)
        layouts[tensor.name] = Layout(dims)
    assert "segments of k" in str(NodeView.of(op, layouts, MESH).breach(op.rule))
    with pytest.raises(AssertionError, match="MatMul 'product': segments of k"):
        localize_node(first, op, layouts, MESH, PerRank())


def test_an_interval_of_many_elements_lists_none() -> None:
    """Sizes that stand in for open ones are large, and products of them too large to list."""
    mesh = Mesh.parse("dp=3")
    rows = Product((Factor(2336737, (mesh.axis("dp"),)), Factor(2837708)))
    view = SimpleNamespace(node=None, mesh=mesh, factors={"v": rows})
    local = RankView(cast(NodeView, view), rank=1)
    assert local.interval("v") == (778913 * 2837708, (778913 + 778912) * 2837708)
    assert local.varies
