"""Appends the update of parameters, statistics and states to a graph with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.graph.training_spec import (
    AVERAGE,
    FROZEN,
    GRADIENT,
    MAGNITUDES,
    SCALE,
    SKIPPED,
    Slot,
)
from onnxpar.training.gradients.value import Value
from onnxpar.training.loss_scale import GOOD, is_finite
from onnxpar.training.optimizers import lazy_form
from onnxpar.training.parameter_groups import Rule, rules_of
from onnxpar.training.rewrite import add_output
from onnxpar.training.step_state import StepState


def divide_by_scale(to: StepState) -> None:
    """Divides gradients by the scale of the loss."""
    assert to.scale is not None
    of = to.builder.value(to.scale.tensor)
    to.gradients = {n: g / of.cast(g.dtype) for n, g in to.gradients.items()}


def add_norm(to: StepState) -> None:
    """Adds up the squares of all gradients."""
    kind = _number(to)
    squares = {n: _norm(g, "ReduceSumSquare", kind) for n, g in to.gradients.items()}
    to.total = to.request.program.totals(to.builder, squares)[1].sum()


def adapt_scale(to: StepState) -> None:
    """Adds the update of a dynamic scale of the loss, which skips a step whose gradients are not
    finite."""
    scale = to.request.loss.scale
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


def clip(to: StepState) -> None:
    """Scales all gradients so that the norm over all of them together is at most `clip_norm`."""
    norm, most = to.total.sqrt(), to.request.update.clip_norm
    assert most is not None
    factor = (most / (norm + 1e-6)).op("Min", 1.0)
    to.gradients = {n: g * factor.cast(g.dtype) for n, g in to.gradients.items()}
    add_output(to.graph, norm, "gradient_norm")
    to.step.metrics.append("gradient_norm")


def output_gradients(to: StepState) -> None:
    """Adds outputs for the gradients."""
    for name, gradient in to.gradients.items():
        add_output(to.graph, gradient, f"{name}{GRADIENT}")


def update_parameters(to: StepState) -> None:
    """Adds outputs for the next values of parameters and optimizer state. Errors: StrategyError,
    ModelError."""
    update, step = to.request.update, to.step
    assert update.optimizer is not None
    names = [p.name for p in to.parameters]
    rules, step.groups = rules_of(update.optimizer, update.groups, names, to.undecayed)
    kind = _number(to)
    rate = _input(to, step.rate, kind, [])
    count = None
    has_count = any(rule.optimizer.counts for rule in rules.values())
    if has_count or update.ema is not None:
        before = _input(to, "step", np.int64, [])
        count = (before + 1).cast(np.float64)
        _slot(to, before, before + 1, "step", "")
    lengths: dict[str, Value] = {}
    for parameter in to.parameters:
        changed = _update(to, parameter, rules[parameter.name], rate, count)
        lengths[parameter.name] = _norm(changed, "ReduceL1", kind)
    for weight in to.frozen:
        value = to.builder.value(weight)
        _add_slot(to, value, value, FROZEN, "")
    step.magnitudes, each = to.request.program.totals(to.builder, lengths)
    add_output(to.graph, each, MAGNITUDES)


def _update(
    to: StepState, parameter: gs.Variable, rule: Rule, rate: Value, count: Value | None
) -> Value:
    """Adds outputs for the next values of a parameter and its optimizer state; returns the new
    values: the whole parameter, or the rows of a lazily trained table."""
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
    if to.request.update.ema is not None and count is not None:
        _average(to, p, following, count, to.request.update.ema)
    return moved


def _average(to: StepState, p: Value, following: Value, count: Value, decay: float) -> None:
    """Adds the update of the moving average of a parameter. The first update sets it to the
    parameter itself, as torch.optim.swa_utils.get_ema_multi_avg_fn does."""
    before = p.builder.value(to.averages[p.tensor.name])
    moved = before * decay + following * (1 - decay)
    after = count.equal(1.0).where(following, moved)
    _slot(to, before, after, AVERAGE, p.tensor.name)


def _number(to: StepState) -> np.dtype[Any]:
    """Returns the type of numbers over all gradients."""
    return np.result_type(np.float32, *(g.dtype for g in to.gradients.values()))


def _input(to: StepState, name: str, dtype: Any, shape: Sequence[int]) -> Value:
    if name in {t.name for t in to.graph.inputs}:
        raise ModelError(
            f"the model has a tensor {name!r}, a name that the step needs; rename the tensor"
        )
    tensor = gs.Variable(name, np.dtype(dtype), list(shape))
    to.graph.inputs.append(tensor)
    return to.builder.value(tensor)


def _slot(to: StepState, before: Value, after: Value, kind: str, of: str) -> None:
    """Adds a state pair that passes `after` to the next step, unless gradients are not finite."""
    _add_slot(to, before, _checked(to, before, after), kind, of)


def _checked(to: StepState, before: Value, after: Value) -> Value:
    """Returns `after`; with a dynamic loss scale, `before` if gradients are not finite."""
    if to.finite is None:
        return after
    return to.builder.value(to.finite.tensor).where(after, before)


def _add_slot(to: StepState, before: Value, after: Value, kind: str, of: str) -> None:
    name = before.tensor.name
    add_output(to.graph, after, f"{name}.next")
    default = getattr(before.tensor, "onnx_default", None) is not None
    to.step.slots.append(Slot(name, f"{name}.next", kind, of, default))


def _norm(x: Value, op: str, dtype: np.dtype[Any]) -> Value:
    """Returns the number to which `op` reduces a tensor."""
    x = x.wide() if x.rank else x.wide().reshape([1])
    return x.op(op, np.arange(x.rank), keepdims=0).cast(dtype)
