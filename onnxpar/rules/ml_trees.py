"""Rules of the forests of ai.onnx.ml: split by rows, and by trees, whose results are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import AT, ML, has_attribute_weights, numbers
from onnxpar.graph.tensors import dtype_of
from onnxpar.rules.forests import Ensemble, Forest, Trees
from onnxpar.rules.ml_labels import finish_labels, has_text_labels, labels_of, matrix, row_fields
from onnxpar.rules.rule import Local, Lowering, Rule, einsum, rule, whole_rule

ANY_FEATURE = "a tree may ask for any feature"
FEW_TARGETS = "some leaves give no weight to a target"
ONE_TREE = "a row of the attributes is a tree"

_NUMBERED = "onnxruntime and ONNX number its post-transform differently"

STORED = frozenset({AT})
_SUM, _AVERAGE = ("SUM", 1), ("AVERAGE", 0)
_NONE = ("NONE", 0, None)
_NEUTRAL = {"MIN": np.inf, 2: np.inf, "MAX": -np.inf, 3: -np.inf}


def _text(value: Any) -> Any:
    """The text of an attribute of type bytes; other values unchanged."""
    return value.decode() if isinstance(value, bytes) else value


@rule("TreeEnsembleRegressor TreeEnsemble", domain=ML)
def tree_regressor(node: gs.Node) -> Rule:
    """Sharding rule of TreeEnsembleRegressor, TreeEnsemble: `n f, t _ -> n c {sum: t}`: each rank
    adds (or takes the minimum or maximum of) the weights of its trees t. These are attributes; an
    operand without data stands for them (`graph/attribute_weights.py`). With a post-transform or an
    average, ranks combine their results before it."""
    if not matrix(node.inputs[0]):
        return whole_rule(node, "a single row")
    whole = {"f": ANY_FEATURE, "c": "a tree gives weights to any target"}
    if not has_attribute_weights(node):
        return einsum(node, "n f -> n c", whole=whole)
    text, whole["b"] = "n f, t b -> n c", ONE_TREE
    count = int(node.attrs.get("n_targets", 1))
    how = _text(node.attrs.get("aggregate_function", _SUM[node.op == "TreeEnsemble"]))
    post = _text(node.attrs.get("post_transform"))
    stand_in = _NEUTRAL.get(how)
    forest = (Ensemble if node.op == "TreeEnsemble" else Forest)(node, count, stand_in)
    if (stand_in is not None and not forest.always().all()) or _depends_on_rows(forest):
        return einsum(node, text, constants=STORED, whole={**whole, "t": FEW_TARGETS})
    if post in _NONE and how not in _AVERAGE:
        reduce, local = {"t": _reduction(forest)}, _local(forest)
        return einsum(node, text, constants=STORED, whole=whole, reduce=reduce, local=local)
    if node.op == "TreeEnsemble" and post in (1, 2):
        return einsum(node, text, constants=STORED, whole={**whole, "t": _NUMBERED})
    if post not in _NONE and dtype_of(node.outputs[0]) != np.float32:
        return einsum(
            node, text, constants=STORED, whole={**whole, "t": "a post-transform of float64"}
        )
    return einsum(
        node,
        text,
        constants=STORED,
        whole=whole,
        communicating=frozenset({"t"}),
        lowered=frozenset({"t"}),
        lower=_lower_regressor(forest, node.op),
    )


def _depends_on_rows(forest: Trees) -> bool:
    """True if only some rows get a base value: the op adds a target's base value only where a leaf
    of a tree gives the target a weight."""
    base = base_of(forest.attrs)
    if base is None or forest.width == 1:
        return False
    return bool((base[forest.given() & ~forest.always()] != 0).any())


def _given_base(forest: Trees) -> np.ndarray[Any, Any] | None:
    """Returns the base values, with 0 for targets to which no leaf gives a weight; None without
    base values."""
    base = base_of(forest.attrs)
    if base is None or forest.width == 1:
        return base
    return np.where(forest.given(), base, base.dtype.type(0))


def _reduction(forest: Trees) -> str:
    """Returns how the results of the ranks' trees are combined: "sum", "min" or "max"."""
    if forest.stand_in is None:
        return "sum"
    return "min" if forest.stand_in > 0 else "max"


