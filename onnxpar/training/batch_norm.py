"""BatchNormalization in training: sets the samples over which it takes statistics, and updates its
running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.graph.subgraphs import scopes
from onnxpar.graph.tensors import float_attr
from onnxpar.load.load import Model
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.rewrite import replace_node

UNBIASED = "unbiased"
VARIANCES = ("biased", UNBIASED)
"""The variance of a batch by which a running variance moves: over its n numbers, as ONNX says, or
n/(n-1) of it, as in PyTorch."""
STATISTICS = ("global", "node", "local")
"""The samples over which statistics are taken: all samples of a batch, of a host, or of a rank."""


@dataclass(frozen=True)
class BatchNorm:
    """How BatchNormalization nodes compute in training.

    statistics  the samples over which they take statistics, one of STATISTICS; None: nodes in
                training mode take statistics of the batch, other nodes use their running statistics
    groups      number of groups into which the batch is divided, each with its own statistics.
                Ranks that split the batch by groups then need not communicate, and the model is
                still one global program
    variance    one of VARIANCES; None is biased
    """

    statistics: str | None = None
    groups: int | None = None
    variance: str | None = None

    @classmethod
    def parse(cls, text: str | None, groups: int | None) -> BatchNorm:
        """Reads the values of `--batch-norm`, such as "global,unbiased", and of `--groups`. Errors:
        StrategyError."""
        words = [word.strip() for word in text.split(",")] if text is not None else []
        statistics, variances = ([w for w in words if w in of] for of in (STATISTICS, VARIANCES))
        if max(len(statistics), len(variances), len(words) - 1) > 1 or (
            len(words) != len(statistics) + len(variances)
        ):
            raise StrategyError(
                f"--batch-norm {text!r}: give one of {', '.join(STATISTICS)}, one of "
                f"{', '.join(VARIANCES)}, or one of each with a comma between them"
            )
        options = cls(next(iter(statistics), None), groups, next(iter(variances), None))
        options._check()
        return options

    def _check(self) -> None:
        """Checks that the options fit each other. Errors: StrategyError."""
        if self.statistics is None:
            if self.groups is not None:
                raise StrategyError("--groups needs --batch-norm node or --batch-norm local")
            return
        if (self.statistics == "global") != (self.groups is None):
            raise StrategyError(
                "--batch-norm node needs --groups with the number of hosts, --batch-norm local "
                "needs it with the number of ranks; --batch-norm global takes no --groups"
            )
        if self.groups is not None and self.groups < 1:
            raise StrategyError(f"--groups {self.groups}: must be at least 1")


def settle_batch_norms(
    model: Model, nodes: Sequence[gs.Node], options: BatchNorm
) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """Makes BatchNormalization nodes compute what the options say, in place. Returns (running
    statistic, its next value) for each statistic that a step updates. Errors: StrategyError;
    ModelError if the model has no BatchNormalization."""
    statistics, groups, variance = options.statistics, options.groups, options.variance
    if statistics is not None:
        _check(model, nodes, groups)
    running = []
    for node in nodes:
        if statistics is not None:
            node.attrs["training_mode"] = 1
        if not node.attrs.get("training_mode"):
            continue
        scale = _bessel(node, groups) if variance == UNBIASED else 1.0
        pairs = _running(node)
        if scale != 1.0:
            pairs[1] = _scaled(model.graph, node, pairs[1], scale)
        if statistics in ("node", "local") and (groups or 1) > 1:
            _regroup(model.graph, node, groups or 1)
        running += pairs
    if variance is not None and not running:
        raise StrategyError(
            f"--batch-norm {variance}: no BatchNormalization updates a running variance; leave it "
            f"out, or give --batch-norm global,{variance}"
        )
    return running


def numbers_of(node: gs.Node, groups: int | None) -> int:
    """Returns the number of values over which a BatchNormalization takes each statistic (of a
    channel), if the batch is divided into `groups` with their own statistics (None: one group)."""
    batch, _, *space = node.inputs[0].shape
    return int(batch // (groups or 1) * prod(space))


def _bessel(node: gs.Node, groups: int | None) -> float:
    """Returns n / (n - 1), the factor from the variance over n numbers to the unbiased one. Errors:
    StrategyError if n is 1."""
    count = numbers_of(node, groups)
    if count < 2:
        raise StrategyError(
            f"--batch-norm unbiased: BatchNormalization '{node.name}' has statistics over a "
            "single number, which has no unbiased variance; choose larger batches, or biased"
        )
    return count / (count - 1)


def _scaled(
    graph: gs.Graph, node: gs.Node, pair: tuple[gs.Tensor, gs.Tensor], scale: float
) -> tuple[gs.Tensor, gs.Tensor]:
    """Makes a node move its running variance by `scale` times the variance of a batch. Returns the
    running variance with its next value; `pair` has both as they are without a scale.

    The node reads the running variance divided by `scale`, and its result is multiplied:
    onnxruntime's kernel overwrites what it reads, so no node behind it can read the running
    variance itself.
    """
    before, after = pair
    scope = next(s for s in scopes(graph) if any(n is node for n in s.nodes))
    builder = Builder(scope, f"{node.name}/variance")
    node.inputs[4] = (builder.value(before) * (1 / scale)).tensor
    at = next(i for i, n in enumerate(scope.nodes) if n is node)
    scope.nodes.insert(at, scope.nodes.pop())
    return before, (builder.value(after) * scale).tensor


def _check(model: Model, nodes: Sequence[gs.Node], groups: int | None) -> None:
    """Checks that the model has batch-norms whose batch divides into the groups. Errors:
    StrategyError, ModelError."""
    if not nodes:
        raise ModelError(
            f"{model.path} has no BatchNormalization. If the export folded it into the weights, "
            "export the model again with torch.onnx.export(..., dynamo=False, "
            "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)"
        )
    for node in nodes:
        batch = node.inputs[0].shape[0]
        if groups is not None and batch % groups:
            raise StrategyError(
                f"--groups {groups}: a batch of {batch} cannot be divided into {groups} equal "
                "groups; choose a divisor of the batch"
            )


def _running(node: gs.Node) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """Returns two pairs (running mean, output that updates it) and (running variance, output that
    updates it) of a node. Adds missing outputs to the node."""
    while len(node.outputs) < 3:
        index = len(node.outputs)
        tensor = node.inputs[index + 2]
        name = f"{node.name}/running.{index}"
        node.outputs.append(gs.Variable(name, tensor.dtype, list(tensor.shape)))
    return [(node.inputs[i + 2], node.outputs[i]) for i in (1, 2)]


def _regroup(graph: gs.Graph, node: gs.Node, groups: int) -> None:
    """Replaces a BatchNormalization by nodes that normalize each of `groups` groups of samples with
    the group's own statistics."""
    epsilon, momentum = float_attr(node, "epsilon", 1e-5), float_attr(node, "momentum", 0.9)

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
