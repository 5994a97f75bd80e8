"""Which rate a node has, how many rows and elements it counts, and what no cache holds any more."""

from __future__ import annotations

from dataclasses import replace

import onnx.parser
import onnx.shape_inference
import onnx_graphsurgeon as gs
import pytest

from onnxpar.cost.device import Device, Rate
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import OpStrategy, partial_kinds
from onnxpar.search.rated_ops import copied_rows, rated_as, work_of
from onnxpar.search.repeats import signature
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.state import ShardingState

ATTENTION = """m (float[2,3,4,5] q, float[2,3,5,4] k, float[4] mask)
=> (float[2,4,3,4] y, float[4] z) {
    s = MatMul(q, k)
    m = Add(s, mask)
    p = Softmax(m)
    y = Transpose <perm = [0, 2, 1, 3]> (p)
    z = Softmax(mask)
}"""


def graph(text: str) -> gs.Graph:
    """The graph of a model in ONNX's text, with shapes."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    found = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    for number, node in enumerate(found.nodes):
        node.name = f"{node.op}_{number}"
    return found


def test_each_node_counts_what_its_kind_takes() -> None:
    found = {}
    for node in graph(ATTENTION).nodes:
        if (kind := rated_as(node)) is not None:
            shapes = [tuple(t.shape) for t in node.inputs]
            found[node.name] = kind, work_of(kind, node, shapes, tuple(node.outputs[0].shape))
    assert found == {
        "MatMul_0": ("MatMul", (6, 120)),  # 6 products, whose second operands are packed
        "Softmax_2": ("Softmax", (24, 96)),
        "Transpose_3": ("Transpose", (24, 96)),
        "Softmax_4": ("Erf", (0, 4)),  # nothing is masked
    }


@pytest.mark.parametrize("perm,rows", [([0, 2, 1, 3], 24), ([0, 1, 3, 2], 0), ([0, 1, 2, 3], 0)])
def test_rows_that_a_transpose_copies(perm: list[int], rows: int) -> None:
    node = gs.Node("Transpose", attrs={"perm": perm})
    assert copied_rows(node, tuple((2, 3, 4, 5)[i] for i in perm)) == rows


def seconds(text: str, device: Device, node: str) -> float:
    """The seconds of a node that no axis splits."""
    topology = replace(Topology.default(), device=device)
    sharding = ShardingState.open(Mesh((("tp", 2),)), analyse(graph(text), []), topology)
    op = sharding.factors.op(node)
    return op_cost(op, OpStrategy(tuple(() for _ in op.leaves)), sharding)[0]


def test_a_rate_adds_to_the_cost_of_a_node() -> None:
    plain = Device(flops=1e15, memory_bandwidth=1e15, launch=1.0, row=0.0)
    rated = replace(plain, ops={"Softmax": Rate(0.1, 0.01)})
    assert seconds(ATTENTION, plain, "Softmax_2") == pytest.approx(1.0)
    assert seconds(ATTENTION, rated, "Softmax_2") == pytest.approx(1.0 + 24 * 0.1 + 96 * 0.01)
    assert seconds(ATTENTION, rated, "Softmax_4") == pytest.approx(1.0)


TWICE = """m (float[8,4] x, float[8,4] y) => (float[8,4] z)
{ a = Add(x, y)  s = Softmax(a)  b = Mul(s, y)  z = Softmax(b) }"""


def test_nodes_of_other_kinds_are_not_alike() -> None:
    """The softmax behind a mask takes longer than the other one, so they share no costs."""
    factors = analyse(graph(TWICE), [])
    sharding = ShardingState.open(Mesh((("tp", 2),)), factors, Topology.default())
    each = [factors.op(name) for name in ("Softmax_1", "Softmax_3")]
    masked, plain = (signature(op, sharding, partial_kinds(factors.ops)) for op in each)
    assert masked != plain


CHAIN = """m (int32[100] x) => (int32[100] z) {
    a = Neg(x)
    b = Neg(a)
    c = Neg(b)
    z = Add(a, c)
}"""


def test_a_tensor_that_lives_long_comes_from_memory() -> None:
    """While `a` lives, 1200 bytes are written, half of them by each rank; while `b` lives, 400."""
    device = Device(memory_bandwidth=1e2, launch=0.0, cache=500, cache_bandwidth=1e4)
    assert seconds(CHAIN, device, "Neg_0") == pytest.approx(8.0)  # an input, and `a`
    assert seconds(CHAIN, device, "Neg_1") == pytest.approx(4.0 + 0.04)
    assert seconds(CHAIN, device, "Neg_2") == pytest.approx(0.05 + 3.0)  # more than it holds
    assert seconds(CHAIN, replace(device, cache=1000), "Neg_2") == pytest.approx(0.08)
    assert seconds(CHAIN, replace(device, cache=1000), "Neg_1") == pytest.approx(0.08)
