"""Follows arithmetic on sizes: computes closed forms of a node's results from closed forms of its
operands.

Nothing is fitted here: each result holds at all sizes, because the op's definition says so. Results
without a closed form (a table at a size, a square root, a quotient of two open sizes) are not
followed: their node stays in the model, and ranks compute it in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

from onnxpar.graph.shapes_by_onnxruntime import results_of
from onnxpar.layout.symbols import (
    Polynomial,
    is_less,
    maximum,
    minimum,
    quotient,
    rounded_up,
    without,
)

Forms = np.ndarray[Any, np.dtype[np.object_]]
"""An array of polynomials: the closed forms of the elements of a tensor."""
Limit = tuple[Polynomial, Polynomial]
"""Two sizes (a, b): a run must have a <= b."""
FRACTION = 1 << 10
"""Floats are followed only if they are multiples of 1 / FRACTION, so that they are exact."""
HEAVIEST = 48
"""Closed forms with a larger `weight` are not followed."""
ZERO, ONE, MINUS = map(Polynomial.constant, (0, 1, -1))

_MOVES: dict[str, Sequence[int] | None] = {
    "Concat": None,
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "Reshape": (0,),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "Slice": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
}
"""Ops that move elements, and the positions of the operands whose elements they move (None: all).
Other operands, such as indices, must be numbers."""


class NotFollowed(Exception):
    """Raised if a node's result has no closed form."""


def constants(values: Any) -> Forms:
    """Returns an array of numbers as closed forms. Errors: NotFollowed for numbers that are not
    finite, or no multiples of 1 / FRACTION."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or (array.astype(np.float64) * FRACTION % 1 != 0).any():
            raise NotFollowed
    elif array.dtype.kind not in "biu":
        raise NotFollowed
    return _each(lambda x: Polynomial.constant(Fraction(x)), array.astype(object))


def exact_range(form: Polynomial, dtype: np.dtype[Any]) -> Iterator[Limit]:
    """Yields the limits on sizes within which `dtype` represents the size `form` exactly. Errors:
    NotFollowed for a dtype in which usual sizes are rounded or overflow."""
    if form.number is not None or dtype.kind == "b":
        return
    if dtype.itemsize < 4 or (dtype.kind == "u" and not form.is_natural):
        raise NotFollowed
    if dtype.itemsize >= 8:
        return
    most = Polynomial.constant(2**24 if dtype.kind == "f" else int(np.iinfo(dtype).max))
    whole = scaled(form, Fraction(form.denominator))
    yield whole, most
    if not form.is_natural:
        yield MINUS * whole, most


def nonzero_range(form: Polynomial) -> Iterator[Limit]:
    """Yields the limit within which a divisor is at least 1, if it can be 0. Errors: NotFollowed
    for a divisor that may be negative."""
    if not form.is_natural:
        raise NotFollowed
    if not (form - ONE).is_natural:
        yield ONE, scaled(form, Fraction(form.denominator))


def numbers(forms: Forms, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns closed forms as an array of numbers. Errors: NotFollowed if one depends on
    symbols."""
    values = [form.number for form in forms.reshape(-1)]
    if None in values:
        raise NotFollowed
    return np.array(values, dtype).reshape(forms.shape)


