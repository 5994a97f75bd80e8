"""Reductions over axes: what is reduced and split leaves a pending sum, max, min or prod."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.rules.rule import (
    FIRST,
    Local,
    Lowering,
    Rule,
    constant,
    dims_text,
    dtype_of,
    einsum,
    given,
    is_float,
    names,
    numel,
    rule,
    tensor_shape,
    whole_rule,
)

_PENDING = {
    "ReduceSum": "sum",
    "ReduceL1": "sum",
    "ReduceSumSquare": "sum",
    "ReduceMean": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
}
"""The reduction that joins the results of parts; the others apply a function after theirs."""
_RANKED = "its elements are compared with each other"


def reduced_axes(node: gs.Node) -> list[int] | None:
    """The axes that a Reduce op reduces; None where only a run can tell."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    operand = given(node, 1)
    values = node.attrs.get("axes")
    if operand is not None:
        found = constant(operand)
        if found is None:
            return None
        values = found.reshape(-1).tolist()
    if not values:
        return [] if node.attrs.get("noop_with_empty_axes") else list(range(rank))
    return sorted({axis % rank for axis in values})


@rule(*_PENDING, "ReduceL2 ReduceLogSum ReduceLogSumExp")
def reduce_(node: gs.Node) -> Rule:
    """`a b c -> a 1 c`, b pending; a mean of parts counts by their sizes."""
    axes = reduced_axes(node)
    if axes is None:
        return whole_rule(node, "axes that only a run can tell")
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    gone = [dims[a] for a in axes]
    one = ["1"] if node.attrs.get("keepdims", 1) else []
    kept = [d for i, dim in enumerate(dims) for d in (one if i in axes else [dim])]
    text = f"{dims_text(dims)}{', _' * (len(node.inputs) - 1)} -> {dims_text(kept)}"
    is_linear = node.op == "ReduceSum" or (node.op == "ReduceMean" and is_float(node.outputs[0]))
    linear = (FIRST,) if is_linear else ()
    if not axes:
        return einsum(node, text)
    if node.op not in _PENDING or (node.op == "ReduceMean" and not is_linear):
        reason = "the reduction is not a sum, max, min or product of parts"
        return einsum(node, text, whole=dict.fromkeys(gone, reason))
    reduce = dict.fromkeys(gone, _PENDING[node.op])
    if node.op != "ReduceMean":
        return einsum(node, text, reduce=reduce, linear=linear)
    return einsum(
        node,
        text,
        reduce=reduce,
        linear=linear,
        lowered=frozenset(gone),
        lower=weighted_mean(gone, numel([(tensor_shape(node.inputs[0]) or ())[a] for a in axes])),
    )


def weighted_mean(factors: Sequence[str], total: int) -> Callable[[Lowering], None]:
    """Lowers a mean to the local mean times the rank's share of the `total` elements.

    The sum of these is the mean; unlike a sum of elements it does not overflow half precision.
    """

    def lower(build: Lowering) -> None:
        node = build.local.node
        dtype = dtype_of(node.outputs[0])
        assert dtype is not None

        def share(local: Local) -> np.ndarray[Any, Any]:
            return np.array(math.prod(map(local.size, factors)) / total, dtype)

        inputs = [build.input(i) for i in range(len(node.inputs))]
        mean = build.add(node.op, inputs, **node.attrs)
        build.finish("Mul", [mean, build.per_rank(share)])

    return lower


@rule("ArgMax ArgMin")
def arg_extremum(node: gs.Node) -> Rule:
    """`a b c -> a 1 c`, b whole: positions count from its start."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    axis = node.attrs.get("axis", 0) % len(dims)
    one = ["1"] if node.attrs.get("keepdims", 1) else []
    kept = [*dims[:axis], *one, *dims[axis + 1 :]]
    return einsum(node, f"{dims_text(dims)} -> {dims_text(kept)}", whole={dims[axis]: _RANKED})


@rule("TopK")
def top_k(node: gs.Node) -> Rule:
    """`a b c, _ -> a k c ; a k c`, b and k whole."""
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    axis = node.attrs.get("axis", -1) % len(dims)
    out = dims_text([*dims[:axis], "k", *dims[axis + 1 :]])
    rest = ", _" * (len(node.inputs) - 1)
    whole = {dims[axis]: _RANKED, "k": _RANKED}
    return einsum(node, f"{dims_text(dims)}{rest} -> {out}; {out}", whole=whole)


@rule("CumSum CumProd")
def cumulate(node: gs.Node) -> Rule:
    """`a b, _ -> a b`, b whole."""
    axis = constant(node.inputs[1])
    if axis is None:
        return whole_rule(node, "an axis that only a run can tell")
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    summed = dims[int(axis.reshape(-1)[0])]
    text = dims_text(dims)
    return einsum(
        node,
        f"{text}, _ -> {text}",
        whole={summed: "each element depends on those before it"},
        linear=(FIRST,) if node.op == "CumSum" else (),
    )
