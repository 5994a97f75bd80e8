"""What convolutions cost as onnxruntime runs them: in blocks of channels, with what follows inside,
and with edges that are copied row by row."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper, shape_inference

from onnxpar.cost.device import Device
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Axis, Mesh
from onnxpar.search.op_cost import op_cost
from onnxpar.search.op_strategies import OpStrategy
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.in_convolutions import in_convolutions
from onnxpar.sharding.state import ShardingState

TP = Axis("tp", 2)
FLOP = Device(flops=1e9, memory_bandwidth=1e15, launch=0.0, row=0.0)
"""A device on which operations alone take time."""


def graph(channels: int = 32, is_read_twice: bool = False, kernel: int = 1) -> gs.Graph:
    """A convolution, a sum with a skip connection, and an activation."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[kernel // 2] * 4),
        helper.make_node("Add", ["c", "skip"], ["s"], "add"),
        helper.make_node("Relu", ["s"], ["y"], "relu"),
        helper.make_node("Neg", ["c" if is_read_twice else "y"], ["z"], "neg"),
    ]
    image, made = [2, 16, 6, 10], [2, channels, 6, 10]
    shapes = {"x": image, "w": [channels, 16, kernel, kernel], "skip": made}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, made) for n in "yz"]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    return gs.import_onnx(shape_inference.infer_shapes(model))


def opened(of: gs.Graph, device: Device) -> ShardingState:
    topology = replace(Topology.default(), device=device)
    return ShardingState.open(Mesh((("tp", 2),)), analyse(of, []), topology)


def split(op: OpFactors, *factors: str) -> OpStrategy:
    return OpStrategy(tuple((TP,) if leaf.factor in factors else () for leaf in op.leaves))


def seconds(of: gs.Graph, device: Device, node: str = "conv", factor: str = "") -> float:
    sharding = opened(of, device)
    op = sharding.factors.op(node)
    return op_cost(op, split(op, factor), sharding)[0]


@pytest.mark.parametrize("channels,computed", [(8, 16), (16, 16), (17, 32), (32, 32), (40, 48)])
def test_part_of_a_block_takes_as_long_as_all(channels: int, computed: int) -> None:
    flops = 2 * 2 * 60 * 16 * computed
    assert seconds(graph(channels), replace(FLOP, channels=16)) == pytest.approx(flops / 1e9)
    exact = 2 * 2 * 60 * 16 * channels
    assert seconds(graph(channels), FLOP) == pytest.approx(exact / 1e9)


def test_to_split_a_block_saves_nothing() -> None:
    wide, narrow = graph(32), graph(16)
    device = replace(FLOP, channels=16)
    assert seconds(wide, device, factor="o") == pytest.approx(seconds(wide, device) / 2)
    assert seconds(narrow, device, factor="o") == pytest.approx(seconds(narrow, device))


def test_what_runs_inside_a_convolution() -> None:
    assert in_convolutions(graph().nodes) == {"add", "relu"}
    assert in_convolutions(graph(is_read_twice=True).nodes) == set()


def test_what_runs_inside_takes_no_time_but_for_other_operands() -> None:
    device = Device(flops=1e15, memory_bandwidth=1e6, launch=1.0, row=0.0)
    size = 2 * 32 * 60 * 4
    assert seconds(graph(), device, "relu") == 0
    assert seconds(graph(), device, "add") == pytest.approx(size / 1e6)
    assert seconds(graph(is_read_twice=True), device, "relu") == pytest.approx(1 + 2 * size / 1e6)


def test_a_partial_sum_keeps_the_activation_outside() -> None:
    device = Device(flops=1e15, memory_bandwidth=1e6, launch=0.0, row=0.0)
    result = 2 * 32 * 60 * 4
    operands = (2 * 16 * 60 + 32 * 16) * 4
    whole, partial = seconds(graph(), device), seconds(graph(), device, factor="c")
    assert whole == pytest.approx((operands + result) / 1e6)
    assert partial == pytest.approx((operands / 2 + result + 4 * result) / 1e6)


def test_edges_of_columns_are_copied_row_by_row() -> None:
    device = Device(flops=1e15, memory_bandwidth=1e15, launch=0.0, row=1.0)
    of = graph(kernel=3)
    sharding = opened(of, device)
    op = sharding.factors.op("conv")
    tall = op_cost(op, split(op, "h0", "y0"), sharding)[0]
    wide = op_cost(op, split(op, "h1", "y1"), sharding)[0]
    assert tall == pytest.approx(3 * 2 * 16)
    assert wide == pytest.approx(3 * 2 * 16 * 6)