def follow(
    node: NodeProto,
    operands: Sequence[Forms | None],
    dtypes: Sequence[np.dtype[Any] | None],
    opset: int,
) -> list[Forms]:
    """Returns the closed forms of a node's results, given those of its operands (None: left out)
    and their dtypes. Errors: NotFollowed if there are none."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type in _MOVES:
        results = _moved(node, operands, dtypes, opset)
    else:
        compute = _COMPUTED.get(node.op_type)
        if compute is None:
            raise NotFollowed
        is_float = any(d is not None and d.kind == "f" for d in dtypes)
        results = [
            np.asarray(compute([o for o in operands if o is not None], attributes, is_float))
        ]
    if any(form.weight > HEAVIEST for forms in results for form in forms.reshape(-1)):
        raise NotFollowed
    return results


def _moved(
    node: NodeProto,
    operands: Sequence[Forms | None],
    dtypes: Sequence[np.dtype[Any] | None],
    opset: int,
) -> list[Forms]:
    """Returns the closed forms of the results of an op that moves elements: runs the node on the
    numbers 0, 1, ... in place of elements, and puts the closed forms in their places."""
    moving = _MOVES[node.op_type]
    if any(a.name == "reduction" and a.s != b"none" for a in node.attribute):
        raise NotFollowed
    table: list[Polynomial] = []
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for i, (forms, dtype) in enumerate(zip(operands, dtypes, strict=True)):
        if forms is None or dtype is None:
            continue
        if moving is None or i in moving:
            places = np.arange(len(table), len(table) + forms.size, dtype=np.int64)
            feeds[f"operand{i}"] = places.reshape(forms.shape)
            table += list(forms.reshape(-1))
        else:
            feeds[f"operand{i}"] = numbers(forms, dtype)
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = ["" if o is None else f"operand{i}" for i, o in enumerate(operands)]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(n, TensorProto.INT64, None) for n in node.output if n]
    graph = helper.make_graph([copy], "moved", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    elements = np.empty(len(table), object)
    elements[:] = table
    moved: Any
    if node.op_type == "Slice" and (feeds.get("operand4", np.ones(1)) < 0).any():
        moved = results_of(model, feeds)  # onnx gives other results for starts that are too small
        if not moved:
            raise NotFollowed
    else:
        try:
            moved = ReferenceEvaluator(model).run(None, feeds)
        except (IndexError, RuntimeError, TypeError, ValueError):
            raise NotFollowed from None
    return [np.asarray(elements[places], object) for places in moved]


def _each(function: Callable[..., Polynomial], *arrays: Any) -> Forms:
    """Applies a function to each element of an array, or to pairs of elements of two arrays,
    broadcast."""
    return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays), object)


def scaled(form: Polynomial, by: Fraction) -> Polynomial:
    """Returns a closed form times a number."""
    return form * Polynomial(((((), by)),)) if by else ZERO


def number_of(form: Polynomial) -> Fraction:
    """Returns the value of a constant closed form. Errors: NotFollowed if it depends on symbols."""
    if form.number is None:
        raise NotFollowed
    return form.number


def truncated(over: Polynomial, below: int) -> Polynomial:
    """Returns over / below, rounded towards zero."""
    if below < 0:
        over, below = MINUS * over, -below
    if over.is_natural:
        return quotient(over, below)
    return quotient(maximum(over, ZERO), below) - quotient(maximum(MINUS * over, ZERO), below)


def _divided(a: Polynomial, b: Polynomial, is_float: bool) -> Polynomial:
    """Returns a / b in closed form, rounded towards zero for integers. Errors: NotFollowed unless b
    is a number or divides all terms of a."""
    if a == b:
        return ONE
    if len(b.terms) == 1:
        ((common, number),) = b.terms
        rest = without(a, common)
        if rest is None:
            raise NotFollowed
        a, b = rest, Polynomial.constant(number)
    below = number_of(b)
    if not below:
        raise NotFollowed
    if is_float:
        return _fine(scaled(a, 1 / below))
    return truncated(a, int(below))


def _remainder(a: Polynomial, b: Polynomial, truncates: bool) -> Polynomial:
    below = int(number_of(b))
    if not below:
        raise NotFollowed
    if truncates:
        return a - scaled(truncated(a, below), Fraction(below))
    if below < 0:
        return MINUS * _remainder(MINUS * a, Polynomial.constant(-below), False)
    return a - scaled(quotient(a, below), Fraction(below))


def _fine(form: Polynomial) -> Polynomial:
    """Returns the closed form if floats hold it exactly. Errors: NotFollowed if not."""
    if FRACTION % form.denominator:
        raise NotFollowed
    return form


def _less(a: Polynomial, b: Polynomial) -> Polynomial:
    below = Fraction((b - a).denominator)
    return is_less(scaled(a, below), scaled(b, below))


def _equal(a: Polynomial, b: Polynomial) -> Polynomial:
    """Returns 1 if two sizes are equal for all values of symbols, 0 if they never are. Errors:
    NotFollowed for other pairs, as no sample shows at which sizes they are equal."""
    equal = ONE - _less(a, b) - _less(b, a)
    number_of(equal)
    return equal


def _power(a: Polynomial, b: Polynomial) -> Polynomial:
    exponent = number_of(b)
    if exponent not in (1, 2, 3):
        raise NotFollowed
    return reduce(lambda x, y: x * y, [a] * int(exponent))


def _clipped(operands: Sequence[Forms], attributes: dict[str, Any], _: bool) -> Forms:
    if len(operands) != 3 or attributes:
        raise NotFollowed
    x, low, high = operands
    return _each(minimum, _each(maximum, x, low), high)


def _cast(operands: Sequence[Forms], attributes: dict[str, Any], is_float: bool) -> Forms:
    to = onnx.helper.tensor_dtype_to_np_dtype(attributes["to"])
    if to.kind == "f":
        return operands[0]
    if to.kind == "b":
        return _each(lambda p: minimum(_absolute(p), ONE), operands[0])
    if to.kind not in "iu":
        raise NotFollowed
    return _each(lambda p: truncated(p, 1), operands[0]) if is_float else operands[0]


def _absolute(form: Polynomial) -> Polynomial:
    return maximum(form, MINUS * form)


def _reduced(function: Callable[..., Polynomial]) -> Callable[..., Forms]:
    """Returns a reduction (ReduceSum, ...) on arrays of closed forms, given its function of two
    elements."""

    def reduce_forms(operands: Sequence[Forms], attributes: dict[str, Any], _: bool) -> Forms:
        data = operands[0]
        has_axes = len(operands) > 1
        axes = numbers(operands[1], np.dtype(np.int64)).tolist() if has_axes else []
        if not axes:
            if attributes.get("noop_with_empty_axes"):
                raise NotFollowed
            axes = list(range(data.ndim))
        if not data.size:
            raise NotFollowed
        total = data
        for axis in sorted((a % data.ndim for a in axes), reverse=True):
            rows = [np.take(total, [i], axis) for i in range(total.shape[axis])]
            total = reduce(lambda a, b: _each(function, a, b), rows)
            if not attributes.get("keepdims", 1):
                total = np.squeeze(total, axis)
        return total

    return reduce_forms


def _range(operands: Sequence[Forms], _: dict[str, Any], __: bool) -> Forms:
    start, limit, delta = (o.reshape(-1)[0] for o in operands)
    step = number_of(delta)
    count = int(number_of(steps(start, limit, step)))
    return _each(lambda i: start + scaled(delta, Fraction(i)), np.arange(count).astype(object))


def steps(start: Polynomial, end: Polynomial, step: Fraction) -> Polynomial:
    """Returns the number of elements of range(start, end, step). Errors: NotFollowed for a step of
    0."""
    if not step:
        raise NotFollowed
    return maximum(rounded_up(scaled(end - start, 1 / step), 1), ZERO)


def _pairs(function: Callable[..., Polynomial]) -> Callable[..., Forms]:
    """Makes a function on arrays from one on one or two elements; three and more operands are
    combined from the left."""
    return lambda operands, _, __: (
        _each(function, *operands)
        if len(operands) <= 2
        else reduce(lambda a, b: _each(function, a, b), operands)
    )


def _chosen(condition: Polynomial, a: Polynomial, b: Polynomial) -> Polynomial:
    return b + condition * (a - b)


_COMPUTED: dict[str, Callable[[Sequence[Forms], dict[str, Any], bool], Forms]] = {
    "Abs": _pairs(_absolute),
    "Add": _pairs(lambda a, b: a + b),
    "And": _pairs(lambda a, b: a * b),
    "Cast": _cast,
    "Ceil": _pairs(lambda p: rounded_up(p, 1)),
    "Clip": _clipped,
    "Div": lambda o, _, is_float: _each(lambda a, b: _divided(a, b, is_float), *o),
    "Equal": _pairs(_equal),
    "Floor": _pairs(lambda p: quotient(p, 1)),
    "Greater": _pairs(lambda a, b: _less(b, a)),
    "GreaterOrEqual": _pairs(lambda a, b: ONE - _less(a, b)),
    "Less": _pairs(_less),
    "LessOrEqual": _pairs(lambda a, b: ONE - _less(b, a)),
    "Max": _pairs(maximum),
    "Min": _pairs(minimum),
    "Mod": lambda o, attributes, is_float: _each(
        lambda a, b: _remainder(a, b, bool(attributes.get("fmod", 0))), *o
    ),
    "Mul": lambda o, _, is_float: _each(lambda a, b: _fine(a * b) if is_float else a * b, *o),
    "Neg": _pairs(lambda p: MINUS * p),
    "Not": _pairs(lambda p: ONE - p),
    "Or": _pairs(lambda a, b: a + b - a * b),
    "Pow": _pairs(_power),
    "Range": _range,
    "ReduceMax": _reduced(maximum),
    "ReduceMin": _reduced(minimum),
    "ReduceProd": _reduced(lambda a, b: a * b),
    "ReduceSum": _reduced(lambda a, b: a + b),
    "Relu": _pairs(lambda p: maximum(p, ZERO)),
    "Sign": _pairs(lambda p: _less(ZERO, p) - _less(p, ZERO)),
    "Sub": _pairs(lambda a, b: a - b),
    "Sum": _pairs(lambda a, b: a + b),
    "Where": lambda o, _, __: _each(_chosen, *o),
    "Xor": _pairs(lambda a, b: a + b - a * b - a * b),
}
