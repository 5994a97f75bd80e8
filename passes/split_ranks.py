"""split-ranks: one graph and one set of weight slices per rank, as a folder that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, numpy_helper

from onnxpar.model import stored_proto
from onnxpar.passes.pass_ import Pass, PassContext
from onnxpar.weights import WeightStore


@dataclass(frozen=True)
class SplitRanks(Pass):
    """Instantiate the coordinates of every rank and write its files to `output`.

    Requires a localized and ordered graph. Ensures `rank_0000.onnx` ... and their weights; the
    folder must exist. `progress` is told bytes of weights as they are read.
    """

    name: ClassVar[str] = "split-ranks"
    output: Path
    progress: Callable[[int], None] = lambda n: None

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        mesh = ctx.sharding.mesh
        store = WeightStore(self.output, ctx.model.folder, mesh, self.progress)
        constants = [t for t in graph.tensors().values() if isinstance(t, gs.Constant)]
        weights: dict[str, list[TensorProto]] = {}
        for tensor in constants:
            if tensor.name in ctx.layouts and tensor.name not in ctx.per_rank.constants:
                proto = weight_proto(tensor)
                weights[tensor.name] = store.cut(tensor.name, proto, ctx.layouts[tensor.name])
                tensor._values = gs.ir.tensor.LazyValues(_stub(proto))
        template = _export(graph)
        for rank in range(mesh.size):
            model = onnx.ModelProto()
            model.CopyFrom(template)
            _instantiate(model, ctx, weights, rank)
            (self.output / f"rank_{rank:04d}.onnx").write_bytes(model.SerializeToString())
        return False


def weight_proto(tensor: gs.Constant) -> TensorProto:
    """The initializer behind a constant, unread where it is stored in a file."""
    return stored_proto(tensor) or numpy_helper.from_array(tensor.values, tensor.name)


def _stub(proto: TensorProto) -> TensorProto:
    """Type without data: `_instantiate` puts each rank's part in its place."""
    return TensorProto(data_type=proto.data_type, dims=[0], raw_data=b"")


def _export(graph: gs.Graph) -> onnx.ModelProto:
    for node in graph.nodes:
        node.attrs.pop("onnxpar.opset", None)
    model: onnx.ModelProto = gs.export_onnx(graph)
    model.ir_version = graph.ir_version
    model.producer_name = "onnxpar"
    del model.graph.value_info[:]
    return model


def _instantiate(
    model: onnx.ModelProto, ctx: PassContext, weights: dict[str, list[TensorProto]], rank: int
) -> None:
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name][rank])
        elif tensor.name in ctx.per_rank.constants:
            value = ctx.per_rank.constants[tensor.name](rank)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    by_node: dict[str, dict[str, Callable[[int], Any]]] = {}
    for (name, attribute), function in ctx.per_rank.attributes.items():
        by_node.setdefault(name, {})[attribute] = function
    for node in model.graph.node:
        varying = by_node.get(node.name, {})
        kept = [a for a in node.attribute if a.name not in varying]
        if varying:
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.extend(
                onnx.helper.make_attribute(k, f(rank)) for k, f in varying.items()
            )
    for port in [*model.graph.input, *model.graph.output]:
        layout = ctx.layouts.get(port.name)
        if layout is not None:
            shape = layout.local_shape(ctx.sharding.mesh, rank)
            dtype = port.type.tensor_type.elem_type
            port.CopyFrom(onnx.helper.make_tensor_value_info(port.name, dtype, shape))
