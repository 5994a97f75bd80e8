"""Rules of quantization with scales per tensor, per element of an axis, or per block of elements;
and lowerings of quantized products.

Ranks add their sums of products as integers, and scale and round the total. So results are
bit-identical to the results of the unsplit op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.graph.tensors import Size, constant, dtype_of, given, tensor_shape
from onnxpar.rules.communicate import where_held
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Lowering, Rule, einsum, invalid, names, rule


@rule("QuantizeLinear DequantizeLinear")
@rule("QuantizeLinear DequantizeLinear", domain="com.microsoft")
def quantize(node: gs.Node) -> Rule:
    """Sharding rule of QuantizeLinear, DequantizeLinear: `a b, b, b -> a b` per axis,
    `a b, (), () -> a b` per tensor, `a (n b), a n -> a (n b)` in blocks of b.

    onnxruntime fuses a product with the DequantizeLinear of a stored weight, and may then round the
    product's first operand. Stored integers are never gathered, so that ranks round, too.
    """
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    axis = node.attrs.get("axis", 1)
    axis = axis % len(shape) if -len(shape) <= axis < len(shape) else 0
    whole: dict[str, str] = {}
    sizes: dict[str, Size] = {}
    block = node.attrs.get("block_size", 0)
    rank = len(tensor_shape(node.inputs[1]) or ())
    if block < 0 or rank not in ([len(shape)] if block else [0, 1]):
        raise invalid(node, f"block_size={block} and a scale of {rank} dimensions")
    if not block:
        rest = [_per_axis(t, dims[axis] if dims else "1") for t in node.inputs[1:]]
    else:
        blocks = dims_text([*dims[:axis], "n", *dims[axis + 1 :]])
        rest = [blocks if t.name else "_" for t in node.inputs[1:]]
        size = shape[axis]
        if size is None or size % block:
            whole = dict.fromkeys((dims[axis], "n"), "its last block is not full")
        else:
            dims[axis] = "(n b)"
            sizes, whole = {"n": size // block, "b": block}, {"b": "a block has a single scale"}
    text = dims_text(dims)
    stored = frozenset(range(len(node.inputs)) if node.op == "DequantizeLinear" else ())
    operands = ", ".join([text, *rest])
    return einsum(node, f"{operands} -> {text}", sizes=sizes, whole=whole, constants=stored)


def _per_axis(tensor: gs.Tensor, dim: str) -> str:
    """Returns the dimensions of a scale or zero point as text of a rule: `dim`, or "1" where it has
    one element; `_` if absent."""
    if not tensor.name:
        return "_"
    return dims_text("1" if s == 1 else dim for s in tensor_shape(tensor) or ())


@rule("DynamicQuantizeLinear")
def dynamic_quantize(node: gs.Node) -> Rule:
    """Sharding rule of DynamicQuantizeLinear: `a b -> a b ; () ; ()`; if a or b is split, the ranks
    reduce the range of all elements."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    text = dims_text(dims)
    everything = frozenset(dims)
    return einsum(
        node,
        f"{text} -> {text}; (); ()",
        communicating=everything,
        lowered=everything,
        lower=lower_dynamic_quantize(dims),
    )


def lower_dynamic_quantize(factors: list[str]) -> Callable[[Lowering], None]:
    """Returns a lowering to the nodes by which ONNX defines the op, with the range of all ranks'
    elements. `factors` are the factors of operand 0."""

    def lower(build: Lowering) -> None:
        zero, one = np.float32(0), np.float32(1)
        x = build.input(0)
        low = build.add("Neg", [build.add("ReduceMin", [x], keepdims=0)])
        bounds = [
            build.add("Reshape", [bound, np.array([1], np.int64)])
            for bound in (low, build.add("ReduceMax", [x], keepdims=0))
        ]
        both = build.all_reduce(build.add("Concat", bounds, axis=0), factors, "max")
        both = build.add("Max", [both, zero])
        low = build.add("Neg", [build.add("Gather", [both, np.int64(0)])])
        high = build.add("Gather", [both, np.int64(1)])
        span = build.add("Div", [build.add("Sub", [high, low]), np.float32(255)])
        scale = build.add("Where", [build.add("Equal", [high, low]), one, span])
        start = build.add("Sub", [zero, build.add("Div", [low, scale])])
        inside = build.add("Min", [build.add("Max", [start, zero]), np.float32(255)])
        point = build.add("Cast", [build.add("Round", [inside])], to=TensorProto.UINT8)
        build.finish("QuantizeLinear", [x, scale, point])
        build.finish("Identity", [scale], 1)
        build.finish("Identity", [point], 2)

    return lower


def integer_product(contracted: str) -> dict[str, Any]:
    """Returns the fields of a rule of QLinearMatMul or QGemm with which the contracted factor may
    be split: ranks add integers, and scale the total."""
    across = frozenset({contracted})

    def lower(build: Lowering) -> None:
        _QuantizedProduct(build, contracted).lower()

    return {"communicating": across, "lowered": across, "lower": lower}


