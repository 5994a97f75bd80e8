"""Writes a training step as `grad` asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxpar.training.gradients  # noqa: F401  (registers the gradient rules)
from onnxpar.base.custom_ops import use_libraries
from onnxpar.base.errors import OnnxparError, StrategyError
from onnxpar.base.pass_times import WRITE_GRAPH, PassTimes
from onnxpar.graph.rewriting import Show, unseen
from onnxpar.graph.write_model import export_model, write_model
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.planner.context import load_model
from onnxpar.planner.option import check_given, table, with_defaults
from onnxpar.planner.options import Options, manual_of
from onnxpar.planner.overwritten import refuse_overwriting
from onnxpar.planner.rewrite_dump import LOADING, STEP, RewriteDump
from onnxpar.strategy.strategy import Strategy
from onnxpar.trainer.grad_options import HYPERPARAMETERS, GradOptions
from onnxpar.trainer.import_weights import read_values
from onnxpar.training.batch_norm import BatchNorm
from onnxpar.training.gradients.trained import Weights
from onnxpar.training.loss_scale import LossScale
from onnxpar.training.loss_settings import LossSettings, numbers_of
from onnxpar.training.manual import RankProgram
from onnxpar.training.margins import Margin
from onnxpar.training.optimizer import Optimizer
from onnxpar.training.optimizers import make_optimizer
from onnxpar.training.parameter_groups import Group
from onnxpar.training.program import Program
from onnxpar.training.sampling import Sampling
from onnxpar.training.step import make_step
from onnxpar.training.step_state import LossOptions, StepRequest, UpdateOptions


@dataclass(frozen=True)
class GradRequest:
    """What a user asks of `grad`.

    source  the sizes of the model and, if it is one rank's program, its mesh and strategy
    untie   give each node that reads a shared vector a copy of its own
    values  a file or folder with the values of weights
    """

    loss: LossOptions
    update: UpdateOptions
    source: Options
    untie: bool
    values: str | os.PathLike[str] | None

    @classmethod
    def of(cls, asked: GradOptions) -> GradRequest:
        """Reads the options of `grad`. Errors: TypeError for options that are missing;
        StrategyError."""
        known = {name: value for name, value in asked.items() if name in table(GradOptions)}
        check_given(known, GradOptions, "grad")
        values = with_defaults(known, GradOptions)
        chosen = {name: values[name] for name in HYPERPARAMETERS if values[name] is not None}
        chosen |= {name: value for name, value in asked.items() if name not in known}
        optimizer = _optimizer_of(values["optimizer"], chosen)
        loss = _loss_of(values)
        mesh, strategy = values["mesh"], Strategy.given(values["strategy"])
        mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        use_libraries(values["libraries"])
        source = Options(values["devices"], mesh, values["preset"], strategy, dims=values["dims"])
        groups = [Group.parse(text) for text in values["group"]]
        own = {name: values[name] for name in ("clip_norm", "accumulate", "decay_all", "ema")}
        update = UpdateOptions(optimizer, groups=groups, **own)
        return cls(loss, update, source, values["untie"], values["weights"])


def _optimizer_of(given: str | Optimizer | None, chosen: Mapping[str, Any]) -> Optimizer | None:
    """Returns the optimizer, given as such or by name, with hyperparameters."""
    if isinstance(given, str):
        return make_optimizer(given, **chosen)
    if chosen:
        names = ", ".join(sorted(chosen))
        remedy = f"give them to {type(given).__name__}(...)" if given else "leave them out"
        raise StrategyError(
            f"{names}: hyperparameters go with an optimizer that is given by name; {remedy}, or "
            "correct the name of the argument"
        )
    return given


def _loss_of(values: Mapping[str, Any]) -> LossOptions:
    """Returns the options of the loss and of the backward pass."""
    return LossOptions(
        values["loss"],
        values["loss_of"],
        LossSettings(
            values["class_axis"],
            Margin(
                values["margin"], values["logit_scale"], values["interclass_filtering_threshold"]
            ),
            values["label_smoothing"],
            numbers_of("--class-weights", values["class_weights"]),
            values["delta"],
            numbers_of("--pos-weight", values["pos_weight"]),
        ),
        batch_norm=BatchNorm.parse(values["batch_norm"], values["groups"]),
        scale=LossScale.parse(values["loss_scale"], values["precision"]),
        sampling=Sampling(values["sample_rate"], values["sample_groups"]),
        padding_idx=values["padding_idx"] or {},
        batch_dims=values["batch_dim"] or {},
        **{name: values[name] for name in _AS_GIVEN},
    )


_AS_GIVEN = (
    *("params", "frozen", "precision", "recompute", "lazy", "recompute_nodes"),
    "stop_gradient",
)
"""The options that `LossOptions` takes as they are."""


def write_step(
    path: Path,
    output: Path,
    request: GradRequest,
    dump: str | os.PathLike[str] | None = None,
    times: PassTimes | None = None,
) -> tuple[Model, Weights]:
    """Writes a training step; returns the step, and its trained and untrained weights. `dump` is a
    folder for the model after each rewrite, `times` collects wall times. Errors: OnnxparError."""
    if not output.parent.is_dir():
        raise OnnxparError(f"{output.parent}: no such folder for the output")
    refuse_overwriting({"model": path, "output": output, "dump": dump})
    source, values, times = request.source, request.values, times or PassTimes()
    source = replace(source, times=times)
    if source.strategy is not None and source.strategy.context:
        raise StrategyError(
            f"{source.strategy.source}: context is for `onnxpar shard`, which splits the step; "
            "give a strategy without it"
        )
    manual = manual_of(source)
    if manual is None and (source.mesh or source.devices or source.strategy):
        raise StrategyError(
            "a mesh and a strategy are for a program per rank (--preset manual); for any other "
            "model, give them to `onnxpar shard`, which splits the step"
        )
    shows: Sequence[Show] = (unseen, unseen)
    if dump is not None:
        shows = [RewriteDump(Path(dump) / name) for name in (LOADING, STEP)]
    model = load_model(path, source, for_training=True, untied=request.untie, show=shows[0])
    program = Program() if manual is None else RankProgram(manual)
    weights = make_step(model, StepRequest(request.loss, request.update, program), shows[1], times)
    assert model.step is not None
    with times.of(WRITE_GRAPH):
        proto = export_model(model.graph, model.header)
        given = () if values is None else (read_values(values, model.step, proto),)
        write_model(proto, model.folder, output, *given)
    return model, weights