def _local(forest: Trees) -> dict[str | int, Callable[[Local], Any]]:
    """Returns the field `local` of the rule: each attribute as a function that returns it for a
    rank's trees. Where results are added, only the first rank along the trees adds base values."""
    local: dict[str | int, Callable[[Local], Any]] = {}
    base = _given_base(forest) if forest.stand_in is None else None
    for key in forest.names():
        local[key] = _own_trees(forest, key, adds_base=base is not None)
    for key in ("base_values", "base_values_as_tensor"):
        own = forest.attrs.get(key)
        if base is not None and own is not None and len(numbers(own)):
            local[key] = _base(own, base)
    return local


def _own_trees(forest: Trees, key: str, adds_base: bool = False) -> Callable[[Local], Any]:
    """Returns a function from a rank's view to the value of attribute `key` for the rank's trees.
    With `adds_base`, the trees of the first rank give each target a weight, because the op adds
    base values only where a leaf does."""

    def taken(local: Local) -> Any:
        if not local.is_split("t"):
            return forest.attrs.get(key)
        return forest.cut(local.positions("t"), adds_base and local.member("t") == 0)[key]

    return taken


def _base(own: Any, base: np.ndarray[Any, Any]) -> Callable[[Local], Any]:
    """Returns a function from a rank's view to the base values: `base` on the first rank along t,
    zeros on the others, as a list or a tensor, as `own` is. If trees are not split, it returns
    `own`."""

    def value(local: Local) -> Any:
        if not local.is_split("t"):
            return own
        held = base * (local.member("t") == 0)
        if isinstance(own, gs.Tensor):
            return gs.Constant("", held.astype(base.dtype))
        return [float(b) for b in held]

    return value


def _lower_regressor(forest: Trees, op: str) -> Callable[[Lowering], None]:
    """Returns a lowering that runs the rank's trees, adds the ranks' results by an all-reduce, and
    then takes the average, adds base values and applies the post-transform, as the op says."""
    attrs = forest.attrs
    how = _text(attrs.get("aggregate_function", _SUM[op == "TreeEnsemble"]))
    post = _text(attrs.get("post_transform"))

    def lower(build: Lowering) -> None:
        out = node_output(build, 0)
        raw = partial_results(build, forest, dtype_of(out))
        x: gs.Tensor = build.all_reduce(raw, ["t"], _reduction(forest))
        if how in _AVERAGE:
            x = build.add("Div", [x, np.array(forest.count, dtype_of(out))])
        base = _given_base(forest)
        if base is not None:
            x = build.add("Add", [x, base.astype(dtype_of(out))])
        transformed(build, x, _POSTS.get(post, post), 0)

    return lower


_POSTS = {3: "SOFTMAX_ZERO", 4: "PROBIT", 0: "NONE", None: "NONE"}


def node_output(build: Lowering, index: int) -> gs.Tensor:
    """Result `index` of the global node."""
    result: gs.Tensor = build.local.node.outputs[index]
    return result


def base_of(attrs: Mapping[str, Any]) -> np.ndarray[Any, Any] | None:
    """Returns the base values among the attributes as an array; None if there are none."""
    for key in ("base_values", "base_values_as_tensor"):
        if key in attrs and len(numbers(attrs[key])):
            return numbers(attrs[key])
    return None


def partial_results(build: Lowering, forest: Trees, dtype: Any) -> gs.Variable:
    """Adds an op that runs the rank's trees without base values and post-transform; returns its
    scores [rows, targets] of type `dtype`. An average is computed as a sum."""
    own: dict[str, Any] = {key: _own_trees(forest, key) for key in forest.names()}
    how = forest.attrs.get("aggregate_function")
    if isinstance(forest, Ensemble):
        kind = "TreeEnsemble"
        own["aggregate_function"] = 1 if how in (None, *_AVERAGE) else how
    else:
        kind = "TreeEnsembleRegressor"
        own["aggregate_function"] = "SUM" if _text(how) in (None, *_AVERAGE) else _text(how)
    x, count = build.input(0), forest.width
    type_ = (dtype, [build.shape(x)[0], count])
    return build.make(kind, [x], type_, domain=ML, n_targets=count, **own)


def transformed(build: Lowering, x: gs.Tensor, post: str, output: int) -> None:
    """Makes result `output` from scores [rows, classes] by the post-transform `post`, which
    onnxruntime's kernel of LinearRegressor applies, with a unit matrix."""
    if post == "NONE":
        build.finish("Identity", [x], output)
        return
    count = build.shape(x)[1]
    build.finish(
        "LinearRegressor",
        [x],
        output,
        domain=ML,
        coefficients=np.eye(count).reshape(-1).tolist(),
        intercepts=[0.0] * count,
        targets=count,
        post_transform=post,
    )


