"""Ops of ai.onnx.ml that prepare features, most of them element by element.

Strings are whole on every rank. An op that turns strings into numbers computes only the rank's
shard of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import ML
from onnxpar.graph.tensors import dtype_of, tensor_shape
from onnxpar.rules.communicate import FLOAT, communicating, like
from onnxpar.rules.ml_labels import in_order, matrix
from onnxpar.rules.notation import dims_text
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, names, rule, whole_op, whole_rule

STRINGS = "collectives cannot send strings"

whole_op("CastMap DictVectorizer", "a map is a single row", ML)


def _is_text(tensor: gs.Tensor) -> bool:
    """True for a tensor of strings."""
    return str(dtype_of(tensor)) == "object"


def _dims(tensor: gs.Tensor, prefix: str = "d") -> list[str] | None:
    """Returns names of factors, one for each dimension; None if the number of dimensions is
    unknown."""
    shape = tensor_shape(tensor)
    return None if shape is None else names(prefix, len(shape))


def _own_text(build: Lowering, dims: Sequence[str]) -> gs.Tensor:
    """Slices the strings of the rank's shard out of operand 0, which every rank has whole; `dims`
    are its factors.

    This needs a Slice: in onnxruntime 1.32, a Gather of rows of strings returns only the first
    string of each row.
    """
    x, shape = build.input(0), list(build.local.output_shape())[: len(dims)]
    for axis, factor in enumerate(dims):
        if build.local.is_split(factor):
            ends = [build.per_rank(partial(_bound, factor, end)) for end in (0, 1)]
            x = build.make("Slice", [x, *ends, np.array([axis])], (np.dtype(object), shape))
    return x


def _bound(factor: str, end: int, local: Local) -> Any:
    """The start (`end` = 0) or the end (1) of the rank's shard of a factor, as an array."""
    return np.array([local.interval(factor)[end]], np.int64)


@rule("Binarizer", domain=ML)
def binarizer(node: gs.Node) -> Rule:
    """Sharding rule of Binarizer: `d0 d1 -> d0 d1`, element by element."""
    text = dims_text(_dims(node.inputs[0]) or ())
    return einsum(node, f"{text} -> {text}")


@rule("Imputer Scaler", domain=ML)
def per_feature(node: gs.Node) -> Rule:
    """Sharding rule of Imputer, Scaler: `d0 d1 -> d0 d1`; a rank gets the elements of list
    attributes for its features."""
    dims = _dims(node.inputs[0]) or []
    text = dims_text(dims)
    at = dims[-1:] if len(dims) < 2 else dims[1:2]
    keys = ("imputed_value_floats", "imputed_value_int64s", "offset", "scale")
    lists = {k: v for k, v in node.attrs.items() if k in keys and len(v) > 1}

    def own(values: Sequence[Any]) -> Callable[[Local], Any]:
        return lambda local: [values[i] for i in local.positions(at[0]).tolist()] or [values[0]]

    return einsum(node, f"{text} -> {text}", local={k: own(v) for k, v in lists.items()})


@rule("Normalizer", domain=ML)
def normalizer(node: gs.Node) -> Rule:
    """Sharding rule of Normalizer: `n f -> n f`; if the features f of a row are split, the ranks
    reduce the norm."""
    dims = _dims(node.inputs[0]) or []
    text, factor = dims_text(dims), dims[-1:]
    norm = node.attrs.get("norm", "MAX")
    norm = norm.decode() if isinstance(norm, bytes) else norm
    if len(dims) != 2:
        return einsum(node, f"{text} -> {text}", whole=dict.fromkeys(dims, "it is a single row"))

    def lower(build: Lowering) -> None:
        x = build.add("Cast", [build.input(0)], to=FLOAT)
        if norm == "MAX":
            largest = build.add("ReduceMax", [x], axes=[1], keepdims=1)
            size: gs.Tensor = build.all_reduce(largest, factor, "max")
        else:
            sizes = build.add("Abs", [x]) if norm == "L1" else build.add("Mul", [x, x])
            size = build.all_reduce(build.add("ReduceSum", [sizes], axes=[1], keepdims=1), factor)
            size = size if norm == "L1" else build.add("Sqrt", [size])
        is_zero = build.add("Equal", [size, like(x, 0)])
        build.finish("Div", [x, build.add("Where", [is_zero, like(x, 1), size])])

    return einsum(node, f"{text} -> {text}", **communicating(node, factor, (), lower))


@rule("LabelEncoder CategoryMapper", domain=ML, ranks_known=False)
def encoder(node: gs.Node) -> Rule:
    """Sharding rule of LabelEncoder, CategoryMapper: `d0 d1 -> d0 d1`; from strings, `_ -> d0 d1`;
    with a result of strings, all stays whole."""
    (x,), (y,) = node.inputs, node.outputs
    if _is_text(y) or tensor_shape(y) is None:
        return whole_rule(node, STRINGS)
    dims = _dims(y) or []
    text = dims_text(dims)
    if _is_text(x):
        return einsum(node, f"_ -> {text}", **_of_own_text(node, dims))
    return einsum(node, f"{text} -> {text}")


