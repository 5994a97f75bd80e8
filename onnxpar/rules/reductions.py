"""Rules of reductions over axes. If a reduced factor is split, the result is a partial sum, max,
min or product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import Size, constant, dtype_of, given, is_float, tensor_shape
from onnxpar.rules.communicate import (
    communicating,
    finish,
    is_short_float,
    like,
    number,
    total,
    widen,
)
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import FIRST, Local, Lowering, Rule, einsum, names, rule, whole_rule

_REDUCTIONS = {
    "ReduceSum": "sum",
    "ReduceL1": "sum",
    "ReduceSumSquare": "sum",
    "ReduceMean": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceProd": "prod",
}
"""How the results of shards are combined, by op. All other Reduce ops apply a function after their
reduction, so ranks must communicate before it."""
_ROUNDED = "onnxruntime reduces integers as floats, and rounds or saturates the result"
_TOTALS = "the totals of shards would be reduced as floats, which round integers"


def reduced_axes(node: gs.Node) -> list[int] | None:
    """Returns the axes that a Reduce op reduces, ascending; None if they are data-dependent."""
    rank = len(tensor_shape(node.inputs[0]) or ())
    operand, values = given(node, 1), None
    if operand is not None:
        stored = constant(operand)
        if stored is None:
            return None
        values = stored.reshape(-1).tolist()
    if not values:
        return [] if node.attrs.get("noop_with_empty_axes") else list(range(rank))
    return sorted({axis % rank for axis in values})


@rule(*_REDUCTIONS, "ReduceL2 ReduceLogSum ReduceLogSumExp")
def reduce_(node: gs.Node) -> Rule:
    """Sharding rule of the Reduce ops: `a b c -> a 1 c`; if b is split, the result is partial, or,
    for ops that end with a function of the sum, the ranks communicate. A mean is the sum of the
    shards' means, weighted by size."""
    axes = reduced_axes(node)
    if axes is None:
        return whole_rule(node, "data-dependent axes")
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    gone = [dims[a] for a in axes]
    one = ["1"] if node.attrs.get("keepdims", 1) else []
    out = [d for i, dim in enumerate(dims) for d in (one if i in axes else [dim])]
    text = f"{dims_text(dims)}{', _' * (len(node.inputs) - 1)} -> {dims_text(out)}"
    is_exact = is_float(node.inputs[0]) or node.op in ("ReduceMax", "ReduceMin")
    linear = (FIRST,) if is_exact and node.op in ("ReduceSum", "ReduceMean") else ()
    if not axes:
        return einsum(node, text)
    if not is_exact:
        return einsum(node, text, whole=dict.fromkeys(gone, _ROUNDED))
    sizes = [(tensor_shape(node.inputs[0]) or ())[a] for a in axes]
    # an operand with the axes becomes a constant, so that shapes do not depend on its layout
    operands = [np.array(axes)] if len(node.inputs) > 1 else []
    if node.op not in _REDUCTIONS:
        return einsum(node, text, **communicating(node, gone, (), _LOWERINGS[node.op](axes, gone)))
    reduce = dict.fromkeys(gone, _REDUCTIONS[node.op])
    if node.op != "ReduceMean":
        lowering: dict[str, Any] = {}
        if dtype_of(node.inputs[0]) == np.bool_:
            lowering = {"lowered": frozenset(gone), "lower": _lower_booleans(operands)}
        return einsum(node, text, reduce=reduce, linear=linear, **lowering)
    return einsum(
        node,
        text,
        reduce=reduce,
        linear=linear,
        lowered=frozenset(gone),
        lower=weighted_mean(dict(zip(gone, sizes, strict=True)), operands),
    )


def _lower_booleans(operands: Sequence[Any]) -> Callable[[Lowering], None]:
    """Returns a lowering that computes a min or max of booleans as integers: onnxruntime's kernel
    for booleans does not accept empty tensors, its kernel for integers does. `operands` are all
    operands except the first."""

    def lower(build: Lowering) -> None:
        node = build.local.node
        numbers = build.add("Cast", [build.input(0)], to=onnx.TensorProto.UINT8)
        reduced = build.add(node.op, [numbers, *operands], **node.attrs)
        build.finish("Cast", [reduced], to=onnx.TensorProto.BOOL)

    return lower


def _finish_reduced(build: Lowering, op: str, inputs: Sequence[Any], axes: Sequence[int]) -> None:
    """Makes the result of the node by `op`, and removes the reduced axes unless the node has
    `keepdims`."""
    if build.local.node.attrs.get("keepdims", 1):
        finish(build, op, inputs)
    else:
        finish(build, "Squeeze", [build.add(op, inputs)], axes=[*axes])


def _lower_norm(axes: Sequence[int], factors: Sequence[str]) -> Callable[[Lowering], None]:
    """Returns a lowering of ReduceL2: the square root of the sum of squares across all shards.
    `factors` are the factors of the dimensions `axes`."""

    def lower(build: Lowering) -> None:
        x = widen(build, build.input(0))
        whole = total(build, build.add("Mul", [x, x]), axes, factors)
        _finish_reduced(build, "Sqrt", [whole], axes)

    return lower


