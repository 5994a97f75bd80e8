"""The model as it is evaluated during training: in inference mode, maybe with averaged weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.graph.clone import clone_nodes, needed
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.subgraphs import all_nodes, nodes_within
from onnxpar.graph.training_spec import AVERAGE
from onnxpar.training.draws import is_off


def copy_for_use(
    graph: gs.Graph, takes_statistics: bool, always: bool = False
) -> dict[str, gs.Tensor] | None:
    """Appends copies of a model's nodes in which Dropout returns its input and BatchNormalization
    uses its running statistics. Returns the copies of the model's outputs by name; None, without
    copies, if no node behaves differently in training.

    takes_statistics  True if every BatchNormalization will be set to training mode
    always            True to copy the nodes in any case
    """
    if not always and not any(_differs(node, takes_statistics) for node in all_nodes(graph)):
        return None
    copies, tensors = clone_nodes(list(graph.nodes), "evaluation/")
    inner = gs.Graph(copies, opset=graph.opset)
    for node in all_nodes(inner):
        if node.op == "Dropout":
            while len(node.inputs) > 2:
                node.inputs.pop()
        elif node.domain == DOMAIN:
            node.attrs.pop("tag", None)  # each collective has one of its own
        elif node.op == "BatchNormalization":
            node.attrs["training_mode"] = 0
            while len(node.outputs) > 1:
                node.outputs.pop()
    graph.nodes.extend(copies)
    return {t.name: tensors.get(id(t), t) for t in graph.outputs}


def read_averages(
    graph: gs.Graph, evaluated: Collection[str], parameters: Sequence[gs.Variable]
) -> dict[str, gs.Variable]:
    """Makes the nodes that compute `evaluated` (names of tensors) read moving averages of the
    parameters instead of the parameters. Returns the averages by parameter: new inputs with the
    parameters' initial values. Other nodes still read the parameters."""
    averages: dict[str, gs.Variable] = {}
    for parameter in parameters:
        average = gs.Variable(f"{parameter.name}.{AVERAGE}", parameter.dtype, list(parameter.shape))
        start = TensorProto()
        start.CopyFrom(parameter.onnx_default)
        start.name = average.name
        average.onnx_default = start
        graph.inputs.append(average)
        averages[parameter.name] = average
    own = {id(p): averages[p.name] for p in parameters}
    for node in nodes_within(needed(graph, evaluated)):
        for i, tensor in enumerate(node.inputs):
            if id(tensor) in own:
                node.inputs[i] = own[id(tensor)]
    return averages


def _differs(node: gs.Node, takes_statistics: bool) -> bool:
    """True if a node behaves differently in training and in inference."""
    if node.op == "BatchNormalization":
        return takes_statistics or bool(node.attrs.get("training_mode"))
    return node.op == "Dropout" and not is_off(node)
