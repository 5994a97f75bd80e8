"""The training step as one graph: forward pass, backward pass, and the update of every parameter.

Inputs: the model's own, labels or targets, the learning rate, the parameters (with their current
values as defaults) and the optimizer's state. Outputs: the loss, the next parameters and the next
state. The metadata `onnxpar.training` of the model lists the role of each input and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.base.pass_times import PassTimes
from onnxpar.graph.interchange import default_of
from onnxpar.graph.rewriting import Rewrite, Show, run_rewrites, unseen
from onnxpar.graph.training_spec import (
    AVERAGE,
    EVALUATION,
    FROZEN,
    GRADIENT,
    MAGNITUDES,
    METADATA,
    SCALE,
    SEED,
    SKIPPED,
    WEIGHT,
    Slot,
    Step,
)
from onnxpar.load.load import Model
from onnxpar.training.accumulate import accumulate
from onnxpar.training.backward import BACKWARD, WHO
from onnxpar.training.cautions import cautions_of
from onnxpar.training.clip_gradients import add_norm, clip, reduce_to_number
from onnxpar.training.gradients.reverse import drop_unread
from onnxpar.training.gradients.trained import Weights
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.loss_scale import GOOD, is_finite
from onnxpar.training.optimizers import lazy_form
from onnxpar.training.parameter_groups import UpdateRule, rules_of
from onnxpar.training.rewrite import add_output
from onnxpar.training.step_state import StepRequest, StepState


def make_step(
    model: Model, request: StepRequest, show: Show = unseen, times: PassTimes | None = None
) -> Weights:
    """Turns the graph of a model that was loaded for training into a training step, in place, and
    sets the model's `step`, which describes inputs and outputs. Returns the trained and the
    untrained weights.

    show   is called after each rewrite
    times  collects the time of each rewrite

    Errors: StrategyError, ModelError, PassError.
    """
    state = StepState(model, request)
    run_rewrites((*BACKWARD, *UPDATE), state, WHO, show, times)
    return state.weights


def describe(to: StepState) -> None:
    """Begins the description of the step (`Step`), and removes the model's outputs.

    This function and those below, up to `write_description`, are the rewrites of `UPDATE`.
    """
    scale = to.request.scale
    fed = [t.name for t in to.graph.inputs if default_of(t) is None]
    names = {what: str(tensor.name) for what, tensor in to.targets.made.items()}
    to.step = Step(
        seed=SEED if SEED in fed else None,
        precision=to.request.precision,
        **names,  # type: ignore[arg-type]
        full_batches=bool(to.running),
        data=[name for name in fed if name != SEED],
        batch=to.batch_dims,
        cautions=[*to.cautions, *cautions_of(to.model, to.weights)],
        gradient_scale=scale.initial if scale and not scale.dynamic else 1.0,
        sampled={to.sample.table: list(to.sample.sizes)} if to.sample else {},
    )
    to.graph.outputs = []


def output_loss(to: StepState) -> None:
    """Adds the loss as an output of the step, and records the names of the gradients."""
    for name, gradient in to.gradients.items():
        of = to.step.rows if name in to.rows else to.step.gradients
        of[name] = gradient.tensor.name
    add_output(to.graph, to.loss, to.step.loss)
    to.builder = Builder(to.graph, "update")


def divide_by_scale(to: StepState) -> None:
    """Divides gradients by the factor by which the loss was multiplied."""
    assert to.scale is not None
    of = to.builder.value(to.scale.tensor)
    to.gradients = {n: g / of.cast(g.dtype) for n, g in to.gradients.items()}


def adapt_scale(to: StepState) -> None:
    """Appends the update of a dynamic loss scale. If gradients are not finite, the step will keep
    all other states as they are."""
    scale = to.request.scale
    assert scale is not None and to.scale is not None
    to.finite = is_finite(to.total)
    good = _input(to, GOOD, np.int64, [])
    factor = to.builder.value(to.scale.tensor)
    following, count = scale.following(factor, good, to.finite)
    _add_slot(to, factor, following, SCALE, "")
    _add_slot(to, good, count, GOOD, "")
    add_output(to.graph, to.finite.op("Not").cast(np.float32), SKIPPED)
    to.step.metrics.append(SKIPPED)


def update_statistics(to: StepState) -> None:
    """Adds outputs for the next values of running statistics."""
    for before, after in {pair[0].name: pair for pair in to.running}.values():
        _slot(to, to.builder.value(before), to.builder.value(after), "statistic", "")


def output_gradients(to: StepState) -> None:
    """Adds an output for the gradient of each parameter."""
    for name, gradient in to.gradients.items():
        add_output(to.graph, gradient, f"{name}{GRADIENT}")


def update_parameters(to: StepState) -> None:
    """Adds outputs for the next values of parameters and optimizer state. Errors: StrategyError,
    ModelError."""
    request, step = to.request, to.step
    assert request.optimizer is not None
    names = [p.name for p in to.parameters]
    rules, step.groups = rules_of(request.optimizer, request.groups, names, to.undecayed)
    kind = to.scalar_dtype
    rate = _input(to, step.rate, kind, [])
    count = None
    has_count = any(rule.optimizer.counts for rule in rules.values())
    if has_count or request.ema is not None:
        before = _input(to, "step", np.int64, [])
        count = (before + 1).cast(np.float64)
        _slot(to, before, before + 1, "step", "")
    lengths: dict[str, Value] = {}
    for parameter in to.parameters:
        changed = _update(to, parameter, rules[parameter.name], rate, count)
        lengths[parameter.name] = reduce_to_number(changed, "ReduceL1", kind)
    for weight in to.frozen:
        value = to.builder.value(weight)
        _add_slot(to, value, value, FROZEN, "")
    step.magnitudes, each = to.request.program.totals(to.builder, lengths)
    add_output(to.graph, each, MAGNITUDES)


def output_metrics(to: StepState) -> None:
    """Adds outputs for the metrics of evaluations, and for their weights."""
    whole = to.request.accumulate * to.request.program.count
    shares = ((name, weight * (1 / whole)) for name, weight in to.weights_of.items())
    for kind, values in ((EVALUATION, to.evaluated.items()), (WEIGHT, shares)):
        for name, value in values:
            to.step.evaluation.append(f"{kind}.{name}")
            add_output(to.graph, value, to.step.evaluation[-1])


def drop_nodes(to: StepState) -> None:
    """Removes nodes whose results no node reads."""
    if to.has_messages:
        drop_unread(to.graph)
    else:
        to.graph.cleanup(remove_unused_graph_inputs=False)


def write_description(to: StepState) -> None:
    """Writes the description of the step to the model's metadata."""
    step, model = to.step, to.model
    to.request.program.finish(to)
    step.slots = [
        replace(slot, torch=known.names, transposed=known.transposed, stored=known.stored)
        if (known := model.called.torch.get(slot.input))
        else slot
        for slot in step.slots
    ]
    model.step = step
    model.header.metadata_props.add(key=METADATA, value=step.text())


