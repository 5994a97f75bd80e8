"""The model as its file has it, for a rank that computes the whole model: onnxruntime then finds
the ops that it would find in the unsplit model, and computes the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxpar.graph.annotations import clear_annotations
from onnxpar.graph.input_sizes import bind_dims, fix_shapes
from onnxpar.graph.stored import copy_with_stubs, densify, lift_constants, without_data
from onnxpar.graph.used_names import names_in
from onnxpar.load.name_nodes import name_nodes
from onnxpar.load.unfuse import free_names


@dataclass(frozen=True)
class StoredModel:
    """A model before the loader rewrites it.

    model         the model, without the data of its initializers
    weights       the initializers, with the only copy of their data
    path          the file
    dims, shapes  the sizes of inputs that the user sets, by symbol, and by input
    """

    model: onnx.ModelProto
    weights: Sequence[onnx.TensorProto]
    path: Path
    dims: Mapping[str, int | str]
    shapes: Mapping[str, Sequence[int]]

    @staticmethod
    def of(
        proto: onnx.ModelProto,
        path: Path,
        dims: Mapping[str, int | str],
        shapes: Mapping[str, Sequence[int]],
    ) -> StoredModel:
        """Returns the stored form of a model that has no functions; the other arguments are the
        fields."""
        weights = list(proto.graph.initializer)
        return StoredModel(copy_with_stubs(proto, without_data), weights, path, dims, shapes)

    def bound(self) -> onnx.ModelProto:
        """Returns a copy of the model, changed only in form: without annotations, sparse weights as
        dense ones, with names for all nodes and no reserved names of weights, and with the sizes
        that the user sets. Its first initializers are those in `weights`, without data."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.model)
        clear_annotations(proto)
        densify(proto.graph, self.path.parent)
        lift_constants(proto.graph)
        free_names(proto.graph)
        name_nodes(proto.graph, names_in(proto.graph))
        fix_shapes(proto.graph, self.shapes)
        bind_dims(proto.graph, self.dims, self.path)
        return proto
