"""The model as its file has it: a rank that computes the whole model runs this, so that onnxruntime
finds the ops that it would find in the unsplit model, and computes the same bits."""

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

    model    without the data of its initializers
    weights  the initializers with their data, of which there is no second copy
    path     its file
    dims, shapes  the sizes that the user gives to its inputs
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
        """Takes a model that has no functions."""
        weights = list(proto.graph.initializer)
        return StoredModel(copy_with_stubs(proto, without_data), weights, path, dims, shapes)

    def bound(self) -> onnx.ModelProto:
        """The model, changed only in form: it has no annotations, sparse weights are dense, nodes
        have names, weights no reserved ones, and inputs have the sizes that the user gives. It
        begins with the initializers in `weights`, without data."""
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
