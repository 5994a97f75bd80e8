"""Appends a loss and its gradients with respect to the trained weights to a model's graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.graph.clone import needed
from onnxpar.graph.interchange import default_of
from onnxpar.graph.lazy_values import stored_proto
from onnxpar.graph.subgraphs import all_nodes, constants, nodes_within, replace_reads, scopes
from onnxpar.graph.training_spec import AVERAGE, EVALUATION, MAGNITUDES, SAMPLES, SCALE, SEED
from onnxpar.load.load import Model
from onnxpar.training.batch import Batch, find_batch
from onnxpar.training.batch_norm import BatchNorm, settle_batch_norms
from onnxpar.training.cautions_of_stops import cautions_of_stops
from onnxpar.training.draws import seed_draws
from onnxpar.training.equal_nodes import merge_equal
from onnxpar.training.evaluation import copy_for_use, read_averages
from onnxpar.training.gradients.reverse import gradients
from onnxpar.training.gradients.trained import Left, Weights, find_trained
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.gradients.vjp import is_message
from onnxpar.training.lazy import Rows, lazy_lookups, lookup_gradient, sampled_gradient
from onnxpar.training.loss_scale import GOOD, LossScale
from onnxpar.training.loss_settings import DEFAULT_SETTINGS, LossSettings
from onnxpar.training.losses import LOSSES, add_loss, check_loss, compared_by
from onnxpar.training.means import Mean, Targets
from onnxpar.training.precision import check_precision, lower_precision
from onnxpar.training.program import Program
from onnxpar.training.read_rows import drop_unread_rows
from onnxpar.training.recompute import Block, find_blocks, named_blocks, recompute
from onnxpar.training.rewrite import as_constant
from onnxpar.training.sampling import ALL_CLASSES, Sample, Sampling, sample_loss
from onnxpar.training.stops import stop_gradients

LOSS = "loss"
PORTS = (LOSS, "learning_rate", "step", SEED, "gradient_norm", "skipped", SCALE, GOOD, MAGNITUDES)
ENDINGS = (
    ".next",
    ".grad",
    ".again",
    f".{AVERAGE}",
    f"{EVALUATION}.loss",
    f"{EVALUATION}.accuracy",
)
"""Suffixes of the names of tensors that a training step adds to a model."""


@dataclass(frozen=True)
class LossOptions:
    """Options of the forward and backward passes: those of `grad` by the same names, and these.

    output      the output that the loss compares with the target, if the model has several
    settings    settings of the loss
    scale       factor of the loss; gradients are divided by it again
    sampling    the fraction of classes that a step computes
    batch_dims  by input, the dimension that numbers samples; None for an input without one
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

    def blocks(
        self, nodes: Sequence[gs.Node], parameters: Collection[str], loss: str
    ) -> list[Block]:
        """Returns the blocks of a forward pass that are computed again. Errors: StrategyError."""
        if self.recompute_nodes:
            return named_blocks(nodes, parameters, self.recompute_nodes)
        return find_blocks(nodes, parameters, loss) if self.recompute else []

    def __post_init__(self) -> None:
        """Checks what needs no model. Errors: StrategyError."""
        check_precision(self.precision)
        if self.recompute and self.recompute_nodes:
            raise StrategyError(
                "--recompute and --recompute-nodes: give only one of them; --recompute chooses "
                "among all nodes"
            )


@dataclass(frozen=True)
class Backward:
    """A loss and its gradients, by parameter.

    evaluated   the loss and other metrics of the model in inference mode, by name
    weights     the trained and untrained weights
    parameters  the trained weights, as graph inputs with default values
    running     pairs of a running statistic, also such an input, and its next value
    scale       the factor by which gradients must be divided
    rows        the looked-up rows, by lazily trained table; the gradient of such a table is by slot
    sample      the sampled classes, if the loss is over a sample of them
    targets     the inputs that the loss compares the output with, by role
    counts      divisors of means over labels. In a graph for one of several micro-batches: its own
                count, which `accumulate` replaces by the sum over all
    averages    the moving averages of the parameters, as graph inputs, by parameter; empty if there
                are none
    weights_of  the weight of each mean of an evaluation, by name, if not all labels count
    cautions    sentences on gradients that may differ from torch's
    batch       the batch; None if there is none
    frozen      the weights that only the user's choice keeps from training, as graph inputs
    """

    loss: Value
    evaluated: dict[str, Value]
    weights: Weights
    parameters: list[gs.Variable]
    gradients: dict[str, Value]
    running: list[tuple[gs.Variable, gs.Variable]]
    scale: Value | None = None
    rows: Mapping[str, Rows] = field(default_factory=dict)
    sample: Sample | None = None
    targets: Mapping[str, gs.Variable] = field(default_factory=dict)

    counts: Sequence[Value] = ()
    weights_of: Mapping[str, Value] = field(default_factory=dict)
    cautions: Sequence[str] = ()
    averages: Mapping[str, gs.Variable] = field(default_factory=dict)
    batch: Batch | None = None
    frozen: Sequence[gs.Variable] = ()

    @property
    def batch_dims(self) -> dict[str, int]:
        """The dimension that numbers samples, by input of the step."""
        if self.batch is None:
            return {}
        own = [t for name, t in self.targets.items() if name != SAMPLES]
        at, size = self.batch.of_labels, self.batch.size
        has = [t.name for t in own if len(t.shape) > at and t.shape[at] == size]
        return {**self.batch.dims, **dict.fromkeys(has, at)}

    @property
    def samples(self) -> gs.Variable | None:
        """The input that says how many samples count, if there is one."""
        return self.targets.get(SAMPLES)


