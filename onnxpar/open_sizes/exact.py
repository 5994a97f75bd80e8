"""Tells if the results of a node have the same closed form at all sizes, not only at the sampled
ones.

If results agree, or fit a closed form, at all sampled bindings, that alone does not prove it for
other sizes: there, a maximum may take another operand, or a division may round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto

from onnxpar.base.arrays import Array

_EXACT = frozenset(
    [
        "Shape",
        "Size",
        "Constant",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Mod",
        "Floor",
        "Ceil",
        "Neg",
        "Concat",
        "Gather",
        "GatherElements",
        "GatherND",
        "Slice",
        "Squeeze",
        "Unsqueeze",
        "Cast",
        "CastLike",
        "Identity",
        "Reshape",
        "Flatten",
        "ReduceProd",
        "ReduceSum",
        "Split",
        "Expand",
        "Tile",
        "Transpose",
        "ConstantOfShape",
        "ScatterND",
        "ScatterElements",
        "Where",
        "Max",
        "Min",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "And",
        "Or",
        "Not",
    ]
)
"""Ops whose results are polynomials if their operands are, with exceptions: see `is_exact`."""
_SAME = frozenset(("Max", "Min"))
_COMPARE = frozenset(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"))
ROUND = frozenset(("Floor", "Ceil", "Cast"))
FRACTION = 1 << 10
"""Floats that are multiples of 1 / FRACTION, and not too large, are exact sizes."""


def is_exact(
    op: str, values: Sequence[Sequence[Array | None]], results: Sequence[Sequence[Any]]
) -> bool:
    """True if the agreement, or the closed form, of a node's results at all bindings holds at any
    other sizes too. `values` has the operands and `results` the results (empty if unknown), with a
    row for each binding."""
    if op in ("Shape", "Size"):
        return True
    known = [[v for v in row if v is not None] for row in values]
    if op not in _EXACT or any(len(k) < len(row) for k, row in zip(known, values, strict=True)):
        return False
    if any(is_float(v) for row in (*known, *results) for v in row):
        return all(_is_fraction(v) for row in (*known, *results) for v in row)
    if op in ("Div", "Mod"):
        return all(_rounds_down(op, a, b) for a, b in known)
    if op in _SAME:
        return all(agree([[row[0]], [v]]) for row in known for v in row[1:])
    if op in _COMPARE:
        return _compare_alike(known)
    return True


def has_exact_scales(node: NodeProto, values: Mapping[str, Array]) -> bool:
    """False for a Resize or Upsample with inexact scales: the size of its result would be rounded
    twice."""
    if node.op_type not in ("Resize", "Upsample"):
        return True
    scales = [values[n] for n in node.input[1:] if n in values and is_float(values[n])]
    return all(_is_fraction(s) for s in scales)


def is_float(value: Any) -> bool:
    """True for floating-point numbers and arrays."""
    return bool(np.asarray(value).dtype.kind == "f")


def agree(results: Sequence[Sequence[Any]]) -> bool:
    """True if the rows of all bindings have equal arrays of equal dtypes."""
    return all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
        for other in results[1:]
        for a, b in zip(results[0], other, strict=True)
    )


def _is_fraction(value: Any) -> bool:
    """True if floats are exact, and products of them with realistic sizes are exact, too."""
    array = np.asarray(value).astype(np.float64)
    return bool((array * FRACTION % 1 == 0).all() and (np.abs(array) * FRACTION < 2**40).all())


def _rounds_down(op: str, a: Any, b: Any) -> bool:
    """True if an integer division rounds down: onnxruntime rounds towards zero."""
    above_zero = bool((np.asarray(b) > 0).all())
    return above_zero and (op == "Mod" or bool((np.asarray(a) >= 0).all()))


def _compare_alike(values: Sequence[Sequence[Array]]) -> bool:
    """True if the comparison of two tensors has the same result at any sizes. That is so if each
    pair of elements has the same difference at all bindings, or if one element is negative and the
    other a size, which never is."""
    if any(np.asarray(v).dtype.kind not in "biu" for row in values for v in row):
        return agree(values)
    rows = [np.broadcast_arrays(*row) for row in values]
    if any(row[0].shape != rows[0][0].shape for row in rows):
        return False
    first, second = (np.stack([row[k] for row in rows]).astype(np.int64) for k in (0, 1))
    alike = (first - second == first[:1] - second[:1]).all(0)
    apart = ((first >= 0) & (second < 0)).all(0) | ((second >= 0) & (first < 0)).all(0)
    return bool((alike | apart).all())
