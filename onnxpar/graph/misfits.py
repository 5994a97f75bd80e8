"""Rejects nodes that cannot run on their operands, as onnxruntime does when it loads the model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onnx import NodeProto, TypeProto, helper

from onnxpar.base.errors import ModelError
from onnxpar.graph.kernel_sizes import known_sizes
from onnxpar.graph.shape_inference import Walk


def check_fits(walks: Sequence[Walk], node: NodeProto) -> None:
    """Checks a node that ONNX's inference rejects at all sample sizes (a walk each): asks
    onnxruntime, with the types and values of operands that are equal in all walks. Errors:
    ModelError if onnxruntime rejects the node as well."""
    names = [name for name in node.input if name]
    if any(name not in walk.types for name in names for walk in walks):
        return
    types = {name: _common([walk.types[name] for walk in walks]) for name in names}
    first = walks[0]
    values = {
        name: first.protos[name]
        for name in names
        if name in first.protos
        and all(walk.protos.get(name) == first.protos[name] for walk in walks)
    }
    reason = first.runtime.refusal(node, types, values)
    if reason is None:
        return
    name = node.name or next(o for o in node.output if o)
    operands = ", ".join(_text(types[n]) if n else "nothing" for n in node.input)
    raise ModelError(
        f"{node.op_type} '{name}' cannot run on {operands}: {_reason(reason)}; export the model "
        "again, or correct the sizes of --dim where any are given"
    )


def _common(types: Sequence[TypeProto]) -> TypeProto:
    """Returns the first type without the sizes in which the others differ."""
    common = TypeProto()
    common.CopyFrom(types[0])
    shapes = [known_sizes(type_) for type_ in types]
    ranks = {None if shape is None else len(shape) for shape in shapes}
    if ranks == {None}:
        return common
    if len(ranks) > 1:
        common.tensor_type.ClearField("shape")
        return common
    for i, column in enumerate(zip(*(shape or () for shape in shapes), strict=True)):
        if len(set(column)) > 1:
            common.tensor_type.shape.dim[i].Clear()
    return common


def _text(type_: TypeProto) -> str:
    """The text of a type: `float32[2, 8]`, or `float32` if the number of dimensions is unknown."""
    if not type_.HasField("tensor_type"):
        return str(type_.WhichOneof("value")).removesuffix("_type")
    name = str(helper.tensor_dtype_to_np_dtype(type_.tensor_type.elem_type))
    sizes = known_sizes(type_)
    return name if sizes is None else f"{name}[{', '.join(str(s or '?') for s in sizes)}]"


def _reason(text: str) -> str:
    """Returns onnxruntime's message without its error codes and source locations."""
    return re.sub(r"^.*(\[\w+\]|: FAIL :)( Exception during loading:)?", "", text).strip(" .")