def add_backward(
    model: Model,
    options: LossOptions,
    program: Program | None = None,
    turns: int = 1,
    averages: bool = False,
    updates: bool = True,
) -> Backward:
    """Appends a loss and its gradients with respect to the trained weights to the graph of a model
    that was loaded for training; the graph's outputs do not change. Returns the appended values: of
    one of `turns` micro-batches, and of one of the program's ranks. With `averages`, the model is
    evaluated with moving averages of its parameters. With `updates`, weights that the user freezes
    are graph inputs, too. Errors: StrategyError, ModelError."""
    graph = model.graph
    program = program or Program()
    _check(model, options, program)
    cautions = stop_gradients(graph, options.stop_gradient, options.padding_idx)
    renamed = _free_names(graph)
    ends = _ends(graph, renamed, options)
    weights = find_trained(model, options.params, options.frozen, ends)
    batch = _batch_of(graph, renamed, options, program, turns)
    cautions += cautions_of_stops(model, weights, ends, options.loss not in LOSSES)
    parts = {
        t.name: _as_input(graph, t, program.part_shape(t.name, t.shape))
        for t in constants(graph)
        if program.is_part(t.name)
    }
    # In 16 bits, it matters whether other constants have values that fit.
    frozen = weights.frozen(options.precision is not None) if updates else []
    if options.precision is not None:
        full = {t.name for t in (*weights.trained, *frozen)}
        lower_precision(graph, options.precision, full)
    norms = [n for n in all_nodes(graph) if n.op == "BatchNormalization"]
    # Send and Recv must run exactly once in a step: so there is no copy for evaluation, and no run
    # of a part of the step.
    has_messages = any(is_message(node) for node in graph.nodes)
    is_sampled, count = bool(options.sampling), len(graph.nodes)
    has_copy = is_sampled or averages
    used = (
        None if has_messages else copy_for_use(graph, bool(options.batch_norm.statistics), has_copy)
    )
    apart = {id(node) for node in nodes_within(graph.nodes[count:])}
    seed_draws(graph, SEED)
    running = settle_batch_norms(model, norms, options.batch_norm)
    targets = Targets(graph, batch=batch if program.count == 1 else None)
    outputs = {renamed.get(t.name, t.name): t for t in graph.outputs}
    which = options.loss, options.output, options.settings
    sample = None
    if is_sampled:
        trained = [t.tensor for t in weights.trained]
        sample = sample_loss(graph, outputs, *which, trained, targets, options.sampling)
    of_step = replace(targets, sampled=sample.labels) if sample else targets
    if running:  # statistics are over whole batches
        of_step = replace(of_step, batch=None)
    metrics = add_loss(Builder(graph, "loss"), outputs, *which, of_step)
    means = _Means(graph, program, turns)
    loss = means.of(metrics.loss)
    if used is not None:
        used = {renamed.get(name, name): t for name, t in used.items()}
        metrics = add_loss(Builder(graph, "evaluation"), used, *which, targets)
    measured = {} if has_messages else {"loss": metrics.loss, **metrics.others}
    evaluated = {name: means.of(mean) for name, mean in measured.items()}
    by_mean = {name: means.count_of(mean) for name, mean in measured.items()}
    weights_of = {name: value for name, value in by_mean.items() if value is not None}
    counts = list(dict.fromkeys(means.counts.values()))
    results = [*(v.tensor for v in (loss, *evaluated.values(), *counts)), *(t for _, t in running)]
    drop_unread_rows(graph, results, {t.name for t in weights.trained})
    parameters = [parts.get(t.name) or _as_input(graph, t.tensor) for t in weights.trained]
    held = [parts.get(t.name) or _as_input(graph, t) for t in frozen]
    scale = options.scale.factor(Builder(graph, "scale")) if options.scale else None
    seed = loss.builder.constant(1, loss.dtype) if scale is None else scale.cast(loss.dtype)
    lazy = lazy_lookups(weights.trained, options.lazy, parameters, sample, apart)
    values, rows = _add_gradients(graph, loss.tensor, seed, parameters, options, lazy, sample)
    weights = _settle_lost(graph, weights, values, parts)
    parameters = [p for p in parameters if p.name in values]
    averaged = {}
    if averages:
        averaged = read_averages(graph, [v.tensor.name for v in evaluated.values()], parameters)
    of_rows = [value for each in rows.values() for value in each.values()]
    results = [loss, *evaluated.values(), *counts, *values.values(), *of_rows]
    merge_equal(graph, [*(v.tensor for v in results), *(after for _, after in running)])
    befores = {before.name: before for before, _ in running}  # nodes may share one
    inputs = {name: _as_input(graph, before) for name, before in befores.items()}
    kept = [(inputs[before.name], after) for before, after in running]
    return Backward(
        loss,
        evaluated,
        weights,
        parameters,
        values,
        kept,
        scale,
        rows,
        sample,
        targets.made,
        counts,
        weights_of,
        cautions,
        averaged,
        batch,
        held,
    )