def _update(
    to: StepState, parameter: gs.Variable, rule: UpdateRule, rate: Value, count: Value | None
) -> Value:
    """Adds outputs for the next values of a parameter and its optimizer state. Returns the new
    values: of the whole parameter, or of the updated rows of a lazily trained table.

    rule   the optimizer of the parameter, and the factor of its learning rate
    rate   the learning rate
    count  the number of updates; None if no update depends on it
    """
    name, optimizer = parameter.name, rule.optimizer
    p = to.request.program.builder(to.graph, f"update/{name}", name).value(parameter)
    g = p.builder.value(to.gradients[name].tensor)
    if optimizer.needs_whole and to.request.program.is_part(name):
        raise StrategyError(
            f"each rank of this program has a part of {name!r}, but "
            f"{type(optimizer).__name__.lower()} needs the whole parameter; give another "
            f"optimizer, or --group '{name}:optimizer=adamw'"
        )
    slots = optimizer.slots(p.shape)
    inputs = {s: _input(to, f"{name}.{s}", p.dtype, shape) for s, shape in slots.items()}
    state = {s: p.builder.value(value.tensor) for s, value in inputs.items()}  # in its parts
    own_rate = rate.cast(p.dtype) * rule.lr_scale
    rows = to.rows.get(name)
    if rows is None:
        following, changed = optimizer.update(p, g, state, own_rate, count)
        following = _checked(to, p, following)
        changed = {s: _checked(to, state[s], value) for s, value in changed.items()}
        moved = following
    else:
        of_rows = {slot: rows.read(value) for slot, value in state.items()}
        before, lazy = rows.read(p), lazy_form(optimizer)
        moved, changed = lazy.update(before, rows.copies(g), of_rows, own_rate, count)
        moved = _checked(to, before, moved)
        following = rows.written(p, moved)
        changed = {
            slot: rows.written(state[slot], _checked(to, of_rows[slot], value))
            for slot, value in changed.items()
        }
    _add_slot(to, p, following, "parameter", name)
    for slot, value in changed.items():
        _add_slot(to, state[slot], value, slot, name)
    if to.request.ema is not None and count is not None:
        _average(to, p, following, count, to.request.ema)
    return moved


