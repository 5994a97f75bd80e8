"""Replaces ops that onnxruntime's optimizer has fused by the ONNX ops that they consist of:
FusedGemm becomes Gemm and an activation. Also gives a ConvTranspose with constant pads as an
operand these pads as an attribute.

Inside a fused op, no sum over ranks can come between a product and the steps after it; between
separate ops, it can. The replacement computes the same bits. Where nothing came between, the ranks'
graphs have the fused op again (`lowering/fuse_again.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from onnxpar.base.names import Names
from onnxpar.graph.patterns import Known, Match, Op, Table, attributes, rewrite
from onnxpar.graph.stored import onnx_opset
from onnxpar.graph.used_names import names_in

_PARAMS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "Softplus": (),
    "Softsign": (),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}
"""Activations that may be fused, and their parameters in `activation_params`, in order."""


_RESERVED = ("gemm_input_shape", "gemm_output_shape")
"""Prefixes of the names of constants that an onnxruntime session adds; a model that onnxruntime has
optimized contains such constants already."""


@dataclass(frozen=True)
class FusedNode:
    """A fused node of the file, and the nodes that replaced it.

    node   the fused node
    parts  the nodes in its place, in order; the last one has its results. Fused nodes may share
           parts
    main   the index of the part that has the name and the metadata of `node`
    """

    node: NodeProto
    parts: tuple[NodeProto, ...]
    main: int


def unfuse(model: onnx.ModelProto) -> list[FusedNode]:
    """Replaces fused nodes by ONNX's ops, in place, also in subgraphs; returns each with its
    replacement."""
    matches = rewrite(model.graph, _table(onnx_opset(model)))
    free_names(model.graph)
    return [FusedNode(at.node, (*at.shared, *at.nodes), len(at.shared) + at.main) for at in matches]


def _table(opset: int) -> Table:
    """Returns the patterns of fused ops whose parts exist in this opset, each with its
    replacement."""
    known = [op for op in _PARAMS if onnx.defs.has(op, opset) and (op != "Clip" or opset >= 11)]
    activations = tuple(op.encode() for op in known)
    fused = partial(Op, domain="com.microsoft")
    return {
        fused("FusedConv", activation=(None, b"", *activations)): _convolution,
        fused("FusedGemm", activation=activations): _gemm,
        fused("ConvTransposeWithDynamicPads", "x", "w", Known("pads")): _transposed_convolution,
        fused("DynamicQuantizeMatMul"): _dynamic_product,
        fused("MatMulIntegerToFloat"): _scaled_product,
    }


def free_names(graph: onnx.GraphProto) -> None:
    """Renames constants whose names an onnxruntime session would use for constants of its own: it
    would reject the model for names that occur twice."""
    reserved = [w.name for w in graph.initializer if w.name.startswith(_RESERVED)]
    names = names_in(graph) if reserved else Names()
    renamed = {name: names.free(f"{name}::kept") for name in reserved}
    for weight in graph.initializer:
        weight.name = renamed.get(weight.name, weight.name)
    for node in graph.node if renamed else ():
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)


def _convolution(at: Match) -> None:
    """Replaces a FusedConv by a Conv, and an addition, an activation, or both."""
    attrs = attributes(at.node)
    op = attrs.pop("activation", b"").decode()
    params = attrs.pop("activation_params", [])
    y = at.add("Conv", [at.operand(i) for i in range(3)], **attrs)
    at.take_name()
    if at.operand(3):
        y = at.add("Add", [y, at.operand(3)])
    if op:
        _activate(at, op, y, params)


def _gemm(at: Match) -> None:
    """Replaces a FusedGemm by a Gemm and an activation."""
    attrs = attributes(at.node)
    op = attrs.pop("activation").decode()
    params = [attrs.pop(f"activation_{key}", None) for key in ("alpha", "beta", "gamma")]
    y = at.add("Gemm", [at.operand(i) for i in range(3)], **attrs)
    at.take_name()
    _activate(at, op, y, [p for p in params if p is not None])


def _activate(at: Match, op: str, y: str, params: Sequence[float]) -> None:
    """Adds the activation `op` of the tensor `y`."""
    if op == "Clip":
        at.add(op, [y, *map(np.float32, params)])
    else:
        at.add(op, [y], **dict[str, Any](zip(_PARAMS[op], params, strict=False)))


def _dynamic_product(at: Match) -> None:
    """Replaces a DynamicQuantizeMatMul by a quantization and a product of integers. Products that
    read the same operand share its quantization."""
    source, quantized = at.operand(0), at.scope.shared
    if source in quantized:
        at.shared.append(quantized[source])
    else:
        at.add("DynamicQuantizeLinear", [source], outputs=3)
        quantized[source] = at.nodes[-1]
    a, scale, zero = quantized[source].output
    _product(at, [a, at.operand(1), zero, at.operand(3)], [scale, at.operand(2)], 4)


def _scaled_product(at: Match) -> None:
    """Replaces a MatMulIntegerToFloat by a product of integers and a scaling."""
    operands = [at.operand(i) for i in (0, 1, 4, 5)]
    _product(at, operands, [at.operand(2), at.operand(3)], 6)


def _product(at: Match, operands: Sequence[str], scales: Sequence[str], bias: int) -> None:
    """Adds a product of integers, times the two `scales`, plus the operand at index `bias`, if
    there is one."""
    total = at.add("MatMulInteger", operands)
    at.take_name()
    number = at.add("Cast", [total], to=TensorProto.FLOAT)
    y = at.add("Mul", [number, at.add("Mul", scales)])
    if at.operand(bias):
        at.add("Add", [y, at.operand(bias)])


def _transposed_convolution(at: Match) -> None:
    """Replaces a ConvTransposeWithDynamicPads by a ConvTranspose with its pads as an attribute."""
    attrs = {**attributes(at.node), "pads": at["pads"].tolist()}
    at.add("ConvTranspose", [at["x"], at["w"], at.operand(3)], **attrs)