class _Means:
    """Divides the sums of a batch, or of one of `turns` micro-batches, by the number of elements
    that count on all ranks of a program."""

    def __init__(self, graph: gs.Graph, program: Program, turns: int) -> None:
        self.graph, self.program = graph, program
        self.turns = turns
        self.counts: dict[int, Value] = {}

    def of(self, mean: Mean) -> Value:
        """Returns the share of the batch in the mean."""
        return mean.of(self.count_of(mean), self.turns * self.program.count)

    def count_of(self, mean: Mean) -> Value | None:
        """Returns the divisor of the sum; None if all elements count."""
        if mean.count is None:
            return None
        key = id(mean.count)
        if key not in self.counts:
            is_whole = self.turns == 1
            over_ranks = self.program.summed(self.graph, mean.count) if is_whole else mean.count
            self.counts[key] = over_ranks
        return self.counts[key]


def _check(model: Model, options: LossOptions, program: Program) -> None:
    """Errors: StrategyError, ModelError, for options and models that have no backward pass."""
    program.check(options)
    names = [t.name for t in model.graph.outputs]
    check_loss(names, options.loss, options.output, options.settings)
    if model.sizes is not None:
        symbols = ", ".join(model.sizes.symbols)
        raise ModelError(
            f"{model.path}: these sizes are open: {symbols}; set each with --dim NAME=SIZE"
        )


def _batch_of(
    graph: gs.Graph,
    renamed: Mapping[str, str],
    options: LossOptions,
    program: Program,
    turns: int,
) -> Batch | None:
    """Returns the batch of a model; None if it has none. Errors: StrategyError."""
    outputs = {renamed.get(t.name, t.name): t for t in graph.outputs}
    compared = compared_by(outputs, options.loss, options.output, options.settings)
    fed = [t for t in graph.inputs if default_of(t) is None]
    return find_batch(graph, fed, compared, options.batch_dims, program.count == 1, turns > 1)


def _add_gradients(
    graph: gs.Graph,
    loss: gs.Tensor,
    seed: Value,
    parameters: list[gs.Variable],
    options: LossOptions,
    lazy: Mapping[str, list[gs.Node]],
    sample: Sample | None,
) -> tuple[dict[str, Value], dict[str, Rows]]:
    """Appends the gradients of `loss`, times `seed`, and returns them by parameter, without
    parameters on which the loss does not depend. `lazy` has the lookups of each lazily trained
    table; also returns the rows of these tables. Errors: StrategyError."""
    forward = len(graph.nodes)
    names = [p.name for p in parameters]
    blocks = options.blocks(needed(graph, [loss.name]), names, loss.name)
    ends = [block.after for block in blocks]
    dense = [p for p in parameters if p.name not in lazy]
    looked_up = [node.outputs[0] for nodes in lazy.values() for node in nodes]
    by_name = gradients(graph, {loss.name: seed}, [*dense, *ends, *looked_up])
    followed = {t.name: by_name.pop(t.name) for t in ends}
    recompute(graph, forward, blocks, {n: g for n, g in followed.items() if g is not None})
    values: dict[str, Value] = {}
    rows: dict[str, Rows] = {}
    for parameter in parameters:
        name = parameter.name
        gradient = by_name.get(name)
        if name in lazy and sample is not None and name == sample.table:
            gradient, rows[name] = sampled_gradient(sample, parameter, by_name)
        elif name in lazy and (of_rows := lookup_gradient(graph, parameter, lazy[name], by_name)):
            gradient, rows[name] = of_rows
        if gradient is not None:
            values[name] = gradient
    _read_again(graph, forward, [p for p in parameters if p.name in values])
    return values, rows


