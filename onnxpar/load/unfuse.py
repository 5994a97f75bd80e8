"""Replaces each op that onnxruntime fused when it optimized a model by the ONNX ops that it
consists of; also a ConvTranspose whose pads are an operand, where these are constant.

Inside a fused op, no sum over ranks can come between a product and the steps after it; between
separate ops, it can. The replacement computes the same bits. Where nothing came between, the ranks'
graphs have the fused op again (`lowering/fuse_again.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxpar.base.names import Names
from onnxpar.graph.stored import onnx_opset, subgraphs_of
from onnxpar.graph.used_names import names_in

_DOMAIN = "com.microsoft"
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

    parts  in order; fused nodes may share some, and the last one has the results of `node`
    main   the index of the part that has the name and the metadata of `node`
    """

    node: NodeProto
    parts: tuple[NodeProto, ...]
    main: int


def unfuse(model: onnx.ModelProto) -> list[FusedNode]:
    """Replaces fused nodes by ONNX's ops, in place, also in subgraphs; returns the fused nodes."""
    opset = onnx_opset(model)
    fused = _Unfusing(model.graph, opset, names_in(model.graph)).run()
    free_names(model.graph)
    return fused


def free_names(graph: onnx.GraphProto) -> None:
    """Renames constants whose names a session would add again: it would reject the second one."""
    reserved = [w.name for w in graph.initializer if w.name.startswith(_RESERVED)]
    names = names_in(graph) if reserved else Names()
    renamed = {name: names.free(f"{name}::kept") for name in reserved}
    for weight in graph.initializer:
        weight.name = renamed.get(weight.name, weight.name)
    for node in graph.node if renamed else ():
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)


