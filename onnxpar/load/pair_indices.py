"""Follows integers that number the pairs of an expert: a pair is a token and a slot (the place of
the expert among the top k of the token), and NonZero lists the pairs of one expert."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import tensor_shape
from onnxpar.load.shape_values import given_integers, integers

MOVES = frozenset(["Transpose", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity", "Expand"])
"""Ops that move or cast elements."""
_ALL = 2**31 - 1
"""The end of a Slice that takes everything, or a larger one."""


@dataclass(frozen=True)
class Index:
    """Integers computed from the entries of an expert's mask that NonZero lists, the pairs of a
    token and a slot: from the row and the column of each.

    forms   pairs (a, b): the integer is a * row + b * column; several integers for each pair have
            several forms
    labels  the dimensions of the tensor: R for pairs, c for forms, 1 for a single element
    """

    forms: tuple[tuple[int, int], ...]
    labels: str


def moved_index(node: gs.Node, reads: Sequence[Any]) -> Index | list[Index] | None:
    """Returns the indices that a node computes from indices: one Index, or a list if the node has
    several results; None if the node is of no known form. `reads` has the Index of each operand, or
    None."""
    index: Index = next(r for r in reads if r is not None)
    at = index.labels.find("c")
    if node.op in ("Add", "Mul"):
        return _arithmetic(node, reads)
    if node.op == "Concat":
        return _concat(node, reads)
    if reads[0] is None:
        return None
    if node.op in ("Slice", "Split", "Gather") and at >= 0:
        return _some_forms(node, index, at)
    if node.op not in MOVES:
        return None
    if node.op == "Transpose":
        perm = node.attrs.get("perm") or range(len(index.labels))[::-1]
        return Index(index.forms, "".join(index.labels[i] for i in perm))
    if node.op in ("Cast", "Identity"):
        return index
    if len(index.forms) > 1 and node.op in ("Reshape", "Expand"):
        return None
    if node.op == "Expand":  # along columns, as ScatterElements wants it
        return index if index.labels in ("R1", "Rc") else None
    shape = tensor_shape(node.outputs[0])
    if shape is None or any(size not in (1, None, len(index.forms)) for size in shape):
        return None
    labels = "".join("R" if size is None else "1" for size in shape)
    if len(index.forms) > 1:
        labels = "".join("R" if s is None else "c" if s > 1 else "1" for s in shape)
    return Index(index.forms, labels) if labels.count("R") == 1 else None


def _some_forms(node: gs.Node, index: Index, at: int) -> Index | list[Index] | None:
    """Returns the indices that a Slice, Split or Gather takes along dimension `at` of `index`,
    which has an element for each form; a list for a Split, None if the bounds are not known."""
    rank, count = len(index.labels), len(index.forms)
    if node.op == "Slice":
        starts = given_integers(node, 1)
        ends = given_integers(node, 2)
        axes = given_integers(node, 3)
        steps = given_integers(node, 4) or [1]
        if starts is None or ends is None or axes is None or len(axes) != 1:
            return None
        if starts == [0] and steps == [1] and ends[0] >= _ALL:
            return index
        is_plain = axes[0] % rank == at and steps == [1]
        return Index(index.forms[starts[0] : ends[0]], index.labels) if is_plain else None
    if node.attrs.get("axis", 0) % rank != at:
        return None
    if node.op == "Split":
        sizes = given_integers(node, 1) or [1] * count
        if len(sizes) != len(node.outputs) or sum(sizes) != count:
            return None
        ends = np.cumsum([0, *sizes]).tolist()
        parts = itertools.pairwise(ends)
        return [Index(index.forms[a:b], index.labels) for a, b in parts]
    places = integers(node.inputs[1])
    if places is None or not all(-count <= p < count for p in places):
        return None
    is_scalar = tensor_shape(node.inputs[1]) == ()
    labels = index.labels[:at] + ("" if is_scalar else "c") + index.labels[at + 1 :]
    return Index(tuple(index.forms[p] for p in places), labels)


def _arithmetic(node: gs.Node, reads: Sequence[Any]) -> Index | None:
    """Returns the sum of two indices, or an index times a constant; None for anything else."""
    known = [r for r in reads if r is not None]
    if any(len(r.forms) != 1 for r in known):
        return None
    if node.op == "Add" and len(known) == 2:
        (a, b), (c, d) = known[0].forms[0], known[1].forms[0]
        same = known[0].labels == known[1].labels
        return Index(((a + c, b + d),), known[0].labels) if same else None
    factor = integers(node.inputs[1 if reads[0] is not None else 0])
    if node.op != "Mul" or len(known) != 1 or factor is None or len(factor) != 1:
        return None
    a, b = known[0].forms[0]
    return Index(((a * factor[0], b * factor[0]),), known[0].labels)


def _concat(node: gs.Node, reads: Sequence[Any]) -> Index | None:
    """Returns the forms of several indices, joined along a dimension that is not that of pairs;
    else None."""
    at = node.attrs["axis"] % len(reads[0].labels) if reads[0] is not None else -1
    if at < 0 or any(not isinstance(r, Index) or r.labels[at] == "R" for r in reads):
        return None
    labels = reads[0].labels[:at] + "c" + reads[0].labels[at + 1 :]
    forms = tuple(form for r in reads for form in r.forms)
    return Index(forms, labels)