def _ends(graph: gs.Graph, renamed: Mapping[str, str], options: LossOptions) -> list[str] | None:
    """Returns the output that the options name for the loss, as a list; None if they name none."""
    outputs = {renamed.get(t.name, t.name): str(t.name) for t in graph.outputs}
    for name in (options.loss, options.output):
        if name in outputs:
            return [outputs[name]]
    return None


def _settle_lost(
    graph: gs.Graph, weights: Weights, reached: Collection[str], parts: Collection[str]
) -> Weights:
    """Turns trained weights without a gradient back into constants, except those in `parts`, which
    stay inputs; returns the weights that remain trained or not. Errors: StrategyError if the user
    named such a weight, or if no trained weight is left."""
    lost = [t for t in weights.trained if t.name not in reached]
    asked = [t.name for t in lost if t.name in weights.asked]
    if asked or len(lost) == len(weights.trained):
        name, more = (asked or [t.name for t in lost])[0], len(asked or lost) - 1
        others = f", nor on {more} others" if more else ""
        raise StrategyError(
            f"the loss does not depend on {name!r}{others}, which cannot be trained; give --frozen "
            "for weights that stay as they are"
        )
    inputs = {t.name: t for t in graph.inputs}
    for weight in lost:
        variable = inputs[weight.name]
        if weight.name not in parts:
            as_constant(graph, variable, variable.onnx_default)
    left = [Left(t.tensor, "no gradient reaches it") for t in lost]
    trained = [t for t in weights.trained if t.name in reached]
    return Weights(trained, [*weights.left, *left], weights.asked)


def _free_names(graph: gs.Graph) -> dict[str, str]:
    """Renames tensors whose names the step needs for its own inputs and outputs; returns old names
    by new names. Errors: ModelError if the name of the loss is taken by an input or a weight."""
    for tensor in (*graph.inputs, *constants(graph)):
        if tensor.name == LOSS:
            raise ModelError(
                f"the model has a tensor {LOSS!r}, a name that the step needs; rename the tensor"
            )
    nodes = list(all_nodes(graph))
    results = {t.name for node in nodes for t in node.outputs}
    taken = {n for n in results if n in PORTS or n.endswith(ENDINGS)}
    bounds = [t for scope in scopes(graph) for t in (*scope.inputs, *scope.outputs)]
    tensors = [*bounds, *(t for node in nodes for t in (*node.inputs, *node.outputs))]
    for tensor in {id(t): t for t in tensors}.values():
        if tensor.name in taken:
            tensor.name = f"model/{tensor.name}"
    return {f"model/{name}": name for name in taken}


def _as_input(
    graph: gs.Graph, tensor: gs.Constant, shape: Sequence[int] | None = None
) -> gs.Variable:
    """Replaces a weight by a graph input whose default is the weight's value; returns the input.
    Its shape is the weight's, or `shape` if the graph reads a shard of the weight."""
    if isinstance(tensor, gs.Variable):  # several nodes share it
        return tensor
    variable = gs.Variable(tensor.name, tensor.dtype, list(shape or tensor.shape))
    variable.onnx_default = stored_proto(tensor) or numpy_helper.from_array(
        tensor.values, tensor.name
    )
    replace_reads(tensor, variable)
    graph.inputs.append(variable)
    return variable


def _read_again(graph: gs.Graph, forward: int, parameters: list[gs.Variable]) -> None:
    """Inserts an Identity before the reads of each parameter in the backward pass, the nodes after
    the first `forward`. Because of it, a sharded parameter can be gathered again there, instead of
    staying in memory since the forward pass."""
    again: dict[str, gs.Variable] = {}
    names = {str(p.name): p for p in parameters}
    nodes = list(graph.nodes[:forward])
    for node in graph.nodes[forward:]:
        for i, tensor in enumerate(node.inputs):
            parameter = names.get(tensor.name)
            if parameter is None or parameter is not tensor:
                continue
            if parameter.name not in again:
                name = f"{parameter.name}.again"
                copy = gs.Variable(name, parameter.dtype, list(parameter.shape))
                again[parameter.name] = copy
                nodes.append(gs.Node("Identity", name, {}, [parameter], [copy]))
            node.inputs[i] = again[parameter.name]
        nodes.append(node)
    graph.nodes = nodes


def add_output(graph: gs.Graph, value: Value, name: str) -> None:
    """Adds a value to the graph's outputs, as `name`."""
    result = gs.Variable(name, value.dtype, list(value.shape))
    graph.nodes.append(gs.Node("Identity", f"output/{name}", {}, [value.tensor], [result]))
    graph.outputs.append(result)
