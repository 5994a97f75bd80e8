"""Converts models of old opsets to a newer one, node by node; all else in the model stays as it is.

onnx.version_converter, which does the same, drops metadata, relabels Scan-8 as Scan-9, which has
another meaning, and samples other points in Resize-10. So only models of opsets before 7 go through
it.
"""

from __future__ import annotations

from contextlib import suppress

import onnx
import onnx.version_converter
from onnx import GraphProto

from onnxpar.base.errors import ModelError
from onnxpar.graph.patterns import Match, Op, rewrite
from onnxpar.graph.stored import (
    copy_with_stubs,
    graphs_of,
    is_folded,
    nodes_of,
    without_data,
)
from onnxpar.load.changed_ops import CHANGES, NEED_TYPES, NoEquivalentError, Surroundings

OLDEST, NEWEST = 7, 18
"""The oldest opset that is converted here, and the least that passes see: since then, all
reductions take their axes as an operand."""
_ONNX = ("", "ai.onnx")


def upgrade(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """Returns the model with ONNX's ops at opset NEWEST or newer; it may be changed in place.
    `what` names the model in errors.

    Errors: ModelError that names a node without an equivalent in the opset.
    """
    if all(o.domain not in _ONNX for o in model.opset_import):
        model.opset_import.add(domain="", version=NEWEST)
    model = _from_oldest(model, what)
    imports = [o for o in model.opset_import if o.domain in _ONNX]
    have = imports[0].version
    if have < NEWEST:
        _Upgrade(model, have, what).run(model.graph)
        for entry in imports:
            entry.version = NEWEST
    return model


class _Upgrade:
    """Converts the nodes of one model from opset `have` to NEWEST. `what` names the model in
    errors."""

    def __init__(self, model: onnx.ModelProto, have: int, what: str) -> None:
        self.have, self.what = have, what
        self.read = _read(model.graph)
        typed = {op for op, since in CHANGES if have < since and op in NEED_TYPES}
        is_typed = any(node.op_type in typed for node in nodes_of(model.graph))
        self.types = _types(model) if is_typed else {}

    def run(self, graph: GraphProto) -> None:
        """Converts the nodes of a graph and its bodies."""
        ops = tuple(op for op, since in CHANGES if since > self.have)
        rewrite(graph, {Op(ops): self._convert})

    def _convert(self, match: Match) -> None:
        """Converts one node, opset by opset. Errors: ModelError if it has no equivalent."""
        node, at = match.node, Surroundings(match.scope, self.types, self.read)
        op, name = node.op_type, node.name or next(iter(node.output), "")
        for version in range(self.have + 1, NEWEST + 1):
            change = CHANGES.get((node.op_type, version))
            if change is None:
                continue
            try:
                change(node, at)
            except NoEquivalentError as reason:
                raise ModelError(
                    f"{self.what}: {op} '{name}' of opset {self.have} has no equivalent in opset "
                    f"{NEWEST}: {reason}; export the model with opset {NEWEST} or newer"
                ) from None
        match.nodes = [*at.before, node, *at.after]


def _from_oldest(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    """Returns the model at opset 7 or newer: converts opsets 1 to 6 with ONNX's converter, which
    drops metadata, but models of that age have none. `what` names the model in errors."""
    opset = min(o.version for o in model.opset_import if o.domain in _ONNX)
    if opset >= OLDEST:
        return model
    try:
        return onnx.version_converter.convert_version(model, OLDEST)
    except (
        RuntimeError,
        onnx.version_converter.ConvertError,
        onnx.shape_inference.InferenceError,
    ) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{what}: cannot convert opset {opset} to {OLDEST}: {reason}; export the model with "
            f"opset {NEWEST} or newer"
        ) from None


def _read(graph: GraphProto) -> set[str]:
    """Returns all names that nodes or outputs read, at any depth."""
    graphs = list(graphs_of(graph))
    read = {name for each in graphs for node in each.node for name in node.input}
    return read | {port.name for each in graphs for port in each.output}


def _types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    """Returns the types of tensors by name, as far as ONNX infers them."""
    bare = copy_with_stubs(model, lambda t: None if is_folded(t) else without_data(t))
    with suppress(RuntimeError, onnx.shape_inference.InferenceError):
        bare = onnx.shape_inference.infer_shapes(bare)
    types: dict[str, onnx.TypeProto.Tensor] = {}
    for graph in graphs_of(bare.graph):
        for port in (*graph.input, *graph.output, *graph.value_info):
            if port.type.HasField("tensor_type"):
                types[port.name] = port.type.tensor_type
        for tensor in graph.initializer:
            kind = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            types[tensor.name] = kind.tensor_type
    return types