class _Unfusing:
    """Replaces the fused nodes of one graph. The methods from `given` on concern the current
    `node`; those in _FUSED return False if they cannot replace it."""

    def __init__(self, graph: onnx.GraphProto, opset: int, names: Names) -> None:
        self.graph, self.opset, self.names = graph, opset, names
        self.made: list[NodeProto] = []
        self.quantized: dict[str, NodeProto] = {}
        self.node = NodeProto()
        self.parts: list[NodeProto] = []
        self.main = 0

    def run(self) -> list[FusedNode]:
        """Replaces the fused nodes of the graph and its subgraphs; returns them."""
        fused: list[FusedNode] = []
        for node in self.graph.node:
            for inner in subgraphs_of(node):
                fused += _Unfusing(inner, self.opset, self.names).run()
            self.node, self.parts = node, []
            take_apart = _FUSED.get(node.op_type) if node.domain == _DOMAIN else None
            if take_apart is None or not take_apart(self):
                self.made.append(node)
            else:
                fused.append(FusedNode(_copy(node), tuple(self.parts), self.main))
        if [node.op_type for node in self.made] != [node.op_type for node in self.graph.node]:
            copies = [_copy(node) for node in self.made]
            del self.graph.node[:]
            self.graph.node.extend(copies)
        return fused

    def given(self, index: int) -> str:
        """The name of an operand; empty if it is left out."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def add(
        self, op: str, inputs: Iterable[str], outputs: int = 1, main: bool = False, **attrs: Any
    ) -> list[str]:
        """Adds a node that computes an intermediate value; returns the names of its results. With
        `main`, the node gets the name and metadata of the fused node."""
        at = f"{self._root()}::{op}{len(self.made)}"
        names = [at if outputs == 1 else f"{at}:{i}" for i in range(outputs)]
        self._make(op, inputs, names, main, attrs)
        return names

    def finish(self, op: str, inputs: Iterable[str], main: bool = False, **attrs: Any) -> None:
        """Adds the last node, whose results get the names of the fused node's results."""
        self._make(op, inputs, self.node.output, main, attrs)

    def _root(self) -> str:
        """The prefix of the names of intermediate values."""
        return self.names.root(self.node.output[0], "::")

    def _make(
        self, op: str, inputs: Iterable[str], names: Iterable[str], main: bool, attrs: Any
    ) -> None:
        own = self.node.name or f"{self.node.op_type}_{self.node.output[0]}"
        node = helper.make_node(op, _trim(inputs), list(names), **attrs)
        node.name = own if main else f"{own}::{op}{len(self.made)}"
        if main:
            node.metadata_props.extend(self.node.metadata_props)
            self.main = len(self.parts)
        self.made.append(node)
        self.parts.append(node)

    def constant(self, value: Any) -> str:
        """Adds a constant to the graph; returns its name."""
        name = f"{self._root()}::constant{len(self.graph.initializer)}"
        array = np.asarray(value)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def convolution(self) -> bool:
        """Replaces FusedConv by a convolution, an addition and an activation; False if the opset
        does not have the activation."""
        attrs = _attributes(self.node)
        op = attrs.pop("activation", b"").decode()
        params = attrs.pop("activation_params", [])
        if op and not self.has(op):
            return False
        operands = [self.given(i) for i in range(3)]
        if not op and not self.given(3):
            self.finish("Conv", operands, main=True, **attrs)
            return True
        (summed,) = self.add("Conv", operands, main=True, **attrs)
        if self.given(3):
            if not op:
                self.finish("Add", [summed, self.given(3)])
                return True
            (summed,) = self.add("Add", [summed, self.given(3)])
        self.activate(op, summed, params)
        return True

    def gemm(self) -> bool:
        """Replaces FusedGemm by a Gemm and an activation; False if the opset does not have the
        activation."""
        attrs = _attributes(self.node)
        op = attrs.pop("activation", b"").decode()
        params = [attrs.pop(f"activation_{key}", None) for key in ("alpha", "beta", "gamma")]
        if not self.has(op):
            return False
        (product,) = self.add("Gemm", [self.given(i) for i in range(3)], main=True, **attrs)
        self.activate(op, product, [p for p in params if p is not None])
        return True

    def has(self, op: str) -> bool:
        """True if the model's opset has the activation as an op."""
        least = 11 if op == "Clip" else 1
        return op in _PARAMS and self.opset >= least and onnx.defs.has(op, self.opset)

    def activate(self, op: str, operand: str, params: list[float]) -> None:
        """Adds the activation of a fused op as the last node."""
        if op == "Clip":
            bounds = [self.constant(np.float32(p)) for p in params]
            self.finish(op, [operand, *bounds])
        else:
            attrs: dict[str, Any] = dict(zip(_PARAMS[op], params, strict=False))
            self.finish(op, [operand], **attrs)

    def dynamic_product(self) -> bool:
        """Replaces DynamicQuantizeMatMul by a quantization and a product of integers; if several
        products read an operand, it is quantized once."""
        source = self.given(0)
        if source in self.quantized:
            self.parts.append(self.quantized[source])
        else:
            self.add("DynamicQuantizeLinear", [source], 3)
            self.quantized[source] = self.parts[-1]
        a, scale, zero = self.quantized[source].output
        self.product([a, self.given(1), zero, self.given(3)], [scale, self.given(2)], 4)
        return True

    def scaled_product(self) -> bool:
        """Replaces MatMulIntegerToFloat by a product of integers and a scaling."""
        operands = [self.given(i) for i in (0, 1, 4, 5)]
        self.product(operands, [self.given(2), self.given(3)], 6)
        return True

    def product(self, operands: list[str], scales: list[str], bias: int) -> None:
        """Adds the nodes of a scaled product of integers, and adds the operand at index `bias` to
        it if there is one."""
        (total,) = self.add("MatMulInteger", operands, main=True)
        (number,) = self.add("Cast", [total], to=TensorProto.FLOAT)
        (scale,) = self.add("Mul", scales)
        if not self.given(bias):
            self.finish("Mul", [number, scale])
            return
        (scaled,) = self.add("Mul", [number, scale])
        self.finish("Add", [scaled, self.given(bias)])

    def transposed_convolution(self) -> bool:
        """Replaces ConvTransposeWithDynamicPads by a ConvTranspose; False unless its pads are an
        initializer of the graph."""
        pads = next((w for w in self.graph.initializer if w.name == self.given(2)), None)
        if pads is None:
            return False
        attrs = {**_attributes(self.node), "pads": numpy_helper.to_array(pads).tolist()}
        operands = [self.given(i) for i in (0, 1, 3)]
        self.finish("ConvTranspose", operands, main=True, **attrs)
        return True


_FUSED: dict[str, Callable[[_Unfusing], bool]] = {
    "FusedConv": _Unfusing.convolution,
    "ConvTransposeWithDynamicPads": _Unfusing.transposed_convolution,
    "FusedGemm": _Unfusing.gemm,
    "DynamicQuantizeMatMul": _Unfusing.dynamic_product,
    "MatMulIntegerToFloat": _Unfusing.scaled_product,
}


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _trim(inputs: Iterable[str]) -> list[str]:
    """Operands without trailing empty names."""
    names = list(inputs)
    while names and not names[-1]:
        names.pop()
    return names


def _copy(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy
