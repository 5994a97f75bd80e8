"""The training step as one graph: forward pass, backward pass, and the update of every parameter.

Inputs: the model's own, labels or targets, the learning rate, the parameters (with their current
values as defaults) and the optimizer's state. Outputs: the loss, the next parameters and the next
state. The metadata `onnxpar.training` of the model lists the role of each input and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxpar.base.pass_times import PassTimes
from onnxpar.graph.interchange import default_of
from onnxpar.graph.rewriting import Rewrite, Show, run_rewrites, unseen
from onnxpar.graph.training_spec import EVALUATION, METADATA, SEED, WEIGHT, Step
from onnxpar.load.load import Model
from onnxpar.training.accumulate import accumulate
from onnxpar.training.backward import BACKWARD, WHO
from onnxpar.training.cautions import cautions_of
from onnxpar.training.gradients.reverse import drop_unread
from onnxpar.training.gradients.trained import Weights
from onnxpar.training.gradients.value import Builder
from onnxpar.training.rewrite import add_output
from onnxpar.training.step_state import StepRequest, StepState
from onnxpar.training.update import (
    adapt_scale,
    add_norm,
    clip,
    divide_by_scale,
    output_gradients,
    update_parameters,
    update_statistics,
)


def make_step(
    model: Model, request: StepRequest, show: Show = unseen, times: PassTimes | None = None
) -> Weights:
    """Turns the graph of a model that was loaded for training into a training step, in place, and
    sets the model's `step`, which describes inputs and outputs. Returns the trained and the
    untrained weights. `show` sees each rewrite, and `times` collects its time. Errors:
    StrategyError, ModelError, PassError."""
    state = StepState(model, request)
    run_rewrites((*BACKWARD, *UPDATE), state, WHO, show, times)
    return state.weights


def describe(to: StepState) -> None:
    """Begins the description of the step, which has none of the model's outputs."""
    options = to.request.loss
    fed = [t.name for t in to.graph.inputs if default_of(t) is None]
    names = {what: str(tensor.name) for what, tensor in to.targets.made.items()}
    to.step = Step(
        seed=SEED if SEED in fed else None,
        precision=options.precision,
        **names,  # type: ignore[arg-type]
        full_batches=bool(to.running),
        data=[name for name in fed if name != SEED],
        batch=to.batch_dims,
        cautions=[*to.cautions, *cautions_of(to.model, to.weights)],
        gradient_scale=options.scale.initial if options.scale and not is_dynamic(to) else 1.0,
        sampled={to.sample.table: list(to.sample.sizes)} if to.sample else {},
    )
    to.graph.outputs = []


def output_loss(to: StepState) -> None:
    """Adds the output of the loss, and notes the gradients."""
    for name, gradient in to.gradients.items():
        of = to.step.rows if name in to.rows else to.step.gradients
        of[name] = gradient.tensor.name
    add_output(to.graph, to.loss, to.step.loss)
    to.builder = Builder(to.graph, "update")


def output_metrics(to: StepState) -> None:
    """Adds outputs for evaluations."""
    whole = to.request.update.accumulate * to.request.program.count
    shares = ((name, weight * (1 / whole)) for name, weight in to.weights_of.items())
    for kind, values in ((EVALUATION, to.evaluated.items()), (WEIGHT, shares)):
        for name, value in values:
            to.step.evaluation.append(f"{kind}.{name}")
            add_output(to.graph, value, to.step.evaluation[-1])


def drop_nodes(to: StepState) -> None:
    """Removes nodes that nothing reads."""
    if to.has_messages:
        drop_unread(to.graph)
    else:
        to.graph.cleanup(remove_unused_graph_inputs=False)


def write_description(to: StepState) -> None:
    """Writes the description of the step to the model."""
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


def is_dynamic(to: StepState) -> bool:
    """True if the scale of the loss follows the gradients."""
    scale = to.request.loss.scale
    return scale is not None and scale.dynamic


def _clips(to: StepState) -> bool:
    return to.request.update.clip_norm is not None


def _updates(to: StepState) -> bool:
    return to.request.update.optimizer is not None


UPDATE: Sequence[Rewrite[StepState]] = (
    Rewrite("describe-step", describe),
    Rewrite("accumulate", accumulate, lambda to: to.request.update.accumulate != 1),
    Rewrite("sum-over-ranks", lambda to: to.request.program.over_ranks(to)),
    Rewrite("output-loss", output_loss),
    Rewrite("divide-by-scale", divide_by_scale, lambda to: to.scale is not None),
    Rewrite("add-norm", add_norm, lambda to: is_dynamic(to) or _clips(to)),
    Rewrite("adapt-scale", adapt_scale, is_dynamic),
    Rewrite("update-statistics", update_statistics),
    Rewrite("clip-gradients", clip, _clips),
    Rewrite("output-gradients", output_gradients, lambda to: not _updates(to)),
    Rewrite("update-parameters", update_parameters, _updates),
    Rewrite("output-metrics", output_metrics),
    Rewrite("drop-unread", drop_nodes),
    Rewrite("write-description", write_description),
)
"""The rewrites of a graph with gradients to a training step, in order."""
