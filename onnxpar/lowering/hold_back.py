"""Delays nodes until the collectives before them in the graph have started.

onnxruntime runs a fused node after all other ready nodes. So it may compute a gradient long after
the next layer's gradient, and the collective that sends the first one would start late.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from onnxpar.graph.collectives import DOMAIN, KINDS, START, kind_of
from onnxpar.graph.subgraphs import bodies
from onnxpar.graph.tensors import tensor_shape
from onnxpar.lowering.overlap import VIEWS

PRODUCTS = frozenset(("MatMul", "Gemm", "Conv"))
_INTO_PRODUCTS = frozenset(("Transpose", "Mul", "Div", "Cast"))
"""Ops that onnxruntime fuses into a product that reads their result."""
AFTER_PRODUCTS = frozenset(("Add", "Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid"))
"""Ops that onnxruntime fuses into the product that computes their operand."""


def hold_back(graph: gs.Graph, moved: Mapping[str, str]) -> None:
    """Adds a Gate (a node that waits) after each start of a collective, on an operand of the next
    node that computes. In `moved`, nodes that were moved behind the start have the name of the
    collective: each of them gets a Gate instead.

    The graph must be sorted topologically, and stays sorted. A Gate is never between nodes that
    onnxruntime fuses: without the fusion, results may differ in their last bits.
    """
    makers = {id(t): node for node in graph.nodes for t in node.outputs}
    nodes: list[gs.Node] = []
    is_due = False
    filled = set(moved.values())
    waiting: dict[str, set[int]] = {}  # by collective, the tensors that wait for its start
    held: dict[int, gs.Tensor] = {}
    for node in graph.nodes:
        node.inputs = [held.get(id(t), t) for t in node.inputs]
        waits = waiting.get(moved.get(node.name, ""))
        is_free = is_due if waits is None else not waits & {id(t) for t in node.inputs}
        operand = _operand(node, makers) if is_free and _computes(node) else None
        if operand is not None:
            passed = gs.Variable(f"{operand.name}::held", operand.dtype, operand.shape)
            gate = gs.Node("Gate", passed.name, {}, [operand], [passed], domain=DOMAIN)
            makers[id(passed)] = makers[id(operand)]
            node.inputs = [passed if t is operand else t for t in node.inputs]
            held = {key: passed if t is operand else t for key, t in held.items()}
            held[id(operand)] = passed
            nodes.append(gate)
            if waits is None:
                is_due = False
            else:
                waits.add(id(passed))
        if waits is not None and waits & {id(t) for t in node.inputs}:
            waits.update(id(t) for t in node.outputs)
        nodes.append(node)
        if node.domain == DOMAIN and node.op.startswith(START):
            if node.name in filled:
                waiting[node.name] = set()
            else:
                is_due |= not KINDS[kind_of(node.op)].is_late
    graph.nodes = nodes


def _computes(node: gs.Node) -> bool:
    """True for a node that computes, other than a collective, a view, or a loop or branch."""
    return node.domain != DOMAIN and node.op not in VIEWS and not bodies(node)


def _operand(node: gs.Node, makers: dict[int, gs.Node]) -> gs.Tensor | None:
    """Returns a computed operand of a node before which a Gate may be put; None if there is
    none."""
    for tensor in node.inputs:
        maker = makers.get(id(tensor))
        if maker is not None and _computes(maker) and not _are_fused(maker, node, tensor):
            return tensor
    return None


def _are_fused(maker: gs.Node, reader: gs.Node, tensor: gs.Tensor) -> bool:
    """True if onnxruntime may fuse `maker` with `reader`, which reads its result `tensor`."""
    if reader.op in PRODUCTS:
        return maker.op in _INTO_PRODUCTS or maker.op in VIEWS
    if maker.op not in PRODUCTS:
        return bool(maker.op == reader.op == "Transpose")
    others = [t for t in reader.inputs if t is not tensor]
    scales = reader.op in ("Mul", "Div") and any(_is_scalar(t) for t in others)
    return reader.op in AFTER_PRODUCTS or scales


def _is_scalar(tensor: gs.Tensor) -> bool:
    shape = tensor_shape(tensor)
    return shape is None or all(size in (1, None) for size in shape)
