"""onnxruntime's mixtures of experts, MoE and QMoE. The op sends each token to its best experts. On
a rank with some of the experts, nodes before the op compare the scores of all experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, dtype_of, given, tensor_shape
from onnxpar.rules.contrib_products import DOMAIN
from onnxpar.rules.indexing import SELECTED
from onnxpar.rules.lowering_interface import Lowering
from onnxpar.rules.notation import expr_vars
from onnxpar.rules.rule import Rule, einsum, given_specs, rule

_ROUTER_WEIGHTS = 14
EXPERT_WEIGHTS = {"MoE": (2, 4, 6), "QMoE": (2, 5, 8)}
"""The indices of the operands with the experts' matrices, by op."""
_SECOND_BIAS = {"MoE": 5, "QMoE": 7}
"""The index of the operand with the bias of the experts' second product, by op."""
_FUSED = {0: "f", 1: "(f z)", 2: "(z f)"}
"""The rows of an expert's first weight as text of a rule, by the attribute `swiglu_fusion`; z is
the pair of a gate and its value."""
_CHOSEN = "experts are chosen by all scores"
_GATED = "it holds a gate and its value"
_PACKED = "its elements share scales, or bytes of weights or of zero points"
_OLD = "its weights have an old layout"


@rule("MoE", domain=DOMAIN)
def experts(node: gs.Node) -> Rule:
    """Sharding rule of MoE: `t h, t r, e f h, e f, e h f, e h, e f h, e f -> t h`: tokens t, router
    scores of r experts, weights of e experts with f inner columns. Tokens may be split; if e or f
    is split, the result is a partial sum."""
    second = tensor_shape(node.inputs[4]) or ()
    if second[1] != _hidden(node):
        return _rule(node, *_stacks(node, range(2, 8), _OLD))
    rows = _FUSED[node.attrs.get("swiglu_fusion", 0)]
    weights = [f"e {rows} h", f"e {rows}", "e h f", "e h", "e f h", "e f"]
    return _rule(node, weights, {"f": second[2], "z": 2}, {"z": _GATED})


