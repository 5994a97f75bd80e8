"""BatchNormalization in training: over which samples it takes its statistics, and what becomes of
the running ones."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from onnxpar.errors import ModelError, StrategyError
from onnxpar.grad.value import Builder, Value
from onnxpar.load.load import Model
from onnxpar.training.rewrite import replace_node

STATISTICS = ("global", "node", "local")
"""Over all samples of a batch, over those of a host, or over those of a rank."""


def settle_batch_norms(
    model: Model, nodes: Sequence[gs.Node], statistics: str | None, groups: int | None
) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """Lets BatchNormalizations of a model take the statistics asked for; returns the running ones,
    what they are and what they become.

    Those that are in training mode take them over the batch; where nothing is asked for,
    others keep using the running ones. With `groups`, the batch `(g b)` has statistics for each g,
    so that a batch that is split over g needs no talk between ranks, and still is one program.
    Errors: StrategyError, ModelError where the model has none.
    """
    if statistics is None and groups is not None:
        raise StrategyError("--groups is for --batch-norm node or local")
    if statistics is not None:
        _check(model, nodes, statistics, groups)
    running = []
    for node in nodes:
        if statistics is not None:
            node.attrs["training_mode"] = 1
        if not node.attrs.get("training_mode"):
            continue
        pairs = _running(node)
        if statistics in ("node", "local") and (groups or 1) > 1:
            _regroup(model.graph, node, groups or 1)
        running += pairs
    return running


def _check(model: Model, nodes: Sequence[gs.Node], statistics: str, groups: int | None) -> None:
    if statistics not in STATISTICS:
        raise StrategyError(f"batch-norm {statistics!r}: there are {', '.join(STATISTICS)}")
    if not nodes:
        raise ModelError(
            f"{model.path}: has no BatchNormalization, be it that it was folded into the weights; "
            "export it with torch.onnx.export(..., dynamo=False, "
            "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)"
        )
    if (statistics == "global") != (groups is None):
        raise StrategyError(
            "batch-norm node and local need --groups N, the number of hosts or of ranks; global "
            "has none"
        )
    if groups is not None and groups < 1:
        raise StrategyError(f"--groups {groups}: at least 1")
    for node in nodes:
        batch = node.inputs[0].shape[0]
        if groups is not None and batch % groups:
            raise StrategyError(f"a batch of {batch} does not fall into {groups} equal groups")


def _running(node: gs.Node) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """The running mean and variance of a node, with the outputs that update them."""
    while len(node.outputs) < 3:
        index = len(node.outputs)
        tensor = node.inputs[index + 2]
        name = f"{node.name}/running.{index}"
        node.outputs.append(gs.Variable(name, tensor.dtype, list(tensor.shape)))
    return [(node.inputs[i + 2], node.outputs[i]) for i in (1, 2)]


def _regroup(graph: gs.Graph, node: gs.Node, groups: int) -> None:
    """Puts a normalization over each of so many groups in the place of a node."""
    epsilon, momentum = node.attrs.get("epsilon", 1e-5), node.attrs.get("momentum", 0.9)

    def make(builder: Builder, inputs: Sequence[gs.Tensor]) -> Sequence[Value]:
        x, scale, bias, mean, variance = map(builder.value, inputs)
        batch, channels, *space = x.shape
        grouped = x.reshape([groups, batch // groups, channels, *space])
        axes = [1, *range(3, grouped.rank)]
        now = grouped.mean(axes, keepdims=True)
        distance = grouped - now
        spread = (distance * distance).mean(axes, keepdims=True)
        normal = (distance / (spread + epsilon).sqrt()).reshape(x.shape)
        by_channel = [-1, *[1] * len(space)]
        y = normal * scale.reshape(by_channel) + bias.reshape(by_channel)
        others = [a for a in range(grouped.rank) if a != 2]
        running = [
            old * momentum + new.mean(others) * (1 - momentum)
            for old, new in ((mean, now), (variance, spread))
        ]
        return [y, *running]

    replace_node(graph, node, make)
