"""Conversions of single nodes from one opset of ONNX to a newer one, where more than types and
optional operands has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.graph.patterns import Scope

_SIMPLE = "asymmetric"
"""The coordinates of Resize before opset 11."""


class NoEquivalentError(Exception):
    """A node has no equivalent in a newer opset; the message says why."""


@dataclass
class Surroundings:
    """The graph around a node to convert, and the nodes to insert before and after it.

    scope   the graph of the node
    types   types of tensors by name, as far as they are known
    read    names of tensors that a node or an output reads
    before  nodes to insert before the node
    after   nodes to insert after the node
    """

    scope: Scope
    types: Mapping[str, onnx.TypeProto.Tensor]
    read: Collection[str]
    before: list[NodeProto] = field(default_factory=list)
    after: list[NodeProto] = field(default_factory=list)

    def free(self, node: NodeProto) -> str:
        """Returns a new name that begins with the name of the node's first result."""
        of = next(name for name in node.output if name)
        return self.scope.names.free(f"{of}.{len(self.before) + len(self.after)}")

    def add(self, node: NodeProto, op: str, operands: list[str], **attrs: Any) -> str:
        """Inserts a node before `node`; returns the name of its result."""
        name = self.free(node)
        self.before.append(helper.make_node(op, operands, [name], **attrs))
        return name

    def constant(self, node: NodeProto, value: Any, element: int = TensorProto.INT64) -> str:
        """Inserts a constant before `node`, of the ONNX data type `element`; returns its name."""
        array = np.asarray(value, helper.tensor_dtype_to_np_dtype(element))
        return self.add(node, "Constant", [], value=numpy_helper.from_array(array))

    def element(self, name: str) -> int:
        """Returns the ONNX data type of a tensor. Errors: NoEquivalentError if it is unknown."""
        type_ = self.types.get(name)
        if type_ is None or not type_.elem_type:
            raise NoEquivalentError(f"the dtype of {name!r} cannot be inferred")
        return type_.elem_type

    def rank(self, name: str) -> int | None:
        """Returns the number of dimensions of a tensor; None if it is unknown."""
        type_ = self.types.get(name)
        return len(type_.shape.dim) if type_ is not None and type_.HasField("shape") else None

    def value(self, name: str) -> Array | None:
        """Returns the value of a constant that the file of the model has; None for any other
        tensor."""
        maker = next((n for n in self.before if list(n.output) == [name]), None)
        if maker is not None and maker.op_type == "Constant":
            return numpy_helper.to_array(maker.attribute[0].t)
        return self.scope.value(name)


Change = Callable[[NodeProto, Surroundings], None]


def _take(node: NodeProto, name: str, default: Any = None) -> Any:
    """Removes an attribute from the node, and returns its value; `default` if the node does not
    have it."""
    for i, attribute in enumerate(node.attribute):
        if attribute.name == name:
            value = helper.get_attribute_value(attribute)
            del node.attribute[i]
            return value
    return default


def _set(node: NodeProto, name: str, value: Any) -> None:
    """Gives the node an attribute, in place of one of this name."""
    _take(node, name)
    node.attribute.append(helper.make_attribute(name, value))


def _give(node: NodeProto, index: int, name: str) -> None:
    """Makes `name` operand `index` of the node."""
    node.input.extend([""] * (index + 1 - len(node.input)))
    node.input[index] = name


def _as_operand(key: str, index: int = 1) -> Change:
    """Returns a change of a node that turns its attribute `key`, a list of integers, into its
    operand `index`. Split, Squeeze and Unsqueeze changed so in opset 13."""

    def change(node: NodeProto, at: Surroundings) -> None:
        value = _take(node, key)
        if value is not None:
            _give(node, index, at.constant(node, value))

    return change


def _reduced(node: NodeProto, at: Surroundings) -> None:
    """Turns the attribute `axes` of a reduction into an operand; an empty list is left out."""
    axes = _take(node, "axes")
    if axes:
        _give(node, 1, at.constant(node, axes))


def _slice(node: NodeProto, at: Surroundings) -> None:
    """Turns the attributes of a Slice into operands."""
    starts, ends, axes = (_take(node, key) for key in ("starts", "ends", "axes"))
    for i, value in enumerate((starts, ends, axes or range(len(starts))), 1):
        _give(node, i, at.constant(node, list(value)))