@rule("QMoE", domain=DOMAIN)
def quantized_experts(node: gs.Node) -> Rule:
    """Sharding rule of QMoE: `t h, t r, e (f i) _, ... -> t h`: like MoE, where i inner columns of
    an expert share a scale or a byte, so that they stay together. If weights are not integers, only
    tokens may be split."""
    if node.attrs.get("quant_type", "int") != "int":
        return _rule(node, ["_"] * 12, {}, {})
    block, fusion = node.attrs.get("block_size", 0), node.attrs.get("swiglu_fusion", 0)
    bits = _bits(node)
    second = tensor_shape(node.inputs[5]) or ()
    columns, unit = (second[2] or 1) * 8 // bits[1], _unit(node, block, bits)
    if 3 in bits or columns % unit or second[1] != _hidden(node):
        return _rule(node, *_stacks(node, range(2, 14), _PACKED))
    rows = {0: "(f i)", 1: "(f i z)", 2: "(z f i)"}
    of = {2: f"{rows[fusion]} p2", 4: rows[fusion], 5: "h (f p5)", 7: "h", 8: f"{rows[0]} p8"}
    of |= {10: rows[0], 3: rows[fusion], 6: "h", 9: rows[0], 12: "p12"}
    of |= {11: "(z f u)" if fusion == 2 else "(f u)", 13: "(f v)"}
    if block:
        of |= {i: f"{rows[fusion]} p{i}" for i in (3, 11)}
        of |= {i: f"{rows[0]} p{i}" for i in (9, 13)}
        of |= {6: "h (f p6)", 12: "h (f p12)"}
    sizes: dict[str, Size] = {"f": columns // unit, "i": unit, "z": 2}
    sizes |= {"p5": unit * bits[1] // 8, "u": unit * (1 + (fusion == 1)) * bits[0] // 8}
    sizes |= {"v": unit * bits[2] // 8}
    if block:
        sizes |= {"p6": unit // block, "p12": unit // block * bits[1] // 8}
    whole = {"i": _PACKED, "z": _GATED, "u": _PACKED, "v": _PACKED}
    whole |= {f"p{i}": _PACKED for i in range(14)}
    return _rule(node, [f"e {of[i]}" for i in range(2, 14)], sizes, whole)


def _bits(node: gs.Node) -> list[int]:
    """Returns the number of bits of an element of each of the three weights."""
    every = node.attrs.get("expert_weight_bits", 4)
    return [node.attrs.get(f"fc{i}_expert_weight_bits", every) for i in (1, 2, 3)]


def _unit(node: gs.Node, block: int, bits: Sequence[int]) -> int:
    """Returns how many inner columns of an expert must stay together, because they share a scale,
    or a byte of a weight or of zero points. With zero points, these are two blocks or more: the
    kernel reads the zero points of a single block in another layout.

    block  the number of columns that share a scale; 0: scales are not by blocks
    bits   the bits of an element of each weight
    """
    shared = max(2, 8 // bits[1]) if given(node, 12) is not None else 1
    if block:
        return block * shared
    packed = [8 // b for b, i in zip(bits, (11, 5, 13), strict=True) if given(node, i) is not None]
    return math.lcm(*packed)


def _hidden(node: gs.Node) -> Size:
    """The width of a token: the last size of operand 0."""
    return (tensor_shape(node.inputs[0]) or ())[-1]


def _stacks(
    node: gs.Node, indices: Sequence[int], reason: str
) -> tuple[list[str], dict[str, Size], dict[str, str]]:
    """For weights that may be split only by expert: returns (their dimensions as texts of a rule,
    sizes of factors, the reason for each factor that stays whole). `indices` are the indices of the
    operands."""
    dims: list[str] = []
    for i in indices:
        tensor = given(node, i)
        rank = 1 if tensor is None else len(tensor_shape(tensor) or ())
        dims.append(" ".join(["e", *(f"p{i}_{d}" for d in range(1, rank))]))
    return dims, {}, {d: reason for spec in dims for d in spec.split()[1:]}


def _rule(
    node: gs.Node, weights: Sequence[str], sizes: Mapping[str, Size], whole: Mapping[str, str]
) -> Rule:
    """Returns the rule of a MoE or QMoE.

    weights  the dimensions of the operands from the first weight on
    sizes    sizes of factors
    whole    factors that must not be split, with the reason
    """
    tokens = "b s" if len(tensor_shape(node.inputs[0]) or ()) == 3 else "t"
    router = f"({tokens}) r" if " " in tokens else f"{tokens} r"
    operands = [f"{tokens} h", router, *weights, router, *["_"] * 8][: len(node.inputs)]
    used = given_specs(operands, node.inputs)
    names = {name for spec in used for name in spec.replace("(", " ").replace(")", " ").split()}
    reasons = {"h": "it is contracted before an activation", "r": _CHOSEN, **whole}
    if node.attrs.get("use_sparse_mixer"):
        reasons["e"] = _CHOSEN
    split = [f for f in "ef" if f in names and f not in reasons]
    rule = einsum(
        node,
        f"{', '.join(used)} -> {tokens} h",
        sizes=sizes,
        whole={name: why for name, why in reasons.items() if name in names},
        reduce=dict.fromkeys(split, "sum"),
        lowered=frozenset(split),
        steps=2,
        constants=frozenset(range(2, 14)) if node.op == "QMoE" else frozenset(),
        products=partial(_products, _elements(node), node.attrs.get("k", 1), sizes.get("f")),
    )
    return rule.with_op(lower=partial(_lower, _columns(rule)))


def _elements(node: gs.Node) -> int:
    """Returns the number of elements of the matrices of one expert."""
    bits = [8] * 3 if node.op == "MoE" else _bits(node)
    weights = zip(EXPERT_WEIGHTS[node.op], bits, strict=True)
    shapes = [(tensor_shape(t), b) for i, b in weights if (t := given(node, i)) is not None]
    return sum(math.prod(s or 1 for s in (shape or ())[1:]) * 8 // b for shape, b in shapes)


def _products(elements: int, best: int, columns: Size, sizes: Mapping[str, Size]) -> int:
    """Returns the number of multiplications on a rank whose shards have these `sizes` of factors,
    if all experts get equally many tokens.

    elements  the elements of one expert's matrices
    best      the number of experts for each token
    columns   the global number of inner columns of an expert
    """
    tokens = math.prod(sizes[f] or 1 for f in "tbs" if f in sizes)
    experts, of = (sizes.get(f) or 1 for f in "er")
    inner, all_inner = (sizes.get("f") or 1, columns or 1) if "f" in sizes else (1, 1)
    return tokens * best * elements * experts * inner // (of * all_inner)


def _columns(rule: Rule) -> dict[int, tuple[int, int]]:
    """Returns {operand: (dimension, elements for one column)} for the operands with a dimension of
    inner columns f: a weight with rows (f i) has i elements for each f."""
    columns = {}
    for i, spec in enumerate(rule.inputs):
        for axis, expr in enumerate(spec or ()):
            names = list(expr_vars(expr))
            if "f" in names:
                columns[i] = axis, math.prod(rule.sizes[n] or 1 for n in names if n != "f")
    return columns


def _lower(columns: Mapping[int, tuple[int, int]], low: Lowering) -> None:
    """Adds the nodes with which a rank computes its experts and columns. If ranks share the columns
    of an expert, only one of them adds the bias. `columns` is a result of `_columns`."""
    node = low.local.node
    inputs = [low.input(i) for i in range(len(node.inputs))]
    for i, (axis, count) in columns.items():
        inputs[i] = low.filled(inputs[i], "f", axis, count=count)
    bias = _SECOND_BIAS[node.op]
    if columns and low.local.is_split("f") and given(node, bias) is not None:
        is_first = low.per_rank(lambda local: np.array(local.member("f") == 0))
        inputs[bias] = _where(low, is_first, inputs[bias])
    attrs = {**node.attrs, "domain": DOMAIN}
    if not low.local.is_split("e"):
        low.finish(node.op, inputs, **attrs)
        return
    most = node.attrs.get("k", 1)
    attrs["k"] = lambda local: min(most, local.size("e"))
    attrs["normalize_routing_weights"] = 0
    shares = _shares(low)
    to = onnx.helper.np_dtype_to_tensor_dtype(dtype_of(node.inputs[0]))
    if node.op == "QMoE":
        inputs += [gs.Variable.empty()] * (_ROUTER_WEIGHTS + 1 - len(inputs))
        inputs[1] = inputs[_ROUTER_WEIGHTS] = _cast(low, shares, to)
        low.finish(node.op, inputs, **attrs)
        return
    inputs[1] = _cast(low, low.add("Log", [shares]), to)
    x = inputs[0]
    y = low.make(node.op, inputs, (x.dtype, low.shape(x)), **attrs)
    total = low.add("ReduceSum", [shares], axes=[1], keepdims=1)
    if len(low.shape(x)) == 3:
        lead = low.add("Slice", [low.add("Shape", [x]), *map(_ints, (0, 2))])
        rows = low.add("Concat", [lead, _ints(1)], axis=0)
        total = low.make("Reshape", [total, rows], (total.dtype, [*low.shape(x)[:2], 1]))
    total = _cast(low, total, to)
    zero = np.zeros((), dtype_of(x))
    has_any = low.add("Greater", [total, zero])
    low.finish("Where", [has_any, low.add("Mul", [y, total]), zero])


def _shares(low: Lowering) -> gs.Tensor:
    """Returns the weight of each of the rank's experts in each token's result, [token, expert] in
    float32; zero if the token did not choose the expert.

    As in the kernels, among equal scores, the expert with the higher index comes first.
    """
    node = low.local.node
    scores = _cast(low, low.input(1), onnx.TensorProto.FLOAT)
    count = (tensor_shape(node.inputs[1]) or ())[1] or 1
    backwards = low.add("Gather", [scores, np.arange(count)[::-1].copy()], axis=1)
    best = _ints(node.attrs.get("k", 1))
    values, places = low.add_each("TopK", [backwards, best], 2, axis=1)
    chosen = low.add("Sub", [_ints(count - 1), places])
    normalizes = bool(node.attrs.get("normalize_routing_weights"))
    if given(node, _ROUTER_WEIGHTS) is not None:
        given_weights = _cast(low, low.input(_ROUTER_WEIGHTS), onnx.TensorProto.FLOAT)
        shares = low.add("GatherElements", [given_weights, chosen], axis=1)
        if normalizes:
            total = low.add("ReduceSum", [shares], axes=[1], keepdims=1)
            none = np.zeros((), np.float32)
            divided = low.add("Div", [shares, total])
            shares = low.add("Where", [low.add("Equal", [total, none]), none, divided])
    elif normalizes or node.op == "QMoE":
        shares = low.add("Softmax", [values], axis=1)
    else:
        everyone = low.add("Softmax", [scores], axis=1)
        shares = low.add("GatherElements", [everyone, chosen], axis=1)
    indices = low.per_rank(lambda local: local.positions("e").reshape(1, -1, 1))
    is_chosen = low.add("Equal", [low.add("Unsqueeze", [chosen], axes=[1]), indices])
    spread = low.add("Unsqueeze", [shares], axes=[1])
    weights = low.add("Where", [is_chosen, spread, np.zeros((), np.float32)])
    return low.add("ReduceSum", [weights], axes=[2], keepdims=0)


def _where(low: Lowering, condition: gs.Tensor, x: gs.Tensor) -> gs.Tensor:
    """Returns `x` where the condition is True, zeros elsewhere; also for types that Where does not
    take."""
    dtype = dtype_of(x)
    if str(dtype) in SELECTED:
        return low.add("Where", [condition, x, np.zeros((), dtype)])
    wide = _cast(low, x, onnx.TensorProto.FLOAT)
    selected = low.add("Where", [condition, wide, np.zeros((), np.float32)])
    return _cast(low, selected, onnx.helper.np_dtype_to_tensor_dtype(dtype))


def _cast(low: Lowering, x: gs.Tensor, to: int) -> gs.Tensor:
    """Casts `x` to ONNX's element type `to`, unless it has that type."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(to)
    return x if dtype_of(x) == dtype else low.add("Cast", [x], to=to)


def _ints(value: int) -> Any:
    """`value` as an int64 array with one element."""
    return np.array([value], np.int64)
