"""Makes the graph on which passes work from a model whose types are inferred."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.base.errors import ModelError
from onnxpar.base.names import Names
from onnxpar.graph.interchange import import_graph, reopen
from onnxpar.graph.used_names import check_names, names_of
from onnxpar.load.encoder_decoder import drop_decoder
from onnxpar.load.fused_units import separate_dequantized
from onnxpar.load.kept_bounds import keep_bounds
from onnxpar.load.kept_dropouts import keep_dropouts
from onnxpar.load.name_nodes import name_nodes
from onnxpar.load.scan_axes import scan_first_axes
from onnxpar.load.sequences import split_sequences
from onnxpar.load.stack_experts import stack_experts
from onnxpar.load.tolerated import scalar_bounds


class Importer:
    """Makes graphs for passes from a model with inferred types: one graph, or one for each sample
    of the open sizes of a model.

    defaults      values of inputs that need not be fed
    names         the names in the model
    is_open       True if the model has open sizes
    for_training  True if a training step will be made of the model
    is_cut        True for an encoder behind which there are projections of its decoder
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        path: Path,
        defaults: Mapping[str, TensorProto],
        names: Names,
        is_open: bool,
        for_training: bool,
        is_cut: bool,
    ) -> None:
        self.path, self.defaults, self.names = path, defaults, names
        self.is_open, self.for_training, self.is_cut = is_open, for_training, is_cut
        ports = (*proto.graph.input, *proto.graph.output)
        self.declared = {port.name: _type_copy(port.type) for port in ports}

    def graph(self, inferred: onnx.ModelProto) -> gs.Graph:
        """Returns the graph on which passes work. `inferred` is the model with all types. Errors:
        ModelError for an output without a type."""
        _check_outputs(inferred.graph, self.path)
        name_nodes(inferred.graph, self.names)
        graph = import_graph(inferred, self.defaults, self.path.parent)
        scalar_bounds(graph)
        if self.is_cut:
            drop_decoder(graph)
        for tensor in graph.outputs:
            tensor.onnx_declared = self.declared[tensor.name]
        if self.is_open:
            reopen(graph, self.declared)
        else:
            split_sequences(graph)
        if not self.for_training:
            keep_dropouts(graph)
            _unshare_vectors(graph)
            separate_dequantized(graph)
        keep_bounds(graph)
        scan_first_axes(graph)
        stack_experts(graph, self.path.parent, in_nodes=self.for_training)
        check_names(graph, f"reading {self.path}")
        return graph


def _check_outputs(graph: onnx.GraphProto, path: Path) -> None:
    """Errors: ModelError for an output whose type is neither declared nor inferred."""
    for port in graph.output:
        kind = port.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not port.type.tensor_type.elem_type):
            raise ModelError(
                f"{path}: output {port.name!r} has no type, and none can be inferred; declare one "
                "with onnx.helper.make_tensor_value_info"
            )


def _type_copy(type_: onnx.TypeProto) -> onnx.TypeProto:
    copy = onnx.TypeProto()
    copy.CopyFrom(type_)
    return copy


def _unshare_vectors(graph: gs.Graph) -> None:
    """Gives each node that reads a stored vector a copy of its own.

    Exporters store equal vectors once (biases of zeros), though they belong to different
    dimensions, which may be split differently.
    """
    names = names_of(graph)
    for tensor in list(graph.tensors().values()):
        is_vector = isinstance(tensor, gs.Constant) and len(tensor.shape) == 1
        if not is_vector or str(tensor.dtype) in ("int64", "bool", "object"):
            continue
        for i, node in enumerate(_different(tensor.outputs)[1:], 1):
            name = names.free(f"{tensor.name}@{i}")
            copy = gs.Constant(name, tensor._values, export_dtype=tensor.export_dtype)
            for at, operand in enumerate(node.inputs):
                if operand is tensor:
                    node.inputs[at] = copy


def _different(nodes: Iterable[gs.Node]) -> list[gs.Node]:
    """Returns the nodes without duplicates. Nodes are compared by identity: `==` would compare
    attributes."""
    return list({id(node): node for node in nodes}.values())
