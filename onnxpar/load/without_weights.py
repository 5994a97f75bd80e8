"""Writes a graph that the loader made of a model, against which `onnxpar verify` proves ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import onnx
from onnx import helper

STATES = "onnxpar.states"
"""The property of a file that has the (input, output) pairs of its states, as JSON."""
WEIGHTS = "onnxpar.weights"
"""The property that has the files with the weights, by the prefix of their names in the graph."""


def without_weights(
    model: onnx.ModelProto,
    weights: Collection[str],
    files: Mapping[str, str],
    states: Sequence[tuple[str, str]],
) -> bytes:
    """Returns a model as a file in which these initializers, which are in other files, are inputs,
    and which names its states."""
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    helper.set_model_props(bare, {STATES: json.dumps(states), WEIGHTS: json.dumps(files)})
    bare.functions.extend(model.functions)
    own = model.graph
    bare.graph.name = own.name
    bare.graph.node.extend(own.node)
    bare.graph.output.extend(own.output)
    bare.graph.input.extend(own.input)
    bare.graph.sparse_initializer.extend(own.sparse_initializer)
    given = {port.name for port in own.input}
    for tensor in own.initializer:
        if tensor.name not in weights:
            bare.graph.initializer.append(tensor)
        elif tensor.name not in given:
            port = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            bare.graph.input.append(port)
    return bytes(bare.SerializeToString(deterministic=True))
