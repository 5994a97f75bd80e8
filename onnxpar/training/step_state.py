"""A model while rewrites turn it into a training step, and the request for the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.subgraphs import constants
from onnxpar.graph.training_spec import SAMPLES, Step
from onnxpar.load.load import Model
from onnxpar.training.batch import Batch
from onnxpar.training.batch_norm import BatchNorm
from onnxpar.training.cautions import (
    cautions_of_batch_norm,
    cautions_of_cosines,
    cautions_of_probabilities,
    cautions_of_variance,
)
from onnxpar.training.decay import undecayed
from onnxpar.training.gradients.trained import Weights
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.gradients.vjp import is_message
from onnxpar.training.lazy import Rows
from onnxpar.training.loss_scale import LossScale
from onnxpar.training.loss_settings import DEFAULT_SETTINGS, LossSettings
from onnxpar.training.means import Mean, Metrics, Targets
from onnxpar.training.optimizer import Optimizer
from onnxpar.training.parameter_groups import Group
from onnxpar.training.precision import check_precision
from onnxpar.training.program import Program
from onnxpar.training.recompute import Block, find_blocks, named_blocks
from onnxpar.training.sampled_classes import ALL_CLASSES, Sample, Sampling

MOST_TURNS = 1 << 20
"""The largest number of micro-batches in a step: the batch grows by this factor, and sizes must fit
an int64."""


@dataclass(frozen=True)
class StepRequest:
    """The request for a training step: options of `grad` with the same names, and those listed
    here. Without an optimizer, the step returns the gradients.

    output      the output that the loss compares with the target, if the model has several
    settings    settings of the loss
    scale       factor of the loss; gradients are divided by it again
    sampling    the fraction of classes that a step computes
    batch_dims  by input, the dimension that numbers samples; None for an input without one
    groups      parameters with hyperparameters of their own; the last group that matches applies
    program     whether the model is one global program, or a program for each rank
    """

    loss: str
    output: str | None = None
    settings: LossSettings = DEFAULT_SETTINGS
    params: Sequence[str] = ()
    frozen: Sequence[str] = ()
    batch_norm: BatchNorm = BatchNorm()  # noqa: RUF009
    precision: str | None = None
    scale: LossScale | None = None
    recompute: bool = False
    lazy: Sequence[str] = ()
    recompute_nodes: Sequence[str] = ()
    sampling: Sampling = ALL_CLASSES
    stop_gradient: Sequence[str] = ()
    padding_idx: Mapping[str, int] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    groups: Sequence[Group] = ()
    decay_all: bool = False
    ema: float | None = None
    program: Program = Program()  # noqa: RUF009

    def __post_init__(self) -> None:
        """Checks that the options fit each other. Errors: StrategyError."""
        check_precision(self.precision)
        if self.recompute and self.recompute_nodes:
            raise StrategyError(
                "--recompute and --recompute-nodes: give only one of them; --recompute chooses "
                "among all nodes"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise StrategyError(f"--clip-norm {self.clip_norm}: must be above 0")
        if self.accumulate != 1 and not 2 <= self.accumulate <= MOST_TURNS:
            raise StrategyError(
                f"--accumulate {self.accumulate}: give a number of micro-batches from 2 to "
                f"{MOST_TURNS}"
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise StrategyError(f"--ema {self.ema}: must be from 0 to below 1")
        updating = {"--group": self.groups, "--ema": self.ema is not None, "--lazy": self.lazy}
        for option, is_given in updating.items():
            if is_given and self.optimizer is None:
                raise StrategyError(f"{option} is for steps that update; give an --optimizer")
        if self.lazy and self.accumulate != 1:
            raise StrategyError(
                "--lazy and --accumulate: micro-batches look up different rows; leave one out"
            )
        if self.lazy and self.ema is not None:
            raise StrategyError(
                "--lazy and --ema: each step moves the averages of all rows; leave one out"
            )

    def blocks(
        self, nodes: Sequence[gs.Node], parameters: Collection[str], loss: str
    ) -> list[Block]:
        """Returns the blocks of a forward pass that the backward pass computes again; none unless
        the user asks for this. `loss` is the name of the loss. Errors: StrategyError."""
        if self.recompute_nodes:
            return named_blocks(nodes, parameters, self.recompute_nodes)
        return find_blocks(nodes, parameters, loss) if self.recompute else []

    @property
    def has_dynamic_scale(self) -> bool:
        """True if the factor of the loss changes with the gradients."""
        return self.scale is not None and self.scale.dynamic


class StepState:
    """A model while rewrites turn it into a training step, with the tensors that they find in it
    and add to it. Each rewrite (`BACKWARD`, `UPDATE`) takes this object and sets some of its
    fields."""

    weights: Weights
    targets: Targets
    metrics: Metrics  # in training, before the division by the number of elements that count
    loss: Value
    step: Step
    builder: Builder  # of the update
    total: Value  # the sum of the squares of all gradients

    def __init__(self, model: Model, request: StepRequest) -> None:
        self.model, self.request = model, request
        self.path = model.path
        self.graph = self.content = model.graph
        graph, which = model.graph, (request.loss, request.output)
        stored = [t for t in constants(graph) if t.name in model.stored]
        self.shapes = {t.name: t.shape or () for t in (*stored, *graph.outputs)}  # of the model
        self.undecayed = () if request.decay_all else undecayed(graph)
        self.cautions = [
            *cautions_of_batch_norm(model, request.batch_norm),
            *cautions_of_variance(graph, request.batch_norm),
            *cautions_of_cosines(graph, *which),
            *cautions_of_probabilities(graph, *which),
        ]
        self.renamed: Mapping[str, str] = {}  # old names by new names
        self.batch: Batch | None = None
        self.parts: Mapping[str, gs.Variable] = {}  # weights of which each rank has a shard
        self.frozen: Sequence[gs.Tensor] = ()  # only the user's choice keeps them from training
        self.norms: Sequence[gs.Node] = ()
        self.used: Mapping[str, gs.Tensor] | None = None  # outputs of the copy for evaluations
        self.apart: Collection[int] = ()  # the nodes of this copy, by id()
        self.running: list[tuple[gs.Tensor, gs.Tensor]] = []  # statistics, with their next values
        self.sample: Sample | None = None  # of classes
        self.evaluated: dict[str, Value] = {}  # metrics in inference mode
        self.weights_of: Mapping[str, Value] = {}  # of these metrics, if not all labels count
        # Divisors of means over labels, by id() of the number. In a graph for one of several
        # micro-batches: its own number, which `accumulate` replaces by the sum over all.
        self.counts: dict[int, Value] = {}
        self.parameters: list[gs.Variable] = []
        self.scale: Value | None = None
        self.lookups: Mapping[str, list[gs.Node]] = {}  # by lazily trained table
        self.forward = 0  # number of nodes of the forward pass
        self.blocks: Sequence[Block] = ()  # computed again
        self.by_tensor: dict[str, Value | None] = {}  # gradients, also of blocks and looked-up rows
        self.gradients: dict[str, Value] = {}  # by parameter on which the loss depends
        self.rows: dict[str, Rows] = {}  # by lazily trained table, whose gradient is by slot
        self.averages: Mapping[str, gs.Variable] = {}  # of parameters
        self.finite: Value | None = None  # whether all gradients are; None if nothing depends on it

    @property
    def outputs(self) -> dict[str, gs.Tensor]:
        """The outputs of the model by their names in the model."""
        return {self.renamed.get(t.name, t.name): t for t in self.graph.outputs}

    @property
    def which(self) -> tuple[str, str | None, LossSettings]:
        """(loss, output, settings): the arguments of `add_loss`."""
        return self.request.loss, self.request.output, self.request.settings

    @property
    def has_messages(self) -> bool:
        """True for Sends and Recvs, which must run exactly once in a step: then there is no copy of
        the model for evaluations, and no run of a part of the step."""
        return any(is_message(node) for node in self.graph.nodes)

    @property
    def scalar_dtype(self) -> np.dtype[Any]:
        """The dtype for numbers computed from all gradients, such as their norm."""
        return np.result_type(np.float32, *(g.dtype for g in self.gradients.values()))

    @property
    def batch_dims(self) -> dict[str, int]:
        """The dimension that numbers samples, by input of the step."""
        if self.batch is None:
            return {}
        own = [t for name, t in self.targets.made.items() if name != SAMPLES]
        at, size = self.batch.of_labels, self.batch.size
        has = [t.name for t in own if len(t.shape) > at and t.shape[at] == size]
        return {**self.batch.dims, **dict.fromkeys(has, at)}

    @property
    def results(self) -> list[gs.Tensor]:
        """The loss, the metrics of evaluations, and the next values of running statistics."""
        values = (self.loss, *self.evaluated.values(), *self.counts.values())
        return [*(value.tensor for value in values), *(after for _, after in self.running)]

    def share_of(self, mean: Mean) -> Value:
        """Returns this graph's part of a mean over all micro-batches and ranks; the parts add up to
        the mean."""
        turns, ranks = self.request.accumulate, self.request.program.count
        return mean.of(self.count_of(mean), turns * ranks)

    def count_of(self, mean: Mean) -> Value | None:
        """Returns the divisor of a mean over all ranks, in the form of `Mean.count`; None if all
        elements count. It is the number of one micro-batch until `accumulate` replaces it by the
        number of all."""
        if mean.count is None:
            return None
        key = id(mean.count)
        if key not in self.counts:
            is_whole, program = self.request.accumulate == 1, self.request.program
            self.counts[key] = program.summed(self.graph, mean.count) if is_whole else mean.count
        return self.counts[key]