def _of_own_text(node: gs.Node, dims: list[str]) -> dict[str, Any]:
    """Returns the fields of a rule for an op from strings to numbers: every rank has all strings,
    and takes the strings for its shard of the result, whose factors are `dims`."""
    op, attrs = node.op, dict(node.attrs)

    def lower(build: Lowering) -> None:
        build.finish(op, [_own_text(build, dims)], domain=ML, **attrs)

    return {"lowered": frozenset(dims), "lower": lower, "contiguous": frozenset(dims)}


@rule("OneHotEncoder", domain=ML, ranks_known=False)
def one_hot(node: gs.Node) -> Rule:
    """Sharding rule of OneHotEncoder: `d0 d1 -> d0 d1 c`, with c categories; from strings,
    `_ -> d0 d1 c`."""
    (x,), shape = node.inputs, tensor_shape(node.outputs[0])
    if shape is None:
        return whole_rule(node, "an operand of unknown rank")
    dims = names("d", len(shape) - 1)
    text = dims_text(dims)
    key = "cats_strings" if _is_text(x) else "cats_int64s"
    categories = list(node.attrs.get(key, ()))
    # without `zeros`, the op refuses unknown values; a shard of the categories cannot detect them
    is_lenient = bool(node.attrs.get("zeros", 1))
    whole = (
        {} if is_lenient and categories else {"c": "every value must be in one of all categories"}
    )
    local: dict[str | int, Callable[[Local], Any]] = {
        key: lambda local: [categories[i] for i in local.positions("c").tolist()]
    }
    if not _is_text(x):
        return einsum(node, f"{text} -> {text} c", whole=whole, local={} if whole else local)
    attrs = dict(node.attrs)

    def lower(build: Lowering) -> None:
        new = {**attrs, **({} if whole else local)}
        build.finish("OneHotEncoder", [_own_text(build, dims)], domain=ML, **new)

    lowered = frozenset({*dims, *([] if whole else ["c"])})
    return einsum(
        node,
        f"_ -> {text} c",
        whole=whole,
        lowered=lowered,
        lower=lower,
        contiguous=frozenset(dims),
    )


@rule("FeatureVectorizer", domain=ML)
def feature_vectorizer(node: gs.Node) -> Rule:
    """Sharding rule of FeatureVectorizer: `n s0, n s1 -> n s0 + s1`: replaced by Cast and Concat,
    because onnxruntime's kernel aborts the process on an empty tensor."""
    if not all(map(matrix, node.inputs)):
        return whole_rule(node, "it joins single values")
    parts = names("s", len(node.inputs))
    dimensions = list(node.attrs.get("inputdimensions", ()))
    if dimensions and dimensions != [(tensor_shape(t) or (0, 0))[1] for t in node.inputs]:
        return whole_rule(node, "it takes only some of the features")

    def lower(build: Lowering) -> None:
        casts = [build.add("Cast", [build.input(i)], to=FLOAT) for i in range(len(parts))]
        build.finish("Concat", casts, axis=1)

    text = ", ".join(f"n {s}" for s in parts)
    lowered = frozenset({"n", *parts})
    return einsum(node, f"{text} -> n {' + '.join(parts)}", lowered=lowered, lower=lower)


@rule("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(node: gs.Node) -> Rule:
    """Sharding rule of ArrayFeatureExtractor: `n f, 1 m -> n m`; the features f must stay whole."""
    x, index = (_dims(t) or [] for t in node.inputs)
    if not x or not index:
        return whole_rule(node, "a single value")
    rows, chosen = names("d", len(x) - 1), names("i", len(index))
    last = chosen[0] if len(chosen) == 1 else f"({' '.join(chosen)})"
    result = f"{dims_text(rows)} {last}" if rows else f"1 {last}"
    whole = {"f": "it is looked up by index"}
    return einsum(node, f"{' '.join([*rows, 'f'])}, {dims_text(chosen)} -> {result}", whole=whole)


def _size(factor: str, local: Local) -> int:
    """Returns the size of the rank's shard of a factor; the factor comes first so that
    `functools.partial` can fix it."""
    return local.size(factor)


@rule("ZipMap", domain=ML, ranks_known=False)
def zip_map(node: gs.Node) -> Rule:
    """Sharding rule of ZipMap: `n c -> _ {communicating: n c}`: ranks gather all rows, and each
    computes the maps of all of them."""
    dims = _dims(node.inputs[0])
    if dims is None:
        return whole_rule(node, "an operand of unknown rank")
    attrs = dict(node.attrs)

    def lower(build: Lowering) -> None:
        x = build.input(0)
        for axis, factor in enumerate(dims):
            x = build.all_gather(x, factor, axis, partial(_size, factor))
            x = in_order(build, x, factor, axis)
        build.finish("ZipMap", [x], domain=ML, **attrs)

    sizes = tensor_shape(node.inputs[0]) or ()
    return einsum(node, f"{dims_text(dims)} -> _", **communicating(node, dims, sizes, lower))
