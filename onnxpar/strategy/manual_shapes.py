"""Infers the shapes of a manual program (a model that its author wrote for one rank), as far as
they agree on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import NodeProto, TypeProto, numpy_helper

from onnxpar.base.arrays import Array
from onnxpar.graph.collectives import DOMAIN, RANK_CONSTANTS
from onnxpar.graph.shape_inference import Walk

Results = list[tuple[TypeProto | None, Array | None]]
"""The type of each result of a node, and its value if that is known."""


class RankWalk:
    """Infers types node by node. The op Rank gives each rank its own number; a value computed from
    it is evaluated for each rank, and a size that then differs between ranks stays open.

    members       a function from a node to a list with, for each rank, the ranks of its group and
                  its position in the group
    types         a function that infers the results of collectives, Rank and GroupSize
    for_training  True replaces nodes by their values, unless these depend on weights

    The inferred types are in the field `walk`.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        members: Callable[[NodeProto], Sequence[tuple[Sequence[int], int]]],
        types: Callable[[NodeProto, Walk], dict[str, TypeProto]],
        for_training: bool,
    ) -> None:
        weights = {t.name for t in model.graph.initializer} if for_training else None
        self.walk = Walk(model, keep=weights)
        self._known = self.walk.fold if for_training else self.walk.know
        self._varying: dict[str, list[Array]] = {}
        for node in model.graph.node:
            if node.domain == DOMAIN:
                self.walk.types.update(types(node, self.walk))
                if node.op_type in RANK_CONSTANTS:
                    self._constant(node, members(node))
            elif any(name in self._varying for name in node.input):
                self._by_rank(node)
            elif (values := self.walk.evaluate(node)) is not None:
                self._known(node, values)
            else:
                self.walk.infer(node)

    def _constant(self, node: NodeProto, members: Sequence[tuple[Sequence[int], int]]) -> None:
        """Notes the value of a Rank or GroupSize node: one value, or a value for each rank."""
        values = [at if node.op_type == "Rank" else len(group) for group, at in members]
        if node.op_type == "GroupSize" and len(set(values)) == 1:
            self._known(node, [np.array(values[0])])
        else:
            self._varying[node.output[0]] = [np.array(value) for value in values]

    def _by_rank(self, node: NodeProto) -> None:
        """Infers a node once for each rank, as an operand has another value on each rank. Keeps the
        sizes of its results that agree on all ranks."""
        reads = [name for name in dict.fromkeys(node.input) if name in self._varying]
        by_operands: dict[tuple[bytes, ...], Results] = {}
        ranks = []
        for rank in range(len(self._varying[reads[0]])):
            operands = {name: self._varying[name][rank] for name in reads}
            key = tuple(repr(array.shape).encode() + array.tobytes() for array in operands.values())
            if key not in by_operands:
                by_operands[key] = self._with(operands, node)
            ranks.append(by_operands[key])
        for i, name in enumerate(node.output):
            types = [results[i][0] for results in by_operands.values()]
            common = common_type(types)
            if name and common is not None:
                self.walk.types[name] = common
            values = [results[i][1] for results in ranks]
            if name and all(value is not None for value in values):
                self._varying[name] = [np.asarray(value) for value in values]

    def _with(self, operands: dict[str, Array], node: NodeProto) -> Results:
        """Returns the node's results if its operands have the values `operands`. The walk's own
        types and values stay as they were."""
        walk = self.walk
        before = {name: walk.types[name] for name in operands}
        for name, array in operands.items():
            walk.values[name] = array
            walk.protos[name] = numpy_helper.from_array(array, name)
            walk.types[name] = onnx.helper.make_tensor_type_proto(
                walk.protos[name].data_type, list(array.shape)
            )
        for name in node.output:
            walk.types.pop(name, None)
        values = walk.evaluate(node)
        if values is not None:
            walk.know(node, values)
        else:
            walk.infer(node)
        results: Results = [(walk.types.get(n), walk.values.get(n)) for n in node.output]
        for name in (*operands, *node.output):
            walk.values.pop(name, None)
            walk.protos.pop(name, None)
        walk.types.update(before)
        return results


def common_type(types: Sequence[TypeProto | None]) -> TypeProto | None:
    """Returns a type that fits all these types, with sizes that differ left open: [2, 3] and [2, 4]
    give [2, ?]. None if one of the types is unknown."""
    first = types[0]
    if first is None or any(t is None for t in types):
        return None
    common = TypeProto()
    common.CopyFrom(first)
    shapes = [_dims(t) for t in types if t is not None]
    if any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
        common.tensor_type.ClearField("shape")
        return common
    for i, dim in enumerate(common.tensor_type.shape.dim):
        if len({shape[i] for shape in shapes if shape is not None}) > 1:
            dim.Clear()
    return common


def _dims(type_: TypeProto) -> list[int | str] | None:
    """Returns the sizes of a tensor type, as numbers or names; None if it has no shape."""
    if not type_.tensor_type.HasField("shape"):
        return None
    return [
        d.dim_value if d.HasField("dim_value") else d.dim_param for d in type_.tensor_type.shape.dim
    ]
