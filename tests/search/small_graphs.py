"""Random graphs that are small enough to try every strategy: chains, diamonds, residuals, shared
weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnxpar.cost.topology import Topology

UNARY = ("Relu", "Softmax", "Neg", "Identity")


@st.composite
def graphs(draw: st.DrawFn, nodes: int = 5) -> onnx.ModelProto:
    """A model of up to so many nodes on matrices [rows, width]; several may read what one made, and
    products may share a weight."""
    rows = draw(st.sampled_from([1, 1, 6]))
    widths = {"x": draw(st.sampled_from([2, 8]))}
    produced = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, widths["x"]])]
    body: list[onnx.NodeProto] = []
    weights: dict[str, onnx.TensorProto] = {}
    for i in range(draw(st.integers(1, nodes))):
        x = draw(st.sampled_from([*sorted(widths), list(widths)[-1]]))
        name, width = f"t{i}", widths[x]
        same = [n for n in sorted(widths) if widths[n] == width]
        kind = draw(st.sampled_from(["MatMul", "MatMul", "Add", "unary", "Mul"]))
        if kind == "MatMul":
            wide = draw(st.sampled_from([2, 8, 64]))
            weight = f"w{width}x{wide}" + draw(st.sampled_from(["", f".{i}"]))
            values = np.ones((width, wide), np.float32)
            weights[weight] = numpy_helper.from_array(values, weight)
            body.append(helper.make_node("MatMul", [x, weight], [name], name))
            width = wide
        elif kind == "unary":
            op = draw(st.sampled_from(UNARY))
            body.append(helper.make_node(op, [x], [name], name))
        else:
            other = draw(st.sampled_from(same))
            body.append(helper.make_node(kind, [x, other], [name], name))
        widths[name] = width
    read = {n for node in body for n in node.input}
    ends = [n for n in widths if n not in read or (n != "x" and draw(st.integers(0, 4)) == 0)]
    outputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [rows, widths[n]])
        for n in ends
        if n != "x"
    ]
    graph = helper.make_graph(body, "g", produced, outputs, list(weights.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Machines on which talking, copying and computing take times of any proportion."""

    def about(exponents: range) -> float:
        return 10.0 ** draw(st.sampled_from(exponents)) * draw(st.floats(1, 10))

    host = {"name": "host", "size": 8, "latency": about(range(-9, -5))}
    return Topology.of(
        {
            "levels": [{**host, "bandwidth": about(range(7, 10))}],
            "device": {
                "flops": about(range(6, 10)),
                "memory_bandwidth": about(range(7, 10)),
                "launch": 1e-9,
            },
        }
    )


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Writes it."""
    onnx.save(model, path)
    return path
