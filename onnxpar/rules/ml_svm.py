"""Rules of the SVMs of ai.onnx.ml: split by rows, and by support vectors, whose terms are
summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import AT, ML, has_attribute_weights, numbers
from onnxpar.rules.ml_labels import classify, has_text_labels, labels_of, matrix, row_fields
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, rule, whole_rule

STORED = frozenset({AT})
_FEATURES = "a kernel compares all features of a row"
_ONE = "a row of the attributes is a support vector"
_DOUBLE = onnx.TensorProto.DOUBLE
Array = np.ndarray[Any, Any]


def _vectors(attrs: Mapping[str, Any], count: int) -> Array:
    """The support vectors among the attributes, [count, features]."""
    return numbers(attrs["support_vectors"]).reshape(count, -1)


@rule("SVMRegressor", domain=ML)
def svm_regressor(node: gs.Node) -> Rule:
    """Sharding rule of SVMRegressor: `n f, s _ -> n 1 {sum: s}`: each rank adds the terms of its
    support vectors s. These are attributes; an operand without data stands for them
    (`graph/attribute_weights.py`). With `one_class`, ranks add their sums before the test for
    outliers."""
    if not matrix(node.inputs[0]):
        return whole_rule(node, "a single row")
    whole = {"f": _FEATURES}
    if not has_attribute_weights(node):
        return einsum(node, "n f -> n 1", whole=whole)
    text, whole["b"] = "n f, s b -> n 1", _ONE
    attrs = dict(node.attrs)
    count = int(attrs["n_supports"])
    vectors, factors = _vectors(attrs, count), numbers(attrs["coefficients"])

    def held(local: Local) -> Array:
        """Returns the indices of the rank's vectors. A rank without vectors gets vector 0, with
        coefficient 0: without any vector, the op would compute another function."""
        indices = local.positions("s")
        return indices if len(indices) else np.zeros(1, np.int64)

    def rho(local: Local) -> list[float]:
        adds = not local.is_split("s") or local.member("s") == 0
        return [float(r) if adds else 0.0 for r in attrs["rho"]]

    local: dict[str | int, Callable[[Local], Any]] = {
        "support_vectors": lambda local: _floats(vectors[held(local)]),
        "coefficients": lambda local: _floats(
            factors[held(local)] * bool(len(local.positions("s")))
        ),
        "n_supports": lambda local: len(held(local)),
        "rho": rho,
    }
    if not attrs.get("one_class"):
        return einsum(node, text, constants=STORED, whole=whole, local=local)

    def lower(build: Lowering) -> None:
        new = {**{k: v for k, v in attrs.items() if k != "one_class"}, **local}
        rows = build.shape(build.input(0))[0]
        type_ = (np.dtype(np.float32), [rows, 1])
        part = build.make("SVMRegressor", [build.input(0)], type_, domain=ML, **new)
        inside = build.add("Greater", [build.all_reduce(part, ["s"]), np.float32(0)])
        build.finish("Where", [inside, np.float32(1), np.float32(-1)])

    over = frozenset({"s"})
    return einsum(
        node, text, constants=STORED, whole=whole, communicating=over, lowered=over, lower=lower
    )


def _floats(values: Array) -> list[float]:
    return [float(v) for v in values.reshape(-1)]


@rule("SVMClassifier", domain=ML, ranks_known=False)
def svm_classifier(node: gs.Node) -> Rule:
    """Sharding rule of SVMClassifier: `n f, s _ -> n; n p {communicating: s}`: an all-reduce adds
    the ranks' terms of the margins between the pairs p of classes; each rank then chooses the
    labels of its rows. An operand without data stands for the support vectors s, which are
    attributes."""
    if not matrix(node.inputs[0]):
        return whole_rule(node, "a single row")
    labels = "_" if has_text_labels(node) else "n"
    whole = {"f": _FEATURES, "p": "a label is the best of all classes"}
    fields = row_fields(node)
    if not has_attribute_weights(node) or len(labels_of(node)) < 2:
        return einsum(node, f"n f -> {labels}; n p", whole=whole, **fields)
    whole["b"] = _ONE
    attrs, of_rows = dict(node.attrs), fields.get("lower")

    def lower(build: Lowering) -> None:
        if not build.local.is_split("s"):
            assert of_rows is not None
            of_rows(build)
            return
        margins = build.all_reduce(_margins(build, attrs), ["s"])
        classify(build, "SVMClassifier", margins, _of_margins(attrs))

    over = frozenset({"s"})
    return einsum(
        node,
        f"n f, s b -> {labels}; n p",
        constants=STORED,
        whole=whole,
        communicating=over | fields.get("communicating", over),
        lowered=over | fields.get("lowered", over),
        lower=lower,
    )


def _margins(build: Lowering, attrs: Mapping[str, Any]) -> gs.Tensor:
    """Returns the rank's terms of the margins, [rows, pairs of classes], without rho."""
    sizes = list(attrs["vectors_per_class"])
    vectors = _vectors(attrs, sum(sizes)).astype(np.float64)
    weights = _pair_weights(numbers(attrs["coefficients"]), sizes)
    x = build.add("Cast", [build.add("Cast", [build.input(0)], to=1)], to=_DOUBLE)

    def columns(local: Local) -> Any:
        return np.ascontiguousarray(vectors[local.positions("s")].T)

    values = _kernel(build, attrs, x, columns)
    shard = build.per_rank(lambda local: weights[local.positions("s")])
    return build.add("Cast", [build.add("MatMul", [values, shard])], to=onnx.TensorProto.FLOAT)