@rule("TreeEnsembleClassifier", domain=ML, ranks_known=False)
def tree_classifier(node: gs.Node) -> Rule:
    """Sharding rule of TreeEnsembleClassifier: `n f, t _ -> n; n c {communicating: t}`: an
    all-reduce adds the scores of all trees; each rank then chooses the labels of its rows. An
    operand without data stands for the trees t, which are attributes."""
    if not matrix(node.inputs[0]):
        return whole_rule(node, "a single row")
    labels = "_" if has_text_labels(node) else "n"
    whole = {"f": ANY_FEATURE, "c": "a label is the best of all classes"}
    if not has_attribute_weights(node):
        return einsum(node, f"n f -> {labels}; n c", whole=whole, **row_fields(node))
    whole["b"] = ONE_TREE
    text = f"n f, t b -> {labels}; n c"
    forest = Forest(node, len(labels_of(node)))
    always = forest.always()
    reason = _refusal(node, forest, always)
    if reason:
        return einsum(
            node, text, constants=STORED, whole={**whole, "t": reason}, **row_fields(node)
        )
    over = frozenset({"t"})
    fields = row_fields(node)
    lower = _lower_classifier(forest, node, always, fields.get("lower"))
    return einsum(
        node,
        text,
        constants=STORED,
        whole=whole,
        communicating=over | fields.get("communicating", over),
        lowered=over | fields.get("lowered", over),
        lower=lower,
    )


def _refusal(node: gs.Node, forest: Forest, always: Any) -> str:
    """Returns the reason why trees cannot be split; empty if they can. The op chooses a label among
    the classes that got a weight, so these classes must be the same for every row. `always` is True
    for each class that gets a weight for every row."""
    count = forest.width
    weighted = forest.given()
    base = base_of(node.attrs)
    if count < 2 or (always != weighted).any():
        return FEW_TARGETS
    if count == 2 and (weighted[1] or (base is not None and len(base) == 2)):
        return "it has two classes, both with weights"
    if count == 2 and _text(node.attrs.get("post_transform")) == "PROBIT":
        return "two classes share one score"
    return ""


def _lower_classifier(
    forest: Forest, node: gs.Node, always: Any, by_rows: Any
) -> Callable[[Lowering], None]:
    """Returns a lowering that runs the rank's trees as a regressor, adds the ranks' scores by an
    all-reduce, and chooses labels as onnxruntime's kernel does.

    always   True for each class that gets a weight for every row
    by_rows  the lowering if only rows are split
    """
    count, base = forest.width, base_of(forest.attrs)
    weights, post = forest.weights, _text(node.attrs.get("post_transform", "NONE"))
    labels = labels_of(node)

    def lower(build: Lowering) -> None:
        if not build.local.is_split("t"):
            by_rows(build)
            return
        raw = partial_results(build, forest, np.dtype(np.float32))
        x: gs.Tensor = build.all_reduce(raw, ["t"])
        if base is not None:
            x = build.add("Add", [x, np.resize(base, count).astype(np.float32)])
        if count == 2:
            chosen = _two_classes(build, x, bool((weights >= 0).all()), post)
        else:
            seen = x
            if base is None and not always.all():
                lowest = np.where(always, 0, -np.inf).astype(np.float32)
                seen = build.add("Add", [x, lowest])
            chosen = build.add("ArgMax", [seen], axis=1, keepdims=0)
            transformed(build, x, post, 1)
        finish_labels(build, chosen, labels)

    return lower


def _two_classes(build: Lowering, x: gs.Tensor, positive: bool, post: str) -> gs.Tensor:
    """Makes the scores of two classes from the only score, column 0 of `x`; returns the class of
    each row.

    positive  True if no weight is negative: the score is then a probability, else a margin around 0
    post      the post-transform
    """
    score = build.add("Slice", [x, np.array([0]), np.array([1]), np.array([1])])
    limit = np.array(0.5 if positive else 0, np.float32)
    above = build.add("Greater", [score, limit])
    other = build.add("Sub", [np.float32(1), score]) if positive else build.add("Neg", [score])
    if post == "LOGISTIC":
        pair = build.add("Concat", [build.add("Neg", [score]), score], axis=1)
        build.finish("Sigmoid", [pair], 1)
    else:
        build.finish("Concat", [other, score], 1, axis=1)
    number = build.add("Cast", [above], to=onnx.TensorProto.INT64)
    return build.add("Squeeze", [number], axes=[1])
