"""Keeps onnxruntime from removing a Dropout whose result the graph returns.

onnxruntime removes a Dropout, also one that trains, unless the graph returns its result, or a node
reads its mask. On ranks, a collective may be between the result and the output.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.tensors import constant, dtype_of, given

_TRAINING = 2
"""The operand that says whether a Dropout trains."""


def keep_dropouts(graph: gs.Graph) -> None:
    """Lets a Where read the mask of each Dropout whose result the graph returns, so that
    onnxruntime keeps the Dropout. The Where changes no number."""
    for tensor in graph.outputs:
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None or node.op != "Dropout" or node.outputs[0] is not tensor:
            continue
        training = given(node, _TRAINING)
        value = None if training is None else constant(training)
        if training is None or (value is not None and not value.any()):
            continue
        dropped = gs.Variable(f"{tensor.name}::dropped", tensor.dtype, tensor.shape)
        mask = gs.Variable(f"{tensor.name}::mask", np.bool_, tensor.shape)
        if len(node.outputs) < 2:
            node.outputs.append(mask)
        elif not node.outputs[1].name:
            node.outputs[1] = mask
        node.outputs[0] = dropped
        zero = gs.Constant(f"{tensor.name}::zero", np.zeros((), dtype_of(tensor)))
        reads = gs.Node(
            "Where", f"{node.name}::kept", {}, [node.outputs[1], dropped, zero], [tensor]
        )
        graph.nodes.insert(graph.nodes.index(node) + 1, reads)
