"""Appends a loss and its gradients with respect to the trained weights to a model's graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.graph.clone import needed
from onnxpar.graph.interchange import default_of
from onnxpar.graph.rewriting import Rewrite, run_rewrites
from onnxpar.graph.subgraphs import all_nodes, constants, nodes_within, scopes
from onnxpar.graph.training_spec import AVERAGE, EVALUATION, MAGNITUDES, SCALE, SEED
from onnxpar.load.load import Model
from onnxpar.training.batch import find_batch
from onnxpar.training.batch_norm import settle_batch_norms
from onnxpar.training.cautions_of_stops import cautions_of_stops
from onnxpar.training.draws import seed_draws
from onnxpar.training.equal_nodes import merge_equal
from onnxpar.training.evaluation import copy_for_use, read_averages
from onnxpar.training.gradients.reverse import gradients
from onnxpar.training.gradients.trained import Left, Weights, find_trained
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.lazy import lazy_lookups, lookup_gradient, sampled_gradient
from onnxpar.training.loss_scale import GOOD
from onnxpar.training.losses import LOSSES, add_loss, check_loss, compared_by
from onnxpar.training.means import Targets
from onnxpar.training.precision import lower_precision
from onnxpar.training.read_rows import drop_unread_rows
from onnxpar.training.recompute import recompute
from onnxpar.training.rewrite import as_constant, as_input
from onnxpar.training.sampled_classes import sample_loss
from onnxpar.training.step_state import StepRequest, StepState
from onnxpar.training.stop_gradients import stop_gradients

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
WHO = "the training step"
"""The owner of these rewrites, as errors name it."""


def add_backward(model: Model, request: StepRequest) -> StepState:
    """Appends a loss and its gradients with respect to the trained weights to the graph of a model
    that was loaded for training. The graph's outputs do not change. `request` has the options of
    the step.

    Returns the model with the appended tensors, which `UPDATE` of `step.py` turns into a step. With
    `request.accumulate`, loss and gradients are of one micro-batch; in a program per rank, of one
    rank.

    Errors: StrategyError, ModelError, PassError.
    """
    state = StepState(model, request)
    run_rewrites(BACKWARD, state, WHO)
    return state


def check(to: StepState) -> None:
    """Checks that the options fit each other and the model, and that no size is open. Errors:
    StrategyError, ModelError.

    This function and those below are the rewrites of `BACKWARD`, in order.
    """
    model = to.model
    to.request.program.check(to.request)
    check_loss([t.name for t in to.graph.outputs], *to.which)
    if model.sizes is not None:
        symbols = ", ".join(model.sizes.symbols)
        raise ModelError(
            f"{model.path}: these sizes are open: {symbols}; set each with --dim NAME=SIZE"
        )


def stop(to: StepState) -> None:
    """Stops gradients where the user asks for it, or where the file records a torch detach()."""
    options = to.request
    to.cautions += stop_gradients(to.graph, options.stop_gradient, options.padding_idx)


def free_names(to: StepState) -> None:
    """Renames tensors whose names the step needs for its own inputs and outputs: `loss` becomes
    `model/loss`. Errors: ModelError if an input or a weight has the name of the loss."""
    graph = to.graph
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
    to.renamed = {f"model/{name}": name for name in taken}


def find_weights(to: StepState) -> None:
    """Finds the weights to train. In a program per rank, a weight of which each rank has a shard
    becomes an input. Errors: StrategyError."""
    options, program, outputs = to.request, to.request.program, to.outputs
    named = [name for name in (options.loss, options.output) if name in outputs]
    ends = [str(outputs[named[0]].name)] if named else None
    to.weights = find_trained(to.model, options.params, options.frozen, ends)
    if to.request.optimizer is not None:
        # In 16 bits, it matters whether other constants have values that fit.
        to.frozen = to.weights.frozen(options.precision is not None)
    to.cautions += cautions_of_stops(to.model, to.weights, ends, options.loss not in LOSSES)
    shards = [t for t in constants(to.graph) if program.is_part(t.name)]
    to.parts = {t.name: as_input(to.graph, t, program.part_shape(t.name, t.shape)) for t in shards}


def find_batch_dims(to: StepState) -> None:
    """Finds the dimension of each input that numbers samples. Errors: StrategyError."""
    graph, request = to.graph, to.request
    fed = [t for t in graph.inputs if default_of(t) is None]
    compared = compared_by(to.outputs, *to.which)
    is_alone, is_split = request.program.count == 1, request.accumulate > 1
    to.batch = find_batch(graph, fed, compared, request.batch_dims, is_alone, is_split)
    to.targets = Targets(graph, batch=to.batch if is_alone else None)


def lower(to: StepState) -> None:
    """Makes the model compute in 16 bits; weights keep their types."""
    full = {t.name for t in (*to.weights.trained, *to.frozen)}
    lower_precision(to.graph, to.request.precision or "", full)


def copy_model(to: StepState) -> None:
    """Copies the model's nodes for evaluations, if these compute something else than training does:
    a Dropout or BatchNormalization behaves differently, or a moving average or a sample of classes
    replaces weights."""
    to.norms = [n for n in all_nodes(to.graph) if n.op == "BatchNormalization"]
    if to.has_messages:
        return
    options, count = to.request, len(to.graph.nodes)
    is_other = bool(options.sampling) or to.request.ema is not None
    to.used = copy_for_use(to.graph, bool(options.batch_norm.statistics), is_other)
    to.apart = {id(node) for node in nodes_within(to.graph.nodes[count:])}


def settle_norms(to: StepState) -> None:
    """Makes BatchNormalizations take the statistics that the options ask for, and records their
    running statistics. Errors: StrategyError, ModelError."""
    to.running = settle_batch_norms(to.model, to.norms, to.request.batch_norm)


def sample_classes(to: StepState) -> None:
    """Restricts the loss to a random sample of the classes. Errors: StrategyError."""
    trained, sampling = [t.tensor for t in to.weights.trained], to.request.sampling
    to.sample = sample_loss(to.graph, to.outputs, *to.which, trained, to.targets, sampling)


def add_mean_loss(to: StepState) -> None:
    """Appends the loss, as a mean over the samples or labels that count. Errors: StrategyError."""
    targets = replace(to.targets, sampled=to.sample.labels) if to.sample else to.targets
    if to.running:  # statistics are over whole batches
        targets = replace(targets, batch=None)
    to.metrics = add_loss(Builder(to.graph, LOSS), to.outputs, *to.which, targets)
    to.loss = to.share_of(to.metrics.loss)


def add_metrics(to: StepState) -> None:
    """Appends the loss and other metrics for evaluations, in inference mode."""
    metrics = to.metrics
    if to.used is not None:
        used = {to.renamed.get(name, name): t for name, t in to.used.items()}
        metrics = add_loss(Builder(to.graph, EVALUATION), used, *to.which, to.targets)
    measured = {LOSS: metrics.loss, **metrics.others}
    to.evaluated = {name: to.share_of(mean) for name, mean in measured.items()}
    by_mean = {name: to.count_of(mean) for name, mean in measured.items()}
    to.weights_of = {name: value for name, value in by_mean.items() if value is not None}


def feed_weights(to: StepState) -> None:
    """Makes the trained weights inputs of the graph, and also the weights that the user keeps from
    being trained."""
    trained = [t.tensor for t in to.weights.trained]
    to.parameters = [to.parts.get(t.name) or as_input(to.graph, t) for t in trained]
    to.frozen = [to.parts.get(t.name) or as_input(to.graph, t) for t in to.frozen]


def add_gradients(to: StepState) -> None:
    """Appends the gradients of the loss with respect to parameters, looked-up rows of lazily
    trained tables, and the ends of blocks that are computed again. Errors: StrategyError."""
    graph, options, loss = to.graph, to.request, to.loss
    to.scale = options.scale.factor(Builder(graph, "scale")) if options.scale else None
    seed = loss.builder.constant(1, loss.dtype) if to.scale is None else to.scale.cast(loss.dtype)
    to.lookups = lazy_lookups(to.weights.trained, options.lazy, to.parameters, to.sample, to.apart)
    to.forward = len(graph.nodes)
    names, end = [p.name for p in to.parameters], loss.tensor.name
    to.blocks = options.blocks(needed(graph, [end]), names, end)
    dense = [p for p in to.parameters if p.name not in to.lookups]
    looked_up = [node.outputs[0] for nodes in to.lookups.values() for node in nodes]
    wanted = [*dense, *(block.after for block in to.blocks), *looked_up]
    to.by_tensor = gradients(graph, {end: seed}, wanted)


def compute_again(to: StepState) -> None:
    """Makes the backward pass compute blocks of the forward pass again, instead of keeping their
    activations (`--recompute`)."""
    followed = {b.after.name: to.by_tensor.pop(b.after.name) for b in to.blocks}
    known = {name: value for name, value in followed.items() if value is not None}
    recompute(to.graph, to.forward, to.blocks, known)


def gather_gradients(to: StepState) -> None:
    """Records the gradient of each parameter on which the loss depends. For a lazily trained table,
    this is the gradient of the rows that the step looks up."""
    for parameter in to.parameters:
        name = parameter.name
        gradient, lookups = to.by_tensor.get(name), to.lookups.get(name)
        if lookups is not None and to.sample is not None and name == to.sample.table:
            gradient, to.rows[name] = sampled_gradient(to.sample, parameter, to.by_tensor)
        elif lookups is not None and (
            of_rows := lookup_gradient(to.graph, parameter, lookups, to.by_tensor)
        ):
            gradient, to.rows[name] = of_rows
        if gradient is not None:
            to.gradients[name] = gradient


def read_again(to: StepState) -> None:
    """Inserts an Identity before the reads of each parameter in the backward pass. With it, a
    sharded parameter can be gathered again there, instead of staying in memory since the forward
    pass."""
    again: dict[str, gs.Variable] = {}
    graph, forward = to.graph, to.forward
    names = {str(p.name): p for p in to.parameters if p.name in to.gradients}
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


def settle_lost(to: StepState) -> None:
    """Turns trained weights to which no gradient flows back into constants, except shards, which
    stay inputs. Errors: StrategyError if the user named such a weight, or if no trained weight is
    left."""
    graph, weights, reached = to.graph, to.weights, to.gradients
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
        if weight.name not in to.parts:
            as_constant(graph, variable, variable.onnx_default)
    left = [Left(t.tensor, "no gradient reaches it") for t in lost]
    trained = [t for t in weights.trained if t.name in reached]
    to.weights = Weights(trained, [*weights.left, *left], weights.asked)
    to.parameters = [p for p in to.parameters if p.name in reached]


def evaluate_averages(to: StepState) -> None:
    """Makes evaluations read the moving averages of parameters (`--ema`) in place of the
    parameters."""
    evaluated = [value.tensor.name for value in to.evaluated.values()]
    to.averages = read_averages(to.graph, evaluated, to.parameters)


def merge(to: StepState) -> None:
    """Merges nodes that compute the same: see `equal_nodes.py`."""
    of_rows = (value for rows in to.rows.values() for value in rows.values())
    values: Sequence[Value] = [*to.gradients.values(), *of_rows]
    merge_equal(to.graph, [*to.results, *(value.tensor for value in values)])


def feed_statistics(to: StepState) -> None:
    """Makes the running statistics inputs of the graph."""
    befores = {before.name: before for before, _ in to.running}  # nodes may share one
    inputs = {name: as_input(to.graph, before) for name, before in befores.items()}
    to.running = [(inputs[before.name], after) for before, after in to.running]


BACKWARD: Sequence[Rewrite[StepState]] = (
    Rewrite("check-options", check),
    Rewrite("stop-gradients", stop),
    Rewrite("free-names", free_names),
    Rewrite("find-batch", find_batch_dims),
    Rewrite("find-trained", find_weights),
    Rewrite("lower-precision", lower, lambda to: to.request.precision is not None),
    Rewrite("copy-for-use", copy_model),
    Rewrite("seed-draws", lambda to: seed_draws(to.graph, SEED)),
    Rewrite("settle-batch-norms", settle_norms),
    Rewrite("sample-classes", sample_classes, lambda to: bool(to.request.sampling)),
    Rewrite("add-loss", add_mean_loss),
    Rewrite("add-metrics", add_metrics, lambda to: not to.has_messages),
    Rewrite(
        "drop-unread-rows",
        lambda to: drop_unread_rows(to.graph, to.results, {t.name for t in to.weights.trained}),
    ),
    Rewrite("feed-weights", feed_weights),
    Rewrite("add-gradients", add_gradients),
    Rewrite("recompute", compute_again, lambda to: bool(to.blocks)),
    Rewrite("gather-gradients", gather_gradients),
    Rewrite("read-again", read_again),
    Rewrite("settle-lost", settle_lost),
    Rewrite("read-averages", evaluate_averages, lambda to: to.request.ema is not None),
    Rewrite("merge-equal", merge),
    Rewrite("feed-statistics", feed_statistics),
)
"""The rewrites of a model that was loaded for training to its loss and gradients, in order."""