def _top_k(node: NodeProto, at: Surroundings) -> None:
    _give(node, 1, at.constant(node, [_take(node, "k")]))


def _upsample_scales(node: NodeProto, at: Surroundings) -> None:
    _give(node, 1, at.constant(node, _take(node, "scales"), TensorProto.FLOAT))


def _renamed(op: str) -> Change:
    """Returns a change of a node that only gives it another op."""

    def change(node: NodeProto, at: Surroundings) -> None:
        node.op_type = op

    return change


def _resize(node: NodeProto, at: Surroundings) -> None:
    """Converts a Resize of opset 10. For the mode "nearest", onnxruntime's kernel takes the nearest
    point above where it shrinks, and the one below where it grows: both take two Resizes."""
    scales = node.input[1]
    roi = at.constant(node, [], TensorProto.FLOAT)
    node.input[1:] = [roi, scales]
    _set(node, "coordinate_transformation_mode", _SIMPLE)
    if any(a.name == "mode" and a.s != b"nearest" for a in node.attribute):
        return
    values = at.value(scales)
    shrinks = values is None or bool((values < 1).any())
    grows = values is None or bool((values > 1).any())
    if shrinks and grows:
        larger, smaller = _apart(node, scales, at)
        attrs = {"coordinate_transformation_mode": _SIMPLE, "nearest_mode": "floor"}
        x = at.add(node, "Resize", [node.input[0], roi, larger], **attrs)
        node.input[:] = [x, roi, smaller]
    _set(node, "nearest_mode", "ceil" if shrinks else "floor")


def _apart(node: NodeProto, scales: str, at: Surroundings) -> list[str]:
    """Returns the scales of a Resize as two constants: those above 1, and those below 1, each with
    1 in place of the others."""
    values = at.value(scales)
    if values is not None:
        parts = (np.maximum(values, 1), np.minimum(values, 1))
        return [at.constant(node, part, TensorProto.FLOAT) for part in parts]
    one = at.constant(node, [1], TensorProto.FLOAT)
    return [at.add(node, op, [scales, one]) for op in ("Max", "Min")]


def _clip(node: NodeProto, at: Surroundings) -> None:
    """Turns the attributes `min` and `max` of a Clip into operands of its data type."""
    for i, key in enumerate(("min", "max"), 1):
        bound = _take(node, key)
        if bound is not None:
            _give(node, i, at.constant(node, bound, at.element(node.input[0])))


def _pad(node: NodeProto, at: Surroundings) -> None:
    """Turns the attributes `pads` and `value` of a Pad into operands."""
    pads, value = _take(node, "pads"), _take(node, "value", 0.0)
    _give(node, 1, at.constant(node, pads))
    if value:
        _give(node, 2, at.constant(node, value, at.element(node.input[0])))


def _dropout_mask(node: NodeProto, at: Surroundings) -> None:
    """Drops the mask of a Dropout. Errors: NoEquivalentError if a node reads it."""
    if len(node.output) > 1 and node.output[1] in at.read:
        raise NoEquivalentError("a node reads its mask, which is not a bool before opset 10")
    del node.output[1:]


def _dropout(node: NodeProto, at: Surroundings) -> None:
    """Turns the attribute `ratio` of a Dropout into an operand. Negates the mask, if a node reads
    it: onnxruntime's mask is all false before opset 12, and all true since."""
    ratio = _take(node, "ratio")
    if ratio is not None:
        _give(node, 1, at.constant(node, ratio, TensorProto.FLOAT))
    if len(node.output) > 1 and node.output[1] in at.read:
        mask, node.output[1] = node.output[1], at.free(node)
        at.after.append(helper.make_node("Not", [node.output[1]], [mask]))


def _batch_norm(node: NodeProto, at: Surroundings) -> None:
    """Drops the attribute `spatial`. Errors: NoEquivalentError if it is 0."""
    if _take(node, "spatial", 1) == 0:
        raise NoEquivalentError("spatial=0")


def _statistics(node: NodeProto, at: Surroundings) -> None:
    """Drops the statistics that a BatchNormalization returns. Errors: NoEquivalentError if a node
    reads them."""
    if any(name in at.read for name in node.output[1:]):
        raise NoEquivalentError("a node reads its statistics")
    del node.output[1:]


