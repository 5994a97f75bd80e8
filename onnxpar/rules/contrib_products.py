"""onnxruntime's own matrix products: fused, and packed by blocks."""

from __future__ import annotations

from typing import Any

import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.contraction import product_text
from onnxpar.rules.notation import dims_text
from onnxpar.rules.quantization import integer_product
from onnxpar.rules.rule import FIRST, Rule, einsum, given_specs, names, rule, whole_rule

DOMAIN = "com.microsoft"
_EITHER = (FIRST, frozenset({1}))
"""For `Rule.linear`: the product is linear in operand 0, and in operand 1."""
_PACKED = "its elements are packed in blocks"
_INTEGERS = 4
"""The accuracy level at which the kernel multiplies 8-bit integers."""


@rule("FusedMatMul TransposeMatMul", domain=DOMAIN)
def fused_matmul(node: gs.Node) -> Rule:
    """Sharding rule of FusedMatMul: the rule of MatMul, `b m k, b k n -> b m n`, where either
    matrix may be transposed."""
    if node.attrs.get("transBatchA") or node.attrs.get("transBatchB"):
        return whole_rule(node, "its batch dimensions are transposed")
    a = "k m" if node.attrs.get("transA") else "m k"
    b = "n k" if node.attrs.get("transB") else "k n"
    shapes = [tensor_shape(t) or () for t in (*node.inputs[:2], node.outputs[0])]
    left, right, out = product_text(shapes[0], shapes[1], shapes[2], a, b)
    return einsum(node, f"{left}, {right} -> {out}", linear=_EITHER)


@rule("MatMulInteger16", domain=DOMAIN)
def matmul_integer16(node: gs.Node) -> Rule:
    """Sharding rule of MatMulInteger16: `m k, k n -> m n`; sums have 32 bits."""
    shapes = [tensor_shape(t) or () for t in (*node.inputs, node.outputs[0])]
    left, right, out = product_text(shapes[0], shapes[1], shapes[2], "m k", "k n")
    return einsum(node, f"{left}, {right} -> {out}")


@rule("MatMulNBits", domain=DOMAIN)
def matmul_bits(node: gs.Node) -> Rule:
    """Sharding rule of MatMulNBits: `m (k z i), n (k z) w, n (k z), n k, n -> m n`: operand,
    weight, scales, zero points and bias. A block has i elements in w bytes, and z blocks share a
    byte of zero points.

    Older files store scales and zero points as vectors `(n k z)`. At accuracy level 4, the kernel
    also quantizes each block of the first operand, but only if the second operand is a stored
    weight. So at that level, the op is not linear in the first operand; and weights are never
    gathered, because a gathered weight is not stored.
    """
    if given(node, 4) is not None:
        return whole_rule(node, "its groups are given by index")
    block, width = node.attrs["block_size"], node.attrs["K"]
    points = given(node, 3)
    packed = points is not None and str(dtype_of(points)) == "uint8"
    shared = 8 // node.attrs.get("bits", 4) if packed else 1
    sizes: dict[str, Size] = {"n": node.attrs["N"], "i": block, "z": shared}
    whole = {
        "w": _PACKED,
        "i": "a block has a single scale",
        "z": "several zero points share a byte",
    }
    if width % (block * shared):
        columns, blocks, bytes_ = "c", "b", "y"
        sizes["y"] = -(-width // (block * shared))
        whole = dict.fromkeys("cbyw", "its last block is not full")
    else:
        columns, blocks, bytes_ = "(k z i)", "(k z)", "k"
        sizes["k"] = width // (block * shared)
    lead = names("m", len(tensor_shape(node.inputs[0]) or ()) - 1)
    operands = [dims_text([*lead, columns]), f"n {blocks} w", _rows(node, 2, blocks)]
    operands += [_rows(node, 3, bytes_ if packed else blocks), "_", "n"]
    used = given_specs(operands, node.inputs)
    bias = frozenset({5}) if given(node, 5) is not None else frozenset[int]()
    local: dict[str | int, Any] = {"N": lambda at: at.size("n")}
    if "k" in sizes:
        local["K"] = lambda at: at.size("k") * shared * block
    return einsum(
        node,
        f"{', '.join(used)} -> {dims_text([*lead, 'n'])}",
        sizes=sizes,
        whole={f: why for f, why in whole.items() if any(f in o for o in used)},
        linear=() if node.attrs.get("accuracy_level") == _INTEGERS else (FIRST | bias,),
        additive=bias,
        local=local,
        constants=frozenset((1, 2, 3)),
    )


def _rows(node: gs.Node, index: int, blocks: str) -> str:
    """Returns the dimensions of an operand of scales or zero points as text of a rule: `n k`, or
    `(n k)` for a vector. `blocks` is the text of the dimension of blocks."""
    tensor = given(node, index)
    rank = 0 if tensor is None else len(tensor_shape(tensor) or ())
    return f"n {blocks}" if rank > 1 else f"(n {blocks.strip('()')})"


@rule("QGemm", domain=DOMAIN)
def quantized_gemm(node: gs.Node) -> Rule:
    """Sharding rule of QGemm: `m k, (), (), k n, n, n, n, _, _ -> m n`: each matrix with its scale
    and zero point, then the bias; if k is split, ranks add 32-bit sums, and scale the total."""
    a = "k m" if node.attrs.get("transA") else "m k"
    b = "n k" if node.attrs.get("transB") else "k n"
    shapes = [() if given(node, i) is None else tensor_shape(node.inputs[i]) for i in range(9)]
    columns = [dims_text("1" if s == 1 else "n" for s in shapes[i] or ()) for i in (4, 5)]
    bias = shapes[6] or ()
    added = dims_text(
        "1" if s == 1 else d for d, s in zip("mn"[2 - len(bias) :], bias, strict=True)
    )
    operands = [a, "_", "_", b, *columns, added if given(node, 6) is not None else "_", "_", "_"]
    operands = operands[: len(node.inputs)]
    return einsum(node, f"{', '.join(operands)} -> m n", **integer_product("k"))