def _average(to: StepState, p: Value, following: Value, count: Value, decay: float) -> None:
    """Adds the update of the moving average of a parameter. The first update sets it to the
    parameter itself, as torch.optim.swa_utils.get_ema_multi_avg_fn does.

    p          the parameter before the step
    following  the parameter after the step
    count      the number of updates
    decay      the factor of the old average
    """
    before = p.builder.value(to.averages[p.tensor.name])
    moved = before * decay + following * (1 - decay)
    after = count.equal(1.0).where(following, moved)
    _slot(to, before, after, AVERAGE, p.tensor.name)


def _input(to: StepState, name: str, dtype: Any, shape: Sequence[int]) -> Value:
    """Adds an input to the graph, and returns it. Errors: ModelError if the model has a tensor with
    this name."""
    if name in {t.name for t in to.graph.inputs}:
        raise ModelError(
            f"the model has a tensor {name!r}, a name that the step needs; rename the tensor"
        )
    tensor = gs.Variable(name, np.dtype(dtype), list(shape))
    to.graph.inputs.append(tensor)
    return to.builder.value(tensor)


def _slot(to: StepState, before: Value, after: Value, kind: str, of: str) -> None:
    """Adds a state pair: `after` is the value of the input `before` in the next step, unless
    gradients are not finite. `kind` and `of` are as in `Slot`."""
    _add_slot(to, before, _checked(to, before, after), kind, of)


def _checked(to: StepState, before: Value, after: Value) -> Value:
    """Returns `after`. With a dynamic loss scale, returns `before` if gradients are not finite."""
    if to.finite is None:
        return after
    return to.builder.value(to.finite.tensor).where(after, before)


def _add_slot(to: StepState, before: Value, after: Value, kind: str, of: str) -> None:
    """Adds a state pair, as `_slot` does, but whether or not gradients are finite."""
    name = before.tensor.name
    add_output(to.graph, after, f"{name}.next")
    default = getattr(before.tensor, "onnx_default", None) is not None
    to.step.slots.append(Slot(name, f"{name}.next", kind, of, default))


UPDATE: Sequence[Rewrite[StepState]] = (
    Rewrite("describe-step", describe),
    Rewrite("accumulate", accumulate, lambda to: to.request.accumulate != 1),
    Rewrite("sum-over-ranks", lambda to: to.request.program.over_ranks(to)),
    Rewrite("output-loss", output_loss),
    Rewrite("divide-by-scale", divide_by_scale, lambda to: to.scale is not None),
    Rewrite(
        "add-norm",
        add_norm,
        lambda to: to.request.has_dynamic_scale or to.request.clip_norm is not None,
    ),
    Rewrite("adapt-scale", adapt_scale, lambda to: to.request.has_dynamic_scale),
    Rewrite("update-statistics", update_statistics),
    Rewrite("clip-gradients", clip, lambda to: to.request.clip_norm is not None),
    Rewrite("output-gradients", output_gradients, lambda to: to.request.optimizer is None),
    Rewrite("update-parameters", update_parameters, lambda to: to.request.optimizer is not None),
    Rewrite("output-metrics", output_metrics),
    Rewrite("drop-unread", drop_nodes),
    Rewrite("write-description", write_description),
)
"""The rewrites of a graph with gradients to a training step, in order."""
