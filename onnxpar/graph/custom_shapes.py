"""Shapes of the results of custom ops, as the ops' sharding rules define them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, numpy_helper

from onnxpar.graph.tensors import Size

Shape = Sequence[Size] | None
"""The sizes of a tensor, with None for unknown ones; None if even the number of dimensions is
unknown."""
ShapeFunction = Callable[[gs.Node], Sequence[Shape]]
"""Returns the shapes of a node's results; the node's operands have shapes, and values where
known."""
_functions: dict[tuple[str, str], ShapeFunction] = {}


def register_shapes(domain: str, op: str, function: ShapeFunction) -> None:
    """Registers the function that returns the shapes of an op's results."""
    _functions[domain, op] = function


def custom_shapes(
    node: NodeProto,
    types: Mapping[str, TypeProto],
    values: Mapping[str, TensorProto],
    opset: int,
) -> Iterator[tuple[str, Shape]]:
    """Yields (name, shape) of each result of a node of a registered op; nothing for other ops, or
    if the type of an operand is unknown. Errors: those of the registered function.

    types   types of tensors, by name
    values  known values of tensors, by name
    """
    find = _functions.get((node.domain, node.op_type))
    names = [name for name in node.input if name]
    if find is None or any(a.type == AttributeProto.GRAPH for a in node.attribute):
        return
    if any(name not in types or not types[name].HasField("tensor_type") for name in names):
        return
    tensors = OrderedDict((n, _tensor(n, types[n], values.get(n))) for n in names)
    known = gs.importers.onnx_importer.OnnxImporter.import_node(
        node, tensors, OrderedDict(), opset, None
    )
    yield from zip(node.output, find(known), strict=False)


def _tensor(name: str, type_: TypeProto, value: TensorProto | None) -> gs.Tensor:
    if value is not None:
        return gs.Constant(name, numpy_helper.to_array(value))
    tensor = type_.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return gs.Variable(name, dtype, sizes if tensor.HasField("shape") else None)
