"""Writes a training step with the options of `grad`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from onnxpar.planner.option_entry import check_options, same_names, table, with_defaults
from onnxpar.planner.options import Options, manual_of
from onnxpar.planner.refuse_overwriting import refuse_overwriting
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
from onnxpar.training.optimizers import make_optimizer
from onnxpar.training.parameter_groups import Group
from onnxpar.training.sampled_classes import Sampling
from onnxpar.training.step import make_step
from onnxpar.training.step_state import StepRequest


def _values_of(options: GradOptions) -> dict[str, Any]:
    """Returns the values of all options, with defaults, and with an optimizer object in place of
    its name and hyperparameters. Errors: TypeError for an option that is missing; StrategyError."""
    own = {name: value for name, value in options.items() if name in table(GradOptions)}
    check_options(own, GradOptions, "grad")
    values = with_defaults(own, GradOptions)
    of_optimizer = {name: values[name] for name in HYPERPARAMETERS if values[name] is not None}
    of_optimizer |= {name: value for name, value in options.items() if name not in own}
    optimizer = values["optimizer"]
    if isinstance(optimizer, str):
        return {**values, "optimizer": make_optimizer(optimizer, **of_optimizer)}
    if of_optimizer:
        names = ", ".join(sorted(of_optimizer))
        remedy = f"give them to {type(optimizer).__name__}(...)" if optimizer else "leave them out"
        raise StrategyError(
            f"{names}: hyperparameters go with an optimizer that is given by name; {remedy}, or "
            "correct the name of the argument"
        )
    return values


def _request_of(values: Mapping[str, Any]) -> StepRequest:
    """Returns the request for `make_step` from the values of options. Errors: StrategyError."""
    margin = values["margin"], values["logit_scale"], values["interclass_filtering_threshold"]
    of_loss = {
        "margin": Margin(*margin),
        "class_weights": numbers_of("--class-weights", values["class_weights"]),
        "pos_weight": numbers_of("--pos-weight", values["pos_weight"]),
    }
    own = {
        "output": values["loss_of"],
        "settings": LossSettings(**same_names(LossSettings, values) | of_loss),
        "batch_norm": BatchNorm.parse(values["batch_norm"], values["groups"]),
        "scale": LossScale.parse(values["loss_scale"], values["precision"]),
        "sampling": Sampling(values["sample_rate"], values["sample_groups"]),
        "padding_idx": values["padding_idx"] or {},
        "batch_dims": values["batch_dim"] or {},
        "groups": [Group.parse(text) for text in values["group"]],
    }
    return StepRequest(**same_names(StepRequest, values) | own)


def _source_of(values: Mapping[str, Any], times: PassTimes | None) -> Options:
    """Returns the options with which the model is loaded: its sizes and, if it is a program for one
    rank, its mesh and strategy. Errors: OnnxparError."""
    mesh, strategy = Mesh.from_argument(values["mesh"]), Strategy.from_argument(values["strategy"])
    use_libraries(values["libraries"])
    own = {name: values[name] for name in ("devices", "preset", "dims")}
    return Options(mesh=mesh, strategy=strategy, times=times or PassTimes(), **own)


def write_step(
    path: Path,
    output: Path,
    options: GradOptions,
    dump: str | os.PathLike[str] | None = None,
    times: PassTimes | None = None,
) -> tuple[Model, Weights]:
    """Writes a training step of the model `path` to the file `output`. Returns the step, and its
    trained and untrained weights.

    options  as in `grad`
    dump     folder for the model as text after each rewrite
    times    collects the wall time of each rewrite

    Errors: OnnxparError; TypeError for an option that is missing.
    """
    values = _values_of(options)
    request, source = _request_of(values), _source_of(values, times)
    if not output.parent.is_dir():
        raise OnnxparError(f"{output.parent}: no such folder for the output")
    refuse_overwriting({"model": path, "output": output, "dump": dump})
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
    model = load_model(path, source, for_training=True, untied=values["untie"], show=shows[0])
    if manual is not None:
        request = replace(request, program=RankProgram(manual))
    weights = make_step(model, request, shows[1], source.times)
    assert model.step is not None
    with source.times.of(WRITE_GRAPH):
        proto = export_model(model.graph, model.header)
        source_of = values["weights"]
        more = () if source_of is None else (read_values(source_of, model.step, proto),)
        write_model(proto, model.folder, output, *more)
    return model, weights