def _kernel(
    build: Lowering, attrs: Mapping[str, Any], x: gs.Tensor, columns: Callable[[Local], Any]
) -> gs.Tensor:
    """Returns the kernel function of each row of `x` with each of the rank's vectors,
    [rows, vectors], in float64: squared distances from products would lose too many digits in
    float32. `columns` returns the rank's vectors as columns."""
    kind = attrs.get("kernel_type", "LINEAR")
    kind = kind.decode() if isinstance(kind, bytes) else kind
    gamma, shift, degree = ([*attrs.get("kernel_params", ()), 0, 0, 0])[:3]
    product = build.add("MatMul", [x, build.per_rank(columns)])
    if kind == "LINEAR":
        return product
    if kind == "RBF":
        squares = build.add("ReduceSum", [build.add("Mul", [x, x])], axes=[1], keepdims=1)
        others = build.per_rank(lambda local: (columns(local) ** 2).sum(axis=0))
        twice = build.add("Mul", [product, np.float64(2)])
        distance = build.add("Sub", [build.add("Add", [squares, others]), twice])
        return build.add("Exp", [build.add("Mul", [distance, np.float64(-gamma)])])
    scaled = build.add("Add", [build.add("Mul", [product, np.float64(gamma)]), np.float64(shift)])
    if kind == "POLY":
        return build.add("Pow", [scaled, np.float64(degree)])
    return build.add("Tanh", [scaled])


def _pair_weights(coefficients: Array, sizes: list[int]) -> Array:
    """Returns the weight of each vector in the margin of each pair of classes, [vectors, pairs].
    `sizes` are the numbers of vectors of the classes."""
    count, table = len(sizes), coefficients.reshape(len(sizes) - 1, -1).astype(np.float64)
    owner = np.repeat(np.arange(count), sizes)
    pairs = list(combinations(range(count), 2))
    weights = np.zeros((len(owner), len(pairs)))
    for at, (i, j) in enumerate(pairs):
        weights[owner == i, at] = table[j - 1, owner == i]
        weights[owner == j, at] = table[i, owner == j]
    return weights


def _of_margins(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of an SVMClassifier that takes margins of the pairs of classes as
    features, and chooses labels from them as the node does: it has a unit vector for each pair,
    under a linear kernel."""
    count = len(attrs["vectors_per_class"])
    pairs = list(combinations(range(count), 2))
    table = np.zeros((count - 1, len(pairs)))
    for at, (_, j) in enumerate(pairs):
        table[j - 1, at] = 1
    of_class = [sum(i == c for i, _ in pairs) for c in range(count)]
    unit_vectors = {
        "kernel_type": "LINEAR",
        "kernel_params": [0.0, 0.0, 0.0],
        "support_vectors": _floats(np.eye(len(pairs))),
        "coefficients": _floats(table),
        "vectors_per_class": of_class,
    }
    return {**attrs, **unit_vectors}