class _QuantizedProduct:
    """Builds the nodes of a quantized product whose factor `contracted` is split: the product of
    shards as integers, the sum over ranks, and the scaling of the sum."""

    def __init__(self, build: Lowering, contracted: str) -> None:
        self.build = build
        self.contracted = contracted
        self.node = build.local.node

    def lower(self) -> None:
        """Adds the nodes of a QLinearMatMul, or of a QGemm with its transposed operands and
        bias."""
        is_gemm = self.node.op == "QGemm"
        a, b = self._operand(0, "transA"), self._operand(3, "transB")
        product = self.build.add("MatMulInteger", [a, b, self.build.input(2), self.build.input(5)])
        product = where_held(self.build, product, self.contracted)
        total = self.build.all_reduce(product, [self.contracted])
        if is_gemm and given(self.node, 6) is not None:
            total = self.build.add("Add", [total, self.build.input(6)])
        scale = self.build.add("Mul", [as_float32(self.build, i) for i in (1, 4)])
        alpha = self.node.attrs.get("alpha", 1.0)
        if alpha != 1.0:
            scale = self.build.add("Mul", [scale, np.float32(alpha)])
        at = 7 if is_gemm else 6
        if given(self.node, at) is None:
            number = self.build.add("Cast", [total], to=TensorProto.FLOAT)
            self.build.finish("Mul", [number, scale])
            return
        finish_quantized(self.build, total, scale, at)

    def _operand(self, index: int, transposed: str) -> gs.Tensor:
        """Returns operand `index`, transposed if the attribute `transposed` says so."""
        x = self.build.input(index)
        return self.build.add("Transpose", [x]) if self.node.attrs.get(transposed) else x


def finish_quantized(build: Lowering, total: gs.Tensor, scale: gs.Tensor, at: int) -> None:
    """Makes the result of the node: a sum of integers times `scale`, quantized by the node's
    operands `at` (scale of the result) and `at` + 1 (its zero point)."""
    finish_requantized(build, total, build.add("Div", [scale, as_float32(build, at)]), at + 1)


def finish_requantized(build: Lowering, total: gs.Tensor, ratio: gs.Tensor, at: int) -> None:
    """Makes the result of the node: a sum of integers times `ratio`, plus the zero point, operand
    `at`, rounded and clipped to the result's type."""
    number = build.add("Mul", [build.add("Cast", [total], to=TensorProto.FLOAT), ratio])
    point = build.add("Reshape", [build.input(at), np.array([], np.int64)])
    build.finish("QuantizeLinear", [number, np.float32(1), point])


def as_float32(build: Lowering, index: int) -> gs.Tensor:
    """Operand `index`, a scale, as float32."""
    scale = build.input(index)
    is_narrow = dtype_of(scale) != np.float32
    return build.add("Cast", [scale], to=TensorProto.FLOAT) if is_narrow else scale


def is_one_point(tensor: gs.Tensor) -> bool:
    """True if the zero point is the same number for all channels."""
    if all(s == 1 for s in tensor_shape(tensor) or ()):
        return True
    values = constant(tensor)
    return values is not None and bool((values == values.flat[0]).all())


def lower_quantized_convolution(
    contracted: str, image: gs.Tensor, channels_last: bool = False, **attrs: Any
) -> Callable[[Lowering], None]:
    """Returns a lowering of QLinearConv to a convolution of integers; ranks add the results, and
    scale the total.

    contracted     the factor of the input channels
    image          the elements that the rank's windows read
    channels_last  True if the node's tensors have channels last; the rank's convolution has them
                   first
    attrs          the attributes of the rank's convolution
    """

    def lower(build: Lowering) -> None:
        node = build.local.node
        rank = len(tensor_shape(node.inputs[0]) or ())
        space = [*range(1, rank - 1)]
        channels = np.array([-1, *([] if channels_last else [1] * len(space))], np.int64)
        x = image
        if channels_last:
            x = build.add("Transpose", [image], perm=[0, rank - 1, *space])
        values = constant(node.inputs[5])
        if values is None:
            points = build.add("Reshape", [build.input(5), np.array([-1], np.int64)])
            point: Any = build.add("Gather", [points, np.array(0, np.int64)])
        else:
            point = values.reshape(-1)[0]
        operands = [x, build.input(3), build.input(2), point]
        product = where_held(build, build.add("ConvInteger", operands, **attrs), contracted)
        total = build.all_reduce(product, [contracted])
        if channels_last:
            total = build.add("Transpose", [total], perm=[0, *[i + 1 for i in space], 1])
        if given(node, 8) is not None:
            total = build.add("Add", [total, build.add("Reshape", [build.input(8), channels])])
        scale = build.add("Mul", [as_float32(build, i) for i in (1, 4)])
        if tensor_shape(node.inputs[4]):
            scale = build.add("Reshape", [scale, channels])
        finish_quantized(build, total, scale, 6)

    return lower
