"""The calls behind `onnxpar grad` and `onnxpar train`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxpar.grad  # noqa: F401  (registers the gradient rules)
from onnxpar.base.arrays import Array
from onnxpar.errors import OnnxparError, StrategyError
from onnxpar.grad.trained import Weights
from onnxpar.ir.training_spec import Step
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.model.given_model import Source, model_file
from onnxpar.model.write_model import export_model, write_model
from onnxpar.pipeline.context import load_model
from onnxpar.pipeline.options import Options, manual_of
from onnxpar.runtime.trace import check_place
from onnxpar.strategy.strategy import Strategy
from onnxpar.trainer.data import Data
from onnxpar.trainer.loop import Record, Run, records
from onnxpar.trainer.trainer import Trainer, held_by_first
from onnxpar.training.backward import LossOptions
from onnxpar.training.loss_scale import LossScale
from onnxpar.training.manual import RankProgram
from onnxpar.training.optimizers import Optimizer, make_optimizer
from onnxpar.training.step import StepOptions, make_step


def grad(
    model: Source,
    output: str | os.PathLike[str],
    *,
    loss: str,
    optimizer: str | Optimizer | None,
    loss_of: str | None = None,
    class_axis: int | None = None,
    params: Sequence[str] = (),
    frozen: Sequence[str] = (),
    batch_norm: str | None = None,
    groups: int | None = None,
    precision: str | None = None,
    loss_scale: str | None = None,
    recompute: bool = False,
    clip_norm: float | None = None,
    accumulate: int = 1,
    untie: bool = False,
    dims: Mapping[str, int | str] | None = None,
    devices: int | None = None,
    mesh: str | Mesh | None = None,
    preset: str | None = None,
    strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None = None,
    **hyperparameters: Any,
) -> Step:
    """Writes the training step of a model: one ONNX graph of standard ops.

    model       a file, an onnx.ModelProto, or its bytes
    loss        softmax-cross-entropy, nll, mse or bce, or an output that is the loss itself
    optimizer   sgd, momentum, adam, adamw, lamb or adagrad, its hyperparameters by name
                (weight_decay, momentum, beta1 ...), or an Optimizer; "none" for gradients alone
    loss_of     the output that the loss is of, where the model has several
    class_axis  which dimension counts classes; the last by default, of four or more the second
    params      globs of weights: these are trained instead of those that are found
    frozen      globs of weights that are not trained
    batch_norm  of which samples BatchNormalizations take statistics: global, node or local; by
                default as the model says
    groups      parts of a batch with statistics of their own: number of hosts, or of ranks
    precision   float16 or bfloat16: what the model computes in; parameters keep their types
    loss_scale  what gradients are multiplied by on their way: "dynamic", a number, or "none"; by
                default dynamic in float16
    recompute   activations within blocks are computed again for the backward pass, not kept
    clip_norm   scales gradients so that the norm of all together is at most this
    accumulate  batches of the model's size that a step takes, one after the other
    untie       gives each node that reads a vector as its scale or bias a copy of its own, where
                several read one
    dims        sizes of symbolic dimensions, by symbol: numbers, or texts of other symbols
    preset      "manual" where the model is one rank's program: the step is one too, for so many
                devices or the mesh given (`"dp=2,tp=4"` or a Mesh), its tensors dealt as the
                strategy says
    Returns what the step's ports are, and warns of weights that it does not train as the network
    would that was exported. Errors: OnnxparError; nothing is left half-written.
    """
    if isinstance(optimizer, str):
        optimizer = make_optimizer(optimizer, **hyperparameters)
    wanted = LossOptions(
        loss,
        loss_of,
        class_axis,
        params,
        frozen,
        batch_norm,
        groups,
        precision,
        LossScale.parse(loss_scale, precision),
        recompute,
    )
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    how = Strategy.given(strategy)
    source = Options(devices=devices, mesh=mesh, preset=preset, strategy=how, dims=dims)
    options = StepOptions(optimizer, clip_norm, accumulate)
    with model_file(model) as path:
        made, _ = write_step(path, Path(output), wanted, options, source, untie)
    assert made.step is not None
    for caution in made.step.cautions:
        warnings.warn(caution, stacklevel=2)
    return made.step


def train(
    par: str | os.PathLike[str],
    data: str | os.PathLike[str] | Mapping[str, Array],
    *,
    lr: float,
    eval: str | os.PathLike[str] | Mapping[str, Array] | None = None,
    batch: int | None = None,
    epochs: int = 1,
    schedule: str = "constant",
    warmup: int = 0,
    seed: int = 0,
    shuffle: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 0,
    keep: int = 0,
    resume: bool = False,
    profile: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[Record]:
    """Runs a sharded training step over data, and returns what each step told: its loss, and at the
    end of an epoch the evaluation.

    par         the folder that `onnxpar.shard` wrote of a step of `grad`
    data        samples: an .npz file, or arrays by input name
    lr          the learning rate
    eval        samples to evaluate on after each epoch
    batch       samples of a step; an error where the step was made for another number
    schedule    of the learning rate: constant, linear or cosine, after `warmup` steps in which it
                rises
    seed        decides the order of samples, unless `shuffle` is off, and what is random in a step
    checkpoint  a folder that gets one at the end, and one after every so many steps, of which it
                keeps the newest; 0 keeps all. `resume` goes on from the newest that is whole. No
                other training writes there meanwhile
    profile     a file that gets the trace of all steps
    timeout     bounds every wait for a rank, in seconds
    log_dir     gets the output of each rank, under rank.N/

    A `Trainer` takes single steps. Errors: OnnxparError; DivergenceError where the loss is no
    number any more.
    """
    folder = None if checkpoint is None else Path(checkpoint)
    run = Run(epochs, lr, schedule, warmup, seed, shuffle, folder, every, keep, resume)
    if profile is not None:
        check_place(profile)
    how: dict[str, Any] = {"timeout": timeout, "log_dir": log_dir, "profile": profile is not None}
    with held_by_first(folder) as held, Trainer(par, held=held, **how) as trainer:
        samples = Data.given(data, trainer.data)
        samples.check_batch(batch)
        held_out = None if eval is None else Data.given(eval, trainer.data)
        told = list(records(trainer, samples, run, held_out))
        if profile is not None:
            trainer.session.end_profile(profile, warm_up=1)
    return told


def write_step(
    path: Path,
    output: Path,
    loss: LossOptions,
    options: StepOptions,
    source: Options,
    untie: bool = False,
) -> tuple[Model, Weights]:
    """Writes a training step; returns it, and what it trains and what not. `source` says what the
    model is, and its sizes; `untie` as for `grad`. Errors: OnnxparError."""
    if not output.parent.is_dir():
        raise OnnxparError(f"{output.parent}: no such folder for the output")
    if output.exists() and output.samefile(path):
        raise OnnxparError(f"{output}: is the model itself; choose another -o")
    manual = manual_of(source)
    if manual is None and (source.mesh or source.devices or source.strategy):
        raise StrategyError(
            "a mesh and a strategy are for a program per rank (--preset manual); the step of any "
            "other model is split by `onnxpar shard`"
        )
    model = load_model(path, source, for_training=True, untied=untie)
    weights = make_step(model, loss, options, None if manual is None else RankProgram(manual))
    write_model(export_model(model.graph, model.header), model.folder, output)
    return model, weights
