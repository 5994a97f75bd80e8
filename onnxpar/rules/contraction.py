"""Matrix products. If a contracted factor is split, the result is a partial sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.einsum import einsum_dims, einsum_sizes
from onnxpar.graph.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.notation import dims_text
from onnxpar.rules.quantization import integer_product
from onnxpar.rules.rule import FIRST, Rule, einsum, names, rule, whole_rule

_EITHER = (FIRST, frozenset({1}))
"""For `Rule.linear`: the product is linear in operand 0, and in operand 1."""


def product_text(
    a: tuple[Size, ...], b: tuple[Size, ...], out: tuple[Size, ...], left: str, right: str
) -> tuple[str, str, str]:
    """Returns both operands and the result of a matrix product as texts of a rule, e.g. ("b0 m k",
    "1 k n", "b0 m n"). Batch dimensions broadcast as in NumPy.

    a, b, out    the shapes of operands and result
    left, right  the last two dimensions of the operands, e.g. "m k" and "n k"
    """
    batch = names("b", max(len(a), len(b)) - 2)

    def dims(shape: tuple[Size, ...], core: str) -> str:
        lead = batch[len(batch) - max(len(shape) - 2, 0) :]
        ones = ["1" if s == 1 else d for d, s in zip(lead, shape, strict=False)]
        return dims_text([*ones, *core.split()])

    core = ["m"] * (len(a) > 1) + ["n"] * (len(b) > 1)
    lead = ["1" if s == 1 else d for d, s in zip(batch, out, strict=False)]
    return (
        dims(a, left if len(a) > 1 else "k"),
        dims(b, right if len(b) > 1 else "k"),
        dims_text(lead + core),
    )


def _product(node: gs.Node, a: int, b: int, left: str = "m k", right: str = "k n") -> Any:
    """`product_text` for the operands with the indices `a` and `b`."""
    shapes = [tensor_shape(t) or () for t in (node.inputs[a], node.inputs[b], node.outputs[0])]
    return product_text(shapes[0], shapes[1], shapes[2], left, right)


@rule("MatMul")
def matmul(node: gs.Node) -> Rule:
    """Sharding rule of MatMul: `b m k, b k n -> b m n` with broadcast batches; vectors as in NumPy.
    A split k gives partial sums."""
    left, right, out = _product(node, 0, 1)
    nonempty = _fused_factors(node, right)
    dtype = dtype_of(node.inputs[0])
    if dtype is not None and dtype.kind == "u":  # its kernel writes an empty sum as a signed type
        nonempty |= {"k"}
    return einsum(node, f"{left}, {right} -> {out}", linear=_EITHER, nonempty=nonempty)


def _fused_factors(node: gs.Node, right: str) -> frozenset[str]:
    """Returns the factors whose shards must not be empty, because onnxruntime fuses the product
    with the DequantizeLinear of an operand. A fused product returns uninitialized memory for a sum
    over nothing, and does not load a weight without elements. `right` is the right operand, e.g.
    "k n"."""
    sources = [dequantized(t) for t in node.inputs[:2]]
    is_stored = any(isinstance(source, gs.Constant) for source in sources)
    fused = "kn" if is_stored else "k" if any(sources) else ""
    return frozenset(fused).intersection(right.split())


def dequantized(tensor: gs.Tensor) -> gs.Tensor | None:
    """Returns the quantized tensor from which DequantizeLinear, perhaps with Transposes, computes
    `tensor`; None if `tensor` is not computed in this way."""
    while tensor.inputs and tensor.inputs[0].op in ("Transpose", "DequantizeLinear"):
        node = tensor.inputs[0]
        tensor = node.inputs[0]
        if node.op == "DequantizeLinear":
            return tensor
    return None


@rule("Gemm")
def gemm(node: gs.Node) -> Rule:
    """Sharding rule of Gemm: `m k, k n, n -> m n`; if k is split, results are partial sums, and
    only one rank adds the bias."""
    a = "k m" if node.attrs.get("transA") else "m k"
    b = "n k" if node.attrs.get("transB") else "k n"
    fused = _fused_factors(node, b)
    bias = given(node, 2)
    if bias is None:
        return einsum(node, f"{a}, {b} -> m n", linear=_EITHER, nonempty=fused)
    shape = tensor_shape(bias) or ()
    added = ["1" if s == 1 else d for d, s in zip("mn"[2 - len(shape) :], shape, strict=True)]
    return einsum(
        node,
        f"{a}, {b}, {dims_text(added)} -> m n",
        linear=(frozenset({0, 2}), frozenset({1, 2})),
        additive=frozenset({2}),
        nonempty=fused,
    )


@rule("MatMulInteger")
def matmul_integer(node: gs.Node) -> Rule:
    """Sharding rule of MatMulInteger: `m k, k n, m, n -> m n`; every rank subtracts the zero points
    (operands 2 and 3) before its product."""
    points = [given(node, i) for i in (2, 3)]
    if not _are_rows(points[:1], node.inputs[0], -2) or not _are_rows(points[1:], node.inputs[1]):
        return whole_rule(
            node, "its zero points are neither one for all nor one for each row or column"
        )
    left, right, out = _product(node, 0, 1)
    rows = [_row(point, dim) for point, dim in zip(points, "mn", strict=True)]
    operands = ", ".join([left, right, *rows][: len(node.inputs)])
    return einsum(node, f"{operands} -> {out}")


@rule("QLinearMatMul")
def qlinear_matmul(node: gs.Node) -> Rule:
    """Sharding rule of QLinearMatMul: `m k, m, m, k n, n, n, _, _ -> m n`, with scales and zero
    points behind each operand; if k is split, the ranks add their 32-bit sums before they scale
    them."""
    are_columns = _are_rows(node.inputs[4:6], node.inputs[3])
    if not are_columns or not _are_rows(node.inputs[1:3], node.inputs[0], -2):
        return whole_rule(node, "its scales are neither one for all nor one for each row or column")
    left, right, out = _product(node, 0, 3)
    of_a, of_b = (_row(node.inputs[i], dim) for i, dim in ((1, "m"), (4, "n")))
    point_a, point_b = (_row(node.inputs[i], dim) for i, dim in ((2, "m"), (5, "n")))
    text = f"{left}, {of_a}, {point_a}, {right}, {of_b}, {point_b}, _, _ -> {out}"
    return einsum(node, text, **integer_product("k"))


def _are_rows(points: Sequence[gs.Tensor | None], matrix: gs.Tensor, dim: int = -1) -> bool:
    """True if each zero point or scale of a matrix is absent, has one element, or has one for each
    column (for each row if `dim` is -2)."""
    shapes = [() if point is None else tensor_shape(point) for point in points]
    of_matrix = tensor_shape(matrix) or ()
    size = of_matrix[dim] if len(of_matrix) >= -dim else 1
    return all(
        shape is not None
        and (math.prod(s or 2 for s in shape) == 1 or (len(shape) == 1 and shape[0] == size))
        for shape in shapes
    )


def _row(tensor: gs.Tensor | None, dim: str) -> str:
    """Returns the dimensions of a zero point or scale as text of a rule: `dim`, or "1" where it has
    one element; `_` if absent."""
    if tensor is None:
        return "_"
    return dims_text("1" if s == 1 else dim for s in tensor_shape(tensor) or ())


@rule("Einsum")
def einsum_op(node: gs.Node) -> Rule:
    """Sharding rule of Einsum: the op's own equation is the rule, so `bij,bjk->bik` becomes
    `b i j, b j k -> b i k`. An operand with a repeated index, as `ii->i`, keeps the node whole."""
    shapes = [tensor_shape(t) or () for t in node.inputs]
    ranks = [len(shape) for shape in shapes]
    terms, out = einsum_dims(str(node.attrs["equation"]), ranks, partial(names, "e"))
    if any(len(set(dims)) < len(dims) for dims in terms):
        return whole_rule(node, "a diagonal")
    sizes = einsum_sizes(terms, shapes)
    ones = [
        dims_text("1" if s == 1 != sizes[d] else d for d, s in zip(of, shape, strict=True))
        for of, shape in zip(terms, shapes, strict=True)
    ]
    linear = tuple(frozenset({i}) for i in range(len(terms)))
    return einsum(
        node,
        f"{', '.join(ones)} -> {dims_text(out)}",
        sizes=sizes,
        linear=linear,
        # the kernel's transpose of an operand divides by the sizes of the dimensions
        nonempty=frozenset(sizes),
    )