def _scan(node: NodeProto, at: Surroundings) -> None:
    """Converts a Scan of opset 8, which has a batch of sequences as its first dimension: a Scan
    over the batch, whose body is a Scan over one sequence. Errors: NoEquivalentError for sequences
    of different lengths."""
    if node.input[0]:
        raise NoEquivalentError("it scans sequences of different lengths")
    body = _take(node, "body")
    inputs, outputs = (
        [
            helper.make_tensor_value_info(
                at.scope.names.free(f"{port.name}.each"), port.type.tensor_type.elem_type, None
            )
            for port in ports
        ]
        for ports in (body.input, body.output)
    )
    inner = helper.make_node(
        "Scan",
        [port.name for port in inputs],
        [port.name for port in outputs],
        body=body,
        num_scan_inputs=_take(node, "num_scan_inputs"),
        scan_input_directions=_take(node, "directions"),
    )
    del node.input[0]
    _set(node, "num_scan_inputs", len(node.input))
    _set(node, "body", helper.make_graph([inner], "each", inputs, outputs))


def _flattening(node: NodeProto, at: Surroundings) -> None:
    """Converts Softmax, LogSoftmax and Hardmax: before opset 13 they normalize over all dimensions
    from `axis` on together, since then over one."""
    x, axis, rank = node.input[0], _take(node, "axis", 1), at.rank(node.input[0])
    _set(node, "axis", -1)
    if axis == -1 or (rank is not None and axis == rank - 1):
        return
    shape = at.add(node, "Shape", [x])
    node.input[0] = at.add(node, "Flatten", [x], axis=axis)
    result, flat = node.output[0], at.free(node)
    node.output[0] = flat
    at.after.append(helper.make_node("Reshape", [flat, shape], [result]))


def _softplus(node: NodeProto, at: Surroundings) -> None:
    """Computes a Softplus of float16 in float32, between Casts, as onnxruntime does before opset
    18. Since then, it computes Log(Exp(x) + 1) in float16, which overflows."""
    type_ = at.types.get(node.input[0])
    if type_ is not None and type_.elem_type == TensorProto.FLOAT16:
        node.input[0] = at.add(node, "Cast", [node.input[0]], to=TensorProto.FLOAT)
        result, node.output[0] = node.output[0], at.free(node)
        cast = helper.make_node("Cast", [node.output[0]], [result], to=TensorProto.FLOAT16)
        at.after.append(cast)


def _parts(node: NodeProto, at: Surroundings) -> None:
    """Gives a Split without sizes the attribute `num_outputs`."""
    if len(node.input) < 2:
        _set(node, "num_outputs", len(node.output))


def _aligned(node: NodeProto, at: Surroundings) -> None:
    """Gives a RoiAlign the coordinates that were its only ones before opset 16."""
    _set(node, "coordinate_transformation_mode", "output_half_pixel")


CHANGES: dict[tuple[str, int], Change] = {
    ("Scan", 9): _scan,
    ("BatchNormalization", 9): _batch_norm,
    ("Upsample", 9): _upsample_scales,
    ("Upsample", 10): _renamed("Resize"),
    ("Dropout", 10): _dropout_mask,
    ("Slice", 10): _slice,
    ("TopK", 10): _top_k,
    ("Resize", 11): _resize,
    ("Clip", 11): _clip,
    ("Pad", 11): _pad,
    ("Scatter", 11): _renamed("ScatterElements"),
    ("Dropout", 12): _dropout,
    ("Softmax", 13): _flattening,
    ("LogSoftmax", 13): _flattening,
    ("Hardmax", 13): _flattening,
    ("Split", 13): _as_operand("split"),
    ("Squeeze", 13): _as_operand("axes"),
    ("Unsqueeze", 13): _as_operand("axes"),
    ("ReduceSum", 13): _reduced,
    ("BatchNormalization", 14): _statistics,
    ("RoiAlign", 16): _aligned,
    ("Split", 18): _parts,
    ("Softplus", 18): _softplus,
    **{
        (f"Reduce{kind}", 18): _reduced
        for kind in ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]
    },
}
"""The change of a node to an opset, by its op and the opset."""
NEED_TYPES = frozenset({"Clip", "Pad", "Softmax", "LogSoftmax", "Hardmax", "Softplus"})
"""Ops whose change depends on the types of their operands."""
