"""Rules of ops that compare all elements along an axis: ArgMax, ArgMin, Hardmax and TopK."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, dtype_of, is_float, tensor_shape
from onnxpar.layout.layout import ReduceOp, neutral
from onnxpar.rules.communicate import communicating, global_positions, held_positions, like, widen
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, names, rule

_COMPARED = "its elements are compared with each other"
_COMPARABLE = ("float32", "float64", "int32", "int64")


def extreme_position(
    build: Lowering, axis: int, factor: str, extent: int, largest: bool = True, last: bool = False
) -> gs.Tensor:
    """Returns the global position, along a factor of operand 0, of the largest element across all
    shards (without `largest`: the smallest). Of equal elements, the first counts (with `last`: the
    last).

    axis    the factor's dimension, which keeps one element
    factor  the factor, which may be split
    extent  the factor's global size

    As in onnxruntime, a NaN counts only if it is the first element.
    """
    x = _without_nan(build, widen(build, build.input(0)), axis, factor, largest)
    reduce: ReduceOp = "max" if largest else "min"
    x = build.filled(x, factor, axis, neutral(reduce, np.dtype(dtype_of(x))))
    attrs = {"select_last_index": 1} if last else {}
    index = build.add("ArgMax" if largest else "ArgMin", [x], axis=axis, keepdims=1, **attrs)
    best = build.add("ReduceMax" if largest else "ReduceMin", [x], axes=[axis], keepdims=1)
    if str(dtype_of(best)) not in _COMPARABLE:
        best = build.add("Cast", [best], to=onnx.TensorProto.INT32)
    is_best = build.add("Equal", [best, build.all_reduce(best, [factor], reduce)])
    if build.local.may_be_empty(factor):
        is_best = build.add("And", [is_best, _holds(build, factor)])
    none = np.array(-1 if last else extent, np.int64)
    position = build.add("Where", [is_best, global_positions(build, index, factor), none])
    return build.all_reduce(position, [factor], "max" if last else "min")


def _holds(build: Lowering, factor: str) -> gs.Tensor:
    """Returns a boolean scalar: True on ranks whose shard of the factor is not empty."""
    size = build.per_rank(lambda local: np.array(local.size(factor), np.int64))
    return build.add("Greater", [size, np.array(0, np.int64)])


def _without_nan(build: Lowering, x: gs.Tensor, axis: int, factor: str, largest: bool) -> gs.Tensor:
    """Returns `x` with infinities in place of NaNs, so that comparisons give onnxruntime's result:
    a NaN in the first element along `axis` wins every comparison, any other wins none."""
    if not is_float(x):
        return x
    greatest = np.inf if largest else -np.inf
    at = held_positions(build, factor, axis, len(x.shape))
    is_first = build.add("Equal", [at, np.array(0, np.int64)])
    stand_in = build.add("Where", [is_first, like(x, greatest), like(x, -greatest)])
    return build.add("Where", [build.add("IsNaN", [x]), stand_in, x])


@rule("ArgMax ArgMin")
def arg_extremum(node: gs.Node) -> Rule:
    """Sharding rule of ArgMax, ArgMin: `a b c -> a 1 c`; if b is split, ranks reduce the extreme
    element, then its position."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    axis = node.attrs.get("axis", 0) % len(dims)
    keeps = bool(node.attrs.get("keepdims", 1))
    out = [*dims[:axis], *(["1"] if keeps else []), *dims[axis + 1 :]]
    largest, last = node.op == "ArgMax", bool(node.attrs.get("select_last_index", 0))

    def lower(build: Lowering) -> None:
        position = extreme_position(build, axis, dims[axis], shape[axis] or 0, largest, last)
        if keeps:
            build.finish("Identity", [position])
        else:
            build.finish("Squeeze", [position], axes=[axis])

    fields = communicating(node, [dims[axis]], [shape[axis]], lower)
    return einsum(node, f"{dims_text(dims)} -> {dims_text(out)}", **fields)


@rule("Hardmax")
def hardmax(node: gs.Node) -> Rule:
    """Sharding rule of Hardmax: `d0 d1 -> d0 d1`; if the op's axis is split, ranks find the largest
    element's position together. As in onnxruntime, the result is 0 everywhere if the first element
    is a NaN."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    text = dims_text(dims)
    axis = node.attrs.get("axis", -1) % max(len(dims), 1)

    def lower(build: Lowering) -> None:
        dtype = onnx.helper.np_dtype_to_tensor_dtype(dtype_of(build.local.node.outputs[0]))
        position = extreme_position(build, axis, dims[axis], shape[axis] or 0)
        at = held_positions(build, dims[axis], axis, len(dims))
        is_number = build.add("Not", [build.add("IsNaN", [build.input(0)])])
        chosen = build.add("And", [build.add("Equal", [at, position]), is_number])
        build.finish("Cast", [chosen], to=dtype)

    return einsum(
        node,
        f"{text} -> {text}",
        **communicating(node, [dims[axis]], [shape[axis]], lower),
    )


@rule("TopK")
def top_k(node: gs.Node) -> Rule:
    """Sharding rule of TopK: `a b c, _ -> a k c ; a k c`; if b is split, the ranks gather the k
    best elements of each shard, and choose among them."""
    shape = tensor_shape(node.inputs[0]) or ()
    dims = names("d", len(shape))
    axis = node.attrs.get("axis", -1) % len(dims)
    factor = dims[axis]
    out = dims_text([*dims[:axis], "k", *dims[axis + 1 :]])
    text = f"{dims_text(dims)}{', _' * (len(node.inputs) - 1)} -> {out}; {out}"
    whole = {"k": "its elements are sorted"}
    operand = constant(node.inputs[1])
    if operand is None:
        return einsum(node, text, whole=whole | {factor: "a data-dependent k"})
    k = int(operand.reshape(-1)[0])
    attrs = {key: node.attrs[key] for key in ("largest",) if key in node.attrs}

    def offered(local: Local) -> int:
        return min(k, local.size(factor))

    def best(build: Lowering, x: gs.Tensor, most: int, count: Any) -> list[gs.Variable]:
        shape = [*build.shape(x)]
        shape[axis] = most
        types = [(x.dtype, shape), (np.dtype(np.int64), shape)]
        return build.make_each("TopK", [x, count], types, axis=axis, **attrs)

    def lower(build: Lowering) -> None:
        most = np.array([k], np.int64)
        if build.is_open(factor):  # no sample shows that shards may be smaller than k
            size = build.per_rank(lambda local: np.array([local.size(factor)], np.int64))
            count = build.add("Where", [build.add("Less", [size, most]), size, most])
        else:
            count = build.per_rank(lambda local: np.array([offered(local)], np.int64))
        own, index = best(build, build.input(0), offered(build.local), count)
        index = global_positions(build, index, factor)
        values = build.all_gather(own, factor, axis, offered)
        places = build.all_gather(index, factor, axis, offered)
        result, chosen = best(build, values, k, most)
        build.finish("Identity", [result])
        if build.local.node.outputs[1].name:
            build.finish("GatherElements", [places, chosen], 1, axis=axis)

    fields = communicating(node, [factor], [shape[axis]], lower)
    fields["whole"] = {**whole, **fields.get("whole", {})}
    return einsum(node, text, contiguous=frozenset({factor}), **fields)
