"""What classifiers of ai.onnx.ml share: their labels. Collectives send no strings, so every rank
computes labels that are strings for all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import ML
from onnxpar.graph.tensors import tensor_shape
from onnxpar.rules.rule import Lowering

_TEXTS = "classlabels_strings"
_INTEGERS = ("classlabels_int64s", "classlabels_ints")


def matrix(tensor: gs.Tensor) -> bool:
    """True for a tensor of two dimensions."""
    shape = tensor_shape(tensor)
    return shape is not None and len(shape) == 2


def has_text_labels(node: gs.Node) -> bool:
    """True if the labels of a classifier are strings."""
    return bool(node.attrs.get(_TEXTS))


def labels_of(node: gs.Node) -> np.ndarray[Any, Any]:
    """The labels of a classifier's classes: strings (object) or int64."""
    if has_text_labels(node):
        texts = [t.decode() if isinstance(t, bytes) else t for t in node.attrs[_TEXTS]]
        return np.array(texts, object)
    return np.array(next((node.attrs[k] for k in _INTEGERS if node.attrs.get(k)), ()), np.int64)


def finish_labels(build: Lowering, chosen: gs.Tensor, labels: np.ndarray[Any, Any]) -> None:
    """Makes result 0 of a classifier: the labels for the classes `chosen` [n], indices into
    `labels`, of the rank's rows. If labels are strings, ranks exchange the indices, and each looks
    up the labels of all rows."""
    if labels.dtype == object:
        chosen = build.all_gather(chosen, "n", 0, lambda local: local.size("n"))
        chosen = in_order(build, chosen, "n", 0)
    build.finish("Gather", [labels, chosen], 0, axis=0)


def in_order(build: Lowering, x: gs.Tensor, factor: str, axis: int) -> gs.Tensor:
    """Puts `x`, a result of `all_gather` along `axis` by shards of a factor, in the order of the
    global dimension. These differ if shards are not contiguous."""
    if not build.local.is_split(factor) or build.local.is_run(factor):
        return x
    order = np.argsort(build.gathered(factor), kind="stable").astype(np.int64)
    return build.add("Gather", [x, order], axis=axis)


def row_fields(node: gs.Node) -> dict[str, Any]:
    """Returns the fields of a rule with which a classifier with string labels may split rows n: the
    rank's node returns indices of classes, which the ranks gather. No fields for other labels."""
    if not has_text_labels(node):
        return {}
    return {
        "communicating": frozenset({"n"}),
        "lowered": frozenset({"n"}),
        "lower": _by_rows(node.op, dict(node.attrs)),
    }


def _by_rows(op: str, attrs: Mapping[str, Any]) -> Callable[[Lowering], None]:
    """Returns a lowering that runs a classifier on the rank's rows."""

    def lower(build: Lowering) -> None:
        classify(build, op, build.input(0), attrs)

    return lower


def classify(build: Lowering, op: str, x: gs.Tensor, attrs: Mapping[str, Any]) -> None:
    """Makes both results of a classifier, labels and scores, from the rank's rows `x`. `attrs` are
    the attributes of the unsplit node, or others with the same labels."""
    if not attrs.get(_TEXTS):
        build.finish_each(op, [x], domain=ML, **attrs)
        return
    labels = np.array([t.decode() if isinstance(t, bytes) else t for t in attrs[_TEXTS]], object)
    numbered = {k: v for k, v in attrs.items() if k != _TEXTS}
    numbered[_INTEGERS["Tree" not in op]] = list(range(len(labels)))
    rows, width = build.shape(x)[0], (tensor_shape(build.local.node.outputs[1]) or (0, 0))[1]
    kinds = ((np.dtype(np.int64), [rows]), (np.dtype(np.float32), [rows, width or 0]))
    chosen, scores = build.make_each(op, [x], kinds, domain=ML, **numbered)
    build.finish("Identity", [scores], 1)
    finish_labels(build, chosen, labels)
