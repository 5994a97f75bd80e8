"""Rules of the linear models of ai.onnx.ml: products with a matrix that is an attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import ML, numbers
from onnxpar.graph.tensors import tensor_shape
from onnxpar.rules.communicate import FLOAT
from onnxpar.rules.ml_labels import classify, has_text_labels, matrix, row_fields
from onnxpar.rules.rule import FIRST, Local, Lowering, Rule, einsum, rule, whole_rule

_BEST = "a label is the best of all classes"
_MIXED = "the post-transform mixes all targets"


def _coefficients(node: gs.Node) -> np.ndarray[Any, Any]:
    """The matrix of coefficients, [targets, features]."""
    features = (tensor_shape(node.inputs[0]) or ())[1]
    return numbers(node.attrs["coefficients"]).reshape(-1, features or 1)


@rule("LinearRegressor", domain=ML)
def linear_regressor(node: gs.Node) -> Rule:
    """Sharding rule of LinearRegressor: `n f -> n c {sum: f}`: rows n, features f, targets c. A
    rank gets the coefficients of its features and targets. With a post-transform, ranks add their
    products before it."""
    if not matrix(node.inputs[0]):
        return whole_rule(node, "a single row")
    if (tensor_shape(node.inputs[0]) or ())[1] is None:
        return einsum(node, "n f -> n c", whole={"f": "a data-dependent size", "c": "the same"})
    matrix_, attrs = _coefficients(node), dict(node.attrs)
    bias = numbers(attrs.get("intercepts", ())) if attrs.get("intercepts") else None
    post = attrs.get("post_transform", "NONE")
    post = post.decode() if isinstance(post, bytes) else post

    def own(local: Local) -> list[float]:
        held = matrix_[local.positions("c")][:, local.positions("f")]
        return [float(v) for v in held.reshape(-1)] or [0.0]  # the kernel refuses an empty list

    def own_bias(local: Local) -> list[float]:
        assert bias is not None
        counts = not local.is_split("f") or local.member("f") == 0
        return [float(b) for b in bias[local.positions("c")] * counts]

    local: dict[str | int, Callable[[Local], Any]] = {
        "coefficients": own,
        "targets": lambda local: local.size("c"),
    }
    if bias is not None:
        local["intercepts"] = own_bias
    if post == "NONE":
        linear = () if bias is not None else (FIRST,)
        return einsum(node, "n f -> n c", local=local, linear=linear)
    count = len(matrix_)

    def lower(build: Lowering) -> None:
        x = build.all_reduce(_product(build, matrix_), ["f"])
        unit = np.eye(count).reshape(-1).tolist()
        identity = {"coefficients": unit, "targets": count, "domain": ML}
        build.finish("LinearRegressor", [x], **{**attrs, **identity})

    over = frozenset({"f"})
    return einsum(
        node, "n f -> n c", whole={"c": _MIXED}, communicating=over, lowered=over, lower=lower
    )


def _product(build: Lowering, matrix_: np.ndarray[Any, Any]) -> gs.Tensor:
    """Returns the product of the rank's features with the coefficients for them, in float32: the
    rank's terms of the scores of all targets."""
    x = build.add("Cast", [build.input(0)], to=FLOAT)
    columns = build.per_rank(
        lambda local: np.ascontiguousarray(matrix_[:, local.positions("f")].T.astype(np.float32))
    )
    return build.add("MatMul", [x, columns])


@rule("LinearClassifier", domain=ML, ranks_known=False)
def linear_classifier(node: gs.Node) -> Rule:
    """Sharding rule of LinearClassifier: `n f -> n; n c {communicating: f}`: if features f are
    split, an all-reduce adds the products; each rank then chooses the labels of its rows."""
    if not matrix(node.inputs[0]) or (tensor_shape(node.inputs[0]) or ())[1] is None:
        return whole_rule(node, "a single row")
    matrix_, attrs = _coefficients(node), dict(node.attrs)
    count = len(matrix_)
    text = f"n f -> {'_' if has_text_labels(node) else 'n'}; n c"
    fields = row_fields(node)
    of_rows = fields.get("lower")

    def lower(build: Lowering) -> None:
        if not build.local.is_split("f"):
            assert of_rows is not None
            of_rows(build)
            return
        x = build.all_reduce(_product(build, matrix_), ["f"])
        unit = {**attrs, "coefficients": np.eye(count).reshape(-1).tolist()}
        classify(build, "LinearClassifier", x, unit)

    over = frozenset({"f"})
    return einsum(
        node,
        text,
        whole={"c": _BEST},
        communicating=over | fields.get("communicating", over),
        lowered=over | fields.get("lowered", over),
        lower=lower,
    )
