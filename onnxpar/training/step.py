"""The training step as one graph: forward pass, backward pass, and the update of every parameter.

Inputs: the model's own, labels or targets, the learning rate, the parameters (with their current
values as defaults) and the optimizer's state. Outputs: the loss, the next parameters and the next
state. The metadata `onnxpar.training` of the model lists the role of each input and output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.base.errors import ModelError, StrategyError
from onnxpar.graph.interchange import default_of
from onnxpar.graph.subgraphs import constants
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
from onnxpar.graph.used_names import check_names
from onnxpar.load.load import Model
from onnxpar.training.accumulate import accumulate, check_count
from onnxpar.training.backward import Backward, LossOptions, add_backward, add_output
from onnxpar.training.cautions import (
    cautions_of,
    cautions_of_batch_norm,
    cautions_of_cosines,
    cautions_of_probabilities,
    cautions_of_variance,
)
from onnxpar.training.decay import undecayed
from onnxpar.training.gradients.reverse import drop_unread
from onnxpar.training.gradients.trained import Weights
from onnxpar.training.gradients.value import Builder, Value
from onnxpar.training.gradients.vjp import is_message
from onnxpar.training.loss_scale import GOOD, is_finite
from onnxpar.training.optimizer import Optimizer
from onnxpar.training.optimizers import lazy_form
from onnxpar.training.parameter_groups import Group, Rule, rules_of
from onnxpar.training.program import Program


@dataclass(frozen=True)
class StepOptions:
    """Options for the part of a training step after the gradients: those of `grad` by the same
    names, and `groups`, parameters with hyperparameters of their own; the last that matches
    holds. Without an optimizer, the step returns the gradients."""

    optimizer: Optimizer | None
    clip_norm: float | None = None
    accumulate: int = 1
    groups: Sequence[Group] = ()
    decay_all: bool = False
    ema: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise StrategyError(f"--clip-norm {self.clip_norm}: must be above 0")
        if self.accumulate != 1:
            check_count(self.accumulate)
        if self.ema is not None and not 0 <= self.ema < 1:
            raise StrategyError(f"--ema {self.ema}: must be from 0 to below 1")
        for option, given in (("--group", self.groups), ("--ema", self.ema is not None)):
            if given and self.optimizer is None:
                raise StrategyError(f"{option} is for steps that update; give an --optimizer")

    def check_lazy(self) -> None:
        """Errors: StrategyError if no table can be trained lazily with these options."""
        if self.optimizer is None:
            raise StrategyError("--lazy is for steps that update; give an --optimizer")
        if self.accumulate != 1:
            raise StrategyError(
                "--lazy and --accumulate: micro-batches look up different rows; leave one out"
            )
        if self.ema is not None:
            raise StrategyError(
                "--lazy and --ema: each step moves the averages of all rows; leave one out"
            )


def make_step(
    model: Model, loss: LossOptions, options: StepOptions, program: Program | None = None
) -> Weights:
    """Turns the graph of a model that was loaded for training into a training step, in place, and
    sets the model's `step`, which describes inputs and outputs. Returns the trained and the
    untrained weights. Errors: StrategyError, ModelError."""
    graph = model.graph
    program = program or Program()
    if loss.lazy:
        options.check_lazy()
    stored = [t for t in constants(graph) if t.name in model.stored]
    shapes = {t.name: t.shape or () for t in (*stored, *graph.outputs)}
    plain = () if options.decay_all else undecayed(graph)
    cautions = list(cautions_of_batch_norm(model, loss.batch_norm))
    cautions += cautions_of_variance(graph, loss.batch_norm)
    for of_loss in (cautions_of_cosines, cautions_of_probabilities):
        cautions += of_loss(graph, loss.loss, loss.output)
    has_averages, updates = options.ema is not None, options.optimizer is not None
    back = add_backward(model, loss, program, options.accumulate, has_averages, updates)
    fed = [t.name for t in graph.inputs if default_of(t) is None]
    names = {what: str(tensor.name) for what, tensor in back.targets.items()}
    step = Step(
        seed=SEED if SEED in fed else None,
        precision=loss.precision,
        **names,  # type: ignore[arg-type]
        full_batches=bool(back.running),
        data=[name for name in fed if name != SEED],
        batch=back.batch_dims,
        cautions=[*cautions, *back.cautions, *cautions_of(model, back.weights)],
        gradient_scale=loss.scale.initial if loss.scale and not loss.scale.dynamic else 1.0,
        sampled={back.sample.table: list(back.sample.sizes)} if back.sample else {},
    )
    graph.outputs = []
    if options.accumulate != 1:
        back = accumulate(graph, back, options.accumulate, program)
        step.turns = options.accumulate
    back = program.over_ranks(graph, back)
    for name, gradient in back.gradients.items():
        of = step.rows if name in back.rows else step.gradients
        of[name] = gradient.tensor.name
    add_output(graph, back.loss, step.loss)
    _Update(graph, step, loss, options, back, program).run(plain)
    for name, value in back.evaluated.items():
        step.evaluation.append(f"{EVALUATION}.{name}")
        add_output(graph, value, step.evaluation[-1])
    for name, weight in back.weights_of.items():
        step.evaluation.append(f"{WEIGHT}.{name}")
        share = weight * (1 / (options.accumulate * program.count))
        add_output(graph, share, step.evaluation[-1])
    check_names(graph, "the training step")
    if any(is_message(node) for node in graph.nodes):
        drop_unread(graph)
    else:
        graph.cleanup(remove_unused_graph_inputs=False)
    program.finish(graph, step, shapes)
    step.slots = [
        replace(slot, torch=known.names, transposed=known.transposed, stored=known.stored)
        if (known := model.called.torch.get(slot.input))
        else slot
        for slot in step.slots
    ]
    model.step = step
    model.header.metadata_props.add(key=METADATA, value=step.text())
    return back.weights


class _Update:
    """Appends the optimizer to a graph with gradients."""

    def __init__(
        self,
        graph: gs.Graph,
        step: Step,
        loss: LossOptions,
        options: StepOptions,
        back: Backward,
        program: Program,
    ) -> None:
        self.graph = graph
        self.program = program
        self.step = step
        self.options = options
        self.parameters = back.parameters
        self.gradients = back.gradients
        self.running = back.running
        self.rows = back.rows
        self.averages = back.averages
        self.frozen = back.frozen
        self.scale = back.scale
        self.loss_scale = loss.scale
        self.finite: Value | None = None
        self.builder = Builder(graph, "update")
        self.number = np.result_type(np.float32, *(g.dtype for g in back.gradients.values()))

    def run(self, undecayed: Collection[str]) -> None:
        """Adds outputs for the next values of parameters, statistics and optimizer state. The
        parameters in `undecayed` are not decayed by default."""
        optimizer = self.options.optimizer
        if self.scale is not None:
            of = self.scale.tensor
            self.gradients = {
                n: g / self.builder.value(of).cast(g.dtype) for n, g in self.gradients.items()
            }
        if self._is_dynamic or self.options.clip_norm is not None:
            squares = {
                n: _norm(g, "ReduceSumSquare", self.number) for n, g in self.gradients.items()
            }
            total = self.program.totals(self.builder, squares)[1].sum()
        if self._is_dynamic:
            self._adapt_scale(is_finite(total))
        for before, after in {
            before.name: (before, after) for before, after in self.running
        }.values():
            self._slot(self.builder.value(before), self.builder.value(after), "statistic", "")
        if self.options.clip_norm is not None:
            self._clip(self.options.clip_norm, total.sqrt())
        if optimizer is None:
            for name, gradient in self.gradients.items():
                add_output(self.graph, gradient, f"{name}{GRADIENT}")
            return
        names = [p.name for p in self.parameters]
        rules, self.step.groups = rules_of(optimizer, self.options.groups, names, undecayed)
        rate = self._input(self.step.rate, self.number, [])
        count = None
        has_count = any(rule.optimizer.counts for rule in rules.values())
        if has_count or self.options.ema is not None:
            before = self._input("step", np.int64, [])
            count = (before + 1).cast(np.float64)
            self._slot(before, before + 1, "step", "")
        lengths: dict[str, Value] = {}
        for parameter in self.parameters:
            changed = self._update(parameter, rules[parameter.name], rate, count)
            lengths[parameter.name] = _norm(changed, "ReduceL1", self.number)
        for weight in self.frozen:
            value = self.builder.value(weight)
            self._add_slot(value, value, FROZEN, "")
        self.step.magnitudes, each = self.program.totals(self.builder, lengths)
        add_output(self.graph, each, MAGNITUDES)

    def _update(
        self, parameter: gs.Variable, rule: Rule, rate: Value, count: Value | None
    ) -> Value:
        """Adds outputs for the next values of a parameter and its optimizer state; returns the new
        values: the whole parameter, or the rows of a lazily trained table."""
        name, optimizer = parameter.name, rule.optimizer
        p = self.program.builder(self.graph, f"update/{name}", name).value(parameter)
        g = p.builder.value(self.gradients[name].tensor)
        if optimizer.needs_whole and self.program.is_part(name):
            raise StrategyError(
                f"each rank of this program has a part of {name!r}, but "
                f"{type(optimizer).__name__.lower()} needs the whole parameter; give another "
                f"optimizer, or --group '{name}:optimizer=adamw'"
            )
        slots = optimizer.slots(p.shape)
        inputs = {s: self._input(f"{name}.{s}", p.dtype, shape) for s, shape in slots.items()}
        state = {s: p.builder.value(value.tensor) for s, value in inputs.items()}  # in its parts
        own_rate = rate.cast(p.dtype) * rule.lr_scale
        rows = self.rows.get(name)
        if rows is None:
            following, changed = optimizer.update(p, g, state, own_rate, count)
            following = self._checked(p, following)
            changed = {s: self._checked(state[s], value) for s, value in changed.items()}
            moved = following
        else:
            of_rows = {slot: rows.read(value) for slot, value in state.items()}
            before, lazy = rows.read(p), lazy_form(optimizer)
            moved, changed = lazy.update(before, rows.copies(g), of_rows, own_rate, count)
            moved = self._checked(before, moved)
            following = rows.written(p, moved)
            changed = {
                slot: rows.written(state[slot], self._checked(of_rows[slot], value))
                for slot, value in changed.items()
            }
        self._add_slot(p, following, "parameter", name)
        for slot, value in changed.items():
            self._add_slot(state[slot], value, slot, name)
        if self.options.ema is not None and count is not None:
            self._average(p, following, count, self.options.ema)
        return moved

    def _average(self, p: Value, following: Value, count: Value, decay: float) -> None:
        """Adds the update of the moving average of a parameter. The first update sets it to the
        parameter itself, as torch.optim.swa_utils.get_ema_multi_avg_fn does."""
        before = p.builder.value(self.averages[p.tensor.name])
        moved = before * decay + following * (1 - decay)
        after = count.equal(1.0).where(following, moved)
        self._slot(before, after, AVERAGE, p.tensor.name)

    @property
    def _is_dynamic(self) -> bool:
        return self.loss_scale is not None and self.loss_scale.dynamic

    def _adapt_scale(self, finite: Value) -> None:
        """Adds the update of a dynamic loss scale, given whether all gradients are finite."""
        assert self.loss_scale is not None and self.scale is not None
        self.finite = finite
        good = self._input(GOOD, np.int64, [])
        factor = self.builder.value(self.scale.tensor)
        following, count = self.loss_scale.following(factor, good, self.finite)
        self._add_slot(factor, following, SCALE, "")
        self._add_slot(good, count, GOOD, "")
        add_output(self.graph, self.finite.op("Not").cast(np.float32), SKIPPED)
        self.step.metrics.append(SKIPPED)

    def _clip(self, most: float, norm: Value) -> None:
        """Scales all gradients so that `norm`, over all gradients together, is at most `most`."""
        factor = (most / (norm + 1e-6)).op("Min", 1.0)
        self.gradients = {n: g * factor.cast(g.dtype) for n, g in self.gradients.items()}
        add_output(self.graph, norm, "gradient_norm")
        self.step.metrics.append("gradient_norm")

    def _input(self, name: str, dtype: Any, shape: Sequence[int]) -> Value:
        if name in {t.name for t in self.graph.inputs}:
            raise ModelError(
                f"the model has a tensor {name!r}, a name that the step needs; rename the tensor"
            )
        tensor = gs.Variable(name, np.dtype(dtype), list(shape))
        self.graph.inputs.append(tensor)
        return self.builder.value(tensor)

    def _slot(self, before: Value, after: Value, kind: str, of: str) -> None:
        """Adds a state pair that passes `after` to the next step, unless gradients are not
        finite."""
        self._add_slot(before, self._checked(before, after), kind, of)

    def _checked(self, before: Value, after: Value) -> Value:
        """Returns `after`; with a dynamic loss scale, `before` if gradients are not finite."""
        if self.finite is None:
            return after
        return self.builder.value(self.finite.tensor).where(after, before)

    def _add_slot(self, before: Value, after: Value, kind: str, of: str) -> None:
        name = before.tensor.name
        add_output(self.graph, after, f"{name}.next")
        default = getattr(before.tensor, "onnx_default", None) is not None
        self.step.slots.append(Slot(name, f"{name}.next", kind, of, default))


def _norm(x: Value, op: str, dtype: np.dtype[Any]) -> Value:
    """Returns the number to which `op` reduces a tensor."""
    x = x.wide() if x.rank else x.wide().reshape([1])
    return x.op(op, np.arange(x.rank), keepdims=0).cast(dtype)
