"""Small models and the files of their ranks, written by hand as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import onnxpar
from onnxpar.equivalence.verification import Verification

Weights = Mapping[str, np.ndarray]
Text = tuple[str, Weights]
"""The text of a graph, and its weights."""
_HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
_KINDS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "AllToAll": "all_to_all",
}  # fmt: skip
_CALL = re.compile(rf"\b({'|'.join(_KINDS)})(\[[\d, ]*\])?(:max)?\(")


def weights(seed: int = 0, **shapes: Sequence[int]) -> dict[str, np.ndarray]:
    """Drawn weights with these shapes."""
    random = np.random.default_rng(seed)
    return {n: random.standard_normal(shape).astype("f") for n, shape in shapes.items()}


def parsed(graph: Text, ranks: int) -> onnx.ModelProto:
    """A graph. `AllReduce[0,1](x)` is TensorRT's DistCollective of that group, or of all ranks;
    `AllReduce:max` takes the maximum."""

    def node(match: re.Match[str]) -> str:
        kind, group, largest = match.groups()
        count = group.count(",") + 1 if group else ranks
        reduction = ("max" if largest else "sum") if "Reduce" in kind else "none"
        groups = f", groups={group}, group_size={count}" if group else ""
        return (
            f'DistCollective<collective_operation="{_KINDS[kind]}", reduce_op="{reduction}", '
            f"nb_rank={count}{groups}, root=-1>("
        )

    text, values = graph
    model = onnx.parser.parse_model(_HEADER + _CALL.sub(node, text))
    for name, value in values.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, order="C"), name))
    return model


def verified(
    folder: Path, model: Text, ranks: Sequence[Text], ports: Mapping[str, object]
) -> Verification:
    """Writes a model and its ranks, and verifies them."""
    par = folder / "hand.par"
    par.mkdir(parents=True)
    onnx.save(parsed(model, 1), folder / "model.onnx")
    for rank, text in enumerate(ranks):
        onnx.save(parsed(text, len(ranks)), par / f"rank_{rank:04d}.onnx")
    (par / "ports.json").write_text(json.dumps(ports))
    return onnxpar.verify(folder / "model.onnx", par)


Values = dict[str, np.ndarray]


def computed(model: Text, feeds: Values) -> Values:
    """The outputs of a model without collectives, by the reference evaluator of ONNX."""
    proto = parsed(model, 1)
    names = [port.name for port in proto.graph.output]
    return dict(zip(names, ReferenceEvaluator(proto).run(names, feeds), strict=True))


def simulated(ranks: Sequence[Text], feeds: Sequence[Values]) -> list[Values]:
    """The outputs of ranks in lock step: nodes by the reference evaluator of ONNX, collectives by
    NumPy. All ranks have the same nodes, but for groups."""
    graphs = [parsed(text, len(ranks)).graph for text in ranks]
    values = [
        {t.name: numpy_helper.to_array(t) for t in graph.initializer} | feed
        for graph, feed in zip(graphs, feeds, strict=True)
    ]
    for nodes in zip(*(graph.node for graph in graphs), strict=True):
        if nodes[0].op_type not in ("DistCollective", "AllGather"):
            for node, own in zip(nodes, values, strict=True):
                own.update(_run(node, own))
            continue
        sent = [own[node.input[0]] for node, own in zip(nodes, values, strict=True)]
        for rank, (node, own) in enumerate(zip(nodes, values, strict=True)):
            own[node.output[0]] = _exchanged(node, rank, sent)
    return [
        {port.name: own[port.name] for port in graph.output}
        for graph, own in zip(graphs, values, strict=True)
    ]


def _run(node: onnx.NodeProto, values: Values) -> Values:
    inputs = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input)]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = onnx.helper.make_graph([node], "node", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    feeds = {name: values[name] for name in node.input}
    return dict(zip(node.output, ReferenceEvaluator(model).run(None, feeds), strict=True))


def _exchanged(node: onnx.NodeProto, rank: int, sent: Sequence[np.ndarray]) -> np.ndarray:
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    group = list(attrs.get("groups", range(len(sent))))
    parts, me = [sent[member] for member in group], group.index(rank)
    if node.op_type == "AllGather":
        return np.concatenate(parts, attrs["axis"])
    kind, reduction = attrs["collective_operation"].decode(), attrs["reduce_op"].decode()
    if kind == "all_gather":
        return np.concatenate(parts)
    if kind == "all_to_all":
        return np.concatenate([np.split(part, len(group))[me] for part in parts])
    whole = np.max(parts, 0) if reduction == "max" else np.sum(parts, 0, dtype=parts[0].dtype)
    return whole if kind == "all_reduce" else np.split(whole, len(group))[me]