def _lower_log(axes: Sequence[int], factors: Sequence[str]) -> Callable[[Lowering], None]:
    """Returns a lowering of ReduceLogSum: the logarithm of the sum across all shards."""

    def lower(build: Lowering) -> None:
        whole = total(build, widen(build, build.input(0)), axes, factors)
        _finish_reduced(build, "Log", [whole], axes)

    return lower


def _lower_log_exp(axes: Sequence[int], factors: Sequence[str]) -> Callable[[Lowering], None]:
    """Returns a lowering of ReduceLogSumExp: the logarithm of the sum of exponentials across all
    shards. If the largest element is finite, it is subtracted before, and added after."""

    def lower(build: Lowering) -> None:
        x = widen(build, build.input(0))
        largest = build.add("ReduceMax", [x], axes=[*axes], keepdims=1)
        largest = build.all_reduce(largest, factors, "max")
        size = build.add("Abs", [largest])
        is_finite = build.add("Less", [size, like(x, np.inf)])
        largest = build.add("Where", [is_finite, largest, like(x, 0)])
        powers = build.add("Exp", [build.add("Sub", [x, largest])])
        log = build.add("Log", [total(build, powers, axes, factors)])
        _finish_reduced(build, "Add", [log, largest], axes)

    return lower


_LOWERINGS = {
    "ReduceL2": _lower_norm,
    "ReduceLogSum": _lower_log,
    "ReduceLogSumExp": _lower_log_exp,
}


def weighted_mean(
    sizes: Mapping[str, Size], operands: Sequence[Any] = ()
) -> Callable[[Lowering], None]:
    """Returns a lowering of a mean to the rank's mean times the rank's share of the elements, so
    that ranks add their results: for shards of 2 and 1 elements, mean0 * 2/3 and mean1 * 1/3.

    sizes     the global sizes of the reduced factors; one of data-dependent size must be whole
    operands  all operands except the first

    Unlike a sum of elements, this does not overflow in half precision.
    """

    def lower(build: Lowering) -> None:
        node = build.local.node
        finish_share(build, build.add(node.op, [build.input(0), *operands], **node.attrs), sizes)

    return lower


def finish_share(build: Lowering, mean: gs.Tensor, sizes: Mapping[str, Size]) -> None:
    """Makes the result of a mean, as a partial sum: `mean`, the mean of the rank's shard, times the
    rank's share of the elements. `sizes` are the global sizes of the reduced factors."""
    dtype = np.float64 if dtype_of(build.local.node.outputs[0]) == np.float64 else np.float32
    totals = {f: s for f, s in sizes.items() if s is not None}
    count = number(build, lambda local: math.prod(map(local.size, totals)), dtype)
    total_count = number(build, math.prod(totals.values()), dtype)
    # onnxruntime's mean of nothing is 0
    share = build.add("Div", [count, build.add("Max", [total_count, np.ones((), dtype)])])
    if is_short_float(mean):
        share = build.add("Cast", [share], to=is_short_float(mean))
    build.finish("Mul", [mean, share])


@rule("CumSum CumProd")
def cumulate(node: gs.Node) -> Rule:
    """Sharding rule of CumSum, CumProd: `a b, _ -> a b`; if b is split, the ranks gather the totals
    of their shards, and each rank continues from the total of all earlier shards."""
    operand = constant(node.inputs[1])
    dims = names("d", len(tensor_shape(node.inputs[0]) or ()))
    if operand is None and len(dims) == 1:
        operand = np.zeros(1, np.int64)  # there is only one axis
    if operand is None:
        return whole_rule(node, "a data-dependent axis")
    axis = int(operand.reshape(-1)[0]) % len(dims)
    factor, text, attrs = dims[axis], dims_text(dims), dict(node.attrs)
    linear = (FIRST,) if node.op == "CumSum" else ()
    if not is_float(node.inputs[0]):
        return einsum(node, f"{text}, _ -> {text}", linear=linear, whole={factor: _TOTALS})
    reduce, join = ("ReduceSum", "Add") if node.op == "CumSum" else ("ReduceProd", "Mul")

    def before(local: Local) -> np.ndarray[Any, Any]:
        return np.array([local.member(factor) + 1 if attrs.get("reverse") else 0], np.int64)

    def after(local: Local) -> np.ndarray[Any, Any]:
        end = np.iinfo(np.int64).max if attrs.get("reverse") else local.member(factor)
        return np.array([end], np.int64)

    def lower(build: Lowering) -> None:
        x = build.input(0)
        within = build.add(node.op, [x, np.array(axis, np.int64)], **attrs)
        part = build.add(reduce, [x], axes=[axis], keepdims=1)
        totals = build.all_gather(part, factor, axis, lambda _: 1)
        bounds = [build.per_rank(before), build.per_rank(after)]
        preceding = build.add("Slice", [totals, *bounds, np.array([axis], np.int64)])
        start = build.add(reduce, [preceding], axes=[axis], keepdims=1)
        build.finish(join, [within, start])

    return einsum(
        node,
        f"{text}, _ -> {text}",
        contiguous=frozenset({factor}),
        linear=linear,
        **communicating(node, [factor], (), lower),
    )
